"""Globs over the files of a guest: bounded in steps and time, and ended by a caller who gives up."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import Limits, Policy, Sandbox
from cellwright.runner.cells.workspace import Uncollected, collect, list_files
from cellwright.runner.concurrency import Budget
from tests.conftest import OPTIONAL
from tests.work import cost_of

HOSTILE = ["*" + "[a/0-9]" * 145 + f"b{number}" for number in range(64)]


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[int]:
    place = tmp_path
    for _ in range(10):
        place = place / ("a" * 120)
        place.mkdir()
    for number in range(200):
        (place / f"{number:04}{'a' * 100}").touch()
    (tmp_path / "b.txt").write_text("b")
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def test_globs_that_cost_are_ended_by_steps_and_that_is_told(workspace: int) -> None:
    listing = list_files(workspace)
    budget = Budget("collecting files", 100_000)
    cost = cost_of(lambda: collect(workspace, listing, HOSTILE, 1000, budget), 1_000_000)
    assert cost.result == (
        (),
        (Uncollected("", 0, "collecting files takes more than 100000 steps"),),
    )
    assert budget.spent < 200_000


def test_what_a_glob_costs_grows_with_the_path_and_with_the_glob(workspace: int) -> None:
    def steps(path: str, glob: str) -> int:
        budget = Budget("collecting files", 10**9)
        collect(workspace, {path: list_files(workspace)["b.txt"]}, [glob], 0, budget)
        return budget.spent

    assert steps("a" * 4000, "[a]" * 300) >= 10 * steps("a" * 400, "[a]" * 300) * 0.9
    assert steps("a" * 4000, "[a]" * 300) >= 10 * steps("a" * 4000, "[a]" * 30) * 0.9


def test_a_deadline_and_a_caller_who_gave_up_end_it(workspace: int) -> None:
    listing = list_files(workspace)
    late = Budget("collecting files", 10**9, seconds=-1.0)
    _, (left_out,) = collect(workspace, listing, ["*"], 1000, late)
    assert left_out.why == "collecting files takes longer than -1 s"
    given_up = os.eventfd(1)
    try:
        cancelled = Budget("collecting files", 10**9, cancel=given_up)
        found = collect(workspace, listing, ["*"], 1000, cancelled)
    finally:
        os.close(given_up)
    assert found == ((), (Uncollected("", 0, "collecting files was cancelled by the caller"),))


def test_a_caller_who_gives_up_during_a_request_waits_for_no_glob() -> None:
    given_up = os.eventfd(0)

    def give_up(stream: str, data: bytes) -> None:
        os.eventfd_write(given_up, 1)

    code = "open('a', 'w').close()\nprint(1, flush=True)\nimport time\ntime.sleep(60)"
    try:
        with Sandbox(policy=Policy(optional_layers=OPTIONAL), pool=0) as box:
            result = box.execute(code, collect=["*"], on_output=give_up, cancel=given_up)
    finally:
        os.close(given_up)
    assert (result.reason, result.artifacts) == ("cancelled", ())
    assert [each.why for each in result.uncollected] == [
        "collecting files was cancelled by the caller"
    ]


def test_a_file_that_was_given_and_is_unchanged_is_not_collected() -> None:
    files = {"same.csv": "1", "grown.csv": "1", "other.csv": "1", "big.csv": "x" * 20}
    code = (
        "open('grown.csv', 'a').write('2'); open('other.csv', 'w').write('2')\n"
        "open('new.csv', 'w').write('1') and None"
    )
    limits = Limits(artifact_bytes=10)
    with Sandbox(policy=Policy(optional_layers=OPTIONAL, limits=limits), pool=0) as box:
        result = box.execute(code, files=files, collect=["*.csv"])
        assert [(each.name, each.data) for each in result.artifacts] == [
            ("grown.csv", b"12"), ("new.csv", b"1"), ("other.csv", b"2"),
        ]  # fmt: skip
        assert result.uncollected == ()
        with box.session() as session:
            session.execute("None", files={"a": "1"})
            assert session.execute("None", collect=["a"]).artifacts[0].data == b"1"
            assert session.execute("None", files={"a": "1"}, collect=["a"]).artifacts == ()
