"""Hidden characters: those that a person does not see and a model or a terminal obeys all the same.

The one table for texts of tools, servers and guests.  They carry text unseen (tags, variation
selectors), reorder what is read (bidirectional controls, CVE-2021-42574) or move a cursor (controls).
"""

import functools
import re
import unicodedata
from collections.abc import Callable

# Controls, formats, halves of pairs, private use, separators of lines and paragraphs.
_CATEGORIES = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))
# Default_Ignorable_Code_Point of Unicode's DerivedCoreProperties.txt, as far as the categories above
# lack it, and the tags' plane whole: fillers, joiners and variation selectors.
_IGNORABLE = (
    (0x034F, 0x034F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x2065, 0x2065),
    (0x3164, 0x3164), (0xFDD0, 0xFDEF), (0xFE00, 0xFE0F), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8),
    (0xE0000, 0xE0FFF),
)  # fmt: skip
_VISIBLE = frozenset("\n\t")
_PRESENTATION = frozenset("\ufe0e\ufe0f")  # text or picture: an emoji may have one of them
_KEYCAPS = frozenset("0123456789#*\u203c\u2049")  # have it too, and are not symbols
_UNUSUAL = re.compile(r"[^\n\t\x20-\x7e]")


@functools.lru_cache(4096)
def is_hidden(character: str) -> bool:
    """Tell whether a person does not see `character`, wherever it stands."""
    code = ord(character)
    return (
        (unicodedata.category(character) in _CATEGORIES and character not in _VISIBLE)
        or any(first <= code <= last for first, last in _IGNORABLE)
        or code & 0xFFFE == 0xFFFE
    )


def replace_hidden(text: str, replacement: Callable[[str], str]) -> str:
    """Return `text` with each hidden character replaced by `replacement(character)`."""

    def replaced(match: re.Match[str]) -> str:
        character, start = match[0], match.start()
        if not is_hidden(character) or (
            character in _PRESENTATION and start and _may_have_selector(text[start - 1])
        ):
            return character
        return replacement(character)

    return _UNUSUAL.sub(replaced, text)


def first_hidden(text: str) -> str:
    """Return the first hidden character of `text`; nothing if a person sees all of it."""
    if text.isascii() and text.isprintable():
        return ""
    found: list[str] = []

    def kept(character: str) -> str:
        found.append(character)
        return character

    replace_hidden(text, kept)
    return found[0] if found else ""


def _may_have_selector(character: str) -> bool:
    return unicodedata.category(character)[0] == "S" or character in _KEYCAPS


def visible(text: str, limit: int = 4096) -> str:
    """Return the beginning of a text as people see it, without hidden characters."""
    seen = replace_hidden(text[:limit], lambda _: "")
    return seen + "…" if len(text) > limit else seen


def prose(text: object, limit: int = 2000) -> str:
    """Return a text in lines, without what nobody sees, at most `limit` characters; "" for none."""
    if not isinstance(text, str):
        return ""
    lines = visible(text, limit * 2).replace("\t", " ").split("\n")
    return cut("\n".join(each.rstrip() for each in lines).strip(), limit)


def line(text: object, limit: int = 300) -> str:
    """Return a text in one line."""
    return cut(" ".join(prose(text, limit * 2).split()), limit)


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"
