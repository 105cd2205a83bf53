"""`StreamGuard`: output on its way to a model, in chunks, with tokens in place of values.

A value may come in several chunks, so the guard holds back what may be the beginning of one: the last
line if it is incomplete, an unfinished private key, and words with which a known value begins.
"""

import codecs
import re

from .scope import PrivacyScope

MOST_HELD = 4096  # characters; of a longer line the beginning is passed on
_MOST_KEY = 16_384  # characters of a private key without an end
_KEPT = 512  # of a line that is too long: no value but a key is longer
_KEY_BEGINS = "-----BEGIN "
_WORD_ENDS = re.compile(r"[^\w.+@:/-](?=[^\s]*$)")


class StreamGuard:
    """The text of one stream.  Not safe from several threads."""

    def __init__(self, scope: PrivacyScope) -> None:
        self._scope = scope
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._held = ""

    def feed(self, data: bytes) -> bytes:
        """Take the next chunk; return what can be passed on, which may be nothing."""
        text = self._held + self._decoder.decode(data)
        return self._passed(text, self._cut(text))

    def finish(self) -> bytes:
        """Return the rest, at the end of the stream."""
        text = self._held + self._decoder.decode(b"", final=True)
        return self._passed(text, len(text))

    def _passed(self, text: str, end: int) -> bytes:
        self._held = text[end:]
        return self._scope.text(text[:end]).encode("utf-8", "surrogateescape") if end else b""

    def _cut(self, text: str) -> int:
        """Return where the part ends that can be passed on."""
        end = text.rfind("\n") + 1
        if len(text) - end > MOST_HELD:
            end = self._within_line(text)
        end = min(end, self._scope.held_from(text[:end]))
        begins = text.rfind(_KEY_BEGINS, 0, end)
        if begins >= 0 and "-----END " not in text[begins:end] and len(text) - begins < _MOST_KEY:
            return begins
        return end

    def _within_line(self, text: str) -> int:
        """Return a place in a long line that is in no value: between two words, and in no match."""
        end = len(text) - _KEPT
        space = text.rfind(" ", max(0, end - _KEPT), end)
        end = space + 1 if space >= 0 else end
        for each in self._scope.find(text):
            if each.start < end < each.end:
                return each.start if each.start else each.end
        return end
