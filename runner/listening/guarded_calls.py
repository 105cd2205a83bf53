"""`GuardedCalls`: the calls of a cell's guests that make names, handed to its guard.

The path is read once from the caller's memory, and the call is never let go on: another thread could
have changed the path by then.  The guard (`runner/launcher/guard.py`) makes the call with our copies,
and a file that it opened is given to the caller.  One thread does it all, one call after the other.
"""

import _socket
import contextlib
import errno
import os
import signal
import threading
from _queue import Empty, SimpleQueue  # `queue` takes longer to import
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from ...policies.plan import Rule
from .. import channel
from ..kernel import notifications
from ..kernel.notifications import Notification, int32
from ..messages import GuardAnswer, GuardedCall, GuardsReady, decode
from ..messages import encode as encoded
from . import evidence
from .locks import LOOK_SECONDS
from .waiting_call import hand_over

_PATH_BYTES = 4096
_PAGE = 4096
_AT_ONCE = 512  # most paths are shorter
_AT_FDCWD = -100
_EMPTY_PATH = 0x1000  # linkat(2)
_TEXT = -1  # in place of an argument with a directory: the path is only text
_CREATES = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_MOST_WAITING = 64
_END_SECONDS = 5.0
_GUARD_SECONDS = 20.0
_HIDES = "filesystem.protected: the host may not read the memory of this process"

# arguments: the call's notification, its name, its arguments in words, the rule that refuses it
Note = Callable[[Notification, str, tuple[str, ...], str], None]
# returns the socket of a new guard, which answers first that it is ready
OpenGuard = Callable[[], _socket.socket]


class _Form(NamedTuple):
    """Which arguments of a call are what; None where it has none."""

    kind: str
    paths: tuple[tuple[int | None, int], ...]  # argument with a directory, argument with a path
    flags: int | None = None
    mode: int | None = None


_FORMS = {
    "open": _Form("open", ((None, 0),), 1, 2),
    "openat": _Form("open", ((0, 1),), 2, 3),
    "creat": _Form("open", ((None, 0),), None, 1),
    "truncate": _Form("truncate", ((None, 0),)),
    "mkdir": _Form("mkdir", ((None, 0),), None, 1),
    "mkdirat": _Form("mkdir", ((0, 1),), None, 2),
    "mknod": _Form("mknod", ((None, 0),), None, 1),
    "mknodat": _Form("mknod", ((0, 1),), None, 2),
    "symlink": _Form("symlink", ((_TEXT, 0), (None, 1))),
    "symlinkat": _Form("symlink", ((_TEXT, 0), (1, 2))),
    "link": _Form("link", ((None, 0), (None, 1))),
    "linkat": _Form("link", ((0, 1), (2, 3)), 4),
    "rename": _Form("rename", ((None, 0), (None, 1))),
    "renameat": _Form("rename", ((0, 1), (2, 3))),
    "renameat2": _Form("rename", ((0, 1), (2, 3)), 4),
}


class _Request(NamedTuple):
    notification: Notification
    name: str
    call: GuardedCall
    starts: tuple[int, ...]  # descriptors of ours


class GuardedCalls:
    """Answers the calls of one cell that the plan leaves to its guard."""

    def __init__(
        self, listener: int, forms: dict[int, tuple[Rule, ...]], note: Note, open_guard: OpenGuard
    ) -> None:
        """`forms` as `Plan.guarded`."""
        self._listener = listener
        self._forms = forms
        self._note = note
        self._open_guard = open_guard
        self._calls: SimpleQueue[Notification | None] = SimpleQueue()
        self._waiting: list[_Request] = []  # opens of pipes that have no reader yet
        self._thread: threading.Thread | None = None
        self._guard: _socket.socket | None = None
        self._process = -1  # a pidfd
        self._is_closed = False

    def name_of(self, notification: Notification) -> str:
        """Return the name of a call that is the guard's; empty if it is not."""
        for form in self._forms.get(notification.number, ()):
            if form.holds(notification.arguments):
                return form.call
        return ""

    def answer(self, notification: Notification) -> None:
        """Have the thread answer a call."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._calls.put(notification)

    def close(self) -> None:
        """End the thread and the guard; the cell has ended."""
        self._is_closed = True
        self._calls.put(None)
        self._end_guard()
        if self._thread:
            self._thread.join(_END_SECONDS)
        for each in self._waiting:
            _close(each.starts)

    def _run(self) -> None:
        while True:
            try:
                notification = (
                    self._calls.get(timeout=LOOK_SECONDS) if self._waiting else self._calls.get()
                )
            except Empty:
                waiting, self._waiting = self._waiting, []
                for each in waiting:
                    self._ask(each)
                continue
            if notification is None:
                return
            try:
                self._begin(notification)
            except BaseException:  # our bug: the caller would wait for ever
                notifications.refuse(self._listener, notification, errno.EIO)
                raise

    def _begin(self, notification: Notification) -> None:
        name = self.name_of(notification)
        try:
            request = self._copied(notification, name)
        except PermissionError:
            self._note(notification, name, (), _HIDES)
            notifications.refuse(self._listener, notification, errno.EPERM)
        except OSError as error:
            notifications.refuse(self._listener, notification, error.errno or errno.EIO)
        else:
            self._ask(request)

    def _ask(self, request: _Request) -> None:
        """Have the guard make the call, and answer it.  What was read is the caller's if it waits."""
        notification = request.notification
        if not notifications.is_waiting(self._listener, notification):
            _close(request.starts)
            return
        try:
            answer, made = self._exchange(request)
            if answer.descriptor >= 0:
                request = self._from_descriptor(request, answer.descriptor)
                answer, made = self._exchange(request)
        except OSError as error:
            notifications.refuse(self._listener, notification, error.errno or errno.EIO)
            _close(request.starts)
            return
        if answer.waits and len(self._waiting) < _MOST_WAITING:
            self._waiting.append(request)
            return
        _close(request.starts)
        if answer.rule:
            words = tuple(map(evidence.quoted, request.call.paths))
            if request.call.kind == "open":
                words = (*words, evidence.flag_names(request.call.flags))
            self._note(notification, request.name, words, answer.rule)
        if answer.errno:
            notifications.refuse(self._listener, notification, answer.errno)
        elif made < 0:
            notifications.succeed(self._listener, notification)
        else:
            hand_over(self._listener, notification, made, request.call.flags & os.O_CLOEXEC)

    # copies of arguments

    def _copied(self, notification: Notification, name: str) -> _Request:
        thread, arguments = notification.thread, notification.arguments
        form = _FORMS[name]
        flags = 0 if form.flags is None else arguments[form.flags] & 0xFFFFFFFF
        paths = tuple(_text_at(thread, arguments[at]) for _, at in form.paths)
        if name == "truncate" and arguments[1] >= 1 << 63:
            raise OSError(errno.EINVAL, "a negative length")
        status = _read(f"/proc/{thread}/status")
        starts: list[int] = []
        try:
            for (directory, _), path in zip(form.paths, paths, strict=True):
                may_be_empty = name == "linkat" and bool(flags & _EMPTY_PATH)
                starts.append(_start(thread, arguments, directory, path, may_be_empty))
            call = GuardedCall(
                form.kind,  # type: ignore[arg-type]
                paths, tuple(each >= 0 for each in starts), _CREATES if name == "creat" else flags,
                0 if form.mode is None else arguments[form.mode] & 0o177777,
                int(_field(status, b"Umask"), 8), arguments[1] if name == "truncate" else 0,
                notification.number, int(_field(status, b"NStgid")), int(_field(status, b"NSpid")),
                _terminal(thread) if b"/dev/tty" in paths else -1,
            )  # fmt: skip
        except BaseException:
            _close(tuple(each for each in starts if each >= 0))
            raise
        return _Request(notification, name, call, tuple(each for each in starts if each >= 0))

    def _from_descriptor(self, request: _Request, number: int) -> _Request:
        """Return a call that begins at a descriptor of the caller in the place of its path there."""
        start = _opened(request.notification.thread, f"fd/{number}")
        call = request.call
        if call.kind == "link":
            call = replace(
                call, paths=(b"", call.paths[1]), starts=(True, call.starts[1]),
                flags=_EMPTY_PATH,
            )  # fmt: skip
            kept = request.starts[-1:] if call.starts[1] else ()
            _close(request.starts[: len(request.starts) - len(kept)])
            return request._replace(call=call, starts=(start, *kept))
        _close(request.starts)
        call = replace(call, kind="reopen", starts=(True,))
        return request._replace(call=call, starts=(start,))

    # the guard

    def _exchange(self, request: _Request) -> tuple[GuardAnswer, int]:
        """Return the guard's answer, and what it opened or -1.  Raises OSError if there is no guard."""
        guard = self._guard or self._begin_guard()
        try:
            channel.send(guard, encoded(request.call), request.starts)
            frame, descriptors = channel.receive_with_descriptors(guard)
        except OSError:
            frame, descriptors = b"", []
        if (
            not frame
        ):  # it was killed, perhaps for the memory of the cell; the next call gets another
            self._end_guard()
            raise OSError(errno.EIO, "the guard has ended")
        return decode(frame, GuardAnswer), descriptors[0] if descriptors else -1

    def _begin_guard(self) -> _socket.socket:
        guard = self._open_guard()
        try:
            is_here = channel.has_news(guard.fileno(), _GUARD_SECONDS)
            frame, descriptors = channel.receive_with_descriptors(guard) if is_here else (b"", [])
            if not frame:
                raise OSError(errno.EIO, "the guard did not begin")
            decode(frame, GuardsReady)
        except BaseException:
            guard.close()
            raise
        (self._process,) = descriptors
        self._guard = guard
        if self._is_closed:
            self._end_guard()
        return guard

    def _end_guard(self) -> None:
        process, self._process = self._process, -1
        if process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            channel.has_news(process, _END_SECONDS)
            os.close(process)
        guard, self._guard = self._guard, None
        if guard:
            guard.close()


def _text_at(thread: int, address: int) -> bytes:
    """Read a path; raises OSError, also if the caller's memory cannot be opened."""
    memory = os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = b""
        while len(found) < _PATH_BYTES and b"\0" not in found:
            at = address + len(found)
            size = min(_AT_ONCE, _PAGE - at % _PAGE)  # the next page may not be mapped
            try:
                read = os.pread(memory, size, at)
            except (OSError, OverflowError):
                read = b""
            if not read:
                raise OSError(errno.EFAULT, "no such memory")
            found += read
    finally:
        os.close(memory)
    text, end, _ = found.partition(b"\0")
    if not end or len(text) >= _PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, "too long a path")
    return text


def _start(
    thread: int, arguments: tuple[int, ...], directory: int | None, path: bytes, may_be_empty: bool
) -> int:
    """Return a descriptor of ours of the directory where a path begins; -1 if it is absolute."""
    if directory == _TEXT or path[:1] == b"/" or not (path or may_be_empty):
        return -1
    number = _AT_FDCWD if directory is None else int32(arguments[directory])
    if number == _AT_FDCWD:
        return _opened(thread, "cwd")
    try:
        return _opened(thread, f"fd/{number}")
    except FileNotFoundError:
        raise OSError(errno.EBADF, "no such descriptor") from None


def _read(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, _PAGE)
    finally:
        os.close(file)


def _opened(thread: int, name: str) -> int:
    return os.open(f"/proc/{thread}/{name}", os.O_PATH | os.O_CLOEXEC)


def _field(status: bytes, name: bytes) -> bytes:
    """Return the last word of a line of proc_pid_status(5)."""
    return status.partition(b"\n%s:" % name)[2].partition(b"\n")[0].split()[-1]


def _terminal(thread: int) -> int:
    """Return the number of the caller's controlling terminal in /dev/pts; -1 if it has none."""
    device = int(_read(f"/proc/{thread}/stat").rpartition(b")")[2].split()[4])
    return os.minor(device) if device else -1


def _close(descriptors: tuple[int, ...]) -> None:
    for each in descriptors:
        os.close(each)
