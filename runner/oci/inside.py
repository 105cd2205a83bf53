"""The first process of a container, which runs one program and reports its outcome on standard output.

Such a container has a kernel of its own, to which no descriptor of the host can be sent.  So its one
call is a file that is shown read-only, and everything that comes out goes through one pipe, in lines:
a letter, and base64.  Terminals and consoles, through which some runtimes pass it, keep those intact.

The program runs in another process, in the interpreter of every cell (cell/interpreter.py), with
another id where the container has one.
"""

import base64
import contextlib
import os
import resource
import select
import signal
import stat
import sys
import tarfile
from typing import NoReturn

from .. import channel
from ..cell import interpreter
from ..kernel import credentials as kernel
from ..kernel.process_calls import close_range
from ..kernel.steps import Now
from ..messages import SingleCall, decode, encode

CALL = "/.cellwright/call"
BEGUN, STDOUT, STDERR, WORD, FILES, ENDED = b"b", b"o", b"e", b"w", b"f", b"x"
_PIECE = 48 * 1024
_CONTROL = 3
_WORKSPACE = "/workspace"


def main(own_paths: int) -> NoReturn:
    """Run the program of the call; the first `own_paths` entries of sys.path are ours, not its own."""
    os.umask(0o022)
    del sys.path[:own_paths]
    with open(CALL, "rb") as file:
        call = decode(file.read(), SingleCall)
    near, far = channel.pair()
    pipes = [os.pipe(), os.pipe()]
    told, telling = os.pipe()
    os.set_blocking(telling, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(telling)
    guest = os.fork()
    if guest == 0:
        _be_guest(call, [far.fileno(), *(theirs for _, theirs in pipes)])
    far.close()
    for _, theirs in pipes:
        os.close(theirs)
    _say(BEGUN)
    for packet in channel.packets(encode(call.program)):
        near.send(packet)
    sources = {near.fileno(): WORD, pipes[0][0]: STDOUT, pipes[1][0]: STDERR}
    status = _relay(sources, told, guest)
    _send_files()
    _say(ENDED, str(status).encode())
    os._exit(0)


def _be_guest(call: SingleCall, ends: list[int]) -> NoReturn:
    """Become the process of the program, which reaches nothing of this one."""
    try:
        os.setsid()
        stdin = os.memfd_create("stdin")
        os.write(stdin, call.stdin)
        os.lseek(stdin, 0, os.SEEK_SET)
        control, stdout, stderr = (os.dup(end) for end in ends)
        for number, end in enumerate((stdin, stdout, stderr, control)):
            os.dup2(end, number, inheritable=number != _CONTROL)
        close_range(_CONTROL + 1, 0xFFFFFFFF)
        for name, value in (*call.plan.rlimits, ("NOFILE", call.plan.open_files)):
            _limit(getattr(resource, f"RLIMIT_{name}"), value)
        if call.uid:
            os.setgroups([])
            os.setresgid(call.uid, call.uid, call.uid)
            os.setresuid(call.uid, call.uid, call.uid)  # all capabilities are lost with it
        os.chdir(_WORKSPACE)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        interpreter.prepare(call.plan, _CONTROL)
        kernel.install_seccomp_filter(Now(), call.plan.guest_filter, listens=False)
        code = interpreter.work()()
    except BaseException as error:  # noqa: BLE001 - the line before os._exit
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        code = 1
    os._exit(code)


def _limit(number: int, value: int) -> None:
    hard = resource.getrlimit(number)[1]
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(number, (limit, limit))


def _relay(sources: dict[int, bytes], told: int, guest: int) -> int:
    """Pass on output until the program has ended, then the rest of it; return the wait status."""
    poll = select.poll()
    for source in (*sources, told):
        poll.register(source, select.POLLIN)
    status: int | None = None
    while sources:
        for source, _ in poll.poll():
            if source == told:
                os.read(told, 4096)
                ended = os.waitpid(guest, os.WNOHANG) if status is None else (0, 0)
                if ended[0] == guest:
                    status = ended[1]
                    _kill_others()  # so that every stream ends
            elif data := os.read(source, channel.PACKET_BYTES + 1):
                _say(sources[source], data)
            else:
                poll.unregister(source)
                del sources[source]
    return os.waitpid(guest, 0)[1] if status is None else status


def _kill_others() -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # everything but this process, pid 1


def _say(kind: bytes, data: bytes = b"") -> None:
    for start in range(0, max(len(data), 1), _PIECE) if kind != WORD else (0,):
        piece = data if kind == WORD else data[start : start + _PIECE]  # a packet is not split
        line = kind + base64.b64encode(piece) + b"\n"
        while line:
            line = line[os.write(1, line) :]


class _Lines:
    """A file that is written in lines of FILES."""

    def write(self, data: bytes) -> int:
        if data:
            _say(FILES, data)
        return len(data)


def _send_files() -> None:
    """Send the regular files below /workspace; nothing runs any more that could change them."""
    with tarfile.open(fileobj=_Lines(), mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
        for above, _, names in os.walk(_WORKSPACE):
            for name in names:
                path = os.path.join(above, name)
                try:
                    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                except OSError:
                    continue
                with open(opened, "rb") as file:
                    found = os.fstat(opened)
                    if not stat.S_ISREG(found.st_mode):
                        continue
                    member = tarfile.TarInfo(os.path.relpath(path, _WORKSPACE))
                    member.size, member.mode = found.st_size, found.st_mode & 0o777
                    archive.addfile(member, file)
