"""Tables on a terminal: by rich where it is installed, which only this module imports, else plain."""

import importlib.util
import sys
import textwrap

from .report import Report, ReportTable, shown

_WIDTH = 100


def show(report: Report, *, plain: bool = False) -> None:
    """Print a report, without its charts."""
    print(f"\n{report.title}\n{report.machine}\n")
    for table in report.tables:
        if plain or not importlib.util.find_spec("rich"):
            print(as_text(table))
        else:
            _print_with_rich(table)
    for note in report.notes:
        print(textwrap.fill(note, _WIDTH, subsequent_indent="  "))
    for verdict in report.verdicts:
        print(verdict)


def as_text(table: ReportTable) -> str:
    """Return a table in columns; numbers stand to the right."""
    head = [column.title for column in table.columns]
    rows = cells(table)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    numeric = [is_numeric(table, number) for number in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]
    note = f"\n{table.note}" if table.note else ""
    return "\n".join([table.title, "", *lines]) + note + "\n"


def as_markdown(table: ReportTable) -> str:
    """Return a table as a document has it."""
    head = [column.title for column in table.columns]
    rule = ["--:" if is_numeric(table, number) else "---" for number in range(len(head))]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in cells(table)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *escaped))


def cells(table: ReportTable) -> list[list[str]]:
    return [
        [shown(value, column.digits) for value, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]


def is_numeric(table: ReportTable, column: int) -> bool:
    """Tell whether a column holds numbers, as far as it holds anything."""
    values = [row[column] for row in table.rows if row[column] is not None]
    return bool(values) and all(isinstance(value, int | float) for value in values)


def _print_with_rich(table: ReportTable) -> None:
    import rich.box
    import rich.console
    import rich.table
    from rich.markup import escape

    drawn = rich.table.Table(
        title=escape(table.title), caption=escape(table.note) or None, box=rich.box.SIMPLE_HEAD,
        title_justify="left", caption_justify="left",
    )  # fmt: skip
    for number, column in enumerate(table.columns):
        right = is_numeric(table, number)
        drawn.add_column(escape(column.title), justify="right" if right else "left", no_wrap=right)
    for row in cells(table):
        drawn.add_row(*map(escape, row))
    width = None if sys.stdout.isatty() else _WIDTH + 20
    rich.console.Console(width=width).print(drawn)
