"""Load of others is told from our own, on made-up numbers and on real processes."""

import os
import subprocess
import sys

import pytest

from cellwright.benchmarks import census, commands, interference
from cellwright.benchmarks.census import ProcessStat, parse_stat
from cellwright.benchmarks.interference import Interference, Reading, between
from cellwright.benchmarks.report import Report
from cellwright.benchmarks.settings import Settings

BUSY, IDLE = Interference(0.5, 0.0), Interference(0.0, 0.0)
TICKS = os.sysconf("SC_CLK_TCK")


def process(
    parent: int, seconds: float, children_seconds: float = 0.0, *, is_kernel_thread: bool = False
) -> ProcessStat:
    return ProcessStat(parent, 1, is_kernel_thread, 0, 0, seconds, children_seconds)


def test_the_stolen_time_of_processors_is_read() -> None:
    fields = [10, 2, 30, 1000, 500, 4, 5, 6, 7, 8]
    text = f"cpu  {' '.join(str(field * TICKS) for field in fields)}\ncpu0 1 2 3\nintr 5\n"
    assert interference.parse_stolen(text) == 6.0


def test_the_time_of_a_process_is_read_whatever_its_name() -> None:
    times = f"{2 * TICKS} {3 * TICKS} {4 * TICKS} {5 * TICKS}"
    stat = parse_stat(f"7 (a) b) (S) S 3 7 6 0 -1 4194560 11 12 1 2 {times} 20 0 1 0\n")
    assert stat == ProcessStat(3, 6, False, 12, 14, 5.0, 9.0)
    thread = parse_stat(f"8 (kworker/0:1) I 2 0 0 0 -1 69238880 0 0 0 0 {times} 20 0 1 0\n")
    assert thread.is_kernel_thread


def test_a_launcher_is_known_by_its_name_and_not_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numbers begin again: an init may have a lower one."""
    below = {1: [12], 12: [13], 13: [4, 14], 14: [5]}
    names = {12: "cell-keeper", 13: "cell-nursery", 4: "cell-init", 14: "cell-launcher"}
    monkeypatch.setattr(census, "children", lambda pid: below.get(pid, []))
    monkeypatch.setattr(census, "_name", lambda pid: names.get(pid, "cell-guest"))
    found = dict(census.roles_below(1))
    assert found == {"keeper": 12, "nursery": 13, "init": 4, "launcher": 14, "guest": 5}


def test_time_of_the_tree_and_of_kernel_threads_is_not_others() -> None:
    processes = {
        1: process(0, 100.0, 200.0),
        2: process(0, 0.0),
        3: process(2, 0.5, is_kernel_thread=True),
        10: process(1, 1.0, 50.0),  # this process
        11: process(10, 2.0, 4.0),
        12: process(11, 8.0, 16.0),
        20: process(1, 32.0, 64.0),  # another's
        21: process(20, 32.0),
    }
    assert interference.seconds_of_others(10, processes) == 100.0 + 200.0 + 32.0 + 64.0 + 32.0


@pytest.mark.parametrize(
    ("stolen", "others", "share", "is_low"),
    [
        (0.0, 0.0, 0.0, True),
        (0.0, -0.2, 0.0, True),  # another process ended
        (0.0, 0.2, 0.02, True),
        (0.0, 6.0, 0.6, False),
        (0.5, 0.0, 0.0, False),
    ],
)
def test_what_others_used_is_their_sum(
    stolen: float, others: float, share: float, is_low: bool
) -> None:
    seen = between(Reading(100.0, 5.0, 40.0), Reading(105.0, 5.0 + stolen, 40.0 + others), 2)
    assert seen.others == pytest.approx(share)
    assert seen.stolen == pytest.approx(stolen / 10)
    assert seen.is_low is is_low


def test_the_sentence_says_which() -> None:
    assert str(Interference(0.01, 0.0)).startswith("Quiet: others used 1.0%")
    assert str(Interference(0.3, 0.0)).startswith("NOT QUIET: others used 30.0%")


def test_what_a_command_leaves_is_waited_for_and_nothing_else() -> None:
    leaving = "import os; os.fork() or os.execv('/bin/sleep', ['sleep', '0.05'])"
    with interference.adopted_orphans(), subprocess.Popen(["/bin/true"]) as ours:
        subprocess.run([sys.executable, "-Sc", leaving], start_new_session=True, check=True)
        interference.reap_orphans()
        assert interference._orphans() == []
        assert ours.wait() == 0  # no other child's status was taken


# The command


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have benchmarks measured at once; return the names of those that were."""
    names: list[str] = []

    def results(name: str, _: Settings) -> Report:
        names.append(name)
        return Report(name=name, title=name)

    monkeypatch.setattr(commands, "_results", results)
    return names


def test_a_busy_machine_is_refused_if_asked(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "wait_for_quiet", lambda _: BUSY)
    report = commands._measured("latency", Settings(), quiet=True)
    assert measured == []
    assert not report.quiet
    assert [verdict.holds for verdict in report.verdicts] == [False]


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("seen", [BUSY, IDLE])
def test_results_say_whether_others_interfered(
    seen: Interference, quiet: bool, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "wait_for_quiet", lambda _: IDLE)
    monkeypatch.setattr(commands, "between", lambda *_: seen)
    report = commands._measured("latency", Settings(), quiet=quiet)
    assert measured == ["latency"]
    assert report.quiet is seen.is_low
    assert str(seen) in report.notes
    assert [verdict.holds for verdict in report.verdicts] == ([seen.is_low] if quiet else [])


def test_results_that_are_counts_need_no_quiet(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "wait_for_quiet", lambda _: BUSY)
    report = commands._measured("leaks", Settings(), quiet=True)
    assert measured == ["leaks"]
    assert report.quiet
