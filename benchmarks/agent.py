"""The agent's loop without a model: cost of a step, a long run, and tools made against tasks done.

A server that answers at once takes the place of the model's, so that what is left is the loop's own.
"""

import json
import os
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..harness.agent.agent import Agent
from ..harness.agent.model import ModelClient
from ..harness.agent.prompts import USUAL, AgentLimits, Message, ModelReply, OnText, Sampling
from ..harness.sandbox.sandbox import Sandbox
from .census import private_bytes
from .chat_server import STEP
from .measuring import MS, median, percentile, seconds_of
from .report import Column, Criterion, Curve, Curves, Report, ReportTable
from .scratch import scratch_directory
from .settings import Settings

_STEPS, _SMOKE_STEPS = 1000, 30
_TASKS, _SMOKE_TASKS = 50, 10
_MIB = 1 << 20
_GROWTH_MIB = 8.0  # growth of the process that 1,000 steps may cause
_RANDOM = 20  # the seed of the order in which kinds of task come
_WAIT_SECONDS = 10.0  # for the server's end


class _Kind(NamedTuple):
    """A kind of task: the tool that it needs, by what it does and how, and one case of it."""

    description: str
    expression: str  # the expression of `text`
    given: str
    expected: object


_KINDS = {
    "word_count": _Kind("counts the words of a text", "len(text.split())", "one two three", 3),
    "reverse_text": _Kind("reverses the characters of a text", "text[::-1]", "abc", "cba"),
    "is_palindrome": _Kind(
        "tells whether a text is a palindrome", "text == text[::-1]", "abba", True
    ),
    "celsius": _Kind("converts Fahrenheit to Celsius", "(float(text) - 32) * 5 / 9", "212", 100.0),
    "vowels": _Kind("counts the vowels of a word", "sum(c in 'aeiou' for c in text)", "banana", 3),
    "initials": _Kind(
        "returns the initials of a name", "''.join(w[0] for w in text.split())", "Ann Lee", "AL"
    ),
    "hexadecimal": _Kind("converts a number to hexadecimal", "hex(int(text))", "255", "0xff"),
    "digits": _Kind("adds the digits of a number", "sum(int(c) for c in text)", "905", 14),
}


class _Maker:
    """Looks for a tool, has it made if there is none, and uses it."""

    name = "maker"
    context_tokens = 16_384

    def __init__(self) -> None:
        self.kind = ""

    def ask(
        self, messages: Sequence[Message], sampling: Sampling = USUAL, *,
        schema: dict[str, Any] | None = None, on_text: OnText | None = None,
    ) -> ModelReply:  # fmt: skip
        kind = _KINDS[self.kind]
        if "You write one tool" in messages[0].text:
            source = f"def {self.kind}(text: str):\n    return {kind.expression}"
            test = f"assert {self.kind}({kind.given!r}) == {kind.expected!r}"
            return ModelReply(text=f"```python\n{source}\n```\n```tests\n{test}\n```")
        if len(messages) == len(("system", "task")):
            code = f"find_tool({kind.description!r})"
        elif self.kind in messages[-1].text:
            code = f"final_answer(execute_tool('{self.kind}', {{'text': {kind.given!r}}}))"
        else:
            code = f"build_tool('{self.kind}', {kind.description!r})"
        return ModelReply(text=f"```python\n{code}\n```")


def measure(settings: Settings) -> Report:
    """Return the cost of a step, what a long run grows by, and the tools that tasks need."""
    steps = settings.amount(_STEPS, _SMOKE_STEPS)
    tasks = _SMOKE_TASKS if settings.smoke else _TASKS
    with (
        _serving(steps) as url,
        ModelClient(url, key="") as model,
        _agent(settings, model) as agent,
    ):
        before = private_bytes(os.getpid()) or 0
        result = agent.run("count")
        grown = ((private_bytes(os.getpid()) or 0) - before) / _MIB
        told_by_server = json.load(urllib.request.urlopen(url, timeout=_WAIT_SECONDS))
    between, most_tokens = told_by_server["between"], told_by_server["tokens"]
    alone = _alone(settings, len(between))
    order = _order(tasks)
    made, right = _tasks(settings, order)
    kinds = len(set(order))
    share = most_tokens / model.context_tokens
    told = ", ".join(map(str, made))
    return Report(
        name="agent",
        title="The agent's loop",
        tables=(_costs(between, alone),),
        charts=(_curve(made),),
        verdicts=(
            Criterion("the long run is completed", result.answer == steps - 1, str(result.answer)),
            Criterion("every task has its answer", right == tasks, f"{right} of {tasks}"),
            Criterion("memory of the long run", grown < _GROWTH_MIB, f"{grown:+.1f} MiB"),
            Criterion("the conversation stays within the context", share < 1, f"{share:.0%}"),
            Criterion("each tool is made once", sum(made) == kinds, f"{sum(made)} of {kinds}"),
            Criterion("fewer tools are made later", made[-1] <= made[0], told),
        ),
        notes=(
            f"One run of {steps} steps, by HTTP: {grown:+.1f} MiB, at most {most_tokens:,} tokens.",
            f"{tasks} tasks of {kinds} kinds, some of them often; tools made in each ten: {told}.",
        ),
    )  # fmt: skip


@contextmanager
def _agent(settings: Settings, model: Any) -> Iterator[Agent]:
    with (
        scratch_directory() as folder,
        Agent(
            model, policy=settings.policy, directory=f"{folder}/agent",
            limits=AgentLimits(steps=10**6, tokens=10**9),
        ) as agent,
    ):  # fmt: skip
        yield agent


def _alone(settings: Settings, count: int) -> list[float]:
    """Return the seconds of the same programs in a session without an agent."""
    with Sandbox(policy=settings.policy, pool=1) as sandbox, sandbox.session() as session:
        session.execute(STEP)
        return [seconds_of(lambda: session.execute(STEP)) for _ in range(count)]


@contextmanager
def _serving(steps: int) -> Iterator[str]:
    """Start the server in a process of its own, which shares no lock of Python's with the loop."""
    command = [sys.executable, "-Im", "cellwright.benchmarks.chat_server", str(steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().strip()
        finally:
            process.kill()
            process.wait(_WAIT_SECONDS)


def _order(count: int) -> list[str]:
    """Return kinds of task in a random order that is always the same; the first ones come often."""
    weights = [1 / place for place in range(1, len(_KINDS) + 1)]
    return random.Random(_RANDOM).choices(list(_KINDS), weights, k=count)


def _tasks(settings: Settings, order: Sequence[str]) -> tuple[list[int], int]:
    """Do tasks; return the tools made in each ten, and how many were right."""
    made: list[int] = []
    right = known = 0
    with _agent(settings, model := _Maker()) as agent:
        for number, model.kind in enumerate(order):
            kind = _KINDS[model.kind]
            answer = agent.run(f"Do this: {kind.description}, number {number}").answer
            right += answer == kind.expected
            if number % 10 == 9:
                now = len(agent.factory.list_tools())
                made.append(now - known)
                known = now
    return made, right


def _costs(between: Sequence[float], alone: Sequence[float]) -> ReportTable:
    rows = [
        (name, median(times) * MS, percentile(times, 0.9) * MS, median(times) / median(alone))
        for name, times in (("a step of an agent", between), ("the same in a session", alone))
    ]
    return ReportTable(
        title="From a reply of the model to the next request",
        columns=(Column("step", 2), Column("p50 ms"), Column("p90 ms"), Column("ratio", 1)),
        rows=tuple(rows),
        note="A step is a program, four transactions on disk and a request by HTTP.",
    )


def _curve(made: Sequence[int]) -> Curves:
    points = tuple((10.0 * (place + 1), float(count)) for place, count in enumerate(made))
    return Curves(
        title="Tools made in ten tasks", x="tasks done", y="tools made",
        lines=(Curve("made", points),),
    )  # fmt: skip
