"""`with_ranges`: a seccomp filter that searches ranges of call numbers, in place of single numbers.

The kernel translates a filter anew for each cell, and libseccomp compares with each number. Most
numbers have neighbours with the same answer, so that six instructions of ten suffice. Only the search
is made anew; the tests of a call's arguments are those that libseccomp wrote.
"""

import itertools
import operator
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

_BPF = struct.Struct("=HBBI")
_LOAD, _AND, _RETURN, _JUMP = 0x20, 0x54, 0x06, 0x05
_EQUAL, _GREATER, _AT_LEAST, _ANY_BIT = 0x15, 0x25, 0x35, 0x45
_NEVER = 1 << 32  # larger than any number
# The first and the last number of each range on which a test is decided, and whether it holds there.
_SPLITS: dict[int, Callable[[int], tuple[tuple[int, int, bool], ...]]] = {
    _EQUAL: lambda k: ((0, k - 1, False), (k, k, True), (k + 1, _NEVER, False)),
    _GREATER: lambda k: ((0, k, False), (k + 1, _NEVER, True)),
    _AT_LEAST: lambda k: ((0, k - 1, False), (k, _NEVER, True)),
}
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_FARTHEST = 255  # instructions that a conditional jump skips at most


class BpfInstruction(NamedTuple):
    code: int
    true: int  # instructions to skip if the test holds
    false: int
    operand: int


class _RangeAnswer(NamedTuple):
    """The rest of a filter for one number: a value to return, or the place where it reads arguments."""

    value: int = 0
    place: int = -1


def with_ranges(program: bytes, newest: int, newer: int) -> bytes:
    """Return a filter that answers `newer` to each number above `newest`, on any architecture, and to
    the others what `program` answers.

    Raises ValueError if `program` is none that tests the architecture before anything else.
    """
    old = [BpfInstruction(*fields) for fields in _BPF.iter_unpack(program)]
    loads, tests = old[:2]
    if (loads.code, loads.operand, tests.code) != (_LOAD, _ARCHITECTURE, _EQUAL):
        raise ValueError("a filter does not begin with the test of the architecture")
    foreign = {answer for _, answer in _answers(old, 2 + tests.false, 0, newest)}
    if len(foreign) != 1 or (only := foreign.pop()).place >= 0:
        raise ValueError("a filter answers foreign architectures by number")
    new = _BackwardProgram(old)
    search = new.search(_merged(_answers(old, 2 + tests.true, 0, newest)))
    begins = new.put(_LOAD, _NUMBER, then=search)
    begins = new.branch(_EQUAL, tests.operand, begins, new.returns(only.value))
    begins = new.put(_LOAD, _ARCHITECTURE, then=begins)
    begins = new.branch(_GREATER, newest, new.returns(newer), begins)
    new.put(_LOAD, _NUMBER, then=begins)
    return new.export()


def _answers(
    old: list[BpfInstruction], place: int, low: int, high: int
) -> Iterator[tuple[int, _RangeAnswer]]:
    """Yield the answers from `place` on to the numbers from `low` to `high`, each with the first number
    that it is for, in order."""
    each = old[place]
    if each.code == _RETURN:
        yield low, _RangeAnswer(each.operand)
    elif each.code == _LOAD and each.operand >= _ARGUMENTS:
        yield low, _RangeAnswer(place=place)
    elif each.code == _LOAD and each.operand == _NUMBER:
        yield from _answers(old, place + 1, low, high)
    elif each.code == _JUMP:
        yield from _answers(old, place + 1 + each.operand, low, high)
    elif each.code in _SPLITS:
        for first, last, holds in _SPLITS[each.code](each.operand):
            if max(low, first) <= min(high, last):
                after = place + 1 + (each.true if holds else each.false)
                yield from _answers(old, after, max(low, first), min(high, last))
    else:
        raise ValueError(f"a filter has an instruction of another kind: {each}")


def _merged(answers: Iterable[tuple[int, _RangeAnswer]]) -> list[tuple[int, _RangeAnswer]]:
    """Return the first of those neighbours that have the same answer."""
    return [next(same) for _, same in itertools.groupby(answers, key=operator.itemgetter(1))]


class _BackwardProgram:
    """A program that is written from its end, because jumps lead forward: a place is the number of
    instructions from there to the end."""

    def __init__(self, old: list[BpfInstruction]) -> None:
        self._old = old
        self._backward: list[BpfInstruction] = []
        self._places: dict[BpfInstruction, int] = {}  # the nearest equal return
        self._copies: dict[int, int] = {}  # places of instructions of the old program

    def export(self) -> bytes:
        return b"".join(_BPF.pack(*each) for each in reversed(self._backward))

    def put(self, code: int, operand: int, *, then: int) -> int:
        """Put an instruction that goes on at `then`; return its place."""
        if then != len(self._backward):
            self._append(BpfInstruction(_JUMP, 0, 0, len(self._backward) - then))
        return self._append(BpfInstruction(code, 0, 0, operand))

    def returns(self, value: int) -> int:
        """Return a place that returns `value`, not far from the front."""
        wanted = BpfInstruction(_RETURN, 0, 0, value)
        place = self._places.get(wanted, 0)
        # Some room: the instructions of one branch come between.
        if place and len(self._backward) - place < _FARTHEST // 2:
            return place
        return self._append(wanted)

    def branch(self, code: int, operand: int, true: int, false: int) -> int:
        """Put a test that goes on at `true` or `false`; return its place."""
        true, false = self._near(true), self._near(false)
        true = self._near(true)  # a jump may have been put between
        here = len(self._backward)
        return self._append(BpfInstruction(code, here - true, here - false, operand))

    def search(self, ranges: list[tuple[int, _RangeAnswer]]) -> int:
        """Put a binary search for the range of the loaded number; return its place."""
        if len(ranges) == 1:
            answer = ranges[0][1]
            return self.returns(answer.value) if answer.place < 0 else self._copy(answer.place)
        half = len(ranges) // 2
        above, below = self.search(ranges[half:]), self.search(ranges[:half])
        return self.branch(_AT_LEAST, ranges[half][0], above, below)

    def _copy(self, place: int) -> int:
        """Put the tests of arguments that begin at `place` of the old program; return their place."""
        if place in self._copies and len(self._backward) - self._copies[place] < _FARTHEST // 2:
            return self._copies[place]
        each = self._old[place]
        if each.code == _RETURN:
            return self.returns(each.operand)
        if each.code == _JUMP:
            return self._copy(place + 1 + each.operand)
        if each.code == _LOAD and self._tests_no_bit(place):
            return self._copy(place + 3 + self._old[place + 2].true)
        if each.code in (_EQUAL, _GREATER, _AT_LEAST, _ANY_BIT):
            true, false = (self._copy(place + 1 + skip) for skip in (each.true, each.false))
            copied = self.branch(each.code, each.operand, true, false)
        elif each.code == _AND or (each.code == _LOAD and each.operand >= _ARGUMENTS):
            copied = self.put(each.code, each.operand, then=self._copy(place + 1))
        else:
            raise ValueError(f"a filter has an instruction of another kind: {each}")
        self._copies[place] = copied
        return copied

    def _tests_no_bit(self, place: int) -> bool:
        """Tell whether nothing is tested of what is loaded at `place`: libseccomp writes such a test
        for that half of an argument in which a rule's mask has no bit."""
        masks, test = self._old[place + 1 : place + 3]
        after = self._old[place + 3 + test.true]
        nothing = (masks.code, masks.operand, test.code, test.operand) == (_AND, 0, _EQUAL, 0)
        return nothing and after.code in (_LOAD, _RETURN)

    def _near(self, place: int) -> int:
        if len(self._backward) - place <= _FARTHEST - 1:
            return place
        return self._append(BpfInstruction(_JUMP, 0, 0, len(self._backward) - place))

    def _append(self, each: BpfInstruction) -> int:
        self._backward.append(each)
        self._places[each] = len(self._backward)
        return len(self._backward)
