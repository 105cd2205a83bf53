"""System calls of a launcher and its cells made to fail, or to wait, one at a time.

A filter is put on every launcher before it does anything of its own, and what it asks about is answered
here: a call fails with an errno, waits for as long as a test likes, or goes on.  The kernel allows a
process one filter that asks, and a guest's own does: so cells are made without their listener here.
"""

import contextlib
import os
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from cellwright.policies.compiling.seccomp import number_of
from cellwright.policies.compiling.syscalls import syscall_table
from cellwright.runner.channel import receive_with_descriptors
from cellwright.runner.kernel import notifications
from cellwright.runner.kernel.notifications import Notification
from cellwright.runner.launching import launch, spawn

ROLES = ("keeper", "nursery", "launcher", "guest")  # each is the child of the one before it
_ALLOW, _ASK, _FAIL = 0x7FFF0000, 0x7FC00000, 0x00050000
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_NEW_LISTENER = 1 << 3
_LAST = "main(len(paths))"  # the last line of a launcher's start
_FILTER = (
    "from cellwright.runner.kernel import credentials as p,steps as n;"
    "p.install_seccomp_filter(n.Now(),bytes.fromhex('{program}'));del p,n;"
)
ASK_THROUGH = (
    "import array,socket;"
    "from cellwright.runner.kernel import credentials as p,steps as n;"
    "s=socket.socket(fileno={channel});"
    "l=p.install_seccomp_filter(n.Now(),bytes.fromhex('{program}'),listens=True);"
    "s.sendmsg([b'\\0.'],[(1,1,array.array('i',[l]))]);"
    "s.detach();del p,n,s,l;"  # the launcher closes both itself
)


class Call(NamedTuple):
    """A system call of a run: the process that makes it, and the number of earlier calls of that name."""

    role: str
    name: str
    before: int


Answer = Callable[[Call, int], int]  # (which, the caller's pid) -> an errno, 0 to have it go on


@cache
def numbers() -> dict[str, int]:
    """Return every system call of this machine by name."""
    table = syscall_table()
    locks = (rule for kind in table.locks.values() for rule in kind)
    ignored = (each.rule for some in table.ignored.values() for each in some)
    rules = (*table.rules(tuple(table.groups)), *table.init, *locks, *ignored)
    names = {*(rule.call for rule in rules), *table.refused, *table.unknown, *table.numbers}
    found = {name: number_of(name, table) for name in sorted(names)}
    return {name: number for name, number in found.items() if number >= 0}


def program_of(names: Iterable[str], channel: int) -> bytes:
    """Return a filter that asks about calls of these names, but of one that sends on `channel`."""
    sendmsg = numbers()["sendmsg"]
    code = [
        (_LOAD, 0, 0, 0), (_JUMP_IF_EQUAL, 0, 4, sendmsg),
        (_LOAD, 0, 0, 16), (_JUMP_IF_EQUAL, 0, 1, channel), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0),
    ]  # fmt: skip
    for name in names:
        code += [(_JUMP_IF_EQUAL, 0, 1, numbers()[name]), (_RETURN, 0, 0, _ASK)]
    return b"".join(_INSTRUCTION.pack(*each) for each in [*code, (_RETURN, 0, 0, _ALLOW)])


class Injector:
    """Answers for as long as it lives; a launcher that is asked about then has nobody to ask."""

    def __init__(self, answer: Answer, supervisor: int = 0) -> None:
        """Answer for launchers of the process `supervisor`; default: this process."""
        self._answer = answer
        self.supervisor = supervisor or os.getpid()
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._names = {number: name for name, number in numbers().items()}
        self._roles: dict[int, str] = {}
        self._seen: Counter[tuple[str, str]] = Counter()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for each in (self._ours, self.theirs):
            each.close()
        os.close(self._wake)

    def _serve(self) -> None:
        poll = select.poll()
        for descriptor in (self._wake, self._ours.fileno()):
            poll.register(descriptor, select.POLLIN)
        listeners: list[int] = []
        while True:
            for descriptor, event in poll.poll():
                if descriptor == self._wake:
                    for listener in listeners:
                        os.close(listener)
                    return
                if descriptor == self._ours.fileno():
                    _, (listener,) = receive_with_descriptors(self._ours)
                    listeners.append(listener)
                    poll.register(listener, select.POLLIN)
                elif event & select.POLLIN:
                    self._hear(descriptor)
                else:  # nobody is left to ask
                    poll.unregister(descriptor)
                    listeners.remove(descriptor)
                    os.close(descriptor)

    def _hear(self, listener: int) -> None:
        notification = notifications.receive(listener)
        if notification is None:
            return
        number = self._answer(self._call(notification), notification.thread)
        if number:
            notifications.refuse(listener, notification, number)
        else:
            notifications.let_go_on(listener, notification)

    def _call(self, notification: Notification) -> Call:
        role = self._role(notification.thread)
        name = self._names.get(notification.number, str(notification.number))
        before = self._seen[role, name]
        self._seen[role, name] += 1
        return Call(role, name, before)

    def _role(self, pid: int) -> str:
        if pid not in self._roles:
            line = line_of(pid, self.supervisor)
            depth = 1 if _makes_an_init(pid) else min(len(line), len(ROLES)) - 1
            self._roles[pid] = ROLES[depth]
        return self._roles[pid]


def _makes_an_init(pid: int) -> bool:
    """Tell whether it is the child that the nursery waits for; False if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "cell-init\n"
    except OSError:
        return False


def line_of(pid: int, supervisor: int) -> list[int]:
    """Return who is between the supervisor and `pid`, which is the last: keeper, nursery and so on."""
    line: list[int] = []
    while pid not in (0, supervisor):
        line.insert(0, pid)
        pid = _parent(pid)
    return line


def _parent(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))


@contextlib.contextmanager
def injecting(names: Iterable[str], answer: Answer) -> Iterator[Injector]:
    """Have launchers that start meanwhile ask `answer` about their calls of these names."""
    injector = Injector(answer)
    try:
        with pytest.MonkeyPatch.context() as patch:
            ask_through(injector.theirs.fileno(), names, patch)
            yield injector
    finally:
        injector.close()


def ask_through(channel: int, names: Iterable[str], patch: pytest.MonkeyPatch) -> None:
    """Have launchers that this process starts send their listener on `channel`."""
    os.set_inheritable(channel, True)
    shim(ASK_THROUGH.format(channel=channel, program=program_of(names, channel).hex()), patch)
    probe = launch.probe_host
    patch.setattr(launch, "probe_host", lambda *given: _without_listener(probe(*given)))


@contextlib.contextmanager
def denying_a_listener(number: int) -> Iterator[None]:
    """Have seccomp(2) fail in launchers and cells where it is asked for a listener."""
    flags = 24  # offsetof(struct seccomp_data, args[1])
    code = (
        (_LOAD, 0, 0, 0), (_JUMP_IF_EQUAL, 0, 3, numbers()["seccomp"]), (_LOAD, 0, 0, flags),
        (_JUMP_IF_SET, 0, 1, _NEW_LISTENER), (_RETURN, 0, 0, _FAIL | number), (_RETURN, 0, 0, _ALLOW),
    )  # fmt: skip
    program = b"".join(_INSTRUCTION.pack(*each) for each in code)
    with pytest.MonkeyPatch.context() as patch:
        shim(_FILTER.format(program=program.hex()), patch)
        yield


def shim(code: str, patch: pytest.MonkeyPatch) -> None:
    """Have launchers do `code` once they have imported, before anything else."""
    start = spawn._BOOTSTRAP
    assert start.endswith(_LAST)
    patch.setattr(spawn, "_BOOTSTRAP", start.removesuffix(_LAST) + code + _LAST)


def _without_listener(host):  # type: ignore[no-untyped-def]
    import msgspec

    return msgspec.structs.replace(host, listener="asked about by a test")
