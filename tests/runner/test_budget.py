"""A budget of work on untrusted input ends by steps, by time, and by the caller."""

import os

import pytest

from cellwright.policies.errors import BudgetExceeded
from cellwright.runner.concurrency import Budget


def spend_one_by_one(budget: Budget, steps: int) -> None:
    for _ in range(steps):
        budget.spend()


def test_steps_end_it() -> None:
    budget = Budget("the check", 100)
    budget.spend(100)
    with pytest.raises(BudgetExceeded, match="the check takes more than 100 steps") as raised:
        budget.spend()
    assert raised.value.cause == "steps"


def test_a_deadline_that_has_passed_ends_it_at_the_first_step() -> None:
    with pytest.raises(BudgetExceeded) as raised:
        Budget("the check", 100, seconds=-1.0).spend()
    assert raised.value.cause == "wall_time"


def test_a_caller_who_gives_up_ends_work_that_is_under_way() -> None:
    cancel = os.eventfd(0)
    try:
        budget = Budget("the check", float("inf"), cancel=cancel)
        budget.spend()
        os.eventfd_write(cancel, 1)
        with pytest.raises(BudgetExceeded) as raised:
            spend_one_by_one(budget, 100_000)
    finally:
        os.close(cancel)
    assert raised.value.cause == "cancelled"
    assert budget.spent < 50_000


def test_a_part_spends_of_the_whole() -> None:
    whole = Budget("all", 100)
    part = whole.part("one of them", 60)
    part.spend(60)
    with pytest.raises(BudgetExceeded, match="one of them"):
        part.spend()
    with pytest.raises(BudgetExceeded, match="all takes more than 100"):
        whole.part("another", 60).spend(60)
    assert whole.spent > 100


def test_a_part_ends_with_the_deadline_of_the_whole() -> None:
    with pytest.raises(BudgetExceeded) as raised:
        Budget("all", 100, seconds=-1.0).part("one of them", 60).spend()
    assert raised.value.cause == "wall_time"
