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
        PatternDetector("ip", _V4, _address, ["."]),
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
