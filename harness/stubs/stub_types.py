"""Types of a tool's arguments and result, and identifiers, common to Python and TypeScript.

Types are data only: `reader.py` makes them from JSON Schema, and the modules of the two languages
write them.  An identifier is made from an arbitrary name, and always is one, whatever the input: no
other text of a schema becomes code.
"""

import itertools
import keyword
import re
import unicodedata
from collections.abc import Container, Iterable
from typing import Literal, TypeAlias

import msgspec

from ..text.hidden import is_hidden

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
    """A list whose first items have types of their own; `rest`: the type of further ones."""

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
    """Return the union of `members`: each once, or Anything if one of them is."""
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


_LONGEST = 80
_WORDS = re.compile(r"[A-Za-z0-9]+")
# Names that annotations and stubs use.
RESERVED = frozenset({
    "Any", "Literal", "NotRequired", "TYPE_CHECKING", "TypeAlias", "TypedDict", "UNSET", "__debug__",
    "annotations", "answer", "bool", "call_tool", "dict", "float", "given", "int", "list", "more",
    "object", "str", "tools",
})  # fmt: skip
# Names that declarations in TypeScript use, or that no Python type may have.
_TYPES = frozenset({"Arguments", "Array", "False", "None", "True"})


def identifier(word: str, taken: Container[str] = ()) -> str:
    """Return a Python identifier for `word` that is not in `taken`.

    Other characters become `_`; a keyword gets a trailing `_`. Two underscores at the beginning, which
    mean something to classes and to type checkers, become one.
    """
    plain = unicodedata.normalize("NFKC", word[:_LONGEST])
    plain = "".join(letter if _may_stand_in_one(letter) else "_" for letter in plain)
    plain = re.sub(r"^__+", "_", unicodedata.normalize("NFKC", plain)) or "_"
    plain = plain if plain.isidentifier() else f"_{plain}"
    plain = f"{plain}_" if keyword.iskeyword(plain) else plain
    return _free(plain if plain.isidentifier() else "_", taken)


def _may_stand_in_one(letter: str) -> bool:
    """Tell whether an identifier may hold `letter`; hidden ones that PEP 3131 allows are excluded."""
    return f"a{letter}".isidentifier() and not is_hidden(letter)


def type_name(words: Iterable[str], taken: Container[str]) -> str:
    """Return an ASCII name for a type that `words` describe: `CreateIssueLabel`."""
    parts = [part for word in words for part in _WORDS.findall(word[:_LONGEST])]
    name = "".join(part[:1].upper() + part[1:] for part in parts)[:_LONGEST]
    name = name if name[:1].isalpha() else f"Type{name}"
    name = name if name not in _TYPES else f"{name}_"
    return _first(name, name, taken)


def ascii_identifier(word: str, taken: Container[str] = ()) -> str:
    """Return an identifier for `word` that every language understands."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", identifier(word))
    return _free(name if re.match(r"[A-Za-z_]", name) else f"_{name}", taken)


def _free(name: str, taken: Container[str]) -> str:
    """Return `name`, or the first of name_, name_2, name_3 ... that is not taken."""
    return _first(name, name if name.endswith("_") else f"{name}_", taken)


def _first(name: str, stem: str, taken: Container[str]) -> str:
    numbered = (f"{stem}{number}" for number in itertools.count(2))
    each = (free for free in itertools.chain((name, stem), numbered) if free not in RESERVED)
    return next(free for free in each if free not in taken)
