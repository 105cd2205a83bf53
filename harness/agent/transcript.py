"""`Transcripts`: the runs of agents on disk, each reply of the model and each observation.

A reply is on disk before its program runs, and an observation before the next reply is asked for.  So
after a kill at any moment the record says which step was being made.

`AgentEvent` and `AgentResult`: the progress of a run, and its end.

`StepSession`: the session in which the programs of one run execute, rebuilt after a restart.

Each step is a durable run (harness/runs): its calls of tools are recorded, so that they are not made
twice, and it can wait for a person.  A new process makes the session again by repeating the finished
steps, which get the recorded answers; nothing is called.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from ...policies.closing import Closing
from ...policies.errors import PolicyError, RegistryError, SessionLost
from ...runner.cgroups.cgroup_tree import start_time
from ...runner.requests.result import SandboxResult, SandboxStatus
from ..database import Database
from ..runs.durable_runs import Runs
from ..runs.run_store import Approval
from ..sandbox.parameters import CallArguments
from ..sandbox.sandbox import Sandbox
from ..sandbox.sessions.session import Session
from .planner import CodeAction, read_reply
from .prompts import AgentUsage, ModelReply, prelude

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
    """One reply of the model and its outcome.

    `observation` is None until the step is finished. `outcome` is one word: `code`, `error`, `lost`
    (the session with its variables is gone), `unusable` or `answer`. `used`: the run's usage after it.
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
        """Return the text that a run's model got in addition to the task; None if it is not decided
        yet."""
        with self._database.reading() as db:
            found = db.execute("SELECT notes FROM agents WHERE run = ?", (run,)).fetchone()
        return found[0] if found else None

    def set_notes(self, run: str, notes: str) -> None:
        """Record the text that the model gets in addition to the task, so that it is the same after
        a resume."""
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
        """Record the outcome of a step."""
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
        """Raise RegistryError if the file was not written by this class."""
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
    """Tell whether the process lives; its number alone may belong to another process by now."""
    process, _, started = owner.partition(" ")
    return bool(started) and process.isdecimal() and start_time(int(process)) == started


def _no_run(run: str) -> NoReturn:
    raise PolicyError(f"there is no run {run!r}", "`cellwright agent runs` lists them")


class AgentEvent(NamedTuple):
    """An event of a run: `started` (text: its id), `program`, `observation`, `unusable`, `paused`,
    `completed`, `failed`; `step` counts from 1."""

    kind: str
    step: int
    text: str


class AgentResult(NamedTuple):
    """The outcome of working on a run.

    `status`: completed, paused (a call waits for approval), or failed; `reason` says why. `answer`: the
    model's final answer, which is data of a program in a cell.
    """

    run_id: str
    status: str
    answer: Any
    reason: str
    usage: AgentUsage
    pending: tuple[Approval, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == COMPLETED


CODE, ERROR, LOST, UNUSABLE, ANSWER = "code", "error", "lost", "unusable", "answer"
_RAN = (CODE, ERROR, ANSWER)
_LOST = "The session ended, and with it every variable and file. A new one has begun."


class StepResult(NamedTuple):
    """The outcome of a program; `outcome`: a word of AgentStep, empty while it waits for a person.

    `notice`: text that the model must get with the result.
    """

    result: SandboxResult | None
    outcome: str
    notice: str = ""


class StepSession(Closing):
    """The session of one run of an agent."""

    def __init__(self, sandbox: Sandbox, runs: Runs, run: str) -> None:
        self._sandbox, self._runs, self._run = sandbox, runs, run
        self._session: Session | None = None
        self._notice = ""

    def rebuild(self, steps: Sequence[AgentStep]) -> None:
        """Repeat the finished steps after the last one that lost the session."""
        since = max((each.number for each in steps if each.outcome == LOST), default=0)
        for each in steps:
            is_code = isinstance(read_reply(each.reply), CodeAction)
            if each.number <= since or each.outcome not in _RAN or not is_code:
                continue
            attempt = self._runs.repeat(self._opened(), call_run(self._run, each.number))
            if attempt.result.reason == "diverged" or self._is_lost():
                self._notice = (
                    f"The run was resumed, and program {each.number} did something else when it was "
                    "repeated: its variables, and later ones, may be missing. Look before you use them."
                )
                if self._is_lost():
                    return

    def execute(self, number: int, code: str, timeout: float) -> StepResult:
        """Execute the program of a step, or finish it if it was begun in another process."""
        given = CallArguments(code=code, plain=False)
        try:
            run = call_run(self._run, number)
            result = self._runs.finish(self._opened(), run, given, timeout=timeout).result
        except SessionLost as lost:
            self.close()
            return StepResult(None, LOST, f"{_LOST} {lost.what}.")
        notice, self._notice = self._notice, ""
        if result.status is SandboxStatus.PENDING:
            return StepResult(result, "", notice)
        if self._is_lost():
            self.close()
            return StepResult(result, LOST, _LOST)
        return StepResult(result, CODE if result.ok else ERROR, notice)

    def close(self) -> None:
        """End the session; the next step opens another.  Closing twice is fine."""
        if self._session:
            self._session.close()
            self._session = None

    def _opened(self) -> Session:
        if self._session is None:
            self._session = self._sandbox.session(self._run)
            has_files = self._sandbox.has_tool("file_write")
            prepared = self._session.execute(prelude(has_files=has_files))
            if not prepared.ok:
                raise SessionLost(f"the session cannot be prepared: {prepared.error}")
        return self._session

    def _is_lost(self) -> bool:
        return self._session is not None and bool(self._session.lost)


def call_run(run: str, number: int) -> str:
    """Return the id of the durable run of one step."""
    return f"{run}-{number}"


def run_of(call_run: str) -> str:
    """Return the agent's run to which the durable run of a step belongs."""
    return call_run.rpartition("-")[0]
