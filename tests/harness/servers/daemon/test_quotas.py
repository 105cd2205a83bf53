"""Quotas of one tenant: calls, a queue, sessions, and CPU time."""

import os
import threading

import pytest

from cellwright.errors import QuotaExceeded
from cellwright.harness.servers.client_quota import OwnedTable
from cellwright.harness.servers.daemon.quotas import QuotaSettings, TenantQuota
from cellwright.runner.concurrency import NEVER
from tests.conftest import Clock, soon


def refusal(quota: TenantQuota) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as caught, quota.turn(NEVER):
        pass
    return caught.value


def test_beyond_the_calls_some_wait_and_more_are_refused() -> None:
    quota = TenantQuota("ci", QuotaSettings(calls=1, queue=1))
    turns: list[bool] = []

    def wait() -> None:
        with quota.turn(NEVER) as turn:
            turns.append(turn)

    with quota.turn(NEVER):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert soon(lambda: quota.load() == (1, 1))
        error = refusal(quota)
        assert error.limit == "queue"
        assert error.what == "quota of tenant ci: calls: 1 run and 1 wait, which is the most"
    waiting.join(30)
    assert turns == [True]
    assert quota.load() == (0, 0)


def test_a_call_waits_so_long_and_not_longer() -> None:
    quota = TenantQuota("ci", QuotaSettings(calls=1, queue_seconds=0.01))
    with quota.turn(NEVER):
        assert refusal(quota).limit == "calls"


def test_a_call_that_is_cancelled_while_it_waits_takes_no_turn() -> None:
    quota = TenantQuota("ci", QuotaSettings(calls=1))
    gone, end = os.pipe()
    os.close(end)
    with quota.turn(NEVER), quota.turn(gone) as turn:
        assert not turn
    os.close(gone)
    with quota.turn(NEVER) as turn:
        assert turn


def test_cpu_time_comes_back_with_time() -> None:
    clock = Clock()
    quota = TenantQuota("ci", QuotaSettings(cpu_seconds_per_minute=6.0), clock)
    quota.spend(7.0)
    error = refusal(quota)
    assert (error.limit, error.hint) == ("cpu", "try again in 10.0 s")
    clock.now += 9.0
    assert refusal(quota).hint == "try again in 1.0 s"
    clock.now += 1.1
    with quota.turn(NEVER):
        pass
    clock.now += 10_000
    assert quota.cpu_seconds_left() == 6.0  # a quiet hour is not saved up


def test_so_many_sessions_and_those_that_are_being_opened_count() -> None:
    quota = TenantQuota("ci", QuotaSettings(sessions=2))
    table: OwnedTable[str, str] = OwnedTable(quota, lambda each: each == "lost")
    with table.room(None) as put:
        put("first", "open")
    with (
        table.room(None),
        pytest.raises(QuotaExceeded, match="at most 2 sessions") as caught,
        table.room(None),
    ):
        pass
    assert caught.value.limit == "sessions"
    with table.room(None):
        pass


def test_without_quotas_nothing_is_refused() -> None:
    quota = TenantQuota("ci", QuotaSettings())
    quota.spend(1e9)
    with quota.turn(NEVER), quota.turn(NEVER), OwnedTable(quota, bool).room(None, 10**6):
        assert quota.cpu_seconds_left() is None


def test_a_change_lets_calls_that_wait_begin_or_stops_further_ones() -> None:
    quota = TenantQuota("ci", QuotaSettings(calls=1))
    begun = threading.Event()
    end = threading.Event()

    def call() -> None:
        with quota.turn(NEVER):
            begun.set()
            assert end.wait(30)

    with quota.turn(NEVER):
        other = threading.Thread(target=call)
        other.start()
        assert soon(lambda: quota.load() == (1, 1))
        quota.change(QuotaSettings(calls=2))
        assert begun.wait(30)
        quota.change(QuotaSettings(calls=1, queue=0))
        assert quota.load() == (2, 0)
        assert refusal(quota).limit == "queue"
    end.set()
    other.join(30)
    assert quota.load() == (0, 0)
    with quota.turn(NEVER):
        assert refusal(quota).limit == "queue"


def test_a_new_quota_of_cpu_time_begins_full_and_a_lower_one_takes_effect_at_once() -> None:
    clock = Clock()
    quota = TenantQuota("ci", QuotaSettings(), clock)
    quota.change(QuotaSettings(cpu_seconds_per_minute=60.0))
    assert quota.cpu_seconds_left() == 60.0
    quota.change(QuotaSettings(cpu_seconds_per_minute=3.0))
    assert quota.cpu_seconds_left() == 3.0
    quota.change(QuotaSettings())
    assert quota.cpu_seconds_left() is None
