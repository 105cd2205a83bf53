"""Named types of a schema, which may refer to each other and to themselves."""

from collections.abc import Iterable

from .names import type_name
from .types import ANY, Named, Record, Type, members_of, names_in

_MOST = 150  # of one schema
_WORDS = 4  # of those that tell what a type is, the last


class Definitions:
    """Types by name; no name is one of `taken`."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._known: dict[str, Record | Type] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._known)

    @property
    def is_full(self) -> bool:
        return len(self._known) >= _MOST

    def reserve(self, words: list[str]) -> Named:
        """Return a name for a type that is defined later, so that others can refer to it."""
        name = type_name(words[-_WORDS:], self._taken)
        self._taken.add(name)
        self._known[name] = ANY
        return Named(name)

    def define(self, named: Named, definition: Record | Type) -> None:
        self._known[named.name] = definition

    def settle(self) -> None:
        """Replace each type that refers to itself only by Any."""
        for name, each in self._known.items():
            if not isinstance(each, Record) and _says_only_itself(name, self._known):
                self._known[name] = ANY

    def needed(self, roots: Iterable[Type]) -> dict[str, Record | Type]:
        """Return the definitions that `roots` use, each after those that it names."""
        waiting = list(roots)
        found: set[str] = set()
        while waiting:
            new = [name for name in names_in(waiting.pop()) if name not in found]
            found.update(new)
            for name in new:
                waiting += _types_of(self._known[name])
        return _in_order({name: each for name, each in self._known.items() if name in found})


def _types_of(definition: Record | Type) -> list[Type]:
    """Return the types that a definition says itself."""
    if isinstance(definition, Record):
        return [field.type for field in definition.fields]
    return [definition]


def _says_only_itself(name: str, definitions: dict[str, Record | Type]) -> bool:
    """Tell whether nothing but names stands between a definition and itself: no type is like that."""
    waiting, seen = [name], set[str]()
    while waiting:
        definition = definitions[waiting.pop()]
        parts = () if isinstance(definition, Record) else members_of(definition)
        names = [each.name for each in parts if isinstance(each, Named)]
        if name in names:
            return True
        waiting += [each for each in names if each not in seen]
        seen.update(names)
    return False


def _in_order(definitions: dict[str, Record | Type]) -> dict[str, Record | Type]:
    """Return definitions, each behind those that it names, as far as they do not name each other."""
    ordered: dict[str, Record | Type] = {}
    begun: set[str] = set()
    waiting = list(reversed(definitions))
    while waiting:
        name = waiting[-1]
        if name in begun:  # all that it names is in order, or leads back to it
            ordered.setdefault(waiting.pop(), definitions[name])
            continue
        begun.add(name)
        names = (each for type in _types_of(definitions[name]) for each in names_in(type))
        waiting += reversed([each for each in names if each not in begun])
    return ordered
