"""`FleetSession`: a session on one node of a fleet."""

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from ...policies.errors import (
    ClosedError,
    InternalError,
    LaunchError,
    NodeLost,
    PolicyError,
    SessionLost,
    SessionNodeLost,
)
from ...policies.policy import Limits
from ...runner.capture import OnOutput
from ...runner.concurrency import NEVER
from ...runner.result import SandboxResult
from ..sandbox.parameters import CallArguments, TerminalArguments
from ..sandbox.remote.failures import error_of
from ..sandbox.remote.frames import Failure, ForkSession, Opened
from ..sandbox.remote.requests import Requests
from ..sandbox.remote.session import AttachedSession
from ..sandbox.session import Session

if TYPE_CHECKING:
    from ..sandbox.ports.exposed import ExposedPort
    from ..sandbox.terminal import Terminal

_R = TypeVar("_R", bound=msgspec.Struct)


class SessionsFleet(Protocol):
    """What a session needs of its fleet."""

    def ask_node(self, node: str, tenant: str, request: Any, /) -> Any: ...

    def room_for_session(self, tenant: str, /) -> AbstractContextManager[None]: ...

    def keep_session(self, session: "FleetSession", key: str, /) -> None: ...

    def forget_session(self, key: str, /) -> None: ...


class NodeRequests(Requests):
    """Requests to one node of a fleet, on behalf of one tenant."""

    def __init__(self, fleet: SessionsFleet, node: str, tenant: str, session: str) -> None:
        self._fleet, self._node, self._tenant, self._session = fleet, node, tenant, session

    def ask(
        self, request: msgspec.Struct, kind: type[_R], on_output: OnOutput | None = None,
        cancel: int = NEVER,
    ) -> _R:  # fmt: skip
        """Return the reply; the call goes on if `cancel` is readable.  Raises SessionNodeLost."""
        if on_output is not None:
            raise PolicyError("on_output: not available in a fleet")
        try:
            reply = self._fleet.ask_node(self._node, self._tenant, request)
        except NodeLost as error:
            raise SessionNodeLost(
                f"the session is lost with its node {self._node}: {error.what}",
                "open another one",
                node=self._node,
            ) from None
        if isinstance(reply, Failure):
            failure = error_of(reply)
            if isinstance(failure, SessionLost):  # such as one that was idle for too long
                self._fleet.forget_session(self._session)
            raise failure
        if not isinstance(reply, kind):
            raise InternalError(f"the node answered with {type(reply).__name__}")
        return reply


class FleetSession(AttachedSession):
    """A session whose cell is on the node `node`; made by `Fleet.session`.

    If the node is lost `lost` says so, and every call raises SessionNodeLost.
    """

    def __init__(
        self, fleet: SessionsFleet, node: str, tenant: str, opened: Opened, limits: Limits
    ) -> None:
        super().__init__(NodeRequests(fleet, node, tenant, opened.session), opened, limits)
        self.node = node
        self.tenant = tenant
        self._fleet = fleet

    @property
    def lost(self) -> str:
        try:
            return super().lost
        except NodeLost as error:
            return error.what

    @property
    def expired(self) -> str:
        try:
            return super().expired
        except NodeLost:
            return ""

    def _execute(
        self, given: CallArguments, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        if on_output is not None:
            raise PolicyError("on_output: not available in a fleet")
        return super()._execute(given, None, cancel)

    def expose(
        self, port: int, *, path: str | os.PathLike[str] | None = None, host_port: int | None = None
    ) -> "ExposedPort":
        raise PolicyError(
            "expose: not available in a fleet", "a port stays on the host of its cell"
        )

    def _terminal(self, given: TerminalArguments) -> "Terminal":
        raise PolicyError("terminal: not available in a fleet", "use run or start_command")

    def branch(
        self, n: int = 1, reseed: bool = False, *, replay: bool = True
    ) -> tuple[Session, ...]:
        raise PolicyError(
            "branch: not available in a fleet", "fork() replays the calls of the session"
        )

    def pause(self) -> str:
        raise PolicyError(
            "pause: not available in a fleet", "the state would stay on the host of its cell"
        )

    def fork(self) -> Session:
        with self._fleet.room_for_session(self.tenant):
            opened = self._requests.ask(ForkSession(self._key), Opened)
            branch = FleetSession(self._fleet, self.node, self.tenant, opened, self._limits)
            self._fleet.keep_session(branch, opened.session)
            return branch

    def close(self) -> None:
        """End the session; harmless if it or its node has ended."""
        try:
            super().close()
        except (NodeLost, ClosedError, LaunchError):
            return
        finally:
            self._fleet.forget_session(self._key)
