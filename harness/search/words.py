"""Words of names, descriptions and queries: split, folded, stemmed.  The texts may be hostile.

Pure.  Every function is linear in its input, and reads at most MAX_CHARACTERS.
"""

import functools
import re
import unicodedata
from typing import NamedTuple

from ..text.hidden import is_hidden

MAX_CHARACTERS = 4096  # of one text; what a tool does stands at the beginning
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
# Synonyms in tools and queries; each becomes the first.
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
