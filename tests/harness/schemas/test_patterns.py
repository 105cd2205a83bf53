"""Patterns: the answers of `re`."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.harness.schemas.validation import compile_schema

TABLE = [
    (r"^[a-z][a-z0-9-]*[a-z0-9]+$", ["a1", "a-b-c0"], ["A1", "a-", ""]),
    (r"^[0-9]+-[0-9a-f]{8}-[0-9a-f]{4}$", ["1-0123abcd-00ff"], ["1-0123abcd-00fg", "-0123abcd-00ff"]),
    (r"^#[0-9A-Fa-f]{6}$", ["#00ffAA"], ["#00ffA", "#00ffAAA"]),
    (r"^[ -~]*$", ["", "plain"], ["é", "a\n"]),
    (r"^[^,]+(,[^,]+)*$", ["a", "a,b"], ["", "a,", ",a"]),
    (r"^[a-zA-Z0-9\-_.]+$", ["a-b_c.d"], ["a b"]),
    (r"^(GET|PUT)(,(GET|PUT))*$", ["GET", "GET,PUT"], ["GET,", "get"]),
    (r"^\d{3}(,\d{3})*$", ["123", "123,456"], ["12", "123,45", "١٢٣"]),
    (r"\bcat\b", ["a cat", "cat."], ["cats", "concat"]),
    (r"colou?r", ["the color", "colour"], ["colr"]),
    (r"^a{2,}$", ["aa", "aaaa"], ["a"]),
    (r"^a{0,2}$", ["", "aa"], ["aaa"]),
    (r"^\u0041\x42$", ["AB"], ["ab"]),
    (r"^[\w.]+@\w+$", ["a.b@c"], ["a b@c", "@c"]),
    (r"^[^\s]+$", ["ab"], ["a b", "a\u00a0b"]),
    (r"a{x}", ["a{x}"], ["ax"]),
    (r"^.$", ["a"], ["\n", ""]),
    (r"^[\d-_]+$", ["1-2", "_"], ["a-b", "A;<>", "[]"]),
    (r"^[_-\d]+$", ["1-2", "_"], ["^"]),
    (r"^[a-c-e]+$", ["b-e"], ["d"]),
    (r"^(()){99}a$", ["a"], ["b"]),
    (r"^[]-]*$", [], []),
    (r"^(a*)*$", ["", "aaa"], ["b"]),
    (r"^(a|a)*b$", ["aab"], ["aac"]),
    (r"^\/x\.\$$", ["/x.$"], ["/xx$"]),
    (r"..+a?.+", ["111"], ["11"]),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "those", "others"), TABLE, ids=[row[0] for row in TABLE])
def test_a_pattern_is_found_where_it_is(pattern: str, those: list[str], others: list[str]) -> None:
    if not those:
        return
    validator = compile_schema({"pattern": pattern})
    assert validator.unchecked == ()
    assert [text for text in those if validator.complaints(text)] == []
    assert [text for text in others if not validator.complaints(text)] == []


pieces = st.sampled_from(
    ["a", "b", ".", "[ab]", "[^a]", "(?:ab|c)", "(a|b)", "^", "$", r"\w", r"\d", "1"]
)
counts = st.sampled_from(["", "*", "+", "?", "{2}", "{1,2}", "{2,}"])


@given(
    st.lists(st.tuples(pieces, counts), min_size=1, max_size=5),
    st.text("ab1c\nx", max_size=8),
)
def test_it_agrees_with_re(parts: list[tuple[str, str]], text: str) -> None:
    pattern = "".join(piece + ("" if piece in "^$" else count) for piece, count in parts)
    wanted = re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None
    assert (compile_schema({"pattern": pattern}).complaints(text) == ()) == wanted


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "[", "a**", "*", "\\", r"\x1", "[z-a]", r"(a)\2"],
    ids=lambda pattern: pattern,
)
def test_what_is_no_pattern_is_named(pattern: str) -> None:
    assert compile_schema({"pattern": pattern}).unchecked == (pattern,)
