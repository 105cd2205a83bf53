"""The escape sequences that a person's terminal gets of a guest's, and those that are dropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.harness.text.escape_sequences import TerminalFilter

PASSED = {
    "text": b"a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80",
    "lines": b"a\r\n\tb\x08\x07",
    "colours": b"\x1b[1;38;5;196mred\x1b[0m\x1b[38:2::1:2:3m",
    "moving": b"\x1b[H\x1b[2J\x1b[10;5H\x1b[3A\x1b[K\x1b[1;24r\x1b[s\x1b[u\x1b7\x1b8\x1bM\x1bD",
    "modes": b"\x1b[?1049h\x1b[?25l\x1b[?2004h\x1b[?1;7l\x1b[4h",
    "charsets": b"\x1b(0lqk\x1b(B\x0e\x0f",
    "cursor": b"\x1b[4 q\x1b[!p",
}
DROPPED = {
    "device attributes": b"\x1b[c\x1b[>c\x1b[=c\x1b[0c\x1bZ",
    "reports": b"\x1b[6n\x1b[?6n\x1b[5n\x1b[x\x1b[?25$p\x1b[>q\x1b[?u\x1b[?996n",
    "windows and titles": b"\x1b[21t\x1b[8;1;1t\x1b]0;title\x07\x1b]2;title\x1b\\\x1b]l\x1b\\",
    "the clipboard": b"\x1b]52;c;bHM=\x07\x1b]52;c;?\x1b\\",
    "settings": b"\x1bP$qm\x1b\\\x1bP+q544e\x1b\\\x1b_Gi=1,a=q;\x1b\\\x1b^x\x1b\\\x1bXx\x1b\\",
    "answerback": b"\x05\x00\x7f",
    "printing": b"\x1b[5i\x1b[4i",
    "a full reset": b"\x1bc",
    "modes with answers": b"\x1b[?1004h\x1b[?2048h\x1b[?2004;1004h\x1b[20h",
    "eight bits": b"\xc2\x9b6n\xc2\x9d0;x\x07".replace(b"6n", b"").replace(b"0;x", b"").replace(b"\x07", b""),
    "keys": b"\x1b[>4;2m\x1b[>1u\x1b[=1;1u",
}  # fmt: skip


@pytest.mark.parametrize("data", PASSED.values(), ids=PASSED)
def test_drawing_is_passed_on(data: bytes) -> None:
    assert TerminalFilter().feed(data) == data


@pytest.mark.parametrize("data", DROPPED.values(), ids=DROPPED)
def test_what_a_terminal_answers_or_obeys_is_dropped(data: bytes) -> None:
    assert TerminalFilter().feed(b"a" + data + b"b") == b"ab"


@pytest.mark.parametrize("data", [*PASSED.values(), *DROPPED.values()], ids=[*PASSED, *DROPPED])
def test_pieces_are_judged_as_the_whole(data: bytes) -> None:
    whole, pieces = TerminalFilter(), TerminalFilter()
    expected = whole.feed(b"a" + data + b"b")
    assert b"".join(pieces.feed(bytes([each])) for each in b"a" + data + b"b") == expected


def test_bytes_that_are_not_text_are_replaced() -> None:
    assert TerminalFilter().feed(b"a\xff\x9bb") == "a\ufffd\ufffdb".encode()


def test_what_never_ends_takes_no_memory() -> None:
    passed = TerminalFilter()
    for _ in range(100):
        passed.feed(b"\x1b[" + b"1" * 1000)
        assert len(passed._rest) < 2000
    passed = TerminalFilter()
    for _ in range(100):
        assert passed.feed(b"\x1b]0;" + b"x" * 1000) == b""
        assert len(passed._rest) < 10


def test_a_string_that_another_sequence_cuts_ends_there() -> None:
    assert TerminalFilter().feed(b"\x1b]0;title\x1b[1mbold") == b"\x1b[1mbold"


def test_modes_are_restored() -> None:
    passed = TerminalFilter()
    assert passed.restore() == b"\x0f\x1b(B\x1b[m"
    passed.feed(b"\x1b[?1049h\x1b[?25l\x1b[?2004h\x1b[?2004l")
    assert passed.restore() == b"\x0f\x1b(B\x1b[m\x1b[?1049l\x1b[?25h"


@given(st.binary())
def test_nothing_passes_that_the_filter_itself_would_drop(data: bytes) -> None:
    passed = TerminalFilter().feed(data)
    assert TerminalFilter().feed(passed) == passed
