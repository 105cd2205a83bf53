"""`Executing`, the base of `Sandbox` and `Session`: `execute`, `aexecute`, `start` and closing."""

import os
import threading
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from msgspec.structs import replace

from ....policies.closing import Closing
from ....policies.errors import PolicyError
from ....policies.languages import PYTHON
from ....runner.concurrency import NEVER
from ....runner.requests.request import OnOutput
from ....runner.requests.result import SandboxResult
from ..parameters import CallArguments, CallOptions, CommandArguments, CommandOptions

if TYPE_CHECKING:
    from ..languages.compiled import Build
    from .background import Run, Threads
    from .call_request import CommandResult

_LOCK = threading.Lock()
_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_E = TypeVar("_E", bound="Executing")
_S = TypeVar("_S", bound="AsyncClosing")
_T = TypeVar("_T")
_Listener = TypeVar("_Listener", bound=Callable[[str, bytes], object])

_IS_COROUTINE = 0x80  # inspect.CO_COROUTINE; the module takes milliseconds to import


class AsyncClosing(Closing):
    """An object with twins of its methods for asyncio, that is closed by `with` or `async with`."""

    async def _in_thread(
        self, work: Callable[[], _T], discard: Callable[[_T], None] | None = None
    ) -> _T:
        """Call `work` in a thread; `discard` gets its result if the task was cancelled meanwhile."""
        from .background import in_thread  # asyncio takes 40 ms to import

        return await in_thread(work, discard)

    async def aclose(self) -> None:
        """`close` for asyncio, in a thread of its own, as leaving an `async with` does."""
        await AsyncClosing._in_thread(self, self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def close_unused(made: Closing) -> None:
    """Close what was made after its task was cancelled."""
    made.close()


def in_asyncio(
    method: Callable[Concatenate[_S, _P], _T], discard: Callable[[_T], None] | None = None
) -> Callable[Concatenate[_S, _P], Coroutine[Any, Any, _T]]:
    """Return the twin of a method for asyncio; it calls the method that the object's class has.

    `discard` gets the result if the task was cancelled meanwhile.
    """

    async def twin(self: _S, /, *arguments: _P.args, **named: _P.kwargs) -> _T:
        work = getattr(self, method.__name__)
        return await self._in_thread(lambda: work(*arguments, **named), discard)

    return _named_as_twin(twin, method)


def cancellable(
    method: Callable[Concatenate[_E, _P], _T],
) -> Callable[Concatenate[_E, _P], Coroutine[Any, Any, _T]]:
    """Return the twin for asyncio of a method with the parameter `cancel`: cancelling the task ends
    what runs."""

    async def twin(self: _E, /, *arguments: _P.args, **named: _P.kwargs) -> _T:
        work: Callable[..., _T] = getattr(self, method.__name__)
        return await self._aexecutor().execute(
            lambda cancel: work(*arguments, **{**named, "cancel": cancel})
        )

    return _named_as_twin(twin, method)


def _named_as_twin(twin: Callable[_Q, _T], method: Callable[..., object]) -> Callable[_Q, _T]:
    name = f"a{method.__name__}"
    named = wraps(method, updated=())(twin)
    named.__name__, named.__doc__ = name, f"`{method.__name__}` for asyncio."
    named.__qualname__ = method.__qualname__.replace(method.__name__, name)
    return named


class Executing(AsyncClosing):
    """Executes programs until it is closed; a context manager, for `with` and `async with`."""

    _threads: "Threads | None" = None  # threads of aexecute, made at its first call

    @property
    def language(self) -> str:
        """The language of a program for which none is named."""
        return PYTHON

    @abstractmethod
    def _execute(self, given: CallArguments) -> SandboxResult:
        """Carry out a call and return its result."""

    def _call(
        self, method: str, code: "str | bytes | Build", language: str | None, options: CallOptions,
    ) -> CallArguments:  # fmt: skip
        if not isinstance(code, str | bytes) and hasattr(code, "compile"):
            from ..languages.compiled import call_of_build  # seldom needed

            return call_of_build(method, code, language, options)
        language = self.language if language is None else language
        return CallArguments.of(method, code=code, language=language, **options)

    @abstractmethod
    def has_tool(self, name: str) -> bool:
        """Tell whether programs may find a tool of that name; a daemon does not tell."""

    @property
    def _at_once(self) -> int:
        """The number of `aexecute` calls that can run at once."""
        return 1

    def _aexecutor(self) -> "Threads":
        from .background import Threads  # asyncio takes 40 ms to import

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
        """End running programs, and leave nothing behind; closing twice is fine."""

    def execute(
        self,
        code: "str | bytes | Build",
        language: str | None = None,
        *,
        on_output: OnOutput | None = None,
        cancel: int = NEVER,
        **options: Unpack[CallOptions],
    ) -> SandboxResult:
        """Run `code` and return its result: in a fresh cell of a sandbox, or in the one cell of a
        session, with the state that earlier calls left.

        code        source, or a Build that `Sandbox.compile` returned
        language    python, the default, javascript, bash, cpp ... as `cellwright languages` lists;
                    a session runs its own only
        stdin       standard input of the program
        inputs      variables, as JSON has them
        files       path below /workspace -> content, or a pathlib.Path of the host, which is copied
        env         variables of the environment, in addition to the policy's
        arguments   those of the program, sys.argv[1:] in Python
        filename    its name in messages; in Python its file below /workspace, `__file__`
        timeout     seconds of wall time, at most the policy's; `cpu_seconds` of CPU time
        collect     globs of files below /workspace to bring back
        plain       the value of a Python program is JSON, or the error says why it cannot be
        trace_id    text, or a W3C traceparent
        flags       those of the compiler, which reads `sources`, path -> content, too;
                    `compile_timeout`: its seconds, as of `Sandbox.compile`
        on_output   on_output(stream, bytes) is called as output comes, and the program waits for it
        cancel      a descriptor: once it is readable the execution is ended
        workspace   name of a workspace: its files are there at the start and are saved at the end,
                    however the program ends; `clean`: it is removed if the program completes
        packages    what a Python program can import in addition to the packages of the sandbox, such
                    as "pandas==2.3.*"; also named `requirements`.  A set that is used for the first
                    time is fetched and built, for at most `timeout` seconds; a later call finds it
        A session takes none of `workspace`, `clean` and `packages`: `session` names them.

        Failures of the program are in the result.  Raises PolicyError for invalid arguments,
        ClosedError after `close`, LaunchError if no cell could be built, BusyError if the workspace
        is in use and WorkspaceError if it cannot be read, PackageError if packages cannot be had in
        time; a session raises SessionLost if it is gone, and BusyError if an earlier call goes on.
        """
        given = self._call("execute", code, language, options)
        if on_output is not None or cancel != NEVER:
            given = replace(given, on_output=_checked(on_output), cancel=checked_cancel(cancel))
        return self._execute(given)

    async def aexecute(
        self,
        code: "str | bytes | Build",
        language: str | None = None,
        *,
        on_output: Callable[[str, bytes], Awaitable[None] | None] | None = None,
        **options: Unpack[CallOptions],
    ) -> SandboxResult:
        """`execute` for asyncio callers; cancelling the task cancels the execution.

        `on_output` is called in another thread; a coroutine that it returns runs in the caller's event
        loop, and the program waits for that too.
        """
        given = self._call("aexecute", code, language, options)
        if on_output is not None:
            from .background import in_loop  # asyncio takes 40 ms to import

            given = replace(given, on_output=in_loop(_checked_callable(on_output)))
        return await self._aexecutor().execute(
            lambda cancel: self._execute(replace(given, cancel=cancel))
        )

    def run(
        self, command: Sequence[str] | str, **options: Unpack[CommandOptions]
    ) -> "CommandResult":
        """Run a command, in a fresh cell of a sandbox or in the cell of a Python session.

        `command`: the program and its arguments, or with `shell` a line for sh.  `cwd`: its directory;
        by default that of the session, at first /workspace, or the image's.  `user`: of the image, as
        a name or number, perhaps with `:GROUP`.  `env`: variables of this command.
        `stdin`: its standard input, empty by default.  `timeout`: seconds after which it is killed; its
        output until then is in the result, as it is when the policy's own limit ends it.
        `packages`, or `requirements`: as of `execute`.

        Programs that the command starts in the background live on in a session.  The policy must allow
        subprocesses, as the profile standard does.  Raises PolicyError if not; else as `execute` does.
        """
        from .session_commands import command_result

        given = CommandArguments.of("run", command=command, **options)
        return command_result(self._execute(self._command(given)))

    async def arun(
        self, command: Sequence[str] | str, **options: Unpack[CommandOptions]
    ) -> "CommandResult":
        """`run` for asyncio callers; cancelling the task ends the command."""
        from .session_commands import command_result

        call = self._command(CommandArguments.of("arun", command=command, **options))
        done = await self._aexecutor().execute(
            lambda cancel: self._execute(replace(call, cancel=cancel))
        )
        return command_result(done)

    def _command(self, given: CommandArguments) -> CallArguments:
        from .session_commands import call_of

        return self._for_commands(call_of(self._with_tokens(given)))

    def _with_tokens(self, given: CommandArguments) -> CommandArguments:
        """Return the arguments of a command as its cell gets them: with privacy, without values."""
        return given

    def _for_commands(self, call: CallArguments) -> CallArguments:
        if self.language != PYTHON:
            raise PolicyError(
                f"run: this is a session of {self.language}",
                "open a session of Python for commands, or execute them as a program of this language",
            )
        return call

    def start(
        self,
        code: "str | bytes | Build",
        language: str | None = None,
        **options: Unpack[CallOptions],
    ) -> "Run":
        """Start `execute` in the background and return a handle to it."""
        given = self._call("start", code, language, options)
        from .background import Run

        return Run(self._execute, given)


def _checked_callable(on_output: _Listener) -> _Listener:
    if not callable(on_output):
        raise PolicyError(f"on_output: must be a function, got {on_output!r}")
    return on_output


def _checked(on_output: OnOutput | None) -> OnOutput | None:
    """Return a listener for output, if there is one; raises PolicyError for no plain function."""
    if on_output is not None and _is_async(_checked_callable(on_output)):
        raise PolicyError(
            "on_output: must be a plain function here, not a coroutine function",
            "aexecute takes a coroutine function and awaits it",
        )
    return on_output


def checked_cancel(cancel: int) -> int:
    """Return `cancel`; raises PolicyError unless it is an open descriptor of this process."""
    if cancel == NEVER:
        return cancel
    try:
        os.fstat(cancel if isinstance(cancel, int) and not isinstance(cancel, bool) else NEVER)
    except (OSError, OverflowError):
        raise PolicyError(f"cancel: must be an open descriptor, got {cancel!r}") from None
    return cancel


def _is_async(function: object) -> bool:
    """Tell whether calling `function`, which may be an object, runs an `async def`."""
    while not hasattr(function, "__code__") and hasattr(function, "func"):  # functools.partial
        function = function.func
    if not hasattr(function, "__code__") and callable(function):
        function = function.__call__
    code = getattr(function, "__code__", None)
    return bool(code and code.co_flags & _IS_COROUTINE)
