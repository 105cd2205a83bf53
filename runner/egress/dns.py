"""DNS messages of a cell: a strict parser of its queries, and their answers (RFC 1035).  Pure.

An answer echoes the question byte by byte and holds one address or none, so it is hardly longer than
its query.  Nothing of a query is passed on to any other name server.
"""

import re
import struct
from typing import NamedTuple

MOST_BYTES = 512  # longest query: a header, a name of 255 bytes and EDNS options
TTL_SECONDS = 5
NO_ERROR, MALFORMED, NO_SUCH_NAME, NOT_IMPLEMENTED = 0, 1, 3, 4
A = 1
_IN, _OPT = 1, 41
_HEADER = struct.Struct("!6H")
_IS_ANSWER, _OPERATION, _WANTS_RECURSION, _RECURSES = 0x8000, 0x7800, 0x0100, 0x0080
_NAME = 0xC000 | _HEADER.size  # a pointer to the name in the question
_LABEL = re.compile(rb"[A-Za-z0-9_-]{1,63}")
_MOST_NAME_BYTES = 255
# Question types for more than one record set: ANY and zone transfers.
_META = range(249, 256)


class Query(NamedTuple):
    """A query with one question."""

    number: int
    flags: int
    question: bytes
    name: str
    kind: int  # type of record

    @property
    def is_reverse(self) -> bool:
        """Tell whether the query asks for the name of an address."""
        return self.name.lower().endswith((".in-addr.arpa", ".ip6.arpa"))


class QueryError(Exception):
    """A message is no query that can be answered; `answer` is empty if it gets no answer at all."""

    def __init__(self, why: str, answer: bytes = b"") -> None:
        super().__init__(why)
        self.answer = answer


def parse(message: bytes) -> Query:
    """Return the query in `message`; raises QueryError."""
    if not _HEADER.size <= len(message) <= MOST_BYTES:
        raise QueryError(f"a message of {len(message)} bytes")
    number, flags, *counts = _HEADER.unpack_from(message)
    if flags & _IS_ANSWER:  # two servers that answer each other's answers would never stop
        raise QueryError("an answer")
    if flags & _OPERATION:
        raise QueryError("not a standard query", _refusal(number, flags, NOT_IMPLEMENTED))
    try:
        labels, end = _labels(message)
        kind, network = struct.unpack_from("!HH", message, end)
        _require_end(message, end + 4, counts)
    except (ValueError, struct.error) as error:
        raise QueryError(str(error), _refusal(number, flags, MALFORMED)) from None
    question = message[_HEADER.size : end + 4]
    query = Query(number, flags, question, ".".join(labels), kind)
    if network != _IN or kind in _META:
        raise QueryError(
            "a question of a kind that is not answered", answer(query, NOT_IMPLEMENTED)
        )
    return query


def answer(query: Query, code: int, address: bytes = b"") -> bytes:
    """Return the answer to `query`: a code, and at most one IPv4 address."""
    flags = _IS_ANSWER | _RECURSES | query.flags & _WANTS_RECURSION | code
    header = _HEADER.pack(query.number, flags, 1, bool(address), 0, 0)
    if not address:
        return header + query.question
    record = struct.pack("!HHHIH", _NAME, A, _IN, TTL_SECONDS, len(address))
    return header + query.question + record + address


def _refusal(number: int, flags: int, code: int) -> bytes:
    flags = _IS_ANSWER | _RECURSES | flags & (_OPERATION | _WANTS_RECURSION) | code
    return _HEADER.pack(number, flags, 0, 0, 0, 0)


def _labels(message: bytes) -> tuple[list[str], int]:
    """Return the labels of the question's name, and where it ends; raises ValueError.

    A pointer is refused like any other invalid length: a question has nothing to point to.
    """
    labels: list[str] = []
    at = _HEADER.size
    while True:
        if at - _HEADER.size >= _MOST_NAME_BYTES or at >= len(message):
            raise ValueError("a name that does not end")
        length = message[at]
        at += 1
        if length == 0:
            break
        label = message[at : at + length]
        if len(label) != length or not _LABEL.fullmatch(label):
            raise ValueError("a label that no host name has")
        labels.append(label.decode("ascii"))
        at += length
    if not labels:
        raise ValueError("the name of the root")
    return labels, at


def _require_end(message: bytes, at: int, counts: list[int]) -> None:
    """Raise ValueError unless one question, and at most the options of EDNS (RFC 6891), are all."""
    questions, answers, authorities, additional = counts
    if questions != 1 or answers or authorities or additional > 1:
        raise ValueError("more than one question")
    if additional:
        root, kind, _, _, length = struct.unpack_from("!BHHIH", message, at)
        if root or kind != _OPT:
            raise ValueError("an additional record that is not OPT")
        at += 11 + length
    if at != len(message):
        raise ValueError("bytes after the end")
