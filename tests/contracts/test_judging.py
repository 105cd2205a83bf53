"""Contracts of compilers and judges, the same in this process, through a daemon, and on a fleet."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cellwright import Fleet, PolicyError, SessionSettings
from cellwright.errors import QuotaExceeded
from cellwright.harness.sandbox.judging.checkers import Checked, Floats, Interactor, ProgramChecker
from cellwright.harness.sandbox.judging.verdicts import Case, JudgeLimits, Verdict
from cellwright.harness.servers.daemon.quotas import QuotaSettings
from tests.contracts.faces import FACES
from tests.harness.fleet.test_cell_node import node_here

pytestmark = pytest.mark.needs("userns", "cgroup")
ADD = "print(sum(map(int, input().split())))"
SUMS = [Case(input=f"{n} {n}\n", expected=f"{2 * n}\n") for n in range(4)]
TWICE = '#include <stdio.h>\n#include "twice.h"\nint main(void) { int n; scanf("%d", &n); printf("%d\\n", twice(n)); }'
FILES = {"twice.h": "int twice(int);", "twice.c": "int twice(int n) { return 2 * n; }"}


@pytest.fixture(scope="module", params=["local", "daemon", "fleet"])
def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    place = tmp_path_factory.mktemp("face")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        with FACES[request.param](place, "strict", SessionSettings()) as face:
            yield face.sandbox


def test_a_program_is_judged_by_its_cases(box: Any) -> None:
    done = box.judge(ADD, "python", SUMS)
    assert (done.ok, done.passed, done.total, done.compile) == (True, 4, 4, None)
    of_cases = sum(each.seconds for each in done.cases)
    assert done.cpu_seconds >= of_cases - 1e-9  # floats in another order
    assert of_cases > 0
    wrong = [*SUMS[:2], Case(input="1 1", expected="3"), SUMS[3]]
    done = box.judge(ADD, "python", wrong)
    assert (done.verdict, len(done.cases)) == (Verdict.WRONG_ANSWER, 3)
    assert done.message == "word 1: '2', expected '3'"
    assert box.judge(ADD, "python", wrong, all=True).score == 0.75


def test_checkers_and_interactors_run_where_the_program_does(box: Any) -> None:
    assert box.judge("print(1.04)", cases=[Case(expected="1")], checker=Floats(absolute=0.1)).ok
    assert not box.judge("print(1.04)", cases=[Case(expected="1")], checker="floats").ok
    even = ProgramChecker(
        source="import sys\nraise SystemExit(int(open(sys.argv[2]).read()) % 2)", language="python"
    )
    verdicts = [box.judge(f"print({n})", cases=[Case()], checker=even).ok for n in (4, 5)]
    assert verdicts == [True, False]
    greet = Interactor(source="raise SystemExit(input() != 'hi')", language="python")
    assert box.judge("print('hi')", cases=[Case()], checker=greet).ok


def test_limits_are_of_each_case(box: Any) -> None:
    limits = JudgeLimits(time_seconds=0.3, wall_seconds=5.0, output_bytes=50_000)
    assert (
        box.judge("while True: pass", cases=[Case()], limits=limits).verdict is Verdict.TIME_LIMIT
    )


@pytest.mark.needs("gcc")
def test_a_program_is_compiled_once_and_runs_as_a_build(box: Any) -> None:
    build = box.compile(TWICE, "c", files=FILES, flags=["-O1"])
    assert (build.ok, build.language, build.source, build.flags) == (True, "c", TWICE, ("-O1",))
    assert build.files == {name: text.encode() for name, text in FILES.items()}
    same = box.compile(files={"main.c": TWICE, **FILES}, language="C17", flags=["-O1"])
    assert (same.source, same.files, same.compile.cached) == (TWICE, build.files, True)
    result = box.execute(build, stdin="21")
    assert (result.stdout, result.compile.cached) == ("42\n", True)
    done = box.judge(build, cases=[Case(input="4", expected="8")])
    assert (done.ok, done.compile.ok) == (True, True)


@pytest.mark.needs("gcc")
def test_what_a_compiler_refuses_is_no_error(box: Any) -> None:
    build = box.compile("int main( {", "c")
    assert (build.ok, "error" in build.output) == (False, True)
    assert box.judge("int main( {", "c", SUMS).verdict is Verdict.COMPILE_ERROR
    with pytest.raises(PolicyError, match="Perl is not compiled"):
        box.compile("1", "perl")
    with pytest.raises(PolicyError, match="compile_timeout: must be from"):
        box.compile("int main(void) {}", "c", compile_timeout=-1)
    with pytest.raises(PolicyError, match="checker: it does not compile"):
        box.judge(ADD, cases=SUMS, checker=ProgramChecker(source="int main( {", language="c"))


@pytest.mark.needs("gcc")
@pytest.mark.parametrize("call", ["execute", "compile", "judge"])
def test_the_cpu_time_of_a_compiler_counts_for_its_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tenants = {"one": QuotaSettings(cpu_seconds_per_minute=0.001)}
    source = "int main(void) { return 0; }"
    with Fleet([node_here("a", policy="strict")], 2, tenants=tenants) as fleet:
        if call == "judge":
            fleet.judge(source, "c", [Case()], tenant="one")
        else:
            getattr(fleet, call)(source, "c", tenant="one")
        with pytest.raises(QuotaExceeded, match="CPU seconds a minute"):
            fleet.execute("1", tenant="one")


@pytest.fixture(scope="module", params=["daemon", "fleet"])
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Faces whose policy belongs to another."""
    with FACES[request.param](tmp_path_factory.mktemp("face"), "strict", SessionSettings()) as face:
        yield face.sandbox


def test_a_function_is_not_sent_and_limits_stay_within_the_policy(other: Any) -> None:
    def equal(output: str, expected: str) -> Checked:
        return Checked(Verdict.ACCEPTED)

    with pytest.raises(PolicyError, match="checker: a function cannot be sent"):
        other.judge(ADD, cases=SUMS, checker=equal)
    for limits, name in (
        (JudgeLimits(memory_bytes=2**30), "memory_bytes"),
        (JudgeLimits(), "output_bytes"),
        (JudgeLimits(output_bytes=1000, processes=100), "processes"),
        (JudgeLimits(output_bytes=1000, wall_seconds=100), "wall_seconds"),
    ):
        with pytest.raises(PolicyError, match=f"{name}: the policy of this daemon allows at most"):
            other.judge(ADD, cases=SUMS, limits=limits)
