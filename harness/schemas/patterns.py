"""Patterns of untrusted schemas, matched in time linear in the text.

`re` backtracks: `^(\\w+\\s?)*$` on forty characters takes longer than anyone waits, and cannot be
stopped.  This matcher follows all alternatives at once (Thompson, CACM 11:6, 1968): a text costs at
most its length times the states of the pattern, and every visited state spends from the budget.  RE2 is
linear too, and faster, but cannot be interrupted, does not support `\\u0041`, and refuses `(a{50}){40}`
(google-re2 1.1.20251105).
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

from .expressions import AnyOf, Assertion, Characters, Join, Ranges, Tree, Unsupported, parse

__all__ = ["MAX_STATES", "Pattern", "Unsupported", "compile_pattern"]

MAX_STATES = 2000
_MOST_PARTS = 20 * MAX_STATES  # parts without a state count too: `(){9999}` has 10,000
_VISITS_PER_STEP = 3  # visits of states, about 0.2 microseconds each

Spend = Callable[[int], None]


class _State(NamedTuple):
    """A state that consumes a character within `bounds`, tests an `assertion`, or forks to `after`.

    A character is within the bounds if an odd number of them is not above it.
    """

    after: tuple[int, ...]
    bounds: tuple[int, ...] | None = None
    assertion: str = ""


class Pattern(NamedTuple):
    """A compiled pattern."""

    states: tuple[_State, ...]
    start: int

    def found_in(self, text: str, spend: Spend) -> bool:
        """Tell whether the pattern matches anywhere in `text`; calls `spend` with the steps taken,
        which may raise."""
        current: set[int] = set()
        for position in range(len(text) + 1):
            steps = 1 + len(current) + self._enter(self.start, current, text, position)
            if 0 in current:
                return True
            if position < len(text):
                current, entered = self._step(current, ord(text[position]), text, position + 1)
                steps += entered
            spend(1 + steps // _VISITS_PER_STEP)
        return False

    def _step(
        self, current: set[int], character: int, text: str, position: int
    ) -> tuple[set[int], int]:
        following: set[int] = set()
        steps = 0
        for number in current:
            state = self.states[number]
            if state.bounds and bisect_right(state.bounds, character) & 1:
                steps += self._enter(state.after[0], following, text, position)
        return following, steps

    def _enter(self, number: int, entered: set[int], text: str, position: int) -> int:
        """Add a state and all states that it leads to without consuming a character; return how many
        were visited, including those whose assertion failed."""
        waiting = [number]
        visited = 0
        while waiting:
            number = waiting.pop()
            visited += 1
            state = self.states[number]
            if number in entered or (
                state.assertion and not _holds(state.assertion, text, position)
            ):
                continue
            entered.add(number)
            if state.bounds is None:
                waiting += state.after
        return visited


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


def _spend_nothing(_: int) -> None:
    """Spend from no budget: the number of parts bounds the work."""


def compile_pattern(text: str, spend: Spend = _spend_nothing) -> Pattern:
    """Return the compiled pattern of `text`; calls `spend` with the steps taken.

    Raises Unsupported if the pattern needs backtracking, is too large, or is invalid.
    """
    spend(len(text))
    builder = _Builder(spend)
    start = builder.build(parse(text), 0)
    return Pattern(tuple(builder.states), start)


class _Builder:
    """Builds the states of a tree; their number and the number of steps are bounded."""

    def __init__(self, spend: Spend) -> None:
        self.states = [_State(())]  # 0: matched
        self._spend = spend
        self._parts = 0
        self._bounds: dict[int, tuple[int, ...]] = {}  # shared by all repetitions of a set

    def build(self, tree: Tree, then: int) -> int:
        """Add the states of `tree`, which lead to the state `then`; return their first."""
        self._spend(1)
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise Unsupported(f"more than {_MOST_PARTS} parts, counting repetitions")
        if isinstance(tree, Characters):
            bounds = self._bounds.setdefault(id(tree), _bounds_of(tree.ranges))
            return self._add(_State((then,), bounds))
        if isinstance(tree, Assertion):
            return self._add(_State((then,), None, tree.which))
        if isinstance(tree, Join):
            for part in reversed(tree.parts):
                then = self.build(part, then)
            return then
        if isinstance(tree, AnyOf):
            return self._add(_State(tuple(self.build(part, then) for part in tree.parts)))
        return self._repeat(tree.part, tree.least, tree.most, then)

    def _repeat(self, part: Tree, least: int, most: int | None, then: int) -> int:
        if most is None:
            loop = self._add(_State(()))
            self.states[loop] = _State((self.build(part, loop), then))
            then = loop
        for _ in range(most - least if most is not None else 0):
            then = self._add(_State((self.build(part, then), then)))
        for _ in range(least):
            begin = self.build(part, then)
            if begin == then:  # an empty part: its repetitions are empty too
                break
            then = begin
        return then

    def _add(self, state: _State) -> int:
        if len(self.states) >= MAX_STATES:
            raise Unsupported(f"more than {MAX_STATES} states")
        self.states.append(state)
        return len(self.states) - 1


def _bounds_of(ranges: Ranges) -> tuple[int, ...]:
    """Return the points where membership changes; `ranges` are sorted and do not touch."""
    return tuple(chain.from_iterable((low, high + 1) for low, high in ranges))
