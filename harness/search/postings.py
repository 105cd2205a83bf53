"""An inverted index with BM25F: the words of documents, with their weights.

Pure.  The weight of a word in a document depends on that document alone, because lengths are compared
with constants and not with averages: adding or removing a document touches its own words only, and an
index does not depend on the order of additions.  Only the rarity of a word is computed for each query.

Scores are integers, so that the order of addition cannot change a rank.

Queries: their words, the weight of each, and the weight that a document must have to answer.

Pure, over the words of the documents.

Words of names, descriptions and queries: split, folded, stemmed.  The texts may be hostile.

Pure.  Every function is linear in its input, and reads at most MAX_CHARACTERS.
"""

import functools
import heapq
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from ..text.hidden import is_hidden, visible


class FieldWeight(NamedTuple):
    """The weight of a field; `usual` is its typical length in words."""

    weight: float
    usual: float
    slope: float  # how much less a longer field counts: 0 not at all, 1 in proportion


# A name says what a tool does, its description how, its parameters with what: each field counts half of
# the previous one. The length of a name matters less, because names are short. Usual lengths are
# medians over 845 tools of MCP servers and APIs.
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
# Postings added up for one query, about 0.2 ms; a thousand tools rarely have as many.
_EFFORT = 2000
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


_MAX_WORDS = 32  # words of a query that are used, the rarest first
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
    names_it: bool  # True for a few words that name a tool, False for a sentence


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


MAX_CHARACTERS = 4096  # characters of one text, which says at its beginning what a tool does
_MAX_WORD = 40  # longer ones are data: hashes, base64
_MAX_KNOWN = 50_000  # cached words, so that each is stemmed once

# A run of letters that may hold several words, or a number.
_RUNS = re.compile(r"[^\W\d_]+|\d+")
# HTTPServer -> HTTP Server; readFile -> read File.
_HUMPS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_JOINTS, _CAMELS = re.compile(r"[_./-]+"), re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_VOWELS = frozenset("aeiouy")

# Words that say nothing about what a tool does.  Verbs stay: `get`, `list` and `find` are names.
STOP_WORDS = frozenset(
    """a about also am an and any are as at be been but by can could d did do does for from had has
    have he her his how i if in into is it its just let like ll m me my need no not of on or our
    please re s she should so some t than that the their them then there these they this those to
    too up us ve want was we were what when where which who whom whose why will with would you
    your""".split()  # noqa: SIM905 - a list to read
)
# Groups of synonyms; each word becomes the first of its group.
_SAME_WORDS = (
    ("run", "execute", "exec", "invoke"), ("delete", "remove", "erase"), ("mail", "email"),
)  # fmt: skip


class Alternatives(NamedTuple):
    """A run of letters as one word and as its humps: `GitHub` is github, or git and hub."""

    whole: tuple[str, ...]
    humps: tuple[str, ...]


def words(text: str) -> list[str]:
    """Return the stems of a text in order; a run with several humps also counts as one word."""
    stems: list[str] = []
    for run in _RUNS.findall(fold(text)):
        whole, humps = _apart(run)
        stems += humps
        if whole is not humps:
            stems += whole
    return stems


def alternatives(text: str) -> list[Alternatives]:
    """Return the runs of a query, each as one word and as its humps."""
    return [_apart(run) for run in _RUNS.findall(fold(text))]


def squeezed(name: str) -> str:
    """Return a name without case and separators: `find symbol` is `find_symbol` is `FindSymbol`."""
    return "".join(_RUNS.findall(fold(name))).lower()


def apart(name: str) -> str:
    """Return a name split into words: `find_symbol` and `findSymbol` become `find symbol`."""
    return _CAMELS.sub(" ", _JOINTS.sub(" ", name[:MAX_CHARACTERS]))


def fold(text: str) -> str:
    """Return the first MAX_CHARACTERS of a text without accents and hidden characters."""
    text = text[:MAX_CHARACTERS]
    if text.isascii():
        return text
    apart = unicodedata.normalize("NFKD", text)[:MAX_CHARACTERS]  # one character may become 18
    return "".join(c for c in apart if unicodedata.category(c) != "Mn" and not is_hidden(c))


@functools.lru_cache(_MAX_KNOWN)
def _apart(run: str) -> Alternatives:
    humps_of = _HUMPS.findall(run) if run.isascii() else [run]  # other alphabets hardly have them
    lowered = [hump.casefold()[:_MAX_WORD] for hump in humps_of]
    humps = tuple(stem(word) for word in lowered if word not in STOP_WORDS)
    if len(lowered) == 1:
        return Alternatives(humps, humps)
    return Alternatives((stem(run.lower()[:_MAX_WORD]),), humps)


def stem(word: str) -> str:
    """Return a word without the endings of English plurals and verbs; synonyms share one stem."""
    bare = _without_endings(word)
    return _SAME_STEMS.get(bare, bare)


def _without_endings(word: str) -> str:
    if len(word) < 4 or not word.isascii():
        return word
    word = _without_verb_ending(_singular(word))
    if len(word) > 5 and word.endswith("ly"):
        word = word[:-2]
    if len(word) > 3 and word[-1] == "e":
        word = word[:-1]
    return word[:-1] + "i" if len(word) > 3 and word[-1] == "y" else word


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("sses", "xes", "ches", "shes", "zes")):
        return word[:-2]
    if word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word


def _without_verb_ending(word: str) -> str:
    for ending in ("ing", "ed"):
        bare = word.removesuffix(ending)
        if bare != word and len(bare) >= 3 and not _VOWELS.isdisjoint(bare):
            twice = len(bare) > 3 and bare[-1] == bare[-2] and bare[-1] not in "lsz"
            return bare[:-1] if twice else bare  # stopped, running; but called, passed
    return word


_SAME_STEMS = {
    _without_endings(other): _without_endings(first)
    for first, *others in _SAME_WORDS
    for other in others
}
