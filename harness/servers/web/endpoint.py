"""`Endpoint`: a route with its types, from which the application and the OpenAPI document are made."""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..client_quota import HeldAmount

if TYPE_CHECKING:
    from .state import WebState


class ContentAnswer(NamedTuple):
    """An answer that is a file."""

    data: bytes
    name: str


class ServerEvent(NamedTuple):
    """One event of a stream; `name` is empty where the type is within `data`."""

    name: str
    data: msgspec.Struct | Mapping[str, Any] | bytes  # the last is JSON


class WebCall(NamedTuple):
    """A request that was admitted and decoded.

    `stop` is a descriptor that becomes readable once the client has disconnected: the work should end
    then.  `traceparent` is that of the request, if it has one.  `answer_bytes` counts the bytes of its
    answer until the client has read it: a handler that reads a file counts them first.
    """

    client: str
    state: "WebState"
    path: Mapping[str, str]
    query: Any
    body: Any
    stop: int
    traceparent: str
    answer_bytes: HeldAmount

    @property
    def id(self) -> str:
        """The owner of what the call opens: all holders of a token are one."""
        return self.client

    @property
    def is_operator(self) -> bool:
        """Tell whether the client may see and decide for all clients."""
        return self.state.tokens.is_operator(self.client)


Handler = Callable[[WebCall], Any]  # blocks, in a thread; returns a struct, None or a ContentAnswer
StreamHandler = Callable[[WebCall], AsyncIterator[ServerEvent]]  # in the event loop


class Endpoint(NamedTuple):
    """One method of one path.

    `takes` is the type of the body: a struct for JSON, `bytes` for a file, None for no body.  `gives`
    is that of the answer.  With `stream` the answer is a stream of events, whose last one is a `gives`.
    `executes`: it counts as an execution.  `needs_operator`: only operators may call it.
    """

    method: str
    path: str
    summary: str
    gives: Any = None
    takes: Any = None
    query: type[msgspec.Struct] | None = None
    handler: Handler | None = None
    stream: StreamHandler | None = None
    status: int = 200
    executes: bool = False
    needs_operator: bool = False

    @property
    def name(self) -> str:
        """The operationId."""
        words = [each for each in self.path.split("/") if each and each != "v1"]
        parts = [each.strip("{}").partition(":")[0].replace("-", "_") for each in words]
        return "_".join((self.method.lower(), *parts))
