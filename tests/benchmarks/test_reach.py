"""The table of goals, on made-up numbers."""

import os

import pytest

from cellwright.benchmarks import reach
from cellwright.benchmarks.measuring import Estimate
from cellwright.benchmarks.reach import Goal
from cellwright.benchmarks.throughput import BARE, BUBBLEWRAP, POOLED, Round

STEADY, WIDE = Estimate(40.0, 39.0, 41.0, 100), Estimate(20.0, 10.0, 30.0, 100)


@pytest.mark.parametrize(
    ("goal", "value", "verdict"),
    [
        (Goal(35, is_lowest=True), 35.0, "reached"),
        (Goal(35, is_lowest=True), 14.0, "missed by 60%"),
        (Goal(0.35), 0.2, "reached"),
        (Goal(0.35), 0.7, "missed by 100%"),
    ],
)
def test_a_verdict_says_by_how_much_a_goal_is_missed(
    goal: Goal, value: float, verdict: str
) -> None:
    assert goal.verdict_on(value) == verdict


def test_every_goal_has_its_row_with_how_its_rounds_ended() -> None:
    found: reach.Found = dict.fromkeys(reach.GOALS, STEADY)
    found[reach._READY] = WIDE
    found[reach._PACKAGES] = "pandas is not installed"
    report = reach.report(found)
    rows = {str(row[0]): row for row in report.tables[0].rows}
    assert rows.keys() == reach.GOALS.keys()
    assert rows[reach._READY][1:] == (20.0, 50.0, 100, "no", 35, "missed by 43%")
    assert rows[reach._RATE][4] == "yes"
    assert rows[reach._PACKAGES][1:] == (None, None, None, None, 0.02, "absent: pandas is not installed")  # fmt: skip
    assert report.verdicts


def test_a_host_without_bubblewrap_has_the_other_rows() -> None:
    turns = {POOLED: [Round(300.0, 2.0)], BARE: [Round(200.0, 8.0)]}
    found = reach._of_turns(turns)
    assert found[reach._RATE] == "bwrap is not installed"
    assert found[reach._CPU] == Estimate(0.25, 0.25, 0.25, 1)
    turns[BUBBLEWRAP] = [Round(100.0, 16.0)]
    rate = reach._of_turns(turns)[reach._RATE]
    assert isinstance(rate, Estimate)
    assert rate.value == 3


def test_only_two_processors_are_used_and_all_are_given_back() -> None:
    before = os.sched_getaffinity(0)
    with reach._two_processors():
        assert len(os.sched_getaffinity(0)) == min(2, len(before))
    assert os.sched_getaffinity(0) == before
