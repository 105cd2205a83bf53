"""`Transcripts`: the runs of agents on disk, each reply of the model and each observation.

A reply is on disk before its program runs, and an observation before the next reply is asked for.  So
after a kill at any moment the record says which step was being made.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

import msgspec

from ...policies.errors import PolicyError, RegistryError
from ...runner.cgroups.tree import start_time
from ..database import Database
from .limits import AgentUsage
from .messages import ModelReply

_FORMAT = 1
_SCHEMA = """
CREATE TABLE agents (
    run TEXT PRIMARY KEY, task TEXT NOT NULL, model TEXT NOT NULL, began REAL NOT NULL,
    notes TEXT, state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
    answer BLOB NOT NULL DEFAULT 'null', owner TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE TABLE steps (
    run TEXT NOT NULL REFERENCES agents, number INTEGER NOT NULL, reply BLOB NOT NULL,
    observation TEXT, outcome TEXT NOT NULL DEFAULT '', used BLOB NOT NULL,
    PRIMARY KEY (run, number)
) WITHOUT ROWID
"""
RUNNING, PAUSED, INTERRUPTED, COMPLETED, FAILED = (
    "running", "paused", "interrupted", "completed", "failed",
)  # fmt: skip


class AgentRun(NamedTuple):
    """A run of an agent; `reason` says why it is in this state, `answer` is JSON."""

    run: str
    task: str
    model: str
    began: float  # seconds since the epoch
    state: str
    reason: str
    answer: msgspec.Raw


class AgentStep(NamedTuple):
    """One reply of the model and what came of it.

    `observation` is None until the step is finished.  `outcome` is one word: `code`, `error`, `lost`
    (the session with its variables is gone), `unusable` or `answer`.  `used` is what the run had used
    after it.
    """

    number: int
    reply: ModelReply
    observation: str | None
    outcome: str
    used: AgentUsage


class Transcripts:
    """The runs of agents in one file, by default in memory.  Safe from many threads, and the file from
    many processes."""

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, must_exist: bool = False
    ) -> None:
        self._database = Database(path, "agent runs", _FORMAT, _SCHEMA, must_exist=must_exist)

    def close(self) -> None:
        self._database.close()

    def begin(self, task: str, model: str) -> str:
        """Store a new run and return its id."""
        run = os.urandom(6).hex()
        with self._database.writing("add to") as db:
            db.execute(
                "INSERT INTO agents (run, task, model, began, state, owner) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (run, task, model, time.time(), RUNNING, _this_process()),
            )
        return run

    def take_up(self, run: str) -> None:
        """Record that this process works on a run; raises PolicyError if it is over, or a process that
        lives works on it, be it this one."""
        with self._database.writing("change") as db:
            found = db.execute("SELECT state, owner FROM agents WHERE run = ?", (run,)).fetchone()
            if found is None:
                _no_run(run)
            state, owner = found
            if state == COMPLETED:
                raise PolicyError(f"run {run} cannot be resumed: it is completed")
            if state == RUNNING and _lives(owner):
                raise PolicyError(
                    f"run {run} cannot be resumed: process {owner.partition(' ')[0]} works on it",
                    "wait until it ends, or end that process",
                )
            db.execute(
                "UPDATE agents SET state = ?, reason = '', owner = ? WHERE run = ?",
                (RUNNING, _this_process(), run),
            )

    def end(self, run: str, state: str, reason: str = "", answer: bytes = b"null") -> None:
        """Record the state of a run that is no longer worked on."""
        with self._database.writing("change") as db:
            db.execute(
                "UPDATE agents SET state = ?, reason = ?, answer = ?, owner = '' WHERE run = ?",
                (state, reason, answer, run),
            )

    def get(self, run: str) -> AgentRun:
        """Return a run; raises PolicyError for an unknown one."""
        found = next((each for each in self.runs() if each.run == run), None)
        return found or _no_run(run)

    def runs(self) -> tuple[AgentRun, ...]:
        """Return all runs, the oldest first."""
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT run, task, model, began, state, reason, answer FROM agents "
                "ORDER BY began, run"
            ).fetchall()
        with self._undamaged():
            return tuple(_run_of(row) for row in rows)

    def forget(self, run: str) -> None:
        """Remove a run with its steps."""
        with self._database.writing("remove from") as db:
            for table in ("steps", "agents"):
                db.execute(f"DELETE FROM {table} WHERE run = ?", (run,))  # noqa: S608 - of two

    def notes(self, run: str) -> str | None:
        """Return what a run's model was told beside the task; None if that was not decided yet."""
        with self._database.reading() as db:
            found = db.execute("SELECT notes FROM agents WHERE run = ?", (run,)).fetchone()
        return found[0] if found else None

    def set_notes(self, run: str, notes: str) -> None:
        """Record what the model is told beside the task, so that it is the same after a resume."""
        with self._database.writing("change") as db:
            db.execute("UPDATE agents SET notes = ? WHERE run = ?", (notes, run))

    # steps

    def add_step(self, run: str, number: int, reply: ModelReply, used: AgentUsage) -> None:
        """Record a reply, before anything is done with it."""
        with self._database.writing("add to") as db:
            db.execute(
                "INSERT INTO steps (run, number, reply, used) VALUES (?, ?, ?, ?)",
                (run, number, msgspec.msgpack.encode(reply), msgspec.msgpack.encode(used)),
            )

    def finish_step(
        self, run: str, number: int, observation: str, outcome: str, used: AgentUsage
    ) -> None:
        """Record what came of a step."""
        with self._database.writing("change") as db:
            db.execute(
                "UPDATE steps SET observation = ?, outcome = ?, used = ? "
                "WHERE run = ? AND number = ?",
                (observation, outcome, msgspec.msgpack.encode(used), run, number),
            )

    def steps(self, run: str) -> list[AgentStep]:
        """Return the steps of a run in order; only the last can be unfinished."""
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT number, reply, observation, outcome, used FROM steps WHERE run = ? "
                "ORDER BY number",
                (run,),
            ).fetchall()
        with self._undamaged():
            return [_step_of(row) for row in rows]

    @contextlib.contextmanager
    def _undamaged(self) -> Iterator[None]:
        """Raise RegistryError if what was read is not what this class writes."""
        try:
            yield
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
            raise RegistryError(
                f"agent runs {self._database.path}: a record is damaged: {error}",
                "restore the file from a copy, or name another directory",
            ) from None


def _run_of(row: Sequence[object]) -> AgentRun:
    *about, answer = row
    run, task, model, began, state, reason = msgspec.convert(
        about, tuple[str, str, str, float, str, str], builtin_types=(bytes,)
    )
    if not isinstance(answer, bytes | str):  # the default of the column is text
        raise TypeError("an answer is not text")
    return AgentRun(run, task, model, began, state, reason, _ANSWER.decode(answer))


def _step_of(row: Sequence[object]) -> AgentStep:
    number, reply, observation, outcome, used = msgspec.convert(
        row, tuple[int, bytes, str | None, str, bytes], builtin_types=(bytes,)
    )
    return AgentStep(number, _REPLY.decode(reply), observation, outcome, _USED.decode(used))


_ANSWER = msgspec.json.Decoder(msgspec.Raw)
_REPLY = msgspec.msgpack.Decoder(ModelReply)
_USED = msgspec.msgpack.Decoder(AgentUsage)


def _this_process() -> str:
    return f"{os.getpid()} {start_time(os.getpid())}"


def _lives(owner: str) -> bool:
    """Tell whether the process lives; its number alone may be another's by now."""
    process, _, started = owner.partition(" ")
    return bool(started) and process.isdecimal() and start_time(int(process)) == started


def _no_run(run: str) -> NoReturn:
    raise PolicyError(f"there is no run {run!r}", "`cellwright agent runs` lists them")
