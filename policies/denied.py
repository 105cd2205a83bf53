"""Denied paths: patterns that hide names beneath shown paths.  Pure.

A pattern is an absolute path.  In a component, `*`, `?` and `[...]` match characters of one name, a
leading dot included; the component `**` matches any number of directories.  A component also denies its
literal name, so the name `a[1]` denies a file called `a[1]`.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

_MAGIC = frozenset("*?[")
ANY_DEPTH = "**"

_Tree = Mapping[str, Any]  # name -> the tree of names denied beneath it; None denies it whole
_Rest = tuple[str, ...]  # the components of a pattern that are not matched yet


class Denied:
    """The names that patterns deny beneath one directory; false if there are none."""

    def __init__(self, trees: tuple[_Tree, ...], rests: frozenset[_Rest]) -> None:
        self._trees = trees
        self._rests = rests

    def __bool__(self) -> bool:
        return bool(self._trees or self._rests)

    @property
    def names(self) -> frozenset[str] | None:
        """The only names with a denied path at or beneath them; None if a pattern may match any."""
        if self._rests:
            return None
        return frozenset(name for tree in self._trees for name in tree)

    def enter(self, name: str) -> "Denied | None":
        """Return the denied paths beneath the entry `name`; None if the entry itself is denied."""
        trees = []
        for tree in self._trees:
            below = tree.get(name, _NOTHING)
            if below is None:
                return None
            if below:
                trees.append(below)
        rests: set[_Rest] = set()
        for rest in self._rests:
            if not _advance(rest, name, rests):
                return None
        return Denied(tuple(trees), frozenset(rests))

    def usual(self) -> "Denied":
        """Return the denied paths beneath an entry that no pattern names."""
        other = self.enter(_NO_NAME)
        return other if other is not None else Denied((), _at_any_depth(self._rests))

    def has_more_than(self, other: "Denied") -> bool:
        """Tell whether a pattern may deny a name here that it does not deny beneath `other`."""
        return any(each not in other._trees for each in self._trees) or not (
            self._rests <= other._rests
        )

    def also(self, other: "Denied") -> "Denied":
        """Return the paths that `self` or `other` denies."""
        return Denied(self._trees + other._trees, self._rests | other._rests)

    def beneath(self, path: str) -> "Denied | None":
        """Return the denied paths beneath the absolute `path`; None if `path` itself is denied.

        `self` must be the denied paths of the root directory.
        """
        here: Denied | None = self
        for name in path.split("/"):
            if not name:
                continue
            if not here:
                return here
            here = here.enter(name)
        return here

    def denies(self, path: str) -> bool:
        """Tell whether the absolute `path` is denied, by itself or by a directory above it."""
        return self.beneath(path) is None


_NOTHING: _Tree = {}
_NO_NAME = "\0"  # matches wildcards alone


def _at_any_depth(rests: frozenset[_Rest]) -> frozenset[_Rest]:
    return frozenset(rest for rest in rests if rest[0] == ANY_DEPTH)


def denied_by(patterns: Iterable[str]) -> Denied:
    """Return the paths that `patterns` deny, beneath the root directory."""
    tree: dict[str, Any] = {}
    rests = set()
    for pattern in patterns:
        parts = tuple(part for part in pattern.split("/") if part)
        _plant(tree, parts)
        if is_pattern(pattern):
            rests.add(parts)
    return Denied((tree,) if tree else (), frozenset(rests))


def patterns_beneath(patterns: Iterable[str], directories: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of `patterns` that deny something beneath one of `directories`."""
    return tuple(each for each in patterns if any(map(denied_by((each,)).beneath, directories)))


def is_pattern(path: str) -> bool:
    """Tell whether `path` holds a wildcard."""
    return not _MAGIC.isdisjoint(path)


def fixed_part(pattern: str) -> str:
    """Return the directory above the first component that holds a wildcard, or all of a plain path."""
    while is_pattern(pattern):
        pattern = os.path.dirname(pattern)
    return pattern


def _plant(tree: dict[str, Any], parts: _Rest) -> None:
    for name in parts[:-1]:
        below = tree.setdefault(name, {})
        if below is None:  # a directory above is denied already
            return
        tree = below
    if parts:
        tree[parts[-1]] = None


def _advance(rest: _Rest, name: str, rests: set[_Rest]) -> bool:
    """Add the remainder of the pattern `rest` beneath `name` to `rests`; return False if it denies
    `name`."""
    head, further = rest[0], rest[1:]
    if head == ANY_DEPTH:
        rests.add(rest)
        return bool(further) and _advance(further, name, rests)
    if name == head or _matches(name, head):
        if not further:
            return False
        rests.add(further)
    return True


def _matches(name: str, pattern: str) -> bool:
    if not is_pattern(pattern):
        return False
    import fnmatch  # most policies have no pattern

    return fnmatch.fnmatchcase(name, pattern)
