"""The overview as JSON: every text of it bounded and readable, and harmless inside a page."""

from typing import Any

import msgspec

from ..text.terminal import harmless
from .overview import Overview

MOST_TEXT = 20_000  # characters of one text; what must be approved whole is shorter
MOST_NAME = 300
MOST_CHARACTERS = 4_000_000  # of all texts together
# HTML ends a script element at `</script` and changes its state at `<!--`; `&` is escaped so that the
# text is the same wherever it is pasted.
_IN_A_PAGE = ((b"<", b"\\u003c"), (b">", b"\\u003e"), (b"&", b"\\u0026"))


def encoded(overview: Overview) -> bytes:
    """Return the overview as JSON.

    Every text and name is escaped by `harmless`, so that no character hides or reorders others; it is
    cut at `MOST_TEXT`, and once all texts have `MOST_CHARACTERS`, it is left out.  No `<` is in the
    JSON: it can stand in a script element.
    """
    data = msgspec.json.encode(_Bounded().value(msgspec.to_builtins(overview)))
    for character, escape in _IN_A_PAGE:
        data = data.replace(character, escape)
    return data


class _Bounded:
    """Makes values safe to show, within one budget of characters."""

    def __init__(self) -> None:
        self._left = MOST_CHARACTERS

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value, MOST_TEXT)
        if isinstance(value, dict):
            return {self._text(name, MOST_NAME): self.value(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return value

    def _text(self, text: str, most: int) -> str:
        most = max(0, min(most, self._left))
        if len(text) <= most and text.isascii() and text.isprintable():  # most are
            self._left -= len(text)
            return text
        shown = harmless(text[:most])
        self._left -= len(shown)
        return shown if len(text) <= most else f"{shown}⟨cut: {len(text):,} characters⟩"
