"""Regular expressions in time linear in the text, for patterns that nobody here wrote.

`re` backtracks: `^(\\w+\\s?)*$` on forty characters takes longer than anyone waits, and cannot be
stopped.  Here all ways are followed at once (Thompson, CACM 11:6, 1968), so a text costs at most its
length times the states of the pattern, and who asks says how much may be spent.  The dialect is
that of JSON Schema, ECMA-262 without what needs backtracking: no lookaround, no references back.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MAX_STATES = 2000
_MAX_CHARACTERS = 1000
_MAX_DEPTH = 40
_LAST = 0x10FFFF
_Ranges = tuple[tuple[int, int], ...]
_DIGITS: _Ranges = ((48, 57),)
_WORD: _Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: _Ranges = ((9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF))  # fmt: skip
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "v": 11, "f": 12, "0": 0}
_HEX = {"x": 2, "u": 4}


class Unsupported(ValueError):  # noqa: N818 - a verdict on a pattern
    """The pattern needs backtracking, is too large, or is none."""


class _State(NamedTuple):
    """`ranges`: a character to consume; `assertion`: something to hold; else a fork to `after`."""

    after: tuple[int, ...]
    ranges: _Ranges | None = None
    assertion: str = ""


class Pattern(NamedTuple):
    """A pattern, ready to be looked for."""

    states: tuple[_State, ...]
    start: int

    def found_in(self, text: str, spend: Callable[[int], None]) -> bool:
        """Tell whether it matches anywhere in `text`; `spend` is told of steps, and may raise."""
        current: set[int] = set()
        for position in range(len(text) + 1):
            self._enter(self.start, current, text, position)
            if 0 in current:
                return True
            spend(len(current))
            if position < len(text):
                current = self._step(current, ord(text[position]), text, position + 1)
        return False

    def _step(self, current: set[int], character: int, text: str, position: int) -> set[int]:
        following: set[int] = set()
        for number in current:
            state = self.states[number]
            if state.ranges and any(low <= character <= high for low, high in state.ranges):
                self._enter(state.after[0], following, text, position)
        return following

    def _enter(self, number: int, entered: set[int], text: str, position: int) -> None:
        """Add a state and all that it leads to without consuming anything."""
        waiting = [number]
        while waiting:
            number = waiting.pop()
            state = self.states[number]
            if number in entered or (
                state.assertion and not _holds(state.assertion, text, position)
            ):
                continue
            entered.add(number)
            if state.ranges is None:
                waiting += state.after


def _holds(assertion: str, text: str, position: int) -> bool:
    if assertion == "^":
        return position == 0
    if assertion == "$":
        return position == len(text)
    before = position > 0 and _is_word(text[position - 1])
    after = position < len(text) and _is_word(text[position])
    return (before != after) == (assertion == "b")


def _is_word(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character == "_")


def compile_pattern(text: str) -> Pattern:
    """Return the pattern that `text` says; raises Unsupported."""
    if len(text) > _MAX_CHARACTERS:
        raise Unsupported(f"more than {_MAX_CHARACTERS} characters")
    tree = _Parser(text).parse()
    states = [_State(())]  # 0: matched
    start = _build(tree, 0, states)
    return Pattern(tuple(states), start)


# A tree is ("set", ranges), ("assert", which), ("join", parts), ("either", parts) or
# ("repeat", part, least, most), with most None for no bound.
_Tree = tuple[Any, ...]


def _build(tree: _Tree, then: int, states: list[_State]) -> int:
    """Add the states of `tree`, which lead to the state `then`; return where they begin."""
    if tree[0] == "set":
        return _add(states, _State((then,), tree[1]))
    if tree[0] == "assert":
        return _add(states, _State((then,), None, tree[1]))
    if tree[0] == "join":
        for part in reversed(tree[1]):
            then = _build(part, then, states)
        return then
    if tree[0] == "either":
        return _add(states, _State(tuple(_build(part, then, states) for part in tree[1])))
    return _build_repeat(tree[1], tree[2], tree[3], then, states)


def _build_repeat(
    part: _Tree, least: int, most: int | None, then: int, states: list[_State]
) -> int:
    if most is None:
        loop = _add(states, _State(()))
        states[loop] = _State((_build(part, loop, states), then))
        then = loop
    for _ in range(most - least if most is not None else 0):
        then = _add(states, _State((_build(part, then, states), then)))
    for _ in range(least):
        then = _build(part, then, states)
    return then


def _add(states: list[_State], state: _State) -> int:
    if len(states) >= MAX_STATES:
        raise Unsupported(f"more than {MAX_STATES} states")
    states.append(state)
    return len(states) - 1


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def parse(self) -> _Tree:
        tree = self._either()
        if self._at < len(self._text):
            raise Unsupported("an unmatched )")
        return tree

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        if not (character := self._peek()):
            raise Unsupported("it ends too early")
        self._at += 1
        return character

    def _takes(self, text: str) -> bool:
        if found := self._text.startswith(text, self._at):
            self._at += len(text)
        return found

    def _either(self) -> _Tree:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unsupported("nested too deeply")
        parts = [self._join()]
        while self._takes("|"):
            parts.append(self._join())
        self._depth -= 1
        return ("either", parts) if len(parts) > 1 else parts[0]

    def _join(self) -> _Tree:
        parts = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return ("join", parts)

    def _repeated(self, atom: _Tree) -> _Tree:
        if not (bounds := self._bounds()):
            return atom
        self._takes("?")  # as few as can be: whether it matches is the same
        if self._bounds():
            raise Unsupported("a repetition of a repetition")
        return ("repeat", atom, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self._takes(sign):
                return bounds
        end = self._text.find("}", self._at)
        if self._peek() != "{" or end < 0:
            return None
        least, comma, most = self._text[self._at + 1 : end].partition(",")
        if not _is_count(least) or (most and not _is_count(most)):
            return None  # a brace that is meant as such
        self._at = end + 1
        return int(least), (int(most) if most else None) if comma else int(least)

    def _atom(self) -> _Tree:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return ("set", self._set())
        if character == ".":
            return ("set", _without(((10, 10), (13, 13), (0x2028, 0x2029))))
        if character in "^$":
            return ("assert", character)
        if character == "\\":
            return self._escape()
        if character in "*+?":
            raise Unsupported(f"nothing to repeat before {character}")
        return ("set", ((ord(character), ord(character)),))

    def _group(self) -> _Tree:
        if self._takes("?") and not self._takes(":"):
            raise Unsupported("a group that looks around, or has a name or flags")
        tree = self._either()
        if not self._takes(")"):
            raise Unsupported("a group without its end")
        return tree

    def _escape(self) -> _Tree:
        if self._peek() in ("b", "B"):
            return ("assert", self._take())
        if self._peek() and self._peek() in "123456789k":
            raise Unsupported("a reference back")
        return ("set", self._escaped())

    def _escaped(self) -> _Ranges:
        character = self._take()
        if character.lower() in _CLASSES:
            ranges = _CLASSES[character.lower()]
            return ranges if character.islower() else _without(ranges)
        if character in _HEX:
            digits = "".join(self._take() for _ in range(_HEX[character]))
            if any(digit not in "0123456789abcdefABCDEF" for digit in digits):
                raise Unsupported(f"\\{character} without its digits")
            return ((int(digits, 16), int(digits, 16)),)
        if character.isalnum() and character not in _CONTROLS:
            raise Unsupported(f"\\{character}")
        code = _CONTROLS.get(character, ord(character))
        return ((code, code),)

    def _set(self) -> _Ranges:
        negated = self._takes("^")
        ranges: list[tuple[int, int]] = []
        while not self._takes("]"):
            low = self._member()
            if (
                len(low) == 1
                and self._peek() == "-"
                and self._text[self._at + 1 : self._at + 2] != "]"
            ):
                self._take()
                high = self._member()
                if low[0][0] > high[-1][1] or len(high) > 1:
                    raise Unsupported("a range that runs backwards, or between classes")
                low = ((low[0][0], high[0][1]),)
            ranges += low
        return _without(ranges) if negated else tuple(ranges)

    def _member(self) -> _Ranges:
        if self._takes("\\"):
            return ((8, 8),) if self._takes("b") else self._escaped()
        character = self._take()
        return ((ord(character), ord(character)),)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(MAX_STATES))


def _without(ranges: Sequence[tuple[int, int]]) -> _Ranges:
    """Return every character but those of `ranges`."""
    left, begin = [], 0
    for low, high in sorted(ranges):
        if low > begin:
            left.append((begin, low - 1))
        begin = max(begin, high + 1)
    return tuple(left) if begin > _LAST else (*left, (begin, _LAST))
