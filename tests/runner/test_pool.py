"""The pool: with cells that are notes on paper, and with real ones."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cellwright import BusyError, LaunchError, PolicyError, Sandbox
from cellwright.runner.cells import held_cell
from cellwright.runner.cells.pool import Pool
from cellwright.runner.settings import PoolSettings
from cellwright.testing import inspect
from tests.conftest import open_descriptors, policy_named, soon
from tests.runner.test_leftovers import cgroups_of, descendants


class Paper:
    """A cell on paper."""

    made = 0

    def __init__(self) -> None:
        self.alive = True
        self.disposed = threading.Event()

    def is_current(self) -> bool:
        return self.alive

    def memory_bytes(self) -> int:
        return 0

    def dispose(self) -> None:
        assert not self.disposed.is_set(), "a cell is taken down once"
        self.disposed.set()


class Workshop:
    """Makes paper cells, and remembers them; fails while `broken`."""

    def __init__(self) -> None:
        self.cells: list[Paper] = []
        self.batches: list[int] = []
        self.broken = False
        self.asked = 0

    def __call__(self, count: int = 1) -> list[Paper]:
        self.asked += 1
        if self.broken:
            raise LaunchError("broken")
        self.batches.append(count)
        self.cells.extend(made := [Paper() for _ in range(count)])
        return made


def pool_of(workshop: Workshop, **settings: float) -> Pool:
    return Pool(PoolSettings(**settings), workshop)  # type: ignore[arg-type]


def test_cells_are_parked_ahead_and_lent_once() -> None:
    workshop = Workshop()
    pool = pool_of(workshop, size=3)
    pool.settle()
    assert len(workshop.cells) == 3
    lent = [pool.lease() for _ in range(3)]
    assert len({id(each) for each in lent}) == 3
    assert pool.lease() is None
    for cell in lent:
        pool.give_back(cell)  # type: ignore[arg-type]
    pool.settle()
    assert all(cell.disposed.is_set() for cell in workshop.cells[:3])
    assert len(workshop.cells) == 6
    pool.close()
    assert all(cell.disposed.is_set() for cell in workshop.cells)


def test_cells_are_asked_for_in_batches_but_the_first_alone() -> None:
    workshop = Workshop()
    pool = pool_of(workshop, size=12)
    pool.settle()
    assert workshop.batches == [1, 8, 3]
    with pool._lock:  # the threads stand still
        for _ in range(7):
            pool.lease()
    pool.settle()
    assert workshop.batches == [1, 8, 3, 7]
    pool.close()


def test_without_a_pool_what_served_is_gone_at_once() -> None:
    workshop = Workshop()
    pool = pool_of(workshop, size=0)
    assert pool.lease() is None
    (cell,) = workshop()
    pool.give_back(cell)  # type: ignore[arg-type]
    assert cell.disposed.is_set()
    assert threading.active_count() == len(threading.enumerate())
    pool.settle()
    pool.close()


def test_a_settled_pool_wakes_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would compete with the call that comes next."""
    pool = pool_of(Workshop(), size=2)
    pool.settle()
    woken: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_wake_all", lambda: woken.append(True))
        pool.settle()
    assert not woken
    pool.close()


def test_a_parked_cell_that_died_is_not_lent() -> None:
    workshop = Workshop()
    pool = pool_of(workshop, size=2)
    pool.settle()
    workshop.cells[0].alive = False
    assert pool.lease() is workshop.cells[1]
    pool.settle()
    assert workshop.cells[0].disposed.is_set()
    pool.close()


def test_a_workshop_that_fails_is_not_asked_again_before_somebody_wants_a_cell() -> None:
    workshop = Workshop()
    workshop.broken = True
    pool = pool_of(workshop, size=4)
    pool.settle()
    assert workshop.asked == 1
    workshop.broken = False
    assert pool.lease() is None
    pool.give_back(Paper())  # type: ignore[arg-type]
    pool.settle()
    assert len(workshop.cells) == 4
    pool.close()


def test_an_unexpected_exception_while_making_a_cell_does_not_stop_the_pool() -> None:
    """The thread that makes cells ended, and settle waited for it for ever."""
    workshop = Workshop()
    errors = [ValueError("unforeseen")]

    def once_broken(count: int) -> list[Paper]:
        if errors:
            raise errors.pop()
        return workshop(count)

    pool = Pool(PoolSettings(size=2), once_broken)  # type: ignore[arg-type]
    pool.settle()
    assert pool.lease() is None
    pool.give_back(Paper())  # type: ignore[arg-type]
    pool.settle()
    assert len(workshop.cells) == 2
    pool.close()


def test_an_idle_pool_shrinks_and_grows_again() -> None:
    workshop = Workshop()
    pool = pool_of(workshop, size=4, low_water=1, idle_seconds=0.05)
    pool.settle()
    assert all(cell.disposed.wait(60) for cell in workshop.cells[:3])
    assert not workshop.cells[3].disposed.is_set()
    pool.settle()
    assert len(workshop.cells) >= 7
    pool.close()


def test_a_caller_disposes_of_a_cell_itself_when_too_many_wait_for_it() -> None:
    workshop = Workshop()
    pool = pool_of(workshop, size=1)
    pool.settle()
    with pool._changed:  # the threads stand still
        cells = [Paper() for _ in range(3)]
        pool._served.append(cells[0])  # type: ignore[arg-type]
        pool.give_back(cells[1])  # type: ignore[arg-type]
        assert cells[1].disposed.is_set()
    pool.close()


def test_closing_takes_down_what_is_parked_and_what_served() -> None:
    workshop = Workshop()
    pool = pool_of(workshop, size=5)
    pool.settle()
    lent = pool.lease()
    pool.close()
    assert all(cell.disposed.is_set() for cell in workshop.cells if cell is not lent)
    pool.give_back(lent)  # type: ignore[arg-type]
    assert workshop.cells[0].disposed.is_set()


# real cells


@pytest.fixture
def pooled() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("strict"), pool=3) as sandbox:
        sandbox.settle()
        yield sandbox


def test_a_call_gets_a_parked_cell_and_says_so(pooled: Sandbox) -> None:
    result = pooled.execute("1 + 1")
    assert (result.value, result.pool_hit) == (2, True)


def test_a_burst_beyond_the_pool_is_served_on_demand(pooled: Sandbox) -> None:
    with ThreadPoolExecutor(12) as threads:
        results = list(threads.map(lambda n: pooled.execute("n * n", inputs={"n": n}), range(24)))
    assert [result.value for result in results] == [n * n for n in range(24)]
    assert any(result.pool_hit for result in results)


def test_no_two_calls_share_a_cell(pooled: Sandbox) -> None:
    code = "import builtins, os\nseen = hasattr(builtins, 'mark'), os.path.exists('/workspace/mark')\nbuiltins.mark = open('/workspace/mark', 'w')\nseen"
    for _ in range(8):
        assert pooled.execute(code).value == [False, False]


def test_a_parked_cell_differs_in_nothing_from_one_made_on_demand(pooled: Sandbox) -> None:
    code = """
import gc, linecache, os, random, resource, signal, sys, threading
[sorted(sys.modules), sorted(globals()), dict(os.environ), gc.isenabled(), gc.get_count()[2],
 sorted(linecache.cache), threading.active_count(), sys.stdout.line_buffering, os.getcwd(), os.getpid(),
 os.getppid(), str(signal.getsignal(signal.SIGINT)), sys.exc_info() == (None, None, None), sys.argv,
 sorted(os.listdir('/workspace')), sorted(os.listdir('/tmp')), hasattr(sys, 'last_value'),
 sys.modules['__main__'].__dict__ is globals(), resource.getrlimit(resource.RLIMIT_NOFILE)]
"""  # fmt: skip
    with Sandbox(policy=policy_named("strict"), pool=0) as fresh:
        on_demand, parked = fresh.execute(code), pooled.execute(code)
    assert (on_demand.pool_hit, parked.pool_hit) == (False, True)
    assert parked.ok, parked.traceback
    assert json.dumps(parked.value) == json.dumps(on_demand.value)


def test_random_numbers_are_not_shared_between_cells(pooled: Sandbox) -> None:
    code = "import random, uuid, os, secrets, tempfile\n[random.random(), str(uuid.uuid4()), str(uuid.uuid1()), os.urandom(8).hex(), secrets.token_hex(8), next(tempfile._get_candidate_names())]"
    seen = [pooled.execute(code).value for _ in range(6)]
    for column in zip(*seen, strict=True):
        assert len(set(column)) == len(seen)


def test_one_too_many_is_told_busy() -> None:
    settings = PoolSettings(size=1, running=1, queue_seconds=0.1)
    with Sandbox(policy=policy_named("strict"), pool=settings) as sandbox:
        run = sandbox.start("import time\nprint('up', flush=True)\ntime.sleep(60)")
        next(run.output())
        with pytest.raises(BusyError, match="1 cells are running"):
            sandbox.execute("1")
        run.cancel()
        run.result()
        assert sandbox.execute("1 + 1").value == 2


def test_parked_cells_of_a_launcher_that_died_are_replaced(pooled: Sandbox) -> None:
    launcher = inspect(pooled).supervisor.generation.launcher
    os.kill(launcher.pids()[1], signal.SIGKILL)
    os.waitid(os.P_PID, launcher.keeper, os.WEXITED | os.WNOWAIT)
    assert pooled.execute("1 + 1").value == 2
    pooled.settle()
    assert pooled.execute("1 + 1").pool_hit


def test_every_call_can_have_a_launcher_of_its_own() -> None:
    code = "hash('x'), id(object) // 4096"
    with Sandbox(
        policy=policy_named("strict"), pool=PoolSettings(0, cells_per_launcher=1)
    ) as fresh:
        assert len({tuple(fresh.execute(code).value) for _ in range(3)}) == 3
    with Sandbox(policy=policy_named("strict"), pool=0) as shared:
        assert len({tuple(shared.execute(code).value) for _ in range(3)}) == 1


def test_a_launcher_that_has_served_its_time_is_replaced() -> None:
    settings = PoolSettings(2, cells_per_launcher=5)
    with Sandbox(policy=policy_named("strict"), pool=settings) as sandbox:
        keepers = set()
        for _ in range(20):
            keepers.add(inspect(sandbox).supervisor.generation.launcher.keeper)
            assert sandbox.execute("1 + 1").value == 2
        sandbox.settle()
        assert len(keepers) >= 3
        alive = {child for child in descendants(os.getpid()) if child in keepers}
        assert len(alive) <= 2  # the one that makes cells, and one whose last are parked


def test_a_pool_leaves_nothing_when_its_sandbox_is_closed() -> None:
    before = (descendants(os.getpid()), cgroups_of(os.getpid()), threading.active_count())
    descriptors = open_descriptors()
    for _ in range(3):
        with Sandbox(policy=policy_named("strict"), pool=4) as sandbox:
            for _ in range(6):
                sandbox.execute("print(1)")
    after = (descendants(os.getpid()), cgroups_of(os.getpid()), threading.active_count())
    assert after == before
    assert open_descriptors() <= descriptors


@pytest.mark.slow
def test_a_thousand_pooled_executions_leave_what_was_there_before(pooled: Sandbox) -> None:
    def count() -> tuple[int, int, int]:
        places = (descendants(os.getpid()), cgroups_of(os.getpid()), os.listdir("/proc/self/fd"))
        return tuple(map(len, places))  # type: ignore[return-value]

    pooled.settle()
    processes, *before = count()
    with ThreadPoolExecutor(5) as threads:
        assert all(result.ok for result in threads.map(lambda _: pooled.execute("1"), range(1000)))
    pooled.settle()
    # The nursery makes two inits ahead of need, in its own time.
    assert soon(lambda: abs(count()[0] - processes) <= 2)
    assert list(count()[1:]) == before


@pytest.mark.parametrize(
    "pool", [-1, True, 1.5, "8", PoolSettings(running=0), PoolSettings(idle_seconds=float("nan"))]
)
def test_settings_that_make_no_sense_are_refused(pool: object) -> None:
    with pytest.raises(PolicyError, match="pool"):
        Sandbox(policy=policy_named("strict"), pool=pool)  # type: ignore[arg-type]


@pytest.mark.needs("cgroup")
def test_a_pool_is_no_larger_than_its_memory() -> None:
    settings = PoolSettings(size=20, memory_bytes=8 << 20)
    with Sandbox(policy=policy_named("strict"), pool=settings) as sandbox:
        sandbox.settle()
        pool = inspect(sandbox).supervisor._pool
        assert 1 << 19 < pool._cell_bytes < 8 << 20
        assert len(pool._parked) == (8 << 20) // pool._cell_bytes < 20
        assert sandbox.execute("1 + 1").pool_hit


@pytest.mark.parametrize(("load", "times"), [(0.5, 1.0), (6.0, 3.0), (1000.0, 6.0)])
def test_a_slow_launcher_is_not_taken_for_a_stuck_one_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch, load: float, times: float
) -> None:
    """It would be ended with all its cells, whose programs have done nothing wrong."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert held_cell._patience(20.0) == 20.0 * times
