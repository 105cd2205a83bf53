"""Parsers of what suites print: text in, the outcome of each test out.

An outcome is "pass", "fail" or "skip".  A failure that the suite itself expects counts as a pass.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping

PASS, FAIL, SKIP, MISSING = "pass", "fail", "skip", "missing"
Outcomes = dict[str, str]

_TAP = re.compile(r"^(not )?ok\b ?(\d*) ?(?:- )?([^#]*)(?:# *(\w+))?")
_TAP_SKIPS_ALL = re.compile(r"^1\.\.0\b.*", re.IGNORECASE)
_PROVE = re.compile(r"^(\S+) \.{2,} *(ok|skipped|Failed|Dubious|No subtests)\b")
_UNITTEST = re.compile(r"^(\w+) \(([\w.<>]+)\)")
_UNITTEST_ENDS = re.compile(
    r"\.\.\. .*?(ok|FAIL|ERROR|skipped|expected failure|unexpected success)\b"
)
_UNITTEST_LATE = re.compile(r"^(ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)$")
_WORDS = {
    "ok": PASS, "skipped": SKIP, "expected failure": PASS, "unexpected success": FAIL, "FAIL": FAIL, "ERROR": FAIL,
}  # fmt: skip
# Lines such as `PASS: tests/misc/date.sh` (automake, busybox) and `--- FAIL: TestX (0.01s)` (go test).
_WORD_FIRST = {
    PASS: r"^(?:--- )?(?:PASS|XFAIL): (\S.*?)(?: \([\d.]+s\))?$",
    FAIL: r"^(?:--- )?(?:FAIL|XPASS|ERROR): (\S.*?)(?: \([\d.]+s\))?$",
    SKIP: r"^(?:--- )?(?:SKIP|SKIPPED|UNTESTED): (\S.*?)(?: \([\d.]+s\))?$",
}
# `     boolean                      ... ok           35 ms` of pg_regress
_POSTGRES = {
    PASS: r"^(?:test| {4,})\s*(\w+)\s+\.\.\. ok\b",
    FAIL: r"^(?:test| {4,})\s*(\w+)\s+\.\.\. (?:FAILED|failed \(ignored\))",
    SKIP: r"^(?:test| {4,})\s*(\w+)\s+\.\.\. skipped",
}


def read_outcomes(reads: str, text: str, patterns: Mapping[str, str], status: int) -> Outcomes:
    """Return the outcome of each test in `text`, which is of the form that `reads` names.

    "lines" takes `patterns`: a regular expression for each outcome, whose first group is the test.
    "status" has one test, which passes if `status` is 0.
    """
    if reads == "status":
        return {"exit status": FAIL if status else PASS}
    if reads == "lines":
        return _lines(text, patterns)
    return _PARSERS[reads](text)


def _lines(text: str, patterns: Mapping[str, str]) -> Outcomes:
    compiled = [(outcome, re.compile(pattern)) for outcome, pattern in patterns.items()]
    return _named(
        (match[1], outcome)
        for line in text.splitlines() for outcome, pattern in compiled
        if (match := pattern.search(line))
    )  # fmt: skip


def _tap(text: str) -> Outcomes:
    """Read the Test Anything Protocol; subtests, which are indented, are parts of their test."""
    return _named(_tap_tests(text))


def _tap_tests(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if _TAP_SKIPS_ALL.match(line):
            yield "all", SKIP
        elif match := _TAP.match(line):
            failed, number, description, directive = match.groups()
            known = (directive or "").lower()
            outcome = SKIP if known == "skip" else FAIL if failed and known != "todo" else PASS
            yield f"{number} {description.strip()}".strip(), outcome


def _prove(text: str) -> Outcomes:
    words = {"ok": PASS, "skipped": SKIP}
    found = (_PROVE.match(line) for line in text.splitlines())
    return _named((match[1], words.get(match[2], FAIL)) for match in found if match)


def _unittest(text: str) -> Outcomes:
    return _named(_unittest_tests(text))


def _unittest_tests(text: str) -> Iterator[tuple[str, str]]:
    """A test's name and its outcome are on one line, unless it has a docstring or prints something."""
    name = ""
    for line in text.splitlines():
        if match := _UNITTEST.match(line):
            name = f"{match[2]}.{match[1]}" if not match[2].endswith(match[1]) else match[2]
        ends = _UNITTEST_ENDS.search(line) or (_UNITTEST_LATE.match(line) if name else None)
        if name and ends:
            yield name, _WORDS[ends[1].split(" '")[0]]
            name = ""


def _junit(text: str) -> Outcomes:
    """Read JUnit's XML, as pytest and regrtest write it: documents one after another, some empty."""
    documents = re.findall(
        r"<testsuites\b[^>]*(?<!/)>.*?</testsuites>|<testsuite\b[^>]*(?<!/)>.*?</testsuite>",
        text,
        re.DOTALL,
    )
    return _named(
        (_junit_name(case), _junit_outcome(case))
        for document in documents for case in ElementTree.fromstring(document).iter("testcase")
        if case.get("name")  # regrtest writes none of a test whose parts alone have outcomes
    )  # fmt: skip


def _junit_name(case: ElementTree.Element) -> str:
    return ".".join(filter(None, (case.get("classname"), case.get("name"))))


def _junit_outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return FAIL if kinds & {"failure", "error"} else SKIP if "skipped" in kinds else PASS


def _named(found: Iterator[tuple[str, str]]) -> Outcomes:
    """Return the outcomes by name; of several tests with one name, the worst."""
    outcomes: Outcomes = {}
    order = (PASS, SKIP, FAIL)
    for name, outcome in found:
        outcomes[name] = max(outcomes.get(name, PASS), outcome, key=order.index)
    return outcomes


_PARSERS: dict[str, Callable[[str], Outcomes]] = {
    "tap": _tap,
    "tap numbers": lambda text: _named(
        (name.split()[0], outcome) for name, outcome in _tap_tests(text)
    ),
    "prove": _prove,
    "unittest": _unittest,
    "junit": _junit,
    "word first": lambda text: _lines(text, _WORD_FIRST),
    "postgres": lambda text: _lines(text, _POSTGRES),
}
FORMS = ("status", "lines", *_PARSERS)
