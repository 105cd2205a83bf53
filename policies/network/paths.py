"""Paths of HTTP requests in one canonical spelling, so that servers cannot read them differently."""

import re

_LONGEST = 8192
_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})")
_ESCAPED = re.compile(rb"%([0-9A-F]{2})")
_PLAIN = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@/%-]+")
_UNRESERVED = re.compile(r"[A-Za-z0-9._~-]")
# `/`, and characters of which Windows makes `/` or a backslash in some of its code pages.
_SEPARATOR = re.compile("[/\\\\\u2044\u2215\u2216\u29f5\u29f8\u00a5\u20a9]")


class PathError(ValueError):
    """A path is invalid or ambiguous; the message has the path and the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path[:60]!a}: {reason}")
        self.reason = reason


def canonical_path(path: str) -> str:
    """Return the canonical spelling of an absolute path without its query; raises PathError.

    Escaped letters, digits, `.`, `-`, `_` and `~` are decoded, as RFC 3986 6.2.2.2 says; other escapes
    get upper case.  Refused is what servers and proxies disagree about: dot segments, empty segments,
    slashes, backslashes, percent signs, semicolons and control characters that are escaped, and escapes
    that are not UTF-8.
    """
    if not path.startswith("/") or len(path) > _LONGEST:
        raise PathError(path, f"must begin with / and have at most {_LONGEST} characters")
    if not _PLAIN.fullmatch(path) or "%" in _ESCAPE.sub("", path):
        raise PathError(path, "has a character that must be escaped, or an invalid escape")
    found = _ESCAPE.sub(lambda escape: _decoded(path, escape[1]), path)
    if _has_dot_segment(found):
        raise PathError(path, "has a dot segment")
    if "//" in found:
        raise PathError(path, "has an empty segment")
    return found


def _has_dot_segment(path: str) -> bool:
    """Tell whether some server takes a segment of a canonical path for `.` or `..`.

    Servers fold characters such as the full-width dot (NFKC), cut parameters off, and remove spaces.
    Raises PathError for escapes that are not UTF-8, by which `%C0%AE` was a dot.
    """
    try:
        text = _ESCAPED.sub(
            lambda escape: bytes.fromhex(escape[1].decode()), path.encode()
        ).decode()
    except UnicodeDecodeError:
        raise PathError(path, "has escapes that are not UTF-8") from None
    readings = [text] if text.isascii() else [text, _folded(text)]
    segments = (segment for each in readings for segment in _SEPARATOR.split(each))
    return any(each.partition(";")[0].rstrip(" ") in (".", "..") for each in segments)


def _folded(text: str) -> str:
    """Return `text` by NFKC, with plain dots for those of names, without invisible characters."""
    import unicodedata  # few paths are not ASCII

    text = unicodedata.normalize("NFKC", text).replace("\u3002", ".")
    return "".join(each for each in text if unicodedata.category(each) != "Cf")


def _decoded(path: str, digits: str) -> str:
    code = int(digits, 16)
    character = chr(code)
    if code < 0x20 or code == 0x7F or character in "/\\%;":
        raise PathError(path, f"has an escaped {character!a}")
    return character if _UNRESERVED.fullmatch(character) else f"%{digits.upper()}"
