"""RESULTS.md: what was kept of every suite, with the reasons of the suites' files."""

import collections

from .comparing import Comparison, Difference, kept
from .outcomes import FAIL, MISSING, PASS, SKIP
from .suites import HERE, Suite, load_suite, policy_words, suite_names

_HEAD = """# Results

Written by `scripts/conformance`; [README.md](README.md) says how. Tests outside ran as an ordinary user, tests inside in a cell
with this policy. "Not run": tests that the other side has, because a file was skipped as a whole, or ended early.

| program | version | policy | part | outside: pass, fail, skip | inside: pass, fail, skip | differences by reason |
|---|---|---|---|---|---|---|
"""


def unexplained(name: str) -> list[Difference]:
    suite, comparison = load_suite(name), kept(name)
    found = comparison.differences if comparison else []
    return [each for each in found if not suite.expectation(each.test)]


def write_table() -> None:
    both = [(load_suite(name), kept(name)) for name in suite_names()]
    present = [(suite, comparison) for suite, comparison in both if comparison]
    rows = "".join(_row(suite, comparison) for suite, comparison in present)
    reasons = "".join(_reasons(suite, comparison) for suite, comparison in present)
    (HERE / "RESULTS.md").write_text(f"{_HEAD}{rows}\n## Reasons\n\n{reasons}")


def _row(suite: Suite, comparison: Comparison) -> str:
    by_rule = collections.Counter(
        expected.rule if (expected := suite.expectation(each.test)) else "**no reason**"
        for each in comparison.differences
    )
    words = [f"{count} {rule}" for rule, count in by_rule.most_common()]
    if comparison.unstable:
        words.append(f"{len(comparison.unstable)} differed once, and not again")
    if comparison.left:
        words.append(f"stopped: {len(comparison.left)} units left")
    cells = (
        suite.program, comparison.version, policy_words(suite), suite.selection,
        _counted(comparison.outside), _counted(comparison.inside), ", ".join(words) or "none",
    )  # fmt: skip
    return f"| {' | '.join(each.replace('|', chr(92) + '|') for each in cells)} |\n"


def _counted(counts: dict[str, int]) -> str:
    missing = f" ({counts[MISSING]} not run)" if counts.get(MISSING) else ""
    return ", ".join(str(counts[each]) for each in (PASS, FAIL, SKIP)) + missing


def _reasons(suite: Suite, comparison: Comparison) -> str:
    counted = collections.Counter(suite.expectation(each.test) for each in comparison.differences)
    lines = [
        f"- {suite.program}: {count} by `{expected.rule}`: {expected.reason}\n"
        for expected, count in counted.items() if expected
    ]  # fmt: skip
    return "".join(lines)
