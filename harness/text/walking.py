"""Walking through values: every text of a JSON value, and the parts of a text that are replaced."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self, TypeVar


class Place(Protocol):
    """The place of a value within another one."""

    def entry(self, name: str) -> Self:
        """Return the place of the entry of that name."""

    def item(self) -> Self:
        """Return the place of the items of a list."""


_P = TypeVar("_P", bound=Place)


def changed(
    value: Any, place: _P, change: Callable[[Any, _P], Any], rename: Callable[[str], str]
) -> Any:
    """Return a JSON value with each text, number and constant changed by `change`, which gets its
    place, and each name of an entry by `rename`; names that become equal are numbered."""
    if isinstance(value, list):
        return [changed(each, place.item(), change, rename) for each in value]
    if not isinstance(value, dict):
        return change(value, place)
    made: dict[str, Any] = {}
    numbers = itertools.count(2)
    for name, each in value.items():
        word = own = rename(name)
        while own in made:
            own = f"{word} {next(numbers)}"
        made[own] = changed(each, place.entry(name), change, rename)
    return made


def spliced(text: str, parts: Iterable[tuple[int, int, str]]) -> str:
    """Return `text` with each part, from start to end, replaced; parts are in order and apart."""
    made, end = [], 0
    for start, stop, put in parts:
        made += [text[end:start], put]
        end = stop
    return "".join([*made, text[end:]])
