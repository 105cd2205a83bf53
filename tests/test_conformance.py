"""The comparison with suites by other authors: its parsers, its reasons, and one small suite."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from cellwright.policies.compiling.host import ALWAYS
from cellwright.policies.policy import OPTIONAL_LAYERS, Policy
from tests.conformance.comparing import compare, differences
from tests.conformance.outcomes import read_outcomes
from tests.conformance.suites import UNSTABLE, Suite, load_suite, suite_names
from tests.conformance.table import unexplained
from tests.conftest import ROOT

PRINTED = {
    "tap": (
        "1..5\nok 1 - opens\nnot ok 2 - reads\nok 3 - waits # SKIP no root\nnot ok 4 - later # TODO known\n    not ok 1 - inner\nok 5\n",
        {"1 opens": "pass", "2 reads": "fail", "3 waits": "skip", "4 later": "pass", "5": "pass"},
    ),
    "tap numbers": ("ok 1 - at 12:00\nnot ok 2\n1..0 # SKIP\n", {"1": "pass", "2": "fail", "all": "skip"}),
    "prove": (
        "t/io.t .. ok\nt/op.t ....... Failed 1/3 subtests\nt/no.t .. skipped: no root\n",
        {"t/io.t": "pass", "t/op.t": "fail", "t/no.t": "skip"},
    ),
    "unittest": (
        ("test_a (test.test_os.A.test_a) ... ok\ntest_b (m.B) ... skipped 'no root'\ntest_c (m.B)\nReads. ... FAIL\n"
        "test_d (m.B) ... noise\nERROR\n"),
        {"test.test_os.A.test_a": "pass", "m.B.test_b": "skip", "m.B.test_c": "fail", "m.B.test_d": "fail"},
    ),
    "junit": (
        ('<testsuites tests="0" /><?xml version="1.0"?><testsuites><testsuite><testcase classname="a.B" name="one"/><testcase classname="a.B" name="two">'
        '<failure>no</failure></testcase><testcase name="three"><skipped/></testcase><testcase/></testsuite></testsuites>'),
        {"a.B.one": "pass", "a.B.two": "fail", "three": "skip"},
    ),
    "word first": (
        "PASS: tests/date.sh\nFAIL: ls -l\nXFAIL: tests/known.sh\n--- SKIP: TestMount (0.00s)\nUNTESTED: ping\n",
        {"tests/date.sh": "pass", "ls -l": "fail", "tests/known.sh": "pass", "TestMount": "skip", "ping": "skip"},
    ),
    "postgres": (
        ("test tablespace                   ... ok          391 ms\nparallel group (2 tests):  char name\n"
        "     char                         ... FAILED       20 ms\n"),
        {"tablespace": "pass", "char": "fail"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", PRINTED)
def test_outcomes_are_read_from_what_a_suite_prints(form: str) -> None:
    printed, outcomes = PRINTED[form]
    assert read_outcomes(form, printed, {}, 0) == outcomes


def test_a_suite_may_say_itself_how_its_lines_are_read() -> None:
    patterns = {"pass": r"^\[ok\]: (.*)$", "fail": r"^\[err\]: (.*)$"}
    printed = "[ok]: SET\n[err]: GET\n[ok]: GET\n"
    assert read_outcomes("lines", printed, patterns, 1) == {"SET": "pass", "GET": "fail"}
    assert read_outcomes("status", printed, {}, 1) == {"exit status": "fail"}


def test_a_test_that_one_side_does_not_have_is_a_difference() -> None:
    found = differences({"a": "pass", "b": "fail"}, {"a": "skip", "b": "fail", "c": "pass"})
    assert [(each.test, each.outside, each.inside) for each in found] == [
        ("a", "pass", "skip"), ("c", "missing", "pass"),
    ]  # fmt: skip


def _rules() -> set[str]:
    data = tomllib.loads((ROOT / "policies" / "compiling" / "syscalls.toml").read_text())
    calls = {each["call"] for each in data["answers"]} | set(data["numbers"])
    for section in (*data["groups"].values(), *data["refused"].values(), data["unknown"]):
        calls |= set(section.get("calls", {}))
        calls |= {each["call"] for each in section.get("conditional", ())}
    fields = {
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(Policy) if isinstance(section.type, type) and issubclass(section.type, msgspec.Struct)
        for field in msgspec.structs.fields(section.type)
    }  # fmt: skip
    return calls | fields | set(ALWAYS) | set(OPTIONAL_LAYERS) | {UNSTABLE}


@pytest.mark.parametrize("name", suite_names())
def test_every_reason_names_a_rule_that_exists(name: str) -> None:
    suite = load_suite(name)
    assert {each.rule for each in suite.expected} <= _rules()
    assert [each.test for each in unexplained(name)] == []


@pytest.mark.needs("root", "cgroup")
def test_what_a_cell_refuses_is_the_difference(tmp_path: Path) -> None:
    command = """
    echo 1..3; echo ok 1 - prints
    mkdir -m 700 own && echo ok 2 - makes a directory
    python3 -c 'import os; os.memfd_create("x", os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)' && echo ok 3 - memfd || echo not ok 3 - memfd
    """
    suite = Suite(
        name="tiny",
        program="tiny",
        selection="all",
        version="echo 1",
        command=command,
        reads="tap",
        seconds=60,
    )
    tmp_path.chmod(0o755)
    (comparison,) = compare(suite, tmp_path)
    assert comparison.outside == {"pass": 3, "fail": 0, "skip": 0}
    assert comparison.inside == {"pass": 2, "fail": 1, "skip": 0}
    assert [each.test for each in comparison.differences] == ["3 memfd"]
    assert comparison.unstable == []


@pytest.mark.needs("root", "cgroup")
def test_a_run_that_is_stopped_keeps_its_units_and_can_go_on(tmp_path: Path) -> None:
    command = "[ $UNIT = second ] && echo ok 1 || echo not ok 1"
    suite = Suite(
        name="tiny", program="tiny", selection="all", version="echo 1", command=command,
        reads="tap", units="printf '%s\\n' first second 'third fourth'", seconds=60,
    )  # fmt: skip
    tmp_path.chmod(0o755)
    running = compare(suite, tmp_path)
    first, second = next(running), next(running)
    running.close()
    assert (first.left, first.outside) == (
        ["second", "third fourth"],
        {"pass": 0, "fail": 1, "skip": 0},
    )
    assert (second.left, second.inside) == (["third fourth"], {"pass": 1, "fail": 1, "skip": 0})
    (third,) = compare(suite, tmp_path, second)
    assert (third.left, third.outside) == ([], {"pass": 1, "fail": 2, "skip": 0})
    assert list(compare(suite, tmp_path, third)) == []
    regrouped = msgspec.structs.replace(
        suite, command="echo ok 1", units="printf '%s\\n' zeroth first 'second third'"
    )
    fourth, fifth = compare(regrouped, tmp_path, third, ["first", "second third"])
    assert (list(fourth.units), fourth.left) == (["second", "first"], ["zeroth", "second third"])
    assert (list(fifth.units), fifth.left) == (["first", "second third"], ["zeroth"])
    assert fifth.outside == {"pass": 2, "fail": 0, "skip": 0}
