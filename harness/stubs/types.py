"""Types of a tool's arguments and result, common to Python and TypeScript.

Data only: `reader.py` makes them from JSON Schema, `python.py` and `typescript.py` write them.
"""

from typing import Literal, TypeAlias

import msgspec

Word: TypeAlias = Literal["any", "none", "bool", "int", "float", "str"]
Scalar: TypeAlias = str | int | bool | None


class _StubPart(msgspec.Struct, frozen=True):
    pass


class Plain(_StubPart, frozen=True):
    """A type that has a name in every language."""

    word: Word


class Literals(_StubPart, frozen=True):
    """One of a few values."""

    values: tuple[Scalar, ...]


class ListOf(_StubPart, frozen=True):
    item: "Type"


class TupleOf(_StubPart, frozen=True):
    """A list whose first items have types of their own; `rest` is that of further ones."""

    items: "tuple[Type, ...]"
    rest: "Type | None"


class MapOf(_StubPart, frozen=True):
    """An object with any keys."""

    value: "Type"


class UnionOf(_StubPart, frozen=True):
    members: "tuple[Type, ...]"


class Named(_StubPart, frozen=True):
    """A type that stands in `ToolSignature.definitions`."""

    name: str


Type: TypeAlias = Plain | Literals | ListOf | TupleOf | MapOf | UnionOf | Named


class Property(_StubPart, frozen=True):
    """A property; `wire` is its name, whatever that is, and `default` JSON in words."""

    wire: str
    type: Type
    required: bool
    description: str = ""
    default: str = ""


class Record(_StubPart, frozen=True):
    """An object with known keys."""

    fields: tuple[Property, ...]
    description: str = ""


class ToolSignature(_StubPart, frozen=True):
    """The parameters and the result of a tool.

    `more`: arguments beside `parameters` are allowed.  Names in `definitions` are ASCII identifiers,
    and not reserved words of either language.
    """

    name: str
    description: str
    parameters: tuple[Property, ...]
    more: bool
    result: Type
    definitions: dict[str, Record | Type]


ANY = Plain("any")
NONE = Plain("none")


def either(members: list[Type]) -> Type:
    """Return what is one of `members`: each once, and anything if one of them is that."""
    flat = [each for member in members for each in members_of(member)]
    if ANY in flat or not flat:
        return ANY
    values = [each.values for each in flat if isinstance(each, Literals)]
    others: list[Type] = [each for each in flat if not isinstance(each, Literals)]
    if values:
        others.insert(0, literals([value for group in values for value in group]))
    unique = tuple({repr(each): each for each in others}.values())
    return unique[0] if len(unique) == 1 else UnionOf(unique)


def literals(values: list[Scalar]) -> Literals:
    """Return one of `values`, each once: True is not 1."""
    return Literals(tuple({repr(value): value for value in values}.values()))


def members_of(type: Type) -> tuple[Type, ...]:
    """Return what `either` put together, or the one type that it is."""
    return type.members if isinstance(type, UnionOf) else (type,)


def names_in(type: Type) -> list[str]:
    """Return the names that stand in a type, each as often as it does."""
    if isinstance(type, Named):
        return [type.name]
    return [name for part in _parts(type) for name in names_in(part)]


def _parts(type: Type) -> tuple[Type, ...]:
    if isinstance(type, TupleOf):
        return (*type.items, *((type.rest,) if type.rest else ()))
    if isinstance(type, ListOf):
        return (type.item,)
    if isinstance(type, MapOf):
        return (type.value,)
    return type.members if isinstance(type, UnionOf) else ()
