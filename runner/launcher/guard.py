"""The guard of a cell: makes names for guests where a policy protects paths, and opens files to change.

Such a call of a guest is never made: its path lies in memory that another thread may change once it was
looked at.  The supervisor copies the arguments and sends them here.  The guard opens the directory,
asks the kernel for its path, compares that with the protected patterns, and makes the call relative to
the directory, through no link in the last component.

It has the mounts, the ids, the cgroup and the Landlock rules of the cell, and no capability.  It lies
outside the cell's pid namespace, so no guest can signal or trace it.  No directory is renamed to where
more beneath it would be protected: so a rename between look and call, also by another cell that works
on the same files, gains nothing.
"""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import _socket
import contextlib
import errno
import fcntl
import os
import re
import stat
from typing import NamedTuple, NoReturn

from ...policies.denied import Denied, denied_by
from .. import channel
from ..cell import privileges
from ..cell.enter import LauncherFacts, fence_paths
from ..kernel import _steps
from ..kernel import credentials as kernel
from ..kernel import process_calls as processes
from ..kernel.steps import Now
from ..messages import GuardAnswer, GuardedCall, GuardsReady, decode, encode
from . import git_settings

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_EXCLUSIVE = os.O_CREAT | os.O_EXCL
_MOST_LINKS = 40  # path_resolution(7)
_MOST_REMEMBERED = 256
_NOREPLACE, _EXCHANGE = 1, 2  # renameat2(2)
_SYMLINK_FOLLOW, _EMPTY_PATH = 0x400, 0x1000  # linkat(2)
# The guard is no process of the cell's /proc: what leads to the caller there is replaced by its number.
_OWN = re.compile(rb"/+proc/+(self|thread-self)(?=/|$)|/+dev/+(fd)(?=/)")
_DESCRIPTORS = re.compile(r"/proc/(\d+)(?:/task/\d+)?/fd")
_NAMELESS = {"open": errno.EISDIR, "truncate": errno.EISDIR, "rename": errno.EBUSY}


def start_maker(facts: LauncherFacts, launcher: _socket.socket) -> None:
    """Fork the process that makes guards, and tell the supervisor; to be called by the launcher."""
    ours, theirs = channel.pair()
    if os.fork() == 0:
        try:
            _make_guards(facts, theirs)
        finally:
            os._exit(1)
    theirs.close()
    channel.send(launcher, encode(GuardsReady()), (ours.fileno(),))
    ours.close()


def _make_guards(facts: LauncherFacts, asked: _socket.socket) -> None:
    privileges.set_process_name(Now(), "cell-guards")
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)  # the kernel reaps guards
    processes.close_all_but([0, 1, 2, facts.host_proc, asked.fileno()])
    while True:
        frame, descriptors = channel.receive_with_descriptors(asked)
        if not frame:
            os._exit(0)
        if os.fork() == 0:
            asked.close()
            _serve(facts, descriptors)
        for each in descriptors:
            os.close(each)


def _serve(facts: LauncherFacts, descriptors: list[int]) -> NoReturn:
    """Confine this process as a guest of the cell is, and make its calls until the supervisor hangs
    up."""
    try:
        guest, answers, *cgroups = descriptors
        sock = _socket.socket(fileno=answers)
        do = Now()
        privileges.set_process_name(do, "cell-guard")
        privileges.make_undumpable(do)
        for each in cgroups:  # first, so that what it makes is charged to the cell
            os.write(each, b"0")
            os.close(each)
        itself = os.pidfd_open(os.getpid())
        processes.enter(guest, processes.CLONE_NEWNS)
        os.close(guest)
        privileges.give_up_all(do, facts.last_capability)
        if facts.plan.landlock_abi:
            fence_paths(do, facts.plan)
        kernel.install_seccomp_filter(do, facts.plan.guard_filter)
        channel.send(sock, encode(GuardsReady()), (itself,))
        os.close(itself)
        guard = Guard(facts.plan.protected, facts.host_proc)
        while True:
            frame, starts = channel.receive_with_descriptors(sock)
            if not frame:
                os._exit(0)
            answer, made = guard.make(decode(frame, GuardedCall), starts)
            channel.send(sock, encode(answer), (made,) if made >= 0 else ())
            for each in (made, *starts):
                if each >= 0:
                    os.close(each)
    finally:
        os._exit(1)


class _ProtectedError(Exception):
    """The call would make or change a protected path."""


class _OwnDescriptorError(Exception):
    """The path leads to a descriptor of the caller."""


class _NamedPlace(NamedTuple):
    """An open directory, its path, and a name in it, maybe with a slash behind it."""

    directory: int
    path: str
    name: bytes

    @property
    def folded(self) -> str:
        """The name as patterns have it: some file systems tell no case apart."""
        return os.fsdecode(self.name.rstrip(b"/")).casefold()

    def __str__(self) -> str:
        return f"{self.path}/{os.fsdecode(self.name)}"


class Guard:
    """Makes calls, one after the other."""

    def __init__(self, protected: tuple[str, ...], proc: int) -> None:
        """`proc` is /proc of this process's pid namespace."""
        self._protected = denied_by(each.casefold() for each in protected)
        self._proc = proc
        self._remembered: dict[str, Denied | None] = {}
        self._usual: dict[str, Denied] = {}  # beneath entries that no pattern names
        self._umask = -1
        self._opened: list[int] = []

    def make(self, call: GuardedCall, starts: list[int]) -> tuple[GuardAnswer, int]:
        """Make a call, and return the answer, and a descriptor or -1."""
        try:
            if call.umask != self._umask:
                os.umask(call.umask)
                self._umask = call.umask
            given = iter(starts)
            self._starts = [next(given) if each else None for each in call.starts]
            made = getattr(self, f"_{call.kind}")(call)
            return GuardAnswer(), -1 if made is None else made
        except _ProtectedError as refused:
            return GuardAnswer(errno.EPERM, f"filesystem.protected: {refused}"), -1
        except _OwnDescriptorError as found:
            return GuardAnswer(errno.EACCES, descriptor=int(str(found))), -1
        except BlockingIOError:
            return GuardAnswer(errno.EAGAIN, waits=not call.flags & os.O_NONBLOCK), -1
        except OSError as error:
            return GuardAnswer(error.errno or errno.EIO), -1
        finally:
            while self._opened:
                os.close(self._opened.pop())

    # the calls

    def _open(self, call: GuardedCall) -> int:
        path, start = _own(call, call.paths[0]), self._starts[0]
        flags = call.flags | os.O_CLOEXEC | os.O_NOCTTY
        if flags & os.O_PATH:
            return os.open(path, flags & ~(os.O_CREAT | os.O_TRUNC), dir_fd=start)
        if flags & os.O_TMPFILE == os.O_TMPFILE:  # it has no name yet
            return os.open(path, flags, call.mode, dir_fd=start)
        for _ in range(_MOST_LINKS):
            place = self._place(call, path, start)
            if (place.path, place.name) == ("/dev", b"tty"):
                if call.terminal < 0:
                    raise OSError(errno.ENXIO, "no controlling terminal")
                path, start = b"/dev/pts/%d" % call.terminal, None
                continue
            if place.name.endswith(b"/"):
                raise OSError(errno.EISDIR, "a file is wanted")
            is_new = flags & _EXCLUSIVE == _EXCLUSIVE
            (self._require_new if is_new else self._require_free)(place)
            try:
                return self._open_here(place, flags, call.mode)
            except OSError as error:
                if error.errno != errno.ELOOP or flags & os.O_NOFOLLOW:
                    raise
            path = _own(call, os.readlink(place.name, dir_fd=place.directory))
            start = place.directory
        raise OSError(errno.ELOOP, "too many links")

    def _open_here(self, place: _NamedPlace, flags: int, mode: int) -> int:
        """Open without waiting: nothing else could be done meanwhile."""
        try:
            made = os.open(
                place.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=place.directory
            )
        except OSError as error:
            if error.errno == errno.ENXIO and not flags & os.O_NONBLOCK:
                found = os.stat(place.name, dir_fd=place.directory, follow_symlinks=False)
                if stat.S_ISFIFO(found.st_mode):
                    raise BlockingIOError(
                        errno.EAGAIN, "no reader has opened this pipe yet"
                    ) from None
            raise
        if not flags & os.O_NONBLOCK:
            fcntl.fcntl(made, fcntl.F_SETFL, fcntl.fcntl(made, fcntl.F_GETFL) & ~os.O_NONBLOCK)
        return made

    def _reopen(self, call: GuardedCall) -> int:
        """Open the file of a descriptor again: `call` starts at it."""
        self._require_free_at(self._starts[0])
        flags = (call.flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)) | os.O_CLOEXEC
        flags |= os.O_NOCTTY | os.O_NONBLOCK
        made = os.open(self._by_descriptor(self._starts[0]), flags, dir_fd=self._proc)
        if not call.flags & os.O_NONBLOCK:
            fcntl.fcntl(made, fcntl.F_SETFL, fcntl.fcntl(made, fcntl.F_GETFL) & ~os.O_NONBLOCK)
        return made

    def _truncate(self, call: GuardedCall) -> None:
        opened = self._open(GuardedCall(
            call.kind, call.paths, call.starts, os.O_WRONLY | os.O_NONBLOCK,
            process=call.process, thread=call.thread,
        ))  # fmt: skip
        self._opened.append(opened)
        os.ftruncate(opened, call.size)

    def _mkdir(self, call: GuardedCall) -> None:
        place = self._place_of(call, 0)
        self._require_new(place, is_directory=True)
        os.mkdir(place.name, call.mode, dir_fd=place.directory)

    def _mknod(self, call: GuardedCall) -> None:
        place = self._place_of(call, 0)
        self._require_new(place)
        os.mknod(place.name, call.mode, dir_fd=place.directory)

    def _symlink(self, call: GuardedCall) -> None:
        place = self._place_of(call, 1)
        self._require_new(place)
        os.symlink(call.paths[0], place.name, dir_fd=place.directory)

    def _link(self, call: GuardedCall) -> None:
        if call.flags & ~(_SYMLINK_FOLLOW | _EMPTY_PATH):
            raise OSError(errno.EINVAL, "unknown flags")
        source, start = _own(call, call.paths[0]), self._starts[0]
        if source:
            if call.flags & _SYMLINK_FOLLOW:
                self._place(call, source, start)  # notices a descriptor of the caller
            follow = 0 if call.flags & _SYMLINK_FOLLOW else os.O_NOFOLLOW
            start = self._keep(os.open(source, os.O_PATH | os.O_CLOEXEC | follow, dir_fd=start))
        self._require_free_at(start)
        place = self._place_of(call, 1)
        self._require_new(place)
        os.link(
            self._by_descriptor(start), place.name, src_dir_fd=self._proc,
            dst_dir_fd=place.directory, follow_symlinks=True,
        )  # fmt: skip

    def _rename(self, call: GuardedCall) -> None:
        source, target = self._place_of(call, 0), self._place_of(call, 1)
        if call.flags & ~(_NOREPLACE | _EXCHANGE):
            raise OSError(errno.EINVAL, "unknown flags")
        is_settings = self._are_settings(target) and not call.flags & _EXCHANGE
        if is_settings and _is(stat.S_ISREG, source):
            self._rename_settings(source, target, call)
            return
        self._require_movable(source, target)
        if call.flags & _EXCHANGE:
            self._require_movable(target, source)
        self._move(call, source, target)

    def _move(self, call: GuardedCall, source: _NamedPlace, target: _NamedPlace) -> None:
        if not call.flags:
            os.rename(
                source.name, target.name, src_dir_fd=source.directory, dst_dir_fd=target.directory
            )
            return
        given = (source.directory, source.name, target.directory, target.name, call.flags)
        answer = _steps.syscall(call.number, *given)
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))

    # settings of a repository that lies in the project

    def _are_settings(self, place: _NamedPlace) -> bool:
        return place.name == b"config" and place.path.endswith("/.git") and self._is_denied(place)

    def _rename_settings(self, source: _NamedPlace, target: _NamedPlace, call: GuardedCall) -> None:
        """Have settings of git that name no command take their place, as a file that no program has
        open."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        opened = self._keep(os.open(source.name, flags, dir_fd=source.directory))
        text = os.read(opened, git_settings.MOST_BYTES + 1)
        if wrong := git_settings.why_not(text):
            raise _ProtectedError(f"{target}: {wrong}")
        made = target._replace(name=b".cellwright-%s" % os.urandom(8).hex().encode())
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        copy = self._keep(os.open(made.name, flags, 0o600, dir_fd=made.directory))
        try:
            os.write(copy, text)
            os.fchmod(copy, os.fstat(opened).st_mode & 0o777)
            self._move(call, made, target)
        except OSError:
            os.unlink(made.name, dir_fd=made.directory)
            raise
        with contextlib.suppress(OSError):
            os.unlink(source.name, dir_fd=source.directory)

    # places

    def _place_of(self, call: GuardedCall, index: int) -> _NamedPlace:
        return self._place(call, _own(call, call.paths[index]), self._starts[index])

    def _place(self, call: GuardedCall, path: bytes, start: int | None) -> _NamedPlace:
        if not path:
            raise OSError(errno.ENOENT, "an empty path")
        bare = path.rstrip(b"/")
        above, _, name = bare.rpartition(b"/")
        if name in (b"", b".", b".."):
            raise OSError(_NAMELESS.get(call.kind, errno.EEXIST), "no name")
        if not above:
            above = b"/" if bare[:1] == b"/" else b"."
        directory = self._keep(os.open(above, _DIRECTORY, dir_fd=start))
        place = _NamedPlace(directory, self._path_of(directory), path[len(bare) - len(name) :])
        if (found := _DESCRIPTORS.fullmatch(place.path)) and name.isdigit():
            if int(found[1]) == call.process:
                raise _OwnDescriptorError(name.decode())
            raise OSError(errno.EACCES, "a descriptor of another process")
        return place

    def _keep(self, descriptor: int) -> int:
        """Have a descriptor closed after the call."""
        self._opened.append(descriptor)
        return descriptor

    def _by_descriptor(self, descriptor: int | None) -> bytes:
        return b"self/fd/%d" % (-1 if descriptor is None else descriptor)

    def _path_of(self, descriptor: int | None) -> str:
        path = os.fsdecode(os.readlink(self._by_descriptor(descriptor), dir_fd=self._proc))
        if not path.startswith("/"):
            return "/"  # a pipe, or a socket
        return path

    # patterns

    def _at(self, path: str) -> Denied | None:
        """Return what is protected beneath a directory; None if all of it is."""
        if path not in self._remembered:
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
                self._usual.clear()
            here = self._remembered[path] = self._protected.beneath(path.casefold())
            if here is not None:
                self._usual[path] = here.usual()
        return self._remembered[path]

    def _is_denied(self, place: _NamedPlace) -> bool:
        here = self._at(place.path)
        return here is None or here.enter(place.folded) is None

    def _require_free(self, place: _NamedPlace, *, is_directory: bool = False) -> Denied:
        """Return what is protected beneath a place that is not protected itself, and no directory of
        names that are."""
        here = self._at(place.path)
        below = here.enter(place.folded) if here is not None else None
        if (
            here is None
            or below is None
            or (not is_directory and below.has_more_than(self._usual[place.path]))
        ):
            raise _ProtectedError(place)
        return below

    def _require_new(self, place: _NamedPlace, *, is_directory: bool = False) -> None:
        """The same for a call that makes a name: one that is there is an error, as on any read-only
        mount, and no refusal (measured: mkdir(2) answers EEXIST before EROFS)."""
        try:
            os.stat(place.name, dir_fd=place.directory, follow_symlinks=False)
        except OSError:
            self._require_free(place, is_directory=is_directory)
        else:
            raise OSError(errno.EEXIST, "it is there")

    def _require_free_at(self, descriptor: int | None) -> None:
        path = self._path_of(descriptor)
        if self._protected.denies(path.casefold()):
            raise _ProtectedError(path)

    def _require_movable(self, source: _NamedPlace, target: _NamedPlace) -> None:
        """Refuse to have anything take a protected place, or a directory take one where more beneath
        it is protected."""
        is_directory = _is(stat.S_ISDIR, source)
        below = self._require_free(target, is_directory=is_directory)
        if is_directory:
            here = self._at(source.path)
            before = here.enter(source.folded) if here is not None else None
            if below.has_more_than(before or Denied((), frozenset())):
                raise _ProtectedError(target)


def _is(kind: "object", place: _NamedPlace) -> bool:
    found = os.stat(place.name.rstrip(b"/"), dir_fd=place.directory, follow_symlinks=False)
    return bool(kind(found.st_mode))  # type: ignore[operator]


def _own(call: GuardedCall, path: bytes) -> bytes:
    """Return a path with the caller's number in the place of what the kernel would replace by it."""
    if not (found := _OWN.match(path)):
        return path
    own = b"/proc/%d" % call.process
    if found[2]:
        own += b"/fd"
    elif found[1] == b"thread-self":
        own += b"/task/%d" % call.thread
    return own + path[found.end() :]
