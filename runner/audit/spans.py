"""Spans: the place of an event by W3C Trace Context (https://www.w3.org/TR/trace-context/)."""

import os
import re
from functools import lru_cache

import msgspec

_W3C_ID = re.compile(r"[0-9a-f]{32}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class Span(msgspec.Struct, frozen=True, gc=False):
    """One action, in the trace that caused it, under the span that asked for it."""

    trace_id: str = ""
    span_id: str = ""
    parent_id: str = ""
    sampled: bool = True
    is_w3c: bool = False  # the trace's id is a W3C id

    def child(self) -> "Span":
        """Return a new span that this one causes."""
        return Span(self.trace_id, new_span_id(), self.span_id, self.sampled, self.is_w3c)

    @property
    def traceparent(self) -> str | None:
        """The header that passes the trace on; None if the trace's id is not a W3C id."""
        if not self.is_w3c:
            return None
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def span_of(given: str | None) -> Span:
    """Return a request's span: in the trace that `given` names, a traceparent or any text, or in a
    new trace."""
    if not given:
        return Span(os.urandom(16).hex(), new_span_id(), is_w3c=True)
    trace_id, parent_id, sampled, is_w3c = _parsed(given)
    try:
        own = _SPAN_IDS.pop()
    except IndexError:
        own = new_span_id()
    return Span(trace_id, own, parent_id, sampled, is_w3c)


@lru_cache(maxsize=256)
def _parsed(given: str) -> tuple[str, str, bool, bool]:
    """Return trace, parent, the sampled flag, which all calls of an execution share, and whether the
    trace's id is a W3C id."""
    match = _TRACEPARENT.fullmatch(given)
    if match and match[1].strip("0") and match[2].strip("0"):
        return match[1], match[2], bool(int(match[3], 16) & 1), True
    return given, "", True, bool(_W3C_ID.fullmatch(given))


def new_span_id() -> str:
    """Return a random id that no other span has.  Safe from many threads."""
    try:
        return _SPAN_IDS.pop()
    except IndexError:  # one system call for many ids: it takes half a microsecond
        own, *rest = _random_ids()
        _SPAN_IDS.extend(rest)
        return own


def _random_ids() -> list[str]:
    drawn = os.urandom(8 * _IDS_AT_ONCE).hex()
    return [drawn[start : start + 16] for start in range(0, len(drawn), 16)]


_IDS_AT_ONCE = 64
_SPAN_IDS: list[str] = []
os.register_at_fork(after_in_child=_SPAN_IDS.clear)  # or both processes would use the same
