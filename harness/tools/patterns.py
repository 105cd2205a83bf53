"""Regular expressions in time linear in the text, for patterns that nobody here wrote.

`re` backtracks: `^(\\w+\\s?)*$` on forty characters takes longer than anyone waits, and cannot be
stopped.  Here all ways are followed at once (Thompson, CACM 11:6, 1968), so a text costs at most its
length times the states of the pattern, and who asks says how much may be spent.
"""

from collections.abc import Callable
from typing import NamedTuple

from .expressions import Assertion, Characters, Either, Join, Ranges, Tree, Unsupported, parse

__all__ = ["MAX_STATES", "Pattern", "Unsupported", "compile_pattern"]

MAX_STATES = 2000


class _State(NamedTuple):
    """`ranges`: a character to consume; `assertion`: something to hold; else a fork to `after`."""

    after: tuple[int, ...]
    ranges: Ranges | None = None
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
    states = [_State(())]  # 0: matched
    start = _build(parse(text), 0, states)
    return Pattern(tuple(states), start)


def _build(tree: Tree, then: int, states: list[_State]) -> int:
    """Add the states of `tree`, which lead to the state `then`; return where they begin."""
    if isinstance(tree, Characters):
        return _add(states, _State((then,), tree.ranges))
    if isinstance(tree, Assertion):
        return _add(states, _State((then,), None, tree.which))
    if isinstance(tree, Join):
        for part in reversed(tree.parts):
            then = _build(part, then, states)
        return then
    if isinstance(tree, Either):
        return _add(states, _State(tuple(_build(part, then, states) for part in tree.parts)))
    return _build_repeat(tree.part, tree.least, tree.most, then, states)


def _build_repeat(part: Tree, least: int, most: int | None, then: int, states: list[_State]) -> int:
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
