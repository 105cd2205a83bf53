"""The escape sequences that a person's terminal gets of a guest's, and those that are dropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.harness.text.escape_sequences import TerminalFilter, TerminalQuestions

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
    assert passed.restore() == b"\x1b[?1049l\x1b[?25h\x0f\x1b(B\x1b[m"


UNDONE = {
    "insert mode": (b"\x1b[4h", b"\x1b[4l"), "scrolling region": (b"\x1b[2;9r", b"\x1b7\x1b[r\x1b8"),
    "keypad": (b"\x1b=", b"\x1b>"), "G1": (b"\x1b)0\x0e", b"\x1b)B"), "no tab stops": (b"\x1b[3g", b"\x1b[?5W"),
    "a tab stop": (b"\x1bH", b"\x1b[?5W"), "shape": (b"\x1b[4 q", b"\x1b[0 q"),
}  # fmt: skip


@pytest.mark.parametrize(("done", "undone"), UNDONE.values(), ids=UNDONE)
def test_settings_of_a_terminal_are_undone(done: bytes, undone: bytes) -> None:
    passed = TerminalFilter()
    assert passed.feed(done) == done
    assert passed.restore() == undone + b"\x0f\x1b(B\x1b[m"
    passed = TerminalFilter()
    passed.feed(b"\x1b[5;1H\x1b[4l\x1b>\x1b)B")  # moving is no setting
    assert undone not in passed.restore() or undone in (b"\x1b)B",)


def test_a_number_of_any_length_is_no_mode() -> None:
    assert TerminalFilter().feed(b"\x1b[?" + b"9" * 5000 + b"ha\x1b[?00000001hb") == b"ab"


QUESTIONS = [
    b"\x1b[c",
    b"\x1b[0c",
    b"\x1b[>c",
    b"\x1b[>0c",
    b"\x1b[5n",
    b"\x1b[6n",
    b"\x1b]10;?\x07",
    b"\x1b]11;?\x1b\\",
]
ANSWERS = [b"\x1b[?62;22c", b"\x1b[?1c", b"\x1b[>0;10;1c", b"\x1b[>1c", b"\x1b[0n", b"\x1b[24;80R",
           b"\x1b]10;rgb:ffff/0000/1111\x07", b"\x1b]11;rgb:0/0/0\x1b\\"]  # fmt: skip


def test_questions_with_harmless_answers_are_passed_on_and_answered() -> None:
    asked = TerminalQuestions()
    passed = TerminalFilter(asked)
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        assert b"".join(passed.feed(bytes([each])) for each in question) == question
        assert asked
        for each in b"typed" + answer:
            assert asked
            asked.read(bytes([each]))
        assert not asked
    for data in DROPPED.values():
        fresh = TerminalFilter(TerminalQuestions()).feed(data)
        for question in QUESTIONS:
            fresh = fresh.replace(question, b"")
        assert fresh == b""


def test_an_answer_ends_the_questions_before_it_and_many_questions_are_not_asked() -> None:
    asked = TerminalQuestions()
    passed = TerminalFilter(asked)
    passed.feed(b"\x1b]10;?\x07\x1b]11;?\x07\x1b[c\x1b[6n")
    asked.read(b"\x1b[?6c")  # this terminal knows no colours
    assert asked
    asked.read(b"\x1b[1;1R")
    assert not asked
    assert passed.feed(b"\x1b[6n" * 1000) == b"\x1b[6n" * 64
    for _ in range(64):
        assert asked
        asked.read(b"\x1b[1;1R")
    assert not asked


@given(st.binary())
def test_nothing_passes_that_the_filter_itself_would_drop(data: bytes) -> None:
    passed = TerminalFilter().feed(data)
    assert TerminalFilter().feed(passed) == passed
