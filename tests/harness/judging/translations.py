"""Solutions of 20 problems of HumanEval in C++, Java, Go and Rust, right and wrong ones.

translations/cases.json has the arguments and results of the original checks, a line for each argument.
`python -m tests.harness.judging.translations` judges all and writes TRANSLATIONS.md.
"""

import functools
import json
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cellwright import Sandbox
from cellwright.harness.sandbox.judging.verdicts import Case, JudgeLimits, Judgement, Verdict
from tests.conftest import policy_named
from tests.harness.judging.planned import here

HERE = Path(__file__).parent
LANGUAGES = ("cpp", "java", "go", "rust")
PROBLEMS: dict[str, dict[str, Any]] = json.loads((HERE / "translations/cases.json").read_text())
_CHECKERS = {"find_closest_elements": "floats"}
_LIMITS = JudgeLimits(time_seconds=10.0, wall_seconds=120.0, memory_bytes=512 << 20)
_RESULT = HERE / "TRANSLATIONS.md"


@functools.cache
def _solutions(language: str) -> dict[str, Any]:
    return tomllib.loads((HERE / f"translations/{language}.toml").read_text())


def source_of(language: str, problem: str, *, right: bool) -> str:
    """Return the source of a solution."""
    solution = _solutions(language)[problem]
    body, (old, new) = solution["body"].strip("\n"), solution["wrong"]
    if old not in body:
        raise ValueError(f"{language}, {problem}: {old!r} is not in it")
    body = body if right else body.replace(old, new, 1)
    return str(_solutions(language)["prelude"]).lstrip().replace("@BODY@", body)


def judge(box: Sandbox, language: str, problem: str, *, right: bool) -> Judgement:
    """Return the judgement of a solution by the cases of the original checks."""
    cases = [Case(input=given, expected=result) for given, result in PROBLEMS[problem]["cases"]]
    return box.judge(
        source_of(language, problem, right=right), language, cases,
        checker=_CHECKERS.get(problem, "tokens"), limits=_LIMITS,
    )  # fmt: skip


def main() -> int:
    began = time.monotonic()
    lines = [
        "# Translations of HumanEval\n",
        "20 problems with the cases of the original checks, written by `python -m tests.harness.judging.translations`.\n",
        "| language | right solutions accepted | wrong solutions refused |\n|---|---|---|",
    ]
    surprises = []
    with Sandbox(policy=policy_named("strict")) as box, ThreadPoolExecutor(4) as threads:
        for language in filter(here, LANGUAGES):
            counts = []
            for right in (True, False):
                judged = functools.partial(judge, box, language, right=right)
                expected = Verdict.ACCEPTED if right else Verdict.WRONG_ANSWER
                done = dict(zip(PROBLEMS, threads.map(judged, PROBLEMS), strict=True))
                counts.append(sum(each.verdict is expected for each in done.values()))
                surprises += [
                    f"- {language}, {problem}, right={right}: {each.verdict.value}: {each.message}"
                    for problem, each in done.items()
                    if each.verdict is not expected
                ]
            lines.append(f"| {language} | {counts[0]} of 20 | {counts[1]} of 20 |")
    print("\n".join([*lines, *surprises]), f"\n{time.monotonic() - began:.0f} s")
    _RESULT.write_text("\n".join([*lines, *surprises]) + "\n")
    return bool(surprises)


if __name__ == "__main__":
    sys.exit(main())
