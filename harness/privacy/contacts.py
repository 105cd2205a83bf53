"""E-mail addresses and phone numbers.

Addresses of machines, credentials in URLs, and secrets.
"""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from ..text.secrets import find_secrets
from .detector import FoundValue, PatternDetector, is_numbered

# Other legal signs delimit a name more often than they belong to it. An apostrophe belongs to
# "mary.o'brien", but not to the names in "l'adresse d'ann@" and b'ann@'. The name is read from the
# right.
_LOCAL = re.compile(
    r"[\w.+~-]{1,64}(?:(?<=[^\W\d_])'(?:[^\W\d_]{1,3}[._-][\w.+~-]{1,60}|[oO](?![^\W_])))?"
)
_DOMAIN = re.compile(r"(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}(?:xn--[\w-]{2,59}|[^\W\d_]{2,24})")
_SPELT = re.compile(
    r"(?i)[\w.+-]{1,64} {0,2}[\[({] {0,2}(?:at|@) {0,2}[\])}] {0,2}[\w-]{1,63}"
    r"(?:(?: {0,2}[\[({] {0,2}(?:dot|\.) {0,2}[\])}] {0,2}|\.)[\w-]{1,63}){1,8}"
)
_SPELT_HINT = re.compile(r"(?i)[\[({] {0,2}(?:at|@)")
_BRACKETED = re.compile(r"(?i) {0,2}[\[({] {0,2}(at|dot|@|\.) {0,2}[\])}] {0,2}")
_LONGEST_LOCAL = 64  # octets (RFC 5321, 4.5.3.1.1)
# File name endings, which are not domains: packages and pictures have names with `@`.
_FILE = re.compile(
    r"(?i)(?:\.(?:png|jpe?g|gif|webp|svg|ico|avif|css|scss|m?js|cjs|[jt]sx|html?|php|xml|json|ya?ml|toml|txt|csv|pdf|docx?|xlsx?|gz|tgz"
    r"|bz2|xz|log|lock|conf|cfg|ini|tar|whl|exe|dll|jar|war|map|woff2?|ttf|eot|otf|mp[34]|wav|avi|webm|bmp|tiff?|psd|bak|tmp|min))+\Z"
)


class EmailDetector:
    """E-mail addresses, also with `[at]` and `[dot]`; not the `git@host:` of a repository."""

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
    host = _FILE.sub("", domain[0])  # an address may be part of a file name
    if not _DOMAIN.fullmatch(host) or host.startswith(("self.", "this.", "cls.")):
        return None
    start, end = place - len(name), place + 1 + len(host)
    return FoundValue(start, end, "email", text[start:end].casefold())


def _plain(match: re.Match[str]) -> str:
    return {"at": "@", "dot": "."}.get(match[1].lower(), match[1])


_CANDIDATE = re.compile(
    r"(?<![A-Za-z0-9.+-])(?:\+|00|\()?(?:\d|\(\d)(?:[ ()./\u00a0\u2010-\u2015-]{0,3}\d){6,16}"
    r"(?![A-Za-z0-9-]|[.,]\d)",
    re.ASCII,
)
# Words that announce a number, in the languages of many regions.
_ANNOUNCED = re.compile(
    r"(?i)(?<![^\W\d_])(?:t[eé]l[eé]?(?:(?:ph|f)[oó]n[eo]?|foon|m[oó]vel)?(?:nummer|nr)?|tlf|phone"
    r"|mobile?|mobiel|m[oó]vil|cell(?:ulare|phone)?|celular|handy(?:nummer)?|portable|fax"
    r"|ruf(?:nummer|nr)|durchwahl|call|dial|ring|sms|whatsapp|ll[aá]me(?:nos)?(?: al)?"
    r"|appelez(?:[ -](?:le|moi|nous)){0,2}|(?:erreichbar|anrufen) unter|n[uú]m[eé]ro|numer)"
    r"(?![^\W_])[^\w\n]{0,4}"
    r"(?:(?:no|number|nr|nummer|de|du|is|ist|est|es)\b[^\w\n]{0,4}){0,2}\Z"
)
_DATE = re.compile(
    r"(?:19|20)\d\d[-./ ](?:0[1-9]|1[0-2])[-./ ][0-3]\d"
    r"|(?:[0-3]?\d[./-][01]?\d|[01]?\d[./-][0-3]?\d)[./-](?:19|20)\d\d"
)
_AMERICAN = re.compile(r"(?:1[ .-])?\(?[2-9]\d\d(?:\)[ .-]{0,2}|[ .-]{1,2})[2-9]\d\d[ .-]\d{4}")
_FRACTION = re.compile(r"\d\.\d+(?![ .\d])|0123456789")
_ADDRESS_OF_HOST = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")


_GROUPED = re.compile(
    r"(?:(?:\+|00)\d{1,3}[ ./-]{0,2})?[ (]{0,2}\d{1,15}(?:[^\d]{1,3}\d{2,10}){0,6}", re.ASCII
)  # rows of single digits are not phone numbers
# a unit after the number: it is an amount
_AMOUNT = re.compile(r"\s?(?:(?:EUR|USD|GBP|CHF|bytes|[kMG]i?B)\b|[€$£%])")
_TRUNK = re.compile(r" ?\(0\) ?")  # the trunk prefix in "+49 (0)30 ..."
_LONGEST_ANNOUNCEMENT = 40
_MOST_TRIES = 3  # tried ends of one number
_FREE_CHECKS, _CHARACTERS_A_CHECK = 500, 16  # a check takes 50 microseconds


class _Checks:
    """The number of checks for one text; beyond it every group of digits in the form of a number
    counts as one."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self) -> bool:
        self._left -= 1
        return self._left >= 0


_FEWEST_DIGITS = 7
_FEWEST_WITH_TRUNK, _FEWEST_UNGROUPED = 9, 10


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
    3166) in the form of the region, or announced by a word such as "phone" or "móvil".

    With the extra `privacy`, `phonenumbers` checks them; without, national numbers are found only in
    the form of North America, and others by their length.
    """

    kinds = frozenset(["phone"])
    needs_digit = True

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
        first = start + (text[start] == "(")
        if _DATE.match(text, first, end) or _ADDRESS_OF_HOST.match(text, first, end):
            return None
        is_announced = bool(_ANNOUNCED.search(text, max(0, start - _LONGEST_ANNOUNCEMENT), start))
        is_other = (
            is_numbered(text, start) or _AMOUNT.match(text, end) or _FRACTION.match(text, start)
        )
        if is_other and not is_announced and text[start] != "+":
            return None
        for stop in [end, *(each for each in _ends(text, start, end))][:_MOST_TRIES]:
            number = text[start:stop]
            number = number.removeprefix("(" * (number.count("(") > number.count(")")))
            plain = _TRUNK.sub(" ", number, count=1) if number[0] in "+0" else number
            if not _GROUPED.fullmatch(plain):
                continue
            if normal := self._normal(plain, is_announced) if checks.take() else number:
                return FoundValue(stop - len(number), stop, "phone", normal)
        return None

    def _normal(self, number: str, is_announced: bool) -> str | None:
        digits = "".join(filter(str.isdigit, number))
        if number.startswith(("+", "00")):
            return self._international("+" + digits.removeprefix("00"), is_certain=number[0] == "+")
        if self._library is None:
            return f"+1{digits[-10:]}" if _AMERICAN.fullmatch(number) else None
        for region in self._regions:
            has_form = is_announced or self._has_form(number, digits, region)
            if has_form and (normal := self.checked(number, region)):
                return normal
        return None

    def _has_form(self, number: str, digits: str, region: str) -> bool:
        """Tell whether a number is written as people of a region write it: with the trunk prefix, where
        the region has one, else in groups."""
        metadata = self._library.PhoneMetadata.metadata_for_region(region)
        separators = len(number) - len(digits)
        if metadata is None or metadata.country_code == 1:
            return bool(_AMERICAN.fullmatch(number))
        if metadata.national_prefix == "0":
            least = _FEWEST_WITH_TRUNK if separators else _FEWEST_UNGROUPED
            return digits[0] == "0" and len(digits) >= least
        return separators >= 2

    def _international(self, number: str, *, is_certain: bool) -> str | None:
        """Return the normal form of a number with a country code; behind a plus, it may be one that no
        plan has issued, such as those of examples."""
        if self._library is not None:
            return self.checked(number, None, is_issued=not is_certain)
        return number if 8 <= len(number) - 1 <= 15 and number[1] != "0" else None

    def checked(self, number: str, region: str | None, *, is_issued: bool = True) -> str | None:
        """Return the normal form of a number of a region, or with a country code, if its numbering plan
        has it; needs the extra `privacy`."""
        library = self._library
        try:
            parsed = library.parse(number, region)
        except library.NumberParseException:
            return None
        whole = library.ValidationResult.IS_POSSIBLE
        is_possible = library.is_possible_number_with_reason(parsed) == whole
        if not (library.is_valid_number(parsed) or (is_possible and not is_issued)):
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


_A = "A-Za-z0-9"
_V4 = rf"(?<![{_A}.])(?:\d{{1,3}}\.){{3}}\d{{1,3}}(?![{_A}]|\.\d)"
_V6 = (
    rf"(?<![{_A}:.])(?:[0-9A-Fa-f]{{0,4}}:){{2,7}}"
    rf"(?:[0-9A-Fa-f]{{1,4}}|(?:\d{{1,3}}\.){{3}}\d{{1,3}})?(?![{_A}:])"
)
_HEX = re.compile(r"[0-9A-Fa-f]{3}")


def _address(text: str) -> str | None:
    """Return the normal form of an address of one machine that others can reach."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    named_by_all = found.is_loopback or found.is_unspecified or found.is_multicast
    first = found.packed[0] if found.version == 4 else 1
    return None if named_by_all or first in (0, 255) else str(found)


# Words and signs before and after a version or the number of a section.
_VERSION = re.compile(
    r"(?i:(?<![^\W\d_])(?:versi[oó]ne?|ver|v|release|section|sec|chapter|clause|abschnitt|kapitel|artikel|article|art[ií]culo|cap[ií]tulo"
    r"|firmware|build|driver|rev|revision|table|figure|fig|oid)[.:=]{0,2}\s{0,2}|§\s?)\Z|[A-Z][A-Za-z]{2,30}/\Z|[A-Za-z]-v?\Z"
)
_PIN = re.compile(r"([\w.\]-]{1,60})(?:==|>=|<=|~=|@\^?|\^)\Z")
_HOST_NAME = re.compile(r"(?i)ip|addr|host|server|src|dst|remote|client")
_BEHIND_VERSION = re.compile(
    r"(?i)\.(?:tar|t?gz|zip|whl|dll|exe|jar|deb|rpm|so)\b|-(?:alpha|beta|rc|snapshot|dev)"
)
_NETWORK = re.compile(r"/(?:[0-9]|[12]\d|3[01])(?![\d.])")
_HEADING = re.compile(r"(?:^|\n)[ \t#*-]{0,6}\Z")
_TITLE = re.compile(r"[ \t]{1,4}[A-Z][a-z]")
_LARGEST_SECTION = 30
_BEFORE = 64


def _is_version(text: str, start: int, end: int) -> bool:
    """Tell whether four numbers are a version, the number of a section, or a network."""
    numbers = [int(each) for each in text[start:end].split(".")]
    if max(numbers) < 10 or numbers[1:] == [0, 0, 0] or _BEHIND_VERSION.match(text, end):
        return True
    if numbers[3] == 0 and _NETWORK.match(text, end):
        return True
    place = max(0, start - _BEFORE)
    pin = _PIN.search(text, place, start)
    if _VERSION.search(text, place, start) or (pin and not _HOST_NAME.search(pin[1])):
        return True
    is_small = max(numbers) <= _LARGEST_SECTION and _TITLE.match(text, end)
    return bool(is_small and _HEADING.search(text[place:start]))


def _v6(text: str) -> str | None:
    """The address must have a long group: `1::2` may also be a slice of a program."""
    return _address(text) if _HEX.search(text) else None


def _mac(text: str) -> str | None:
    digits = re.sub("[:.-]", "", text).lower()
    return None if digits in ("0" * 12, "f" * 12) else digits


def host_detectors() -> tuple[PatternDetector, ...]:
    """Return the detectors of IP and MAC addresses, and of credentials in URLs."""
    pair, word = "[0-9A-Fa-f]{2}", "[0-9A-Fa-f]{4}"
    mac = rf"(?:{pair}([:-]){pair}(?:\1{pair}){{4}}|{word}\.{word}\.{word})"
    mac = rf"(?<![{_A}:.-]){mac}(?![{_A}:-]|\.[{_A}])"  # else it is a card number
    login = r"(?<=://)[^\s:/@\"'<>]{0,100}:[^\s/@\"'<>]{1,200}(?=@)"
    return (
        PatternDetector("ip", _V4, _address, ["."], _is_version, needs_digit=True),
        PatternDetector("ip", _V6, _v6, [":"]),
        PatternDetector("mac", mac, _mac),
        PatternDetector("login", login, str, ["://"]),
    )


class SecretDetector:
    """Keys, passwords and tokens by format, by the name before them and by randomness."""

    kinds = frozenset(["secret"])

    def find(self, text: str) -> Iterable[FoundValue]:
        for each in find_secrets(text):
            yield FoundValue(each.start, each.end, "secret", text[each.start : each.end])
