"""Memory and time of GPUs, with a stand-in for pynvml: what a count has, and how long a call waits."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cellwright.runner.watching import gpu_use
from cellwright.runner.watching.gpu_use import NO_USE, GpuMeter, GpuUse, what_hangs
from tests import made_up_gpu

MIB = 2**20


class NVMLError(Exception):
    pass


class Nvml:
    """A driver with one GPU, which lists what a test says."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self.samples: list[tuple[int, int, int]] = []  # pid, µs after the first question, percent
        self.began = 0
        self.is_lost = False
        self.may_answer = threading.Event()
        self.may_answer.set()

    def nvmlInit(self) -> None:  # noqa: N802 - of pynvml, as the others
        self.may_answer.wait(60)
        if self.is_lost:
            raise NVMLError

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802
        return number

    def nvmlDeviceGetComputeRunningProcesses(self, _: int) -> list[Any]:  # noqa: N802
        self.may_answer.wait(60)
        if self.is_lost:
            raise NVMLError
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.memory.items()]

    def nvmlDeviceGetProcessUtilization(self, _: int, seen: int) -> list[Any]:  # noqa: N802
        self.began = self.began or seen
        new = [each for each in self.samples if self.began + each[1] > seen]
        if not new:
            raise NVMLError
        return [
            SimpleNamespace(pid=pid, timeStamp=self.began + at, smUtil=percent)
            for pid, at, percent in new
        ]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may keep the thread waiting for longer than a caller would."""
    monkeypatch.setattr(gpu_use, "_FREE_SECONDS", 60)
    monkeypatch.setattr(gpu_use, "_LOOK_SECONDS", 60)


@pytest.fixture
def other() -> Iterator[int]:
    """A process in this namespace."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def test_a_count_has_the_peak_of_all_processes_of_its_namespace_and_their_seconds(
    other: int,
) -> None:
    nvml = Nvml()
    count = GpuMeter(nvml).begin(os.getpid())
    nvml.memory = {os.getpid(): 3 * MIB, other: 2 * MIB}
    assert count.look()[::2] == (5 * MIB, 5 * MIB)
    nvml.samples = [(os.getpid(), 200_000, 50), (other, 200_000, 100), (os.getpid(), 400_000, 50)]
    nvml.memory = {other: MIB}
    used = count.look()
    assert used == GpuUse(5 * MIB, pytest.approx(0.4), MIB)
    assert count.look().seconds == used.seconds
    assert used.since(GpuUse(MIB, 0.3)).seconds == pytest.approx(0.1)
    count.close()


def test_processes_of_another_namespace_do_not_count() -> None:
    nvml = Nvml()
    nvml.memory = {2**22 + 1: MIB}  # no process can have this number
    assert GpuMeter(nvml).begin(os.getpid()).look() == GpuUse(0, 0.0, 0)


def test_a_process_that_has_ended_counts_while_the_driver_lists_it(other: int) -> None:
    nvml = Nvml()
    nvml.memory = {other: MIB}
    count = GpuMeter(nvml).begin(os.getpid())
    assert count.look().left_bytes == MIB
    os.kill(other, 9)
    os.waitpid(other, 0)
    assert count.look().left_bytes == MIB
    nvml.memory = {}
    assert count.settle() == GpuUse(MIB, 0.0, 0)


def test_a_driver_that_frees_nothing_or_hangs_is_waited_for_no_longer_than_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_use, "_FREE_SECONDS", 0.2)
    monkeypatch.setattr(gpu_use, "_LOOK_SECONDS", 0.2)
    nvml = Nvml()
    nvml.memory = {os.getpid(): MIB}
    count = GpuMeter(nvml).begin(os.getpid())
    while not count.look().left_bytes:  # within its bound a busy machine may not answer
        pass
    assert count.settle().left_bytes == MIB
    nvml.may_answer.clear()
    assert count.look() == GpuUse(MIB, 0.0, MIB)
    nvml.may_answer.set()


def test_a_gpu_that_is_lost_counts_nothing_more() -> None:
    nvml = Nvml()
    count = GpuMeter(nvml).begin(os.getpid())
    assert count.look() == GpuUse(0, 0.0, 0)
    nvml.is_lost = True
    assert count.look() == GpuUse(0, 0.0, 0)


def test_a_library_that_does_not_start_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    nvml.is_lost = True
    assert GpuMeter(nvml).begin(os.getpid()).look() == NO_USE
    monkeypatch.setattr(gpu_use, "_LOOK_SECONDS", 0.2)
    hanging = Nvml()
    hanging.may_answer.clear()
    assert GpuMeter(hanging).begin(os.getpid()).look() == NO_USE
    hanging.may_answer.set()


def test_a_process_that_does_not_end_is_named(tmp_path: Path, other: int) -> None:
    (tmp_path / "cgroup.procs").write_text(f"{other}\n999999999\n")
    said = what_hangs(str(tmp_path))
    assert f"({other}, " in said
    assert "999999999" not in said
    assert what_hangs(str(tmp_path / "gone")) == ""


STAND_IN = """
import os, sys, time, types
from cellwright import Sandbox
from cellwright.policies.policy import *
from cellwright.runner.watching import gpu_use
ended_at, lingering = {}, [0.3]
gpu_use._FREE_SECONDS = gpu_use._LOOK_SECONDS = 60
class NVMLError(Exception): pass
def opened():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = {os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")}
        except OSError:
            continue
        if "/dev/nvidia0" in links:
            yield int(pid)
def running(card):
    now = time.monotonic()
    here = {*opened()}
    for pid in here:
        ended_at[pid] = now
    return [types.SimpleNamespace(pid=pid, usedGpuMemory=3 << 20)
            for pid, at in ended_at.items() if now - at <= lingering[0]]
def used(card, seen):
    stamp = int(time.time() * 1e6)
    return [types.SimpleNamespace(pid=pid, timeStamp=stamp, smUtil=100) for pid in opened()]
sys.modules["pynvml"] = types.SimpleNamespace(
    NVMLError=NVMLError, nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 1,
    nvmlDeviceGetHandleByIndex=lambda n: n, nvmlDeviceGetComputeRunningProcesses=running,
    nvmlDeviceGetProcessUtilization=used,
)
policy = Policy(devices=Devices(gpu=("nvidia0",)))
def asked() -> int:
    "Return once the driver was asked, while the program waits."
    gpu_use._meters[os.getpid()].ask(60)
    return 1
OPEN = "from tools import asked; node = open('/dev/nvidia0', 'rb'); asked()"
def told(result):
    usage = result.usage
    return [usage.gpu_memory_peak_bytes, usage.gpu_seconds, list(result.notices)]
"""


@pytest.mark.needs("root", "cgroup", "landlock", "gcc")
def test_a_call_returns_when_the_memory_is_free_and_says_what_it_used() -> None:
    busy, ended, idle, kept, left = made_up_gpu.run(
        f"""{STAND_IN}
with Sandbox(policy=policy, pool=2, tools=[asked]) as sandbox:
    busy = told(sandbox.execute(OPEN))
    ended = len(running(0))
    idle = told(sandbox.execute("1 + 1"))
    with sandbox.session() as session:
        session.execute(OPEN)
        kept = [told(session.execute("1 + 1")), len(running(0))]
    lingering[0], gpu_use._FREE_SECONDS = 1000, 0.2
    left = told(sandbox.execute(OPEN))
answer = [busy, ended, idle, kept, left]
"""
    )
    assert busy[0] == 3 * MIB
    assert busy[1] > 0
    assert (busy[2], ended) == ([], 0)
    assert idle == [0, 0.0, []]
    assert kept[0][0] == 3 * MIB
    assert kept[1] >= 1
    assert left[2] == [
        "3,145,728 bytes of GPU memory are not free, though all of its processes have ended"
    ]


@pytest.mark.needs("root", "cgroup", "landlock", "gcc")
def test_without_nvml_nothing_is_told() -> None:
    program = f'{STAND_IN}\nsys.modules["pynvml"] = None\nlost = sys.modules["pynvml"]\n'
    found = made_up_gpu.run(
        f"""{program}
with Sandbox(policy=policy, pool=0) as sandbox:
    answer = told(sandbox.execute("node = open('/dev/nvidia0', 'rb')"))
"""
    )
    assert found == [None, None, []]
