"""The rungs of the ladder, climbed in a launcher: a process of its own, started as launchers are.

It is never imported by the process that measures.  The steps are those of `runner/cell/enter.py`, its
own functions in its own order; tests/benchmarks holds the two together.
"""

import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, NoReturn

import msgspec

from ..runner import channel
from ..runner.cell import enter, privileges
from ..runner.cell.enter import Descriptors, Site
from ..runner.kernel import privileges as kernel
from ..runner.kernel import processes
from ..runner.launcher import inits
from ..runner.launcher import main as launcher
from .climbs import AHEAD, FORK, WHOLE, Climb, Order

_CALLS = 2000  # of the cheapest system call, to see what one costs behind a layer
_PACKET = 4096
_MARKS = struct.Struct("=2d200s")  # ready at; seconds a call; what went wrong

NAMESPACES = {
    "uts_ns": processes.CLONE_NEWUTS,
    "ipc_ns": processes.CLONE_NEWIPC,
    "pid_ns": processes.CLONE_NEWPID,
    "net_ns": processes.CLONE_NEWNET,
    "mount_ns": processes.CLONE_NEWNS,
}


class Rung(NamedTuple):
    name: str
    flags: int
    steps: tuple[Callable[[], object], ...]
    ahead: bool = False  # its namespaces were made before, by the nursery
    joins: bool = False  # the cell's cgroup; on v2 it is born there


def main(own_paths: int) -> NoReturn:
    """Do all that a launcher does, and climb where that would fork cells."""
    launcher.main(own_paths, lambda site, sock, ahead, _: _Ladder(site, sock, ahead).serve())


class _Ladder:
    """Stands where a launcher serves."""

    def __init__(self, site: Site, sock: socket.socket, ahead: inits.Inits) -> None:
        self._site = site
        self._sock = sock
        self._inits = ahead
        self._marks = mmap.mmap(-1, _MARKS.size)  # shared with every child

    def serve(self) -> None:
        """Carry out one order and end."""
        frame, descriptors = channel.receive_with_descriptors(self._sock)
        order = msgspec.json.decode(frame, type=Order)
        cgroup = descriptors.pop() if order.into_cgroup else None
        rungs = _rungs(self._site, _descriptors(tuple(descriptors)))
        self._begin_beside(rungs)
        climbs = {rung.name: Climb() for rung in rungs}
        for _ in range(order.rounds):
            for rung in rungs:
                climbs[rung.name] = self._climb(rung, cgroup, climbs[rung.name])
            rungs = rungs[::-1]
        channel.send(self._sock, msgspec.json.encode(climbs))

    def _climb(self, rung: Rung, cgroup: int | None, so_far: Climb) -> Climb:
        """Climb twice: once against the clock, once to make calls at the top."""
        if so_far.refused:
            return so_far
        fork = partial(self._fork, cgroup=cgroup) if rung.ahead else self._fork_beside
        ready, gone = fork(rung, calls=0)
        fork(rung, calls=_CALLS)
        _, call, words = _MARKS.unpack(self._marks[: _MARKS.size])
        refused = words.rstrip(b"\0").decode()
        so_far.ready.append(ready)
        so_far.gone.append(gone)
        so_far.call.append(call)
        return msgspec.structs.replace(so_far, refused=refused) if refused else so_far

    def _begin_beside(self, rungs: list[Rung]) -> None:
        """Fork a second process for rungs that make their own namespaces: this one, once it has forked
        into those of an init, has left its pid namespace and may not come back (setns(2))."""
        self._beside, theirs = channel.pair()
        if os.fork():
            theirs.close()
            return
        self._beside.close()
        by_name = {rung.name: rung for rung in rungs}
        while packet := theirs.recv(_PACKET):
            name, calls = msgspec.json.decode(packet, type=tuple[str, int])
            theirs.send(msgspec.json.encode(self._fork(by_name[name], calls)))
        os._exit(0)

    def _fork_beside(self, rung: Rung, calls: int) -> tuple[float, float]:
        self._beside.send(msgspec.json.encode((rung.name, calls)))
        return msgspec.json.decode(self._beside.recv(_PACKET), type=tuple[float, float])

    def _fork(self, rung: Rung, calls: int, cgroup: int | None = None) -> tuple[float, float]:
        self._marks[: _MARKS.size] = bytes(_MARKS.size)
        joined = cgroup if rung.joins else None
        init = None
        began = time.perf_counter()
        if rung.ahead:
            pid, pidfd, init = self._inits.fork(joined)
        else:
            pid, pidfd = processes.fork(rung.flags, joined)
        if pid == 0:
            _run(rung.steps, self._marks, calls)
        os.waitpid(pid, 0)
        if init:
            init.kill()
            _wait(init.pidfd)
        gone = time.perf_counter() - began
        for descriptor in (pidfd, init.pidfd if init else -1):
            if descriptor >= 0:
                os.close(descriptor)
        return _MARKS.unpack(self._marks[: _MARKS.size])[0] - began, gone


def _wait(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()


def _run(steps: Sequence[Callable[[], object]], marks: mmap.mmap, calls: int) -> NoReturn:
    """Take the steps in a child and note when; never returns."""
    words, ready, call = b"", 0.0, 0.0
    try:
        for step in steps:
            step()
        ready = time.perf_counter()
        getppid, numbers = os.getppid, range(calls)
        began = time.perf_counter()
        for _ in numbers:
            getppid()
        call = (time.perf_counter() - began) / max(1, calls)
    except BaseException as error:  # noqa: BLE001 - a step that fails is what we report
        words = f"{type(error).__name__}: {error}".encode()[:200]
    finally:
        marks[: _MARKS.size] = _MARKS.pack(ready, call, words)
        os._exit(0)


def _descriptors(cgroups: tuple[int, ...]) -> Descriptors:
    """Return what a cell is given, leading nowhere."""
    status, control, *streams = (
        os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC) for _ in Descriptors._fields[:-1]
    )
    return Descriptors(status, control, streams[0], streams[1], streams[2], cgroups)


# The rungs behind `AHEAD`, each on top of those before it; the names are those of layers.
STEPS = (
    "descriptor sweep", "cgroup", "cgroup_ns", "own mounts", "user_ns", "rlimits", "capabilities",
    "landlock", "seccomp", "listener",
)  # fmt: skip


def _rungs(site: Site, descriptors: Descriptors) -> list[Rung]:
    """Return every rung: a bare fork, namespaces singly and added up, then the steps of a cell."""
    singly = [Rung(f"{name} alone", flag, ()) for name, flag in NAMESPACES.items()]
    added, flags = [], 0
    for name, flag in NAMESPACES.items():
        flags |= flag
        added.append(Rung(f"+ {name}", flags, ()))
    steps = _steps(site, descriptors)
    confined = [
        Rung(f"+ {name}", 0, tuple(each for step in STEPS[: number + 1] for each in taken(step)),
             ahead=True, joins="cgroup" in STEPS[: number + 1])
        for number, name in enumerate(STEPS)
        for taken in [_without_filter_twice(steps, name)]
    ]  # fmt: skip
    whole = Rung(WHOLE, 0, (lambda: enter.enter(site, descriptors, _tell_nobody),), True, True)
    return [
        Rung(FORK, 0, ()), *singly, *added, Rung(AHEAD, 0, (), ahead=True), *confined, whole,
    ]  # fmt: skip


Steps = dict[str, tuple[Callable[[], object], ...]]


def _without_filter_twice(
    steps: Steps, top: str
) -> Callable[[str], tuple[Callable[[], object], ...]]:
    """Where the listener is on, the filter comes with it, as it does in a cell."""
    return lambda step: () if step == "seccomp" and top == "listener" else steps[step]


def _tell_nobody(frame: object, descriptor: int) -> None:
    os.close(descriptor)


def _steps(site: Site, descriptors: Descriptors) -> Steps:
    """Return the steps of `enter.enter`, by layer; messages to the supervisor are left out."""
    plan = site.plan

    def sweep() -> None:
        enter._keep_only(descriptors, plan.open_files, site.host_proc)

    def join() -> None:
        enter._join_cgroups(descriptors.cgroups)

    def mount() -> None:
        os.setsid()
        os.close(enter._mount_own_filesystems(plan, site.beneath_memory))
        if plan.loopback:
            enter._bring_loopback_up()

    def change_user() -> None:
        privileges.make_dumpable()
        enter._enter_user_namespace(site)
        os.close(site.host_proc)

    def give_up() -> None:
        privileges.give_up_all(site.last_capability)
        os.umask(0o022)
        os.chdir("/workspace")

    def fence() -> None:
        enter._fence_paths(plan.landlock_abi, plan.path_rules, deny_tcp=not plan.loopback)

    return {
        "descriptor sweep": (sweep,),
        "cgroup": (join,),
        "cgroup_ns": (lambda: processes.unshare(processes.CLONE_NEWCGROUP),),
        "own mounts": (mount,),
        "user_ns": (change_user,),
        "rlimits": (lambda: enter._limit_resources(plan.rlimits),),
        "capabilities": (give_up,),
        "landlock": (fence,) if plan.landlock_abi else (),
        "seccomp": (lambda: kernel.install_seccomp_filter(plan.guest_filter),),
        "listener": (lambda: enter._filter_system_calls(plan, _tell_nobody),),
    }
