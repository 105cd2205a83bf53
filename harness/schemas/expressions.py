"""Regular expressions of JSON Schema, parsed into trees.

The dialect is ECMA-262 without the parts that need backtracking: lookaround and backreferences.
"""

from collections.abc import Sequence
from typing import NamedTuple

_MAX_CHARACTERS = 1000
_MAX_DEPTH = 40
_MAX_DIGITS = 4  # of a repetition count: a larger one exceeds the size of a pattern anyway
_LAST = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
_DIGITS: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = ((9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF))  # fmt: skip
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "v": 11, "f": 12, "0": 0}
_HEX = {"x": 2, "u": 4}


class Unsupported(ValueError):  # noqa: N818 - a verdict on a pattern
    """The pattern needs backtracking, is too large, or is invalid."""


class Characters(NamedTuple):
    """One character out of these ranges."""

    ranges: Ranges


class Assertion(NamedTuple):
    """A condition between two characters: `^`, `$`, `b` or `B`."""

    which: str


class Join(NamedTuple):
    """Several parts, one after the other."""

    parts: "tuple[Tree, ...]"


class AnyOf(NamedTuple):
    """Alternatives: `a|b`."""

    parts: "tuple[Tree, ...]"


class Repeat(NamedTuple):
    """A part that occurs `least` to `most` times; None is unbounded."""

    part: "Tree"
    least: int
    most: int | None


Tree = Characters | Assertion | Join | AnyOf | Repeat


def parse(text: str) -> Tree:
    """Return the tree of the expression `text`; raises Unsupported."""
    if len(text) > _MAX_CHARACTERS:
        raise Unsupported(f"longer than {_MAX_CHARACTERS} characters")
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def parse(self) -> Tree:
        tree = self._either()
        if self._at < len(self._text):
            raise Unsupported("an unmatched )")
        return tree

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        if not (character := self._peek()):
            raise Unsupported("unexpected end")
        self._at += 1
        return character

    def _takes(self, text: str) -> bool:
        if found := self._text.startswith(text, self._at):
            self._at += len(text)
        return found

    def _either(self) -> Tree:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unsupported("nested too deeply")
        parts = [self._join()]
        while self._takes("|"):
            parts.append(self._join())
        self._depth -= 1
        return AnyOf(tuple(parts)) if len(parts) > 1 else parts[0]

    def _join(self) -> Tree:
        parts: list[Tree] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return Join(tuple(parts))

    def _repeated(self, atom: Tree) -> Tree:
        if not (bounds := self._bounds()):
            return atom
        self._takes("?")  # a lazy repetition matches the same texts
        if self._bounds():
            raise Unsupported("a repetition of a repetition")
        return Repeat(atom, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self._takes(sign):
                return bounds
        if self._peek() != "{" or (end := self._text.find("}", self._at)) < 0:
            return None
        least, comma, most = self._text[self._at + 1 : end].partition(",")
        if not _is_count(least) or (most and not _is_count(most)):
            return None  # a literal brace
        self._at = end + 1
        return int(least), (int(most) if most else None) if comma else int(least)

    def _atom(self) -> Tree:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return Characters(self._set())
        if character == ".":
            return Characters(_without(((10, 10), (13, 13), (0x2028, 0x2029))))
        if character in "^$":
            return Assertion(character)
        if character == "\\":
            return self._escape()
        if character in "*+?":
            raise Unsupported(f"nothing to repeat before {character}")
        return Characters(((ord(character), ord(character)),))

    def _group(self) -> Tree:
        if self._takes("?") and not self._takes(":"):
            raise Unsupported("lookaround, a named group, or flags")
        tree = self._either()
        if not self._takes(")"):
            raise Unsupported("an unmatched (")
        return tree

    def _escape(self) -> Tree:
        if self._peek() in ("b", "B"):
            return Assertion(self._take())
        if self._peek() and self._peek() in "123456789k":
            raise Unsupported("a backreference")
        return Characters(self._escaped())

    def _escaped(self) -> Ranges:
        character = self._take()
        if character.lower() in _CLASSES:
            ranges = _CLASSES[character.lower()]
            return ranges if character.islower() else _without(ranges)
        if character in _HEX:
            digits = "".join(self._take() for _ in range(_HEX[character]))
            if any(digit not in "0123456789abcdefABCDEF" for digit in digits):
                raise Unsupported(f"\\{character} without hexadecimal digits")
            return ((int(digits, 16), int(digits, 16)),)
        if character.isalnum() and character not in _CONTROLS:
            raise Unsupported(f"unknown escape \\{character}")
        code = _CONTROLS.get(character, ord(character))
        return ((code, code),)

    def _set(self) -> Ranges:
        negated = self._takes("^")
        ranges: list[tuple[int, int]] = []
        while not self._takes("]"):
            low = self._member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._take()
                low = _between(low, self._member())
            ranges += low
        return _without(ranges) if negated else _merged(ranges)

    def _member(self) -> Ranges:
        if self._takes("\\"):
            return ((8, 8),) if self._takes("b") else self._escaped()
        character = self._take()
        return ((ord(character), ord(character)),)


def _between(low: Ranges, high: Ranges) -> Ranges:
    """Return the range between two members of a set; beside a class, as in `[\\d-_]`, the hyphen is
    literal (ECMA-262, B.1.2.8.1)."""
    if not (_is_one(low) and _is_one(high)):
        return (*low, (ord("-"), ord("-")), *high)
    if low[0][0] > high[0][0]:
        raise Unsupported("a range that runs backward")
    return ((low[0][0], high[0][0]),)


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _merged(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return the same characters as sorted ranges that do not touch."""
    return _without(_without(ranges))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


def _without(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return every character outside `ranges`."""
    left, begin = [], 0
    for low, high in sorted(ranges):
        if low > begin:
            left.append((begin, low - 1))
        begin = max(begin, high + 1)
    return tuple(left) if begin > _LAST else (*left, (begin, _LAST))
