"""Words that look random, as keys without a form of their own do.  Takes time linear in the text."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator

_RUN = re.compile(r"[A-Za-z0-9+/_-]++={0,2}")
SHORTEST_RANDOM, _LONGEST_RUN = 24, 120
_LEAST_BITS = 3.9  # of a character; 24 random ones of 62 have 4.2 on average, and English has 3.5
_ENCODED = re.compile(r"base64,$|sha\d{1,3}[:=]$", re.IGNORECASE)  # before what is none
_DIGEST = re.compile(r"sha\d{1,3}-", re.IGNORECASE)  # what a digest begins with (W3C SRI)
_PATH_STEPS = 3  # more slashes than that are not in base64 of this length
_LINE, _LONG = 200, 60


def random_words(text: str) -> Iterator[tuple[int, int]]:
    """Yield where words stand of letters of both cases and digits that are in no order.

    Not hexadecimal, so no UUID or digest; not a line of a longer text in base64; not what is said to be
    a digest or a picture; not a path.
    """
    for match in _RUN.finditer(text):
        start, end = match.span()
        if not SHORTEST_RANDOM <= end - start <= _LONGEST_RUN:
            continue
        is_encoded = _ENCODED.search(text, max(0, start - 10), start)
        if _is_random(match[0]) and not is_encoded and not _is_one_of_many(text, start, end):
            yield start, end


def _is_random(run: str) -> bool:
    run = run.strip("=-_/+")
    if len(run) < SHORTEST_RANDOM or run.count("/") > _PATH_STEPS or _DIGEST.match(run):
        return False
    digits = sum(map(str.isdigit, run))
    upper, lower = sum(map(str.isupper, run)), sum(map(str.islower, run))
    if min(digits, upper, lower) < 2 or digits > 0.6 * len(run):
        return False
    if _A_WORD.search(run):
        return False
    return _bits(run) >= _LEAST_BITS and _changes(run) >= 0.35 * len(run)


_A_WORD = re.compile(r"[a-z]{8}")


def _changes(run: str) -> int:
    """Return how often a character is of another sort than the one before it."""
    sorts = [(each.isdigit(), each.isupper(), each.islower()) for each in run]
    return sum(some != other for some, other in itertools.pairwise(sorts))


def _bits(run: str) -> float:
    """Return the entropy of the characters of `run`, in bits each (Shannon)."""
    counts = Counter(run).values()
    return -sum(count / len(run) * math.log2(count / len(run)) for count in counts)


def _is_one_of_many(text: str, start: int, end: int) -> bool:
    """Tell whether it is a line, and the one above or below is a long run as well: wrapped base64."""
    if start and text[start - 1] == "\n":
        begins = text.rfind("\n", max(0, start - _LINE), start - 1) + 1
        if start - 1 - begins >= _LONG and _RUN.fullmatch(text, begins, start - 1):
            return True
    below = _RUN.match(text, end + 1) if text[end : end + 1] == "\n" else None
    return bool(below) and end - start >= _LONG
