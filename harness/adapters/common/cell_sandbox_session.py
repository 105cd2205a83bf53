"""`HostFunctions`: functions of a framework that programs in cells call, through the broker.

The error for an adapter whose framework is not installed.

`AdapterSession`: the sandbox and the session behind one object of a framework, made when needed.

Commands of an adapter: in the background of a session, with output that is complete.

`OpenProcesses`: commands that go on after the call of a model that started them.
"""

import asyncio
import contextlib
import itertools
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import msgspec

from ....policies.errors import CellwrightError, ClosedError, PolicyError, ToolNotFound
from ....policies.extras import how_to_install
from ....runner.requests.result import SandboxResult
from ...sandbox.calls.background import in_thread
from ...sandbox.calls.call_request import as_bytes
from ...sandbox.calls.executing import AsyncClosing
from ...sandbox.calls.session_commands import argv_of
from ...sandbox.parameters import CommandArguments, CommandOptions
from ...sandbox.programs.background_processes import BackgroundProcess
from ...sandbox.programs.terminal import Terminal
from ...sandbox.sandbox import Sandbox
from ...sandbox.sessions.session import Session
from ...schemas.spec import ToolOwner, ToolSpec, ToolState, normalised
from ...tools.tool import Caller, Tool
from .session_files import CellFiles

if TYPE_CHECKING:
    from ...sandbox.sandbox_arguments import PolicyLike


class HostFunctions:
    """A catalogue of functions that may change between two calls of a session."""

    def __init__(self) -> None:
        self._tools: dict[str, Tool] = {}
        self._is_listed: dict[str, bool] = {}
        self._revision = 0

    def add(
        self, name: str, function: Callable[[dict[str, Any]], Any], *,
        description: str = "", parameters: dict[str, Any] | None = None, is_listed: bool = True,
    ) -> str:  # fmt: skip
        """Offer a function, which gets its arguments as one mapping; return the name of the tool.

        A program can find a tool by its name only, and not by a search, if it is not listed.
        Raises ToolInvalid for a name that a tool cannot have.
        """
        spec = ToolSpec(
            name=normalised(name), description=description, parameters=parameters or {},
            state=ToolState.TRUSTED, owner=ToolOwner.DEVELOPER,
        )  # fmt: skip

        def perform(arguments: dict[str, Any], caller: Caller) -> Any:
            return function(arguments)

        self._tools[spec.name] = Tool(spec, perform)
        self._is_listed[spec.name] = is_listed
        self._revision += is_listed
        return spec.name

    def remove(self, name: str) -> None:
        """Offer a function no longer."""
        self._revision += self._is_listed.pop(name)
        del self._tools[name]

    def clear(self) -> None:
        """Offer nothing."""
        for name in list(self._tools):
            self.remove(name)

    def get(self, name: str) -> Tool:
        found = self._tools.get(name)
        if found is None:
            raise ToolNotFound(f"there is no tool {name[:80]!r}", tool=name)
        return found

    def specs(self) -> Iterable[ToolSpec]:
        return [tool.spec for name, tool in self._tools.items() if self._is_listed[name]]

    def revision(self) -> int:
        return self._revision


def missing(framework: str, extra: str, error: ImportError) -> PolicyError:
    """Return the error that names what to install."""
    return PolicyError(f"{framework} cannot be imported: {error}", how_to_install(extra))


_TIMED_OUT = 124  # timeout(1)
_FIRST_TURN, _LONGEST_TURN = 0.05, 1.0  # seconds; between two turns other calls of the session run
# $0 is the path of the command's files. exec replaces the shell, and exits with 127 or 126 on failure.
_LINE = 'exec "$@" <{stdin} >"$0.out" 2>{stderr}'


class CommandOutput(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended, and the beginning of its output.

    exit_code: as `CommandResult` has it; 124 if it took too long
    stdout, stderr: the bytes that it wrote, at most as many as were asked for
    sizes: how many bytes it wrote to the two streams
    """

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    sizes: tuple[int, int] = (0, 0)
    timed_out: bool = False

    @property
    def is_truncated(self) -> bool:
        """Whether it wrote more to a stream than is here."""
        return self.sizes[0] > len(self.stdout) or self.sizes[1] > len(self.stderr)

    @property
    def text(self) -> tuple[str, str]:
        """Both streams as text, with U+FFFD for bytes that are not UTF-8."""
        return self.stdout.decode(errors="replace"), self.stderr.decode(errors="replace")


class CapturedCommand:
    """One command, whose output goes to files in /tmp of the cell until it has ended."""

    def __init__(
        self,
        given: CommandArguments,
        session: Callable[[], Session],
        files: CellFiles,
        *,
        is_merged: bool,
        max_output_bytes: int,
    ) -> None:
        if given.timeout is not None and not 0 < given.timeout < math.inf:
            raise PolicyError(f"timeout: must be > 0 and finite, got {given.timeout!r}")
        self._given, self._session, self._files = given, session, files
        self._argv = argv_of(msgspec.structs.replace(given, user=None))
        self._stdin = None if given.stdin is None else as_bytes("stdin", given.stdin)
        self._is_merged, self._max_output_bytes = is_merged, max_output_bytes
        self._path = f"/tmp/.cellwright-{secrets.token_hex(8)}"  # noqa: S108 - of the cell
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Have `run` kill the command; it does so within a second."""
        self._cancelled.set()

    def run(self, wall_seconds: float) -> CommandOutput:
        """Run it to its end, or for at most `wall_seconds`, and return its output."""
        process = self._started()
        try:
            timed_out = not self._wait(process, min(wall_seconds, self._given.timeout or math.inf))
        except BaseException:
            self._kill(process)
            raise
        if timed_out:
            process.kill()
        code = process.wait(_LONGEST_TURN * 10)
        return self._output(process, _TIMED_OUT if timed_out else code, timed_out=timed_out)

    def _started(self) -> BackgroundProcess:
        stdin = "/dev/null"
        if self._stdin is not None:
            self._files.write(f"{self._path}.in", self._stdin)
            stdin = '"$0.in"'
        line = _LINE.format(stdin=stdin, stderr="&1" if self._is_merged else '"$0.err"')
        argv = ["/bin/sh", "-c", line, self._path, *self._argv]
        return self._session().start_command(
            argv, cwd=self._given.cwd, env=self._given.env, user=self._given.user
        )

    def _wait(self, process: BackgroundProcess, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        turn = _FIRST_TURN
        while not self._cancelled.is_set():
            left = max(0.0, deadline - time.monotonic())
            with contextlib.suppress(TimeoutError):
                process.wait(min(turn, left))
                return True
            if left <= turn:
                return False
            turn = min(2 * turn, _LONGEST_TURN)
        return False

    def _kill(self, process: BackgroundProcess) -> None:
        with contextlib.suppress(CellwrightError, TimeoutError):
            process.kill()
            self._output(process, 0)

    def _output(
        self, process: BackgroundProcess, exit_code: int, *, timed_out: bool = False
    ) -> CommandOutput:
        if self._stdin is not None:
            self._files.remove(f"{self._path}.in")
        paths = (f"{self._path}.out", f"{self._path}.err")
        (stdout, written), (stderr, errors) = self._files.take(paths, self._max_output_bytes)
        if written < 0:  # the shell did not start, and its pipe has the reason
            stderr = process.read()
            errors = len(stderr)
            if self._is_merged:
                stdout, stderr, written, errors = stderr, b"", errors, 0
        return CommandOutput(
            exit_code=exit_code, stdout=stdout, stderr=stderr,
            sizes=(max(0, written), max(0, errors)), timed_out=timed_out,
        )  # fmt: skip


_MAX_OUTPUT_BYTES = 10 * 1024 * 1024
_T = TypeVar("_T")


class AdapterSession(AsyncClosing):
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
    def root(self) -> str | None:
        """The user of commands that may read and write every file; None without an image."""
        return "root" if self.sandbox.plan.image else None

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
        self, command: Sequence[str] | str, *, is_merged: bool = False,
        max_output_bytes: int = _MAX_OUTPUT_BYTES, **options: Unpack[CommandOptions],
    ) -> CommandOutput:  # fmt: skip
        """Run a command to its end, while other methods and other commands can go on in the session.

        The options are those of `Session.run`, whose `timeout` is at most and by default
        `limits.wall_seconds`. `is_merged`: standard error goes where standard output does.
        `max_output_bytes`: how much of the beginning of each stream is returned. The cell keeps the
        output in /tmp meanwhile, so `limits.workspace_bytes` bounds the output of a command.
        """
        given = CommandArguments.of("run", command=command, **options)
        return self._run(self._captured(given, is_merged, max_output_bytes))

    async def arun(
        self, command: Sequence[str] | str, *, is_merged: bool = False,
        max_output_bytes: int = _MAX_OUTPUT_BYTES, **options: Unpack[CommandOptions],
    ) -> CommandOutput:  # fmt: skip
        """`run` for asyncio; cancelling the task kills the command and its process group."""
        given = CommandArguments.of("arun", command=command, **options)
        captured = self._captured(given, is_merged, max_output_bytes)
        try:
            return await in_thread(lambda: self._run(captured))
        except asyncio.CancelledError:
            captured.cancel()
            raise

    def _captured(
        self, given: CommandArguments, is_merged: bool, max_output_bytes: int
    ) -> CapturedCommand:
        return CapturedCommand(
            given, lambda: self.session, self.files, is_merged=is_merged,
            max_output_bytes=max_output_bytes,
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


_MOST_OPEN = 48  # a session has at most 64 background processes
_MOST_BYTES = 1024 * 1024  # bytes in one answer; the next answer has the rest
_TURN_SECONDS = 1.0


class _Open:
    """One process, which one task at a time may ask."""

    def __init__(self, process: BackgroundProcess | Terminal) -> None:
        self.process = process
        self.lock = asyncio.Lock()

    async def collected(self, seconds: float) -> tuple[bytes, int | None]:
        """Return its output of at most `seconds`, and its exit code if it has ended."""
        deadline = time.monotonic() + seconds
        parts: list[bytes] = []
        code = None
        while sum(map(len, parts)) < _MOST_BYTES:
            left = deadline - time.monotonic()
            parts.append(await self._read(max(0.0, left)))
            if not parts[-1]:
                code = await self._exit_code(max(0.0, min(left, _TURN_SECONDS)))
            if code is not None or left <= 0:
                break
        return b"".join(parts), code

    async def _read(self, seconds: float) -> bytes:
        with contextlib.suppress(TimeoutError):  # raised by a terminal
            return await self.process.aread(timeout=seconds)
        return b""

    async def _exit_code(self, seconds: float) -> int | None:
        with contextlib.suppress(TimeoutError):
            return await self.process.await_end(timeout=seconds)
        return None

    async def end(self) -> None:
        with contextlib.suppress(CellwrightError):  # the session is gone, and the process with it
            await self.process.akill()
        if isinstance(self.process, Terminal):
            await self.process.aclose()


class OpenProcesses:
    """The processes of one session that have not ended, by numbers.

    `write` and `update` raise KeyError for an unknown number, or one whose end was reported.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count(1)

    async def start(
        self,
        session: Session,
        argv: Sequence[str],
        cwd: str,
        env: Mapping[str, str],
        *,
        is_terminal: bool,
    ) -> int:
        """Start a command at a terminal, or without input; the oldest of too many ends for it."""
        if len(self._open) >= _MOST_OPEN:
            await self._open.pop(next(iter(self._open))).end()
        process: BackgroundProcess | Terminal
        if is_terminal:
            process = await session.aterminal(argv, cwd=cwd, env=env)
        else:
            process = await session.astart_command(argv, cwd=cwd, env=env)
            await process.aclose_stdin()
        number = next(self._numbers)
        self._open[number] = _Open(process)
        return number

    async def write(self, number: int, text: str) -> None:
        """Type at the terminal of a process."""
        found = self._open[number]
        if not isinstance(found.process, Terminal):
            raise RuntimeError("stdin is not available for this process: start it with tty=true")
        async with found.lock:
            await found.process.awrite(text)

    async def update(self, number: int, seconds: float) -> tuple[bytes, int | None]:
        """Wait for output and the end of a process; return both, None if it has not ended."""
        found = self._open[number]
        async with found.lock:
            output, code = await found.collected(seconds)
        if code is not None and self._open.pop(number, None) is not None:
            await found.end()
        return output, code

    async def end_all(self) -> None:
        """Kill the processes that still run."""
        while self._open:
            await self._open.popitem()[1].end()
