"""Paths of HTTP requests in one canonical spelling, so that servers cannot read them differently."""

import re

_LONGEST = 8192
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_PLAIN = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@/%-]+")
_UNRESERVED = re.compile(r"[A-Za-z0-9._~-]")


class PathError(ValueError):
    """A path is invalid or ambiguous; the message has the path and the reason."""


def canonical_path(path: str) -> str:
    """Return the canonical spelling of an absolute path without its query; raises PathError.

    Escaped letters, digits, `.`, `-`, `_` and `~` are decoded, as RFC 3986 6.2.2.2 says; other escapes
    get upper case.  Refused is what servers and proxies disagree about: dot segments, empty segments,
    and slashes, backslashes, percent signs, semicolons and control characters that are escaped.
    """
    if not path.startswith("/") or len(path) > _LONGEST:
        raise PathError(f"{path[:60]!a}: must begin with / and have at most {_LONGEST} characters")
    if not _PLAIN.fullmatch(path) or "%" in _ESCAPE.sub("", path):
        raise PathError(
            f"{path[:60]!a}: has a character that must be escaped, or an invalid escape"
        )
    found = _ESCAPE.sub(lambda escape: _decoded(path, escape[1]), path)
    segments = found.split("/")[1:]
    for segment in segments:
        if segment.partition(";")[0] in (".", ".."):
            raise PathError(f"{path[:60]!a}: has a dot segment")
    if "" in segments[:-1]:
        raise PathError(f"{path[:60]!a}: has an empty segment")
    return found


def _decoded(path: str, digits: str) -> str:
    code = int(digits, 16)
    character = chr(code)
    if code < 0x20 or code == 0x7F or character in "/\\%;":
        raise PathError(f"{path[:60]!a}: has an escaped {character!a}")
    return character if _UNRESERVED.fullmatch(character) else f"%{digits.upper()}"
