"""Patterns: the answers of `re`, at a cost that the pattern cannot choose."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.harness.schemas.patterns import Unsupported, compile_pattern

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
]  # fmt: skip


def spend_freely(_: int) -> None:
    return


@pytest.mark.parametrize(("pattern", "those", "others"), TABLE, ids=[row[0] for row in TABLE])
def test_a_pattern_is_found_where_it_is(pattern: str, those: list[str], others: list[str]) -> None:
    if not those:
        return
    compiled = compile_pattern(pattern)
    assert [text for text in those if not compiled.found_in(text, spend_freely)] == []
    assert [text for text in others if compiled.found_in(text, spend_freely)] == []


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
    assert compile_pattern(pattern).found_in(text, spend_freely) == wanted


@pytest.mark.parametrize(
    "pattern",
    [r"(?=a)", r"(?!a)", r"(?<=a)b", r"(a)\1", r"\p{L}", "(", ")", "[", "a**", "*", "\\", r"\x1",
     "(?P<n>a)", "(?i)a", "[z-a]", "(" * 50 + ")" * 50, "a{2000}b{2000}", "(a{50}){50}", "((((){9999}){9999}|){9}){9999}", "a" * 1001],
    ids=lambda pattern: pattern[:20],
)  # fmt: skip
def test_what_cannot_be_matched_in_linear_time_is_said_not_to_be(pattern: str) -> None:
    with pytest.raises(Unsupported):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", [r"^(\w+\s?)*$", r"^(a+)+$", r"^(a|a)*$", r"^(.*a){20}$", "a*" * 30 + "b"]
)
def test_what_makes_re_explode_takes_steps_in_proportion(pattern: str) -> None:
    compiled = compile_pattern(pattern)

    def steps(length: int) -> int:
        spent: list[int] = []
        compiled.found_in("a" * length + "!", spent.append)
        return sum(spent)

    assert steps(2000) <= steps(1000) * 2.1
    assert steps(1000) <= 1001 * len(compiled.states)
