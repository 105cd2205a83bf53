"""`KnownValues`: values that are known by their text, such as names, found wherever they stand.

They are compared word by word, without regard to case and accents: "JOSE  NANDU" is "José Ñandú", and
so is a text in which each accent is a character of its own.  Of a name the last word may also come
first, and "ue" stands for "ü".  The search takes time linear in the text, however many are known.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_WORD = re.compile(r"[^\W_]+")
_GAP = 3  # characters at most between two words of one value
_SHORTEST, _ANY_CASE = 3, 5  # characters of a value; a shorter one than the second counts case
_SHORTEST_NUMBER = 5  # digits alone
_MOST_WORDS = 24
_MOST_NAMES = 4  # words of a name whose order may change
# Letters that Unicode takes for others than a base letter with a mark.
_BASE = str.maketrans({
    "ł": "l", "Ł": "L", "ø": "o", "Ø": "O", "đ": "d", "Đ": "D", "ð": "d", "Ð": "D", "ħ": "h",
    "\u0131": "i", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "þ": "th", "Þ": "TH",
})  # fmt: skip
_UMLAUTS = str.maketrans({
    "ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue", "å": "aa", "Å": "Aa",
    "ø": "oe", "Ø": "Oe",
})  # fmt: skip


class KnownValue(NamedTuple):
    """The kind and the normal form of a value, and its text as it was first written."""

    kind: str
    normal: str
    text: str


class _Node:
    """The words that may follow, and the values that end here."""

    __slots__ = ("ends", "following")

    def __init__(self) -> None:
        self.following: dict[str, _Node] = {}
        self.ends: list[KnownValue] = []


class KnownValues:
    """A set of values.  Adding and finding may happen in several threads."""

    kinds: frozenset[str] = frozenset()  # those that are known

    def __init__(self, values: Iterable[KnownValue] = ()) -> None:
        self._root = _Node()
        for each in values:
            self.add(each)

    def add(self, value: KnownValue) -> None:
        """Add a value, unless it is too short to be told from other words."""
        words = _WORD.findall(unicodedata.normalize("NFC", value.text))
        size = sum(map(len, words))
        least = _SHORTEST_NUMBER if "".join(words).isdigit() else _SHORTEST
        if size < least or len(words) > _MOST_WORDS:
            return
        for spelling in _spellings(value.kind, words):
            self._put(spelling, value)

    def _put(self, words: Sequence[str], value: KnownValue) -> None:
        node = self._root
        for word in words:
            node = node.following.setdefault(word, _Node())
        if all(each.text != value.text for each in node.ends):
            node.ends = [*node.ends, value]

    def find(self, text: str) -> Iterator[tuple[int, int, KnownValue]]:
        """Yield the longest known value at each word: start, end, value."""
        if not self._root.following:
            return
        for match in _WORD.finditer(text):
            if node := self._root.following.get(_plain(match[0])):
                found = _longest(node, text, match.start(), match.end())
                if found:
                    yield found

    def held_from(self, text: str) -> int:
        """Return where a value may begin that goes on behind the end of `text`; else its length."""
        for match in _WORD.finditer(text, max(0, len(text) - 512)):
            node = self._root.following.get(_plain(match[0]))
            if node and _goes_on(node, text, match.end()):
                return match.start()
        return len(text)


def _spellings(kind: str, words: list[str]) -> set[tuple[str, ...]]:
    """Return the ways to write a value, as plain words."""
    plain = [_plain(word) for word in words]
    if kind != "name":
        return {tuple(plain)}
    found = {tuple(plain), tuple(_plain(word.translate(_UMLAUTS)) for word in words)}
    if 1 < len(words) <= _MOST_NAMES:
        found |= {(each[-1], *each[:-1]) for each in found}
    return found


def _plain(word: str) -> str:
    return _without_accents(word).casefold()


def _without_accents(text: str) -> str:
    """Return the characters of a text without the marks above and below them."""
    if text.isascii():
        return text
    apart = unicodedata.normalize("NFKD", text.translate(_BASE))
    return unicodedata.normalize(
        "NFC", "".join(c for c in apart if unicodedata.category(c) != "Mn")
    )


def _longest(node: _Node, text: str, start: int, end: int) -> tuple[int, int, KnownValue] | None:
    found = _ended(node, text, start, end)
    while node.following and (match := _next_word(text, end)):
        following = node.following.get(_plain(match[0]))
        if following is None:
            break
        node, end = following, match.end()
        found = _ended(node, text, start, end) or found
    return found


def _ended(node: _Node, text: str, start: int, end: int) -> tuple[int, int, KnownValue] | None:
    written = text[start:end]
    for value in node.ends:
        is_long = len(unicodedata.normalize("NFC", value.text)) >= _ANY_CASE
        if is_long or _without_accents(value.text) == _without_accents(written):
            return start, end, value
    return None


def _next_word(text: str, end: int) -> re.Match[str] | None:
    match = _WORD.search(text, end, end + _GAP + 256)
    return match if match and match.start() - end <= _GAP else None


def _goes_on(node: _Node, text: str, end: int) -> bool:
    """Tell whether the end of `text` is reached while a value may still go on."""
    while node.following:
        match = _next_word(text, end)
        if match is None:
            return len(text) - end <= _GAP
        if match.end() == len(text):
            return True
        following = node.following.get(_plain(match[0]))
        if following is None:
            return False
        node, end = following, match.end()
    return end == len(text)
