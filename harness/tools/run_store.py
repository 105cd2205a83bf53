"""Runs that wait, what they called, and approvals, in one SQLite file."""

import os
import time
from typing import Any, NamedTuple

import msgspec

from ...policies.errors import PolicyError
from ...runner.messages import Answer
from .approval import Asked
from .database import Database
from .replay import Recorded

_FORMAT = 2
_OVER = ("completed", "failed")
_SCHEMA = """
CREATE TABLE runs (
    run TEXT PRIMARY KEY, state TEXT NOT NULL, began REAL NOT NULL, code TEXT NOT NULL,
    language TEXT NOT NULL, given BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE calls (
    number INTEGER PRIMARY KEY, run TEXT NOT NULL REFERENCES runs, turn INTEGER NOT NULL,
    site TEXT NOT NULL, digest TEXT NOT NULL, tool TEXT NOT NULL, begun INTEGER NOT NULL, answer BLOB
);
CREATE INDEX calls_of_run ON calls (run);
CREATE TABLE approvals (
    approval TEXT PRIMARY KEY, run TEXT NOT NULL REFERENCES runs, tool TEXT NOT NULL,
    digest TEXT NOT NULL, arguments BLOB NOT NULL, description TEXT NOT NULL, reason TEXT NOT NULL,
    state TEXT NOT NULL, why TEXT NOT NULL DEFAULT '', asked REAL NOT NULL, expires REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX approvals_of_run ON approvals (run, digest);
CREATE TABLE grants (
    tool TEXT NOT NULL, version TEXT NOT NULL, left INTEGER NOT NULL, expires REAL NOT NULL
)
"""


class StoredRun(NamedTuple):
    run: str
    code: str
    language: str
    given: dict[str, Any]


class Approval(NamedTuple):
    """A call that waits for a word: what would be done, and why it has to be approved."""

    approval: str
    run: str
    tool: str
    arguments: dict[str, Any]
    description: str
    reason: str
    asked: float  # seconds since the epoch
    expires: float


class RunStore:
    """What `Runs` keeps."""

    def __init__(self, path: str | None) -> None:
        self._database = Database(path, "runs", _FORMAT, _SCHEMA)

    def close(self) -> None:
        self._database.close()

    # runs

    def begin(self, code: str, language: str, given: dict[str, Any]) -> str:
        """Keep a new run; raises PolicyError for arguments that cannot be kept."""
        try:
            packed = msgspec.msgpack.encode(given)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise PolicyError(f"an argument cannot be kept with a run: {error}") from None
        run = os.urandom(8).hex()
        with self._database.writing("add to") as db:
            row = (run, "running", time.time(), code, language, packed)
            db.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?)", row)
        return run

    def get(self, run: str) -> StoredRun:
        with self._database.reading() as db:
            found = db.execute("SELECT code, language, given FROM runs WHERE run = ?", (run,))
            code, language, given = found.fetchone() or _no_run(run)
        return StoredRun(run, code, language, msgspec.msgpack.decode(given))

    def take_up(self, run: str, *, abandoned: bool) -> None:
        """Note that a run that waited runs again; raises PolicyError if it does not wait."""
        states = ("paused", "running") if abandoned else ("paused", "paused")
        with self._database.writing("change") as db:
            changed = db.execute(
                "UPDATE runs SET state = 'running' WHERE run = ? AND state IN (?, ?)",
                (run, *states),
            )
            if changed.rowcount:
                return
            found = db.execute("SELECT state FROM runs WHERE run = ?", (run,)).fetchone()
        state = (found or _no_run(run))[0]
        raise PolicyError(f"run {run} does not wait: it is {state}")

    def end(self, run: str, state: str) -> None:
        """Note that a run waits or is over; what is over asks for nothing any more."""
        with self._database.writing("change") as db:
            db.execute("UPDATE runs SET state = ? WHERE run = ?", (state, run))
            if state in _OVER:
                db.execute(
                    "UPDATE approvals SET state = 'expired', why = 'its run is over' "
                    "WHERE run = ? AND state = 'pending'",
                    (run,),
                )

    def forget(self, run: str | None) -> None:
        """Remove a run, or each that is over, with its calls and what was asked for it."""
        with self._database.writing("remove from") as db:
            gone = [(run,)] if run else db.execute(
                f"SELECT run FROM runs WHERE state IN {_OVER}"  # noqa: S608 - words of ours
            ).fetchall()  # fmt: skip
            for table in ("calls", "approvals", "runs"):
                db.executemany(f"DELETE FROM {table} WHERE run = ?", gone)  # noqa: S608 - of three

    # calls

    def calls(self, run: str) -> list[Recorded]:
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT number, site, digest, tool, begun, answer FROM calls WHERE run = ? "
                "ORDER BY turn, number",
                (run,),
            ).fetchall()
        return [
            Recorded(number, site, digest, tool, bool(begun), _answer(answer))
            for number, site, digest, tool, begun, answer in rows
        ]

    def add_call(
        self, run: str, turn: int, call: tuple[str, str, str], *, begun: bool,
        answer: Answer | None = None,
    ) -> int:  # fmt: skip
        """Note a call, its (site, digest, tool), and whether it is about to be made.

        Return its number.
        """
        row = (run, turn, *call, begun, _packed(answer))
        with self._database.writing("add to") as db:
            added = db.execute(
                "INSERT INTO calls (run, turn, site, digest, tool, begun, answer) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                row,
            )
            return int(added.lastrowid or 0)

    def change_call(self, number: int, *, begun: bool, answer: Answer | None) -> None:
        with self._database.writing("change") as db:
            db.execute(
                "UPDATE calls SET begun = ?, answer = ? WHERE number = ?",
                (begun, _packed(answer), number),
            )

    # approvals

    def use(self, asked: Asked, expires: float) -> tuple[str, str]:
        """Return the state of what was asked, and why: approved, for this once; rejected; expired; or
        pending, from now on if nobody had asked before."""
        self.expire()
        with self._database.writing("change") as db:
            ended = db.execute("SELECT state FROM runs WHERE run = ?", (asked.run,)).fetchone()
            if ended and ended[0] in _OVER:  # a tool's thread outlives a deadline
                return "expired", "its run is over"
            found = db.execute(
                "SELECT approval, state, why FROM approvals "
                "WHERE run = ? AND digest = ? AND state != 'used' ORDER BY asked",
                (asked.run, asked.digest),
            ).fetchone()
            if found is None and _take_grant(db, asked):
                return "approved", "by a grant"
            if found is None:
                row = (
                    os.urandom(8).hex(), asked.run, asked.tool, asked.digest,
                    msgspec.json.encode(asked.arguments), asked.description, asked.reason,
                    "pending", "", time.time(), expires,
                )  # fmt: skip
                marks = ", ".join("?" * len(row))
                db.execute(f"INSERT INTO approvals VALUES ({marks})", row)  # noqa: S608 - marks
                return "pending", ""
            approval, state, why = found
            if state != "pending":  # a word is for one call
                db.execute("UPDATE approvals SET state = 'used' WHERE approval = ?", (approval,))
            return str(state), str(why)

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
                "UPDATE approvals SET state = 'expired', why = 'nobody decided in time' "
                "WHERE state = 'pending' AND expires <= ?",
                (now,),
            )
            return changed.rowcount


def _take_grant(db: Any, asked: Asked) -> bool:
    changed = db.execute(
        "UPDATE grants SET left = left - 1 WHERE rowid = (SELECT rowid FROM grants "
        "WHERE tool = ? AND version = ? AND left > 0 ORDER BY expires LIMIT 1)",
        (asked.tool, asked.version),
    )
    return bool(changed.rowcount)


def _packed(answer: Answer | None) -> bytes | None:
    return None if answer is None else msgspec.msgpack.encode(answer)


def _answer(packed: bytes | None) -> Answer | None:
    return None if packed is None else msgspec.msgpack.decode(packed, type=Answer)


def _no_run(run: str) -> Any:
    raise PolicyError(f"there is no run {run!r}")
