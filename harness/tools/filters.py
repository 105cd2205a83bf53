"""Filters of results: they remove content from what tools return before a caller sees it.

The broker calls a filter with the spec of the tool and a JSON value, which is a result or the text of
an error.  The filter returns the value to pass on, or a `Filtered`, which also counts the removals by
kind.  If a filter raises, the call fails and nothing is passed on.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..schemas.spec import ToolSpec
from ..text.secrets import find_secrets, names_no_secret, secret_named
from ..text.walking import changed, spliced

ResultFilter = Callable[[ToolSpec, Any], Any]
Hits = dict[str, int]  # kind -> how many
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
    """Cuts every list to its first `rows` items, and says so beside them."""

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
    """Return a value with its secrets redacted."""

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
    """Return the length of the longest list."""
    if isinstance(value, dict):
        return max(map(_longest, value.values()), default=0)
    if isinstance(value, list):
        return max(len(value), max(map(_longest, value), default=0))
    return 0


def _cut(value: Any, rows: int) -> Any:
    if isinstance(value, dict):
        return {key: _cut(each, rows) for key, each in value.items()}
    return [_cut(each, rows) for each in value[:rows]] if isinstance(value, list) else value
