"""Documents by number, by id, by what they are called, and by what they are of.

Pure.  What they say is in `postings.py`.
"""

import functools
from collections.abc import Collection, Iterator, Set
from typing import Any, NamedTuple

from .documents import Document
from .words import MAX_CHARACTERS, squeezed

_JOINTS, _PUNCTUATION = "_-.", "\"'`()[]{}<>,;:!?."


class Filter(NamedTuple):
    """Which documents may be found: all that have one of each that is given, and all of `tags`; of
    `ids`, where they are given, none means none."""

    server: str | None = None
    tags: Collection[str] = ()
    states: Collection[str] = ()
    kinds: Collection[str] = ()
    ids: Collection[str] | None = None


class DocumentStore:
    """Documents that can be looked up; each has a number as long as it is there."""

    def __init__(self) -> None:
        self._next = 0
        self._documents: dict[int, Document] = {}
        self._numbers: dict[str, int] = {}
        self._facets: dict[tuple[str, str], set[int]] = {}
        self._names: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._documents)

    def __contains__(self, id: str) -> bool:
        return id in self._numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self._documents)

    def __getitem__(self, number: int) -> Document:
        return self._documents[number]

    def number(self, id: str) -> int:
        return self._numbers[id]

    def id(self, number: int) -> str:
        return self._documents[number].id

    def add(self, document: Document) -> int:
        """Add a document whose id is not there, and return its number."""
        number, self._next = self._next, self._next + 1
        self._numbers[document.id], self._documents[number] = number, document
        for key in _keys(document):
            self._names.setdefault(key, set()).add(number)
        for facet in _facets(document):
            self._facets.setdefault(facet, set()).add(number)
        return number

    def remove(self, id: str) -> int | None:
        """Remove a document, and return the number that it had, if it was there."""
        number = self._numbers.pop(id, None)
        if number is not None:
            document = self._documents.pop(number)
            for key in _keys(document):
                _take(self._names, key, number)
            for facet in _facets(document):
                _take(self._facets, facet, number)
        return number

    def allowed(self, only: Filter) -> Set[int] | None:
        """Return which documents a filter lets through; None: all."""
        sets = [self._facets.get(("tag", tag), set()) for tag in only.tags]
        if only.ids is not None:
            sets.append({self._numbers[id] for id in only.ids if id in self._numbers})
        if only.server is not None:
            sets.append(self._facets.get(("server", only.server), set()))
        for facet, values in (("state", only.states), ("kind", only.kinds)):
            if values:
                sets.append(
                    set().union(*(self._facets.get((facet, value), set()) for value in values))
                )
        return functools.reduce(set.intersection, sorted(sets, key=len)) if sets else None

    def called(self, query: str, allowed: Set[int] | None) -> list[int]:
        """Return the documents whose name a query is, or holds as a word that can only be a name."""
        found: dict[int, None] = {}
        for key in _keys_asked(query):
            numbers = self._names.get(key, ())
            for number in sorted(numbers, key=self.id):
                if allowed is None or number in allowed:
                    found[number] = None
        return list(found)


def _facets(document: Document) -> Iterator[tuple[str, str]]:
    yield "server", document.server
    yield "state", document.state
    yield "kind", document.kind
    for tag in document.tags:
        yield "tag", tag


def _keys(document: Document) -> set[str]:
    """Return what a document may be called by."""
    names = (document.name, document.full_name)
    return {document.id, *names, *map(squeezed, names)} - {""}


def _keys_asked(query: str) -> Iterator[str]:
    """Give what a query may call a document by, that meant most plainly first.

    A single word of a sentence is meant as a name if nobody would write it otherwise.
    """
    query = query[:MAX_CHARACTERS].strip()
    yield query
    yield squeezed(query)
    for run in query.split():
        bare = run.strip(_PUNCTUATION)
        if any(mark in bare for mark in _JOINTS) or not (bare.islower() or bare.istitle()):
            yield bare
            yield squeezed(bare)


def _take(sets: dict[Any, set[int]], key: object, number: int) -> None:
    """Take a number out of a set, and the set away with the last."""
    sets[key].discard(number)
    if not sets[key]:
        del sets[key]
