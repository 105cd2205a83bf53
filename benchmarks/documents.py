"""Results written into a checkout: tables between marks of a document, and a file a benchmark."""

from pathlib import Path

from ..policies.errors import PolicyError
from .report import Report, ReportTable
from .tables import as_markdown

_FOLDER = Path(__file__).resolve().parent
_ROOT = _FOLDER.parent
BRIEF = ("<!-- performance: written by cellwright bench -->", "<!-- performance: end -->")
HEADLINES = ("<!-- headlines: written by cellwright bench -->", "<!-- headlines: end -->")
NOT_QUIET = "Others used this machine meanwhile: read ratios, not times."


def write_documents(reports: list[Report]) -> None:
    """Write the brief tables into README.md, the headlines into this folder's, and each report in full
    into a file of results/.

    Raises PolicyError outside a checkout.
    """
    readme, ours = _ROOT / "README.md", _FOLDER / "README.md"
    if not (_ROOT / "pyproject.toml").is_file():
        raise PolicyError("--write-readme: this is not a checkout", "clone the repository")
    readme.write_text(with_brief(readme.read_text(), reports))
    ours.write_text(with_headlines(ours.read_text(), reports))
    for report in reports:
        (_FOLDER / "results" / f"{report.name}.md").write_text(in_full(report))


def with_headlines(document: str, reports: list[Report]) -> str:
    """Return `document` with the headlines of each report between their marks."""
    found = [(report, report.headlines) for report in reports if report.headlines]
    return _with_tables(document, HEADLINES, found)


def with_brief(document: str, reports: list[Report]) -> str:
    """Return `document` with the brief tables of the reports between their marks."""
    found = [(report, report.brief) for report in reports if report.brief]
    return _with_tables(document, BRIEF, found)


def _with_tables(
    document: str, marks: tuple[str, str], found: list[tuple[Report, tuple[ReportTable, ...]]]
) -> str:
    parts: list[str] = []
    for report, tables in found:
        if f"{report.machine}." not in parts:
            parts.append(f"{report.machine}.")
        if not report.quiet and NOT_QUIET not in parts:
            parts.append(NOT_QUIET)
        for table in tables:
            parts += [f"{table.title}:", as_markdown(table)]
            parts += [table.note] if table.note else []
    return between(document, *marks, "\n\n".join(parts)) if parts else document


def in_full(report: Report) -> str:
    """Return the document of a report."""
    parts = [f"# {report.name}", report.machine]
    for table in report.tables:
        parts += [f"{table.title}:", as_markdown(table), *([table.note] if table.note else [])]
    parts += ["\n".join(f"- {note}" for note in report.notes)] if report.notes else []
    return "\n\n".join(parts) + "\n"


def between(document: str, begin: str, end: str, text: str) -> str:
    """Return `document` with `text` between two marks, in place of what was there."""
    before, _, rest = document.partition(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
