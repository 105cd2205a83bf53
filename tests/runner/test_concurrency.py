"""`ConcurrencyLimit`: calls up to a limit run at once, and the rest queue in order."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cellwright import BusyError, ClosedError, PoolSettings, Sandbox, SandboxStatus
from cellwright.runner.concurrency import ConcurrencyLimit
from tests.conftest import policy_named


def test_a_free_slot_is_taken_at_once() -> None:
    limit = ConcurrencyLimit(2, 0.0)
    limit.acquire()
    limit.acquire()
    with pytest.raises(BusyError, match="2 cells are running"):
        limit.acquire()
    limit.release()
    limit.acquire()


def test_an_interrupted_caller_leaves_the_queue() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    limit = ConcurrencyLimit(1, 5.0)
    limit.acquire()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(KeyboardInterrupt):
            limit.acquire()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not limit._queue
    limit.release()
    assert limit.acquire()


def test_slots_are_given_in_the_order_of_arrival() -> None:
    limit, order, waiting = ConcurrencyLimit(1, 5.0), [], []
    limit.acquire()
    for number in range(8):
        thread = threading.Thread(
            target=lambda n=number: (limit.acquire(), order.append(n), limit.release())
        )
        thread.start()
        waiting.append(thread)
        while len(limit._queue) <= number:  # it stands in the queue before the next one comes
            threading.Event().wait(0.001)
    limit.release()
    for thread in waiting:
        thread.join(60)
    assert order == list(range(8))


def test_closing_refuses_waiting_and_later_callers() -> None:
    limit = ConcurrencyLimit(1, 5.0)
    limit.acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(limit.acquire)
        while not limit._queue:
            threading.Event().wait(0.001)
        limit.close()
        with pytest.raises(ClosedError):
            waiting.result(60)
    with pytest.raises(ClosedError):
        limit.acquire()


def test_a_timeout_loses_no_slot() -> None:
    limit = ConcurrencyLimit(1, 0.0)
    limit.acquire()
    for _ in range(3):
        with pytest.raises(BusyError):
            limit.acquire()
    limit.release()
    limit.acquire()


def test_no_more_callers_run_than_the_limit_allows() -> None:
    limit, lock, running, most = ConcurrencyLimit(3, 5.0), threading.Lock(), [0], [0]

    def work(_: int) -> None:
        limit.acquire()
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        with lock:
            running[0] -= 1
        limit.release()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(500)))
    assert 1 <= most[0] <= 3
    assert limit._free == 3


def test_a_cancelled_caller_leaves_the_queue_and_takes_no_slot() -> None:
    limit = ConcurrencyLimit(1, 5.0)
    limit.acquire()
    off = os.eventfd(1)
    assert limit.acquire(off) is False
    os.close(off)
    limit.release()
    assert limit.try_acquire()


def test_a_caller_that_timed_out_gets_no_later_slot() -> None:
    limit = ConcurrencyLimit(1, 0.0)
    limit.acquire()
    with pytest.raises(BusyError):
        limit.acquire()
    limit.release()
    assert limit.try_acquire()
    assert not limit.try_acquire()


def test_a_call_that_waits_can_be_cancelled() -> None:
    settings = PoolSettings(size=0, running=1)
    with Sandbox(policy=policy_named("strict"), pool=settings) as sandbox:
        first = sandbox.start("print('up', flush=True)\nimport time\ntime.sleep(60)")
        next(first.output())
        second = sandbox.start("1")
        second.cancel()
        result = second.result()
        assert (result.status, result.error) == (
            SandboxStatus.CANCELLED, "cancelled while it waited",
        )  # fmt: skip
        first.cancel()
        first.result()
        assert sandbox.execute("1 + 1").value == 2
