"""Paths of HTTP requests in one canonical spelling, so that servers cannot read them differently.

Also the headers by which servers are told another request than the one that rules allowed.
"""

import re

_LONGEST = 8192
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_PLAIN = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@/%-]+")
_UNRESERVED = re.compile(r"[A-Za-z0-9._~-]")
_OVERRIDES = frozenset(
    ("forwarded", "x-http-method", "x-http-method-override", "x-method-override")
)
_OVERRIDE_PREFIXES = ("x-forwarded-", "x-original-", "x-rewrite-")


class PathError(ValueError):
    """A path is invalid or ambiguous; the message has the path and the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path[:60]!a}: {reason}")
        self.reason = reason


def canonical_path(path: str) -> str:
    """Return the canonical spelling of an absolute path without its query; raises PathError.

    Escaped letters, digits, `.`, `-`, `_` and `~` are decoded, as RFC 3986 6.2.2.2 says; other escapes
    get upper case.  Refused is what servers and proxies disagree about: dot segments, empty segments,
    and slashes, backslashes, percent signs, semicolons and control characters that are escaped.
    """
    if not path.startswith("/") or len(path) > _LONGEST:
        raise PathError(path, f"must begin with / and have at most {_LONGEST} characters")
    if not _PLAIN.fullmatch(path) or "%" in _ESCAPE.sub("", path):
        raise PathError(path, "has a character that must be escaped, or an invalid escape")
    found = _ESCAPE.sub(lambda escape: _decoded(path, escape[1]), path)
    segments = found.split("/")[1:]
    for segment in segments:
        if segment.partition(";")[0] in (".", ".."):
            raise PathError(path, "has a dot segment")
    if "" in segments[:-1]:
        raise PathError(path, "has an empty segment")
    return found


def overrides_request(header: str) -> bool:
    """Tell whether servers may take another method, path or host from a header, in lower case."""
    return header in _OVERRIDES or header.startswith(_OVERRIDE_PREFIXES)


def _decoded(path: str, digits: str) -> str:
    code = int(digits, 16)
    character = chr(code)
    if code < 0x20 or code == 0x7F or character in "/\\%;":
        raise PathError(path, f"has an escaped {character!a}")
    return character if _UNRESERVED.fullmatch(character) else f"%{digits.upper()}"
