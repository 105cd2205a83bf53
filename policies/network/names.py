"""Host names in one canonical spelling, by which cellwright decides, records and dials.

A canonical name is ASCII, in lower case, without a trailing dot, and has at most 253 characters.
Addresses are never names, however they are written: programs disagree about `127.1`, `0x7f.1` and
`2130706433`.
"""

import re

_LONGEST = 253  # characters (RFC 1035, 2.3.4, without the root's dot)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
# inet_aton(3) and browsers read a name as an IPv4 address if its last label is a number.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
# Characters that IDNA 2003, which Python has, and IDNA 2008 encode differently: sharp s, final sigma.
_DISPUTED = "\u00df\u1e9e\u03c2"
_REASONS = {
    "[": "has brackets",
    "]": "has brackets",
    ":": "is a URL or an IPv6 address, or has a port",
    "%": "has a zone id or percent-encoding",
    "/": "has a slash",
    "\\": "has a backslash",
    "@": "has user information",
    "*": "has a wildcard",
}


class HostNameError(ValueError):
    """A text is not a host name; the message has the text and the reason."""


def canonical_name(text: str) -> str:
    """Return the canonical spelling of a host name; raises HostNameError.

    Names that are not ASCII are encoded by IDNA 2003 (Python's codec).  Names on which IDNA 2008
    differs are refused: write them in ASCII, as `xn--...`.
    """
    if len(text) > _LONGEST + 1:
        raise HostNameError(f"{text[:60]!a}...: is longer than {_LONGEST} characters")
    for character, reason in _REASONS.items():
        if character in text:
            raise HostNameError(f"{text!a}: {reason}")
    name = (text if text.isascii() else _encoded(text)).lower().removesuffix(".")
    if not name or len(name) > _LONGEST:
        raise HostNameError(f"{text!a}: must have from 1 to {_LONGEST} characters")
    labels = name.split(".")
    for label in labels:
        if not _LABEL.fullmatch(label):
            raise HostNameError(
                f"{text!a}: each part must have 1 to 63 letters, digits, '_' or '-', "
                "and no '-' at its ends"
            )
    if _NUMBER.fullmatch(labels[-1]):
        raise HostNameError(f"{text!a}: is an address, not a name")
    return name


def _encoded(text: str) -> str:
    """Return the ASCII form of a name (RFC 3490)."""
    import stringprep  # few names are not ASCII

    for character in text:
        if character in _DISPUTED:
            raise HostNameError(
                f"{text!a}: IDNA 2003 and IDNA 2008 encode {character!a} differently: write xn--..."
            )
        if stringprep.in_table_b1(character):
            raise HostNameError(f"{text!a}: has an invisible character, {character!a}")
    try:
        return text.encode("idna").decode("ascii")
    except UnicodeError as error:
        raise HostNameError(f"{text!a}: cannot be encoded by IDNA: {error}") from None
