"""The benchmark of fleets, shortly: what it counts is judged, what it times is not."""

from cellwright.benchmarks import fleet
from cellwright.benchmarks.settings import Settings


def test_the_benchmark_returns_a_report_whose_criteria_hold() -> None:
    report = fleet.measure(Settings(runs=2, smoke=True))
    assert len(report.tables) == 3
    assert all(table.rows for table in report.tables)
    assert [str(verdict) for verdict in report.verdicts if not verdict.holds] == []
