"""What a query asks for: its words, what each is worth, and how much of that answers it.

Pure, over the words that documents have.
"""

import heapq
from typing import NamedTuple

from ..text.hidden import visible
from .postings import Postings
from .words import MAX_CHARACTERS, alternatives, words

_MAX_WORDS = 32  # of a query, the rarest
# A query of so many words names what is looked for; a longer one is a sentence, most of whose words
# are about the case at hand - a place, a title - and no tool's.
_KEYWORDS = 4
_MOST_HINTED, _MAX_HINTED = 5, 40  # words of a query that a hint repeats, and characters of each


class ParsedQuery(NamedTuple):
    """A query that was taken apart; `telling` are the words that a document must have `demand` of."""

    query: str
    rarities: dict[str, int]
    telling: dict[str, int]
    demand: int
    names_it: bool  # it is no sentence, but a few words for what is looked for


def parse_query(query: str, postings: Postings) -> ParsedQuery:
    """Return what a query asks for: its words, the rarest of too many, and what each is worth.

    Of a word that may be several, as `GitHub`, the documents decide which it is.
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
    """Return how much of a query's worth a document must have, so that others need half as much.

    A quarter of it, where the query names what it looks for.  Of a sentence, a quarter of what a
    word is worth that no document has.
    """
    return ((worth if names_it else postings.rarity("")) + 3) // 4


def why_nothing(query: str, postings: Postings) -> str:
    """Say why nothing answers a query, and what to do."""
    said = {run: words(run) for run in query[:MAX_CHARACTERS].split()}
    unknown = [
        visible(run, _MAX_HINTED) for run, stems in said.items()
        if stems and not any(word in postings for word in stems)
    ]  # fmt: skip
    if unknown:
        each = ", ".join(f'"{run}"' for run in unknown[:_MOST_HINTED])
        return f"nothing here knows {each}: say in other words what it should do, or make it"
    if any(said.values()):
        return "nothing here has enough of these words: use fewer, or others"
    return "say in two or three words what it should do"
