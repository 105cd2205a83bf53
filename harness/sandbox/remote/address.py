"""The daemon's socket: in a directory that no other user may write, or passed by systemd."""

import _socket
import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ....policies.errors import BusyError, PolicyError

if TYPE_CHECKING:
    import socket
    from pathlib import Path

_NAME = "cellwright.sock"
_BACKLOG = 128
_LONGEST = 107  # sun_path in unix(7), without the NUL at its end
_FIRST_PASSED = 3  # SD_LISTEN_FDS_START in sd_listen_fds(3)


def default_path() -> "Path":
    """Return the default path of this user's daemon; raises PolicyError if the user has no directory
    for it."""
    from pathlib import Path  # a client has the path and does not need it

    if os.geteuid() == 0:
        return Path("/run", _NAME)
    directory = os.environ.get("XDG_RUNTIME_DIR")
    if not directory:
        raise PolicyError(
            "this user has no directory for sockets: XDG_RUNTIME_DIR is not set",
            "name a socket in a directory of mode 0700",
        )
    return Path(directory, _NAME)


def check_length(path: str | os.PathLike[str]) -> str:
    """Return the path as connect(2) takes it; raises PolicyError if it is too long."""
    name = os.fspath(path)
    if len(os.fsencode(name)) > _LONGEST or "\0" in name:
        raise PolicyError(f"{name!r} cannot name a socket: at most {_LONGEST} bytes, no NUL")
    return name


@contextlib.contextmanager
def listening_at(path: "Path", group: int = -1) -> "Iterator[socket.socket]":
    """Give a socket that listens at `path`, mode 0600, or with a `group` 0660, and remove it
    afterwards.

    The socket of a daemon that was killed is replaced: its lock is free.  Raises BusyError if another
    daemon holds the lock, PolicyError if other users may write the directory or if `path` is not a
    socket of this user.
    """
    import socket  # slow to import, and a client needs less

    check_length(path)
    _check_directory(path.parent)
    with _locked(path), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        _check_replaceable(path)
        made = path.with_name(f".{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
        try:
            os.fchmod(listener.fileno(), 0o600)  # the mode of the file that bind(2) makes
            listener.bind(check_length(made))
            if group >= 0:
                os.chown(made, -1, group, follow_symlinks=False)
                os.chmod(made, 0o660)  # here, because bind(2) applies the umask
            listener.listen(_BACKLOG)
            ours = os.stat(made).st_ino
            os.rename(made, path)  # atomic: at each moment a client finds the old or the new socket
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(made)
            raise PolicyError(f"cannot listen at {path}: {error.strerror}") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.lstat(path).st_ino == ours:
                    os.unlink(path)


def passed_by_systemd(environment: Mapping[str, str]) -> "socket.socket | None":
    """Return the listening socket that systemd passed, None without one (sd_listen_fds(3)).

    Raises PolicyError for several sockets, or one of another kind.
    """
    import socket  # as above

    if environment.get("LISTEN_PID") != str(os.getpid()):
        return None
    if environment.get("LISTEN_FDS") != "1":
        raise PolicyError(
            "systemd must pass exactly one socket", "use one ListenSequentialPacket= line"
        )
    os.set_inheritable(_FIRST_PASSED, False)
    try:
        passed = socket.socket(fileno=_FIRST_PASSED)
        listens = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise PolicyError(f"systemd did not pass a socket: {error.strerror}") from None
    if passed.family != socket.AF_UNIX or passed.type != socket.SOCK_SEQPACKET or not listens:
        raise PolicyError("systemd passed the wrong kind of socket", "use ListenSequentialPacket=")
    return passed


def notify(state: str, environment: Mapping[str, str]) -> None:
    """Report our state to systemd if NOTIFY_SOCKET is set (sd_notify(3))."""
    if place := environment.get("NOTIFY_SOCKET"):
        import socket  # as above

        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.sendto(state.encode(), place.replace("@", "\0", 1) if place[0] == "@" else place)


def _check_directory(directory: "Path") -> None:
    try:
        found = os.stat(directory)
    except OSError as error:
        raise PolicyError(f"cannot listen in {directory}: {error.strerror}") from None
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PolicyError(
            f"cannot listen in {directory}: another user may write there",
            "name a socket in a directory of mode 0700",
        )


@contextlib.contextmanager
def _locked(path: "Path") -> Iterator[None]:
    """Hold the lock file next to the socket; the kernel frees it when its owner ends, even by
    SIGKILL."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        descriptor = _lock(lock)
    except BlockingIOError:
        raise BusyError(
            f"a daemon already listens at {path}", "stop it, or name another socket"
        ) from None
    except OSError as error:
        raise PolicyError(f"cannot lock {lock}: {error.strerror}") from None
    try:
        yield
    finally:
        os.unlink(lock)
        os.close(descriptor)


def _lock(lock: "Path") -> int:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        except FileNotFoundError:
            pass  # the owner removed the locked file: try again
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _check_replaceable(path: "Path") -> None:
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise PolicyError(f"{path} exists and is not a socket of this user")


def peer_of(sock: _socket.SocketType) -> tuple[int, int]:
    """Return pid and uid of the process at the other end (SO_PEERCRED in unix(7))."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _PEER.size))
    return int(pid), int(uid)


_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
