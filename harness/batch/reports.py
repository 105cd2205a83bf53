"""Summaries of a batch: pass@k, a table, and reports for JUnit readers and browsers."""

import html
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from math import comb
from statistics import fmean, median
from xml.sax.saxutils import quoteattr

from ..text.terminal_text import harmless
from .result_file import RowResult

_MOST_FAILURES = 10  # in the table


def pass_at(k: int, results: Sequence[RowResult]) -> float | None:
    """Return the mean over tasks of the chance that one of `k` of their samples passes.

    The estimator is that of Chen et al., "Evaluating Large Language Models Trained on Code" (2021).
    None if a task has fewer samples.
    """
    by_task: dict[str, list[bool]] = defaultdict(list)
    for each in results:
        by_task[each.task].append(each.passed)
    if not by_task or min(map(len, by_task.values())) < k:
        return None
    return fmean(
        1 - comb(len(passed) - sum(passed), k) / comb(len(passed), k) for passed in by_task.values()
    )


def summary_lines(results: Sequence[RowResult], ks: Sequence[int]) -> Iterator[str]:
    """Yield the lines that end a batch."""
    passed = sum(each.passed for each in results)
    yield f"{passed:,} of {len(results):,} passed"
    for k in ks:
        found = pass_at(k, results)
        yield f"pass@{k:<4} {'not every task has so many samples' if found is None else f'{found:.4f}'}"
    for outcome, count in Counter(each.outcome for each in results).most_common():
        yield f"{count:>8,}  {harmless(outcome)}"
    if results:
        seconds = sorted(each.seconds for each in results)
        most = max(each.memory_bytes for each in results)
        yield (
            f"CPU seconds: median {median(seconds):.3f}, most {seconds[-1]:.3f}; "
            f"memory: most {most / 2**20:,.0f} MiB"
        )
    failures = [each for each in results if not each.passed]
    for each in islice(failures, _MOST_FAILURES):
        why = (each.error.strip() or each.stderr.strip() or " ").splitlines()[-1]
        task = " ".join(each.task.split())  # a line of its own could be taken for the summary
        yield harmless(f"  {task}: {each.outcome}: {why}")[:160]
    if len(failures) > _MOST_FAILURES:
        yield f"  and {len(failures) - _MOST_FAILURES:,} more"


def junit_of(results: Sequence[RowResult], name: str) -> Iterator[str]:
    """Yield the lines of a report in the XML of JUnit."""
    failed = sum(not each.passed for each in results)
    seconds = sum(each.seconds for each in results)
    yield '<?xml version="1.0" encoding="utf-8"?>'
    yield (
        f'<testsuite name={_quoted(name)} tests="{len(results)}" failures="{failed}" '
        f'errors="0" skipped="0" time="{seconds:.3f}">'
    )
    for each in results:
        named = f"classname={_quoted(name)} name={_quoted(each.task)}"
        head = f'<testcase {named} time="{each.seconds:.3f}"'
        if each.passed:
            yield f"{head}/>"
            continue
        text = html.escape(_visible(f"{each.error}\n{each.stderr}\n{each.stdout}"))
        yield f"{head}><failure message={_quoted(each.outcome)}>{text}</failure></testcase>"
    yield "</testsuite>"


def page_of(results: Sequence[RowResult], name: str, ks: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a page without scripts: the summary, and each row."""
    title = html.escape(_visible(name))
    yield '<!doctype html><html lang="en"><meta charset="utf-8">'
    yield f"<meta http-equiv='Content-Security-Policy' content=\"{_NO_SCRIPTS}\">"
    yield f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1><pre>"
    for line in summary_lines(results, ks):
        yield html.escape(line)
    yield "</pre><table><tr><th>task<th>outcome<th>CPU s<th>MiB<th>cases<th>what it said"
    for each in results:
        kind = "passed" if each.passed else "failed"
        said = html.escape(_visible(each.error or each.stderr or each.stdout)[:2000])
        cases = f"{sum(case == 'accepted' for case in each.cases)}/{len(each.cases)}"
        yield (
            f'<tr class="{kind}"><td>{html.escape(_visible(each.task))}<td>{html.escape(each.outcome)}'
            f"<td>{each.seconds:.3f}<td>{each.memory_bytes / 2**20:.0f}"
            f"<td>{cases if each.cases else ''}<td><pre>{said}</pre>"
        )
    yield "</table></html>"


_NO_SCRIPTS = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = (
    "body{font:14px system-ui;margin:2em}table{border-collapse:collapse}td,th{padding:.2em .8em;"
    "text-align:left;vertical-align:top;border-bottom:1px solid #ccc}pre{margin:0;white-space:pre-wrap}"
    ".failed td:nth-child(2){color:#b00}.passed td:nth-child(2){color:#070}"
)


def _visible(text: str) -> str:
    """Return text that XML and pages can hold: without control characters."""
    return "".join(
        each if each in "\n\t" or (each >= " " and each.isprintable()) else "\ufffd"
        for each in text
    )


def _quoted(text: str) -> str:
    return quoteattr(_visible(text))
