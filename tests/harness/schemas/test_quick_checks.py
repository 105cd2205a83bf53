"""The quick check says yes to nothing that the whole validator refuses."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from cellwright.errors import ToolInvalid
from cellwright.harness.schemas import validation
from cellwright.harness.schemas.checker import CheckAnswer
from cellwright.harness.schemas.validation import compile_schema, quick_check

WORDS = st.sampled_from(["a", "b", "c"])
LEAVES = st.one_of(
    st.sampled_from(["string", "integer", "number", "boolean", "null"]).map(
        lambda kind: {"type": kind}
    ),
    st.lists(WORDS, min_size=1, unique=True).map(lambda words: {"type": "string", "enum": words}),
    st.sampled_from(
        [{"type": "array"}, {"type": "object"}, {"type": "string", "minLength": 2}, {}]
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        inner.map(lambda items: {"type": "array", "items": items}),
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(WORDS, inner, max_size=3)},
            optional={
                "required": st.lists(WORDS, unique=True, max_size=2),
                "additionalProperties": st.booleans() | inner,
                "description": st.just("what it is"),
            },
        ),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=800)
@given(SCHEMAS, VALUES)
def test_what_is_surely_right_is_right(schema: dict[str, Any], value: Any) -> None:
    check = quick_check(schema)
    if check and check(value):
        assert Draft202012Validator(schema).is_valid(value)


def test_the_usual_arguments_are_found_right_and_wrong_ones_are_not() -> None:
    check = quick_check(
        {
            "type": "object",
            "title": "arguments",
            "properties": {
                "city": {"type": "string", "description": "which"},
                "days": {"type": "integer", "default": 1},
                "units": {"type": "string", "enum": ["C", "F"]},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
            "additionalProperties": False,
        }
    )
    assert check
    assert check({"city": "Paris", "days": 2, "units": "C", "tags": ["a"]})
    for wrong in ({}, {"city": 1}, {"city": "x", "days": True}, {"city": "x", "more": 1},
                  {"city": "x", "units": "K"}, {"city": "x", "tags": [1]}, [], None):  # fmt: skip
        assert not check(wrong)


def test_what_is_no_json_is_never_surely_right() -> None:
    for value in (object(), float("nan"), float("inf"), (1,), b"x"):
        assert compile_schema({"type": "number"}).complaints(value)
        for schema in (
            {"type": "object"},
            {"type": "object", "properties": {"a": {"type": "array"}}},
        ):
            assert compile_schema(schema).complaints({"b": value})
            assert compile_schema(schema).complaints({"a": [value]})


def test_a_schema_that_is_not_simple_is_left_to_the_whole_validator() -> None:
    for schema in ({}, True, {"type": ["string", "null"]}, {"$ref": "#/x"}, {"type": "string", "pattern": "a"},
                   {"type": "object", "properties": {"x": {"anyOf": []}}}, {"type": "object", "required": "x"},
                   {"type": "string", "enum": [1]}, {"type": "object", "additionalProperties": {}}):  # fmt: skip
        assert quick_check(schema) is None


def test_the_whole_validator_is_asked_only_if_it_has_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    validator = compile_schema({"type": "object", "properties": {"n": {"type": "number"}}})
    asked: list[object] = []

    def ask(_: object, value: object, __: object) -> CheckAnswer:
        asked.append(value)
        return CheckAnswer()

    monkeypatch.setattr(validation.Validator, "_ask", ask)
    assert validator.complaints({"n": 1.5}) == ()
    assert asked == []
    validator.complaints({"n": "x"})
    assert asked == [b'{"n": "x"}']


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "title": 1}, {"type": "string", "examples": "x"}, {"type": "integer", "deprecated": 1},
        {"type": "object", "required": ["a", "a"]}, {"type": "object", "required": [1]},
        {"type": "object", "additionalProperties": 1}, {"type": "object", "properties": {"a": {"type": "x"}}},
    ],
)  # fmt: skip
def test_an_invalid_schema_has_no_quick_check(schema: dict[str, Any]) -> None:
    assert quick_check(schema) is None
    with pytest.raises(ToolInvalid, match="schema"):
        compile_schema(schema)
