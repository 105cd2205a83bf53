"""Every benchmark measures something on this host; what it measures is not judged here."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cellwright.benchmarks import commands, fairness, leaks, peers
from cellwright.benchmarks.census import Census, count
from cellwright.benchmarks.contestants import AbsentError, Command, Isolation
from cellwright.benchmarks.programs import SUM, TEXT, Program
from cellwright.benchmarks.settings import Settings, sandbox
from cellwright.policies.policy import Policy
from tests.conftest import OPTIONAL, ROOT, soon

SETTINGS = Settings(Policy(name="strict", optional_layers=OPTIONAL), runs=2, forks=20, smoke=True)
LONG = ("throughput", "validation")  # they are in the smoke run of .ci/run
pytestmark = pytest.mark.needs("userns")


@pytest.mark.slow
@pytest.mark.needs("real_cpu")
@pytest.mark.parametrize("name", [name for name in commands.BENCHMARKS if name not in LONG])
def test_a_benchmark_returns_a_report_that_says_something(name: str) -> None:
    import importlib

    report = importlib.import_module(f"cellwright.benchmarks.{name}").measure(SETTINGS)
    assert report.name == name
    assert report.verdicts
    for table in report.tables:
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_a_peer_that_is_not_here_says_so_and_one_that_lies_is_not_believed(tmp_path: "os.PathLike[str]") -> None:  # fmt: skip
    nothing = Isolation(*["none"] * len(Isolation._fields))

    def line(place: object, program: Program) -> list[str]:
        return ["/nowhere/python3"] if program is TEXT else ["/bin/echo", "3"]

    peer = Command("liar", nothing, line, lambda: "1")
    peer.find(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(AbsentError, match="/nowhere/python3"):
        peer.run(TEXT)
    with pytest.raises(AbsentError, match="printed '3'"):
        peer.run(SUM)


def test_every_peer_that_is_missing_has_a_reason() -> None:
    found = {peer.name: peer for peer in peers.every_peer(SETTINGS)}
    assert len(found) >= 14
    with pytest.raises(AbsentError, match="peers-setup"):
        found["pydantic-monty"].find(None)  # type: ignore[arg-type]


# The judges


def census(**more: int) -> Census:
    return Census(5, 0, 52, 4, 27, 1, 0, 20.0)._replace(**more)


def test_what_there_is_more_of_is_a_leak_and_memory_may_breathe() -> None:
    assert leaks._more(census(), census(memory_mib=24)) == {}
    assert leaks._more(census(), census(memory_mib=26)) == {"memory_mib": 6}
    assert leaks._more(census(), census(descriptors=28)) == {"descriptors": 1}
    assert leaks._more(census(), census(processes=4)) == {}


def test_a_census_sees_what_is_held() -> None:
    with sandbox(SETTINGS, pool=0) as made:
        before = leaks._settled(made)
        held = os.open("/dev/null", os.O_RDONLY)
        assert count(made).descriptors > before.descriptors
        os.close(held)


def test_a_wrong_result_is_told() -> None:
    with sandbox(SETTINGS) as made:
        kind = leaks.Kind(100, "1 / 0", ("exit",), {})
        assert "exception" in leaks._call(made, kind, [])
        assert leaks._call(made, kind._replace(code="1"), []) == ""


def test_an_order_that_is_none_fails() -> None:
    assert fairness._in_order([0, 1, 2]).holds
    assert not fairness._in_order([0, 2, 1]).holds


def test_a_run_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    optional = [part for layer in OPTIONAL for part in ("--optional", layer)]
    command = [
        sys.executable,
        "-m",
        "cellwright",
        "bench",
        "--smoke",
        "--plain",
        *optional,
        "latency",
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert soon(lambda: bool(os.listdir(tmp_path)))
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == []
