"""Verdicts of programs by their cases, each in a cell of its own."""

import asyncio
import os
import threading
from typing import Any

import pytest

from cellwright import PolicyError, Sandbox
from cellwright.harness.sandbox.judging.checkers import (
    CHECKERS,
    Checked,
    Floats,
    Interactor,
    ProgramChecker,
    by_exit_code,
)
from cellwright.harness.sandbox.judging.judge import Judge, submission
from cellwright.harness.sandbox.judging.verdicts import Case, JudgeLimits, Judgement, Verdict
from cellwright.policies.errors import LauncherLost
from tests.conftest import policy_named

GCC = pytest.mark.needs("gcc")
CGROUP = pytest.mark.needs("cgroup")
QUICK = JudgeLimits(time_seconds=0.5, wall_seconds=2.0)
SUMS = [Case(input=f"{n} {n}\n", expected=f"{2 * n}\n") for n in range(6)]
ADD = "print(sum(map(int, input().split())))"
ONE = [Case(input="1\n", expected="1\n")]


def judged(sandbox: Sandbox, code: str, limits: JudgeLimits = QUICK, **given: object) -> Judgement:
    return sandbox.judge(code, "python", ONE, limits=limits, **given)  # type: ignore[arg-type]


def test_a_right_program_is_accepted(sandbox: Sandbox) -> None:
    done = sandbox.judge(ADD, "python", SUMS)
    assert done.ok
    assert (done.passed, done.total, done.score) == (6, 6, 1.0)
    assert [each.name for each in done.cases] == ["1", "2", "3", "4", "5", "6"]
    assert 0 < done.seconds < 2


def test_the_first_failure_in_the_order_of_cases_is_the_programs(sandbox: Sandbox) -> None:
    wrong = "n, m = map(int, input().split())\nprint(n + m if n < 3 else 0)"
    done = sandbox.judge(wrong, "python", SUMS)
    assert (done.verdict, len(done.cases), done.passed) == (Verdict.WRONG_ANSWER, 4, 3)
    assert done.message == "word 1: '0', expected '6'"
    every = sandbox.judge(wrong, "python", SUMS, all=True)
    assert (every.verdict, len(every.cases), every.score) == (Verdict.WRONG_ANSWER, 6, 0.5)


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("raise SystemExit(3)", Verdict.RUNTIME_ERROR),
        ("import os; os.kill(os.getpid(), 11)", Verdict.RUNTIME_ERROR),
        ("1 / 0", Verdict.RUNTIME_ERROR),
        ("while True: pass", Verdict.TIME_LIMIT),
        ("import time; time.sleep(60)", Verdict.TIME_LIMIT),
        ("while True: print('x' * 10000)", Verdict.OUTPUT_LIMIT),
        ("import ctypes; ctypes.string_at(0)", Verdict.RUNTIME_ERROR),
        ("print(2)", Verdict.WRONG_ANSWER),
        ("", Verdict.COMPILE_ERROR),
    ],
)
def test_each_failure_has_its_verdict(sandbox: Sandbox, code: str, verdict: Verdict) -> None:
    limits = JudgeLimits(time_seconds=0.5, wall_seconds=2.0, output_bytes=1_000_000)
    assert judged(sandbox, code, limits).verdict is verdict


@CGROUP
def test_memory_is_that_of_the_cell(sandbox: Sandbox) -> None:
    limits = JudgeLimits(time_seconds=2.0, memory_bytes=64 << 20)
    assert judged(sandbox, "x = bytearray(200 << 20)", limits).verdict is Verdict.MEMORY_LIMIT
    done = judged(sandbox, "x = bytearray(30 << 20)\nprint(1)", limits)
    assert done.ok
    assert 30 << 20 < done.memory_bytes < 64 << 20


def test_refused_attempts_fail_a_case_if_they_are_to(sandbox: Sandbox) -> None:
    code = "import socket\ntry: socket.socket()\nexcept OSError: pass\nprint(1)"
    done = judged(sandbox, code)
    assert done.ok
    assert done.cases[0].violations == 1
    assert judged(sandbox, code, strict=True).verdict is Verdict.SECURITY_VIOLATION


def test_a_case_leaves_nothing_for_the_next(sandbox: Sandbox) -> None:
    code = (
        "import os\nold = os.listdir('/workspace') + os.listdir('/tmp')\n"
        "open('/workspace/a', 'w').write('x'); open('/tmp/b', 'w').write('x')\nprint(old)"
    )
    cases = [Case(expected="[]")] * 4
    assert sandbox.judge(code, "python", cases).ok


def test_a_program_sees_neither_what_is_expected_nor_a_checker(sandbox: Sandbox) -> None:
    look = (
        "import os, sys\n"
        "seen = [sys.argv, dict(os.environ)]\n"
        "for top in ('/workspace', '/tmp', '/dev', '/builds'):\n"
        "    for folder, _, files in os.walk(top):\n"
        "        for name in files:\n"
        "            try: seen.append(open(os.path.join(folder, name), 'rb').read(10000))\n"
        "            except OSError: pass\n"
        "print('secret' in repr(seen))"
    )
    checker = ProgramChecker(
        source="import sys\nprint(open(sys.argv[2]).read().strip(), file=sys.stderr)  # secret",
        language="python",
    )
    cases = [Case(expected="the secret answer")]
    done = sandbox.judge(look, "python", cases, checker=checker)
    assert done.cases[0].message == "False"


def test_a_program_of_ones_own_judges_in_a_cell_of_its_own(sandbox: Sandbox) -> None:
    checker = ProgramChecker(
        source=(
            "import sys\nread = [open(path).read() for path in sys.argv[1:]]\n"
            "if read[1].strip() == '7': raise SystemExit(2)\n"
            "if read[1].strip() == '8': raise SystemExit(3)\n"
            "if read[1].strip() == '9': print('0.5', file=sys.stderr); raise SystemExit(7)\n"
            "print('not even', file=sys.stderr)\nraise SystemExit(int(read[1]) % 2)"
        ),
        language="python",
    )
    cases = [Case(input="", expected="")]
    verdicts = {}
    for said in ("4", "5", "7", "8", "9"):
        done = sandbox.judge(f"print({said})", "python", cases, checker=checker)
        verdicts[said] = (done.verdict, done.score)
    assert verdicts == {
        "4": (Verdict.ACCEPTED, 1.0),
        "5": (Verdict.WRONG_ANSWER, 0.0),
        "7": (Verdict.PRESENTATION_ERROR, 0.0),
        "8": (Verdict.INTERNAL_ERROR, 0.0),
        "9": (Verdict.WRONG_ANSWER, 0.5),
    }


GUESS = Interactor(
    source=(
        "import sys\nsecret = int(open(sys.argv[1]).read())\n"
        "for turn in range(20):\n"
        "    line = sys.stdin.readline()\n"
        "    if not line: print('it said nothing', file=sys.stderr); raise SystemExit(1)\n"
        "    guess = int(line)\n"
        "    print('=' if guess == secret else '<' if guess < secret else '>', flush=True)\n"
        "    if guess == secret: raise SystemExit(0)\n"
        "print('too many', file=sys.stderr)\nraise SystemExit(1)"
    ),
    language="python",
)
SEARCH = (
    "low, high = 0, 1000\nwhile True:\n    middle = (low + high) // 2\n    print(middle, flush=True)\n"
    "    said = input()\n    if said == '=': break\n"
    "    low, high = (middle + 1, high) if said == '<' else (low, middle - 1)\n"
)


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (SEARCH, Verdict.ACCEPTED),
        ("for n in range(30):\n    print(n, flush=True); input()", Verdict.RUNTIME_ERROR),
        ("pass", Verdict.WRONG_ANSWER),
        ("while True: pass", Verdict.TIME_LIMIT),
        ("input()", Verdict.TIME_LIMIT),  # both wait
    ],
)
def test_an_interactor_talks_to_the_program(sandbox: Sandbox, code: str, verdict: Verdict) -> None:
    done = sandbox.judge(code, "python", [Case(input="637")], checker=GUESS, limits=QUICK)
    assert done.verdict is verdict, done


@GCC
def test_a_compiled_program_is_compiled_once_for_all_cases(
    sandbox: Sandbox, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = '#include <stdio.h>\nint main(void) { int a, b; scanf("%d%d", &a, &b); printf("%d", a + b); }'
    with Sandbox(policy=policy_named("strict"), pool=1) as box:
        done = box.judge(source, "c", SUMS)
        assert done.ok, done
        assert done.compile
        assert not done.compile.cached
        again = box.judge(source, "c", SUMS, checker="exact")
        assert again.compile
        assert again.compile.cached
        assert box.judge("int main( {", "c", SUMS).verdict is Verdict.COMPILE_ERROR


def test_a_case_that_others_may_have_slowed_is_tried_alone(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the first measurement is changed as a neighbour would change it."""
    from cellwright.harness.sandbox.judging import judge

    real, seen = judge._seconds, []

    def slowed(result: object) -> float:
        if not any(each is result for each in seen):
            seen.append(result)
        return real(result) if result is not seen[0] else 0.6  # type: ignore[arg-type]

    monkeypatch.setattr(judge, "_seconds", slowed)
    done = judged(sandbox, "print(1)")
    assert done.ok
    assert done.cases[0].times == 2


@pytest.mark.parametrize(("load", "times"), [(0.0, 1), (4.0, 1), (10_000.0, 2)])
def test_a_program_that_waits_is_tried_alone_only_if_it_had_less_than_its_share(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, load: float, times: int
) -> None:
    """Else a client that sleeps would make all others wait."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    done = judged(
        sandbox, "import time; time.sleep(60)", JudgeLimits(time_seconds=0.5, wall_seconds=1.0)
    )
    assert (done.verdict, done.cases[0].times) == (Verdict.TIME_LIMIT, times)


def test_a_readable_descriptor_ends_the_cases_that_run_and_starts_no_other(
    sandbox: Sandbox,
) -> None:
    cancel = os.eventfd(1)
    try:
        cases = [Case()] * 100
        limits = JudgeLimits(time_seconds=60, wall_seconds=600)
        done = sandbox.judge(
            "import time; time.sleep(600)", "python", cases, limits=limits, all=True, cancel=cancel
        )
    finally:
        os.close(cancel)
    assert (done.verdict, done.message) == (Verdict.INTERNAL_ERROR, "cancelled")
    assert (done.cases, done.total) == ((), 100)


def test_a_task_that_is_cancelled_ends_its_cases(sandbox: Sandbox) -> None:
    """Else this test would take ten minutes."""
    begun = threading.Event()

    def noticed(output: str, expected: str) -> Checked:
        begun.set()
        return Checked(Verdict.ACCEPTED)

    code = "import time\nif input() == 'sleep': time.sleep(600)"
    cases = [Case(input="go", expected="")] + [Case(input="sleep", expected="")] * 4
    limits = JudgeLimits(time_seconds=60, wall_seconds=600)

    async def cancelled() -> None:
        judging = asyncio.ensure_future(
            sandbox.ajudge(code, "python", cases, limits=limits, checker=noticed, all=True)
        )
        await asyncio.to_thread(begun.wait)
        judging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await judging

    asyncio.run(cancelled())


def test_an_interactor_that_is_not_python_talks(sandbox: Sandbox) -> None:
    hello = Interactor(source='read line && [ "$line" = hi ]', language="bash")
    done = sandbox.judge("print('hi')", "python", [Case()], checker=hello, limits=QUICK)
    assert done.ok, done


@CGROUP
def test_a_flood_that_a_checker_cannot_hold_is_the_programs_failure(sandbox: Sandbox) -> None:
    """It is shown first that the checker judges an output that it can hold."""
    greedy = "import sys\nkept = [text * 10**4 for text in open(sys.argv[2]).read().split()]\n"
    checker = ProgramChecker(source=greedy, language="python")
    cases = [Case(expected="")]
    assert sandbox.judge("print('x')", "python", cases, checker=checker).ok
    flood = "print('x ' * 200_000)"
    done = sandbox.judge(flood, "python", cases, checker=checker)
    assert (done.verdict, "the checker failed" in done.message) == (Verdict.WRONG_ANSWER, True)
    broken = ProgramChecker(source="kept = 'x' * 10**10", language="python")
    done = sandbox.judge(flood, "python", cases, checker=broken)
    assert done.verdict is Verdict.INTERNAL_ERROR


LISTEN = "import sys\nkept = []\nfor line in sys.stdin: kept.append(line * %d)"


@CGROUP
@pytest.mark.parametrize(
    ("code", "copies", "verdict"),
    [
        ("print('x')", 1, Verdict.ACCEPTED),
        ("while True: print('x' * 1000)", 0, Verdict.OUTPUT_LIMIT),  # the interactor holds it
        ("for _ in range(3000): print('x' * 1000)", 300, Verdict.OUTPUT_LIMIT),
        ("for _ in range(3): print('x' * 1000)", 10**6, Verdict.INTERNAL_ERROR),
        ("for _ in range(900): print('x' * 1000)", 10**6, Verdict.INTERNAL_ERROR),
    ],
)
def test_a_flood_that_an_interactor_cannot_hold_is_the_programs_failure(
    sandbox: Sandbox, code: str, copies: int, verdict: Verdict
) -> None:
    limits = JudgeLimits(time_seconds=2.0, output_bytes=4_000_000)
    listen = Interactor(source=LISTEN % copies, language="python")
    done = sandbox.judge(code, "python", [Case()], checker=listen, limits=limits)
    assert done.verdict is verdict, done


def test_the_output_of_a_program_that_ends_before_its_interactor_begins_is_not_lost(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ended = Sandbox.execute_on_streams, threading.Event()

    def late(self: Sandbox, *given: Any, **named: Any) -> Any:
        if given[4]:  # the interactor, which has arguments
            ended.wait()
            return real(self, *given, **named)
        result = real(self, *given, **named)
        ended.set()
        return result

    monkeypatch.setattr(Sandbox, "execute_on_streams", late)
    listen = Interactor(source="raise SystemExit(input() != 'hi')", language="python")
    assert sandbox.judge("print('hi')", "python", [Case()], checker=listen).ok


def test_outputs_of_many_cases_take_no_more_than_their_room(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client can send 10,000 cases, each with 64 MiB of output."""
    monkeypatch.setattr("cellwright.harness.sandbox.judging.judge._KEPT_BYTES", 3_000)
    cases = [Case(expected="x" * 1000)] * 5
    done = sandbox.judge("print('x' * 1000)", "python", cases)
    assert (done.ok, done.passed) == (True, 5)
    assert [each.dropped for each in done.cases] == [False, False, True, True, True]
    assert [len(each.stdout) for each in done.cases] == [1001, 1001, 0, 0, 0]
    alone = sandbox.judge("print('x' * 4000)", "python", [Case()])
    assert (alone.cases[0].dropped, len(alone.cases[0].stdout)) == (False, 4001)


@pytest.mark.parametrize(
    ("losses", "verdict"), [(2, Verdict.ACCEPTED), (3, Verdict.INTERNAL_ERROR)]
)
def test_a_case_is_run_again_if_its_launcher_ends(
    sandbox: Sandbox, losses: int, verdict: Verdict
) -> None:
    """All cells of a launcher end with it, whichever made it end."""
    made: list[Any] = []

    class Losing:
        def __init__(self, room: Sandbox) -> None:
            self.room = room

        def __getattr__(self, name: str) -> Any:
            return getattr(self.room, name)

        def execute(self, *given: Any, **options: Any) -> Any:
            made.append(given)
            if len(made) <= losses:
                raise LauncherLost(cell_began=True)
            return self.room.execute(*given, **options)

    judge = Judge(sandbox.policy, lambda *given: Losing(sandbox.sibling(*given)))  # type: ignore[arg-type,return-value]
    try:
        given = submission(
            "print(1)", "python", "tokens", QUICK, (), None, every=False, strict=False
        )
        assert judge.judge(given, ONE).verdict is verdict
    finally:
        judge.close()


def test_cases_are_judged_for_asyncio(sandbox: Sandbox) -> None:
    async def both() -> list[Judgement]:
        return list(await asyncio.gather(*(sandbox.ajudge(ADD, "python", SUMS) for _ in range(3))))

    assert all(each.ok for each in asyncio.run(both()))


@pytest.mark.parametrize(
    ("name", "output", "expected", "verdict"),
    [
        ("exact", "1 2\n", "1 2", Verdict.ACCEPTED),
        ("exact", "1  2", "1 2", Verdict.PRESENTATION_ERROR),
        ("exact", "1 3", "1 2", Verdict.WRONG_ANSWER),
        ("lines", "1 2  \n\n", "1 2\n", Verdict.ACCEPTED),
        ("lines", "1  2", "1 2", Verdict.WRONG_ANSWER),
        ("lines", "1\n2", "1", Verdict.WRONG_ANSWER),
        ("tokens", " 1\n2 ", "1 2", Verdict.ACCEPTED),
        ("tokens", "1 2 3", "1 2", Verdict.WRONG_ANSWER),
        ("floats", "0.3333333 x", "0.33333333 x", Verdict.ACCEPTED),
        ("floats", "1e9", "1000000100", Verdict.ACCEPTED),
        ("floats", "0.34", "0.33", Verdict.WRONG_ANSWER),
        ("floats", "nan", "1", Verdict.WRONG_ANSWER),
        ("floats", "inf", "1", Verdict.WRONG_ANSWER),
        ("floats", "1_0", "10", Verdict.WRONG_ANSWER),
        ("floats", "\u0661\u0660", "10", Verdict.WRONG_ANSWER),
        ("floats", "9" * 1000, "1", Verdict.WRONG_ANSWER),
        ("unordered", "b\na\n", "a\nb", Verdict.ACCEPTED),
        ("unordered", "b\nb\n", "a\nb", Verdict.WRONG_ANSWER),
        ("unordered", "\n" * 1_000_001 + "a", "a", Verdict.WRONG_ANSWER),
        ("lines", "\n\n1", "\n\n1\n", Verdict.ACCEPTED),
        ("lines", "a\n" * 3_000_000, "a\n" * 3_000_000, Verdict.ACCEPTED),
        ("lines", "", "1", Verdict.WRONG_ANSWER),
    ],
)  # fmt: skip
def test_checkers_of_the_host(name: str, output: str, expected: str, verdict: Verdict) -> None:
    assert CHECKERS[name](output, expected).verdict is verdict


def test_a_tolerance_of_ones_own_and_points_of_testlib() -> None:
    assert Floats(absolute=0.1, relative=0)("1.05", "1").verdict is Verdict.ACCEPTED
    assert by_exit_code(7, "points 0.25").points == 0.25
    assert by_exit_code(None, "").verdict is Verdict.INTERNAL_ERROR


def test_without_a_case_nothing_is_accepted() -> None:
    with Sandbox(pool=0) as sandbox, pytest.raises(PolicyError, match="cases: needs at least one"):
        sandbox.judge("not even a program", "python", [])


def test_an_output_forges_neither_points_nor_an_infinite_number() -> None:
    assert by_exit_code(7, "points 0.5 expected 5, found 1").points == 0.5
    assert CHECKERS["floats"]("1", "inf").verdict is Verdict.WRONG_ANSWER
    assert CHECKERS["floats"]("inf", "inf").verdict is Verdict.ACCEPTED
    words = CHECKERS["tokens"]("1 2 3 4", "1 2").message
    assert words == "more than 2 words, expected 2"


def test_a_function_of_the_caller_checks(sandbox: Sandbox) -> None:
    def even(output: str, expected: str) -> Checked:
        is_right = int(output) % 2 == 0
        return Checked(Verdict.ACCEPTED if is_right else Verdict.WRONG_ANSWER, "", float(is_right))

    assert sandbox.judge("print(2)", "python", ONE, checker=even).ok
    assert not sandbox.judge("print(3)", "python", ONE, checker=even).ok


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"checker": "fuzzy"}, "checker: must be one of exact, lines"),
        ({"limits": 3}, "limits: must be JudgeLimits"),
        ({"limits": JudgeLimits(time_seconds=0)}, "limits.time_seconds"),
        ({"limits": JudgeLimits(time_seconds=2, wall_seconds=1)}, "must not be less"),
        ({"checker": ProgramChecker(source="int main( {", language="c")}, "checker: it does not compile"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(
    sandbox: Sandbox, given: dict[str, object], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        sandbox.judge("1", "python", ONE, **given)  # type: ignore[arg-type]
