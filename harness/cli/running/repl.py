"""`cellwright repl`: a session whose programs are typed at a prompt or read from a pipe.

Output of the guest is escaped for a terminal; messages of the command go to stderr.
"""

import argparse
import contextlib
import inspect
import itertools
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from ....policies.errors import CellwrightError, PolicyError, SessionLost
from ....policies.languages import PYTHON
from ....runner.cells.workspace import Artifact
from ....runner.requests.result import SandboxResult
from ...sandbox.checks import check_language
from ...sandbox.sessions.session import Session
from ...text.output_streams import StreamPrinter
from ...text.terminal_text import (
    dropped,
    harmless,
    notice_lines,
    result_line,
    violation_lines,
)
from ...user_data import state_directory
from ..options import FAILED, SUCCEEDED
from ..package_options import packages_of_calls
from .artifacts import without_text_forms, write_artifacts
from .prompt import ProgramBuffer, PromptReader, is_command, reader_of_stdin
from .sandbox_options import (
    OUTPUT,
    add_language,
    add_sandbox,
    print_staged,
    sandbox_of,
)

HELP = """\
:help                 print this list
:files                list the files of /workspace
:upload HOST [PATH]   copy a file of the host to /workspace
:download PATH [HOST] copy a file of /workspace to the host
:usage                print the resources that the last call and all calls used
:branch [N]           go on in a copy of the session; with N, make N copies and stay
:pause                keep the session on disk, print its token, and start a new one
:resume TOKEN         go on in the session that was paused
:switch [NAME]        go on in another session; without NAME list them
:reset                start a new session without variables and files
:quit                 end the session, as Ctrl-D does
Ctrl-C interrupts the program and keeps its state."""

_LEAVE = ("exit", "exit()", "quit", "quit()")  # inputs that end the command at a prompt
_SHOW = "print(repr(_)[:20_000])"  # Python programmers expect the repr of a value, not its JSON
_NOTABLE_SECONDS = 1.0
_INTERRUPTED = 128 + signal.SIGINT


def add(parser: argparse.ArgumentParser) -> None:
    add_language(parser, PYTHON)
    parser.add_argument(
        "--output",
        metavar="DIR",
        default=OUTPUT,
        help=f"the directory for pictures; default {OUTPUT}",
    )
    parser.add_argument(
        "--pausable", action="store_true",
        help="let another `cellwright repl --pausable` resume what :pause keeps; "
        "cells have no random addresses then",
    )  # fmt: skip
    add_sandbox(parser, "wall-clock limit of a call")


def run(options: argparse.Namespace) -> int:
    language = check_language(options.language or PYTHON, "--language")
    reader = reader_of_stdin(state_directory() / "history")
    with contextlib.closing(reader), sandbox_of(options, language) as sandbox:
        open_session = partial(
            sandbox.session, language=language, workspace=options.workspace,
            packages=packages_of_calls(options),
        )  # fmt: skip
        repl = Repl(
            reader, open_session, sandbox.resume, language, options.output, options.timeout
        )  # fmt: skip
        with contextlib.closing(repl):
            if reader.is_interactive:
                print(
                    f"cellwright: {language} session under {sandbox.policy.name}; "
                    ":help lists the commands",
                    file=sys.stderr,
                )
            status = repl.converse()
    return status or (FAILED if repl.has_failed and not reader.is_interactive else SUCCEEDED)


class Repl:
    """Reads programs, runs them in a session, and prints their results."""

    def __init__(
        self, reader: PromptReader, open_session: Callable[[], Session],
        resume: Callable[[str], Session], language: str, output: str, timeout: float | None = None,
    ) -> None:  # fmt: skip
        self._reader = reader
        self._open_session = open_session
        self._resume_session = resume
        self._output = output
        self._timeout = timeout
        self._python = language == PYTHON
        self._prompts = (">>> ", "... ") if self._python else (f"{language}> ", "... ")
        self._buffer = ProgramBuffer(language)
        self._printer = StreamPrinter()
        self._session = open_session()
        self._sessions = {"main": self._session}  # sessions by the names that :switch takes
        self._last: SandboxResult | None = None
        self._seconds, self._calls = 0.0, 0
        self.has_failed = False  # a program or a command failed
        self._commands: dict[str, Callable[..., object]] = {
            "help": lambda: _say(HELP),
            "files": self._files,
            "upload": self._upload,
            "download": self._download,
            "usage": self._usage,
            "branch": self._branch,
            "pause": self._pause,
            "resume": self._resume,
            "switch": self._switch,
            "reset": self._reset,
            "quit": lambda: None,
        }

    def converse(self) -> int:
        """Read and run programs until the input ends; return 130 if a script was interrupted."""
        while True:
            try:
                line = self._reader.read(self._prompts[self._buffer.is_pending])
                is_first = not self._buffer.is_pending
                if is_first and self._reader.is_interactive and line.strip() in _LEAVE:
                    return 0
                if not self._run_all(self._buffer.add(line)):
                    return 0
            except EOFError:
                self._run_all(self._buffer.finish())
                return 0
            except KeyboardInterrupt:
                self._buffer.clear()
                print(file=sys.stderr)
                if not self._reader.is_interactive:
                    return _INTERRUPTED

    def close(self) -> None:
        """End the session; raises WorkspaceError if its workspace cannot be saved."""
        for session in self._sessions.values():
            session.close()
            print_staged(session.workspace)

    def _run_all(self, entries: list[str]) -> bool:
        """Run programs and commands; return False, and run no more, after `:quit`."""
        for entry in entries:
            if is_command(entry):
                if self._run_command(entry[1:]) == "quit":
                    return False
                continue
            with self._printing_errors():
                self._show(self._execute(entry))
        return True

    def _execute(self, program: str) -> SandboxResult:
        with _interruptible() as cancel:
            result = self._session.execute(
                program, on_output=self._printer, cancel=cancel, timeout=self._timeout
            )
            if result.value is not None and self._python and result.ok:
                self._session.execute(_SHOW, on_output=self._printer, cancel=cancel)
        result = result.for_model()
        self._last = result
        self._seconds += result.usage.cpu_user_seconds + result.usage.cpu_system_seconds
        self._calls += 1
        return result

    def _show(self, result: SandboxResult) -> None:
        if self._printer.mid_line and self._reader.is_interactive:
            print(flush=True)
        if result.value is not None and not self._python:
            text = msgspec.json.encode(result.value).decode()
            print(harmless(text) if self._reader.is_interactive else text, flush=True)
        for line in (*notice_lines(result), *violation_lines(result)):
            print(line, file=sys.stderr, flush=True)
        self._write_artifacts(without_text_forms(result.artifacts))
        _say_end(result)
        self.has_failed = self.has_failed or not result.ok
        if result.session_lost:
            self._open_new_session()

    def _write_artifacts(self, artifacts: tuple[Artifact, ...]) -> None:
        for path in write_artifacts(artifacts, self._output):
            _say(f"wrote {path}")

    @contextlib.contextmanager
    def _printing_errors(self) -> Iterator[None]:
        """Print errors instead of raising them; open a new session if the last one is lost."""
        try:
            yield
        except SessionLost as error:
            self.has_failed = True
            _say(str(error).partition("\n")[0])
            self._open_new_session()
        except CellwrightError as error:
            self.has_failed = True
            _say(str(error))

    def _open_new_session(self) -> None:
        self._take(self._open_session())
        _say("started a new session; variables and files are lost")

    # commands

    def _run_command(self, text: str) -> str:
        """Run a command and return its name; empty if it is unknown."""
        name = ""
        with self._printing_errors():
            name, command = self._command(text)
            try:
                command()
            except OSError as error:
                raise PolicyError(f"{error.filename}: {error.strerror}") from None
        return name

    def _command(self, text: str) -> tuple[str, Callable[[], object]]:
        """Return the name and the function of a command; raises PolicyError for an unknown one."""
        try:
            name, *arguments = shlex.split(text)
            function = self._commands[name]
            inspect.signature(function).bind(*arguments)
        except KeyError as error:
            raise PolicyError(
                f"unknown command :{error.args[0]}", ":help lists the commands"
            ) from None
        except (ValueError, TypeError) as error:
            raise PolicyError(f":{text}: {error}", ":help lists the commands") from None
        return name, partial(function, *arguments)

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
            self._write_artifacts((Artifact(path, "", content),))

    def _usage(self) -> None:
        if self._last:
            _say(f"the last call: {_used(self._last)}")
        _say(f"{self._calls} calls: {self._seconds:.2f} s of CPU time")

    def _branch(self, count: str = "") -> None:
        if count and not (count.isascii() and count.isdigit()):
            raise PolicyError(f":branch: must be followed by a number, got {count!r}")
        name = ""
        for each in self._session.branch(int(count or 1)):
            name = self._add("b", each)
            how = f" by replay: {each.not_copied}" if each.not_copied else ""
            _say(f"{name} is a branch of {self._name()}{how}")
        if not count:
            self._switch(name)

    def _add(self, letter: str, session: Session) -> str:
        """Give a session a name that begins with `letter`, and return it."""
        names = (f"{letter}{n}" for n in itertools.count(1))
        name = next(each for each in names if each not in self._sessions)
        self._sessions[name] = session
        return name

    def _pause(self) -> None:
        _say(f"paused; it goes on with\n:resume {self._session.pause()}")
        self._take(self._open_session())

    def _resume(self, token: str) -> None:
        self._switch(self._add("r", self._resume_session(token)))

    def _switch(self, name: str = "") -> None:
        if name and name not in self._sessions:
            raise PolicyError(f":switch: unknown session {name!r}", ":switch lists them")
        if name:
            self._session = self._sessions[name]
            _say(f"this is {name}")
            return
        for each, session in self._sessions.items():
            mark = "*" if session is self._session else " "
            _say(f"{mark} {each}{f'  gone: {session.lost}' if session.lost else ''}", "")

    def _name(self) -> str:
        return next(name for name, each in self._sessions.items() if each is self._session)

    def _take(self, session: Session) -> None:
        """Go on in `session`, which takes the name of the present one."""
        name = self._name()
        self._sessions[name] = self._session = session

    def _reset(self) -> None:
        self._session.close()
        self._open_new_session()


def _say(text: str, prefix: str = "cellwright: ") -> None:
    print("\n".join(map(harmless, f"{prefix}{text}".split("\n"))), file=sys.stderr, flush=True)


def _say_end(result: SandboxResult) -> None:
    """Print how the program ended, unless its traceback has; after success only notable usage."""
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
        *dropped(result),
    ]
    return " · ".join(parts)


@contextlib.contextmanager
def _interruptible() -> Iterator[int]:
    """Yield a descriptor that Ctrl-C makes readable, and raise no KeyboardInterrupt meanwhile.

    The interpreter's C handler writes to it at once.  A Python handler would run late if the signal
    came just before the system call that waits for the program: only after that call.
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
