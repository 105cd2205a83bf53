"""The cost of a program in another language: once, in a session, and started by bubblewrap."""

import subprocess
from collections.abc import Callable
from typing import NamedTuple

from ..harness.sandbox.sandbox import Sandbox
from ..harness.sandbox.sessions.session import Session
from ..policies.errors import LaunchError
from ..runner.host.interpreters import find_interpreter
from ..runner.host.runtime import find_runtime
from ..runner.launching.spawn import interpreter
from .commandlines import bubblewrapped
from .measuring import (
    Contender,
    Times,
    median,
    percentile,
    percentile_columns,
    percentile_row,
    side_by_side,
)
from .report import Column, Criterion, Report, ReportTable, Value
from .settings import Settings, sandbox

_ONCE, _FIRST, _LATER = "a program of its own", "a session's first request", "a later one"
_PLAIN, _BWRAP = "the interpreter alone", "bubblewrap and the interpreter"
_TARGET = 1.5
_HELD = ("bash", "sh", "javascript")  # Ruby's harness loads json, as long again as Ruby's own start
_QUARTER = 0.25


class Spoken(NamedTuple):
    """A program that prints 2, and how a command line gives it to the interpreter."""

    program: str
    arguments: tuple[str, ...]


_PROGRAMS = {
    "bash": Spoken("echo 2", ("--noprofile", "--norc", "-c")),
    "sh": Spoken("echo 2", ("-c",)),
    "javascript": Spoken("console.log(2)", ("-e",)),
    "ruby": Spoken("puts 2", ("--disable-gems", "-e")),
}


def measure(settings: Settings) -> Report:
    """Return percentiles for each language that this host has, and what it is next to bubblewrap."""
    found: dict[str, Times] = {}
    absent: list[tuple[Value, ...]] = []
    with sandbox(settings) as made:
        for language, spoken in _PROGRAMS.items():
            try:
                found[language] = _times(settings, made, language, spoken)
            except LaunchError as error:
                reason = str(error).partition("\n")[0]
                absent.append((language, f"absent: {reason}", *[None] * 5))
    return _report(found, absent, smoke=settings.smoke)


def _times(settings: Settings, made: Sandbox, language: str, spoken: Spoken) -> Times:
    path = find_interpreter(language, find_runtime(interpreter())).path
    plain = (path, *spoken.arguments, spoken.program)
    wrapped = bubblewrapped(*plain)
    in_session = _InSession(made, language, spoken.program)
    contenders = [
        Contender(_ONCE, lambda: _printed(made.execute(spoken.program, language)), made.settle),
        Contender(_FIRST, in_session.ask, in_session.open),
        Contender(_LATER, in_session.ask),  # after the first, which every other round puts last
        Contender(_PLAIN, _command(list(plain))),
    ]
    if wrapped:
        contenders.append(Contender(_BWRAP, _command(wrapped)))
    try:
        return side_by_side(contenders, settings.amount(200, 6))
    finally:
        in_session.close()


class _InSession:
    """One session at a time."""

    def __init__(self, made: Sandbox, language: str, program: str) -> None:
        self._made = made
        self._language = language
        self._program = program
        self._session: Session | None = None

    def open(self) -> None:
        self.close()
        self._session = self._made.session(language=self._language)
        self._made.settle()

    def ask(self) -> None:
        assert self._session is not None
        _printed(self._session.execute(self._program))

    def close(self) -> None:
        if self._session:
            self._session.close()


def _printed(result: object) -> None:
    if getattr(result, "stdout", None) != "2\n":
        raise RuntimeError(f"it printed something else: {result}")


def _command(line: list[str]) -> Callable[[], object]:
    def run() -> None:
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={}, check=True,
            start_new_session=True,
        )  # fmt: skip
        _printed(done)

    return run


def _report(found: dict[str, Times], absent: list[tuple[Value, ...]], *, smoke: bool) -> Report:
    rows = [
        (language, how, *percentile_row(times)[:3], len(times), _ratio(ways, times))
        for language, ways in found.items()
        for how, times in ways.items()
    ]
    columns = (*percentile_columns()[:3], Column("runs", 0))
    table = ReportTable(
        title="A program that prints 2, milliseconds",
        columns=(Column("language"), Column("how"), *columns, Column("ratio")),
        rows=(*rows, *absent),
        note="Ratio: of lower quartiles, to the last line of a language. A busy machine only adds.",
    )
    return Report(
        name="languages",
        title="Other languages",
        tables=(table,),
        verdicts=tuple(_verdicts(found, smoke=smoke)),
        notes=(
            "Default policy, every layer on, audit trail in a file; a cell stood ready.",
            "bubblewrap: every namespace new, /usr read-only; no filter, no caps.",
            "A cell has one processor's share for all its threads: on a busy machine node has less.",
        ),
        samples={
            f"{language}: {how}": tuple(times)
            for language, ways in found.items()
            for how, times in ways.items()
        },
    )


def _ratio(ways: Times, times: list[float]) -> float:
    return percentile(times, _QUARTER) / percentile(list(ways.values())[-1], _QUARTER)


def _verdicts(found: dict[str, Times], *, smoke: bool) -> list[Criterion]:
    verdicts = []
    for language, ways in found.items():
        if _BWRAP in ways and language in _HELD:
            ratio = _ratio(ways, ways[_ONCE])
            limit = 2 * _TARGET if smoke else _TARGET
            what = f"{language}: takes at most {limit:g} times what bubblewrap takes"
            verdicts.append(Criterion(what, ratio <= limit, f"{ratio:.2f} times"))
        ratio = median(ways[_ONCE]) / median(ways[_LATER])
        what = f"{language}: a later request of a session is quicker than a program of its own"
        verdicts.append(Criterion(what, ratio > 1, f"{ratio:.1f} times"))
    return verdicts
