"""What a terminal is shown of text that a guest wrote."""

import sys
import unicodedata

import pytest

from cellwright.harness.cli.terminal import harmless

HIDDEN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")


def test_every_character_that_controls_or_hides_is_written_out_and_no_other() -> None:
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        hides = unicodedata.category(character) in HIDDEN and character not in "\n\t"
        shown = harmless(character)
        assert (shown != character) == hides, hex(number)
        if hides:
            assert shown.isascii()
            assert shown.isprintable()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jhello", "\\x1b[2Jhello"),
        ("a\u200bb", "a\\u200bb"),
        ("\u202eevil", "\\u202eevil"),
        ("x\U000e0041\U000e007f", "x\\U000e0041\\U000e007f"),
        ("\ud800", "\\ud800"),
        ("näïve \N{GRINNING FACE}\t中\n", "näïve \N{GRINNING FACE}\t中\n"),
    ],
)
def test_it_is_written_out_as_an_escape(text: str, shown: str) -> None:
    assert harmless(text) == shown
