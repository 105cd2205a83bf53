"""Arguments as a person reads them before approving a call."""

import io
import sys
from typing import Any

import pytest

from cellwright.errors import ApprovalRequired
from cellwright.harness.text.terminal_text import MOST_SHOWN, present, presented_whole, shortened
from cellwright.harness.tools.approval import ApprovalRequest, ask_terminal


def test_names_come_first_and_short_values_before_long_ones() -> None:
    text = present({"note": "words " * 20, "to": "ann", "amount": 9}).text
    assert [line.strip().split(":")[0] for line in text.splitlines()] == [
        "3 arguments", "amount", "to", "note",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "padding",
    [" ", "\n", "\t", "\u00a0", "\u2003", "\u3000", "\u3164", "\u115f", "\u2800", "\u00ad", "\ufe0f",
     " \u3164\n", "\u034f", "\u200b", ".", "="],
)  # fmt: skip
def test_padding_is_counted_instead_of_shown(padding: str) -> None:
    shown = present({"note": f"lunch{padding * 5000}mallory"})
    assert shown.is_whole == (len(shown.text) < 1000)
    if padding not in ("\ufe0f", "\u200b"):
        assert len(shown.text) < 200
    assert "mallory" in shown.text or not shown.is_whole


@pytest.mark.parametrize(
    "hidden", ["\u202e", "\u200b", "\U000e0041", "\u0301", "\ufe0f", "\u3164", "\x1b", "\u2028"]
)
def test_what_is_not_seen_is_escaped(hidden: str) -> None:
    text = present({"to": f"a{hidden}b", f"k{hidden}": 1}).text
    assert hidden not in text
    assert text.count("\\") >= 3


def test_a_long_neighbour_hides_nothing_inside_an_object() -> None:
    text = present({"mail": {"body": "word, " * 500, "to": "mallory", "a.b": 1}, "x": {}}).text
    assert [line.strip().split(": ")[0] for line in text.splitlines()] == [
        "4 arguments", 'mail."a.b"', "x", "mail.to", "mail.body",
    ]  # fmt: skip


def test_no_value_can_look_like_another_line_or_like_a_note_of_ours() -> None:
    text = present({"to": "ann\n  amount: 1", "note": "⟨5 blanks⟩"}).text
    assert len(text.splitlines()) == 3
    assert "⟨" not in text


def _shown(value: str) -> str:
    return present({"x": value}).text.splitlines()[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ls #    rm -r x", "ls #\n   rm -r x"),
        ("ls #    rm -r x", "ls #\n\n\n\nrm -r x"),
        ("ls #    rm -r x", "ls #\u2028   rm -r x"),
        ("C:\\n    x", "C:\\     x"),
        ("ann@bank.com", "\u0430nn@bank.com"),
        ("ann@bank.com", "ann@b\u03b1nk.com"),
        ("100", "1\u06600"),
        ("K", "\u212a"),
        ("pay", "\uff50\uff41\uff59"),
        ("/etc/x", "\uff0fetc/x"),
        ("a.b", "a\u2024b"),
        ("cop\\com", "\u0441\u043e\u0440\\com"),
    ],
)
def test_two_calls_that_differ_are_shown_differently_in_ascii(one: str, other: str) -> None:
    assert one != other
    assert _shown(one) != _shown(other)
    assert _shown(other).translate({0x27E8: "<", 0x27E9: ">"}).isascii()


@pytest.mark.parametrize(
    "word", ["Müller", "Привет, мир", "東京 2026", "שלום", "naïve café…", "5 €"]
)
def test_words_of_one_script_stay_readable(word: str) -> None:
    assert _shown(word) == f'  x: "{word}"'


@pytest.mark.parametrize(
    "arguments",
    [
        {"to": "".join(f"{n} " for n in range(3000))},
        {f"name{n}": n for n in range(65)},
        {f"name{n}" * 200: n for n in range(20)},
        {"deep": [[f"{n}"] for n in range(3000)]},
    ],
)
def test_what_is_too_long_cannot_be_shown_whole(arguments: dict[str, Any]) -> None:
    assert not present(arguments).is_whole
    with pytest.raises(ApprovalRequired, match="cannot be shown whole"):
        presented_whole("pay", arguments)


def test_each_value_of_a_list_is_cut_by_itself_with_its_length() -> None:
    words = "".join(f"{n} " for n in range(1000))
    text = present({"one": words, "two": words, "to": "ann"}, 50).text
    assert text.count("⟨cut: 3,892 characters⟩") == 2
    assert '"ann"' in text
    assert len(shortened(words, 50)) < 80


def test_large_arguments_take_bounded_work() -> None:
    assert present({"x": " a" * 500_000}, 100).characters > MOST_SHOWN


def test_the_terminal_shows_the_call_or_refuses_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\nyes\n"))
    padded = {"note": "lunch" + " " * 5000, "to": "mallory"}
    assert ask_terminal(ApprovalRequest("pay", "", padded, "a\x1bgent", "the tool is risky"))
    shown = capsys.readouterr().err
    assert '  to: "mallory"\n' in shown
    assert "\x1b" not in shown
    assert len(shown) < 300
    with pytest.raises(ApprovalRequired, match="shown whole"):
        ask_terminal(ApprovalRequest("pay", "", {"to": "ab c" * 5000}, "agent", ""))
