"""The table of runtimes: its data, and those of them that every host of the tests has."""

import pytest

from tests.conformance import runtimes

# By command; scripts/runtimes runs all of them.
EVERYWHERE = ("gcc", "make", "nginx", "node", "php", "ruby", "tmux")
ALL = runtimes.runtimes()


def test_every_runtime_is_named_once_and_is_in_the_table() -> None:
    names = [each.name for each in ALL]
    assert len(set(names)) == len(names) >= 40
    written = (runtimes.HERE / "RUNTIMES.md").read_text()
    for name in (*names, *runtimes.untried()):
        assert f"| {name} |" in written


def test_no_runtime_works_outside_alone() -> None:
    assert "| NO |" not in (runtimes.HERE / "RUNTIMES.md").read_text()


@pytest.mark.needs("userns")
@pytest.mark.parametrize(
    "runtime",
    [
        pytest.param(each, id=each.command, marks=pytest.mark.needs(each.command))
        for each in ALL
        if each.command in EVERYWHERE
    ],
)
def test_a_runtime_works_and_sees_one_processor(runtime: runtimes.Runtime) -> None:
    row = runtimes.try_inside(runtime)
    assert row.started
    assert row.inside, row.remark
    assert row.limits.split(" ")[0] in ("", "1")
