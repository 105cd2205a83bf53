"""Schemas and values that nobody trusts: bounded, local, and right for honest ones."""

import json
import subprocess
import sys
from typing import Any

import pytest

from cellwright.errors import ToolInvalid
from cellwright.harness.schemas import validation
from cellwright.harness.schemas.validation import compile_schema
from tests.conftest import ROOT, SHARED

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string", "pattern": "^[a-z]+$"}},
    "required": ["x"],
    "additionalProperties": False,
}


def test_a_value_that_fits_has_no_complaints() -> None:
    assert compile_schema(POINT).complaints({"x": 1, "name": "a"}) == ()


def test_each_complaint_says_where_and_what() -> None:
    found = compile_schema(POINT).complaints({"x": "1", "name": "A", "more": 1})
    assert set(found) == {
        "$.x: '1' is not of type \"integer\"",
        "$.name: 'A' does not match \"^[a-z]+$\"",
        "Additional properties are not allowed ('more' was unexpected)",
    }
    assert compile_schema(POINT).complaints({}) == ('"x" is a required property',)


def test_a_complaint_about_an_unknown_property_names_the_one_that_was_meant() -> None:
    schema = {"properties": {"item": {}, "count": {}}, "additionalProperties": False}
    nested = compile_schema({"properties": {"a": schema}})
    assert compile_schema(schema).complaints({"itm": 1, "zebra": 2}) == (
        "Additional properties are not allowed ('itm', 'zebra' were unexpected); did you mean 'item'?",
    )
    assert nested.complaints({"a": {"Count": 1}}) == (
        "$.a: Additional properties are not allowed ('Count' was unexpected); did you mean 'count'?",
    )
    assert compile_schema(schema).complaints({"zebra": 2}) == (
        "Additional properties are not allowed ('zebra' was unexpected)",
    )


def test_a_schema_is_compiled_once() -> None:
    assert compile_schema(POINT) is compile_schema(json.loads(json.dumps(POINT)))


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not": schema}
    return schema


def endless() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["not"] = schema
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        None, [], "x", 1, True,
        {"type": "integr"}, {"type": 5}, {"properties": []}, {"required": "x"}, {"enum": {"a": 1}},
        {"$ref": "http://127.0.0.1:1/x"}, {"$ref": "file:///etc/passwd"}, {"$ref": "other.json"},
        {"properties": {"a": {"items": {"$ref": "//x/y"}}}},
        {"$ref": "#/default", "default": {"$ref": "http://127.0.0.1:1/x"}},
        {"$dynamicRef": "https://127.0.0.1:1/"}, {"$ref": "#/nothing"}, {"$ref": "#/required/0", "required": ["a"]},
        deep(60), deep(5000), endless(), {"description": "x" * 300_000}, {"enum": [{1, 2}]},
        {"enum": [b"x"]}, {1: 2}, {"const": "\ud800"},
        {"properties": {"a": {"$schema": "http://json-schema.org/draft-07/schema#"}}},
        {"$ref": "#/x", "x": {"$schema": "https://json-schema.org/draft/2020-12/schema"}},
        {"properties": {f"p{n}": {} for n in range(6000)}},
    ],
)  # fmt: skip
def test_what_is_no_schema_or_leads_outside_is_refused(schema: Any) -> None:
    with pytest.raises(ToolInvalid, match="schema"):
        compile_schema(schema)


@pytest.mark.parametrize("word", ["$ref", "$dynamicRef", "$recursiveRef"])
@pytest.mark.parametrize(
    "where", ["http://127.0.0.1:1/x", "file:///etc/passwd", "other.json", "//x/y", "urn:x"]
)
def test_a_reference_that_leads_outside_is_refused_for_that(word: str, where: str) -> None:
    for schema in ({word: where}, {"items": [{word: where}]}, {"default": {"x": {word: where}}}):
        with pytest.raises(ToolInvalid, match="leads outside"):
            compile_schema(schema)


def doubling(levels: int) -> dict[str, Any]:
    """Return a schema of a few lines that asks for 2^levels steps."""
    parts: dict[str, Any] = {"0": {"type": "integer"}}
    for number in range(1, levels):
        parts[str(number)] = {"allOf": [{"$ref": f"#/$defs/{number - 1}"}] * 2}
    return {"$defs": parts, "$ref": f"#/$defs/{levels - 1}"}


def nest(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


TWICE = {"properties": {"a": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$ref": "#"}, 1),
        ({"allOf": [{"$ref": "#"}]}, 1),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, 1),
        (doubling(60), 1),
        ({"allOf": [TWICE, TWICE]}, nest(60)),
        ({"items": {"pattern": "^(a|b|ab)*c$"}}, ["ab" * 50_000] * 10),
    ],
    ids=["itself", "through allOf", "two of them", "doubling", "doubling with depth", "patterns"],
)  # fmt: skip
def test_a_check_without_end_ends(schema: dict[str, Any], value: Any) -> None:
    try:
        found = compile_schema(schema).complaints(value)
    except ToolInvalid as error:
        found = (str(error),)
    assert len(found) <= 10


def test_many_items_are_compared_as_one_heap() -> None:
    validator = compile_schema({"uniqueItems": True})
    assert validator.complaints([{"n": n} for n in range(50_000)]) == ()
    assert validator.complaints([1, 1.0]) == ("[1, 1.0] has non-unique elements",)
    assert validator.complaints([1, True, "1", [1], [True]]) == ()


def test_a_pattern_that_backtracks_is_not_given_to_re() -> None:
    """`re` would take longer than the universe is old."""
    for schema in (
        {"pattern": r"^(\w+\s?)*$"},
        {"propertyNames": {"pattern": r"^(\w+\s?)*$"}},
        {"patternProperties": {r"^(\w+\s?)*$": False}},
        {"patternProperties": {r"^(\w+\s?)*$": True}, "additionalProperties": False},
    ):
        compile_schema(schema).complaints("a" * 60 + "!")
        compile_schema(schema).complaints({"a" * 60 + "!": 1})


@pytest.mark.parametrize("dialect", ["draft-03", "draft-04", "draft-06", "draft-07", "draft/2019-09",
                                     "draft/2020-12", "draft/next"])  # fmt: skip
def test_no_dialect_brings_its_own_keywords(dialect: str) -> None:
    schema = {
        "$schema": f"https://json-schema.org/{dialect}/schema",
        "properties": {"in": {"$ref": "#"}, "text": {"pattern": r"^(\w+\s?)*$"}},
        "enum": [{"in": {"in": {"text": "a" * 60 + "!"}}, "n": n} for n in range(1000)],
    }
    validator = compile_schema(schema)
    assert len(validator.complaints({"in": {"in": {"text": "a" * 60 + "!"}}, "n": 1})) == 3
    assert validator.complaints({"in": {"in": {"text": "a"}}, "n": 1}) != ()


def test_a_part_that_is_no_schema_is_refused_where_it_is_used() -> None:
    for part in ({"type": "integr"}, {"properties": 5}):
        with pytest.raises(ToolInvalid, match="schema"):
            compile_schema({"$ref": "#/x", "x": part})
    found = compile_schema({"$ref": "#/x", "x": {"multipleOf": 0}}).complaints(7)
    assert found == ("7 is not a multiple of 0",)


def test_properties_by_pattern_are_checked_and_are_not_additional() -> None:
    validator = compile_schema(
        {"patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False}
    )
    assert validator.complaints({"x-a": 1}) == ()
    assert len(validator.complaints({"x-a": "1", "y": 1})) == 2
    typed = compile_schema({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}})
    assert typed.complaints({"a": "x", "b": "x"}) == ("$.b: 'x' is not of type \"integer\"",)


def test_a_pattern_that_cannot_be_compiled_is_named_and_refuses_nothing() -> None:
    validator = compile_schema({"items": {"pattern": "(a"}, "enum": [["b"], {"pattern": "(a"}]})
    assert validator.unchecked == ("(a",)
    assert validator.complaints(["b"]) == ()
    assert validator.complaints({"pattern": "(a"}) == ()
    closed = compile_schema({"patternProperties": {"(a": False}, "additionalProperties": False})
    assert closed.complaints({"b": 1}) == ()


def test_a_pattern_that_needs_backtracking_is_checked() -> None:
    assert compile_schema({"pattern": r"^(?!.*x).+$"}).unchecked == ()
    assert compile_schema({"pattern": r"^(?!.*x).+$"}).complaints("abc") == ()
    assert len(compile_schema({"pattern": r"^(?!.*x).+$"}).complaints("axc")) == 1
    assert len(compile_schema({"pattern": r"^(?=(\w+\s?)*$)(a)\2"}).complaints("a" * 60 + "!")) == 1


def test_a_value_that_is_too_deep_or_no_json_is_a_complaint() -> None:
    validator = compile_schema({})
    assert validator.complaints(nest(60)) == ()
    assert len(validator.complaints(nest(70))) == 1
    for value in (object(), (1,), b"x", {1: 2}, float("nan"), float("-inf")):
        assert len(validator.complaints({"a": value})) == 1
    assert validator.complaints(2**100) == ()


def test_a_complaint_is_one_short_line() -> None:
    found = compile_schema(POINT).complaints({"x": "\n\x1b[31m" + "y" * 10_000})
    assert len(found) == 1
    assert len(found[0]) < 400
    assert "\n" not in found[0]
    assert "\x1b" not in found[0]


def test_older_drafts_are_understood() -> None:
    old = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"n": {"type": "integer"}},
        "items": [{"$ref": "#/definitions/n"}],
    }
    assert compile_schema(old).complaints(["x"]) == ("$[0]: 'x' is not of type \"integer\"",)


def test_only_so_many_schemas_are_remembered() -> None:
    for number in range(validation._REMEMBERED + 10):
        compile_schema({"const": number})
    assert len(validation._validators._known) <= validation._REMEMBERED


@pytest.mark.needs("shared")
def test_the_schemas_of_real_servers_compile() -> None:
    checked = 0
    for path in (SHARED / "data/mcp-catalogue").glob("*.json"):
        tools = json.loads(path.read_text())
        for tool in tools["tools"] if isinstance(tools, dict) else tools:
            compile_schema(tool["inputSchema"]).complaints({})
            checked += 1
    assert checked > 300


def test_a_checker_starts_only_for_what_has_no_quick_check() -> None:
    code = (
        "import sys, cellwright.harness.schemas.validation as v; "
        "named = 'cellwright.harness.schemas.checker_pool'; "
        "v.compile_schema({'type': 'integer'}).complaints(1); a = named in sys.modules; "
        "v.compile_schema({'minimum': 1}); print(a, named in sys.modules, 'jsonschema_rs' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True", "False"]
    assert done.stderr == ""
