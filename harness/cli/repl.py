"""`cellwright repl`: a session to type into.

What a guest says is escaped for a terminal as everywhere; what we say goes to stderr.
"""

import contextlib
import inspect
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from ...policies.errors import CellwrightError, PolicyError, SessionLost
from ...policies.languages import PYTHON
from ...runner.result import SandboxResult
from ...runner.workspace import Artifact
from ..sandbox.session import Session
from ..text.terminal import StreamPrinter, harmless, result_line, violation_lines
from .keepsakes import images, keep
from .typed import Lines, Typed

HELP = """\
:help                 this
:files                what lies below /workspace
:upload HOST [PATH]   put a file of the host there
:download PATH [HOST] bring a file to the host
:usage                what the last call used, and all of them
:reset                a new session: variables and files are gone
:quit                 leave, as Ctrl-D does
Ctrl-C interrupts the program and keeps its state."""

_LEAVE = ("exit", "exit()", "quit", "quit()")  # typed at a prompt: of a person who wants to leave
_SHOW = "print(repr(_)[:20_000])"  # of Python a value as JSON has it is not what people expect
_NOTABLE_SECONDS = 1.0
_INTERRUPTED = 128 + signal.SIGINT


class Repl:
    """Reads programs, runs them in a session, and shows what came of them."""

    def __init__(
        self, lines: Lines, open_session: Callable[[], Session], language: str, output: str,
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        self._lines = lines
        self._open_session = open_session
        self._output = output
        self._timeout = timeout
        self._python = language == PYTHON
        self._prompts = (">>> ", "... ") if self._python else (f"{language}> ", "... ")
        self._typed = Typed(language)
        self._printer = StreamPrinter()
        self._session = open_session()
        self._last: SandboxResult | None = None
        self._seconds, self._calls = 0.0, 0
        self.failed = False  # some program did not end well
        self._commands: dict[str, Callable[..., object]] = {
            "help": lambda: _say(HELP),
            "files": self._files,
            "upload": self._upload,
            "download": self._download,
            "usage": self._usage,
            "reset": self._reset,
            "quit": lambda: None,
        }

    def converse(self) -> int:
        """Go on until there is nothing more to read; return 130 if a script was interrupted."""
        while True:
            try:
                line = self._lines.read(self._prompts[self._typed.pending])
                if not self._typed.pending and self._lines.interactive and line.strip() in _LEAVE:
                    return 0
                if not self._typed.pending and line.startswith(":") and line[1:2].isalpha():
                    if self._obey(line[1:]) == "quit":
                        return 0
                    continue
                self._run_all(self._typed.add(line))
            except EOFError:
                self._run_all(self._typed.finish())
                return 0
            except KeyboardInterrupt:
                self._typed.clear()
                print(file=sys.stderr)
                if not self._lines.interactive:
                    return _INTERRUPTED

    def close(self) -> None:
        """End the session; raises WorkspaceError if its workspace is refused."""
        self._session.close()

    def _run_all(self, programs: list[str]) -> None:
        for program in programs:
            with self._telling():
                self._show(self._execute(program))

    def _execute(self, program: str) -> SandboxResult:
        with _interruptible() as cancel:
            result = self._session.execute(
                program, on_output=self._printer, cancel=cancel, timeout=self._timeout
            )
            if result.value is not None and self._python and result.ok:
                self._session.execute(_SHOW, on_output=self._printer, cancel=cancel)
        self._last = result
        self._seconds += result.usage.cpu_user_seconds + result.usage.cpu_system_seconds
        self._calls += 1
        return result

    def _show(self, result: SandboxResult) -> None:
        if self._printer.mid_line and self._lines.interactive:
            print(flush=True)
        if result.value is not None and not self._python:
            text = msgspec.json.encode(result.value).decode()
            print(harmless(text) if self._lines.interactive else text, flush=True)
        for line in violation_lines(result):
            print(line, file=sys.stderr, flush=True)
        self._keep(images(result.artifacts))
        _say_end(result)
        self.failed = self.failed or not result.ok
        if result.session_lost:
            self._open_another()

    def _keep(self, artifacts: tuple[Artifact, ...]) -> None:
        for path in keep(artifacts, self._output):
            _say(f"wrote {path}")

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Say what went wrong instead of ending; a session that is gone is followed by another."""
        try:
            yield
        except SessionLost as error:
            self.failed = True
            _say(str(error).partition("\n")[0])
            self._open_another()
        except CellwrightError as error:
            self.failed = True
            _say(str(error))

    def _open_another(self) -> None:
        self._session = self._open_session()
        _say("a new session begins: variables and files are gone")

    # commands

    def _obey(self, text: str) -> str:
        """Carry out a command and return its name, if it is one."""
        name = ""
        with self._telling():
            name, command = self._command(text)
            try:
                command()
            except OSError as error:
                raise PolicyError(f"{error.filename}: {error.strerror}") from None
        return name

    def _command(self, text: str) -> tuple[str, Callable[[], object]]:
        """Return a command's name, and what it does; raises PolicyError if it is none."""
        try:
            name, *arguments = shlex.split(text)
            does = self._commands[name]
            inspect.signature(does).bind(*arguments)
        except KeyError as error:
            raise PolicyError(f"there is no command :{error.args[0]}", ":help") from None
        except (ValueError, TypeError) as error:
            raise PolicyError(f":{text}: {error}", ":help") from None
        return name, partial(does, *arguments)

    def _files(self) -> None:
        for file in self._session.files():
            _say(f"{file.size_bytes:>12,}  {file.path}", "")

    def _upload(self, host: str, path: str = "") -> None:
        self._session.upload(path or os.path.basename(host), Path(host).read_bytes())

    def _download(self, path: str, host: str = "") -> None:
        content = self._session.download(path)
        if host:
            with open(host, "xb") as file:
                file.write(content)
            _say(f"wrote {host}")
        else:
            self._keep((Artifact(path, "", content),))

    def _usage(self) -> None:
        if self._last:
            _say(f"the last call: {_used(self._last)}")
        _say(f"{self._calls} calls: {self._seconds:.2f} s of CPU time")

    def _reset(self) -> None:
        self._session.close()
        self._open_another()


def _say(text: str, who: str = "cellwright: ") -> None:
    print("\n".join(map(harmless, f"{who}{text}".split("\n"))), file=sys.stderr, flush=True)


def _say_end(result: SandboxResult) -> None:
    """Say how it ended, if nothing has yet: an uncaught exception has, by its traceback."""
    if not result.ok and result.reason != "exception":
        line = result_line(msgspec.structs.replace(result, value=None))
        print(line, file=sys.stderr, flush=True)
    elif result.execution_time >= _NOTABLE_SECONDS or result.truncated:
        _say(_used(result))


def _used(result: SandboxResult) -> str:
    usage = result.usage
    parts = [
        f"{result.execution_time:.2f} s",
        f"CPU {usage.cpu_user_seconds + usage.cpu_system_seconds:.2f} s",
        f"peak {usage.memory_peak_bytes / 1024 / 1024:.1f} MiB",
        f"{usage.output_bytes:,} bytes of output",
    ]
    return " · ".join(parts)


@contextlib.contextmanager
def _interruptible() -> Iterator[int]:
    """Give a descriptor that Ctrl-C makes readable, instead of raising KeyboardInterrupt here.

    The interpreter's own handler writes to it, at once: one of ours would run after the system call
    that it came just before, which waits for the program.
    """
    cancel, written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    woken = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    try:
        yield cancel
    finally:
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGINT, before)
        os.close(cancel)
        os.close(written)
