"""Texts are taken apart as people read them, whatever is in them."""

import time

import pytest

from cellwright.harness.search import postings as module
from cellwright.harness.search.postings import alternatives, fold, squeezed, stem, words
from cellwright.harness.text.hidden import visible

HOSTILE = {
    "nothing": "",
    "zero width": "del\u200bete\u2060 fi\ufeffle",
    "bidirectional": "\u202edelete\u2066 file\u202c",
    "NUL": "delete\x00file",
    "lone surrogates": "delete\ud800 \udfffile",
    "tags": "delete\U000e0041 file",
    "expands eighteenfold": "\ufdfa" * 100_000,
    "marks without end": "a" + "\u0301" * 100_000,
    "one long word": "a" * 1_000_000,
    "one long camel": "aB" * 500_000,
    "only separators": "_-. " * 250_000,
}


@pytest.mark.parametrize(
    ("text", "stems"),
    [
        ("list-mail-messages", ["list", "mail", "messag"]),
        ("sqlite.read_query", ["sqlit", "read", "queri"]),
        ("HTTPServer", ["http", "server", "httpserver"]),
        ("readFile", ["read", "fil", "readfil"]),
        ("GitHub", ["git", "hub", "github"]),
        ("2 files, v10", ["2", "fil", "v", "10"]),
        ("Could you please", []),
        ("café Größe", ["caf", "gross"]),
        ("Погода", ["погода"]),
    ],
)
def test_a_text_becomes_its_words(text: str, stems: list[str]) -> None:
    assert words(text) == stems


@pytest.mark.parametrize(
    "same",
    [
        ("query", "queries", "queried"),
        ("file", "files", "filing"),
        ("stop", "stops", "stopped", "stopping"),
        ("search", "searches", "searched", "searching"),
        ("process", "processes", "processing"),
        ("run", "running", "execute", "executes", "executing", "invoke"),
        ("delete", "deleted", "remove", "removes", "removing"),
    ],
)
def test_forms_of_a_word_are_one(same: tuple[str, ...]) -> None:
    assert len({stem(word) for word in same}) == 1


@pytest.mark.parametrize("word", ["status", "address", "thing", "string", "need", "analysis", "id"])
def test_an_ending_that_is_none_stays(word: str) -> None:
    assert stem(word) == word


def test_a_run_of_a_query_is_one_word_or_several() -> None:
    assert alternatives("GitHub issues") == [(("github",), ("git", "hub")), (("issu",), ("issu",))]


def test_names_that_differ_in_case_and_separators_are_one() -> None:
    assert {*map(squeezed, ("find_symbol", "find symbol", "Find-Symbol", "findSymbol"))} == {
        "findsymbol"
    }


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_read_in_bounds(text: str) -> None:
    began = time.thread_time()
    found = words(text)
    assert sum(map(len, found)) <= 3 * module.MAX_CHARACTERS
    assert max(map(len, found), default=0) <= 40
    for run in alternatives(text):
        assert max(map(len, run.whole + run.humps), default=0) <= 40
    squeezed(text).encode()
    visible(text).encode()
    assert time.thread_time() - began < 5  # quadratic would take hours


def test_invisible_characters_do_not_split_a_word() -> None:
    for name in ("zero width", "bidirectional", "NUL", "tags"):
        assert words(HOSTILE[name]) == words("delete file"), name


def test_folding_keeps_letters_and_drops_what_hides() -> None:
    assert fold("e\u0301\u200b\ud800x") == "ex"


def test_shown_text_hides_and_smuggles_nothing() -> None:
    text = "a\u202eb\u200bc\x1b[31md\ud800e\u2028f\U000e0041g\U000e0101h\ufe0fi\nj\tk"
    assert visible(text) == "abc[31mdefghi\nj\tk"
    assert visible("a" * 10, 4) == "aaaa…"
    assert visible("naïve 日本語 🙂") == "naïve 日本語 🙂"
