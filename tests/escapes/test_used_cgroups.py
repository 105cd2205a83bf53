"""A cgroup that an earlier cell had: nothing of that cell is counted or felt, or it is not used again."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest

from cellwright import Sandbox
from cellwright.policies.policy import MIB, Processes
from cellwright.runner.cgroups import CgroupUsage, detect
from cellwright.runner.cgroups.cell_cgroups import CellCgroups
from cellwright.runner.cgroups.cgroup_tree import Caps, Cgroup, CgroupTree, read_field, write
from cellwright.runner.settings import PoolSettings
from cellwright.testing import inspect
from tests.conftest import policy_named, with_limits

pytestmark = pytest.mark.needs("cgroup")

CAPS = Caps(64 * MIB, 0.2, 16)
# The kernel resets the peak of a v2 cgroup since Linux 6.12; before that none is used again.
NEWEST = tuple(int(part) for part in os.uname().release.split(".")[:2])
IS_USED_AGAIN = bool(detect.hierarchies(detect.mountinfo())) or NEWEST >= (6, 12)
only_where_used = pytest.mark.skipif(
    not IS_USED_AGAIN, reason="needs cgroup v1, or Linux 6.12: no cgroup is used again"
)


@pytest.fixture(scope="module")
def tree() -> Iterator[CgroupTree]:
    """A tree of its own, in which this process is no launcher and cannot be killed for memory."""
    with started("input()") as keeper:
        tree = detect.open_tree(keeper.pid)
        try:
            tree.admit(keeper.pid, os.geteuid())
            yield tree
        finally:
            keeper.kill()
            keeper.wait()
            tree.close()


@pytest.fixture
def cgroups(tree: CgroupTree) -> Iterator[CellCgroups]:
    with making(tree) as made:
        yield made


@contextlib.contextmanager
def making(tree: CgroupTree, caps: Caps = CAPS, cells_each: int = 1000) -> Iterator[CellCgroups]:
    made = CellCgroups(tree, caps, cells_each)
    # Names apart from those of the sandbox's own cells and of other tests.
    made._names = iter(f"{id(made):x}-{number}" for number in range(1000))  # type: ignore[assignment]
    try:
        yield made
    finally:
        made.close()
        assert not made._busy


def directories(cgroup: Cgroup) -> set[Path]:
    return {Path(place) for of, place in cgroup.places.items() if of != "freezer"}


@contextlib.contextmanager
def started(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that executes `program` once it is told, and kill it afterwards."""
    code = f"import sys\nprint(flush=True)\nsys.stdin.readline()\n{program}"
    command = [sys.executable, "-I", "-S", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout
            assert child.stdout.readline()
            yield child
        finally:
            child.kill()


def tell(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin
    child.stdin.write(b"\n")
    child.stdin.flush()


def move(child: subprocess.Popen[bytes], cgroup: Cgroup) -> None:
    """Move a process into `cgroup`, and have it execute its program."""
    for each in directories(cgroup):
        write(f"{each}/cgroup.procs", str(child.pid))
    tell(child)


@contextlib.contextmanager
def child_in(cgroup: Cgroup, program: str) -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that executes `program` in `cgroup`."""
    with started(program) as child:
        move(child, cgroup)
        yield child


def run_in(cgroup: Cgroup, program: str) -> None:
    """Run a program to its end in `cgroup`."""
    with child_in(cgroup, program) as child:
        child.wait(60)


def left(cgroups: CellCgroups, program: str) -> Cgroup:
    """Return a cgroup in which `program` ran, and which its cell has left."""
    cgroup = cgroups.lend()
    run_in(cgroup, program)
    give_back(cgroups, cgroup)
    return cgroup


def give_back(cgroups: CellCgroups, cgroup: Cgroup) -> None:
    cgroup.leave()
    cgroups.take_back(cgroup)


def serves_again(cgroups: CellCgroups, cgroup: Cgroup) -> bool:
    """Tell whether the next cell gets it too; if not, it must be gone."""
    following = cgroups.lend()
    cgroups.take_back(following)
    if following is cgroup:
        return True
    cgroups.sweep()
    assert not any(each.exists() for each in directories(cgroup)) or cgroup in cgroups._busy
    return False


def lent_again(cgroups: CellCgroups, program: str) -> tuple[Cgroup, CgroupUsage]:
    """Return a cgroup that its second cell has, and the usage of `program`, which ran in the first.

    Pages of files that the machine read at this moment may be charged to one, which is removed then.
    """
    for _ in range(10):
        cgroup = cgroups.lend()
        run_in(cgroup, program)
        usage = cgroup.usage()
        give_back(cgroups, cgroup)
        if (following := cgroups.lend()) is cgroup:
            return cgroup, usage
        cgroups.take_back(following)
    raise AssertionError("no cgroup is used again")


def busy(seconds: float) -> str:
    return (
        f"import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass"
    )


def test_the_next_cell_has_it_where_the_kernel_resets_its_peak(cgroups: CellCgroups) -> None:
    if IS_USED_AGAIN:
        give_back(cgroups, lent_again(cgroups, "1")[0])
    else:
        assert not serves_again(cgroups, left(cgroups, "1"))


FORKS = "import os\nif os.fork() == 0: os._exit(0)\nos.wait()"
REFUSED = "import os\ntry: os.fork()\nexcept OSError: pass"


@pytest.mark.parametrize(
    "program",
    [FORKS, "import _thread\n_thread.start_new_thread(input, ())", "len(bytearray(40 << 20))"],
    ids=["a child", "a thread", "more than half of the memory"],
)
def test_it_is_retired_after_a_program_that_had(cgroups: CellCgroups, program: str) -> None:
    assert not serves_again(cgroups, left(cgroups, program))


def test_it_is_retired_while_files_of_the_program_are_charged(
    cgroups: CellCgroups, tmp_path: Path
) -> None:
    program = f"open({str(tmp_path / 'file')!r}, 'wb').write(bytes(4 << 20))"
    assert not serves_again(cgroups, left(cgroups, program))


def test_it_is_retired_while_a_process_is_in_it(cgroups: CellCgroups) -> None:
    cgroup = cgroups.lend()
    with child_in(cgroup, "input()"):
        give_back(cgroups, cgroup)
        assert not serves_again(cgroups, cgroup)


def test_it_is_retired_after_a_refused_child(tree: CgroupTree) -> None:
    with making(tree, CAPS._replace(processes=1)) as cgroups:
        assert not serves_again(cgroups, left(cgroups, REFUSED))


def test_it_is_retired_after_a_kill_at_a_cap_above(tree: CgroupTree) -> None:
    """Such a kill leaves the peak far below the cap."""
    with making(tree, CAPS._replace(memory_bytes=1 << 30)) as cgroups:
        cgroup = cgroups.lend()
        memory = Path(cgroup.places.get("v2") or cgroup.places["memory"])
        is_v2 = "v2" in cgroup.places
        cap = memory.parent / ("memory.max" if is_v2 else "memory.limit_in_bytes")
        charged = memory.parent / ("memory.current" if is_v2 else "memory.usage_in_bytes")
        try:
            with child_in(
                cgroup,
                "open('/proc/self/oom_score_adj', 'w').write('1000')\ninput()\nx = bytearray(200 << 20)",
            ) as child:
                cap.write_text(str(int(charged.read_text()) + 64 * MIB))
                tell(child)
                assert child.wait(60) < 0
        finally:
            cap.write_text("max" if is_v2 else "-1")
        assert cgroup.usage(ended_well=False).killed_for_memory > 0
        give_back(cgroups, cgroup)
        assert not serves_again(cgroups, cgroup)


@pytest.mark.parametrize("change", ["freeze", "kill", "retire"])
def test_it_is_retired_when_the_supervisor_did_more_with_it(
    cgroups: CellCgroups, change: str
) -> None:
    cgroup = cgroups.lend()
    run_in(cgroup, "1")
    getattr(cgroup, change)()
    cgroup.thaw()
    give_back(cgroups, cgroup)
    assert not serves_again(cgroups, cgroup)


def test_one_whose_cell_was_never_ready_is_retired(cgroups: CellCgroups) -> None:
    cgroup = cgroups.lend()
    run_in(cgroup, "1")
    cgroups.take_back(cgroup)
    assert not serves_again(cgroups, cgroup)


@only_where_used
def test_it_serves_as_many_cells_as_the_settings_say(tree: CgroupTree) -> None:
    with making(tree, cells_each=3) as cgroups:
        cells: Counter[Cgroup] = Counter()
        for _ in range(12):
            cells[cgroup := cgroups.lend()] += 1
            run_in(cgroup, "1")
            give_back(cgroups, cgroup)
        assert max(cells.values()) == 3


@only_where_used
def test_the_next_cell_is_charged_for_itself_alone(cgroups: CellCgroups) -> None:
    cgroup, first = lent_again(cgroups, f"x = bytearray(24 << 20)\n{busy(0.3)}")
    assert sum(seconds or 0 for seconds in first[:2]) >= 0.3
    assert (first.memory_peak_bytes or 0) >= 24 * MIB
    run_in(cgroup, "1")
    second = cgroup.usage()
    assert second.cpu_user_seconds is not None
    assert second.cpu_system_seconds is not None
    assert second.cpu_user_seconds + second.cpu_system_seconds < 0.2
    assert cgroup.cpu_seconds() == pytest.approx(sum(seconds or 0 for seconds in second[:2]))
    assert (second.memory_peak_bytes or 0) < 8 * MIB
    assert (cgroup.memory_bytes() or 0) < 2 * MIB
    assert second[3:] == (1, 0, 0)
    give_back(cgroups, cgroup)


@only_where_used
def test_the_next_cell_is_not_held_back_for_what_the_last_one_used(tree: CgroupTree) -> None:
    """The last one used up its share of the period. On a busy or slow machine some are held back in new
    cgroups too, for the time that they need themselves."""
    caps = CAPS._replace(cpus=0.1)
    with making(tree, caps) as used, making(tree, caps, cells_each=1) as new:
        of_new = sum(is_held_back(new, new.lend) for _ in range(9))
        of_used = sum(
            is_held_back(used, lambda: lent_again(used, busy(0.028))[0]) for _ in range(9)
        )
    assert of_used <= of_new + 3


def is_held_back(cgroups: CellCgroups, lend: Callable[[], Cgroup]) -> bool:
    """Tell whether a program of 4 ms is held back in the cgroup that `lend` returns."""
    # Without an interpreter's end, which takes long on a slow machine.
    with started(f"{busy(0.004)}\nimport posix\nposix._exit(0)") as program:
        cgroup = lend()
        place = cgroup.places.get("v2") or cgroup.places["cpu"]
        before = read_field(f"{place}/cpu.stat", "nr_throttled") or 0
        move(program, cgroup)
        program.wait(60)
        found = (read_field(f"{place}/cpu.stat", "nr_throttled") or 0) > before
    give_back(cgroups, cgroup)
    return found


# In cells

POLICY = with_limits(
    policy_named("strict", processes=Processes(subprocesses=True, threads=True)),
    memory_bytes=96 * MIB,
    processes=16,
)
KNOWN = {
    "little": "1",
    "memory": "len(bytearray(24 << 20))",
    "files": "open('/tmp/x', 'wb').write(bytes(8 << 20))",
    "time": "import time\nwhile time.process_time() < 0.02: pass",
    "a child": "import os\nif os.fork() == 0: os._exit(0)\nos.wait()",
}
LOOK = """
def fields(name): return dict(line.split() for line in open(f"/sys/fs/cgroup/{name}"))
[int(open("/sys/fs/cgroup/memory.current").read()), int(fields("cpu.stat")["usage_usec"]),
 open("/sys/fs/cgroup/memory.max").read(), open("/sys/fs/cgroup/cpu.max").read(), open("/proc/self/cgroup").read()]
"""
HOGS = (
    "x = bytearray(1 << 30)",
    "import os\ntry:\n while True:\n  if os.fork() == 0: os.pause() if hasattr(os, 'pause') else input()\nexcept OSError: pass",
    "open('/tmp/x', 'wb').write(bytes(70 << 20))",
    "import os\nfor n in range(3000): open(f'/tmp/{n}', 'w').close()",
    "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  while True: time.sleep(60)\n os._exit(0)\nos.wait()",
    "import time\nwhile time.process_time() < 0.4: pass",
)


def measured(cells_per_cgroup: int, rounds: int) -> tuple[dict[str, list[Any]], list[Any], int]:
    """Return the usage that calls were told, what programs saw, and how many cgroups were made."""
    usages: dict[str, list[Any]] = {name: [] for name in KNOWN}
    seen, made = [], []
    settings = PoolSettings(2, cells_per_cgroup=cells_per_cgroup)
    with Sandbox(policy=POLICY, pool=settings) as box:
        tree = inspect(box).supervisor.generation.tree
        create = tree.create
        tree.create = lambda *given: made.append(given) or create(*given)  # type: ignore[method-assign,func-returns-value]
        for number in range(rounds):
            for name, program in KNOWN.items():
                result = box.execute(program)
                assert result.ok, result.error
                usages[name].append(result.usage)
            seen.append(box.execute(LOOK).value)
            box.execute(HOGS[number % len(HOGS)])
            for _ in range(4):
                usages["little"].append(box.execute(KNOWN["little"]).usage)
    return usages, seen, len(made)


def seconds_of(usage: Any) -> float:
    return usage.cpu_user_seconds + usage.cpu_system_seconds


def test_calls_are_told_the_same_as_in_new_cgroups() -> None:
    new, seen_new, all_cells = measured(1, len(HOGS))
    used, seen_used, made = measured(10_000, len(HOGS))
    assert (made < all_cells // 2) == IS_USED_AGAIN
    # Each processor charges 64 pages ahead, and 1 MiB may still be charged.
    slack = MIB + (os.cpu_count() or 1) * 64 * os.sysconf("SC_PAGE_SIZE")
    for name, usages in used.items():
        peaks = [each.memory_peak_bytes for each in new[name]]
        # Less than the busiest hog has.  A few of each may have more on a busy virtual machine.
        most = 2 * max(map(seconds_of, new[name])) + 0.25
        assert median(map(seconds_of, usages)) <= most, name
        for each in usages:
            assert min(peaks) - slack <= each.memory_peak_bytes <= max(peaks) + slack, name
            assert each.processes_peak == new[name][0].processes_peak, name
            assert seconds_of(each) >= (0.02 if name == "time" else 0), name
    for memory, _, *of_the_policy in seen_used:
        assert memory <= max(each[0] for each in seen_new) + slack
        assert of_the_policy == seen_new[0][2:]
    assert median(each[1] for each in seen_used) <= 2 * max(each[1] for each in seen_new) + 250_000


def test_a_session_has_the_cgroup_for_itself() -> None:
    with Sandbox(policy=policy_named("strict"), pool=1) as box:
        supervisor = inspect(box).supervisor
        box.execute("1")
        with box.session() as session:
            session.execute("1")
            cgroup = supervisor.generation._cgroups
            held = session.cell._held.cell.cgroup  # type: ignore[attr-defined]
        supervisor._pool.settle()
        assert held not in [*cgroup._idle, *(each.cell.cgroup for each in supervisor._pool._parked)]


@pytest.mark.parametrize("settings", [PoolSettings(1, cells_per_cgroup=1), PoolSettings(0)])
def test_each_cell_has_a_new_one_where_it_is_switched_off(settings: PoolSettings) -> None:
    with Sandbox(policy=policy_named("strict"), pool=settings) as box:
        for _ in range(4):
            assert box.execute("1").ok
        assert not inspect(box).supervisor.generation._cgroups._idle


def test_nothing_is_kept_once_a_sandbox_has_settled() -> None:
    with Sandbox(policy=policy_named("strict"), pool=2) as box:
        for _ in range(8):
            box.execute("1")
        box.settle()
        assert not inspect(box).supervisor.generation._cgroups._idle


@pytest.mark.needs("userns")
def test_one_that_a_guard_joined_is_retired() -> None:
    """A guard is no process of the cell, and may still be on its way into the cgroup when that ends."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="cellwright-guarded-") as place:
        Path(place).chmod(0o777)
        policy = policy_named("workshop")
        files = msgspec.structs.replace(
            policy.filesystem, write=(place,), as_owner=True, protected=(f"{place}/kept",)
        )
        policy = msgspec.structs.replace(policy, filesystem=files)
        with Sandbox(policy=policy, pool=1) as box:
            pool = inspect(box).supervisor._pool
            for program, is_guarded in (("1", False), (f"open('{place}/new', 'w').close()", True)):
                pool.settle()
                cgroup = pool._parked[0].cell.cgroup
                assert box.execute(program).ok
                assert cgroup._is_retired == is_guarded  # type: ignore[attr-defined]
