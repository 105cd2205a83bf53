"""Denied paths: patterns that hide names beneath shown paths.  Pure.

A pattern is an absolute path.  In a component, `*`, `?` and `[...]` match characters of one name, a
leading dot included; the component `**` matches any number of directories.  A component also denies its
literal name, so the name `a[1]` denies a file called `a[1]`.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

_MAGIC = re.compile(r"[*?\[]")
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


def is_pattern(path: str) -> bool:
    """Tell whether `path` holds a wildcard."""
    return bool(_MAGIC.search(path))


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
    """Add to `rests` what is left of the pattern `rest` beneath `name`; False if it denies `name`."""
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
    import fnmatch  # most policies have no pattern

    return fnmatch.fnmatchcase(name, pattern)
