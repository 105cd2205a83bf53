"""E-mail addresses and phone numbers."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from .detector import FoundValue

_LOCAL = re.compile(
    r"[\w.+~-]{1,64}"
)  # others are legal, and end a name more often than they are in one
_DOMAIN = re.compile(r"(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}(?:xn--[\w-]{2,59}|[^\W\d_]{2,24})")
_SPELT = re.compile(
    r"(?i)[\w.+-]{1,64} {0,2}[\[({] {0,2}(?:at|@) {0,2}[\])}] {0,2}[\w-]{1,63}"
    r"(?:(?: {0,2}[\[({] {0,2}(?:dot|\.) {0,2}[\])}] {0,2}|\.)[\w-]{1,63}){1,8}"
)
_SPELT_HINT = re.compile(r"(?i)[\[({] {0,2}(?:at|@)")
_BRACKETED = re.compile(r"(?i) {0,2}[\[({] {0,2}(at|dot|@|\.) {0,2}[\])}] {0,2}")
_LONGEST_LOCAL = 64  # octets (RFC 5321, 4.5.3.1.1)


class EmailDetector:
    """E-mail addresses, also with `[at]` and `[dot]`; the `git@host:` of a repository is none."""

    kinds = frozenset(["email"])

    def find(self, text: str) -> Iterable[FoundValue]:
        place = text.find("@")
        while place >= 0:
            if found := _address_around(text, place):
                yield found
            place = text.find("@", place + 1)
        if _SPELT_HINT.search(text):
            for match in _SPELT.finditer(text):
                yield FoundValue(
                    *match.span(), "email", _BRACKETED.sub(_plain, match[0]).casefold()
                )


def _address_around(text: str, place: int) -> FoundValue | None:
    before = text[max(0, place - _LONGEST_LOCAL) : place][::-1]
    local, domain = _LOCAL.match(before), _DOMAIN.match(text, place + 1)
    if not local or not domain:
        return None
    name = local[0][::-1].lstrip(".-~")
    if not name or (name == "git" and text[domain.end() : domain.end() + 1] == ":"):
        return None
    start = place - len(name)
    return FoundValue(start, domain.end(), "email", text[start : domain.end()].casefold())


def _plain(match: re.Match[str]) -> str:
    return {"at": "@", "dot": "."}.get(match[1].lower(), match[1])


_CANDIDATE = re.compile(
    r"(?<![A-Za-z0-9.+-])(?:\+|00|\()?(?:\d|\(\d)(?:[ ()./\u00a0\u2010-\u2015-]{0,3}\d){6,16}"
    r"(?![A-Za-z0-9-]|[.,]\d)",
    re.ASCII,
)
_ANNOUNCED = re.compile(
    r"(?i)(?:tel|telephone|phone|mobile|cell|fax|call|dial|sms|whatsapp)\b[^\w\n]{0,4}(?:(?:no|number|nr)\b[^\w\n]{0,4})?$"
)
_DATE = re.compile(
    r"(?:19|20)\d\d[-./ ](?:0[1-9]|1[0-2])[-./ ][0-3]\d|[0-3]?\d[./-][01]?\d[./-](?:19|20)\d\d"
)
_AMERICAN = re.compile(r"\(?[2-9]\d\d\)?[ .-]{1,2}[2-9]\d\d[ .-]\d{4}")
_ADDRESS_OF_HOST = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")


_GROUPED = re.compile(
    r"(?:(?:\+|00)\d{1,3}[ ./-]{0,2})?[ (]{0,2}\d{1,15}(?:[^\d]{1,3}\d{2,8}){0,6}", re.ASCII
)  # rows of single digits are no number
_MOST_TRIES = 3  # ends of one number
_FREE_CHECKS, _CHARACTERS_A_CHECK = 500, 16  # a check takes 50 microseconds


class _Checks:
    """The checks of numbers that one text may cost; beyond, what is grouped like a number is one."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self) -> bool:
        self._left -= 1
        return self._left >= 0


_FEWEST_DIGITS = 7


def _next_group(text: str, start: int) -> int:
    """Return where the group of digits ends that begins at `start`, which is no number."""
    place = start + 1
    while place < len(text) and text[place].isdigit():
        place += 1
    return place


def _ends(text: str, start: int, end: int) -> Iterable[int]:
    """Yield the ends of the groups of a candidate, but the last, from the back."""
    for place in range(end - 1, start + _FEWEST_DIGITS, -1):
        if text[place - 1].isdigit() and text[place] in " /":
            yield place


class PhoneDetector:
    """Phone numbers: with `+` and a country code (E.164) anywhere; national ones of `regions` (ISO
    3166) if they are grouped, or announced by a word such as "phone".

    With the extra `privacy`, `phonenumbers` checks them; without, national numbers are found only in
    the form of North America, and others by their length.
    """

    kinds = frozenset(["phone"])

    def __init__(self, regions: Sequence[str] = ("US",)) -> None:
        self._regions = tuple(regions)

    def find(self, text: str) -> Iterable[FoundValue]:
        place, checks = 0, _Checks(_FREE_CHECKS + len(text) // _CHARACTERS_A_CHECK)
        while match := _CANDIDATE.search(text, place):
            found = self._first_of(text, *match.span(), checks)
            place = found.end if found else _next_group(text, match.start())
            if found:
                yield found

    def _first_of(self, text: str, start: int, end: int, checks: "_Checks") -> FoundValue | None:
        """Return the longest number at `start`: other digits may stand behind it."""
        before = text[max(0, start - 30) : start]
        if _DATE.match(text, start, end) or _ADDRESS_OF_HOST.fullmatch(text, start, end):
            return None
        for stop in [end, *(each for each in _ends(text, start, end))][:_MOST_TRIES]:
            number = text[start:stop]
            number = number.removeprefix("(" * (number.count("(") > number.count(")")))
            if not _GROUPED.fullmatch(number):
                continue
            if normal := self._normal(number, before) if checks.take() else number:
                return FoundValue(stop - len(number), stop, "phone", normal)
        return None

    def _normal(self, number: str, before: str) -> str | None:
        digits = "".join(filter(str.isdigit, number))
        if number.startswith(("+", "00")):
            return self._international("+" + digits.removeprefix("00"))
        is_grouped = len(number) >= len(digits) + 2
        if not is_grouped and not _ANNOUNCED.search(before):
            return None
        if self._library is None:
            return f"+1{digits}" if _AMERICAN.fullmatch(number) else None
        return next(filter(None, (self._checked(number, region) for region in self._regions)), None)

    def _international(self, number: str) -> str | None:
        if self._library is not None:
            return self._checked(number, None)
        return number if 8 <= len(number) - 1 <= 15 and number[1] != "0" else None

    def _checked(self, number: str, region: str | None) -> str | None:
        library = self._library
        try:
            parsed = library.parse(number, region)
        except library.NumberParseException:
            return None
        if not library.is_valid_number(parsed):
            return None
        return str(library.format_number(parsed, library.PhoneNumberFormat.E164))

    @cached_property
    def _library(self) -> Any:
        """The module `phonenumbers`; None if it is not installed."""
        try:
            import phonenumbers
        except ImportError:
            return None
        return phonenumbers
