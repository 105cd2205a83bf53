"""`Executing`, the base of `Sandbox` and `Session`: `execute`, `aexecute`, `start` and closing."""

import os
import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from ...policies.closing import Closing
from ...policies.errors import PolicyError
from ...policies.languages import PYTHON
from ...runner.capture import OnOutput
from ...runner.concurrency import NEVER
from ...runner.result import SandboxResult
from .parameters import CallArguments, CommandArguments, FileContent

if TYPE_CHECKING:
    from .command_result import CommandResult
    from .run import Run, Threads


_LOCK = threading.Lock()

_IS_COROUTINE = 0x80  # inspect.CO_COROUTINE; the module takes milliseconds to import


class Executing(Closing):
    """Executes programs until it is closed; a context manager, for `with` and `async with`."""

    _threads: "Threads | None" = None  # of aexecute, once it is called

    @property
    def language(self) -> str:
        """The language of a program for which none is named."""
        return PYTHON

    @abstractmethod
    def _execute(
        self, given: CallArguments, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        """Carry out a call and return its result."""

    def _call(self, given: dict[str, Any]) -> CallArguments:
        """Return the arguments of a call, from the `locals()` of its method."""
        language = given["language"]
        return CallArguments.of(
            given | {"language": self.language if language is None else language}
        )

    @abstractmethod
    def has_tool(self, name: str) -> bool:
        """Tell whether programs may find a tool of that name; a daemon does not tell."""

    @property
    def _at_once(self) -> int:
        """The number of `aexecute` calls that can run at once."""
        return 1

    def _aexecutor(self) -> "Threads":
        from .run import Threads  # asyncio takes 40 ms to import

        with _LOCK:
            if self._threads is None or not self._threads.are_ours():
                self._threads = Threads(self._at_once)
            return self._threads

    def _close_aexecutor(self) -> None:
        """End the threads of `aexecute`; each implementation of `close` calls this."""
        threads, self._threads = self._threads, None
        if threads:
            threads.close()

    @abstractmethod
    def close(self) -> None:
        """End what runs, and leave nothing behind; closing twice is fine."""

    async def aclose(self) -> None:
        """`close` for asyncio, in a thread of its own, as leaving an `async with` does."""
        from .run import in_thread  # asyncio takes 40 ms to import

        await in_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def execute(
        self,
        code: str | bytes,
        language: str | None = None,
        *,
        stdin: str | bytes | None = None,
        inputs: Mapping[str, Any] | None = None,
        files: Mapping[str, FileContent] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        collect: Sequence[str] = (),
        workspace: str | None = None,
        clean: bool = False,
        trace_id: str | None = None,
        plain: bool = False,
        arguments: Sequence[str] = (),
        filename: str | None = None,
        packages: Sequence[str] = (),
        requirements: Sequence[str] = (),
        on_output: OnOutput | None = None,
        cancel: int = NEVER,
    ) -> SandboxResult:
        """Run `code` and return its result: in a fresh cell of a sandbox, or in the one cell of a
        session, with the state that earlier calls left.

        `language`: python (the default), javascript, typescript, bash, sh or ruby, as far as the host
        has its interpreter; a session runs its own only.
        `stdin`: what the program reads.  `inputs`: variables, as JSON has them.  `files`: path below
        /workspace -> content, or a pathlib.Path of the host, whose file or folder is copied.
        `arguments`: those of the program, sys.argv[1:] in Python.  `filename`: its name in messages; in
        Python it is that file below /workspace while it runs, and `__file__` is its path.
        `env`: variables of the environment, beside those of the policy.
        `timeout`: seconds of wall time, at most the policy's.  `collect`: globs of files below
        /workspace to bring back.  `trace_id`: text, or a W3C traceparent.  `plain`: the value of a
        Python program is JSON, or the error says why it cannot be.
        `on_output(stream, bytes)` is called as output comes, and the program waits for it; `cancel` is
        a descriptor: once it is readable the execution is ended.
        `workspace`: the name of a workspace; its files are there at the start and are saved at the end,
        however the program ends.  `clean`: remove that workspace if the program completes.
        `packages`, or `requirements`: what a Python program can import beside the packages of the
        sandbox, such as "pandas==2.3.*".  A set of packages that is used for the first time is fetched
        and built, for at most `timeout` seconds; a later call finds it, with a launcher of its own.
        A session takes none of these three: they are named when it is opened.

        Failures of the program are in the result.  Raises PolicyError for invalid arguments,
        ClosedError after `close`, LaunchError if no cell could be built, BusyError if the workspace is
        in use and WorkspaceError if it cannot be read, PackageError if packages cannot be had in time;
        a session raises SessionLost if it is gone, and BusyError if the call before this one does not
        end.
        """
        given = self._call(locals())
        _check_callable(on_output)
        if _is_async(on_output):
            raise PolicyError(
                "on_output: must be a plain function here, not a coroutine function",
                "aexecute takes a coroutine function and awaits it",
            )
        if cancel != NEVER:
            _check_descriptor(cancel)
        return self._execute(given, on_output, cancel)

    async def aexecute(
        self,
        code: str | bytes,
        language: str | None = None,
        *,
        stdin: str | bytes | None = None,
        inputs: Mapping[str, Any] | None = None,
        files: Mapping[str, FileContent] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        collect: Sequence[str] = (),
        workspace: str | None = None,
        clean: bool = False,
        trace_id: str | None = None,
        plain: bool = False,
        arguments: Sequence[str] = (),
        filename: str | None = None,
        packages: Sequence[str] = (),
        requirements: Sequence[str] = (),
        on_output: Callable[[str, bytes], Awaitable[None] | None] | None = None,
    ) -> SandboxResult:
        """`execute` for asyncio callers; cancelling the task cancels the execution.

        `on_output` is called in another thread; a coroutine that it returns runs in the caller's event
        loop, and the program waits for that too.
        """
        given = self._call(locals())
        _check_callable(on_output)
        from .run import in_loop  # asyncio takes 40 ms to import

        listener = in_loop(on_output) if on_output else None
        return await self._aexecutor().execute(
            lambda cancel: self._execute(given, listener, cancel)
        )

    def run(
        self,
        command: Sequence[str] | str,
        *,
        shell: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        trace_id: str | None = None,
        packages: Sequence[str] = (),
        requirements: Sequence[str] = (),
    ) -> "CommandResult":
        """Run a command, in a fresh cell of a sandbox or in the cell of a Python session.

        `command`: the program and its arguments, or with `shell` a line for sh.  `cwd`: its directory;
        by default that of the session, at first /workspace.  `env`: variables of this command.
        `stdin`: its standard input, empty by default.  `timeout`: seconds after which it is killed; its
        output until then is in the result, as it is when the policy's own limit ends it.
        `packages`, or `requirements`: as of `execute`.

        Programs that the command starts in the background live on in a session.  The policy must allow
        subprocesses, as the profile standard does.  Raises PolicyError if not; else as `execute` does.
        """
        given = self._with_tokens(CommandArguments.of(locals()))
        from .commands import call_of, command_result

        return command_result(self._execute(self._for_commands(call_of(given)), None, NEVER))

    async def arun(
        self,
        command: Sequence[str] | str,
        *,
        shell: bool = False,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        trace_id: str | None = None,
        packages: Sequence[str] = (),
        requirements: Sequence[str] = (),
    ) -> "CommandResult":
        """`run` for asyncio callers; cancelling the task ends the command."""
        given = self._with_tokens(CommandArguments.of(locals()))
        from .commands import call_of, command_result

        call = self._for_commands(call_of(given))
        done = await self._aexecutor().execute(lambda cancel: self._execute(call, None, cancel))
        return command_result(done)

    def _with_tokens(self, given: CommandArguments) -> CommandArguments:
        """Return the arguments of a command as its cell gets them: with privacy, without values."""
        return given

    def _for_commands(self, call: CallArguments) -> CallArguments:
        """Return `call`; raises PolicyError if this session runs another language than Python."""
        if self.language != PYTHON:
            raise PolicyError(
                f"run: this is a session of {self.language}",
                "open a session of Python for commands, or execute them as a program of this language",
            )
        return call

    def start(
        self,
        code: str | bytes,
        language: str | None = None,
        *,
        stdin: str | bytes | None = None,
        inputs: Mapping[str, Any] | None = None,
        files: Mapping[str, FileContent] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        collect: Sequence[str] = (),
        workspace: str | None = None,
        clean: bool = False,
        trace_id: str | None = None,
        plain: bool = False,
        arguments: Sequence[str] = (),
        filename: str | None = None,
        packages: Sequence[str] = (),
        requirements: Sequence[str] = (),
    ) -> "Run":
        """Start `execute` in the background and return a handle to it."""
        given = self._call(locals())
        from .run import Run

        return Run(lambda on_output, cancel: self._execute(given, on_output, cancel))


def _check_callable(on_output: object) -> None:
    if on_output is not None and not callable(on_output):
        raise PolicyError(f"on_output: must be a function, got {on_output!r}")


def _check_descriptor(cancel: object) -> None:
    """Raise PolicyError unless `cancel` is an open descriptor of this process."""
    try:
        os.fstat(cancel if isinstance(cancel, int) and not isinstance(cancel, bool) else NEVER)
    except (OSError, OverflowError):
        raise PolicyError(f"cancel: must be an open descriptor, got {cancel!r}") from None


def _is_async(function: object) -> bool:
    """Tell whether calling `function`, which may be an object, runs an `async def`."""
    while not hasattr(function, "__code__") and hasattr(function, "func"):  # functools.partial
        function = function.func
    if not hasattr(function, "__code__") and callable(function):
        function = function.__call__
    code = getattr(function, "__code__", None)
    return bool(code and code.co_flags & _IS_COROUTINE)
