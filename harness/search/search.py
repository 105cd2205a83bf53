"""`SearchIndex`: one index over everything that programs call by name (made tools, functions of the
host, tools of MCP servers, skills); models for search by meaning, shared by several indexes.

Pure, over documents.  A document whose name the query contains stands first; a query that shares no
informative word with any document finds nothing, and gets a hint.  The same documents and the same
query give the same order.
"""

import functools
import importlib.util
import os
import threading
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Protocol

import msgspec

from ...policies.errors import PolicyError
from ...policies.extras import how_to_install
from ..user_data import state_directory
from .documents import Document, DocumentStore, Filter
from .postings import MAX_CHARACTERS, ParsedQuery, Postings, apart, parse_query, why_nothing, words

MODEL_HELP = "search by meaning too, with the sentence encoder in this folder (extra semantic)"


class SemanticIndex(Protocol):
    """An index of texts by meaning; ids are those of documents."""

    def add(self, texts: dict[str, str]) -> None:
        """Add texts by id; each replaces the text with the same id."""

    def remove(self, id: str) -> None:
        """Remove a known text."""

    def nearest(self, query: str, count: int, allowed: Set[str] | None) -> list[tuple[str, float]]:
        """Return the ids of the `count` texts of `allowed` (default all) nearest to `query`, with their
        similarity: 1 is the same meaning, 0 an unrelated one."""


class Model:
    """A sentence encoder of a local folder, which makes a vector index for each search index.

    `cache` is a file that keeps the vectors of texts.  Safe from many threads.
    """

    def __init__(
        self, folder: str | os.PathLike[str], cache: str | os.PathLike[str] | None = None
    ) -> None:
        """Read the encoder; raises PolicyError if the folder or the extra is missing."""
        if any(importlib.util.find_spec(name) is None for name in ("numpy", "tokenizers")):
            raise PolicyError("the extra `semantic` is not installed", how_to_install("semantic"))
        from .encoder import Encoder, VectorIndex

        encoder = Encoder(Path(folder))
        self._make = functools.partial(VectorIndex, encoder, Path(cache) if cache else None)

    def meaning(self) -> SemanticIndex:
        """Return a new vector index, for one search index."""
        return self._make()


def model_of(given: "Model | str | os.PathLike[str] | None") -> Model | None:
    """Return the given model, or the model of a folder; raises PolicyError."""
    return Model(given) if isinstance(given, str | os.PathLike) else given


def commands_model(folder: str | None) -> Model | None:
    """Return the model of a command's `--model`, whose vectors are cached between commands."""
    if folder is None:
        return None
    directory = state_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PolicyError(f"cannot make {directory}: {error.strerror}") from None
    return Model(folder, directory / "vectors.db")


__all__ = ["MAX_FOUND", "Filter", "Match", "SearchIndex", "SearchPage"]

MAX_FOUND = 200  # results that pages reach; a better query is the way to find the rest
_EXTRA = 8  # results computed beyond a page, because some may not answer the query
_NEAR = 100  # documents that words and meaning each contribute to the fused order
# Cosine from which a text answers a query without a shared word.  For a sentence it is lower: most of a
# sentence is about the case at hand.
_MEANS_IT_IN_WORDS, _MEANS_IT = 0.3, 0.25
_FURTHER = 4  # factor of documents in the second attempt, if most do not answer
# Reciprocal rank fusion (Cormack, Clarke, Buettcher 2009) with 10 instead of their 60: an agent reads
# the first five results and not the first thousand, so the first places have to differ more.
_RANK_CONSTANT = 10
_ALL = Filter()


class Match(msgspec.Struct, frozen=True):
    """A document that was found; `named`: the query contains its name."""

    document: Document
    named: bool = False


class SearchPage(msgspec.Struct, frozen=True):
    """A page of results; `more` tells whether there is another, `hint` why there are no results."""

    matches: tuple[Match, ...] = ()
    more: bool = False
    hint: str = ""


class SearchIndex:
    """Documents, found by name, by words, and with `meaning` by similar meaning.

    Safe from many threads.
    """

    def __init__(
        self, documents: Iterable[Document] = (), meaning: SemanticIndex | None = None
    ) -> None:
        self._lock = threading.RLock()
        self._documents = DocumentStore()
        self._postings = Postings()
        self._meaning = meaning
        self.add(*documents)

    def __len__(self) -> int:
        return len(self._documents)

    def __contains__(self, id: str) -> bool:
        return id in self._documents

    def add(self, *documents: Document) -> None:
        """Add documents; each replaces the document with the same id."""
        with self._lock:
            if self._meaning and documents:
                self._meaning.add({each.id: _text(each) for each in documents})
            for document in documents:
                self._remove(document.id)
                self._postings.add(self._documents.add(document), _fields(document))

    def remove(self, id: str) -> bool:
        """Remove a document; return whether it was there."""
        with self._lock:
            there = self._remove(id)
            if there and self._meaning:
                self._meaning.remove(id)
            return there

    def _remove(self, id: str) -> bool:
        number = self._documents.remove(id)
        if number is not None:
            self._postings.remove(number)
        return number is not None

    def browse(self, only: Filter = _ALL, limit: int = 50, offset: int = 0) -> SearchPage:
        """Return a page of all documents that a filter allows, sorted by full name."""
        with self._lock:
            allowed = self._documents.allowed(only)
            each = sorted(
                (
                    self._documents[number]
                    for number in (self._documents if allowed is None else allowed)
                ),
                key=lambda document: (document.full_name, document.id),
            )
        page = each[max(0, offset) :][: max(0, limit)]
        return SearchPage(tuple(map(Match, page)), max(0, offset) + len(page) < len(each))

    def search(
        self, query: str, only: Filter = _ALL, limit: int = 5, offset: int = 0
    ) -> SearchPage:
        """Return a page of the documents that answer a query, the best first."""
        offset, limit = max(0, min(offset, MAX_FOUND)), max(0, limit)
        limit = min(limit, MAX_FOUND - offset)
        with self._lock:
            allowed = self._documents.allowed(only)
            asked = parse_query(query, self._postings)
            named = self._documents.called(query, allowed)[:MAX_FOUND]
            ranked = self._ranked(asked, allowed, offset + limit + 1 + len(named))
            matches = [Match(self._documents[number], True) for number in named]
            known = set(named)
            matches += [Match(self._documents[each]) for each in ranked if each not in known]
            hint = "" if matches else self._hint(query, allowed)
        page = tuple(matches[offset : offset + limit])
        return SearchPage(page, bool(page) and len(matches) > offset + limit < MAX_FOUND, hint)

    def _ranked(self, asked: ParsedQuery, allowed: Set[int] | None, count: int) -> list[int]:
        if self._meaning:
            return self._fused(self._meaning, asked, allowed)[:count]
        if not any(word in self._postings for word in asked.telling):
            return []
        return self._answering(asked, allowed, count)

    def _answering(self, asked: ParsedQuery, allowed: Set[int] | None, count: int) -> list[int]:
        """Return the best documents that share an informative word with the query and have at least
        half of the demanded weight, or half of the weight of the best one.

        Tries once with more documents if too few answer.
        """
        best, kept = self._answer(asked, allowed, count + _EXTRA)
        if len(kept) < count and len(best) == count + _EXTRA:
            best, kept = self._answer(asked, allowed, _FURTHER * (count + _EXTRA))
        return kept[:count]

    def _answer(
        self, asked: ParsedQuery, allowed: Set[int] | None, count: int
    ) -> tuple[list[int], list[int]]:
        best = self._best(asked, allowed, count)
        covered = self._postings.covered(best, asked.telling)
        enough = min(asked.demand, max(covered.values(), default=0))
        return best, [each for each, worth in covered.items() if worth and 2 * worth >= enough]

    def _best(self, asked: ParsedQuery, allowed: Set[int] | None, count: int) -> list[int]:
        scored = self._postings.best(asked.rarities, count, allowed)
        ordered = sorted(scored, key=lambda number: (-scored[number], self._documents.id(number)))
        return ordered[:count]

    def _fused(
        self, meaning: SemanticIndex, asked: ParsedQuery, allowed: Set[int] | None
    ) -> list[int]:
        """Return the documents that words and meaning contribute, in one order, if one of them answers.

        The others then need half as much of words or of meaning.
        """
        ids = None if allowed is None else {self._documents.id(number) for number in allowed}
        nearest = dict(meaning.nearest(asked.query[:MAX_CHARACTERS], _NEAR, ids))
        spoken = [self._documents.id(number) for number in self._best(asked, allowed, _NEAR)]
        fused = [self._documents.number(id) for id in fuse((spoken, list(nearest)))]
        covered = self._postings.covered(fused, asked.telling)
        near = _MEANS_IT_IN_WORDS if asked.names_it else _MEANS_IT
        shares = {
            number: max(
                covered[number] / max(1, asked.demand),
                nearest.get(self._documents.id(number), 0.0) / near,
            )
            for number in fused
        }
        if all(share < 1 for share in shares.values()):  # no document is near: words alone decide
            enough = max(covered.values(), default=0)
            return [each for each in fused if covered[each] and 2 * covered[each] >= enough]
        return [number for number in fused if shares[number] >= 0.5]

    def _hint(self, query: str, allowed: Set[int] | None) -> str:
        if not len(self._documents) or (allowed is not None and not allowed):
            filtered = " with this filter" if len(self._documents) else ""
            return f"there is nothing to find{filtered}"
        return why_nothing(query, self._postings)


def _fields(document: Document) -> tuple[list[str], ...]:
    """Return the words of a document, one list for each of FIELDS; server and tags count as name."""
    parameters = document.parameters
    return (
        words(f"{document.name} {document.server} {' '.join(document.tags)}"),
        words(document.description),
        words(" ".join([each.name for each in parameters])),
        words(" ".join([each.description for each in parameters])),
    )


def _text(document: Document) -> str:
    """Return the text of a document for the encoder, with names split into words."""
    parameters = ", ".join(apart(each.name) for each in document.parameters)
    return f"{apart(document.full_name)}: {document.description} ({parameters})"[:MAX_CHARACTERS]


def fuse(rankings: Sequence[Sequence[str]]) -> list[str]:
    """Merge rankings, best first, into one order by reciprocal rank; ties are sorted by id."""
    scores: dict[str, float] = {}
    for ranking in rankings:
        for place, id in enumerate(ranking, 1):
            scores[id] = scores.get(id, 0.0) + 1 / (_RANK_CONSTANT + place)
    return sorted(scores, key=lambda id: (-round(scores[id], 12), id))
