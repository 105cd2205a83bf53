"""The process that embeds us has no memory left, for a moment or for longer: what it asks for fails, or is done
right, and once there is memory again all is as before."""

import contextlib
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from cellwright import LaunchError, Sandbox
from cellwright.harness.schemas.checker_pool import checkers
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.tool import Tool
from cellwright.runner.watching import open_calls
from tests.conftest import ROOT, policy_named
from tests.faults.test_ends import nothing_left

pytestmark = pytest.mark.needs("userns")

STANDARD_STREAMS = ["/dev/null", "pipe", "pipe"]
START = """
import contextlib, faulthandler, gc, json, os, sys
faulthandler.enable()
faulthandler.dump_traceback_later(25, exit=True)
sys.path[:0] = {paths!r}
from cellwright import CellwrightError, Sandbox
from tests.conftest import policy_named, soon
from tests.runner.test_leftovers import cgroups_of, descendants, descriptors
outcomes = []
def attempt(what):
    try:
        return what()
    except (CellwrightError, MemoryError) as error:
        return type(error).__name__
def right(box):
    return box.execute("1 + 1").value
"""

# Its nth allocation fails.  Of a MemoryError in __fspath__ CPython makes a TypeError, and of one in a lock a
# RuntimeError.  Many in a row it does not survive itself: `with lock` needs a tuple to release the lock.
FAILING = (
    START
    + """
import _testcapi, hashlib
from cellwright.policies import digest
# _sha256 of CPython 3.11 has the collector track the object that it could not allocate (newSHA256object).
digest.sha256 = hashlib.sha256
def failing(number, box):
    _testcapi.set_nomemory(number, number + 1)
    try:
        return right(box)
    except (TypeError, RuntimeError, SystemError) as error:
        return type(error).__name__
    finally:
        _testcapi.remove_mem_hooks()
with Sandbox(policy=policy_named("strict"), pool=0) as box:
    for _ in range(5):
        assert right(box) == 2
    before = len(cgroups_of(os.getpid())), len(descendants(os.getpid()))
    for first in range({first}, 1800, 29):
        outcomes.append(attempt(lambda: failing(first, box)))
        assert right(box) == 2, first
        assert soon(lambda: len(descendants(os.getpid())) == before[1]), (first, outcomes[-1])
    # An empty cgroup of which nobody could be told goes with its sandbox.
    forgotten = len(cgroups_of(os.getpid())) - before[0]
    assert forgotten < len(outcomes), cgroups_of(os.getpid())
gc.collect()
left = [*cgroups_of(os.getpid()), *descendants(os.getpid())]
print(json.dumps([outcomes, left, descriptors(os.getpid())]))
"""
)


def outcome_of(script: str, **given: object) -> list:  # type: ignore[type-arg]
    """Run a script that embeds a sandbox; return the outcomes, what of cells is left, and what is open."""
    command = [sys.executable, "-I", "-c", script.format(paths=[str(ROOT), *sys.path], **given)]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list = json.loads(done.stdout)  # type: ignore[type-arg]
    return found


@pytest.mark.needs("testcapi")
def test_an_allocation_that_fails_costs_one_call_and_leaves_nothing() -> None:
    outcomes, left, _ = outcome_of(FAILING, first=random.randrange(29))
    assert not left
    ours = {"MemoryError", "LaunchError", 2}
    assert {"MemoryError", 2} <= {*outcomes} <= {*ours, "TypeError", "RuntimeError", "SystemError"}


# The kernel gives no more address space, to us and to the launchers that are started meanwhile.
SHORT = (
    START
    + """
import resource
def size():
    return int(open("/proc/self/statm").read().split()[0]) * 4096
@contextlib.contextmanager
def short_of_memory(more):
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size() + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
def of_each_kind(box):
    def session():
        with box.session() as session:
            return session.execute("1 + 1").value
    def another():
        with Sandbox(policy=policy_named("standard"), pool=0) as other:
            return right(other)
    return (
        lambda: right(box), lambda: box.execute("print('x' * 4_000_000)").status.name,
        lambda: box.execute("1", files={{"f": bytes(4_000_000)}}).status.name,
        session, another,
    )
with Sandbox(policy=policy_named("standard"), pool={pool}) as box:
    for call in of_each_kind(box):
        call()  # what is imported once is imported now: CPython does not survive that without memory
    box.settle()
    before = len(cgroups_of(os.getpid())), len(descendants(os.getpid()))
    for more in (0, 1 << 20, 4 << 20, 64 << 20):
        for call in of_each_kind(box):
            with short_of_memory(more):
                outcomes.append(attempt(call))
        gc.collect()
        assert right(box) == 2, more
        box.settle()
        as_before = lambda: (len(cgroups_of(os.getpid())), len(descendants(os.getpid()))) == before
        assert soon(as_before), (more, outcomes, cgroups_of(os.getpid()))
gc.collect()
left = [*cgroups_of(os.getpid()), *descendants(os.getpid())]
print(json.dumps([outcomes, left, descriptors(os.getpid())]))
"""
)


@pytest.mark.parametrize("pool", [0, 2])
def test_address_space_that_runs_out_costs_the_calls_meanwhile_and_leaves_nothing(
    pool: int,
) -> None:
    outcomes, left, descriptors = outcome_of(SHORT, pool=pool)
    assert not left
    assert {"MemoryError", "LaunchError", "COMPLETED", 2} >= {*outcomes} >= {"MemoryError", 2}
    assert sorted(descriptors) == STANDARD_STREAMS


# threads


@contextlib.contextmanager
def threads_left(count: int) -> Iterator[None]:
    """Let so many more threads begin, and then none, as pthread_create(3) has it without memory or under
    a limit on processes."""
    left = iter(range(count))
    start = threading.Thread.start

    def start_if_any(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_if_any)
        yield


@pytest.mark.parametrize("count", [0, 1])
def test_a_pool_without_its_threads_is_refused_and_leaves_nothing(count: int) -> None:
    with (
        nothing_left(),
        threads_left(count),
        pytest.raises(LaunchError, match="cannot start a thread"),
    ):
        Sandbox(policy=policy_named("strict"), pool=2)


def test_what_needs_a_thread_of_its_own_is_refused_without_and_leaves_nothing() -> None:
    with Sandbox(policy=policy_named("standard"), pool=0) as box:
        assert box.execute("1 + 1").value == 2
        needing = (
            lambda: box.start("1"),
            lambda: box.program(["/bin/cat"]),
            box.session,
        )
        for each in needing:
            with (
                nothing_left(),
                threads_left(0),
                pytest.raises(LaunchError, match="cannot start a thread"),
            ):
                each()
        assert box.start("1 + 1").result().value == 2
        with box.session() as session:
            assert session.execute("1 + 1").value == 2


def test_a_program_whose_call_of_a_tool_gets_no_thread_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        open_calls, "_WORKERS", open_calls._Workers()
    )  # none waits for another call
    answer = Tool(ToolSpec(name="answer", owner=ToolOwner.DEVELOPER), lambda _, __: 42)
    calling = "from tools import answer\nanswer()"
    policy = policy_named("strict")
    with (
        nothing_left(),
        contextlib.closing(checkers),  # one waits for the next value, otherwise
        Sandbox(policy=policy, tools=[answer], pool=0) as box,
    ):
        with threads_left(0), pytest.raises(LaunchError, match="cannot start a thread"):
            box.execute(calling)
        assert box.execute(calling).value == 42
