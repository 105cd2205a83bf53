"""Queries of cells: only plain questions are answered, and everything else costs one small answer."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.runner.egress import dns

AAAA, TXT, ANY, AXFR = 28, 16, 255, 252


def name(text: str) -> bytes:
    labels = [label.encode() for label in text.split(".")]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def query(
    question: bytes = name("api.example.org"), kind: int = dns.A, network: int = 1,
    flags: int = 0x0100, counts: tuple[int, ...] = (1, 0, 0, 0), rest: bytes = b"",
) -> bytes:  # fmt: skip
    header = struct.pack("!6H", 7, flags, *counts)
    return header + question + struct.pack("!HH", kind, network) + rest


OPT = b"\0" + struct.pack("!HHIH", 41, 1232, 0, 0)


def code_of(answer: bytes) -> int:
    return answer[3] & 15


def test_a_question_is_parsed_and_answered_with_one_address() -> None:
    parsed = dns.parse(query(name("API.example.org")))
    assert (parsed.name, parsed.kind) == ("API.example.org", dns.A)
    answer = dns.answer(parsed, dns.NO_ERROR, b"\xc6\x12\0\x02")
    assert answer[:2] == b"\0\7"
    assert struct.unpack_from("!5H", answer, 2) == (0x8180, 1, 1, 0, 0)
    assert name("API.example.org") in answer  # in the caller's spelling (0x20)
    assert answer.endswith(b"\0\x04\xc6\x12\0\x02")
    assert len(answer) == len(query(name("API.example.org"))) + 16


def test_the_options_of_edns_are_accepted_and_ignored() -> None:
    assert dns.parse(query(counts=(1, 0, 0, 1), rest=OPT)).name == "api.example.org"


@pytest.mark.parametrize(
    "message",
    [
        query(b"\xc0\x0c"),  # a name that points to itself
        query(b"\3api\xc0\x0c"),
        query(b"\3api\xc0\xff"),
        query(b"\x40" + b"a" * 64 + b"\0"),  # a label of 64 bytes
        query(name(".".join(["a" * 63] * 4))),  # a name of 257 bytes
        query(b"\0"),  # the root
        query(b"\4a\0bc\0"),
        query(b"\4a.bc\0"),
        query(b"\5caf\xc3\xa9\0"),
        query(counts=(0, 0, 0, 0)),
        query(counts=(2, 0, 0, 0)),
        query(counts=(1, 1, 0, 0)),
        query(counts=(1, 0, 1, 0)),
        query(counts=(1, 0, 0, 2), rest=OPT * 2),
        query(counts=(1, 0, 0, 1), rest=b"\1a" + OPT),
        query(counts=(1, 0, 0, 1), rest=OPT[:-1] + b"\x09"),  # options that are not there
        query(rest=b"smuggled"),
        query()[:-1],
        query()[:20],
    ],
    ids=repr,
)
def test_a_malformed_query_gets_an_answer_of_twelve_bytes(message: bytes) -> None:
    with pytest.raises(dns.QueryError) as caught:
        dns.parse(message)
    assert code_of(caught.value.answer) == dns.MALFORMED
    assert len(caught.value.answer) == 12


@pytest.mark.parametrize("message", [query(kind=ANY), query(kind=AXFR), query(network=3)], ids=repr)
def test_a_question_for_everything_is_not_implemented(message: bytes) -> None:
    with pytest.raises(dns.QueryError) as caught:
        dns.parse(message)
    assert code_of(caught.value.answer) == dns.NOT_IMPLEMENTED


def test_another_operation_is_not_implemented() -> None:
    with pytest.raises(dns.QueryError) as caught:
        dns.parse(query(flags=0x2800))  # UPDATE
    assert code_of(caught.value.answer) == dns.NOT_IMPLEMENTED


@pytest.mark.parametrize("message", [b"", b"\0" * 11, query(flags=0x8180), query(rest=b"x" * 500)])
def test_what_is_no_query_gets_no_answer(message: bytes) -> None:
    with pytest.raises(dns.QueryError) as caught:
        dns.parse(message)
    assert caught.value.answer == b""


def test_other_kinds_of_records_are_questions_too() -> None:
    assert dns.parse(query(kind=TXT)).kind == TXT
    assert dns.parse(query(kind=AAAA)).kind == AAAA


@given(st.binary(max_size=600) | st.binary(max_size=80).map(lambda rest: query()[:12] + rest))
def test_any_bytes_are_a_query_or_an_error(message: bytes) -> None:
    try:
        parsed = dns.parse(message)
    except dns.QueryError as error:
        assert len(error.answer) <= max(12, len(message))
    else:
        assert 0 < len(parsed.name) <= 253
        assert len(dns.answer(parsed, dns.NO_ERROR, b"1234")) <= len(message) + 16
