"""Samples of planned.py and translations.py: solutions whose verdicts are known.  The scripts judge all."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

from cellwright import Sandbox
from cellwright.harness.sandbox.judging.verdicts import Case, JudgeLimits, Verdict
from tests.conftest import policy_named
from tests.harness.judging import planned, translations

_COMPILERS = {"cpp": "g++", "java": "javac", "go": "go", "rust": "rustc"}
_SAMPLE = ("below_zero", "find_closest_elements", "how_many_times")


@pytest.fixture(scope="module")
def boxes() -> Iterator[dict[str, Sandbox]]:
    with (
        Sandbox(policy=policy_named("strict"), pool=2) as strict,
        Sandbox(policy=policy_named("standard"), pool=0) as standard,
    ):
        yield {"strict": strict, "standard": standard}


@pytest.mark.needs("cgroup")
@pytest.mark.parametrize(
    "language", ["python", "bash", "perl", pytest.param("c", marks=pytest.mark.needs("gcc"))]
)
def test_planned_faults_get_their_verdicts(boxes: dict[str, Sandbox], language: str) -> None:
    """The first programs have each fault of the language once."""
    sample = islice(planned.planned(45, 1, (language,)), 45)
    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(lambda each: (each, planned.judged(boxes, each)), sample))
    assert [
        (each.fault, each.verdict, got.verdict, got.message)
        for each, got in done
        if got.verdict is not each.verdict
    ] == []


@pytest.mark.parametrize(
    "language",
    [pytest.param(name, marks=pytest.mark.needs(need)) for name, need in _COMPILERS.items()],
)
def test_translations_of_humaneval_get_their_verdicts(
    boxes: dict[str, Sandbox], language: str
) -> None:
    for problem in _SAMPLE:
        for right in (True, False):
            done = translations.judge(boxes["strict"], language, problem, right=right)
            expected = Verdict.ACCEPTED if right else Verdict.WRONG_ANSWER
            assert done.verdict is expected, (problem, done.message)


@pytest.mark.parametrize("language", translations.LANGUAGES)
def test_each_problem_has_a_right_and_a_wrong_solution(language: str) -> None:
    assert len(translations.PROBLEMS) == 20
    for problem in translations.PROBLEMS:
        both = {translations.source_of(language, problem, right=right) for right in (True, False)}
        assert len(both) == 2


@pytest.mark.needs("javac", "cgroup")
def test_a_program_of_java_may_use_the_memory_of_its_cell(boxes: dict[str, Sandbox]) -> None:
    """A JVM takes a quarter of the memory for its heap by default, and fails with an exception."""
    source = (
        "public class Main { public static void main(String[] words) {"
        " byte[][] all = new byte[%d][]; for (int n = 0; n < all.length; n++) {"
        " all[n] = new byte[1 << 20]; java.util.Arrays.fill(all[n], (byte) 1); }"
        " System.out.println(all.length); } }"
    )
    limits = JudgeLimits(time_seconds=10.0, wall_seconds=60.0, memory_bytes=256 << 20)
    verdicts = [
        boxes["strict"].judge(
            source % size, "java", [Case(expected=f"{size}\n")], limits=limits
        ).verdict
        for size in (120, 400)
    ]  # fmt: skip
    assert verdicts == [Verdict.ACCEPTED, Verdict.MEMORY_LIMIT]
