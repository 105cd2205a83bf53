"""`Requests`: sends requests to a daemon and checks the type of each reply."""

from typing import TypeVar

import msgspec

from ....policies.errors import InternalError
from ....policies.policy import Limits
from ....runner.capture import OnOutput
from ....runner.concurrency import NEVER
from ....runner.result import SandboxResult
from ..parameters import CallArguments
from .arguments import packed, result_of
from .connections import ConnectionPool
from .frames import Executed

_R = TypeVar("_R", bound=msgspec.Struct)


class Requests:
    """Requests to one daemon; safe from many threads, as its connections are."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool

    def ask(
        self, request: msgspec.Struct, kind: type[_R], on_output: OnOutput | None = None,
        cancel: int = NEVER,
    ) -> _R:  # fmt: skip
        reply = self.pool.ask(request, on_output, cancel)
        if not isinstance(reply, kind):
            raise InternalError(f"the daemon answered with {type(reply).__name__}")
        return reply

    def execute(
        self, given: CallArguments, on_output: OnOutput | None, cancel: int, limits: Limits,
        session: str = "",
    ) -> SandboxResult:  # fmt: skip
        request = packed(given, limits, session, stream=on_output is not None)
        return result_of(self.ask(request, Executed, on_output, cancel))
