"""One record of the audit trail, its one line of JSON, and its span: its place by W3C Trace Context
(https://www.w3.org/TR/trace-context/).

A line is ASCII, bounded, and holds everything that came from a guest or a caller as escaped text, so
that nothing in it can end the line, start another or move a cursor.  It begins with the hash of the
line before it and ends with its own:

    {"prev":"<64 hex>","seq":7,"time":...,"hash":"<64 hex>"}

where hash is SHA-256, or HMAC-SHA-256 under a key, of all that stands before `,"hash"`.
"""

import os
import re
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.structs import replace

from ..channel import refuse_deep_json
from ..settings import AuditLevel

TEXT_LIMIT = 1024  # characters of one text; a longer one is cut, with a notice
TRACE_ID_LIMIT = 128
NAME_LIMIT = 128  # characters of a category, an action and ids of a span
_INTEGERS = 2**63
_NUMBERS, _LISTS = (bool, int, float), (list, tuple)
_DETAILS_LIMIT = 64
_FIELDS_LIMIT = 64 * 1024
LONGEST_LINE = _FIELDS_LIMIT + 256  # the two hashes and the newline included
GENESIS = b"0" * 64
BEGINS = b'{"prev":"'  # every line begins with it
WRONG_HASH = "its hash is not that of its words"
_HASH_AT = -66  # the hash of a line stands before `"}`
_BODY_ENDS = -75  # the hashed part ends before `,"hash":"`
_KNOWN_NAMES: set[str] = set()  # names of details that need no change
_MOST_KNOWN_NAMES = 256
_KEPT_KINDS = (type(None), float, bool)
_NOT_PLAIN = re.compile(r"[^\x20-\x7e]+")
_W3C_ID = re.compile(r"[0-9a-f]{32}")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_IDS_AT_ONCE = 64
_SPAN_IDS: list[str] = []
os.register_at_fork(
    after_in_child=_SPAN_IDS.clear
)  # otherwise both processes would use the same ids


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
    except IndexError:  # one system call (half a microsecond) draws many ids
        own, *rest = _random_ids()
        _SPAN_IDS.extend(rest)
        return own


def _random_ids() -> list[str]:
    drawn = os.urandom(8 * _IDS_AT_ONCE).hex()
    return [drawn[start : start + 16] for start in range(0, len(drawn), 16)]


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One event.  `time` is in seconds since the epoch, `monotonic` in seconds of a clock that
    never jumps; `seq` 0 marks an event that could not be written."""

    seq: int
    time: float
    monotonic: float
    level: AuditLevel
    category: str  # execution, validation, violation, policy, tool, session, file, log
    action: str
    target: str = ""
    allowed: bool = True
    sandbox_id: str = ""
    trace_id: str = ""
    span_id: str = ""
    parent_id: str = ""
    details: dict[str, Any] = {}


class RecordForm(msgspec.Struct, frozen=True):
    """The details that all records of one kind share, and the names of their other details."""

    category: str
    action: str
    target: str
    names: tuple[str, ...]


class FormedRecord(msgspec.Struct, frozen=True, gc=False):
    """An event of a form, as a log in memory keeps it until somebody reads it: in a third of the time,
    and of the memory, that an AuditEntry takes."""

    seq: int
    time: float
    monotonic: float
    form: RecordForm
    span: Span
    values: tuple[str | int, ...]

    def entry(self) -> AuditEntry:
        form, span = self.form, self.span
        return AuditEntry(
            seq=self.seq, time=self.time, monotonic=self.monotonic, level=AuditLevel.INFO,
            category=form.category, action=form.action, target=plain(form.target),
            trace_id=plain(span.trace_id, NAME_LIMIT), span_id=span.span_id,
            parent_id=plain(span.parent_id, NAME_LIMIT),
            details=plain_details(dict(zip(form.names, self.values, strict=True))),
        )  # fmt: skip


def plain(text: object, limit: int = TEXT_LIMIT) -> str:
    """Return `text` bounded, with every character escaped that is not printable ASCII."""
    cut = text if type(text) is str else str(text)
    if len(cut) > limit:
        cut = cut[:limit] + "..."
    return cut if cut.isascii() and cut.isprintable() else _NOT_PLAIN.sub(_written_out, cut)


def _written_out(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "backslashreplace").decode("ascii")


def plain_details(details: dict[str, Any]) -> dict[str, Any]:
    """Return `details` with plain texts, unchanged numbers, and without nesting."""
    for (
        value
    ) in details.values():  # most values need no change; a call for each would take a microsecond
        kind = type(value)
        if kind is str:
            if len(value) > TEXT_LIMIT or not value.isascii() or not value.isprintable():
                break
        elif kind is int:
            if not -_INTEGERS < value < _INTEGERS:
                break
        elif kind not in _KEPT_KINDS:
            break
    else:
        if _KNOWN_NAMES.issuperset(details):
            return details
    kept = details.items() if len(details) <= _DETAILS_LIMIT else _first(details)
    return {_plain_name(name): _plain_value(value) for name, value in kept}


def _first(details: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(details.items())[:_DETAILS_LIMIT]


def _plain_name(name: str) -> str:
    """Return a detail's name, bounded; normally one of cellwright's own words."""
    made = plain(name, 64)
    if made == name and len(_KNOWN_NAMES) < _MOST_KNOWN_NAMES:
        _KNOWN_NAMES.add(name)
    return made


def _plain_value(value: object) -> object:
    if type(value) is str:
        return plain(value)
    if value is None or isinstance(value, _NUMBERS):
        return value if not isinstance(value, int) or abs(value) < _INTEGERS else plain(value)
    if isinstance(value, _LISTS):
        return [plain(each, 256) for each in value[:_DETAILS_LIMIT]]
    return plain(value)


def line_of(entry: AuditEntry, previous: bytes, key: bytes | None) -> tuple[bytes, bytes]:
    """Return the line of `entry`, newline included, and its hash; `previous` is the hash before it."""
    fields = _ENCODER.encode(entry)
    if len(fields) > _FIELDS_LIMIT:  # every text is bounded, but there may be many
        fields = _ENCODER.encode(replace(entry, details={"details_left_out": len(entry.details)}))
    body = BEGINS + previous + b'",' + fields[1:-1]
    own = digest(body, key)
    return body + b',"hash":"' + own + b'"}\n', own


def digest(body: bytes, key: bytes | None) -> bytes:
    """Return the hash of a line's body in hexadecimal."""
    if key is None:
        from hashlib import sha256  # loads OpenSSL, which a daemon without a trail does without

        return sha256(body).hexdigest().encode()
    from hmac import digest as keyed_digest

    return keyed_digest(key, body, "sha256").hex().encode()


def why_broken(line: bytes, previous: bytes, seq: int, key: bytes | None) -> str:
    """Return why `line`, without its newline, is not record `seq` after `previous`; "" if it is."""
    if not line.startswith(BEGINS + previous + b'","seq":%d,' % seq):
        return "it does not follow the record before it"
    if line[_BODY_ENDS:_HASH_AT] != b',"hash":"' or line[-2:] != b'"}':
        return "it does not end in its hash"
    if digest(line[:_BODY_ENDS], key) != line[_HASH_AT:-2]:
        return WRONG_HASH
    return ""


def hash_of(line: bytes) -> bytes:
    """Return the hash that a line, without its newline, claims."""
    return line[_HASH_AT:-2]


_ENCODER = msgspec.json.Encoder(enc_hook=str)
_DECODER = msgspec.json.Decoder()


def parse(line: bytes) -> AuditEntry:
    """Return the entry of a line; raises msgspec.DecodeError for an invalid line."""
    refuse_deep_json(line)
    fields = _DECODER.decode(line)
    if not isinstance(fields, dict):
        raise msgspec.DecodeError("not a record")
    fields.pop("prev", None)
    fields.pop("hash", None)
    return msgspec.convert(fields, AuditEntry)
