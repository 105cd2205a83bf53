"""`AgentMemory`: the memory of earlier runs: episodes, recipes of tools, and facts that a person added.

Only one thing is learnt automatically: which tools solved a task. Its texts are tasks of the user and
names of tools; text of a tool, a page or a file enters only if a person keeps it as a fact.
"""

import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...policies.closing import Closing
from ...policies.errors import PolicyError
from ..database import Database
from ..search.documents import document_of
from ..search.search import SearchIndex
from ..text.hidden import line

_FORMAT = 2
_TOOL_RUNS = """
CREATE TABLE tool_runs (
    tool TEXT NOT NULL, digest TEXT NOT NULL, run TEXT NOT NULL, well INTEGER NOT NULL,
    PRIMARY KEY (tool, digest, run)
) WITHOUT ROWID
"""
_SCHEMA = f"""
CREATE TABLE episodes (
    run TEXT PRIMARY KEY, task TEXT NOT NULL, status TEXT NOT NULL, steps INTEGER NOT NULL,
    ended REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX episodes_by_age ON episodes (ended);
CREATE TABLE recipes (
    task TEXT NOT NULL, tools TEXT NOT NULL, runs INTEGER NOT NULL, successes INTEGER NOT NULL,
    used REAL NOT NULL, PRIMARY KEY (task, tools)
) WITHOUT ROWID;
{_TOOL_RUNS};
CREATE TABLE facts (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE, kept REAL NOT NULL)
"""
# Format 1 counted by a tool's name only. Its counts are dropped, because the source may have changed.
_UPGRADES = {1: f"DROP TABLE tool_runs; {_TOOL_RUNS}"}
MOST_EPISODES, MOST_RECIPES, MOST_FACTS = 1000, 1000, 200
_LONGEST = 1000  # characters of a task or a fact
_DAY_SECONDS = 86_400.0


class UsedTool(NamedTuple):
    """A tool that a run called; `digest`: the ToolSpec.digest of the tool that had the name then."""

    name: str
    digest: str


class Recipe(NamedTuple):
    """Tools that runs of one task used, and how many of these runs were completed."""

    task: str
    tools: tuple[str, ...]
    runs: int
    successes: int


class Fact(NamedTuple):
    """A statement that a person kept for the agent."""

    id: int
    text: str


class Episode(NamedTuple):
    """How a run ended."""

    run: str
    task: str
    status: str
    steps: int
    ended: float  # seconds since the epoch


class AgentMemory(Closing):
    """Memory in one file, by default in memory.  Safe from many threads, and the file from many
    processes."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._database = Database(path, "agent's memory", _FORMAT, _SCHEMA, upgrades=_UPGRADES)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._database.close()

    # learning

    def note_run(
        self, run: str, task: str, status: str, steps: int, tools: Sequence[UsedTool]
    ) -> None:
        """Record how a run ended, and with which tools; a run that is noted again replaces itself."""
        task, now, well = line(task, _LONGEST), time.time(), status == "completed"
        with self._database.writing("add to") as db:
            known = db.execute("SELECT 1 FROM episodes WHERE run = ?", (run,)).fetchone()
            db.execute(
                "INSERT OR REPLACE INTO episodes VALUES (?, ?, ?, ?, ?)",
                (run, task, status, steps, now),
            )
            db.executemany(
                "INSERT OR REPLACE INTO tool_runs VALUES (?, ?, ?, ?)",
                [(*tool, run, well) for tool in tools],
            )
            if tools and not known:
                db.execute(
                    "INSERT INTO recipes VALUES (?, ?, 1, ?, ?) ON CONFLICT DO UPDATE SET "
                    "runs = runs + 1, successes = successes + excluded.successes, used = excluded.used",
                    (task, _names_of(tools), well, now),
                )
            for table, order, most in (
                ("episodes", "ended", MOST_EPISODES), ("recipes", "used", MOST_RECIPES),
            ):  # fmt: skip
                db.execute(
                    f"DELETE FROM {table} WHERE {order} < (SELECT {order} FROM {table} "  # noqa: S608 - ours
                    f"ORDER BY {order} DESC LIMIT 1 OFFSET ?)",
                    (most - 1,),
                )

    def keep_fact(self, text: str) -> Fact:
        """Keep a person's statement, which the model gets with each task that has words in common with
        it.

        Raises PolicyError if it is empty or longer than 1,000 characters, or there are 200 already.
        """
        clean = line(text, _LONGEST)
        if not clean or len(text) > _LONGEST:
            raise PolicyError("fact: must have 1 to 1,000 characters")
        with self._database.writing("add to") as db:
            (count,) = db.execute("SELECT count(*) FROM facts").fetchone()
            if count >= MOST_FACTS:
                raise PolicyError(f"fact: {MOST_FACTS} are kept already", "forget some")
            db.execute(
                "INSERT OR IGNORE INTO facts (text, kept) VALUES (?, ?)", (clean, time.time())
            )
            row = db.execute("SELECT id, text FROM facts WHERE text = ?", (clean,)).fetchone()
        return Fact(*row)

    def replace_tool(self, old: str, new: str) -> None:
        """Name another tool in the recipes of a tool that was merged into it."""
        with self._database.writing("change") as db:
            rows = db.execute("SELECT task, tools, runs, successes, used FROM recipes").fetchall()
            for task, tools, *counts in rows:
                names = set(msgspec.json.decode(tools, type=list[str]))
                if old not in names:
                    continue
                changed = msgspec.json.encode(sorted(names - {old} | {new})).decode()
                db.execute("DELETE FROM recipes WHERE task = ? AND tools = ?", (task, tools))
                db.execute(
                    "INSERT INTO recipes VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                    "runs = runs + excluded.runs, successes = successes + excluded.successes, "
                    "used = max(used, excluded.used)",
                    (task, changed, *counts),
                )

    # recalling

    def recipes_for(self, task: str, limit: int = 3) -> tuple[Recipe, ...]:
        """Return recipes of similar tasks that were completed, the best first."""
        known = [each for each in self.recipes() if each.successes]
        found = _similar(task, [each.task for each in known], limit)
        return tuple(known[place] for place in found)

    def facts_for(self, task: str, limit: int = 5) -> tuple[Fact, ...]:
        """Return the facts that have words in common with a task."""
        known = self.facts()
        return tuple(known[place] for place in _similar(task, [each.text for each in known], limit))

    def recipes(self) -> tuple[Recipe, ...]:
        """Return all recipes, the latest used first."""
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT task, tools, runs, successes FROM recipes ORDER BY used DESC"
            ).fetchall()
        return tuple(
            Recipe(task, tuple(msgspec.json.decode(tools, type=list[str])), runs, successes)
            for task, tools, runs, successes in rows
        )

    def facts(self) -> tuple[Fact, ...]:
        """Return all facts, the oldest first."""
        with self._database.reading() as db:
            rows = db.execute("SELECT id, text FROM facts ORDER BY id").fetchall()
        return tuple(Fact(*row) for row in rows)

    def episodes(self) -> tuple[Episode, ...]:
        """Return how the latest runs ended, the oldest first."""
        with self._database.reading() as db:
            rows = db.execute(
                "SELECT run, task, status, steps, ended FROM episodes ORDER BY ended"
            ).fetchall()
        return tuple(Episode(*row) for row in rows)

    def successes_of(self, tool: UsedTool) -> tuple[int, int]:
        """Return in how many completed runs a tool was used, and in how many runs at all.

        Runs that called another source, or the same with other permissions, do not count.
        """
        with self._database.reading() as db:
            row = db.execute(
                "SELECT coalesce(sum(well), 0), count(*) FROM tool_runs "
                "WHERE tool = ? AND digest = ?",
                tool,
            ).fetchone()
        return int(row[0]), int(row[1])

    # forgetting

    def forget_fact(self, id: int) -> bool:
        """Remove the fact with this id; return False if no fact has it."""
        with self._database.writing("remove from") as db:
            return bool(db.execute("DELETE FROM facts WHERE id = ?", (id,)).rowcount)

    def expire(self, days: float) -> int:
        """Remove episodes and recipes that were not used for `days`; return their number."""
        before = time.time() - days * _DAY_SECONDS
        with self._database.writing("remove from") as db:
            gone = db.execute("DELETE FROM episodes WHERE ended < ?", (before,)).rowcount
            return gone + db.execute("DELETE FROM recipes WHERE used < ?", (before,)).rowcount


def _names_of(tools: Sequence[UsedTool]) -> str:
    return msgspec.json.encode(sorted({each.name for each in tools})).decode()


def _similar(task: str, texts: Sequence[str], limit: int) -> list[int]:
    """Return the places of the texts that are most like a task."""
    index = SearchIndex()
    index.add(*(document_of(str(place), "", text) for place, text in enumerate(texts)))
    return [int(each.document.id) for each in index.search(task, limit=limit).matches]
