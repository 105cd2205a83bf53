"""Plain values: JSON of what programs return and pass, or the reason why there is none.

Dates and times become ISO 8601, decimals and UUIDs text, bytes base64, sets, tuples and iterators
lists, dataclasses objects, enumerations their values, scalars and arrays of numpy numbers and lists.
"""

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import msgspec

MOST_LEVELS = 64  # nesting of lists and objects; the checks of results accept no more
_MOST_ITEMS = 1_000_000  # taken from one iterator, which may be endless
_SHOWN = 80
SCALARS = frozenset(
    (str, int, bool, type(None))
)  # types of JSON except float, because NaN and infinity are not JSON
TEXT = frozenset((str,))
# Bytes become base64. The module binascii would be two more libraries in the memory of every cell.
_QUICK = msgspec.json.Encoder().encode


def quick_json(value: Any) -> bytes | None:
    """Return JSON of a text, an integer, a truth value or null, or of an object that holds such values
    only, under keys that are text: in a quarter of the time that `json` needs.

    None for any other value, and for one that is not JSON.
    """
    if type(value) is dict:
        is_quick = SCALARS.issuperset(map(type, value.values())) and TEXT.issuperset(
            map(type, value)
        )
    else:
        is_quick = type(value) in SCALARS
    try:
        return _QUICK(value) if is_quick else None
    except ValueError:  # a lone surrogate
        return None


class NotPlain(TypeError):  # noqa: N818 - what the value is
    """A value that JSON cannot hold; the message says its place and type."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self._why = why
        self._steps: list[str] = []

    def inside(self, step: str) -> "NotPlain":
        """Return the same error, one level further out."""
        self._steps.append(step)
        return self

    def __str__(self) -> str:
        return f"${''.join(reversed(self._steps))}: {self._why}"


def plain(value: Any, level: int = 0) -> Any:
    """Return `value` in the types of JSON; raises NotPlain, and exceptions of the value's own
    iterators."""
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return value
    if kind is str:
        return _text(value)
    if kind is float:
        return _number(value)
    if level > MOST_LEVELS:
        raise NotPlain(f"nested more than {MOST_LEVELS} deep, or it holds itself")
    if isinstance(value, Mapping):
        return _object(value, level)
    if isinstance(value, list | tuple):
        return _list(value, level)
    return _other(value, level)


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise NotPlain(f"a lone surrogate at character {error.start}") from None
    return value


def _number(value: float) -> float:
    if not math.isfinite(value):
        raise NotPlain(f"{value!r} is not a number of JSON")
    return value


def _list(value: Iterable[Any], level: int) -> list[Any]:
    made = []
    for place, each in enumerate(value):
        if place >= _MOST_ITEMS and isinstance(value, Iterator):
            raise NotPlain(f"an iterator of more than {_MOST_ITEMS} items")
        try:
            made.append(plain(each, level + 1))
        except NotPlain as error:
            raise error.inside(f"[{place}]") from None
    return made


def _object(value: Mapping[Any, Any], level: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, each in value.items():
        name = _text(key) if type(key) is str else _name(key)
        if name in made:
            raise NotPlain(f"two keys are {_shown(name)}")
        try:
            made[name] = plain(each, level + 1)
        except NotPlain as error:
            raise error.inside(f".{name[:_SHOWN]}") from None
    return made


def _name(key: Any) -> str:
    """Return the text that a key is: of numbers, true, false and null what json.dumps makes of them."""
    found = plain(key, MOST_LEVELS)
    if isinstance(found, list | dict):
        raise NotPlain(f"a key of type {type(key).__name__}")
    return found if isinstance(found, str) else json.dumps(found)


def _other(value: Any, level: int) -> Any:
    """Return any other object as a plain value; its type is looked up only if its module was
    imported."""
    for module, names, convert in _TYPES:
        known = sys.modules.get(module)
        if known and isinstance(value, tuple(getattr(known, name) for name in names)):
            return plain(convert(value), level)
    if isinstance(value, str | int | float):  # a subclass
        base = str if isinstance(value, str) else int if isinstance(value, int) else float
        return plain(_OF_ITSELF[base](value), level)
    if isinstance(value, bytes | bytearray | memoryview):
        return _QUICK(memoryview(value))[1:-1].decode()
    if isinstance(value, Set):
        return _list(_in_order(value), level)
    if hasattr(value, "dtype") and callable(getattr(value, "tolist", None)):  # numpy's
        return plain(value.tolist(), level + 1)
    if not isinstance(value, type) and hasattr(value, "__dataclass_fields__"):
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return _object(fields, level)
    if isinstance(value, Iterator | Sequence) or type(value) in _VIEWS:
        return _list(value, level)
    if hasattr(value, "__await__"):
        raise NotPlain(f"a {type(value).__name__} that was not awaited")
    raise NotPlain(f"an object of type {type(value).__name__}")


def _in_order(value: Set[Any]) -> Iterable[Any]:
    """Return the same order for the same set, where its items have one."""
    try:
        return sorted(value)
    except TypeError:
        return value


def _duration(value: Any) -> str:
    """Return ISO 8601 of a timedelta, as msgspec has it."""
    sign, value = ("-", -value) if value.days < 0 else ("", value)
    days = f"{value.days}D" if value.days else ""
    fraction = f".{value.microseconds:06}".rstrip("0") if value.microseconds else ""
    time = f"T{value.seconds}{fraction}S" if value.seconds or fraction or not days else ""
    return f"{sign}P{days}{time}"


def _shown(name: str) -> str:
    return ascii(name)[:_SHOWN]


_OF_ITSELF: dict[type, Any] = {str: str.__str__, int: int.__int__, float: float.__float__}
_VIEWS = tuple(type(getattr({}, name)()) for name in ("keys", "values", "items"))
_TYPES: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("enum", ("Enum",), lambda each: each.value),
    ("datetime", ("date", "time"), lambda each: each.isoformat()),
    ("datetime", ("timedelta",), _duration),
    ("decimal", ("Decimal",), str),
    ("uuid", ("UUID",), str),
    ("pathlib", ("PurePath",), str),
)
