"""One index over everything that can be called by name: made tools, the host's, MCP servers', skills.

Pure, over documents.  A name that is known stands first, whatever else matches; a query that nothing
answers finds nothing, and says what to do.  The same documents and the same query give the same order.
"""

import functools
import heapq
import threading
from collections.abc import Collection, Iterable, Iterator, Set
from typing import Any, NamedTuple

import msgspec

from .documents import Document
from .fusing import Meaning, fuse
from .postings import Postings
from .words import MAX_CHARACTERS, alternatives, squeezed, visible, words

MAX_FOUND = 200  # how far pages reach; who has not found it by then should ask otherwise
_MAX_WORDS = 32  # of a query, the rarest
# A query of so many words names what is looked for; a longer one is a sentence, most of whose words
# are about the case at hand - a place, a title - and no tool's.
_KEYWORDS = 4
_EXTRA = 8  # results asked for beyond a page, because some may not answer the query
_NEAR = 50  # documents that words, and that meaning, put forward for one order of both
_MEANS_IT = 0.3  # cosine from which a text answers a query that shares no word with it
_FURTHER = 4  # how many times as many documents are looked at, if most do not answer
_MOST_HINTED, _MAX_HINTED = 5, 40  # words of a query that a hint repeats, and characters of each
_JOINTS, _PUNCTUATION = "_-.", "\"'`()[]{}<>,;:!?."


class Filter(NamedTuple):
    """Which documents may be found: all that have one of each that is given, and all of `tags`."""

    server: str | None = None
    tags: Collection[str] = ()
    states: Collection[str] = ()
    kinds: Collection[str] = ()


_ALL = Filter()


class Match(msgspec.Struct, frozen=True):
    """A document that was found; `named`: the query is or holds its name."""

    document: Document
    named: bool = False


class Found(msgspec.Struct, frozen=True):
    """A page of what was found; `more` tells whether there is another, `hint` why there is nothing."""

    matches: tuple[Match, ...] = ()
    more: bool = False
    hint: str = ""


class SearchIndex:
    """Documents, to be found by name, by what they say, and with `meaning` by what they mean.

    Safe from many threads.
    """

    def __init__(self, documents: Iterable[Document] = (), meaning: Meaning | None = None) -> None:
        self._lock = threading.RLock()
        self._postings = Postings()
        self._meaning = meaning
        self._numbers: dict[str, int] = {}
        self._documents: dict[int, Document] = {}
        self._next = 0
        self._facets: dict[tuple[str, str], set[int]] = {}
        self._names: dict[str, set[int]] = {}
        self.add(*documents)

    def __len__(self) -> int:
        return len(self._documents)

    def __contains__(self, id: str) -> bool:
        return id in self._numbers

    def add(self, *documents: Document) -> None:
        """Add documents, each in place of the one that has its id."""
        with self._lock:
            if self._meaning and documents:
                self._meaning.add({each.id: _text(each) for each in documents})
            for document in documents:
                self._remove(document.id)
                self._add(document)

    def remove(self, id: str) -> bool:
        """Remove a document; tell whether it was there."""
        with self._lock:
            there = self._remove(id)
            if there and self._meaning:
                self._meaning.remove(id)
            return there

    def browse(self, only: Filter = _ALL, limit: int = 50, offset: int = 0) -> Found:
        """Return a page of all documents that a filter lets through, by full name."""
        with self._lock:
            allowed = self._allowed(only)
            numbers = self._documents if allowed is None else allowed
            each = sorted(
                (self._documents[number] for number in numbers),
                key=lambda document: (document.full_name, document.id),
            )
        page = each[max(0, offset) :][: max(0, limit)]
        return Found(tuple(map(Match, page)), max(0, offset) + len(page) < len(each))

    def search(self, query: str, only: Filter = _ALL, limit: int = 5, offset: int = 0) -> Found:
        """Return a page of what answers a query, the best first; `hint` tells why nothing does."""
        offset, limit = max(0, min(offset, MAX_FOUND)), max(0, limit)
        limit = min(limit, MAX_FOUND - offset)
        with self._lock:
            allowed = self._allowed(only)
            asked = self._asked(query)
            named = self._named(query, allowed)
            ranked = self._ranked(asked, allowed, offset + limit + 1 + len(named))
            matches = [Match(self._documents[number], True) for number in named]
            known = set(named)
            matches += [Match(self._documents[each]) for each in ranked if each not in known]
            hint = "" if matches else self._hint(query, allowed)
        page = tuple(matches[offset : offset + limit])
        return Found(page, bool(page) and len(matches) > offset + limit < MAX_FOUND, hint)

    # Documents

    def _add(self, document: Document) -> None:
        number, self._next = self._next, self._next + 1
        self._numbers[document.id], self._documents[number] = number, document
        self._postings.add(number, _fields(document))
        for key in _keys(document):
            self._names.setdefault(key, set()).add(number)
        for facet in _facets(document):
            self._facets.setdefault(facet, set()).add(number)

    def _remove(self, id: str) -> bool:
        number = self._numbers.pop(id, None)
        if number is None:
            return False
        document = self._documents.pop(number)
        self._postings.remove(number)
        for key in _keys(document):
            _take(self._names, key, number)
        for facet in _facets(document):
            _take(self._facets, facet, number)
        return True

    def _allowed(self, only: Filter) -> Set[int] | None:
        """Return which documents a filter lets through; None: all."""
        sets = [self._facets.get(("tag", tag), set()) for tag in only.tags]
        if only.server is not None:
            sets.append(self._facets.get(("server", only.server), set()))
        for facet, values in (("state", only.states), ("kind", only.kinds)):
            if values:
                sets.append(
                    set().union(*(self._facets.get((facet, value), set()) for value in values))
                )
        return functools.reduce(set.intersection, sorted(sets, key=len)) if sets else None

    # Queries

    def _asked(self, query: str) -> "_Asked":
        """Return what a query asks for: its words, the rarest of too many, and what each is worth.

        Of a word that may be several, as `GitHub`, the documents decide which it is.
        """
        chosen: dict[str, None] = {}
        for whole, humps in alternatives(query):
            apart = all(word in self._postings for word in humps)
            joined = any(word in self._postings for word in whole)
            chosen.update(dict.fromkeys(whole if joined and not apart else humps))
        rarities = {word: self._postings.rarity(word) for word in chosen}
        rarest = heapq.nsmallest(_MAX_WORDS, rarities, key=lambda word: (-rarities[word], word))
        kept = {word: rarities[word] for word in rarest}
        telling = {word: rarity for word, rarity in kept.items() if not word.isdigit()}
        return _Asked(query, kept, telling, self._demand(query, sum(telling.values())))

    def _demand(self, query: str, worth: int) -> int:
        """Return how much of a query's worth a document must have to answer it.

        Half of it, where the query names what it looks for.  Of a sentence, half as much as a word
        is worth that no document has: more than any word that many have.
        """
        if len(query[:MAX_CHARACTERS].split()) <= _KEYWORDS:
            return (worth + 1) // 2
        return (self._postings.rarity("") + 1) // 2

    def _named(self, query: str, allowed: Set[int] | None) -> list[int]:
        """Return the documents whose name a query is, or holds as a word that can only be a name."""
        found: dict[int, None] = {}
        for key in _keys_asked(query):
            numbers = self._names.get(key, ())
            for number in sorted(numbers, key=self._order):
                if allowed is None or number in allowed:
                    found[number] = None
        return list(found)[:MAX_FOUND]

    def _order(self, number: int) -> str:
        return self._documents[number].id

    def _ranked(self, asked: "_Asked", allowed: Set[int] | None, count: int) -> list[int]:
        """Return the best documents that answer, the first `count` of them or all."""
        if self._meaning:
            return self._fused(self._meaning, asked, allowed)[:count]
        known = sum(asked.telling[word] for word in asked.telling if word in self._postings)
        return self._answering(asked, allowed, count) if known >= asked.demand else []

    def _answering(self, asked: "_Asked", allowed: Set[int] | None, count: int) -> list[int]:
        """Return the best documents if one of them answers; the others need half as much for it.

        Looks further, once, if too few do.
        """
        best, kept = self._answer(asked, allowed, count + _EXTRA)
        if len(kept) < count and len(best) == count + _EXTRA:
            best, kept = self._answer(asked, allowed, _FURTHER * (count + _EXTRA))
        return kept[:count]

    def _answer(
        self, asked: "_Asked", allowed: Set[int] | None, count: int
    ) -> tuple[list[int], list[int]]:
        best = self._best(asked, allowed, count)
        covered = self._postings.covered(best, asked.telling)
        if all(worth < asked.demand for worth in covered.values()):
            return best, []
        return best, [each for each, worth in covered.items() if 2 * worth >= asked.demand]

    def _best(self, asked: "_Asked", allowed: Set[int] | None, count: int) -> list[int]:
        scored = self._postings.best(asked.rarities, count, allowed)
        ordered = sorted(scored, key=lambda number: (-scored[number], self._order(number)))
        return ordered[:count]

    def _fused(self, meaning: Meaning, asked: "_Asked", allowed: Set[int] | None) -> list[int]:
        """Return what words and what meaning put forward, in one order, if either answers."""
        ids = None if allowed is None else {self._order(number) for number in allowed}
        nearest = dict(meaning.nearest(asked.query[:MAX_CHARACTERS], _NEAR, ids))
        spoken = [self._order(number) for number in self._best(asked, allowed, _NEAR)]
        fused = [self._numbers[id] for id in fuse((spoken, list(nearest)))]
        covered = self._postings.covered(fused, asked.telling)
        return [
            number for number in fused
            if covered[number] >= asked.demand
            or nearest.get(self._order(number), 0.0) >= _MEANS_IT
        ]  # fmt: skip

    def _hint(self, query: str, allowed: Set[int] | None) -> str:
        """Say why nothing was found, and what to do."""
        if not self._documents or (allowed is not None and not allowed):
            return "there is nothing to find" + (" with this filter" if self._documents else "")
        said = {run: words(run) for run in query[:MAX_CHARACTERS].split()}
        unknown = [
            visible(run, _MAX_HINTED) for run, stems in said.items()
            if stems and not any(word in self._postings for word in stems)
        ]  # fmt: skip
        if unknown:
            each = ", ".join(f'"{run}"' for run in unknown[:_MOST_HINTED])
            return f"nothing here knows {each}: say in other words what it should do, or make it"
        if any(said.values()):
            return "nothing here has enough of these words: use fewer, or others"
        return "say in two or three words what it should do"


class _Asked(NamedTuple):
    """A query that was taken apart; `telling` are the words that a document must have `demand` of."""

    query: str
    rarities: dict[str, int]
    telling: dict[str, int]
    demand: int


def _fields(document: Document) -> tuple[list[str], ...]:
    """Return the words of a document, a list for each of FIELDS.  Server and tags name it too."""
    parameters = document.parameters
    return (
        words(f"{document.name} {document.server} {' '.join(document.tags)}"),
        words(document.description),
        words(" ".join([each.name for each in parameters])),
        words(" ".join([each.description for each in parameters])),
    )


def _text(document: Document) -> str:
    """Return what a document means, for who understands texts."""
    parameters = ", ".join(each.name for each in document.parameters)
    return f"{document.full_name}: {document.description} ({parameters})"[:MAX_CHARACTERS]


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
