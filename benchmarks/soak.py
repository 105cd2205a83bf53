"""Long and heavy use: whether each result belongs to its caller, the waiting times, killed workers, and
leaks."""

from itertools import chain

from . import concurrent_callers, constancy, killed_workers, overload
from .leak_checks import NOTES, censuses, own_temporary_files, told_at_once
from .report import Column, Report, ReportTable, Value
from .settings import Settings


def measure(settings: Settings) -> Report:
    """Return verdicts on each way to be used hard, with a census before and after."""
    callers: list[tuple[Value, ...]] = []
    others: list[tuple[Value, ...]] = []
    with own_temporary_files():
        made = told_at_once(
            chain(
                concurrent_callers.leak_checks(settings, callers),
                overload.leak_checks(settings, others),
                constancy.leak_checks(settings, others),
                killed_workers.leak_checks(settings, others),
            )
        )
    return Report(
        name="soak",
        title="Used hard, and for long",
        tables=(censuses(made), concurrent_callers.table(callers), _table(others)),
        verdicts=tuple(verdict for each in made for verdict in each.verdicts()),
        notes=NOTES,
    )


def _table(rows: list[tuple[Value, ...]]) -> ReportTable:
    """Return what else was seen."""
    columns = (Column("of"), Column("what"), Column("seen"))
    return ReportTable(title="What else was seen", columns=columns, rows=tuple(rows))
