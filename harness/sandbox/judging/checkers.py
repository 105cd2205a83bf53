"""Checkers: whether the output of a program is right.

Those of this module compare on the host, in time that grows with the output alone.  A `ProgramChecker`
or an `Interactor` is a program of the problem's author, with the exit codes of testlib, and runs in a
cell of its own.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from ....policies.errors import PolicyError
from .verdicts import Verdict

_MOST_SORTED = 1_000_000
_SHOWN = 60  # characters of a difference
_DIGITS = 400  # digits of a number: `float` is slow beyond, and right answers have fewer


class Checked(NamedTuple):
    """A checker's answer: the verdict, its text, and the points, 0 to 1."""

    verdict: Verdict
    message: str = ""
    points: float = 0.0


_RIGHT = Checked(Verdict.ACCEPTED, "", 1.0)
Compare = Callable[[str, str], Checked]


class ProgramChecker(msgspec.Struct, frozen=True, kw_only=True):
    """A program that judges an output: it is started with the paths of the input, the output and the
    expected output, and exits as testlib has it: 0 accepted, 1 wrong, 2 and 4 badly presented, 3 its
    own failure, 7 with points, which it prints first to standard error, 8 ended too early."""

    source: str
    language: str = "cpp"
    flags: tuple[str, ...] = ()
    files: Mapping[str, str | bytes] = {}  # such as testlib.h


class Interactor(ProgramChecker, frozen=True, kw_only=True):
    """A program that talks to the one that is judged, each by its standard input and output, and then
    judges it; it is started with the paths of the input, of a file to write, and of the expected
    output."""


class Floats(msgspec.Struct, frozen=True, kw_only=True):
    """Compares token by token; numbers may differ by `absolute`, or by `relative` times the expected
    one."""

    absolute: float = 1e-6
    relative: float = 1e-6

    def __call__(self, output: str, expected: str) -> Checked:
        def equal(one: str, other: str) -> bool:
            if one == other:
                return True
            number, wanted = _number(one), _number(other)
            if number is None or wanted is None or math.isinf(wanted):
                return False
            return math.isclose(number, wanted, rel_tol=0, abs_tol=self.absolute) or (
                abs(number - wanted) <= self.relative * abs(wanted)
            )

        return _by_tokens(output, expected, equal)


Checker = str | ProgramChecker | Floats | Compare


def exact(output: str, expected: str) -> Checked:
    """Compare every character; a newline at the end may be missing on either side."""
    if output.removesuffix("\n") == expected.removesuffix("\n"):
        return _RIGHT
    theirs = expected.split()
    if output.split(None, len(theirs)) == theirs:
        return Checked(Verdict.PRESENTATION_ERROR, "the white space differs")
    return _by_tokens(output, expected, str.__eq__)


def lines(output: str, expected: str) -> Checked:
    """Compare lines, without white space at the end of each, and without empty lines at the end."""
    return _by_lines(_lines(output), _lines(expected), "line")


def tokens(output: str, expected: str) -> Checked:
    """Compare words; how they are separated does not matter."""
    return _by_tokens(output, expected, str.__eq__)


def unordered(output: str, expected: str) -> Checked:
    """Compare lines as `lines` does, in any order; at most a million."""
    if max(output.count("\n"), expected.count("\n")) > _MOST_SORTED:
        return Checked(Verdict.WRONG_ANSWER, f"more than {_MOST_SORTED:,} lines")
    ours, theirs = sorted(_lines(output)), sorted(_lines(expected))
    return _by_lines(iter(ours), iter(theirs), "line, sorted,")


CHECKERS: dict[str, Compare] = {
    "exact": exact,
    "lines": lines,
    "tokens": tokens,
    "floats": Floats(),
    "unordered": unordered,
}


def checker_called(checker: Checker) -> ProgramChecker | Compare:
    """Return a checker, by its name if it is a text; raises PolicyError for an unknown one."""
    if isinstance(checker, str):
        if found := CHECKERS.get(checker):
            return found
        raise PolicyError(f"checker: must be one of {', '.join(CHECKERS)}, got {checker!r}")
    if isinstance(checker, ProgramChecker) or callable(checker):
        return checker
    raise PolicyError(f"checker: must be a name, a ProgramChecker or a function, got {checker!r}")


def by_exit_code(code: int | None, said: str) -> Checked:
    """Return what the exit code of testlib says."""
    words = said.strip()[:1000]
    if code == 0:
        return Checked(Verdict.ACCEPTED, words, 1.0)
    if code == 7:
        # "points 0.5 text" of testlib: the text can quote the output, so only the first number counts
        first = _number((words.removeprefix("points").split() or ["0"])[0])
        points = min(1.0, max(0.0, first or 0.0))
        return Checked(Verdict.ACCEPTED if points == 1 else Verdict.WRONG_ANSWER, words, points)
    if code in (1, 8):
        return Checked(Verdict.WRONG_ANSWER, words)
    if code in (2, 4):
        return Checked(Verdict.PRESENTATION_ERROR, words)
    return Checked(Verdict.INTERNAL_ERROR, f"the checker failed with exit code {code}: {words}")


def _by_tokens(output: str, expected: str, equal: Callable[[str, str], bool]) -> Checked:
    theirs = expected.split()
    ours = output.split(None, len(theirs))  # an output of many words is not split further
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
        if not equal(one, other):
            return Checked(Verdict.WRONG_ANSWER, _unlike(f"word {number}", one, other))
    if len(ours) != len(theirs):
        more = "more than " if len(ours) > len(theirs) else ""
        message = f"{more}{min(len(ours), len(theirs))} words, expected {len(theirs)}"
        return Checked(Verdict.WRONG_ANSWER, message)
    return _RIGHT


def _lines(text: str) -> Iterator[str]:
    """Yield lines without the white space at their ends: an output may have millions."""
    text = text.rstrip()
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield text[start:end].rstrip()
        start = end + 1


def _by_lines(ours: Iterator[str], theirs: Iterator[str], what: str) -> Checked:
    for number, (one, other) in enumerate(zip_longest(ours, theirs), 1):
        if one != other:
            words = _unlike(f"{what} {number}", one or "", other or "")
            return Checked(Verdict.WRONG_ANSWER, words)
    return _RIGHT


def _unlike(where: str, one: str, other: str) -> str:
    return f"{where}: {one[:_SHOWN]!r}, expected {other[:_SHOWN]!r}"


def _number(word: str) -> float | None:
    try:
        # Python also takes 1_0, and digits of other scripts
        is_usual = len(word) <= _DIGITS and word.isascii() and "_" not in word
        return float(word) if is_usual else None
    except ValueError:
        return None
