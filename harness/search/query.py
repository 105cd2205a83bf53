"""Queries: their words, the weight of each, and the weight that a document must have to answer.

Pure, over the words of the documents.
"""

import heapq
from typing import NamedTuple

from ..text.hidden import visible
from .postings import Postings
from .words import MAX_CHARACTERS, alternatives, words

_MAX_WORDS = 32  # of a query, the rarest
# A query of at most this many words names a tool; a longer one is a sentence, most of whose words are
# about the case at hand (a place, a title) and not about a tool.
_KEYWORDS = 4
_MOST_HINTED, _MAX_HINTED = 5, 40  # words of a query that a hint repeats, and characters of each


class ParsedQuery(NamedTuple):
    """A parsed query; a document answers if it has `demand` of the weight of `telling`."""

    query: str
    rarities: dict[str, int]
    telling: dict[str, int]
    demand: int
    names_it: bool  # a few words that name a tool, and not a sentence


def parse_query(query: str, postings: Postings) -> ParsedQuery:
    """Parse a query into its words, at most the 32 rarest, with the weight of each.

    The documents decide whether a word such as `GitHub` is one word or two.
    """
    chosen: dict[str, None] = {}
    for whole, humps in alternatives(query):
        apart = all(word in postings for word in humps)
        joined = any(word in postings for word in whole)
        chosen.update(dict.fromkeys(whole if joined and not apart else humps))
    rarities = {word: postings.rarity(word) for word in chosen}
    rarest = heapq.nsmallest(_MAX_WORDS, rarities, key=lambda word: (-rarities[word], word))
    kept = {word: rarities[word] for word in rarest}
    telling = {word: rarity for word, rarity in kept.items() if not word.isdigit()}
    names_it = len(query[:MAX_CHARACTERS].split()) <= _KEYWORDS
    demand = _demand(sum(telling.values()), postings, names_it=names_it)
    return ParsedQuery(query, kept, telling, demand, names_it)


def _demand(worth: int, postings: Postings, *, names_it: bool) -> int:
    """Return the weight that a document must have to answer; the others then need half of it.

    A query that names a tool demands a quarter of its weight; a sentence demands a quarter of the
    weight of a word that no document has.
    """
    return ((worth if names_it else postings.rarity("")) + 3) // 4


def why_nothing(query: str, postings: Postings) -> str:
    """Return a hint why nothing answers a query, and what to do."""
    said = {run: words(run) for run in query[:MAX_CHARACTERS].split()}
    unknown = [
        visible(run, _MAX_HINTED) for run, stems in said.items()
        if stems and not any(word in postings for word in stems)
    ]  # fmt: skip
    if unknown:
        each = ", ".join(f'"{run}"' for run in unknown[:_MOST_HINTED])
        return f"no tool has {each}: say in other words what the tool should do, or make one"
    if any(said.values()):
        return "no tool has enough of these words: use fewer, or others"
    return "say in two or three words what the tool should do"
