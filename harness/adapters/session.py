"""`AdapterSession`: the sandbox and the session behind one object of a framework, made when needed."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ...policies.closing import Closing
from ...policies.errors import ClosedError, PolicyError
from ...runner.result import SandboxResult
from ..sandbox.parameters import CommandArguments
from ..sandbox.run import in_thread
from ..sandbox.sandbox import Sandbox
from ..sandbox.session import Session
from .commands import CapturedCommand, CommandOutput
from .files import CellFiles

if TYPE_CHECKING:
    from ..sandbox.sandbox_arguments import PolicyLike

_MAX_OUTPUT_BYTES = 10 * 1024 * 1024
_T = TypeVar("_T")


class AdapterSession(Closing):
    """One session of a Python cell, for programs, commands and files.  Safe from many threads.

    `sandbox`: the sandbox to use, which the caller closes; by default one of its own, made of `policy`,
    default the profile workshop, and `options`, any other arguments of `Sandbox`.
    Nothing is made before the first use.  Every method raises SessionLost once the cell has ended, and
    ClosedError after `close`; `restart` begins anew.
    """

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        policy: "PolicyLike | None" = None,
        **options: Any,
    ) -> None:
        if sandbox is not None and (policy is not None or options):
            named = ", ".join((*(["policy"] if policy is not None else []), *options))
            raise PolicyError(
                f"{named}: cannot be combined with sandbox=", "give them to that Sandbox"
            )
        self._given = sandbox
        self._options = {"policy": "workshop" if policy is None else policy, **options}
        self._lock = threading.RLock()
        self._own: Sandbox | None = None
        self._session: Session | None = None
        self._is_closed = False
        self.files = CellFiles(lambda: self.session, lambda: self.sandbox.policy.limits)

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox, made if this is its first use."""
        with self._lock:
            if self._is_closed:
                raise ClosedError("the session of this adapter was closed")
            if self._given is not None:
                return self._given
            if self._own is None:
                self._own = Sandbox(**self._options)
            return self._own

    @property
    def session(self) -> Session:
        """The session, opened if this is its first use."""
        with self._lock:
            sandbox = self.sandbox
            if self._session is None:
                self._session = sandbox.session()
            return self._session

    @property
    def is_open(self) -> bool:
        """Whether the session was opened and has not ended."""
        with self._lock:
            return self._session is not None and not self._session.lost

    def execute(self, code: str, **given: Any) -> SandboxResult:
        """Run a Python program in the session; the arguments are those of `Session.execute`."""
        return self.session.execute(code, **given)

    def run(
        self,
        command: Sequence[str] | str,
        *,
        shell: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        is_merged: bool = False,
        max_output_bytes: int = _MAX_OUTPUT_BYTES,
    ) -> CommandOutput:
        """Run a command to its end, while other methods and other commands can go on in the session.

        The arguments are those of `Session.run`, whose `timeout` is at most and by default
        `limits.wall_seconds`.  `is_merged`: standard error goes where standard output does.
        `max_output_bytes`: how much of the beginning of each stream is returned.  The cell keeps the
        output in /tmp meanwhile, so what a command can write is bounded by `limits.workspace_bytes`.
        """
        return self._run(self._command(locals()))

    async def arun(
        self,
        command: Sequence[str] | str,
        *,
        shell: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        is_merged: bool = False,
        max_output_bytes: int = _MAX_OUTPUT_BYTES,
    ) -> CommandOutput:
        """`run` for asyncio; cancelling the task kills the command and its process group."""
        captured = self._command(locals())
        try:
            return await in_thread(lambda: self._run(captured))
        except asyncio.CancelledError:
            captured.cancel()
            raise

    def _command(self, given: dict[str, Any]) -> CapturedCommand:
        """Return a command, from the `locals()` of its method."""
        arguments = CommandArguments.of({"trace_id": None, "packages": (), **given})
        return CapturedCommand(
            arguments, lambda: self.session, self.files,
            is_merged=given["is_merged"], max_output_bytes=given["max_output_bytes"],
        )  # fmt: skip

    def _run(self, captured: CapturedCommand) -> CommandOutput:
        return captured.run(self.sandbox.policy.limits.wall_seconds)

    async def in_thread(self, function: Callable[[], _T]) -> _T:
        """Call a method of this object in a thread of its own: `await each.in_thread(lambda: ...)`."""
        return await in_thread(function)

    def restart(self) -> None:
        """End the session; the next use opens another one, without its state."""
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            own, self._own = self._own, None
        self.restart()
        if own is not None:
            own.close()

    async def aclose(self) -> None:
        """`close` for asyncio, in a thread."""
        await in_thread(self.close)
