"""Documents by number, by id, by name and by facet (server, state, kind, tag).

Pure.  `postings.py` has their words.
"""

import functools
from collections.abc import Collection, Iterator, Set
from typing import Any, NamedTuple

from .documents import Document
from .words import MAX_CHARACTERS, squeezed

_JOINTS, _PUNCTUATION = "_-.", "\"'`()[]{}<>,;:!?."


class Filter(NamedTuple):
    """The documents that may be found: of `server`, with all `tags`, with one of `states` and one of
    `kinds`, and with one of `ids`.  A missing field filters nothing; empty `ids` allow none."""

    server: str | None = None
    tags: Collection[str] = ()
    states: Collection[str] = ()
    kinds: Collection[str] = ()
    ids: Collection[str] | None = None


class DocumentStore:
    """Documents with indexes by id, name and facet; each keeps its number until it is removed."""

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
        """Add a document with a new id, and return its number."""
        number, self._next = self._next, self._next + 1
        self._numbers[document.id], self._documents[number] = number, document
        for key in _keys(document):
            self._names.setdefault(key, set()).add(number)
        for facet in _facets(document):
            self._facets.setdefault(facet, set()).add(number)
        return number

    def remove(self, id: str) -> int | None:
        """Remove a document, and return its number; None if the id is unknown."""
        number = self._numbers.pop(id, None)
        if number is not None:
            document = self._documents.pop(number)
            for key in _keys(document):
                _take(self._names, key, number)
            for facet in _facets(document):
                _take(self._facets, facet, number)
        return number

    def allowed(self, only: Filter) -> Set[int] | None:
        """Return the documents that a filter allows; None for all."""
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
        """Return the documents whose name equals the query, or a word of it that can only be a name."""
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
    """Return the keys under which a document is found by name."""
    names = (document.name, document.full_name)
    return {document.id, *names, *map(squeezed, names)} - {""}


def _keys_asked(query: str) -> Iterator[str]:
    """Yield the keys of names in a query, the most explicit first.

    A word of a sentence is a name if it is not written like an ordinary word.
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
    """Remove a number from a set, and the set when it is empty."""
    sets[key].discard(number)
    if not sets[key]:
        del sets[key]
