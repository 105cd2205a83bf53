"""The inits of cells: pid 1 of each, and with it the namespaces of a cell, made ahead of need.

An init executes nothing: it is in pause(2) from its first moment, and so can share the memory of
the process that makes it and costs next to nothing to keep.  It has nothing to do.  Signals from
within its pid namespace do not reach it, for it handles none (pid_namespaces(7)); what is orphaned
to it is reaped by the kernel, because it ignores SIGCHLD (wait(2), NOTES); and when it is killed, the
kernel kills everything in its pid namespace.

They are made by the nursery, a process beside the launcher: whoever ignores SIGCHLD cannot wait for
a guest, and whoever has moved into a cell's namespaces cannot make new ones.
"""

import contextlib
import errno
import os
import signal
import socket
from typing import NamedTuple, NoReturn

from .. import channel
from ..cell import privileges
from ..kernel import privileges as kernel
from ..kernel import processes
from ..messages import Failed, Forked, decode, encode

_READY = 2  # a new network namespace takes 0.2 to 0.5 ms: not while somebody waits for a cell
_ANOTHER = b"+"
_NAMES = ("net", "ipc", "uts")
_NAMESPACES = (
    processes.CLONE_NEWPID | processes.CLONE_NEWNET
    | processes.CLONE_NEWIPC | processes.CLONE_NEWUTS
)  # fmt: skip


class Init(NamedTuple):
    pidfd: int
    namespaces: tuple[int, ...]  # to be entered before the guest is forked

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def is_alive(self) -> bool:
        return not channel.has_news(self.pidfd)

    def forget(self) -> None:
        for descriptor in (self.pidfd, *self.namespaces):
            os.close(descriptor)


class Inits:
    """The launcher's end: takes inits, and forks guests into their namespaces."""

    def __init__(self, nursery: socket.socket, proc: int) -> None:
        """`proc` is a descriptor of the launcher's /proc."""
        self._nursery = nursery
        self._home = _open_namespaces("self", _NAMES, proc)
        self._ahead = _READY

    def fork(self, cgroup: int | None) -> tuple[int, int, Init]:
        """Fork the guest's process into the namespaces of an init, and a mount namespace of its own.

        Returns its pid and pidfd, and the init; pid 0 in the child.  Raises OSError.
        """
        init = self._take()
        try:
            for namespace in init.namespaces:
                processes.enter(namespace)
            pid, pidfd = processes.fork(processes.CLONE_NEWNS, cgroup)
        except OSError:
            self._leave(init)
            init.kill()
            os.close(init.pidfd)
            raise
        if pid:
            self._leave(init)
        return pid, pidfd, init

    def _take(self) -> Init:
        """Return the next init; raises OSError if one that was asked for just now could not be made."""
        refused = 0
        for _ in range(_READY + 1):
            self._nursery.send(_ANOTHER * (1 + self._ahead))
            self._ahead = 0  # from now on as many are made as are taken
            frame, descriptors = channel.receive_with_descriptors(self._nursery)
            message = decode(frame, Forked | Failed)
            if isinstance(message, Forked):
                pidfd, *namespaces = descriptors
                init = Init(pidfd, tuple(namespaces))
                if init.is_alive():
                    return init
                init.forget()  # somebody killed it while it waited
                refused = errno.ESRCH
            else:
                refused = message.errno
        raise OSError(refused, os.strerror(refused), "clone of a cell's init")

    def _leave(self, init: Init) -> None:
        """Go home: what is in a cell's namespaces must not outlive the cell.

        Who cannot must end, and everything with it: RuntimeError, for nobody takes that for a cell
        that could not be built.
        """
        for namespace in init.namespaces:
            os.close(namespace)
        try:
            for namespace in self._home:
                processes.enter(namespace)
        except OSError as error:
            raise RuntimeError(f"the launcher cannot leave a cell: {error}") from None


class Nursery:
    """Makes inits as the launcher asks for them."""

    def __init__(self, launcher: socket.socket, proc: int) -> None:
        self._launcher = launcher
        self._proc = proc

    def serve(self, last_capability: int, program: bytes) -> NoReturn:
        """Confine this process, and so its inits, and make inits until the launcher is gone.

        Its end is the end of every cell: it is pid 1 of the pid namespace that they are all in.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        privileges.set_process_name("cell-nursery")
        privileges.make_undumpable()
        processes.close_all_but([self._launcher.fileno(), self._proc])
        privileges.keep_only_sys_admin(last_capability)
        kernel.install_seccomp_filter(program)
        while asked := self._launcher.recv(1 + _READY):
            for _ in asked:
                self._make()
        os._exit(0)

    def _make(self) -> None:
        privileges.set_process_name("cell-init")
        try:
            pid, pidfd = processes.sleeper(_NAMESPACES)
        except OSError as error:
            failed = Failed(error.errno or 0, error.filename)
            channel.send(self._launcher, encode(failed))
            return
        finally:
            privileges.set_process_name("cell-nursery")
        namespaces = _open_namespaces(str(pid), ("pid", *_NAMES), self._proc)
        channel.send(self._launcher, encode(Forked()), (pidfd, *namespaces))
        for descriptor in (pidfd, *namespaces):
            os.close(descriptor)


def _open_namespaces(process: str, names: tuple[str, ...], proc: int) -> list[int]:
    """Open namespaces of a process that is like ourselves."""
    privileges.make_dumpable()  # who hides from others hides from its like (ptrace(2))
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC
        return [os.open(f"{process}/ns/{name}", flags, dir_fd=proc) for name in names]
    finally:
        privileges.make_undumpable()
