"""The exchange of frames in a guest: RunProgram brings a program in, Finished takes its value out."""

import builtins
import contextlib
import errno
import json
import linecache
import os
import stat
import sys
import types

from msgspec.structs import replace

from ..channel import Channel, Receiver, packets
from ..messages import Answer, Become, Finished, InputFile, RunProgram, Start, decoder, encode

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
        self._path = os.path.join(WORKSPACE, run.filename)
        self._made: tuple[int, int, int] | None = None
        main.__dict__["__file__"] = self._path
        was_there = os.path.lexists(self._path)
        with contextlib.suppress(OSError):  # full: most programs do without
            write(InputFile(run.filename, run.code.encode()))
            self._made = None if was_there else self._identity()

    def _identity(self) -> tuple[int, int, int]:
        seen = os.stat(self._path)
        return seen.st_ino, seen.st_size, seen.st_mtime_ns

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            if self._made and self._made == self._identity():
                os.unlink(self._path)


def give(run: RunProgram, main: types.ModuleType, filename: str) -> ProgramFile | None:
    """Give the program its environment, arguments, variables and files, and tracebacks its source.
    Return its own file, if it is to have one."""
    if run.environment:
        os.environ.update(run.environment)
    if run.arguments or run.filename:
        sys.argv = [run.filename or PROGRAM, *run.arguments]
    if run.inputs != b"{}":
        main.__dict__.update(json.loads(run.inputs))
    main.__dict__["__builtins__"] = builtins
    lines = (run.code + "\n").splitlines(keepends=True)  # as linecache has them: all end in one
    linecache.cache[filename] = (len(run.code), None, lines, filename)
    for file in run.files:
        write(file)
    if run.files:  # what was listed before them has none of their names
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
