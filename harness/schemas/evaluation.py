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
# Nested schemas, each up to four frames of the interpreter.  A stack overflow inside rpds, which
# `referencing` uses, is a PanicException, which is not an Exception.
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
    """The evaluation has as many complaints as it reports: one, if only validity is asked for."""


class At(NamedTuple):
    """The schema that a keyword stands in, the path of the value, and the resolver of references."""

    schema: dict[str, Any]
    where: Where
    resolver: Any


class Dialect(NamedTuple):
    """The keywords of one version of JSON Schema.

    `resource_of` turns a part of a schema into the resource that a resolver takes; `recursive` follows
    `$recursiveRef`.
    """

    keywords: dict[str, Keyword]
    resource_of: Callable[[Any], Any]
    recursive: Callable[[Any], Any]
    ref_stands_alone: bool  # keywords beside a $ref are ignored
    counts_contains: bool  # minContains and maxContains exist
    contains_evaluates: bool  # for unevaluatedItems, an item that matches `contains` is evaluated


class SchemaCache:
    """Results that are computed once for a schema: its compiled patterns, the keywords of each part,
    and its `enum`s as sets."""

    def __init__(self) -> None:
        self.keywords: dict[int, list[tuple[Keyword, Any]]] = {}
        self.members: dict[int, frozenset[bytes]] = {}
        self.states = 0  # of all patterns together
        self._patterns: dict[str, Pattern | None] = {}

    def pattern(self, text: str, budget: Budget) -> Pattern | None:
        """Return the compiled pattern, or None if it needs backtracking or is too large."""
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
    """A value checked against a schema; `complaints` has the first `most` errors.

    Every method raises BudgetExceeded once the budget is used up.  `lenient` is for values that are
    schemas themselves: it accepts the `exclusiveMinimum: true` and `exclusiveMaximum: true` of draft 4.
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
        """Return the errors of `value`; empty if it is valid."""
        with contextlib.suppress(_Enough):
            self.apply(schema, value, (), resolver)
        return tuple(self.complaints)

    def apply(self, schema: Any, value: Any, where: Where, resolver: Any) -> None:
        """Check a part of the value against a part of the schema, and record its errors."""
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
        """Return the resolver of a part of the schema; an `$id` gives it another base."""
        if not isinstance(id := schema.get("$id"), str):
            return resolver
        self.spend(STEPS_PER_REFERENCE + len(id))
        return resolver.in_subresource(self.dialect.resource_of(schema))

    def is_valid(self, schema: Any, value: Any, at: At) -> bool:
        """Tell whether a value is valid, without recording errors."""
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
        self.complaints.append(f"{_path(where)}: {text}" if where else text)
        if len(self.complaints) == self._most:
            raise _Enough

    @property
    def is_quiet(self) -> bool:
        """Whether no complaints are recorded."""
        return self._quiet

    def show(self, value: Any) -> str:
        """Return the head of a value for a complaint; empty while no complaints are recorded."""
        return "" if self._quiet else _shown(value)

    def matches(self, pattern: str, text: str) -> bool:
        """Tell whether a pattern matches in a text; True for a pattern that cannot be compiled."""
        compiled = self.cache.pattern(pattern, self.budget)
        return compiled is None or compiled.found_in(text, self.spend)

    def key(self, value: Any) -> bytes:
        """Return the canonical bytes of a value, after spending for its parts."""
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
        """Return the values of an `enum` in canonical form, computed once."""
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
    """Return bytes that are equal for equal JSON: 1 equals 1.0, and 1 does not equal true."""
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
