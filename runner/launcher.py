"""The launcher: the single-threaded process that cells are forked from.

Started by the supervisor as `python -I -S` with an empty environment and one SOCK_SEQPACKET socket
as descriptor 3.  It imports first, builds the root that all its cells share, gives up root if it had
it, and from then on only forks.  It is three processes: a keeper, which watches the supervisor; under
it the nursery, which makes the inits of cells and is pid 1 of a pid namespace that holds them all, so
that its end, for whatever reason, is the end of everything; and the launcher proper, which forks.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, NoReturn

from . import channel
from .cell import interpreter, privileges
from .cell.enter import Descriptors, Site
from .cell.guest import Guest, become_guest
from .inits import Init, Inits, Nursery
from .kernel import mounts, processes
from .kernel import privileges as kernel
from .messages import Boot, Ended, Failed, Fork, Forked, Mounted, Reaped, Status, decode, encode
from .root import enter_new_root

_CONTROL = 3
_BOOT_BYTES = 4 * 1024 * 1024
_LAUNCHER_ID = 1000  # the launcher's uid and gid in its own user namespace


def main(own_paths: int) -> NoReturn:
    """Read the boot frame, become keeper and launcher, fork cells until the supervisor is gone.

    The first `own_paths` entries of sys.path are ours, not the guest's.
    """
    sock = socket.socket(fileno=_CONTROL)
    # Python's own handler would let a guest interrupt init: pid 1 is safe only from signals for
    # which it has none (pid_namespaces(7)).
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    processes.close_range(_CONTROL + 1, 0xFFFFFFFF)
    os.umask(0o022)  # the directories that root makes are another id's to pass, whatever ours was
    try:
        del sys.path[:own_paths]  # everything of ours is imported
        boot = decode(channel.Receiver(sock, _BOOT_BYTES).receive_whole(), Boot)
        _leave_the_host(boot)
        keeper = os.pidfd_open(os.getpid())
        pid = os.fork()
        if pid:
            _keep(pid, sock, boot.host_uid)
        site = _settle(boot, sock)
        inits = _part_from_nursery(site)
        with _writable_workspace(boot.plan.preload):
            interpreter.prepare(boot.plan)
        channel.send(sock, encode(Forked()))
        _Launcher(site, sock, inits, keeper).serve()
    except BaseException as error:  # noqa: BLE001 - the line before os._exit
        _explain(sock, error)
    os._exit(1)


def _explain(sock: socket.socket, error: BaseException) -> None:
    number = getattr(error, "errno", None) or 0
    about = getattr(error, "filename", None) or type(error).__name__
    channel.send(sock, encode(Failed(number, f"{about}: {getattr(error, 'strerror', error)}")))


def _is_root() -> bool:
    return os.geteuid() == 0 and privileges.has_sys_admin()


def _leave_the_host(boot: Boot) -> None:
    """Move the next child into a pid namespace of its own, and us into its mount namespace.

    Root does it as root, because only root may read every path that has to be shown; anyone else,
    root without CAP_SYS_ADMIN included, does it in a user namespace.
    """
    privileges.set_process_name("cell-keeper")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a pidfd and a socket for every cell
    _prefer_to_be_killed()
    if not _is_root():
        if os.geteuid() == 0:
            privileges.become(boot.host_uid)
        _enter_user_namespace()
    processes.unshare(processes.CLONE_NEWNS | processes.CLONE_NEWPID)


def _prefer_to_be_killed() -> None:
    """Let the OOM killer take cells before the process that embeds us (proc(5), oom_score_adj)."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _enter_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    processes.unshare(processes.CLONE_NEWUSER)
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    privileges.map_ids(proc, _LAUNCHER_ID, uid, gid)
    os.close(proc)


def _settle(boot: Boot, sock: socket.socket) -> Site:
    """Build the shared root, give up root, and become single-minded."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last_capability = int(file.read())
    root = _is_root()
    shelf = enter_new_root(boot)
    if shelf is not None:  # before any process is forked that could have it too
        channel.send(sock, encode(Mounted()), (shelf,))
        os.close(shelf)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if root and os.getuid() == 0:
        privileges.become(boot.host_uid)
        _enter_user_namespace()
        processes.unshare(processes.CLONE_NEWNS)
    # Namespaces of its own, to come home to; each cell's uts namespace starts as a copy.
    processes.unshare(processes.CLONE_NEWNET | processes.CLONE_NEWIPC | processes.CLONE_NEWUTS)
    kernel.sethostname(boot.plan.hostname)
    return Site(boot.plan, proc, _LAUNCHER_ID, last_capability)


def _part_from_nursery(site: Site) -> Inits:
    """Fork: what was becomes the nursery, and the child, in which this returns, the launcher."""
    nursery, launcher = channel.pair()
    if os.fork():
        Nursery(launcher, site.host_proc).serve(site.last_capability, site.plan.init_filter)
    privileges.set_process_name("cell-launcher")
    launcher.close()
    return Inits(nursery, site.host_proc)


@contextlib.contextmanager
def _writable_workspace(preload: tuple[str, ...]) -> Iterator[None]:
    """Let modules that are preloaded write somewhere, as some do when imported."""
    if not preload:
        yield
        return
    flags = mounts.NOSUID | mounts.NODEV | mounts.NOEXEC
    mounts.attach(mounts.new_filesystem("tmpfs", flags, size="64M", mode="0700"), "/workspace")
    yield
    mounts.detach("/workspace")


def _keep(nursery: int, sock: socket.socket, host_uid: int) -> NoReturn:
    """Wait until the nursery ends or the supervisor is gone, and leave nothing behind."""
    if os.geteuid() == 0:
        privileges.become(host_uid)
    pidfd = os.pidfd_open(nursery)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(sock, 0)  # only POLLHUP: what the supervisor says is the launcher's to read
    while not any(descriptor == pidfd for descriptor, _ in poll.poll()):
        os.kill(nursery, signal.SIGKILL)  # works on a stopped launcher too
        poll.unregister(sock)
    os.waitpid(nursery, 0)
    os._exit(0)


class _Cell(NamedTuple):
    """A cell as the launcher knows it."""

    init: Init
    guest: int
    guest_pidfd: int
    status: socket.socket


class _Launcher:
    """Forks a cell per Fork frame, reaps it, and says so on the cell's status channel."""

    def __init__(self, site: Site, sock: socket.socket, inits: Inits, keeper: int) -> None:
        self._site = site
        self._sock = sock
        self._inits = inits
        self._ends: dict[int, Callable[[], None]] = {}  # pidfd -> what to do once it has ended
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._keeper = keeper
        self._poll.register(keeper, select.POLLIN)

    def serve(self) -> None:
        """Serve until the supervisor closes the socket or the keeper is gone."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._keeper:
                    return
                if descriptor != self._sock.fileno():
                    self._poll.unregister(descriptor)
                    self._ends.pop(descriptor)()
                elif not self._serve_one():
                    return

    def _serve_one(self) -> bool:
        frame, received = channel.receive_with_descriptors(self._sock)
        if not frame:
            return False
        fork = decode(frame, Fork)
        cgroup = received.pop() if fork.into_cgroup else None
        status, control, stdin, stdout, stderr, *cgroups = received
        descriptors = Descriptors(status, control, stdin, stdout, stderr, tuple(cgroups))
        try:
            self._fork(descriptors, cgroup, parked=fork.parked)
        finally:
            for each in received[1:] if cgroup is None else [cgroup, *received[1:]]:
                os.close(each)
        return True

    def _fork(self, descriptors: Descriptors, cgroup: int | None, *, parked: bool) -> None:
        status = socket.socket(fileno=descriptors.status)
        try:
            pid, pidfd, init = self._inits.fork(cgroup)
        except OSError as error:
            _tell(status, Failed(error.errno or 0, f"{error.filename}: {error.strerror}"))
            status.close()
            return
        if pid == 0:
            wanted = parked and not self._site.plan.program
            rehearse = interpreter.rehearse if wanted else None
            become_guest(self._site, descriptors, Guest(rehearse, interpreter.serve))
        _tell(status, Forked(), (init.pidfd, pidfd))
        self._at_end_of(pidfd, partial(self._reap_guest, _Cell(init, pid, pidfd, status)))

    def _at_end_of(self, pidfd: int, do: Callable[[], None]) -> None:
        self._ends[pidfd] = do
        self._poll.register(pidfd, select.POLLIN)

    def _reap_guest(self, cell: _Cell) -> None:
        """The guest's main process has ended, and with it the cell."""
        _, wait_status, usage = os.wait4(cell.guest, 0)
        os.close(cell.guest_pidfd)
        _tell(cell.status, Ended(wait_status))
        cell.init.kill()
        used = Reaped(usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024)
        self._at_end_of(cell.init.pidfd, partial(_bury, cell, used))


def _bury(cell: _Cell, used: Reaped) -> None:
    """Nothing of the cell runs any more: init ends last."""
    os.close(cell.init.pidfd)
    _tell(cell.status, used)
    cell.status.close()


def _tell(status: socket.socket, frame: Status, descriptors: tuple[int, ...] = ()) -> None:
    """Send a status frame, to nobody if the supervisor has lost interest in the cell."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.send(status, encode(frame), descriptors)
