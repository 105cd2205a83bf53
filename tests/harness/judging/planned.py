"""Programs whose verdicts are known by construction: families of programs x languages x planned faults.

`python -m tests.harness.judging.planned` judges 2,000 of them and writes PLANNED.md; --count and --seed
choose others.  skeletons.toml has the languages.
"""

import argparse
import os
import platform
import random
import shutil
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from cellwright import Sandbox
from cellwright.harness.sandbox.judging.verdicts import Case, JudgeLimits, Judgement, Verdict
from cellwright.policies.languages import LANGUAGES
from cellwright.policies.languages.table import language_table
from cellwright.runner.host import interpreters
from tests.conftest import policy_named

HERE = Path(__file__).parent
SKELETONS: dict[str, dict[str, str]] = tomllib.loads((HERE / "skeletons.toml").read_text())
_SECRET = "5ecret"  # before what "look" is to find
# Runs under the profile standard, where programs may fork; the others run under strict.
_NEEDS_PROCESSES = ("children", "orphan", "bomb")
_SHARES = {"python": 30, "c": 20}  # of all languages; each other has 5


class Fault(NamedTuple):
    """What a fault does to a program: where its text goes, and the verdict."""

    verdict: Verdict
    before: bool = False
    checker: str = "tokens"


_FAULTS = {
    "loop": Fault(Verdict.TIME_LIMIT),
    "sleep": Fault(Verdict.TIME_LIMIT),
    "stubborn": Fault(Verdict.TIME_LIMIT),
    "threads": Fault(Verdict.TIME_LIMIT),
    "children": Fault(Verdict.TIME_LIMIT),
    "bomb": Fault(Verdict.TIME_LIMIT),
    "nap": Fault(Verdict.ACCEPTED),
    "orphan": Fault(Verdict.ACCEPTED),
    "errors": Fault(Verdict.ACCEPTED, before=True),
    "left": Fault(Verdict.ACCEPTED),
    "memory": Fault(Verdict.MEMORY_LIMIT),
    "flood": Fault(Verdict.OUTPUT_LIMIT),
    "flood_errors": Fault(Verdict.OUTPUT_LIMIT),
    "code": Fault(Verdict.RUNTIME_ERROR),
    "segv": Fault(Verdict.RUNTIME_ERROR),
    "kill": Fault(Verdict.RUNTIME_ERROR),
    "xcpu": Fault(Verdict.RUNTIME_ERROR),
    "error": Fault(Verdict.RUNTIME_ERROR),
    "abort": Fault(Verdict.RUNTIME_ERROR),
    "divide": Fault(Verdict.RUNTIME_ERROR),
    "recursion": Fault(Verdict.RUNTIME_ERROR),
    "disk": Fault(Verdict.RUNTIME_ERROR),
    "syntax": Fault(Verdict.COMPILE_ERROR),
    "early": Fault(Verdict.WRONG_ANSWER, before=True),
    "closed": Fault(Verdict.WRONG_ANSWER, before=True),
    "extra": Fault(Verdict.WRONG_ANSWER),
    "bytes": Fault(Verdict.WRONG_ANSWER),
    "look": Fault(Verdict.WRONG_ANSWER, before=True),
}
# Faults of every language: what takes the place of the expression, of what is between two numbers.
_OF_ALL = {
    "right": Fault(Verdict.ACCEPTED),
    "right, exactly": Fault(Verdict.ACCEPTED, checker="exact"),
    "off by one": Fault(Verdict.WRONG_ANSWER),
    "other operator": Fault(Verdict.WRONG_ANSWER),
    "two blanks for words": Fault(Verdict.ACCEPTED),
    "two blanks exactly": Fault(Verdict.PRESENTATION_ERROR, checker="exact"),
    "two blanks in lines": Fault(Verdict.WRONG_ANSWER, checker="lines"),
    "commas": Fault(Verdict.WRONG_ANSWER, checker="exact"),
    "run together": Fault(Verdict.WRONG_ANSWER),
}
_JOINS = {
    "two blanks for words": "  ",
    "two blanks exactly": "  ",
    "two blanks in lines": "  ",
    "commas": ", ",
    "run together": "",
}


class Planned(NamedTuple):
    """A program, its cases, how it is judged, and the verdict that it must get."""

    language: str
    fault: str
    source: str
    cases: tuple[Case, ...]
    checker: str
    limits: JudgeLimits
    verdict: Verdict


def here(language: str) -> bool:
    """Tell whether this host compiles and runs a language."""
    if language in LANGUAGES:
        names: tuple[str, ...] = (LANGUAGES[language].program,)
    else:
        entry = language_table().called(language)
        names = entry.programs() if entry else ()
    return all(shutil.which(name, path=interpreters.PLACES) for name in names)


def planned(count: int, seed: int, languages: tuple[str, ...]) -> Iterator[Planned]:
    """Yield programs; each fault of each language comes once before they are drawn by chance."""
    drawn = random.Random(seed)
    every = [
        (language, fault)
        for language in languages
        for fault in (*_OF_ALL, *_FAULTS)
        if fault in _OF_ALL or fault in SKELETONS[language]
    ]
    drawn.shuffle(every)
    for number in range(count):
        if number < len(every):
            language, fault = every[number]
        else:
            shares = [_SHARES.get(each, 5) for each in languages]
            language = drawn.choices(languages, shares)[0]
            fault = drawn.choice([fault for each, fault in every if each == language])
        yield _made(drawn, language, fault)


def _made(drawn: random.Random, language: str, fault: str) -> Planned:
    a, b, m = drawn.randint(2, 99), drawn.randint(1, 99), drawn.randint(50, 999)
    expression = drawn.choice(
        [f"({a} * x + {b}) % {m}", f"x * x + {b}", f"(x + {a}) * (x + {b})", f"x % {a} + {m}"]
    )
    cases = []
    for _ in range(3):
        numbers = [drawn.randint(1, 9999) for _ in range(drawn.randint(2, 6))]
        ys = [eval(expression, {}, {"x": x}) for x in numbers]
        expected = f"{' '.join(map(str, ys))}\n{sum(ys)}\n"
        cases.append(Case(input=" ".join(map(str, numbers)) + "\n", expected=expected))
    how = _OF_ALL.get(fault) or _FAULTS[fault]
    if fault == "syntax" and language == "python":
        how = how._replace(verdict=Verdict.RUNTIME_ERROR)  # it has no compiler
    if fault == "look":
        cases = [Case(input=case.input, expected=f"{_SECRET}{drawn.random()}") for case in cases]
    skeleton = SKELETONS[language]
    text = skeleton.get(fault, "")
    wrong = {"off by one": f"{expression} + 1", "other operator": f"{expression} - x"}
    if language in ("perl",):
        expression = expression.replace("x", "$x")
        wrong = {name: each.replace("x", "$x") for name, each in wrong.items()}
    source = skeleton["source"].lstrip()
    for mark, put in (
        ("@BEFORE@", text if how.before else ""), ("@AFTER@", "" if how.before else text),
        ("@EXPR@", wrong.get(fault, expression)), ("@JOIN@", _JOINS.get(fault, " ")),
    ):  # fmt: skip
        source = source.replace(mark, put)
    return Planned(
        language, fault, source, tuple(cases), how.checker, _limits(language, fault), how.verdict
    )


def _limits(language: str, fault: str) -> JudgeLimits:
    """Return limits that its right programs stay far below, and its faults reach soon."""
    seconds = 0.3 if fault in ("loop", "stubborn", "threads", "children", "bomb") else 5.0
    wall = 1.0 if fault == "sleep" else 60.0
    return JudgeLimits(
        time_seconds=min(seconds, wall), wall_seconds=wall, output_bytes=1 << 20,
        memory_bytes=(512 if language in ("java", "javascript") else 128) << 20,
    )  # fmt: skip


def judged(boxes: dict[str, Sandbox], each: Planned) -> Judgement:
    """Return the judgement of a program in the sandbox of its profile."""
    box = boxes["standard" if each.fault in _NEEDS_PROCESSES else "strict"]
    return box.judge(
        each.source, each.language, each.cases, checker=each.checker, limits=each.limits
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=33)
    parser.add_argument("--languages", default=",".join(SKELETONS))
    parser.add_argument("--write", action="store_true", help="write PLANNED.md")
    given = parser.parse_args()
    languages = tuple(name for name in given.languages.split(",") if name == "python" or here(name))
    began = time.monotonic()
    wrong: list[str] = []
    kinds: Counter[tuple[str, Verdict]] = Counter()
    with (
        Sandbox(policy=policy_named("strict")) as strict,
        Sandbox(policy=policy_named("standard")) as standard,
        ThreadPoolExecutor(2 * len(os.sched_getaffinity(0))) as threads,
    ):
        boxes = {"strict": strict, "standard": standard}

        def one(each: Planned) -> tuple[Planned, Judgement]:
            return each, judged(boxes, each)

        for each, done in threads.map(one, planned(given.count, given.seed, languages)):
            kinds[each.language, each.verdict] += 1
            if done.verdict is not each.verdict:
                wrong.append(
                    f"{each.language}, {each.fault}: {done.verdict.value}, "
                    f"not {each.verdict.value}: {done.message[:300]!r}"
                )
                print(wrong[-1], file=sys.stderr, flush=True)
    lines = [*_report(given, kinds, wrong, time.monotonic() - began)]
    print("\n".join(lines))
    if given.write:
        (HERE / "PLANNED.md").write_text("\n".join(lines) + "\n")
    return bool(wrong)


def _report(
    given: argparse.Namespace,
    kinds: "Counter[tuple[str, Verdict]]",
    wrong: list[str],
    seconds: float,
) -> Iterator[str]:
    machine = f"{os.cpu_count()} processors, Linux {platform.release()}"
    yield "# Programs whose verdicts are known by construction\n"
    command = f"planned --count {given.count} --seed {given.seed} --write"
    yield f"`python -m tests.harness.judging.{command}`,"
    yield f"{machine}, {time.strftime('%Y-%m-%d')}, {seconds:.0f} s. Wrong verdicts: {len(wrong)}.\n"
    verdicts = [each for each in Verdict if any(kind is each for _, kind in kinds)]
    yield f"| language | {' | '.join(each.value for each in verdicts)} |"
    yield "|---" * (1 + len(verdicts)) + "|"
    for language in dict.fromkeys(name for name, _ in sorted(kinds, key=lambda kind: kind[0])):
        counts = (str(kinds[language, each]) for each in verdicts)
        yield f"| {language} | {' | '.join(counts)} |"
    if wrong:
        yield ""
    for each in wrong:
        yield f"- {each}"


if __name__ == "__main__":
    sys.exit(main())
