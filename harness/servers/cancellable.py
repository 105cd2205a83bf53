"""`CancellableExecuting`: executions that end with the request of a client."""

import select
from collections.abc import Iterator
from contextlib import contextmanager

from ...runner.capture import OnOutput
from ...runner.concurrency import NEVER
from ...runner.result import SandboxResult
from ..sandbox.executing import Executing
from ..sandbox.parameters import CallArguments


class CancellableExecuting(Executing):
    """Executes through another Executing; an execution also ends once `stop` is readable.

    `on_output` gets its output in place of the caller's.
    """

    def __init__(self, executing: Executing, stop: int, on_output: OnOutput | None = None) -> None:
        self._executing = executing
        self._stop = stop
        self._on_output = on_output

    def has_tool(self, name: str) -> bool:
        return self._executing.has_tool(name)

    def _execute(
        self, given: CallArguments, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        """Carry out a call; it ends with the request, or once `cancel` is readable."""
        with _either(cancel, self._stop) as stop:
            return self._executing._execute(given, self._on_output or on_output, stop)

    def close(self) -> None:
        """Close the wrapped Executing."""
        self._executing.close()


@contextmanager
def _either(first: int, second: int) -> Iterator[int]:
    """Give a descriptor that is readable once either of two is."""
    if first == NEVER:
        yield second
        return
    with select.epoll() as both:
        both.register(first, select.EPOLLIN)
        both.register(second, select.EPOLLIN)
        yield both.fileno()
