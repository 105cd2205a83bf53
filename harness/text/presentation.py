"""Presentation of a call to the person who approves it: every argument whole, none hidden by another.

A program or a model writes the arguments, and may try to get something approved that the person does
not see: pushed out of view by padding, behind blanks that look like the end, or in hidden characters.
So the names come first; each argument has one line, the shortest first; runs of blanks and repetitions
are counted instead of shown; hidden characters are escaped.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from ...policies.errors import ApprovalRequired
from .terminal import harmless

MOST_SHOWN = 8000  # characters of all arguments: as much as a person can be expected to read
MOST_LISTED = 400  # characters of one argument in a list
_MOST_NAMES = 64  # arguments of a call that can be approved
_DEEPEST = 8  # levels of nested objects whose values get a line each
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST_RUN = 16  # of one repeated character; 3 of blanks
_LINE_END = r"[\n\r\x0b\x0c\x85\u2028\u2029]|\\[nr]"
_BLANK = r"[\s\u00ad\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0]|\\[nrt]"
_RUN = re.compile(
    rf"(?P<backslash>\\\\)|(?P<blank>(?:{_BLANK}){{4,}})|(?P<same>(.)\4{{{_LONGEST_RUN},}})",
    re.DOTALL,
)
_TOKEN = re.compile(r"[^\s\"]+")
_LATIN = re.compile("[A-Za-z0-9]")
_UNSEEN = re.compile("[^\x20-\x7e]")
# Categories Mn and Me: marks over a character, variation selectors among them; Zs: blanks of other
# widths.
_WRITTEN_OUT = frozenset(("Mn", "Me", "Zs"))
# Letters and symbols by category that are invisible (Unicode: Default_Ignorable_Code_Point, and
# BRAILLE PATTERN BLANK), and the brackets of this module's notes, which an argument must not forge.
_OTHERS_UNSEEN = frozenset("\u115f\u1160\u2800\u3164\uffa0\u27e8\u27e9")


class Presented(NamedTuple):
    """The text of a call's arguments; `is_whole` if no part was cut."""

    text: str
    is_whole: bool
    characters: int  # of the uncut arguments


def present(arguments: Mapping[str, Any], most: int = MOST_SHOWN) -> Presented:
    """Return the arguments for a person: their names, then one line each, cut at `most` characters."""
    given = [(name, _readable(_encoded(value))) for name, value in _flat(arguments, "", 1)]
    names = [name for name, _ in given]
    lines = sorted(given, key=lambda line: len(line[1]))
    total = sum(len(name) + len(value) for name, value in lines)
    told = [
        f"{len(names)} arguments: {', '.join(names[:_MOST_NAMES])}" if names else "no arguments"
    ]
    is_whole = total <= MOST_SHOWN
    for name, value in lines[:_MOST_NAMES]:
        cut = _cut(value, most)
        is_whole &= cut is value
        told.append(f"  {name}: {cut}")
    if len(lines) > _MOST_NAMES:
        is_whole = False
        told.append(f"  ⟨{len(lines) - _MOST_NAMES} more⟩")
    return Presented("\n".join(told), is_whole, total)


def shortened(text: str, most: int = MOST_LISTED) -> str:
    """Return other untrusted text on one line, readable, and cut at `most` characters."""
    return _cut(_readable(_encoded(text)[1:-1]), most)


def presented_whole(tool: str, arguments: Mapping[str, Any]) -> str:
    """Return the arguments as a person must see them to approve the call.

    Raises ApprovalRequired if they are too long to be shown whole: a person cannot approve what is not
    shown.
    """
    presented = present(arguments)
    if not presented.is_whole:
        raise ApprovalRequired(
            f"{tool} needs approval, and its arguments cannot be shown whole: {len(arguments)} "
            f"arguments, {presented.characters:,} characters of {MOST_SHOWN:,}",
            "pass shorter arguments, or let a program that checks them approve the call",
            tool=tool,
        )
    return presented.text


def _flat(values: Mapping[str, Any], above: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield each value with its path, such as `message.to`; objects yield their values."""
    for key, value in values.items():
        name = above + (key if _PLAIN_NAME.fullmatch(key) else _readable(_encoded(key)))
        if isinstance(value, dict) and value and depth < _DEEPEST:
            yield from _flat(value, f"{name}.", depth + 1)
        else:
            yield name, value


def _cut(value: str, most: int) -> str:
    return value if len(value) <= most else f"{value[:most]}⟨cut: {len(value):,} characters⟩"


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode("utf-8", "replace")


def _readable(text: str) -> str:
    """Return JSON on one line, with hidden characters escaped and padding counted."""
    if not text.isascii():
        text = _TOKEN.sub(_without_lookalikes, text)
    kept, at = [], 0
    for run in _RUN.finditer(text):
        kept.append(_written_out(text[at : run.start()]))
        at = run.end()
        if run["backslash"]:  # an escaped one: what follows is no escape
            kept.append(run["backslash"])
        elif run["blank"]:
            kept.append(_counted(run["blank"]))
        else:
            kept.append(f"{_written_out(run['same'][0])}⟨{len(run['same']):,} times⟩")
    kept.append(_written_out(text[at:]))
    return harmless("".join(kept))


def _counted(blanks: str) -> str:
    """Return how many blanks there are, and how many of them end a line: a command may follow there."""
    count, ends = (len(re.findall(kind, blanks)) for kind in (_BLANK, _LINE_END))
    return f"⟨{count:,} blanks, {ends:,} of them line ends⟩" if ends else f"⟨{count:,} blanks⟩"


def _written_out(text: str) -> str:
    return _UNSEEN.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    if character in _OTHERS_UNSEEN or unicodedata.category(character) in _WRITTEN_OUT:
        return _code_of(character)
    return character


def _without_lookalikes(token: re.Match[str]) -> str:
    """Escape the lookalikes in a word, address or path: characters that stand for ASCII ones (NFKC),
    and letters of other scripts beside Latin ones (UTS 39)."""
    word = token[0]
    if word.isascii():
        return word
    is_latin = bool(_LATIN.search(word))
    return "".join(
        _code_of(each) if not each.isascii() and _is_lookalike(each, is_latin=is_latin) else each
        for each in word
    )


@lru_cache(4096)
def _is_lookalike(character: str, *, is_latin: bool) -> bool:
    if character in _OTHERS_UNSEEN:  # `_escaped` writes these out
        return False
    same = unicodedata.normalize("NFKC", character)
    if len(same) == 1 and same.isascii():
        return True
    is_letter = unicodedata.category(character)[0] in "LN"
    return is_latin and is_letter and not unicodedata.name(character, "").startswith("LATIN ")


def _code_of(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
