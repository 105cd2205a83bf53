"""Leaks of branches: a census before and after ten thousand branches, and five hundred pauses."""

from functools import partial

from ..harness.sandbox.sessions.session import Session
from ..runner.settings import PauseSettings, PoolSettings, SessionSettings
from .leak_checks import NOTES, LeakCheck, censuses, own_temporary_files, settled, told_at_once
from .report import Report
from .scratch import scratch_directory
from .settings import Settings, sandbox

_AT_ONCE = 8
_LAUNCHER_CELLS = 100_000
_WARM_UP = 25  # calls: what is made once, such as the branching process, is made in the first
_STATE = "import sqlite3\ntaken, f = [0], open('notes', 'w+')\ndb = sqlite3.connect(':memory:')"
_NEXT = "taken.append(taken[-1] + 1), f.write('x'), f.flush()\ntaken[-1]"


def measure(settings: Settings) -> Report:
    """Return verdicts on branches, eight at once, and on pauses; each branch is called once."""
    with own_temporary_files():
        made = told_at_once(check(settings) for check in (_branches, _pauses))
    return Report(
        name="branch_leaks",
        title="What branches leave",
        tables=(censuses(made),),
        verdicts=tuple(verdict for each in made for verdict in each.verdicts()),
        notes=("The branching process is counted with keepers, nurseries and launchers.", *NOTES),
    )


def _branches(settings: Settings) -> LeakCheck:
    """Branch a session eight times at once, call each branch, and close it."""
    rounds = settings.amount(10_000, 48) // _AT_ONCE or 1
    wrong: list[str] = []
    # One launcher for all: no cell of its successor can become equal to the source's.
    pool = PoolSettings(cells_per_launcher=_LAUNCHER_CELLS)
    with (
        sandbox(settings, pool, sessions=SessionSettings(alive=64)) as made,
        made.session() as source,
    ):
        source.execute(_STATE)
        branch = partial(_branch, source, wrong)
        for _ in range(min(_WARM_UP, rounds)):
            branch()
        before = settled(made.settle)
        for _ in range(rounds):
            branch()
        after = settled(made.settle, before)
        if source.execute("taken").value != [0]:
            wrong.append("a branch changed its source")
    return LeakCheck("branches", rounds * _AT_ONCE, wrong, before, after)


def _branch(source: Session, wrong: list[str]) -> None:
    for each in source.branch(_AT_ONCE):
        with each:
            if each.not_copied:
                wrong.append(f"not copied: {each.not_copied}")
            if (result := each.execute(_NEXT)).value != 1:
                wrong.append(f"{result.value!r} {result.error}")


def _pauses(settings: Settings) -> LeakCheck:
    """Pause a session, resume it and call it, again and again."""
    rounds = settings.amount(500, 6)
    wrong: list[str] = []
    with (
        scratch_directory() as directory,
        sandbox(settings, pauses=PauseSettings(directory)) as made,
    ):
        session, number = made.session(), 0
        session.execute(_STATE)
        before = None
        for turn in range(-min(_WARM_UP, rounds), rounds):
            if turn == 0:
                before = settled(made.settle)
            session, number = made.resume(session.pause()), number + 1
            if (result := session.execute(_NEXT)).value != number:
                wrong.append(f"{result.value!r} {result.error}")
        after = settled(made.settle, before)
        session.close()
        wrong.extend(f"left on disk: {each.name}" for each in directory.glob("*.session"))
    return LeakCheck("pauses", rounds, wrong, before or after, after)
