"""Addresses of machines, credentials in URLs, and secrets."""

import ipaddress
import re
from collections.abc import Iterable

from ..text.secrets import find_secrets
from .detector import FoundValue, PatternDetector

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


# Words and signs before a version, or before the number of a section, and what follows one.
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
    mac = rf"(?<![{_A}:.-]){mac}(?![{_A}:-]|\.[{_A}])"  # two groups of four more are a card
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
