"""Identifiers for programs, made from arbitrary names.

The result is always an identifier, whatever the input: no other text of a schema becomes code.
"""

import itertools
import keyword
import re
import unicodedata
from collections.abc import Container, Iterable

from ..text.hidden import is_hidden

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
    """Return a Python identifier for `word`, which is none of `taken`.

    What cannot stand in one is `_`; a keyword has `_` behind it.  Two underscores at the beginning,
    which mean something to classes and to type checkers, become one.
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
    """Return a name for a type of which `words` tell what it is, in ASCII: `CreateIssueLabel`."""
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
