"""Where the daemon listens: a socket in a directory that nobody else may write, or systemd's."""

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from ....policies.errors import BusyError, PolicyError

_NAME = "cellwright.sock"
_BACKLOG = 128
_LONGEST = 107  # sun_path in unix(7), without the NUL at its end
_FIRST_PASSED = 3  # SD_LISTEN_FDS_START in sd_listen_fds(3)


def default_path() -> Path:
    """Return where a daemon of this user listens unless told; raises PolicyError if nowhere."""
    if os.geteuid() == 0:
        return Path("/run", _NAME)
    directory = os.environ.get("XDG_RUNTIME_DIR")
    if not directory:
        raise PolicyError(
            "this user has no directory for sockets: XDG_RUNTIME_DIR is not set",
            "name a socket in a directory of mode 0700",
        )
    return Path(directory, _NAME)


def check_length(path: Path) -> str:
    """Return the path as connect(2) takes it; raises PolicyError if it is too long."""
    name = os.fspath(path)
    if len(os.fsencode(name)) > _LONGEST or "\0" in name:
        raise PolicyError(f"{name!r} is no name of a socket: at most {_LONGEST} bytes")
    return name


@contextlib.contextmanager
def listening_at(path: Path) -> Iterator[socket.socket]:
    """Give a socket that listens at `path`, mode 0600, and remove it afterwards.

    What a daemon that was killed left there is replaced: its lock is free then.  Raises BusyError if
    one lives, PolicyError if others may write the directory, or something else lies there.
    """
    check_length(path)
    _check_directory(path.parent)
    with _locked(path), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        _check_replaceable(path)
        made = path.with_name(f".{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
        try:
            listener.bind(check_length(made))
            os.chmod(made, 0o600)
            listener.listen(_BACKLOG)
            ours = os.stat(made).st_ino
            os.rename(made, path)  # whoever connects meets the old one's end or us, never nothing
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


def passed_by_systemd(environment: Mapping[str, str]) -> socket.socket | None:
    """Return the socket that systemd listens at for us, if it started us so (sd_listen_fds(3)).

    Raises PolicyError if it is not one of ours.
    """
    if environment.get("LISTEN_PID") != str(os.getpid()):
        return None
    if environment.get("LISTEN_FDS") != "1":
        raise PolicyError(
            "systemd passes other than one socket", "one ListenSequentialPacket= line"
        )
    os.set_inheritable(_FIRST_PASSED, False)
    try:
        passed = socket.socket(fileno=_FIRST_PASSED)
        listens = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise PolicyError(f"systemd passes no socket: {error.strerror}") from None
    if passed.family != socket.AF_UNIX or passed.type != socket.SOCK_SEQPACKET or not listens:
        raise PolicyError("systemd passes another kind of socket", "use ListenSequentialPacket=")
    return passed


def notify(state: str, environment: Mapping[str, str]) -> None:
    """Tell systemd, if it wants to know, how we are (sd_notify(3))."""
    if place := environment.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.sendto(state.encode(), place.replace("@", "\0", 1) if place[0] == "@" else place)


def _check_directory(directory: Path) -> None:
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
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock beside the socket: it is free as soon as its owner is gone, killed included."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        descriptor = _lock(lock)
    except BlockingIOError:
        raise BusyError(
            f"a daemon listens at {path} already", "stop it, or name another socket"
        ) from None
    except OSError as error:
        raise PolicyError(f"cannot lock {lock}: {error.strerror}") from None
    try:
        yield
    finally:
        os.unlink(lock)
        os.close(descriptor)


def _lock(lock: Path) -> int:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        except FileNotFoundError:
            pass  # its owner removed it, and with it what we locked
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _check_replaceable(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise PolicyError(f"{path} is there already, and no socket of ours")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return pid and uid of who is at the other end (SO_PEERCRED in unix(7))."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(pid), int(uid)


_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
