"""Results of benchmarks, and their forms: terminal, file, page, document."""

import random
import re
import xml.etree.ElementTree as ET
from math import nan

import msgspec
import pytest

from cellwright.benchmarks import commands, documents, measuring, peers, pictures, tables
from cellwright.benchmarks.page import as_page
from cellwright.benchmarks.report import (
    Bar,
    Bars,
    Chart,
    Column,
    Criterion,
    Curve,
    Curves,
    Report,
    ReportTable,
)
from cellwright.harness.cli import main as cli
from tests.conftest import ROOT

HOSTILE = "<script>alert(1)</script>"
TABLE = ReportTable(
    title="a table",
    columns=(Column("name"), Column("ms", 1), Column("runs", 0)),
    rows=(("a | b", 1.26, 1000), (HOSTILE, None, 2)),
    note="a note",
)
BARS = Bars(title="bars", unit="ms", bars=(Bar("one", 1.0, 0.5, 2.0), Bar(HOSTILE, 30.0)))
STACK = Bars(title="stack", unit="us", bars=(Bar("a", 3.0), Bar("b", -1.0)), stacked=True)
WIDE = Bars(title="wide", unit="ms", bars=(Bar("a", 0.2), Bar("b", 900.0)), logarithmic=True)
LINES = Curves(title="lines", x="n", y="ms", lines=(Curve("l", ((1.0, 2.0), (8.0, 3.0))),))
CURVES = Curves(
    title="c", x="ms", y="%", lines=(measuring.distribution("d", [0.001, 0.02]),),
    logarithmic=True,
)  # fmt: skip
CHARTS: tuple[Chart, ...] = (BARS, STACK, WIDE, LINES, CURVES)
REPORT = Report(
    name="latency",
    title="a report",
    machine="a machine",
    tables=(TABLE,),
    brief=(TABLE,),
    headlines=(TABLE,),
    charts=CHARTS,
    verdicts=(Criterion("it holds", True, "1.0 times"),),
    notes=("something",),
)


# Numbers


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert measuring.percentile(values, 0.5) == 51
    assert measuring.percentile(values, 0.99) == 100
    assert measuring.percentile([7.0], 0.999) == 7


def test_a_percentile_that_few_values_bear_is_not_told() -> None:
    assert measuring.percentile_row([0.001] * 100) == (1.0, 1.0, None, None, 100)
    assert measuring.percentile_row([0.001] * 2000) == (1.0, 1.0, 1.0, 1.0, 2000)


def test_contenders_take_turns_in_alternating_order() -> None:
    order: list[str] = []
    contenders = [
        measuring.Contender(name, lambda name=name: order.append(name)) for name in ("a", "b")
    ]
    times = measuring.side_by_side(contenders, 3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"  # the first are not timed
    assert [len(values) for values in times.values()] == [3, 3]


def test_a_contender_may_report_its_own_time_and_a_slow_one_runs_less_often() -> None:
    slow = measuring.Contender("slow", lambda: 42.0, every=10)
    assert measuring.side_by_side([slow], 20) == {"slow": [42.0, 42.0]}


def test_rounds_end_with_their_number_with_time_or_once_it_is_enough() -> None:
    one = [measuring.Contender("a", lambda: 1.0)]
    assert len(measuring.side_by_side(one, 50)["a"]) == 50
    assert len(measuring.side_by_side(one, 50, seconds=-1)["a"]) == 1
    enough = measuring.side_by_side(one, 50, is_enough=lambda times: len(times["a"]) >= 30)
    assert len(enough["a"]) == 40  # it is asked every twenty rounds


def test_a_ratio_has_an_interval_that_many_rounds_make_narrow() -> None:
    below = [1.0 + (n % 10) / 100 for n in range(400)]
    above = [3 * value for value in below]
    few, many = (measuring.ratio(above[:count], below[:count]) for count in (4, 400))
    assert few.value == pytest.approx(3, rel=0.05)
    assert many.low < many.value < many.high
    assert many.spread < few.spread
    assert many.is_steady
    assert many.rounds == 400


def test_a_ratio_of_noise_is_not_steady() -> None:
    noise = [float(1 + n * 7 % 13) for n in range(20)]
    assert not measuring.ratio(noise, noise).is_steady


def test_peers_are_measured_until_the_ratio_of_each_quick_one_is_steady() -> None:
    quick, slow = (
        measuring.Contender(name, int, every=every) for name, every in (("quick", 1), ("slow", 10))
    )
    ready = measuring.Contender(peers.READY, int)
    times = {peers.READY: [1.0] * 20, "quick": [nan, *[3.0] * 19], "slow": [9.0, 90.0]}
    contenders = [ready, quick, slow]
    assert peers._is_steady(contenders, times)
    assert not peers._is_steady(contenders, times | {"quick": [1.0, 9.0] * 10})
    assert not peers._is_steady(contenders, times | {"quick": [nan] * 20})


def test_few_values_are_not_steady_even_if_they_are_equal() -> None:
    assert not measuring.estimate([5.0] * 5).is_steady
    assert measuring.estimate([5.0] * 6).is_steady
    assert measuring.estimate([0.0] * 6).spread == 0


def test_the_interval_of_a_median_encloses_it_as_often_as_it_says() -> None:
    chance = random.Random(1)
    intervals = [
        measuring.median_interval([chance.random() for _ in range(50)]) for _ in range(1000)
    ]
    assert sum(low <= 0.5 <= high for low, high in intervals) >= 950


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7), (0, 250), (0, 0.004)])
def test_ticks_are_few_and_round(low: float, high: float) -> None:
    found = pictures.ticks(low, high)
    assert 3 <= len(found) <= 7
    assert found[-1] <= high * 1.001
    assert len(f"{found[1]:g}") <= 5


# Pictures, pages, tables


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_a_picture_is_well_formed_and_stays_inside_itself(chart: Chart) -> None:
    svg = ET.fromstring(pictures.draw(chart))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for box in svg.iter("{http://www.w3.org/2000/svg}rect"):
        x, y = float(box.attrib["x"]), float(box.attrib["y"])
        assert 0 <= x <= x + float(box.attrib["width"]) <= width
        assert 0 <= y <= y + float(box.attrib["height"]) <= height


def test_a_number_stands_beside_every_bar() -> None:
    words = "".join(ET.fromstring(pictures.draw(BARS)).itertext())
    assert "1.00" in words
    assert "30.0" in words


def test_a_page_needs_nothing_else_and_executes_nothing() -> None:
    page = as_page([REPORT])
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
    assert re.findall(r"<script|src=|href=|@import|url\(", page) == []
    assert page.count("<svg") == len(CHARTS)
    assert "prefers-color-scheme: dark" in page


def test_a_table_has_its_numbers_rounded_and_its_gaps_marked() -> None:
    text = tables.as_text(TABLE)
    assert "1.3" in text
    assert "1,000" in text
    assert re.search(r" -  +2", text)
    assert tables.as_markdown(TABLE).splitlines()[1] == "| --- | --: | --: |"
    assert "a \\| b" in tables.as_markdown(TABLE)


@pytest.mark.parametrize("plain", [True, False])
def test_a_report_is_printed_with_its_verdicts(
    plain: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tables.show(REPORT, plain=plain)
    printed = capsys.readouterr().out
    assert "a machine" in printed
    assert "PASS  it holds: 1.0 times" in printed
    assert "1.3" in printed


# Documents


def test_results_are_written_between_their_marks_and_nowhere_else() -> None:
    for name, mark, write in (
        ("README.md", "performance", lambda text: documents.with_brief(text, [REPORT])),
        (
            "benchmarks/README.md",
            "headlines",
            lambda text: documents.with_headlines(text, [REPORT]),
        ),
    ):
        old = (ROOT / name).read_text()
        new = write(old)
        assert "a machine" in new
        assert write(new) == new
        changed = [line for line in old.splitlines() if line not in new.splitlines()]
        marked = old.partition(f"<!-- {mark}: written")[2].partition(f"<!-- {mark}: end -->")[0]
        assert all(line in marked for line in changed)


def test_headlines_of_a_busy_machine_say_so() -> None:
    busy = msgspec.structs.replace(REPORT, quiet=False)
    text = "\n".join(documents.HEADLINES)
    assert documents.NOT_QUIET in documents.with_headlines(text, [busy])
    assert documents.NOT_QUIET not in documents.with_headlines(text, [REPORT])


def test_every_benchmark_is_described_and_every_result_is_of_one() -> None:
    text = (ROOT / "benchmarks/README.md").read_text()
    for name in commands.BENCHMARKS:
        assert f"| `{name}` |" in text
    kept = {path.stem for path in (ROOT / "benchmarks/results").iterdir()}
    assert kept - set(commands.BENCHMARKS) == {
        "images",
        "torch",  # scripts/prove-torch writes it
        "where-time-goes",
        "judge_server",
        "protected",
    }


def test_a_report_in_full_has_its_machine_tables_and_notes() -> None:
    text = documents.in_full(REPORT)
    assert text.startswith(f"# {REPORT.name}\n\na machine")
    assert all(tables.as_markdown(table) in text for table in REPORT.tables)
    assert all(f"- {note}" in text for note in REPORT.notes)


# The command


def test_results_can_be_shown_again_from_their_file(
    tmp_path: "pytest.TempPathFactory", capsys: pytest.CaptureFixture[str]
) -> None:
    source, page = f"{tmp_path}/results.json", f"{tmp_path}/page.html"
    with open(source, "wb") as file:
        file.write(msgspec.json.encode([REPORT]))
    assert cli.main(["bench", "--from", source, "--html", page, "--plain"]) == 0
    assert "a report" in capsys.readouterr().out
    with open(page) as written:
        assert "<svg" in written.read()


def test_a_verdict_that_does_not_hold_fails_the_command(tmp_path: "pytest.TempPathFactory") -> None:
    failed = msgspec.structs.replace(REPORT, verdicts=(Criterion("it holds", False, "0.5 times"),))
    source = f"{tmp_path}/results.json"
    with open(source, "wb") as file:
        file.write(msgspec.json.encode([failed]))
    assert cli.main(["bench", "--from", source, "--plain"]) == 1


def test_a_smoke_run_is_not_for_documents() -> None:
    before = (ROOT / "README.md").read_text()
    assert cli.main(["bench", "--smoke", "--write-readme", "audit"]) == 2
    assert (ROOT / "README.md").read_text() == before


def test_a_benchmark_that_there_is_not_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "latencies"]) == 2
    said = capsys.readouterr().err
    assert "unknown benchmark 'latencies'" in said
    assert "latency" in said


def test_the_main_readme_has_the_medians_of_few_peers() -> None:
    titles = ("peer", "version", "p50 ms", "ratio", "runs", "new for each call")
    rows = (
        (peers.READY, "1", 1.0, 1.0, 9, "process"),
        ("firejail", "2", 40.0, 40.0, 9, "-"),
    )
    table = ReportTable(title="t", columns=tuple(map(Column, titles)), rows=rows)
    brief = peers._brief(table)
    assert [each.title for each in brief.columns] == [
        "peer",
        "p50 ms",
        "ratio",
        "new for each call",
    ]
    assert brief.rows == ((peers.READY, 1.0, 1.0, "process"),)
