"""The stages of the ladder, measured in a launcher: a process of its own, started as launchers are.

It is never imported by the process that measures.  A stage is the list of steps that a cell executes
(`runner/cell/enter.py`), up to the end of a layer.
"""

import mmap
import os
import select
import signal
import socket
import struct
import time
from functools import partial
from typing import NamedTuple, NoReturn

import msgspec

from ..runner import channel
from ..runner.cell.enter import INIT, TASKS, LauncherFacts, confinement
from ..runner.kernel import _steps
from ..runner.kernel import process_calls as processes
from ..runner.kernel.steps import Steps
from ..runner.launcher import main as launcher
from ..runner.messages import Booted, encode
from .ladder_messages import AHEAD, FORK, Order, StageTimes

_CALLS = 2000  # calls of the cheapest system call, to measure its cost behind a layer
_PACKET = 4096
_MARKS = struct.Struct("=2d200s")  # ready at; seconds a call; what went wrong

NAMESPACES = {
    "uts_ns": processes.CLONE_NEWUTS,
    "ipc_ns": processes.CLONE_NEWIPC,
    "pid_ns": processes.CLONE_NEWPID,
    "net_ns": processes.CLONE_NEWNET,
    "mount_ns": processes.CLONE_NEWNS,
}


class Stage(NamedTuple):
    name: str
    flags: int = 0
    program: bytes = b""
    ahead: bool = False  # its namespaces were made before, by the nursery
    joins: bool = False  # the cell's cgroup; on v2 it is born there


def main(own_paths: int) -> NoReturn:
    """Do all that a launcher does, and measure where that would fork cells."""

    def measure(
        facts: LauncherFacts, steps: Steps, sock: int, nursery: int, _: int, home: list[int]
    ) -> None:
        _Ladder(facts, steps, sock, nursery, home).serve()

    launcher.main(own_paths, measure)


class _Ladder:
    """Stands where a launcher serves."""

    def __init__(
        self, facts: LauncherFacts, steps: Steps, sock: int, nursery: int, home: list[int]
    ) -> None:
        self._facts = facts
        self._steps = steps
        self._sock = socket.socket(fileno=sock)
        self._nursery = socket.socket(fileno=nursery)
        self._home = home
        self._marks = mmap.mmap(-1, _MARKS.size)  # shared with every child
        self._inputs: list[int] = []
        self._pages = b""
        channel.send(self._sock, encode(Booted()))

    def serve(self) -> None:
        """Carry out one order and end."""
        frame, descriptors = channel.receive_with_descriptors(self._sock)
        order = msgspec.json.decode(frame, type=Order)
        cgroup = descriptors.pop() if order.into_cgroup else None
        streams = [os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC) for _ in range(TASKS - 1)]
        self._inputs = [*streams, *descriptors]
        unheard = self._facts._replace(plan=msgspec.structs.replace(self._facts.plan, refusals=()))
        stages = _stages(self._facts, self._steps, confinement(unheard))
        self._pages = _steps.rehearse(*launcher.rehearsal())
        self._begin_beside(stages)
        measured = {stage.name: StageTimes() for stage in stages}
        for _ in range(order.rounds):
            for stage in stages:
                measured[stage.name] = self._measure(stage, cgroup, measured[stage.name])
            stages = stages[::-1]
        channel.send(self._sock, msgspec.json.encode(measured))

    def _measure(self, stage: Stage, cgroup: int | None, so_far: StageTimes) -> StageTimes:
        """Measure twice: once against the clock, once to make calls behind the layers."""
        if so_far.refused:
            return so_far
        fork = partial(self._fork, cgroup=cgroup) if stage.ahead else self._fork_beside
        ready, gone = fork(stage, calls=0)
        fork(stage, calls=_CALLS)
        _, call, message = _MARKS.unpack(self._marks[: _MARKS.size])
        refused = message.rstrip(b"\0").decode()
        so_far.ready.append(ready)
        so_far.gone.append(gone)
        so_far.call.append(call)
        return msgspec.structs.replace(so_far, refused=refused) if refused else so_far

    def _begin_beside(self, stages: list[Stage]) -> None:
        """Fork a second process for stages that make their own namespaces: this one, once it has forked
        into those of an init, has left its pid namespace and may not come back (setns(2))."""
        self._beside, theirs = channel.pair()
        if os.fork():
            theirs.close()
            return
        self._beside.close()
        by_name = {stage.name: stage for stage in stages}
        while packet := theirs.recv(_PACKET):
            name, calls = msgspec.json.decode(packet, type=tuple[str, int])
            theirs.send(msgspec.json.encode(self._fork(by_name[name], calls)))
        os._exit(0)

    def _fork_beside(self, stage: Stage, calls: int) -> tuple[float, float]:
        self._beside.send(msgspec.json.encode((stage.name, calls)))
        return msgspec.json.decode(self._beside.recv(_PACKET), type=tuple[float, float])

    def _fork(self, stage: Stage, calls: int, cgroup: int | None = None) -> tuple[float, float]:
        self._marks[: _MARKS.size] = bytes(_MARKS.size)
        joined = -1 if cgroup is None or not stage.joins else cgroup
        ours, status = channel.pair()
        init, namespaces = -1, list[int]()
        began = time.perf_counter()
        if stage.ahead:
            self._nursery.send(b"+")
            _, (init, *namespaces) = channel.receive_with_descriptors(self._nursery)
            _enter(namespaces)
        pid = _steps.fork(processes.CLONE_NEWNS if stage.ahead else stage.flags, joined)
        if pid == 0:
            os.dup2(status.fileno(), self._facts.plan.open_files, inheritable=False)
            inputs = (status.fileno(), *self._inputs)
            _run(stage.program, inputs, init, self._pages, self._marks, calls)
        if stage.ahead:
            _enter(self._home)
        os.waitpid(pid, 0)
        if stage.ahead:
            signal.pidfd_send_signal(init, signal.SIGKILL)
            _wait(init)
        gone = time.perf_counter() - began
        for descriptor in (init, *namespaces) if stage.ahead else ():
            os.close(descriptor)
        ours.close()
        status.close()
        return _MARKS.unpack(self._marks[: _MARKS.size])[0] - began, gone


def _enter(namespaces: list[int]) -> None:
    for namespace in namespaces:
        processes.enter(namespace)


def _wait(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()


def _run(
    program: bytes, inputs: tuple[int, ...], init: int, pages: bytes, marks: mmap.mmap, calls: int
) -> NoReturn:
    """Execute the steps in a child and note when; never returns."""
    message, ready, call = b"", 0.0, 0.0
    try:
        filled = (*inputs, *(-1 for _ in range(INIT - len(inputs))), init)
        if refused := program and _steps.execute(program, filled, pages):
            raise OSError(refused[1], os.strerror(refused[1]), refused[2])
        ready = time.perf_counter()
        getppid, numbers = os.getppid, range(calls)
        began = time.perf_counter()
        for _ in numbers:
            getppid()
        call = (time.perf_counter() - began) / max(1, calls)
    except BaseException as error:  # noqa: BLE001 - a step that fails is what we report
        message = f"{type(error).__name__}: {error}".encode()[:200]
    finally:
        marks[: _MARKS.size] = _MARKS.pack(ready, call, message)
        os._exit(0)


# The stages behind `AHEAD`, each on top of those before it: the layers of the list, in its order.
LAYERS = (
    "descriptor sweep", "cgroup", "cgroup_ns", "own mounts", "user_ns", "rlimits", "capabilities",
    "landlock", "pages", "seccomp",
)  # fmt: skip


def _stages(facts: LauncherFacts, steps: Steps, unheard: Steps) -> list[Stage]:
    """Return every stage: a bare fork, namespaces singly and added up, then the layers of a cell.

    `unheard` are the steps of a cell without a listener, which comes with the filter.
    """
    singly = [Stage(f"{name} alone", flag) for name, flag in NAMESPACES.items()]
    added, flags = [], 0
    for name, flag in NAMESPACES.items():
        flags |= flag
        added.append(Stage(f"+ {name}", flags))
    status, inputs = facts.plan.open_files, TASKS + facts.joins
    confined = [
        Stage(f"+ {layer}", program=unheard.up_to(LAYERS[: number + 1]).layout(status, inputs),
              ahead=True, joins="cgroup" in LAYERS[: number + 1])
        for number, layer in enumerate(LAYERS)
    ]  # fmt: skip
    whole = confined[-1]._replace(name="+ listener", program=steps.layout(status, inputs))
    return [Stage(FORK), *singly, *added, Stage(AHEAD, ahead=True), *confined, whole]
