"""Other ways to write the same characters: full-width, invisible ones between, escapes, encodings.

`view` returns a text as detectors should also read it, with the place in the original that every
character comes from. One level of each escape is undone; the README lists the exceptions.

`KnownValues`: values that are known by their text, such as names, found wherever they stand.

They are compared word by word, without regard to case and accents: "JOSE NANDU" is "José Ñandú", and so
is a text in which each accent is a character of its own. The last word of a name may also come first,
and "ue" stands for "ü". The search takes time linear in the text, however many are known.
"""

import base64
import binascii
import bisect
import html
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class _Unit(NamedTuple):
    """An escape, or a character that is folded: where it stands in the original and in the view, and
    whether letters behind it are certainly not its own."""

    start: int
    end: int
    begins: int
    size: int
    is_certain: bool


class View:
    """A text without escapes and odd characters, and where its parts stand in the original."""

    def __init__(self, text: str, units: list[_Unit]) -> None:
        self.text = text
        self._units = units
        self._begins = [each.begins for each in units]
        self._starts = [each.start for each in units]

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Return the position of a part in the original, without invisible characters around it."""
        return self._place(start)[0], self._place(end - 1)[1]

    def _place(self, place: int) -> tuple[int, int]:
        """Return where one character of the view begins and ends in the original."""
        number = bisect.bisect_right(self._begins, place) - 1
        if number < 0:
            return place, place + 1
        unit = self._units[number]
        beyond = place - unit.begins - unit.size
        return (unit.start, unit.end) if beyond < 0 else (unit.end + beyond, unit.end + beyond + 1)

    def cuts(self, start: int, end: int) -> bool:
        """Tell whether a part of the original begins or ends within an escape, so that letters of the
        escape were taken for letters of a value."""
        return self._is_within(start) or self._is_within(end)

    def _is_within(self, place: int) -> bool:
        number = bisect.bisect_left(self._starts, place) - 1
        return number >= 0 and place < self._units[number].end and self._units[number].is_certain


# Escapes of JSON, programs, URLs, quoted-printable, HTML and terminals; each stands for at most one
# character. Several backslashes come from JSON within JSON.
_ESCAPE = (
    r"\\{1,8}u[dD][89ABab][0-9A-Fa-f]{2}\\{1,8}u[dD][C-Fc-f][0-9A-Fa-f]{2}"
    r"|\\{1,8}(?:u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|u\{[0-9A-Fa-f]{1,5}\}|U000[0-9A-Fa-f]{5}|[01][0-7]{2}|[bfnrt])"
    r"|%[0-7][0-9A-Fa-f]|%[C-Fc-f][0-9A-Fa-f](?:%[89ABab][0-9A-Fa-f]){1,3}"
    r"|=(?:0[0-9A-F]|1B|[2-7][0-9A-F]|\r?\n)"
    r"|&(?:#\d{1,7};?|#[xX][0-9A-Fa-f]{1,6};?|[A-Za-z]{2,24};)"
)
_TERMINAL = (
    r"(?:\x1b|\\{1,8}(?:u001[bB]|x1[bB]|033|e))\[[0-?]{0,32}[ -/]{0,4}[@-~]"  # ECMA-48, 5.4
    r"|\x1b\][^\x07\x1b\n]{0,2048}(?:\x07|\x1b\\)"  # for example a hyperlink
    r"|\x1b[ -/]{0,4}[0-Z\\^-~]|\x9b[0-?]{0,32}[ -/]{0,4}[@-~]"
    r"|(?:\^\[)?\[\d{1,3}(?:;\d{1,3}){0,8}m"  # colour codes as they appear in logs
)
_ODD = r"[^ -~\t\n\r][\u0300-\u036f]{0,16}|[A-Za-z][\u0300-\u036f]{1,16}"
_UNIT = re.compile(f"{_TERMINAL}|{_ESCAPE}|{_ODD}")
_QUOTED_PRINTABLE = re.compile(r"=3D|=\r?\n|quoted-printable")  # else "=20" may begin a number
_HINT = re.compile(r"[\\%&=]|[^ -~\t\n\r]|\[\d{1,3}[;m]")
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_SHY = "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u2800\u3164\uffa0"  # displayed as nothing
# Base64.
_ENCODED = re.compile(r"(?:[A-Za-z0-9+/]{60,76}\r?\n){0,400}[A-Za-z0-9+/_-]{12,8192}={0,2}")
_HEXADECIMAL = re.compile(r"(?:[0-9A-Fa-f]{2}[ :]?){7,4096}")
_LEAST_PRINTABLE = 0.9


def view(text: str) -> View | None:
    """Return `text` with escapes undone and odd characters folded; None if it has neither."""
    if not _HINT.search(text):
        return None
    parts: list[str] = []
    units: list[_Unit] = []
    is_quoted = bool(_QUOTED_PRINTABLE.search(text))
    end = size = 0
    for match in _UNIT.finditer(text):
        start, stop = match.span()
        made = _read(match[0])
        parts += [text[end:start], made]
        size += start - end
        units.append(_Unit(start, stop, size, len(made), is_quoted or match[0][0] != "="))
        size += len(made)
        end = stop
    return View("".join([*parts, text[end:]]), units) if units else None


def _read(unit: str) -> str:
    """Return the character for which an escape or an unusual character stands; empty for invisible
    ones."""
    if unit[0] in "\\%=&":
        unit = _unescaped(unit)
    elif unit[0] in "\x1b\x9b^[":
        return ""
    if unit.isascii():
        return unit if unit.isprintable() or unit in "\t\n\r\v\f" else ""
    return "".join(map(_folded, unicodedata.normalize("NFC", unit)))


def _unescaped(escape: str) -> str:
    if escape[0] == "&":
        return html.unescape(escape)
    if escape[0] == "%":
        return bytes.fromhex(escape.replace("%", "")).decode("utf-8", "replace")
    if escape[0] == "=":
        return chr(int(escape[1:], 16)) if escape[1:].isalnum() else ""
    letters = escape.lstrip("\\")
    if letters in _SHORT:
        return _SHORT[letters]
    if "[" in letters:  # an escape of a terminal
        return ""
    if letters[0] in "01":
        return chr(int(letters, 8))
    if letters[0] == "U" or "{" in letters:
        return chr(int(letters[1:].strip("{}"), 16))
    units = [int(each, 16) for each in re.findall("[0-9A-Fa-f]{4}|(?<=x)[0-9A-Fa-f]{2}", letters)]
    return b"".join(each.to_bytes(2, "big") for each in units).decode("utf-16-be", "surrogatepass")


def _folded(character: str) -> str:
    """Return the plain form of a character; nothing for one that is not shown."""
    category = unicodedata.category(character)
    if category in ("Cf", "Mn", "Me", "Cc", "Cs") or character in _SHY:
        return ""
    if category == "Pd" or character == "\u2212":  # dashes, such as of word processors
        return "-"
    if category == "Nd":
        return str(unicodedata.digit(character))
    return unicodedata.normalize("NFKC", character) if category != "Zs" else " "


def decoded(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield each part that is text in base64 or hexadecimal: start, end, and that text."""
    for pattern, decode in ((_HEXADECIMAL, _from_hexadecimal), (_ENCODED, _from_base64)):
        for match in pattern.finditer(text):
            for content in decode(match[0]):
                yield *match.span(), content


def _from_hexadecimal(run: str) -> Iterator[str]:
    yield from _as_text(bytes.fromhex(re.sub("[ :]", "", run)))


def _from_base64(run: str) -> Iterator[str]:
    """Yield the decoded text of a run of base64; an incomplete end is cut."""
    plain = re.sub(r"\s", "", run).rstrip("=").replace("-", "+").replace("_", "/")
    plain = plain[: len(plain) - (len(plain) % 4 == 1)]
    try:
        data = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        return
    yield from _as_text(data)


def _as_text(data: bytes) -> Iterator[str]:
    """Yield `data` as text if it is UTF-8, or UTF-16 of Latin letters, and mostly printable."""
    for encoding in ("utf-8", "utf-16-le", "utf-16-be"):
        try:
            content = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        latin = (
            sum(map(str.isprintable, content)) if encoding == "utf-8" else _ascii_letters(content)
        )
        if latin >= _LEAST_PRINTABLE * len(content):
            yield content
            return


def _ascii_letters(content: str) -> int:
    return sum(character.isascii() and character.isprintable() for character in content)


_WORD = re.compile(r"[^\W_]+")
_GAP = 3  # characters at most between two words of one value
_SHORTEST, _ANY_CASE = 3, 5  # characters of a value; a shorter one than the second counts case
_SHORTEST_NUMBER = 5  # digits alone
_MOST_WORDS = 24
_MOST_NAMES = 4  # words of a name whose order may change
# Letters that Unicode does not decompose into a base letter and a mark.
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

    kinds: frozenset[str] = frozenset()  # kinds of the known values

    def __init__(self, values: Iterable[KnownValue] = ()) -> None:
        self._root = _Node()
        for each in values:
            self.add(each)

    def add(self, value: KnownValue) -> None:
        """Add a value, unless it is too short to be distinguished from other words."""
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
