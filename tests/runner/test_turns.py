"""Turns: so many calls at once, the rest in order."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cellwright import BusyError, ClosedError, PoolSettings, Sandbox, SandboxStatus
from cellwright.runner.turns import Turns
from tests.conftest import policy_named


def test_a_free_turn_is_taken_at_once() -> None:
    turns = Turns(2, 0.0)
    turns.take()
    turns.take()
    with pytest.raises(BusyError, match="2 cells are running"):
        turns.take()
    turns.end()
    turns.take()


def test_who_is_interrupted_while_waiting_leaves_the_queue() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    turns = Turns(1, 5.0)
    turns.take()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(KeyboardInterrupt):
            turns.take()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not turns._queue
    turns.end()
    assert turns.take()


def test_turns_are_handed_on_in_the_order_of_coming() -> None:
    turns, order, waiting = Turns(1, 5.0), [], []
    turns.take()
    for number in range(8):
        thread = threading.Thread(
            target=lambda n=number: (turns.take(), order.append(n), turns.end())
        )
        thread.start()
        waiting.append(thread)
        while len(turns._queue) <= number:  # it stands in the queue before the next one comes
            threading.Event().wait(0.001)
    turns.end()
    for thread in waiting:
        thread.join(5)
    assert order == list(range(8))


def test_closing_turns_away_who_waits_and_who_comes() -> None:
    turns = Turns(1, 5.0)
    turns.take()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(turns.take)
        while not turns._queue:
            threading.Event().wait(0.001)
        turns.close()
        with pytest.raises(ClosedError):
            waiting.result(5)
    with pytest.raises(ClosedError):
        turns.take()


def test_a_turn_that_timed_out_is_not_lost() -> None:
    turns = Turns(1, 0.0)
    turns.take()
    for _ in range(3):
        with pytest.raises(BusyError):
            turns.take()
    turns.end()
    turns.take()


def test_no_more_run_than_may() -> None:
    turns, lock, running, most = Turns(3, 5.0), threading.Lock(), [0], [0]

    def work(_: int) -> None:
        turns.take()
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        with lock:
            running[0] -= 1
        turns.end()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(500)))
    assert 1 <= most[0] <= 3
    assert turns._free == 3


def test_who_is_called_off_leaves_the_queue_and_takes_no_turn() -> None:
    turns = Turns(1, 5.0)
    turns.take()
    off = os.eventfd(1)
    assert turns.take(off) is False
    os.close(off)
    turns.end()
    assert turns.try_take()


def test_who_gives_up_gets_no_turn_that_comes_later() -> None:
    turns = Turns(1, 0.0)
    turns.take()
    with pytest.raises(BusyError):
        turns.take()
    turns.end()
    assert turns.try_take()
    assert not turns.try_take()


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
