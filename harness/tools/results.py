"""`Results`: results that are too long for their caller, kept on the host to be read in parts.

Filters of results: they remove content from results of tools before a caller sees it.

The broker calls a filter with the spec of the tool and a JSON value, which is a result or the text of
an error.  The filter returns the value to pass on, or a `Filtered`, which also counts the removals by
kind.  If a filter raises, the call fails and nothing is passed on.
"""

import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from ...policies.errors import ToolArgumentsInvalid
from ..schemas.spec import ToolOwner, ToolSpec
from ..text.redaction import changed, spliced
from ..text.secrets import find_secrets, names_no_secret, secret_named

KEPT_BYTES = 64 * 1024 * 1024
OF_ONE_BYTES = KEPT_BYTES // 4
_DEEPEST = 8
_FEW = 3  # items of an inner list that a head shows
_SHORT = 200  # characters of an inner text
_SLICE = 10_000
READ_RESULT = ToolSpec(
    name="results.read",
    description="Read a slice of a long result, as the text of its JSON.",
    owner=ToolOwner.DEVELOPER,
    idempotent=True,
    parameters={
        "type": "object",
        "properties": {
            "result_id": {"type": "string"},
            "start": {"type": "integer", "minimum": 0},
            "characters": {"type": "integer", "minimum": 1},
        },
        "required": ["result_id"],
        "additionalProperties": False,
    },
)

READ_ALL = ToolSpec(
    name="results.read_all",
    description="Return the whole of a result that was too large; without result_id the last one.",
    owner=ToolOwner.DEVELOPER,
    idempotent=True,
    parameters={
        "type": "object",
        "properties": {"result_id": {"type": "string"}},
        "additionalProperties": False,
    },
)


class KeptResult(NamedTuple):
    owner: str  # the execution or session that may read it
    text: str

    @property
    def size(self) -> int:
        return sys.getsizeof(self.text)


class Results:
    """The long results of one broker.

    Beyond `of_one_bytes` the owner's oldest results are dropped, beyond `kept_bytes` the oldest of all.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES, of_one_bytes: int = OF_ONE_BYTES) -> None:
        self._lock = threading.Lock()
        self._most, self._most_of_one = kept_bytes, of_one_bytes
        self._kept: OrderedDict[str, KeptResult] = OrderedDict()
        self._used = 0
        self._used_by: dict[str, int] = {}

    def fit(self, value: Any, text: str, limit: int, owner: str) -> Any:
        """Return the replacement of `value`, whose JSON is `text`: its head and, if it is kept, the
        id for reading the rest."""
        frame: dict[str, Any] = {"truncated": True, "characters": len(text)}
        if name := self._keep(KeptResult(owner, text)):
            call = "call_tool('results.read', {'result_id': ..., 'start': 0, 'characters': 10000})"
            frame |= {"result_id": name, "notice": call}
        else:
            frame["notice"] = "too long to keep: ask for less"
        return {**frame, "head": head_of(value, limit - len(json.dumps(frame)) - 16)}

    def keep(self, text: str, owner: str) -> str:
        """Keep a result, whose JSON is `text`, and return its id; "" if it is too long."""
        return self._keep(KeptResult(owner, text)) or ""

    def read_all(self, arguments: dict[str, Any], owner: str) -> Any:
        """Return a kept result, by default the owner's last one.

        Raises ToolArgumentsInvalid if it is not kept.
        """
        with self._lock:
            own = (name for name, kept in reversed(self._kept.items()) if kept.owner == owner)
            name = arguments.get("result_id") or next(own, "")
            kept = self._kept.get(name)
        if kept is None or kept.owner != owner:
            raise ToolArgumentsInvalid(f"result {name!r} is not kept, or not yours")
        return json.loads(kept.text)

    def read(self, arguments: dict[str, Any], owner: str, limit: int) -> dict[str, Any]:
        """Return a slice of a kept result's JSON, as `READ_RESULT` says, of at most `limit` bytes.

        Raises ToolArgumentsInvalid if it is not kept.
        """
        name, start = arguments["result_id"], int(arguments.get("start", 0))
        with self._lock:
            kept = self._kept.get(name)
        if kept is None or kept.owner != owner:
            raise ToolArgumentsInvalid(f"result {name!r} is not kept, or not yours")
        length = min(int(arguments.get("characters", _SLICE)), limit // 8)
        text = kept.text[start : start + length]
        end = start + len(text)
        return {"text": text, "start": start, "next": end if end < len(kept.text) else None}

    def _keep(self, kept: KeptResult) -> str | None:
        """Keep a result and return its id, dropping the oldest ones for it; None if it is too long."""
        if kept.size > self._most_of_one:
            return None
        name = os.urandom(8).hex()
        with self._lock:
            while self._used_by.get(kept.owner, 0) + kept.size > self._most_of_one:
                self._drop(
                    next(key for key, each in self._kept.items() if each.owner == kept.owner)
                )
            while self._used + kept.size > self._most:
                self._drop(next(iter(self._kept)))
            self._kept[name] = kept
            self._count(kept.owner, kept.size)
        return name

    def _drop(self, name: str) -> None:
        gone = self._kept.pop(name)
        self._count(gone.owner, -gone.size)

    def _count(self, owner: str, size: int) -> None:
        self._used += size
        self._used_by[owner] = self._used_by.get(owner, 0) + size
        if not self._used_by[owner]:
            del self._used_by[owner]


def head_of(value: Any, limit: int) -> Any:
    """Return the beginning of `value` as valid JSON of at most `limit` characters."""
    if isinstance(value, str):
        return value[: max(0, limit // 6 - 2)]  # a character takes at most six: \\uXXXX
    if not isinstance(value, list | dict):
        return value if len(json.dumps(value)) <= limit else None
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    shown: list[tuple[Any, Any]] = []
    left = limit - 2
    for key, each in items:
        short = _shortened(each, _DEEPEST)
        left -= len(json.dumps(short)) + (
            len(json.dumps(key)) + 4 if isinstance(value, dict) else 2
        )
        if left < 0:
            break
        shown.append((key, short))
    return dict(shown) if isinstance(value, dict) else [each for _, each in shown]


def _shortened(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _SHORT else value[:_SHORT] + "..."
    if depth == 0 or not isinstance(value, list | dict):
        return value if not isinstance(value, list | dict) else "..."
    if isinstance(value, list):
        return [_shortened(each, depth - 1) for each in value[:_FEW]]
    return {key: _shortened(each, depth - 1) for key, each in list(value.items())[: 4 * _FEW]}


ResultFilter = Callable[[ToolSpec, Any], Any]
Hits = dict[str, int]  # kind -> count
_LONGEST_NAME = 100


class Filtered(NamedTuple):
    """The value to pass on, and how often each kind of content was removed."""

    value: Any
    hits: Hits  # the filter names its kinds


def name_of(each: ResultFilter) -> str:
    return getattr(each, "__name__", type(each).__name__)


class RedactSecrets:
    """Redacts text that looks like a key, a password or a token (text/leaks.py)."""

    def __call__(self, spec: ToolSpec, value: Any) -> Filtered:
        hits: Hits = {}
        cleaned = _without_secrets(value, hits)
        return Filtered(cleaned if hits else value, hits)


class CapRows:
    """Cuts every list to its first `rows` items, and adds a notice."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __call__(self, spec: ToolSpec, value: Any) -> Filtered:
        longest = _longest(value)
        if longest <= self._rows:
            return Filtered(value, {})
        frame = {
            "truncated": True, "rows": longest, "kept_rows": self._rows,
            "notice": f"lists were cut to {self._rows} items: ask for less",
            "head": _cut(value, self._rows),
        }  # fmt: skip
        return Filtered(frame, {"rows": longest - self._rows})


class _Named(str):
    """The name of the nearest entry; the items of a list share it."""

    __slots__ = ()

    def entry(self, name: str) -> "_Named":
        return _Named(name[-_LONGEST_NAME:])

    def item(self) -> "_Named":
        return self


def _without_secrets(value: Any, hits: Hits) -> Any:
    def change(leaf: Any, name: _Named) -> Any:
        return _of_key(name, leaf, hits) if isinstance(leaf, str) else leaf

    return changed(value, _Named(), change, lambda name: _cleaned(name, hits))


def _of_key(key: str, value: str, hits: Hits) -> str:
    kind = secret_named(key, value)
    if not kind:
        return _cleaned(value, hits, is_name=names_no_secret(key))
    hits[kind] = hits.get(kind, 0) + 1
    return f"[redacted {kind}]"


def _cleaned(text: str, hits: Hits, *, is_name: bool = False) -> str:
    """Return a text with its secrets redacted.

    A name, such as an id or a cursor, may look random without being a secret.
    """
    leaks = find_secrets(text, at_random=not is_name)
    for leak in leaks:
        hits[leak.kind] = hits.get(leak.kind, 0) + 1
    return spliced(text, [(leak.start, leak.end, f"[redacted {leak.kind}]") for leak in leaks])


def _longest(value: Any) -> int:
    if isinstance(value, dict):
        return max(map(_longest, value.values()), default=0)
    if isinstance(value, list):
        return max(len(value), max(map(_longest, value), default=0))
    return 0


def _cut(value: Any, rows: int) -> Any:
    if isinstance(value, dict):
        return {key: _cut(each, rows) for key, each in value.items()}
    return [_cut(each, rows) for each in value[:rows]] if isinstance(value, list) else value
