"""What a sandbox and a session have in common: one way to execute, three to call it, and an end."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from ..policies.closing import Closing
from ..policies.languages import PYTHON
from ..runner.capture import OnOutput
from ..runner.performance import NEVER
from ..runner.result import SandboxResult

if TYPE_CHECKING:
    from .run import Run


class Executing(Closing):
    """Executes programs until it is closed; a context manager."""

    @property
    def language(self) -> str:
        """That of a program of which none is told."""
        return PYTHON

    @abstractmethod
    def execute(
        self, code: str | bytes, language: str = "python", *, on_output: OnOutput | None = None,
        cancel: int = NEVER, **given: Any,
    ) -> SandboxResult:  # fmt: skip
        """Run `code` and return what came of it."""

    @abstractmethod
    def close(self) -> None:
        """End what runs, and leave nothing behind; closing twice is fine."""

    async def aexecute(
        self, code: str | bytes, language: str | None = None, **given: Any
    ) -> SandboxResult:
        """`execute` for asyncio callers; cancelling the task cancels the execution."""
        from .run import aexecute  # asyncio takes 40 ms to import

        return await aexecute(self.execute, code, language or self.language, **given)

    def start(self, code: str | bytes, language: str | None = None, **given: Any) -> "Run":
        """Start `execute` in the background and return a handle to it."""
        from .run import Run

        return Run(self.execute, code, language or self.language, **given)
