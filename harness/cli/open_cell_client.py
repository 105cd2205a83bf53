"""The client of a project's open cell: `cellwright exec` by a daemon, in the time that Python takes.

It imports no module that takes longer than a command: msgspec and argparse neither.  So it speaks as
much of the protocol as lean_frames.py does, and leaves every other answer to its caller.
"""

import _signal  # type: ignore[import-not-found] # without the enums of `signal`
import _socket
import array
import os
import select
import struct
import sys

from ..sandbox.remote import lean_frames as frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..text.escape_sequences import TerminalFilter

NONE_WAS_USED = b"\x93\xaaNoOpenCell\xa0\x00"
_WELCOME, _STARTED = b"\xa7Welcome", b"\x91\xaeCommandStarted"
_PACKET = 64 * 1024
_CHUNK = 1 << 16
_INPUT, _OUTPUT, _ERRORS = 0, 1, 2
_STATUS = struct.Struct("!i")
_LOST = 70
_PASSED_ON = (
    _signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT, _signal.SIGUSR1, _signal.SIGUSR2,
)  # fmt: skip

left_over: bytes | None = None  # the daemon's answer if it is no command; None if no daemon answers


def socket_path(arguments: "Sequence[str]") -> str:
    """Return the path of the daemon's socket: that of --connect, or the user's; "" without one."""
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for at, word in enumerate(words):
        if word == "--connect" and at + 1 < len(words):
            return words[at + 1]
        if word.startswith("--connect="):
            return word.partition("=")[2]
    if os.geteuid() == 0:
        return "/run/cellwright.sock"
    directory = os.environ.get("XDG_RUNTIME_DIR")
    return f"{directory}/cellwright.sock" if directory else ""


def attempt(arguments: "Sequence[str]", path: str) -> int | None:
    """Run `cellwright exec` with these arguments in the open cell of the project; return the status of
    the command, None if no open cell is for it: `left_over` tells why."""
    global left_over  # noqa: PLW0603 - one command runs in this process
    descriptors: list[int] = []
    try:
        sock = frames.connected(path)
        if sock is None:
            return None
        left_over = frames.greet(sock)
        if left_over[1 : 1 + len(_WELCOME)] != _WELCOME:
            return None
        at_terminal = os.isatty(_INPUT) and os.isatty(_OUTPUT)
        left_over, descriptors = _exchange(sock, _request(arguments, at_terminal=at_terminal))
        if left_over != _STARTED:
            return None
    except (OSError, ValueError):
        return None
    return (_at_terminal if at_terminal else _with_pipes)(*descriptors)


def _request(arguments: "Sequence[str]", *, at_terminal: bool) -> list[object]:
    words = [os.fsencode(each) for each in arguments]
    environment = [b"%b=%b" % pair for pair in os.environb.items()]
    size = os.get_terminal_size(_OUTPUT) if at_terminal else None
    terminal = [size.lines or 24, size.columns or 80] if size else None
    return ["RunOnProject", words, os.getcwdb(), environment, terminal]


def _exchange(sock: _socket.SocketType, frame: object) -> tuple[bytes, list[int]]:
    """Send a frame; return the answer, of one packet, and the descriptors beside it."""
    frames.send(sock, frames.pack(frame))
    space = _socket.CMSG_SPACE(8 * 4)
    packet, ancillary, _, _ = sock.recvmsg(_PACKET + 1, space, _socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for _, _, rights in ancillary:
        found.frombytes(rights)
    return packet[1:], list(found)


def _at_terminal(connection: int, master: int) -> int:
    from .running.terminal_relay import TerminalRelay

    os.set_blocking(master, False)
    TerminalRelay(master).run()
    os.close(master)  # hangs up: the person's terminal may be gone, and the program goes on
    return _status(_opened(connection))


def _opened(connection: int) -> _socket.SocketType:
    """Return the connection to the cell, which the daemon did not let block."""
    cell = _socket.socket(fileno=connection)
    cell.setblocking(True)
    return cell


def _with_pipes(connection: int, feed: int, output: int, errors: int) -> int:
    """Connect the command's streams with those of this process until it has ended."""
    cell = _opened(connection)

    def send(number: int, frame: object) -> None:
        try:
            cell.send(bytes([number]))
        except OSError:
            return

    for number in _PASSED_ON:
        _signal.signal(number, send)
    os.set_blocking(feed, False)
    poll, unsent = select.poll(), b""
    sinks = {output: _sink(_OUTPUT), errors: _sink(_ERRORS)}
    for each in (connection, output, errors, _INPUT):
        poll.register(each, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        for source in [each for each in sinks if each in ready]:
            if not _pass_on(source, *sinks[source]):
                poll.unregister(source)
                os.close(source)
                del sinks[source]
        if _INPUT in ready:
            unsent = os.read(_INPUT, _CHUNK)
            poll.unregister(_INPUT)
            if unsent:
                poll.register(feed, select.POLLOUT)
            else:
                os.close(feed)
        elif feed in ready:
            unsent = _fed(feed, unsent)
            if not unsent:
                poll.unregister(feed)
                poll.register(_INPUT, select.POLLIN)
        if connection in ready:
            break
    for source, sink in sinks.items():
        os.set_blocking(source, False)
        while _pass_on(source, *sink):
            continue
        os.set_blocking(source, True)
    _restore()
    status = _status(cell)
    _leave(cell, list(sinks))
    return status


def _leave(cell: _socket.SocketType, pipes: list[int]) -> None:
    """Give the cell the pipes, to which what runs in the background may write."""
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", pipes))
    try:
        cell.sendmsg([b"\0"], [rights] if pipes else [])
    except OSError:  # it has ended
        return


_filters: "list[tuple[int, TerminalFilter]]" = []


def _sink(descriptor: int) -> "tuple[int, Callable[[bytes], bytes]]":
    """Return a descriptor, and what makes output of programs harmless for it if it is a terminal, whose
    answers the next program would take for typed text."""
    if not os.isatty(descriptor):
        return descriptor, bytes
    from ..text.escape_sequences import TerminalFilter

    passed = TerminalFilter()
    _filters.append((descriptor, passed))
    return descriptor, passed.feed


def _restore() -> None:
    for descriptor, passed in _filters:
        try:
            os.write(descriptor, passed.restore())
        except OSError:  # it has hung up
            continue


def _pass_on(source: int, sink: int, harmless: "Callable[[bytes], bytes]") -> bool:
    """Pass on a chunk; return whether there may be more."""
    try:
        data = os.read(source, _CHUNK)
        view = memoryview(harmless(data))
        while view:
            view = view[os.write(sink, view) :]
    except (
        OSError
    ):  # nothing is there, or the reader has gone, which the command learns when it writes
        return False
    return bool(data)


def _fed(feed: int, data: bytes) -> bytes:
    """Feed the command; return what it has not taken."""
    try:
        return data[os.write(feed, data) :]
    except BlockingIOError:
        return data
    except OSError:  # it reads no more
        return b""


def _status(cell: _socket.SocketType) -> int:
    told = cell.recv(_STATUS.size)
    if len(told) == _STATUS.size:
        return int(_STATUS.unpack(told)[0]) & 0xFF
    sys.stderr.write("cellwright: the open cell has ended, and the command with it\n")
    return _LOST
