"""An inverted index with BM25F: the words of documents, with their weights.

Pure.  The weight of a word in a document depends on that document alone, because lengths are compared
with constants and not with averages: adding or removing a document touches its own words only, and an
index does not depend on the order of additions.  Only the rarity of a word is computed for each query.

Scores are integers, so that the order of addition cannot change a rank.
"""

import heapq
import math
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple


class FieldWeight(NamedTuple):
    """The weight of a field; `usual` is its typical length in words."""

    weight: float
    usual: float
    slope: float  # how much less a longer field counts: 0 not at all, 1 in proportion


# A name tells what a tool does, its description how, its parameters with what: each counts half of the
# one before.  The length of a name matters less, because names are short.  Usual lengths are medians
# over 845 tools of MCP servers and of APIs.
FIELDS = (
    FieldWeight(4.0, 4, 0.5),  # name
    FieldWeight(2.0, 11, 0.75),  # description
    FieldWeight(1.0, 4, 0.75),  # names of parameters
    FieldWeight(1.0, 19, 0.75),  # descriptions of parameters
)
# BM25's usual 1.2 is for words that count 1 each; these count 2 in the mean of the fields.
_SATURATION = 1.2 * sum(field.weight for field in FIELDS) / len(FIELDS)
_IMPACTS = 255  # the largest impact of a word on a document; Python shares small integers
_TIER_BITS = 5
_IDF_SCALE = 1024
_FEW = 128  # postings that are added up without testing whether more are needed
_EFFORT = (
    2000  # postings added up for one query, about 0.2 ms; a thousand tools rarely have as many
)
_FRONT = 256  # leading documents whose scores are then completed

Tier = dict[int, int]  # documents on which a word has about the same impact, and the impact


class Postings:
    """The documents of each word.  Documents are numbers, which the caller assigns."""

    def __init__(self) -> None:
        self._tiers: dict[str, dict[int, Tier]] = {}
        self._words: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._words)

    def __contains__(self, word: str) -> bool:
        return word in self._tiers

    def add(self, document: int, fields: Sequence[Sequence[str]]) -> None:
        """Add a new document; `fields` has one list of words for each of FIELDS."""
        counted = _counted(fields)
        for word, count in counted.items():
            impact = 1 + int((_IMPACTS - 1) * count / (count + _SATURATION))
            level = impact >> _TIER_BITS
            tiers = self._tiers.get(word)
            if tiers is None:
                self._tiers[word] = {level: {document: impact}}
            elif level in tiers:
                tiers[level][document] = impact
            else:
                tiers[level] = {document: impact}
        self._words[document] = tuple(counted)

    def remove(self, document: int) -> None:
        """Remove a known document."""
        for word in self._words.pop(document):
            tiers = self._tiers[word]
            level = next(level for level, tier in tiers.items() if document in tier)
            del tiers[level][document]
            if not tiers[level]:
                del tiers[level]
            if not tiers:
                del self._tiers[word]

    def rarity(self, word: str) -> int:
        """Return the weight of a word: larger if fewer documents have it, largest if none has."""
        found = sum(map(len, self._tiers.get(word, {}).values()))
        return round(_IDF_SCALE * math.log1p((len(self._words) - found + 0.5) / (found + 0.5)))

    def covered(self, documents: Iterable[int], rarities: dict[str, int]) -> dict[int, int]:
        """Return the total weight of these words in each document."""
        worth = dict.fromkeys(documents, 0)
        for word, rarity in rarities.items():
            for tier in self._tiers.get(word, {}).values():
                for document in worth.keys() & tier.keys():
                    worth[document] += rarity
        return worth

    def best(
        self, rarities: dict[str, int], count: int, allowed: Set[int] | None = None
    ) -> dict[int, int]:
        """Return the `count` best documents of `allowed` (default all) with their scores, and all that
        tie with the last, unsorted.

        Tiers are added up by their effect, largest first, until a document that was not seen yet cannot
        be among the best (MaxScore, Turtle and Flood 1995), or until so much was added up that it
        hardly can (Lin and Trotman 2015).  The remaining tiers then only complete the scores of the
        leading documents.
        """
        turns = self._turns(rarities)
        # The highest possible score of an unseen document: every word at its highest remaining tier.
        unseen = sum({turn.word: turn.bound for turn in reversed(turns)}.values())
        scores: dict[int, int] = {}
        effort, ask = 0, _FEW
        for done, turn in enumerate(turns):
            effort += len(turn.tier)
            if effort > ask and len(scores) >= count:
                ask = min(4 * effort, _EFFORT)  # the test costs as much as it can save
                if effort > _EFFORT:
                    front = _only_best(scores, 0, max(_FRONT, count))
                    return _finished(front, turns[done:], unseen, count)
                if unseen < _floor(scores, count):
                    return _finished(scores, turns[done:], unseen, count)
            _add_up(scores, turn, allowed)
            unseen += turn.following - turn.bound
        return _only_best(scores, 0, count)

    def _turns(self, rarities: dict[str, int]) -> list["_Turn"]:
        """Return the tiers to add up, the one with the largest effect first."""
        turns: list[_Turn] = []
        for word, rarity in rarities.items():
            following = 0
            for level, tier in sorted(self._tiers.get(word, {}).items()):
                bound = rarity * (((level + 1) << _TIER_BITS) - 1)
                turns.append(_Turn(word, rarity, tier, bound, following))
                following = bound
        turns.sort(key=lambda turn: (-turn.bound, turn.word))
        return turns


class _Turn(NamedTuple):
    """A tier of a word that is to be added up."""

    word: str
    rarity: int
    tier: Tier
    bound: int  # the highest score that a document can get from it
    following: int  # the bound of the same word's next tier


def _counted(fields: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the weighted count of each word, reduced in long fields: the F of BM25F."""
    counted: dict[str, float] = {}
    for field, found in zip(FIELDS, fields, strict=True):
        each = field.weight / (1 - field.slope + field.slope * len(found) / field.usual)
        for word in found:
            counted[word] = counted.get(word, 0.0) + each
    return counted


def _add_up(scores: dict[int, int], turn: _Turn, allowed: Set[int] | None) -> None:
    rarity, known = turn.rarity, scores.get
    if allowed is None:
        for document, impact in turn.tier.items():
            scores[document] = known(document, 0) + rarity * impact
    else:
        for document in turn.tier.keys() & allowed:
            scores[document] = known(document, 0) + rarity * turn.tier[document]


def _finished(
    scores: dict[int, int], turns: list[_Turn], unseen: int, count: int
) -> dict[int, int]:
    """Return the best of the seen documents, with the remaining tiers added up for them."""
    left, reach = _only_best(scores, unseen, count), unseen
    for turn in turns:
        rarity, impacts = turn.rarity, turn.tier
        for document in left.keys() & impacts.keys():
            left[document] += rarity * impacts[document]
        unseen += turn.following - turn.bound
        if 3 * unseen < reach and len(left) > 2 * count:
            left, reach = _only_best(left, unseen, count), unseen
    return _only_best(left, 0, count)


def _only_best(scores: dict[int, int], unseen: int, count: int) -> dict[int, int]:
    """Return the documents that can be among the `count` best if each gains up to `unseen`."""
    if len(scores) <= count:
        return scores
    needed = _floor(scores, count) - unseen
    return {document: score for document, score in scores.items() if score >= needed}


def _floor(scores: dict[int, int], count: int) -> int:
    return heapq.nlargest(count, scores.values())[-1]
