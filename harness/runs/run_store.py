"""`RunStore`: the SQLite file of durable runs, their calls and their approvals."""

import os
import time
from typing import Any, NamedTuple

import msgspec

from ...policies.errors import PolicyError, RegistryError
from ...runner.cells.workspace import Executable
from ...runner.messages import Answer
from ..database import Database
from ..sandbox.parameters import CallArguments
from ..tools.approval import ApprovalRequest
from .replay import RecordedCall

_FORMAT = 4
_EXECUTABLE = 1  # the extension type of msgpack
_OVER = ("completed", "failed")
_SCHEMA = """
CREATE TABLE runs (
    run TEXT PRIMARY KEY, state TEXT NOT NULL, began REAL NOT NULL, code TEXT NOT NULL,
    language TEXT NOT NULL, given BLOB NOT NULL, ending TEXT NOT NULL DEFAULT '',
    attempt INTEGER NOT NULL DEFAULT 1
) WITHOUT ROWID;
CREATE TABLE calls (
    number INTEGER PRIMARY KEY, run TEXT NOT NULL REFERENCES runs, seen INTEGER NOT NULL,
    site TEXT NOT NULL, digest TEXT NOT NULL, tool TEXT NOT NULL, begun INTEGER NOT NULL, answer BLOB,
    call TEXT NOT NULL DEFAULT '', arguments BLOB NOT NULL DEFAULT '{}',
    place INTEGER NOT NULL DEFAULT 0, repeatable INTEGER NOT NULL DEFAULT 0,
    tool_digest TEXT NOT NULL DEFAULT ''
);
CREATE INDEX calls_of_run ON calls (run, place);
CREATE TABLE approvals (
    approval TEXT PRIMARY KEY, run TEXT NOT NULL REFERENCES runs, tool TEXT NOT NULL,
    digest TEXT NOT NULL, arguments BLOB NOT NULL, description TEXT NOT NULL, reason TEXT NOT NULL,
    state TEXT NOT NULL, why TEXT NOT NULL DEFAULT '', asked REAL NOT NULL, expires REAL NOT NULL,
    call TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE INDEX approvals_of_run ON approvals (run, call);
CREATE TABLE grants (
    tool TEXT NOT NULL, version TEXT NOT NULL, left INTEGER NOT NULL, expires REAL NOT NULL
)
"""
_FROM_3 = "ALTER TABLE calls ADD COLUMN tool_digest TEXT NOT NULL DEFAULT ''"
_UPGRADES = {
    2: """
ALTER TABLE runs ADD COLUMN ending TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN attempt INTEGER NOT NULL DEFAULT 1;
ALTER TABLE calls RENAME COLUMN turn TO seen;
UPDATE calls SET seen = 0;
ALTER TABLE calls ADD COLUMN call TEXT NOT NULL DEFAULT '';
ALTER TABLE calls ADD COLUMN arguments BLOB NOT NULL DEFAULT '{}';
ALTER TABLE calls ADD COLUMN place INTEGER NOT NULL DEFAULT 0;
ALTER TABLE calls ADD COLUMN repeatable INTEGER NOT NULL DEFAULT 0;
DROP INDEX calls_of_run;
CREATE INDEX calls_of_run ON calls (run, place);
ALTER TABLE approvals ADD COLUMN call TEXT NOT NULL DEFAULT '';
DROP INDEX approvals_of_run;
CREATE INDEX approvals_of_run ON approvals (run, call);
"""
    + _FROM_3,
    3: _FROM_3,
}
_COLUMNS = (
    "number, site, digest, tool, begun, answer, seen, place, repeatable, call, arguments, "
    "tool_digest"
)


class StoredRun(NamedTuple):
    run: str
    given: CallArguments
    attempt: int  # counted from 1


class Approval(NamedTuple):
    """A call that waits for a decision, and the reason why it must be approved."""

    approval: str
    run: str
    tool: str
    arguments: dict[str, Any]
    description: str
    reason: str
    asked: float  # seconds since the epoch
    expires: float


class NewCall(NamedTuple):
    """A call to record; `call` identifies it in the run.

    `seen` is the number of answers that the program had when the call arrived.
    """

    run: str
    attempt: int
    call: str
    site: str
    digest: str
    tool: str
    arguments: dict[str, Any]
    seen: int
    repeatable: bool


class RunSummary(NamedTuple):
    """A run as `Runs.kept` returns it; `ending` says how its last attempt ended."""

    run: str
    state: str  # running, paused, diverged, completed or failed
    began: float  # seconds since the epoch
    language: str
    ending: str


class RunStore:
    """Runs, calls, approvals and grants.  Safe from many threads, and the file from many processes."""

    def __init__(self, path: str | os.PathLike[str] | None, *, must_exist: bool = False) -> None:
        self._database = Database(
            path, "runs", _FORMAT, _SCHEMA, upgrades=_UPGRADES, must_exist=must_exist
        )

    def close(self) -> None:
        self._database.close()

    # runs

    def begin(self, given: CallArguments, run: str = "") -> str:
        """Store a new run, with the id `run` if it is given, and return its id.

        Raises PolicyError for arguments that cannot be stored.
        """
        rest = msgspec.structs.asdict(given)
        del rest["on_output"], rest["cancel"]  # valid only in this process
        code, language = rest.pop("code"), rest.pop("language")
        try:
            packed = msgspec.msgpack.encode(rest, enc_hook=_extension)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise PolicyError(f"an argument cannot be stored with a run: {error}") from None
        run = run or os.urandom(8).hex()
        with self._database.writing("add to") as db:
            row = (run, "running", time.time(), code, language, packed)
            db.execute(
                "INSERT INTO runs (run, state, began, code, language, given) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                row,
            )
        return run

    def get(self, run: str) -> StoredRun:
        with self._database.reading() as db:
            found = db.execute(
                "SELECT code, language, given, attempt FROM runs WHERE run = ?", (run,)
            )
            code, language, given, attempt = found.fetchone() or _no_run(run)
        rest = msgspec.msgpack.decode(given, ext_hook=_executable)
        return StoredRun(run, CallArguments(code=code, language=language, **rest), attempt)

    def state(self, run: str) -> str:
        """Return the state of a run, or an empty text if no run has this id."""
        with self._database.reading() as db:
            found = db.execute("SELECT state FROM runs WHERE run = ?", (run,)).fetchone()
        return str(found[0]) if found else ""

    def kept(self, run: str | None = None) -> tuple[RunSummary, ...]:
        """Return all runs, the oldest first, or one; raises PolicyError for an unknown run."""
        where, given = ("WHERE run = ? ", (run,)) if run is not None else ("", ())
        with self._database.reading() as db:
            rows = db.execute(
                f"SELECT run, state, began, language, ending FROM runs {where}"  # noqa: S608 - ours
                "ORDER BY began, run",
                given,
            ).fetchall()
        if run is not None and not rows:
            _no_run(run)
        return tuple(RunSummary(*row) for row in rows)

    def size_of(self, beginning: str) -> tuple[int, int]:
        """Return how many runs have an id that begins so, and the bytes of them and of their calls."""
        given = (len(beginning), beginning)
        with self._database.reading() as db:
            count, size = db.execute(
                "SELECT count(*), coalesce(sum(length(CAST(code AS BLOB)) + length(given)), 0) "
                "FROM runs WHERE substr(run, 1, ?) = ?",
                given,
            ).fetchone()
            (calls,) = db.execute(
                "SELECT coalesce(sum(length(arguments) + coalesce(length(answer), 0)), 0) "
                "FROM calls WHERE substr(run, 1, ?) = ?",
                given,
            ).fetchone()
        return count, size + calls

    def take_up(self, run: str, *, abandoned: bool) -> None:
        """Record a new attempt of a run; raises PolicyError if it is completed or running."""
        with self._database.writing("change") as db:
            found = db.execute("SELECT state FROM runs WHERE run = ?", (run,)).fetchone()
            state = (found or _no_run(run))[0]
            if state == "completed":
                raise PolicyError(f"run {run} cannot be resumed: it is completed")
            if state == "running" and not abandoned:
                raise PolicyError(
                    f"run {run} cannot be resumed: it is running",
                    "if the process of its last attempt is gone, resume it as abandoned",
                )
            db.execute(
                "UPDATE runs SET state = 'running', ending = '', attempt = attempt + 1 "
                "WHERE run = ?",
                (run,),
            )

    def end(self, run: str, state: str, ending: str = "", *, attempt: int) -> None:
        """Record how an attempt ended; withdraw the approvals of a completed or failed run.

        If the run was resumed elsewhere, the end of an older attempt changes nothing.
        """
        with self._database.writing("change") as db:
            changed = db.execute(
                "UPDATE runs SET state = ?, ending = ? WHERE run = ? AND attempt = ?",
                (state, ending, run, attempt),
            )
            if changed.rowcount and state in _OVER:
                db.execute(
                    "UPDATE approvals SET state = 'withdrawn' WHERE run = ? AND state = 'pending'",
                    (run,),
                )

    def forget(self, run: str | None) -> None:
        """Remove a run, or all completed and failed ones, with their calls and approvals."""
        with self._database.writing("remove from") as db:
            gone = [(run,)] if run else db.execute(
                f"SELECT run FROM runs WHERE state IN {_OVER}"  # noqa: S608 - words of ours
            ).fetchall()  # fmt: skip
            for table in ("calls", "approvals", "runs"):
                db.executemany(f"DELETE FROM {table} WHERE run = ?", gone)  # noqa: S608 - of three

    # calls

    def calls(self, run: str) -> list[RecordedCall]:
        """Return the recorded calls of a run."""
        with self._database.reading() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM calls WHERE run = ? ORDER BY number",  # noqa: S608 - ours
                (run,),
            ).fetchall()
        return [_recorded(*row) for row in rows]

    def call(self, number: int) -> RecordedCall | None:
        """Return the current record of a call; None if its run was removed."""
        with self._database.reading() as db:
            found = db.execute(
                f"SELECT {_COLUMNS} FROM calls WHERE number = ?",  # noqa: S608 - ours
                (number,),
            ).fetchone()
        return _recorded(*found) if found else None

    def add_call(self, new: NewCall) -> int:
        """Record a call that waits; return its number.  Raises as `begin_call` does."""
        with self._database.writing("add to") as db:
            _require_current(db, new)
            return _add(db, new)

    def begin_call(self, new: NewCall, number: int, tool_digest: str) -> int:
        """Record that a call is about to be made, and that its approval is used; return its number.

        `number` is 0 for a new call.  Raises RegistryError if the call cannot be recorded, or the run
        was resumed elsewhere: then the call must not be made.
        """
        with self._database.writing("change") as db:
            _require_current(db, new)
            number = number or _add(db, new)
            db.execute(
                "UPDATE calls SET begun = 1, tool_digest = ? WHERE number = ?",
                (tool_digest, number),
            )
            db.execute(
                "UPDATE approvals SET state = 'used' "
                "WHERE run = ? AND call = ? AND state = 'approved'",
                (new.run, new.call),
            )
            return number

    def end_call(
        self, new: NewCall, number: int, answer: Answer, *, is_begun: bool
    ) -> tuple[int, int]:
        """Record the answer of a call; return its number, and the place of the answer.

        The answer of a call that was made is recorded even if the run was resumed elsewhere.
        """
        with self._database.writing("change") as db:
            if not is_begun:
                _require_current(db, new)
            number = number or _add(db, new)
            (place,) = db.execute(
                "SELECT coalesce(max(place), 0) + 1 FROM calls WHERE run = ?", (new.run,)
            ).fetchone()
            db.execute(
                "UPDATE calls SET answer = ?, place = ? WHERE number = ?",
                (msgspec.msgpack.encode(answer), place, number),
            )
            return number, int(place)

    def mark(self, run: str, number: int, answer: Answer | None) -> None:
        """Record the outcome of a call whose outcome is unknown; None means that it was not made.

        Raises PolicyError for any other call.
        """
        with self._database.writing("change") as db:
            changed = db.execute(
                "UPDATE calls SET begun = ?, answer = ?, "
                "place = (SELECT coalesce(max(place), 0) + 1 FROM calls WHERE run = ?) "
                "WHERE run = ? AND number = ? AND begun AND answer IS NULL",
                (answer is not None, _packed(answer), run, run, number),
            )
            if not changed.rowcount:
                raise PolicyError(f"run {run} has no call {number} whose outcome is unknown")
            if answer is None:
                db.execute("UPDATE calls SET place = 0 WHERE number = ?", (number,))

    # approvals

    def use(self, asked: ApprovalRequest, expires: float) -> tuple[str, str]:
        """Return the state of a request, and the reason.

        States are approved (for this one call), rejected, expired, pending and over (the run has
        ended).  A new request becomes pending.
        """
        self.expire()
        with self._database.writing("change") as db:
            ended = db.execute("SELECT state FROM runs WHERE run = ?", (asked.run,)).fetchone()
            if ended and ended[0] != "running":  # a tool's thread may outlive the deadline
                return "over", "its run is over"
            found = db.execute(
                "SELECT state, why FROM approvals WHERE run = ? AND call = ? AND digest = ? "
                "AND state NOT IN ('used', 'withdrawn') ORDER BY asked",
                (asked.run, asked.call, asked.digest),
            ).fetchone()
            if found:  # `begin_call` marks it as used
                return str(found[0]), str(found[1])
            if _take_grant(db, asked):
                return "approved", "by a grant"
            db.execute(  # a request for another version of the tool
                "UPDATE approvals SET state = 'withdrawn' "
                "WHERE run = ? AND call = ? AND state = 'pending'",
                (asked.run, asked.call),
            )
            row = (
                os.urandom(8).hex(), asked.run, asked.tool, asked.digest,
                msgspec.json.encode(asked.kept_arguments), asked.description, asked.reason,
                "pending", "", time.time(), expires, asked.call,
            )  # fmt: skip
            marks = ", ".join("?" * len(row))
            db.execute(f"INSERT INTO approvals VALUES ({marks})", row)  # noqa: S608 - marks
            return "pending", ""

    def pending(self) -> tuple[Approval, ...]:
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT approval, run, tool, arguments, description, reason, asked, expires "
                "FROM approvals WHERE state = 'pending' ORDER BY asked, approval"
            ).fetchall()
        return tuple(
            Approval(approval, run, tool, msgspec.json.decode(arguments), *about)
            for approval, run, tool, arguments, *about in rows
        )

    def decide(self, approval: str, state: str, why: str = "") -> bool:
        with self._database.writing("change") as db:
            changed = db.execute(
                "UPDATE approvals SET state = ?, why = ? WHERE approval = ? AND state = 'pending'",
                (state, why, approval),
            )
            return bool(changed.rowcount)

    def grant(self, tool: str, version: str, count: int, expires: float) -> None:
        with self._database.writing("add to") as db:
            db.execute("INSERT INTO grants VALUES (?, ?, ?, ?)", (tool, version, count, expires))

    def expire(self) -> int:
        now = time.time()
        with self._database.writing("change") as db:
            db.execute("DELETE FROM grants WHERE expires <= ? OR left <= 0", (now,))
            changed = db.execute(
                "UPDATE approvals SET state = 'expired', why = 'no decision in time' "
                "WHERE state = 'pending' AND expires <= ?",
                (now,),
            )
            return changed.rowcount


def _take_grant(db: Any, asked: ApprovalRequest) -> bool:
    changed = db.execute(
        "UPDATE grants SET left = left - 1 WHERE rowid = (SELECT rowid FROM grants "
        "WHERE tool = ? AND version = ? AND left > 0 ORDER BY expires LIMIT 1)",
        (asked.tool, asked.version),
    )
    return bool(changed.rowcount)


def _require_current(db: Any, new: NewCall) -> None:
    found = db.execute("SELECT attempt FROM runs WHERE run = ?", (new.run,)).fetchone()
    if found is None or found[0] != new.attempt:
        raise RegistryError(f"run {new.run} was resumed elsewhere or removed: its calls end here")


def _add(db: Any, new: NewCall) -> int:
    added = db.execute(
        "INSERT INTO calls (run, call, site, digest, tool, arguments, seen, repeatable, begun) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0)",
        (
            new.run, new.call, new.site, new.digest, new.tool, msgspec.json.encode(new.arguments),
            new.seen, new.repeatable,
        ),
    )  # fmt: skip
    return int(added.lastrowid)


def _recorded(
    number: int, site: str, digest: str, tool: str, begun: int, answer: bytes | None, seen: int,
    place: int, repeatable: int, call: str, arguments: bytes, tool_digest: str,
) -> RecordedCall:  # fmt: skip
    return RecordedCall(
        number, site, digest, tool, bool(begun), _answer(answer), seen, place, bool(repeatable), call,
        msgspec.Raw(arguments), tool_digest,
    )  # fmt: skip


def _extension(value: object) -> msgspec.msgpack.Ext:
    if isinstance(value, Executable):
        return msgspec.msgpack.Ext(_EXECUTABLE, bytes(value))
    raise TypeError(f"{type(value).__name__} is not JSON")


def _executable(_: int, data: memoryview) -> Executable:
    return Executable(data)


def _packed(answer: Answer | None) -> bytes | None:
    return None if answer is None else msgspec.msgpack.encode(answer)


def _answer(packed: bytes | None) -> Answer | None:
    return None if packed is None else msgspec.msgpack.decode(packed, type=Answer)


def _no_run(run: str) -> Any:
    raise PolicyError(f"there is no run {run!r}")
