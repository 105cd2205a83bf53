"""Programs near their limits: their verdicts alone, many at once, and beside hostile neighbours.

Their verdicts are known: they use 0.8 or 1.25 times the CPU time or the memory that they may.  Some use
CPU time by a clock that counts nothing else, others do an amount of work that takes so much when it is
measured alone: beside neighbours the same work takes longer, and the verdict must stay.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from msgspec.structs import replace

from ..harness.sandbox.judging.judge import Judge, submission
from ..harness.sandbox.judging.verdicts import Case, JudgeLimits, Judgement, Verdict
from ..harness.sandbox.languages.compiled import Build
from ..harness.sandbox.sandbox import Sandbox
from ..policies.errors import LaunchError
from ..policies.policy import MIB
from .scratch import scratch_directory
from .settings import Settings, sandbox

_SECONDS = 0.06  # of CPU time; starting a program takes some 3 ms of it
_LIMITS = JudgeLimits(time_seconds=_SECONDS, wall_seconds=120.0, memory_bytes=128 * MIB)
_BELOW, _ABOVE = 0.8, 1.25
_CLOCK = (
    "import time\nend = time.process_time() + {seconds}\n"
    "while time.process_time() < end: pass\nprint(1)"
)
_CLOCK_OF_C = (
    "#include <stdio.h>\n#include <time.h>\nint main(void) {{\n"
    'while (clock() < {seconds} * CLOCKS_PER_SEC) {{}}\nputs("1"); }}'
)
_WORK = "for _ in range({count}): pass\nprint(1)"
_MEMORY = "kept = bytearray(b'1') * {count}\nprint(1)"
_TRIAL = 500_000  # turns of the loop whose time is measured
_WAYS = (
    ("alone", 1, False), ("64 at once", 64, False), ("64 beside hostile neighbours", 64, True),
)  # fmt: skip
# Neighbours, each in a cell of another sandbox.
_BURN = "x = bytearray(16 << 20)\nwhile True:\n    for n in range(0, len(x), 64): x[n] ^= 1"
_FILL = "while True: x = bytearray(b'1') * (900 << 20); del x"
_WRITE = (
    "import os\nwhile True:\n    with open({path!r}, 'wb') as file:\n"
    "        for _ in range(256): file.write(bytes(1 << 20))\n"
    "        os.fsync(file.fileno())\n"
    "    with open({path!r}, 'rb') as file:\n        while file.read(1 << 20): pass"
)


class Near(NamedTuple):
    """A program near a limit, and its verdict."""

    kind: str
    source: str | Build
    verdict: Verdict


class Flips(NamedTuple):
    """How often verdicts were wrong, in one of the ways of judging."""

    how: str
    programs: int
    wrong: int
    again: int
    seconds: float
    examples: tuple[str, ...]


def measured(settings: Settings) -> Iterator[Flips]:
    """Yield the wrong verdicts of each way."""
    with sandbox(settings) as made:
        kinds = _kinds(made)
        for how, at_once, hostile in _WAYS:
            with contextlib.ExitStack() as stack:
                judge = Judge(made.policy, made.sibling, at_once)
                stack.callback(judge.close)
                if hostile:
                    stack.enter_context(_neighbours(settings))
                yield _flips(judge, how, at_once, kinds, settings.amount(300, 24))


def _kinds(made: Sandbox) -> list[Near]:
    """Return the programs.  The least time of a turn of the loop is that of one that runs alone."""
    spent = [
        min(_alone(made, _WORK.format(count=count)) for _ in range(15)) for count in (0, _TRIAL)
    ]
    a_turn = (spent[1] - spent[0]) / _TRIAL
    found = []
    for factor, of_time, of_memory in (
        (_BELOW, Verdict.ACCEPTED, Verdict.ACCEPTED),
        (_ABOVE, Verdict.TIME_LIMIT, Verdict.MEMORY_LIMIT),
    ):
        seconds = factor * _SECONDS
        work = _WORK.format(count=round((seconds - spent[0]) / a_turn))
        memory = _MEMORY.format(count=round(factor * _LIMITS.memory_bytes))
        found += [
            Near(f"{factor:g} by a clock", _CLOCK.format(seconds=seconds), of_time),
            Near(f"{factor:g} by work", work, of_time),
            Near(f"{factor:g} of memory", memory, of_memory),
        ]
        with contextlib.suppress(LaunchError):  # the host has no compiler
            built = made.compile(_CLOCK_OF_C.format(seconds=seconds), "c")
            found.append(Near(f"{factor:g} in C", built, of_time))
    return found


def _alone(made: Sandbox, source: str) -> float:
    usage = made.execute(source).usage
    return usage.cpu_user_seconds + usage.cpu_system_seconds


def _flips(judge: Judge, how: str, at_once: int, kinds: list[Near], count: int) -> Flips:
    def one(near: Near) -> tuple[Near, Judgement]:
        limits = _LIMITS
        if near.verdict is Verdict.MEMORY_LIMIT or near.kind.endswith("memory"):
            limits = replace(limits, time_seconds=60.0)  # it is about memory alone
        language = "python" if isinstance(near.source, str) else None
        given = submission(
            near.source, language, "tokens", limits, (), None, every=False, strict=False
        )
        return near, judge.judge(given, [Case(expected="1")])

    began = time.monotonic()
    programs = itertools.islice(itertools.cycle(kinds), count)
    with ThreadPoolExecutor(at_once) as threads:
        done = list(threads.map(one, programs))
    wrong = [(near, each) for near, each in done if each.verdict is not near.verdict]
    return Flips(
        how, count, len(wrong), sum(each.cases[0].times > 1 for _, each in done),
        time.monotonic() - began,
        tuple(
            f"{near.kind}: {each.verdict.value}, {each.seconds:.3f} s, "
            f"{each.memory_bytes // MIB} MiB, {each.cases[0].times} times: {each.message}"
            for near, each in wrong[:10]
        ),
    )  # fmt: skip


@contextlib.contextmanager
def _neighbours(settings: Settings) -> Iterator[None]:
    """Burn processors and caches, memory, and the page cache in cells of other sandboxes meanwhile."""
    read, write = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, read)
        place = os.path.join(stack.enter_context(scratch_directory()), "neighbour")
        os.mkdir(place)
        os.chmod(os.path.dirname(place), 0o711)
        os.chmod(place, 0o777)
        policy = settings.policy
        filesystem = replace(policy.filesystem, write=(*policy.filesystem.write, place))
        limits = replace(policy.limits, memory_bytes=1024 * MIB, workspace_bytes=512 * MIB)
        changed = settings._replace(policy=replace(policy, filesystem=filesystem, limits=limits))
        made = stack.enter_context(sandbox(changed, pool=0))
        sources = (_BURN, _BURN, _BURN, _FILL, _WRITE.format(path=os.path.join(place, "burnt")))
        threads = stack.enter_context(ThreadPoolExecutor(len(sources)))
        burning = [threads.submit(_burn, made, source, read) for source in sources]
        try:
            yield
        finally:
            os.close(write)  # `read` is readable now: the executions are cancelled
        for each in burning:
            each.result()


def _burn(made: Sandbox, source: str, cancel: int) -> None:
    while (done := made.execute(source, cancel=cancel)).reason != "cancelled":
        if done.reason not in ("wall_time", "cpu_time"):  # ended by itself: it burns nothing
            raise RuntimeError(f"a neighbour ended: {done.reason}: {done.error}")
