"""Other ways to write the same characters: full-width, invisible ones between, escapes, encodings.

`views` returns a text as detectors should also read it, each view with the place in the original that
every character comes from.  One level of each way is undone; the README lists those that are not.
"""

import base64
import binascii
import html
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import NamedTuple


class View(NamedTuple):
    """A text, and for each character, and the end, where it begins in the original."""

    text: str
    places: list[int]


# Escapes of JSON and of programs, of URLs and of HTML; each stands for one character or one byte.
_ESCAPE = re.compile(
    r"\\{1,8}u[0-9A-Fa-f]{4}|\\{1,8}x[0-9A-Fa-f]{2}|%[0-7][0-9A-Fa-f]|=[2-7][0-9A-F]"
    r"|&(?:#\d{1,6}|#[xX][0-9A-Fa-f]{1,5}|[A-Za-z]{2,8});"
)
_ESCAPE_HINT = re.compile(r"[\\%&=]")
_ODD = re.compile(r"[^ -~\t\n\r]")
_SHY = "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u2800\u3164\uffa0"  # shown as nothing
_ENCODED = re.compile(
    r"(?:[A-Za-z0-9+/]{60,76}\r?\n){0,400}[A-Za-z0-9+/_-]{12,8192}={0,2}"  # in lines, or in one
)
_HEXADECIMAL = re.compile(r"(?:[0-9A-Fa-f]{2}[ :]?){7,4096}")
_LEAST_PRINTABLE = 0.9


def views(text: str) -> Iterator[View]:
    """Yield `text` with odd characters folded, and with escapes undone, where it has any."""
    if _ODD.search(text):
        yield _mapped(text, _ODD, _fold)
    if _ESCAPE_HINT.search(text) and _ESCAPE.search(text):
        yield _mapped(text, _ESCAPE, _unescape)


def _mapped(text: str, pattern: re.Pattern[str], change: Callable[[str], str]) -> View:
    parts: list[str] = []
    places: list[int] = []
    end = 0
    for match in pattern.finditer(text):
        changed = change(match[0])
        parts += [text[end : match.start()], changed]
        places += range(end, match.start())
        places += [match.start()] * len(changed)
        end = match.end()
    places += range(end, len(text) + 1)
    return View("".join([*parts, text[end:]]), places)


def _fold(character: str) -> str:
    """Return the plain form of a character; nothing for one that is not shown."""
    category = unicodedata.category(character)
    if category in ("Cf", "Mn", "Me", "Cc", "Cs") or character in _SHY:
        return ""
    if category == "Pd" or character == "\u2212":  # dashes, such as of word processors
        return "-"
    if category == "Nd":
        return str(unicodedata.digit(character))
    return unicodedata.normalize("NFKC", character) if category != "Zs" else " "


def _unescape(escape: str) -> str:
    if escape.startswith("&"):
        return html.unescape(escape)
    return chr(int(escape.lstrip("\\ux%="), 16))


def decoded(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield each part that is text in base64 or hexadecimal: start, end, and that text."""
    for pattern, decode in ((_HEXADECIMAL, _from_hexadecimal), (_ENCODED, _from_base64)):
        for match in pattern.finditer(text):
            for content in decode(match[0]):
                yield *match.span(), content


def _from_hexadecimal(run: str) -> Iterator[str]:
    yield from _as_text(bytes.fromhex(re.sub("[ :]", "", run)))


def _from_base64(run: str) -> Iterator[str]:
    """Yield what a run says in base64; the end of an incomplete one is cut."""
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
