"""`ToolStore`: the SQLite file of made tools, with their versions, makers and counts of use.

Similarity of tools: parameters of the same kinds, and the same source or description.

`UsageCounts`: the calls and failures of made tools, written to the store in batches.
"""

import contextlib
import difflib
import os
import re
import sqlite3
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from ...policies.errors import RegistryError, ToolExists, ToolInvalid, ToolQuotaExceeded
from ..database import Database
from ..schemas.spec import ToolSpec, ToolState, hash_of, key_of

_FORMAT = 1001  # runs count from 1, vector caches from 2001
_MAX_SPEC_BYTES = 1024 * 1024
_MAX_PAGES = 262_144  # pages of 4 KiB: 1 GiB
_MAX_VERSIONS = 100_000  # versions of all tools, because a program may make them in a loop
_MAX_REMOVED = 10_000  # removed names whose last version number is remembered
_SCHEMA = """
CREATE TABLE tools (
    key TEXT PRIMARY KEY, name TEXT NOT NULL, maker TEXT NOT NULL, latest INTEGER NOT NULL,
    removed INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE versions (
    key TEXT NOT NULL, version INTEGER NOT NULL, state TEXT NOT NULL, shape TEXT NOT NULL,
    spec BLOB NOT NULL, uses INTEGER NOT NULL DEFAULT 0, failures INTEGER NOT NULL DEFAULT 0,
    in_a_row INTEGER NOT NULL DEFAULT 0, UNIQUE (key, version)
);
CREATE INDEX shapes ON versions (shape);
"""
_LATEST = """SELECT v.key, v.version, v.state, v.spec FROM tools AS t
JOIN versions AS v ON v.key = t.key AND v.version = t.latest WHERE t.removed = 0"""


class ToolUsage(NamedTuple):
    """Counts of a version: its uses, its failures, and its failures since the last success."""

    uses: int = 0
    failures: int = 0
    in_a_row: int = 0


class Quota(NamedTuple):
    """The quota of one maker's tools: versions, and bytes of all their records.

    In memory a record takes some 17 times its bytes (measured with schemas of 30,000 literals).
    """

    bytes: int = 4 * 1024 * 1024
    versions: int = 2000


class ToolStore:
    """Versions of tools by key.  Safe from many threads; not across a fork."""

    def __init__(
        self, path: str | os.PathLike[str] | None = None,
        quota: Quota = Quota(),  # noqa: B008 - a constant
        *, must_exist: bool = False,
    ) -> None:  # fmt: skip
        """Open or make the file at `path`, or one in memory; raises RegistryError."""
        self._quota = quota
        self._database = Database(path, "registry", _FORMAT, _SCHEMA, must_exist=must_exist)
        self._reading, self._writing = self._database.reading, self._database.writing
        self.path = self._database.path
        with self._reading("prepare") as db:
            db.execute(f"PRAGMA max_page_count = {_MAX_PAGES}")
            db.execute("CREATE INDEX IF NOT EXISTS makers ON tools (maker)")

    # reading

    def changes(self) -> int:
        """Return a number that changes when another process has written."""
        with self._reading() as db:
            return int(db.execute("PRAGMA data_version").fetchone()[0])

    def get(self, key: str, version: int | None = None) -> ToolSpec | None:
        """Return a version of a tool, by default the latest; None if it does not exist."""
        if version is None:
            found = self._select(f"{_LATEST} AND t.key = ?", key)
        else:
            found = self._select(
                "SELECT v.key, v.version, v.state, v.spec FROM tools AS t JOIN versions AS v "
                "ON v.key = t.key WHERE t.removed = 0 AND t.key = ? AND v.version = ?",
                key,
                version,
            )
        return next(iter(found), None)

    def versions(self, key: str) -> list[ToolSpec]:
        """Return every version of a tool, the oldest first."""
        return self._select(
            "SELECT v.key, v.version, v.state, v.spec FROM tools AS t JOIN versions AS v "
            "ON v.key = t.key WHERE t.removed = 0 AND t.key = ? ORDER BY v.version",
            key,
        )

    def latest(self) -> list[ToolSpec]:
        """Return the latest version of every tool, by key."""
        return self._select(f"{_LATEST} ORDER BY t.key")

    def of_shape(self, shape: str, most: int) -> list[ToolSpec]:
        """Return at most `most` latest versions with parameters of a shape (tool_store.py)."""
        return self._select(f"{_LATEST} AND v.shape = ? ORDER BY t.key LIMIT ?", shape, most)

    def usage(self, key: str, version: int) -> ToolUsage:
        with self._reading() as db:
            row = db.execute(
                "SELECT uses, failures, in_a_row FROM versions WHERE key = ? AND version = ?",
                (key, version),
            ).fetchone()
        return ToolUsage(*row) if row else ToolUsage()

    # writing

    def fill(self, specs: Iterable[ToolSpec]) -> None:
        """Store tools with new names in one transaction; raises RegistryError."""
        with self._writing("fill") as db:
            for spec in specs:
                key = key_of(spec.name)
                row = (key, spec.name, spec.provenance.maker, spec.version)
                db.execute("INSERT INTO tools (key, name, maker, latest) VALUES (?, ?, ?, ?)", row)
                self._insert(db, key, shape_of(spec.parameters), spec)

    def _insert(self, db: sqlite3.Connection, key: str, shape: str, spec: ToolSpec) -> int:
        blob = msgspec.json.encode(spec)
        if len(blob) > _MAX_SPEC_BYTES:
            raise ToolInvalid(
                f"{spec.name}: the record has {len(blob)} bytes, at most {_MAX_SPEC_BYTES} fit",
                tool=spec.name,
            )
        db.execute(
            "INSERT INTO versions (key, version, state, shape, spec) VALUES (?, ?, ?, ?, ?)",
            (key, spec.version, spec.state.value, shape, blob),
        )
        return len(blob)

    def add(
        self, key: str, shape: str, spec: ToolSpec, finished: Callable[[int], ToolSpec],
        *, is_new: bool = False,
    ) -> ToolSpec:  # fmt: skip
        """Store `finished(version)` as the next version of the tool that `spec` names.

        Raises ToolExists if another maker has the name, or with `is_new` a tool that is not retired,
        and ToolQuotaExceeded.
        """
        with self._writing("add to") as db:
            maker, latest = self._last(db, key, spec)
            if is_new:
                _check_new(db, key, spec)
            made = finished(latest + 1)
            if db.execute("SELECT count(*) FROM versions").fetchone()[0] >= _MAX_VERSIONS:
                raise RegistryError(f"registry {self.path} is full: {_MAX_VERSIONS} versions")
            db.execute(
                "INSERT OR REPLACE INTO tools (key, name, maker, latest) VALUES (?, ?, ?, ?)",
                (key, made.name, maker, made.version),
            )
            self._insert(db, key, shape, made)
            self._check_quota(db, made)
        return made

    def _check_quota(self, db: sqlite3.Connection, made: ToolSpec) -> None:
        maker = made.provenance.maker
        versions, size = db.execute(
            "SELECT count(*), total(length(v.spec)) FROM tools AS t "
            "JOIN versions AS v ON v.key = t.key WHERE t.maker = ? AND t.removed = 0",
            (maker,),
        ).fetchone()
        for name, has, most in (
            ("maker_bytes", int(size), self._quota.bytes),
            ("maker_versions", versions, self._quota.versions),
        ):
            if has > most:
                raise ToolQuotaExceeded(
                    f"{made.name}: with it the tools of {maker or 'this maker'} have {has} "
                    f"{name.partition('_')[2]}, more than {most}",
                    f"remove tools that are not needed, or raise {name} of the ToolRegistry",
                    tool=made.name,
                )

    def _last(self, db: sqlite3.Connection, key: str, spec: ToolSpec) -> tuple[str, int]:
        """Return the maker of the tool, and its last version number, which is not used again."""
        maker = spec.provenance.maker
        query = "SELECT name, maker, latest, removed FROM tools WHERE key = ?"
        row = db.execute(query, (key,)).fetchone()
        if row is None:
            return maker, 0
        name, owner, latest, removed = row
        if not removed and owner != maker:
            raise ToolExists(
                f"{spec.name}: there is {name}, which another agent made",
                "choose another name",
                tool=spec.name,
                existing=name,
            )
        return maker, latest

    def remove(self, key: str) -> None:
        """Remove every version of a tool.

        The file remembers the last version number of the removed tools with the most versions, and
        does not use those numbers again.
        """
        with self._writing("remove from") as db:
            db.execute("UPDATE tools SET removed = 1, maker = '' WHERE key = ?", (key,))
            db.execute("DELETE FROM versions WHERE key = ?", (key,))
            db.execute(
                "DELETE FROM tools WHERE removed = 1 AND key IN (SELECT key FROM tools "
                "WHERE removed = 1 ORDER BY latest DESC, key LIMIT -1 OFFSET ?)",
                (_MAX_REMOVED,),
            )

    def set_state(self, key: str, version: int, state: ToolState) -> None:
        """Set the state of a version, and reset its failures in a row."""
        with self._writing("write to") as db:
            db.execute(
                "UPDATE versions SET state = ?, in_a_row = 0 WHERE key = ? AND version = ?",
                (state.value, key, version),
            )

    def count(self, key: str, version: int, more: ToolUsage, *, well: bool, retire_at: int) -> bool:
        """Add to the counts of a version; retire it after `retire_at` failures in a row.

        `well`: among the calls that may retire it one succeeded, and `more.in_a_row` failures came
        after that.  Return whether it is retired.
        """
        with self._writing("write to") as db:
            db.execute(
                "UPDATE versions SET uses = uses + ?, failures = failures + ?, "
                "in_a_row = ? + CASE WHEN ? THEN 0 ELSE in_a_row END WHERE key = ? AND version = ?",
                (more.uses, more.failures, more.in_a_row, well, key, version),
            )
            changed = db.execute(
                "UPDATE versions SET state = ? WHERE key = ? AND version = ? AND in_a_row >= ?",
                (ToolState.RETIRED.value, key, version, retire_at),
            )
            return changed.rowcount > 0

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._database.close()

    # access

    def _select(self, query: str, *values: object) -> list[ToolSpec]:
        with self._reading() as db:
            rows = db.execute(query, values).fetchall()
        return [self._spec(*row) for row in rows]

    def _spec(self, key: str, version: int, state: str, blob: bytes) -> ToolSpec:
        try:
            spec = _DECODER.decode(blob)
            if spec.source_hash and spec.source_hash != hash_of(spec.source_code):
                raise ValueError("its source is not the one that was stored")
            return msgspec.structs.replace(spec, version=version, state=ToolState(state))
        except (ValueError, TypeError, msgspec.DecodeError) as error:
            raise RegistryError(
                f"registry {self.path}: the record of {key!a}@{version} is damaged: {error}",
                "remove the tool, or restore the file from a copy",
            ) from None


def _check_new(db: sqlite3.Connection, key: str, spec: ToolSpec) -> None:
    found = db.execute(f"{_LATEST} AND t.key = ?", (key,)).fetchone()
    if found and found[2] != ToolState.RETIRED.value:
        raise ToolExists(
            f"{spec.name}: a tool of that name was made meanwhile", "use it", tool=spec.name,
            existing=spec.name,
        )  # fmt: skip


_DECODER = msgspec.json.Decoder(ToolSpec)


NEARLY = 0.9  # one word of ten may differ; "celsius to fahrenheit" is not "fahrenheit to celsius"
_NEAR = 0.7  # similarity from which tools are tested against each other
_MAX_WORDS = 100
_LEAST_WORDS = 2
_WORD = re.compile(r"[a-z0-9]+")
_EMPTY = frozenset(
    "a an and as at by for from given if in into is it its of on or the that this to with".split()  # noqa: SIM905
)


def shape_of(parameters: dict[str, Any]) -> str:
    """Return the sorted kinds of the parameters; their names are ignored."""
    properties = parameters.get("properties", {})
    required = parameters.get("required", ())
    kinds = [
        f"{_kind(schema)}{'' if name in required else '?'}" for name, schema in properties.items()
    ]
    return ",".join(sorted(kinds))


def _kind(schema: object) -> str:
    if not isinstance(schema, dict):
        return "any"
    if isinstance(kind := schema.get("type"), str):
        return kind
    return next((each for each in ("enum", "$ref", "anyOf", "type") if each in schema), "any")


def most_alike(spec: ToolSpec, others: list[ToolSpec]) -> ToolSpec | None:
    """Return the tool of `others` with the source of `spec`, or with nearly its description."""
    source = _source_of(spec)
    if source and (same := next((each for each in others if _does_what(each, spec, source)), None)):
        return same
    words = _words(spec.description)
    if len(words) < _LEAST_WORDS:
        return None
    found = [(_ratio(words, _words(each.description)), each) for each in others]
    ratio, best = max(found, key=lambda each: each[0], default=(0.0, None))
    return best if ratio >= NEARLY else None


def are_near(some: ToolSpec, other: ToolSpec) -> bool:
    """Tell whether two tools have the same source, or most words of their descriptions in common."""
    if (source := _source_of(some)) and source == _source_of(other):
        return True
    words, others = _words(some.description), _words(other.description)
    return min(len(words), len(others)) >= _LEAST_WORDS and _ratio(words, others) >= _NEAR


def _does_what(other: ToolSpec, spec: ToolSpec, source: str) -> bool:
    may = (other.calls, other.grants, other.requirements) == (
        spec.calls, spec.grants, spec.requirements,
    )  # fmt: skip
    return may and _source_of(other) == source


def _source_of(spec: ToolSpec) -> str:
    """Return a source without its function's name, blank lines and trailing blanks."""
    lines = re.sub(rf"\b{re.escape(spec.function)}\b", "_", spec.source_code).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip()) if spec.function else ""


def _ratio(some: list[str], others: list[str]) -> float:
    return difflib.SequenceMatcher(None, some, others, autojunk=False).ratio()


def _words(text: str) -> list[str]:
    words = [word for word in _WORD.findall(text.lower()) if word not in _EMPTY]
    return [re.sub(r"(?<=\w{3})(?:ing|es|ed|(?<!s)s|e)$", "", word) for word in words[:_MAX_WORDS]]


_WRITTEN_AFTER = 256  # successful uses; each write waits for the disk
VersionKey = tuple[str, int]  # the key of a name (tool_names.key_of), and a version


class _UnwrittenCounts:
    """The calls of one version since its counts were last written."""

    def __init__(self) -> None:
        self.uses = self.failures = self.in_a_row = 0
        self.well = False

    def add(self, *, well: bool, may_retire: bool) -> None:
        self.uses += 1
        self.failures += not well
        if may_retire:
            self.in_a_row = 0 if well else self.in_a_row + 1
            self.well |= well

    @property
    def usage(self) -> ToolUsage:
        return ToolUsage(self.uses, self.failures, self.in_a_row)


class UsageCounts:
    """Counts of one store.  It writes failures at once, uses after 256; the caller holds the lock."""

    def __init__(self, store: ToolStore, retired_after: int) -> None:
        self._store = store
        self._retired_after = retired_after
        self._unwritten: dict[VersionKey, _UnwrittenCounts] = {}
        self._failing: set[VersionKey] = set()  # versions whose last call failed

    def note(self, key: VersionKey, *, well: bool, may_retire: bool = True) -> bool:
        """Count a call, which failed unless `well`; tell whether it retired the version.

        Only a call with `may_retire` retires it.  Counts that cannot be written now are written with
        the next call.
        """
        count = self._unwritten.setdefault(key, _UnwrittenCounts())
        count.add(well=well, may_retire=may_retire)
        if not well or count.uses >= _WRITTEN_AFTER or key in self._failing:
            with contextlib.suppress(RegistryError):
                return self._write(key)
        return False

    def write_all(self) -> bool:
        """Write all counts; tell whether that retired a version.  Raises RegistryError."""
        retired = [self._write(key) for key in list(self._unwritten)]
        return any(retired)

    def usage(self, key: VersionKey) -> ToolUsage:
        """Return the written counts, and add the uses that are not written yet."""
        known = self._store.usage(*key)
        return known._replace(uses=known.uses + self._unwritten.get(key, _UnwrittenCounts()).uses)

    def _write(self, key: VersionKey) -> bool:
        count = self._unwritten[key]
        retired = self._store.count(
            *key, count.usage, well=count.well, retire_at=self._retired_after
        )
        del self._unwritten[key]
        if count.in_a_row:
            self._failing.add(key)
        else:
            self._failing.discard(key)
        return retired
