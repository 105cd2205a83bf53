"""Evaluation of a value against a JSON Schema: the walk, its budget and its complaints.

Every step spends from a budget before it is done, so a small schema cannot ask for unbounded work.  The
libraries at hand cannot be bounded from outside: jsonschema compares every member of an `enum` with
every value, and writes the whole value into each of its complaints; jsonschema-rs took 7.6 GiB for
2,000 branches of an `anyOf` and a text of 1 MiB (measured with 0.60), and cannot be interrupted.
`keywords.py` has the keywords.
"""

import contextlib
import json
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

from ...policies.errors import BudgetExceeded
from ...runner.budget import Budget
from .patterns import Pattern, Unsupported, compile_pattern

MOST_COMPLAINTS = 10
STEPS_PER_SCHEMA = 5
_STEPS_PER_KEYWORD = 5
STEPS_PER_REFERENCE = 40
_STEPS_PER_KEY = 5  # for each part of a value that is compared
# Of schemas that lead to each other at one moment, each up to four frames of the interpreter: where its
# stack ends inside rpds, which `referencing` uses, that is a PanicException, and no Exception.
_MOST_DEPTH = 160
_MOST_STATES = 50_000  # of the patterns of one schema; each takes some 250 bytes
_CHARACTERS_PER_STEP = 32  # of texts that are compared, copied or encoded
_COMPLAINT_CHARACTERS = 300
SHOWN_CHARACTERS = 200  # of a text within a complaint
SHOWN_PARTS = 8
_SHOWN_DEPTH = 3
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
Where = tuple[Any, ...]  # (where the parent is, name or index); () is the top
Keyword = Callable[["Evaluation", Any, Any, "At"], None]


class _Enough(Exception):  # noqa: N818 - ends the evaluation
    """There are as many complaints as are told; where only validity is asked for, one."""


class At(NamedTuple):
    """Where a keyword stands, which part of the value it is about, and how references are resolved."""

    schema: dict[str, Any]
    where: Where
    resolver: Any


class Dialect(NamedTuple):
    """The keywords of one version of JSON Schema.

    `resource_of` makes of a part of a schema what resolvers take, `recursive` follows `$recursiveRef`.
    """

    keywords: dict[str, Keyword]
    resource_of: Callable[[Any], Any]
    recursive: Callable[[Any], Any]
    ref_stands_alone: bool  # what stands beside a $ref is ignored
    counts_contains: bool  # there are minContains and maxContains
    contains_evaluates: bool


class SchemaCache:
    """What is worked out once for a schema: the keywords of each part, and its `enum`s as sets."""

    def __init__(self) -> None:
        self.keywords: dict[int, list[tuple[Keyword, Any]]] = {}
        self.members: dict[int, frozenset[bytes]] = {}
        self.states = 0  # of all patterns together
        self._patterns: dict[str, Pattern | None] = {}

    def pattern(self, text: str, budget: Budget) -> Pattern | None:
        """Return the pattern; None for one that cannot be matched in linear time, or is too large."""
        if text not in self._patterns:
            try:
                compiled = compile_pattern(text, budget.spend)
                self.states += len(compiled.states)
            except Unsupported:
                compiled = None
            if self.states > _MOST_STATES:
                raise BudgetExceeded(f"patterns with more than {_MOST_STATES} states together")
            self._patterns[text] = compiled
        return self._patterns[text]


class Evaluation:
    """One value against one schema; `complaints` says what is wrong, the first `most`.

    Every method raises BudgetExceeded once the budget is used up.  `lenient` accepts `true` for
    `exclusiveMinimum` and `exclusiveMaximum`, which draft 4 had, where it meets them in the value.
    """

    def __init__(
        self, dialect: Dialect, cache: SchemaCache, budget: Budget, *,
        lenient: bool = False, most: int = MOST_COMPLAINTS,
    ) -> None:  # fmt: skip
        self.dialect = dialect
        self.cache = cache
        self.budget = budget
        self.spend = budget.spend
        self.complaints: list[str] = []
        self._most = most
        self._lenient = lenient
        self._quiet = False
        self._depth = 0

    def run(self, schema: Any, value: Any, resolver: Any) -> tuple[str, ...]:
        """Return what is wrong with `value`; empty if nothing is."""
        with contextlib.suppress(_Enough):
            self.apply(schema, value, (), resolver)
        return tuple(self.complaints)

    def apply(self, schema: Any, value: Any, where: Where, resolver: Any) -> None:
        """Note what is wrong with a part of the value according to a part of the schema."""
        self.spend(STEPS_PER_SCHEMA)
        if schema is True:
            return
        if schema is False:
            self.complain(where, f"{self.show(value)} is not allowed here")
            return
        if self._lenient and isinstance(value, bool) and where and where[1] in _EXCLUSIVE:
            return
        at = At(schema, where, self.resolver_in(schema, resolver))
        self.go_deeper()
        for keyword, given in self._keywords(schema):
            self.spend(_STEPS_PER_KEYWORD)
            keyword(self, given, value, at)
        self.come_back()

    def go_deeper(self) -> None:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise BudgetExceeded(f"more than {_MOST_DEPTH} schemas lead to each other")

    def come_back(self) -> None:
        self._depth -= 1

    def resolver_in(self, schema: dict[str, Any], resolver: Any) -> Any:
        """Return what resolves references in a part of the schema: another one below an `$id`."""
        if not isinstance(id := schema.get("$id"), str):
            return resolver
        self.spend(STEPS_PER_REFERENCE + len(id))
        return resolver.in_subresource(self.dialect.resource_of(schema))

    def is_valid(self, schema: Any, value: Any, at: At) -> bool:
        """Tell whether nothing is wrong, without noting what."""
        before, depth, self._quiet = self._quiet, self._depth, True
        try:
            self.apply(schema, value, at.where, at.resolver)
        except _Enough:
            return False
        finally:
            self._quiet, self._depth = before, depth
        return True

    def complain(self, where: Where, text: str) -> None:
        if self._quiet:
            raise _Enough
        if len(text) > _COMPLAINT_CHARACTERS:
            text = f"{text[:_COMPLAINT_CHARACTERS]}..."
        self.complaints.append(f"{_path(where)}: {text}")
        if len(self.complaints) == self._most:
            raise _Enough

    def show(self, value: Any) -> str:
        """Return a value for a complaint, the head of it if it is long; nothing if none is told."""
        return "" if self._quiet else _shown(value)

    def matches(self, pattern: str, text: str) -> bool:
        """Tell whether a pattern is in a text, or cannot be looked for."""
        compiled = self.cache.pattern(pattern, self.budget)
        return compiled is None or compiled.found_in(text, self.spend)

    def key(self, value: Any) -> bytes:
        """Return the same bytes for the same JSON."""
        self._pay_for(value)
        return canonical(value)

    def _pay_for(self, value: Any) -> None:
        waiting = [value]
        while waiting:
            each = waiting.pop()
            self.spend(_STEPS_PER_KEY)
            if isinstance(each, str):
                self.spend(len(each) // _CHARACTERS_PER_STEP)
            elif isinstance(each, list):
                waiting += each
            elif isinstance(each, dict):
                self.spend(sum(map(len, each)) // _CHARACTERS_PER_STEP)
                waiting += each.values()

    def members(self, values: list[Any]) -> frozenset[bytes]:
        known = self.cache.members.get(id(values))
        if known is None:
            known = frozenset(map(self.key, values))
            self.cache.members[id(values)] = known
        return known

    def _keywords(self, schema: dict[str, Any]) -> list[tuple[Keyword, Any]]:
        known = self.cache.keywords.get(id(schema))
        if known is None:
            self.spend(len(schema))
            keywords = self.dialect.keywords
            if self.dialect.ref_stands_alone and "$ref" in schema:
                known = [(keywords["$ref"], schema["$ref"])]
            else:
                known = [
                    (keywords[name], given) for name, given in schema.items() if name in keywords
                ]
            self.cache.keywords[id(schema)] = known
        return known


def _path(where: Where) -> str:
    parts: list[str] = []
    while where:
        where, step = where
        parts.append(f"[{step}]" if isinstance(step, int) else _name(step))
    return ascii("$" + "".join(reversed(parts)))[1:-1]


def _name(step: str) -> str:
    return f".{step}" if step.isidentifier() and len(step) < 100 else f"[{step[:100]!r}]"


def _shown(value: Any, depth: int = _SHOWN_DEPTH) -> str:
    if isinstance(value, str):
        return repr(value[:SHOWN_CHARACTERS])
    if isinstance(value, list):
        parts = [_shown(each, depth - 1) for each in value[:SHOWN_PARTS]] if depth else []
        return f"[{', '.join(parts)}{', ...' if len(parts) < len(value) else ''}]"
    if isinstance(value, dict):
        some = islice(value.items(), SHOWN_PARTS if depth else 0)
        parts = [f"{_shown(name)}: {_shown(each, depth - 1)}" for name, each in some]
        return f"{{{', '.join(parts)}{', ...' if len(parts) < len(value) else ''}}}"
    return repr(value)


def canonical(value: Any) -> bytes:
    """Return the same bytes for the same JSON: 1 and 1.0 are, 1 and true are not."""
    if type(value) is int:  # most members of an enum are a number or a text
        return b"%d" % value
    return json.dumps(_plain(value), sort_keys=True).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value
