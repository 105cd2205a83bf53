"""The exchange of frames in a guest: RunProgram brings a program in, Finished takes its value out."""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import builtins
import contextlib
import errno
import json
import linecache
import os
import stat
import sys
import types
from collections.abc import Callable
from typing import NoReturn

from msgspec.structs import replace

from ...policies.languages import LANGUAGES, TOOL_CLIENT, as_environment, interpreter_of
from ...policies.plan import Plan
from ..channel import Channel, Receiver, packets
from ..kernel import syscall
from ..messages import Answer, Become, Finished, InputFile, RunProgram, Start, decoder, encode

_TIOCSCTTY = 0x540E  # ioctl_tty(2)
WORKSPACE = "/workspace"
PROGRAM = "<cell>"  # the name of a program: sys.argv[0], and in tracebacks
# O_NONBLOCK: opening a FIFO without a reader fails at once (fifo(7)); regular files ignore it.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
_RUN_BYTES = 256 * 1024 * 1024
_Word = RunProgram | Start | Become
_INCOMING = decoder(_Word | Answer)


def receiver_of(sock: Channel) -> Receiver:
    return Receiver(sock, _RUN_BYTES)


def receive(receiver: Receiver) -> RunProgram | Start | Become | None:
    """Wait for a program, or for word that more than one will come; None once there will be none.

    The late answer to an abandoned call may come first.
    """
    while frame := receiver.receive_whole():
        received: _Word | Answer = _INCOMING.decode(frame)
        if not isinstance(received, Answer):
            return received
    return None


class ProgramFile:
    """The program as a file below /workspace while it runs, as `multiprocessing` needs it: a child
    that is spawned runs the file of `__main__` again.

    It is removed afterwards, if the program has not changed it and it was not given or made before.
    """

    def __init__(self, run: RunProgram, main: types.ModuleType) -> None:
        self._path, self._names, self._owner = path_of(run), main.__dict__, os.getpid()
        self._made: tuple[int, int, int] | None = None
        self._names.update(__file__=self._path, __cached__=None)
        sys.path.insert(0, os.path.dirname(self._path))  # as python(1): its own modules come first
        was_there = os.path.lexists(self._path)
        with contextlib.suppress(OSError):  # no space; most programs do not need it
            write(InputFile(run.filename, run.code.encode()))
            self._made = None if was_there else self._identity()

    def _identity(self) -> tuple[int, int, int]:
        seen = os.stat(self._path)
        return seen.st_ino, seen.st_size, seen.st_mtime_ns

    def remove(self) -> None:
        """Remove the file and the variables that belong to it, so that the session's next program
        does not see them."""
        if os.getpid() != self._owner:  # a child that the program forked
            return
        self._names.pop("__file__", None)
        self._names.pop("__cached__", None)
        with contextlib.suppress(ValueError):
            sys.path.remove(os.path.dirname(self._path))
        with contextlib.suppress(OSError):
            if self._made and self._made == self._identity():
                os.unlink(self._path)


def path_of(run: RunProgram) -> str:
    """Return the absolute path of a program that is a file, as python(1) gives it to tracebacks."""
    return os.path.join(WORKSPACE, run.filename)


def give(run: RunProgram, main: types.ModuleType, filename: str) -> ProgramFile | None:
    """Give the program its environment, arguments, variables and files, and tracebacks its source.
    Return its own file, if it is to have one."""
    if run.environment:
        os.environ.update(run.environment)
        for place in reversed(run.environment.get("PYTHONPATH", "").split(os.pathsep)):
            if place and place not in sys.path:
                sys.path.insert(0, place)
    if run.arguments or run.filename:
        sys.argv = [run.filename or PROGRAM, *run.arguments]
        sys.orig_argv = [sys.executable, *sys.argv]
    if run.inputs != b"{}":
        main.__dict__.update(json.loads(run.inputs))
    main.__dict__["__builtins__"] = builtins
    code = run.code if run.code.endswith("\n") else run.code + "\n"
    lines = code.splitlines(keepends=True)  # as linecache has them: all end in a newline
    linecache.cache[filename] = (len(run.code), None, lines, filename)
    for file in run.files:
        write(file)
    if run.files:  # earlier listings of the directory lack the new names
        sys.path_importer_cache.pop(WORKSPACE, None)
    return ProgramFile(run, main) if run.filename else None


def report(end: tuple[Finished, int], sock: Channel, nonce: str = "") -> None:
    finished, code = end
    told = replace(finished, ends_well=code == 0, exit_code=code, nonce=nonce)
    try:  # contextlib.suppress would copy the pages of its class into every cell
        for packet in packets(encode(told)):
            sock.send(packet)
    except OSError:  # the guest may have closed it
        pass


def report_to(control: int, finished: Finished) -> None:
    with contextlib.suppress(OSError):
        for packet in packets(encode(finished)):
            os.write(control, packet)


def write(file: InputFile) -> None:
    """Write an input below /workspace; the supervisor has checked the path.

    Raises OSError, also where something other than a regular file has that name: to write to a FIFO
    that an earlier request of a session made would take until the deadline.
    """
    path = os.path.join(WORKSPACE, file.path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(os.open(path, _NEW, 0o666), "wb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        opened.write(file.data)
    if file.executable:
        os.chmod(path, 0o700)


_SOURCE = "/tmp/cell"  # noqa: S108 - the cell's own; error messages name it
_GIVEN = "/tmp/cell.json"  # noqa: S108 - the cell's own; the harness removes it


def _text_of(name: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), name)) as file:
        return file.read()


_HARNESSES = {  # read now, while cellwright's files are visible
    "javascript": _text_of("harness.js"),
    "ruby": _text_of("harness.rb"),
}
# Descriptors for a shell in a session. Programs seldom use these numbers, which sh(1) can still name.
_SHELLS_STDERR, _SHELLS_CONTROL = 8, 9
# Empty values keep an interactive bash from reading a history file, and from looking up the user's
# mailbox through a socket.
_NO_HISTORY_NO_MAIL = {"HISTFILE": "", "MAILPATH": ""}


def _write_text(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


class Interpreter:
    """How to run programs of the plan's language."""

    def __init__(self, plan: Plan) -> None:
        self._language = LANGUAGES[plan.language]
        if self._language.is_shell and os.path.basename(plan.program) == "bash":
            self._language = LANGUAGES["bash"]._replace(program=self._language.program)
        self._name = plan.language
        self._path = plan.program
        self._source = _SOURCE + LANGUAGES[plan.language].suffix
        self._first = ""  # text that bash reads before the program
        self._harness = _HARNESSES.get(interpreter_of(plan.language), "")

    def become(self, asked: RunProgram | Start, control: int) -> NoReturn:
        """Become the interpreter; exits with 127, as a shell does, if that fails.

        An interpreter with a harness keeps the control socket and reports outcomes on it. The kernel
        reports the end of a shell that runs one program.
        """

        def interpret() -> None:
            if isinstance(asked, RunProgram):
                self._run(asked, control)
            else:
                self._converse(control)

        _become(self._name, asked.files, interpret, control)

    def _run(self, run: RunProgram, control: int) -> None:
        if self._language.is_shell or run.filename.endswith(os.path.splitext(self._source)[1]):
            name = os.path.basename(run.filename)  # error messages show it
            self._source = os.path.join(os.path.dirname(_SOURCE), name) if name else self._source
        _write_text(self._source, run.code)
        if self._harness:
            given = {
                "path": self._source, "inputs": json.loads(run.inputs),
                "environment": run.environment, "limit": run.value_bytes,
                "tools": list(run.tools), "arguments": run.arguments,
                "sites": run.sites,
            }  # fmt: skip
            _write_text(_GIVEN, json.dumps(given))
            os.set_inheritable(control, True)
            self._execute(*self._with_harness(_GIVEN))
        os.environ.update(run.environment)
        os.environ.update(as_environment(run.inputs))
        self._execute(*self._language.arguments, *self._source_of(run), *run.arguments)

    def _source_of(self, run: RunProgram) -> tuple[str, ...]:
        """Return the arguments that name the program, after the command that calls tools if it has any.

        Only bash has a variable for that; it keeps the program from running as part of another, whose
        traps would see it fail twice.
        """
        if not run.tools:
            return (self._source,)
        self._first = TOOL_CLIENT if self._name == "bash" else ""
        return (self._source,) if self._first else ("-c", f'. {TOOL_CLIENT}\n. "$0"', self._source)

    def _converse(self, control: int) -> None:
        if self._harness:
            os.set_inheritable(control, True)
            self._execute(*self._with_harness())
        os.dup2(2, _SHELLS_STDERR)
        os.dup2(control, _SHELLS_CONTROL)
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)  # until a request says where stderr goes
        os.environ.update(_NO_HISTORY_NO_MAIL)
        self._execute(*self._language.arguments, *self._language.conversing)

    def _with_harness(self, *given: str) -> tuple[str, ...]:
        return (*self._language.arguments, "-e", self._harness, "--", self._name, *given)

    def _execute(self, *arguments: str) -> None:
        for name in self._language.start_up:
            os.environ.pop(name, None)
        if self._first:
            os.environ["BASH_ENV"] = self._first
        if self._language.is_shell:
            os.environ.setdefault("SHELL", self._path)  # else bash asks for it by a socket
        command = [self._language.program, *arguments]
        os.execve(self._path, command, dict(os.environ))  # noqa: S606 - no shell is wanted


def become_program(asked: Become, control: int) -> NoReturn:
    """Become the program that is asked for, with its environment and no descriptor but 0, 1 and 2;
    exits with 127 if that fails."""

    def replace() -> None:
        if asked.terminal:
            terminal = os.open(asked.terminal, os.O_RDWR)
            # That gave this session its terminal, unless a guard has opened it (launcher/guard.py).
            syscall("ioctl", terminal, _TIOCSCTTY, 0, about=asked.terminal)
            for stream in (0, 1, 2):
                os.dup2(terminal, stream)
        os.chdir(asked.directory)
        os.execvpe(asked.arguments[0], asked.arguments, asked.environment)  # noqa: S606 - as above

    _become(asked.arguments[0], asked.files, replace, control)


def _become(
    name: str, files: tuple[InputFile, ...], replace: Callable[[], None], control: int
) -> NoReturn:
    """Write `files` and have this process replaced; say so if it was not."""
    try:
        for file in files:
            write(file)
        # Python ignores two of these signals, and the third is ignored while a cell is made.
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT):
            _signal.signal(number, _signal.SIG_DFL)
        replace()
    except OSError as error:
        text = f"{name} cannot start: {_why(name, error)}"
        report_to(control, Finished(None, None, text, None, exit_code=127))
        os.write(2, f"{text}\n".encode())
    os._exit(127)


def _why(name: str, error: OSError) -> str:
    path = os.fsdecode(error.filename or name)
    found = (path,) if "/" in name else tuple(f"{each}/{name}" for each in os.get_exec_path())
    for each in found:
        if error.errno == errno.ENOENT and os.path.isfile(each):
            return f"{each}: its first line, #!, names an interpreter that the cell does not show"
    if error.errno == errno.ENOENT and path != name and os.path.basename(path) == name:
        return "no directory of PATH has it"
    return f"{path}: {error.strerror}"
