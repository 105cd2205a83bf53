"""`StreamGuard`: output on its way to a model, in chunks, with tokens in place of values.

A value may come in several chunks, so the guard holds back whatever may be the beginning of one: the
last line if it is incomplete, an unfinished private key, lines of base64 that may go on, the name of a
secret, and words with which a known value begins.
"""

import codecs
import re

from ..text.secrets import end_of_key, unfinished_assignment, unfinished_key
from .naming import PROGRAM
from .scope import PrivacyScope

MOST_HELD = 4096  # characters; the beginning of a longer line is passed on
_MOST_KEY = 16_384  # characters of an unfinished private key; the rest of a longer one is dropped
_KEPT = 512  # kept end of a line that is too long; only keys are longer values
_ENDING = 80  # characters at most of the line that ends a key
_BEGUN_ESCAPE = re.compile(r"(?:\\{1,8}|[%=&\x1b])[^\s\\%=&\x1b]{0,16}\Z")  # a cut may halve it
_LONGEST_ESCAPE = 24
_ENCODED_LINE = re.compile(r"[A-Za-z0-9+/]{60,76}\r?\n")  # a line of base64 (known_values.py)


class StreamGuard:
    """The text of one stream.  Not safe from several threads."""

    def __init__(self, scope: PrivacyScope) -> None:
        self._scope = scope
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._held = ""
        self._line = 0  # held characters of the last, incomplete line
        self._look_at = 0  # characters of a long line; each look takes time linear in it
        self._is_in_key = False  # inside a private key that is too long

    def feed(self, data: bytes) -> bytes:
        """Take the next chunk; return the text that can be passed on, possibly empty."""
        new = self._decoder.decode(data)
        text = self._without_key(self._held + new)
        newline = new.rfind("\n")
        self._line = len(new) - newline - 1 if newline >= 0 else self._line + len(new)
        is_long = self._line > MOST_HELD and len(text) >= self._look_at
        if newline < 0 and not is_long:
            self._held = text
            return b""
        return self._passed(text, self._cut(text, is_long=is_long))

    def finish(self) -> bytes:
        """Return the rest, at the end of the stream."""
        text = self._without_key(self._held + self._decoder.decode(b"", final=True))
        return b"" if self._is_in_key else self._passed(text, len(text))

    def _without_key(self, text: str) -> str:
        """Return a text without the rest of a private key that was too long to be held back."""
        if not self._is_in_key:
            return text
        end = end_of_key(text)
        self._is_in_key = not end
        return text[end:] if end else text[-_ENDING:]

    def _passed(self, text: str, end: int) -> bytes:
        self._held = text[end:]
        return (
            self._scope.text(text[:end], PROGRAM).encode("utf-8", "surrogateescape") if end else b""
        )

    def _cut(self, text: str, *, is_long: bool) -> int:
        if self._is_in_key:
            return 0
        if len(text) - unfinished_key(text) >= _MOST_KEY:
            self._is_in_key = True
            return len(text)
        if is_long:
            end = self._within_line(text)
            self._look_at = len(text) - end + _KEPT
            return min(end, self._scope.held_from(text[:end]))
        lines = text[: text.rfind("\n") + 1]
        begins = min(
            unfinished_key(lines), _encoded_from(lines), unfinished_assignment(lines),
            self._scope.held_from(lines),
        )  # fmt: skip
        return len(lines) if begins == len(lines) else self._before_line(lines, begins)

    def _before_line(self, text: str, begins: int) -> int:
        """Return where the line of `begins` begins, or one before it, so that no value is cut.

        A line that is too long is cut.
        """
        found = None
        while True:
            line = text.rfind("\n", 0, begins) + 1
            end = line if begins - line < MOST_HELD else begins
            if not end:  # before any search, because held text is often incomplete for long
                return 0
            found = self._scope.find(text) if found is None else found
            cut = [each.start for each in found if each.start < end < each.end]
            if not cut:
                return end
            begins = cut[0]

    def _within_line(self, text: str) -> int:
        """Return a place in a long line that is in no value: between two words, and in no match."""
        end = len(text) - _KEPT
        space = text.rfind(" ", max(0, end - _KEPT), end)
        end = space + 1 if space >= 0 else end
        if begun := _BEGUN_ESCAPE.search(text, max(0, end - _LONGEST_ESCAPE), end):
            end = begun.start()
        for each in self._scope.find(text):
            if each.start < end < each.end:
                return each.start if each.start else each.end
        return end


def _encoded_from(text: str) -> int:
    """Return where the lines of base64 begin with which a text ends, unless they are too many."""
    begins = len(text)
    while begins and len(text) - begins < MOST_HELD:
        line = text.rfind("\n", 0, begins - 1) + 1
        if not _ENCODED_LINE.fullmatch(text, line, begins):
            return begins
        begins = line
    return begins if len(text) - begins < MOST_HELD else len(text)
