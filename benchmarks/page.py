"""Reports as one HTML page that needs nothing else: pictures first, numbers below them."""

import html

from .pictures import draw
from .report import Report, ReportTable
from .tables import cells, is_numeric

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 920px; margin: 2rem auto; padding: 0 1rem;
  background: Canvas; color: CanvasText; }
h2 { margin-top: 3rem; border-top: 1px solid #8884; padding-top: 1.5rem; }
figure { margin: 1.5rem 0; } .soft { opacity: .7; font-size: .9em; }
table { border-collapse: collapse; font-size: .88em; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: .25rem .7rem; border-bottom: 1px solid #8884; vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
"""


def as_page(reports: list[Report]) -> str:
    """Return the page."""
    machines = dict.fromkeys(report.machine for report in reports)
    lines = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width">',
        f"<title>What cells cost</title><style>{_STYLE}</style>",
        "<h1>What cells cost</h1>",
        *(f"<p class=soft>{html.escape(machine)}</p>" for machine in machines),
        *(part for report in reports for part in _section(report)),
    ]
    return "\n".join([*lines, "</html>", ""])


def _section(report: Report) -> list[str]:
    return [
        f'<h2 id="{html.escape(report.name)}">{html.escape(report.title)}</h2>',
        *(f"<figure>{draw(chart)}</figure>" for chart in report.charts),
        *(_table(table) for table in report.tables),
        *(f"<p class=soft>{html.escape(note)}</p>" for note in report.notes),
        *(f"<p><code>{html.escape(str(verdict))}</code></p>" for verdict in report.verdicts),
    ]


def _table(table: ReportTable) -> str:
    kinds = [" class=number" * is_numeric(table, number) for number in range(len(table.columns))]
    head = _row("th", kinds, [column.title for column in table.columns])
    rows = "\n".join(_row("td", kinds, words) for words in cells(table))
    note = f"<p class=soft>{html.escape(table.note)}</p>" if table.note else ""
    title = f"<h3>{html.escape(table.title)}</h3>"
    return f"{title}<div class=wide><table>{head}\n{rows}</table></div>{note}"


def _row(element: str, kinds: list[str], words: list[str]) -> str:
    boxes = (
        f"<{element}{kind}>{html.escape(word)}</{element}>"
        for kind, word in zip(kinds, words, strict=True)
    )
    return f"<tr>{''.join(boxes)}</tr>"
