"""`Detector`: finds personal data of one kind or more in a text.

The text is hostile: every pattern has bounded repetitions, and takes time linear in the text.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

KIND = re.compile(r"[a-z][a-z0-9]{1,15}")


class FoundValue(NamedTuple):
    """The position of a value, its kind, and its normal form: that of every way to write it.

    `text` is the value as a tool gets it; empty means as it is written.
    """

    start: int
    end: int
    kind: str
    normal: str
    text: str = ""


class Detector(Protocol):
    """Finds values; `kinds` are words of lower-case letters and digits, which tokens contain."""

    @property
    def kinds(self) -> frozenset[str]: ...

    def find(self, text: str) -> Iterable[FoundValue]:
        """Return the values in `text`, in any order; they may overlap."""


def never(text: str, start: int, end: int) -> bool:
    """Tell that nothing around a match says that it is something else."""
    return False


class PatternDetector:
    """Values of one form: a pattern, and a function that checks and normalises what it matches.

    `normal` returns None for a match that is no value, and `is_other` tells by the text around a match
    that it is something else.  A text without any of `hints` is skipped, and one without digits if a
    value `needs_digit`.
    """

    def __init__(
        self, kind: str, pattern: str, normal: Callable[[str], str | None], hints: Sequence[str] = (),
        is_other: Callable[[str, int, int], bool] = never, *, needs_digit: bool = False,
    ) -> None:  # fmt: skip
        self.kinds = frozenset([kind])
        self.needs_digit = needs_digit
        self._kind = kind
        self._pattern = re.compile(
            pattern, re.ASCII
        )  # folding.py makes other digits and letters plain
        self._normal = normal
        self._hints = tuple(hints)
        self._is_other = is_other

    def find(self, text: str) -> Iterable[FoundValue]:
        if self._hints and not any(hint in text for hint in self._hints):
            return
        for match in self._pattern.finditer(text):
            normal = self._normal(match[0])
            if normal and not self._is_other(text, *match.span()):
                yield FoundValue(*match.span(), self._kind, normal)


# Words before a number that is no person's: of an order, a part, a book.
_NUMBERED = re.compile(
    r"(?i)(?<![^\W\d_])(?:order|invoice|ticket|case|part|sku|rma|po|inv|ref(?:erence)?|tracking|serial"
    r"|lot|batch|item|coupon|voucher|isbn|ean|gtin|upc|pages?|bestell(?:ung|nummer|nr)"
    r"|(?:rechnung|auftrag)(?:snummer|snr)?|artikel(?:nummer|nr)?|commande|facture|article|pedido|factura"
    r"|art[ií]culo|ordine|fattura)(?:[ _-]?(?:no|nr|num|number|id|n[º°]))?[\s.:#=\"'()-]{0,5}\Z"
)
_BEFORE = 32


def is_numbered(text: str, start: int, end: int = 0) -> bool:
    """Tell whether a word before a number says that it is the number of a thing."""
    return bool(_NUMBERED.search(text, max(0, start - _BEFORE), start))


class DigitRun(NamedTuple):
    """Digits in groups, which single spaces or dashes separate: the digits, the position of each
    in the text, and the places at which groups begin and end."""

    digits: str
    places: list[int]
    begins: list[int]
    ends: list[int]


_RUN = re.compile(r"(?<!\d)(?<!\d\.)\d(?:[ \u00a0-]?\d){7,255}(?!\.\d)", re.ASCII)  # not of 0.4111
_SHORTEST_GROUP = 2  # else every row of single digits would be one number


def digit_runs(text: str) -> list[DigitRun]:
    """Return the runs of eight digits or more in `text`."""
    return [_run(match[0], match.start()) for match in _RUN.finditer(text)]


def _run(run: str, start: int) -> DigitRun:
    places = [start + place for place, character in enumerate(run) if character.isdigit()]
    digits = "".join(character for character in run if character.isdigit())
    starts = [0] + [n for n in range(1, len(places)) if places[n] > places[n - 1] + 1]
    return DigitRun(digits, places, starts, [*starts[1:], len(places)])


def windows(run: DigitRun, lengths: range) -> Iterable[tuple[int, int, str]]:
    """Yield each sequence of whole groups of a run that has one of `lengths` digits: start and end in
    the text, and the digits."""
    if len(run.begins) * _SHORTEST_GROUP > len(run.digits):
        return
    for begin in run.begins:
        for end in run.ends:
            if end - begin in lengths:
                yield run.places[begin], run.places[end - 1] + 1, run.digits[begin:end]


def merged(found: Iterable[FoundValue], text: str) -> list[FoundValue]:
    """Return the values in order without overlaps: of nested ones the outer, of equal ones the first;
    partly overlapping ones become one value, so that no part stays."""
    kept: list[FoundValue] = []
    grown: set[int] = set()  # of those kept; their text is read once, since many may chain
    for each in sorted(found, key=lambda one: (one.start, -one.end)):
        last = kept[-1] if kept else None
        if last is None or each.start >= last.end:
            kept.append(each)
        elif each.end > last.end:
            kept[-1] = FoundValue(last.start, each.end, last.kind, "")
            grown.add(len(kept) - 1)
    for number in grown:
        start, end = kept[number][:2]
        kept[number] = kept[number]._replace(normal=text[start:end].casefold())
    return kept
