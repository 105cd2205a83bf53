"""Schemas and values that are written to cost: compiling and checking is bounded in time and memory,
on the host and in the checker, whatever is multiplied, and ends once the caller has given up."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator

from cellwright.errors import ToolInvalid
from cellwright.harness.schemas.validation import Validator, compile_schema
from cellwright.policies.errors import BudgetExceeded
from cellwright.policies.policy import MIB
from cellwright.runner.concurrency import CANCEL, Budget
from tests.harness.schemas.test_quick_checks import VALUES
from tests.work import cost_of, multiplied

_LINES = 1_500_000  # lines executed by the host, which checks the size of a schema or value
_MEMORY_BYTES = 48 * MIB
_PATTERNS = ["((((){9999}){9999}){9999}){9999}", "(?:" + "|".join("^" * 480) + ")x", "(a|b|ab)*c",
             "(.{99}){20}", "[" + "".join(map(chr, range(0x4E00, 0x5200, 2))) + "]{1999}"]  # fmt: skip


def tree(depth: int) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for _ in range(depth):
        part = {"dependentSchemas": {"a": part, "b": part}}
    return part


def references(word: str, levels: int) -> dict[str, Any]:
    """Return a schema that leads down `levels` of definitions, twice at each."""
    parts: dict[str, Any] = {"0": {}}
    for number in range(1, levels):
        again = {"$ref": f"#/$defs/{number - 1}"}
        parts[str(number)] = {
            word: {"a": again, "b": again} if "dependent" in word else [again] * 2
        }
    return {"$defs": parts, "unevaluatedProperties": False, "$ref": f"#/$defs/{levels - 1}"}


AB = {"a": 1, "b": 2}
HOSTILE: dict[str, tuple[Any, Any]] = {
    "a nested repetition of nothing": ({"pattern": _PATTERNS[0]}, "x"),
    "assertions that fail": ({"pattern": _PATTERNS[1]}, "y" * 20_000),
    "a pattern of names": ({"patternProperties": {_PATTERNS[2]: {}}}, {"ab" * 9000: 1}),
    "large patterns": ({"properties": {f"p{n}": {"pattern": f"{_PATTERNS[3]}{n}"} for n in range(900)}}, {}),
    "a large class, repeated": ({"pattern": _PATTERNS[4]}, "\u4e00" * 2000),
    "a long enum": ({"items": {"enum": list(range(20_000))}}, [19_999] * 5000),
    "an enum of objects": ({"items": {"enum": [{"a": n} for n in range(900)]}}, [{"a": -1}] * 20_000),
    "uniqueItems, often": ({"allOf": [{"uniqueItems": True}] * 200}, list(range(5000))),
    "const of a long text": ({"allOf": [{"const": "x" * 900}] * 200}, "x" * 400_000),
    "more properties than items": ({"items": {"properties": {f"p{n}": True for n in range(2000)}}}, [{}] * 9000),
    "words that mean nothing": ({"items": {f"x{n}": 1 for n in range(9000)}}, [1] * 9000),
    "many types": ({"type": [f"t{n}" for n in range(9000)]}, 1),
    "many types, not texts": ({"type": [part for n in range(9000) for part in (n, f"a{n}")]}, 1),
    "many required": ({"items": {"required": [f"r{n}" for n in range(9000)]}}, [{}] * 9000),
    "long complaints": ({"anyOf": [{"type": "integer"}] * 2000}, "\U0001f600" * 50_000),
    "long complaints, nested": ({"allOf": [{"not": {"anyOf": [{}, {}]}}] * 900}, ["x" * 9000] * 50),
    "doubling by references": (references("allOf", 60), AB),
    "doubling by dependencies": (references("dependentSchemas", 60), AB),
    "doubling in place": (tree(18), AB),
    "unevaluated of a reference to itself": ({"unevaluatedProperties": False, "$ref": "#"}, AB),
    "unevaluated, many": ({"unevaluatedProperties": False, "allOf": [{"properties": AB}]},
                          {f"p{n}": 1 for n in range(20_000)}),
    "unevaluated items": ({"unevaluatedItems": False, "prefixItems": [{}] * 2000}, [1] * 20_000),
    "a list of true": ({"allOf": [True] * 20_000}, 1),
    "anchors": ({"$defs": {"a": {"$anchor": "a"}}, "allOf": [{"$ref": "#a"}] * 2000}, 1),
    "long ids": ({"$id": "http://h/" + "a" * 400 + "/", "$defs": {f"d{n}": {"$id": f"i{n}"} for n in range(90)}}, 1),
    "a long index": ({"$ref": "#/allOf/" + "9" * 9000, "allOf": [{}]}, 1),
    "nested references": ({"$defs": {"a": {"anyOf": [{"items": {"$ref": "#/$defs/a"}}] * 9}}, "$ref": "#/$defs/a"},
                          json.loads("[" * 60 + "1" + "]" * 60)),
}  # fmt: skip


def assert_bounded(schema: Any, value: Any) -> None:
    """Compile and check: the host spends little, and gets an answer that is short."""

    def work() -> tuple[str, ...]:
        try:
            return Validator(schema).complaints(value)
        except ToolInvalid as error:
            return (str(error),)

    cost = cost_of(work, _LINES)
    assert cost.memory_bytes <= _MEMORY_BYTES
    assert all(len(each) < 1000 for each in cost.result)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_written_to_cost_is_paid_for(name: str) -> None:
    assert_bounded(*HOSTILE[name])
    assert compile_schema({"minimum": 2}).complaints(1) == ("1 is less than the minimum of 2",)


SMALL: list[tuple[Any, Any]] = [
    ({"type": "object", "properties": {"a": {"type": ["string", "null"], "pattern": "^[a-z]+$"}},
      "required": ["a"], "additionalProperties": {"enum": ["x", 1, [2]]}}, {"a": "abc", "b": [2]}),
    ({"anyOf": [{"items": {"const": {"a": [1]}}}, {"prefixItems": [{"not": {"minLength": 2}}]}],
      "uniqueItems": True, "contains": {"type": "array"}, "unevaluatedItems": {"maxLength": 1}}, ["a", ["b"]]),
    ({"$defs": {"n": {"oneOf": [{"$ref": "#"}, {"type": "integer"}]}}, "patternProperties": {"^x": {"$ref": "#/$defs/n"}},
      "propertyNames": {"maxLength": 9}, "dependentRequired": {"x": ["y"]}, "unevaluatedProperties": False},
     {"x": {"x": 1, "y": 1}, "y": 2}),
    ({"if": {"properties": {"k": {"const": 1}}}, "then": {"required": ["v"]}, "else": {"minProperties": 1},
      "dependentSchemas": {"k": {"properties": {"v": {"multipleOf": 2}}}}}, {"k": 1, "v": 4}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SMALL)))
def test_whatever_is_multiplied_is_paid_for(number: int) -> None:
    schema, value = SMALL[number]
    for each in multiplied(schema, 300):
        assert_bounded(each, value)
    for each in multiplied(value, 300):
        assert_bounded(schema, each)


@pytest.fixture
def given_up() -> Iterator[int]:
    descriptor = os.eventfd(1)
    yield descriptor
    os.close(descriptor)


def test_a_caller_who_gave_up_ends_compiling_and_checking(given_up: int) -> None:
    schema, value = HOSTILE["a long enum"]
    validator = Validator(schema)
    token = CANCEL.set(given_up)
    try:
        assert validator.complaints(value) == (
            "checking the value against its schema was cancelled by the caller",
        )
        with pytest.raises(ToolInvalid, match="cancelled"):
            compile_schema({"const": "compiled by nobody else"})
    finally:
        CANCEL.reset(token)
    assert validator.complaints(value) == ()


def test_a_deadline_that_has_passed_ends_a_check() -> None:
    late = Budget("the check", float("inf"), seconds=-1.0)
    with pytest.raises(ToolInvalid, match="the check takes longer than -1 s"):
        Validator({"minimum": 1}, late)


def outcome(schema: Any, value: Any) -> str:
    try:
        return "; ".join(Validator(schema).complaints(value))
    except ToolInvalid as error:
        return str(error)


def test_work_without_end_costs_its_process_and_says_so() -> None:
    doubled: dict[str, Any] = {
        str(n): {"allOf": [{"$ref": f"#/$defs/{n - 1}"}] * 2} for n in range(1, 60)
    }
    endless = {"$defs": {"0": {"type": "integer"}, **doubled}, "$ref": "#/$defs/59"}
    assert "takes more than 2 s of CPU time" in outcome(endless, 1)
    wide = {"anyOf": [{"type": "integer"}] * 2000}
    assert "takes more than 256 MiB of memory" in outcome(wide, "x" * MIB)
    assert outcome({"minimum": 2}, 1) == "1 is less than the minimum of 2"


def test_only_so_many_bytes_of_schemas_are_remembered() -> None:
    from cellwright.harness.schemas.validation import _REMEMBERED_BYTES, _ValidatorCache

    validators = _ValidatorCache()
    for number in range(100):
        validators.get({"enum": [f"{number} {other} {'x' * 60}" for other in range(2500)]}, None)
    kept = sum(each.size_bytes for each in validators._known.values())
    assert 0 < kept == validators._size_bytes <= _REMEMBERED_BYTES
    assert sum(each[1].size_bytes for each in validators.seen.values()) <= _REMEMBERED_BYTES


# agreement with jsonschema

WORDS = st.sampled_from(["a", "b", "c"])
SCHEMAS = st.recursive(
    st.one_of(
        st.booleans(),
        st.fixed_dictionaries({}, optional={
            "type": st.sampled_from(["string", "integer", "number", "array", "object", "null", "boolean"]),
            "enum": st.lists(VALUES, min_size=1, max_size=3), "const": VALUES,
            "minimum": st.integers(-2, 2), "exclusiveMaximum": st.integers(-2, 2), "multipleOf": st.sampled_from([2, 0.5]),
            "minLength": st.integers(0, 2), "maxItems": st.integers(0, 2), "uniqueItems": st.booleans(),
            "minProperties": st.integers(0, 2), "required": st.lists(WORDS, unique=True, max_size=2),
            "pattern": st.sampled_from(["a", "^b$", "[a-b]"]),
        }),
    ),
    lambda inner: st.fixed_dictionaries({}, optional={
        "allOf": st.lists(inner, min_size=1, max_size=2), "anyOf": st.lists(inner, min_size=1, max_size=2),
        "oneOf": st.lists(inner, min_size=1, max_size=2), "not": inner, "if": inner, "then": inner, "else": inner,
        "properties": st.dictionaries(WORDS, inner, max_size=2), "additionalProperties": inner,
        "patternProperties": st.dictionaries(st.sampled_from(["a", "^b"]), inner, max_size=1),
        "propertyNames": inner, "dependentSchemas": st.dictionaries(WORDS, inner, max_size=1),
        "dependentRequired": st.dictionaries(WORDS, st.lists(WORDS, unique=True, max_size=2), max_size=1),
        "items": inner, "prefixItems": st.lists(inner, min_size=1, max_size=2), "contains": inner,
        "minContains": st.integers(0, 2), "maxContains": st.integers(0, 2),
        "unevaluatedItems": inner, "unevaluatedProperties": inner,
    }),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=300)
@given(SCHEMAS, VALUES)
def test_what_is_valid_is_what_jsonschema_says_is_valid(schema: Any, value: Any) -> None:
    schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
    valid = Draft202012Validator(schema).is_valid(value)
    assert (Validator(schema).complaints(value) == ()) == valid


OLD = [
    ({"minimum": 1, "exclusiveMinimum": True}, 2, 1),
    ({"maximum": 1, "exclusiveMaximum": True, "minimum": -5, "exclusiveMinimum": False}, -5, 1),
    ({"items": [{"type": "integer"}], "additionalItems": False}, [1], [1, 2]),
    ({"items": [{"type": "integer"}]}, [1, "x"], ["x"]),
]


@pytest.mark.parametrize("named", [{}, {"$schema": "http://json-schema.org/draft-04/schema#"}])
@pytest.mark.parametrize(("schema", "right", "wrong"), OLD)
def test_old_forms_are_understood_also_where_the_dialect_is_not_named(
    schema: dict[str, Any], right: Any, wrong: Any, named: dict[str, str]
) -> None:
    validator = compile_schema({"properties": {"x": schema}, **named})
    assert validator.complaints({"x": right}) == ()
    assert len(validator.complaints({"x": wrong})) == 1


def test_a_property_may_have_the_name_of_an_old_form() -> None:
    validator = compile_schema({"properties": {"exclusiveMinimum": {"type": "integer"}}})
    assert validator.complaints({"exclusiveMinimum": True}) != ()


def test_what_is_unevaluated_is_known_beside_patterns() -> None:
    schema = {"patternProperties": {"^a": {}}, "unevaluatedProperties": False}
    assert compile_schema(schema).complaints({"ab": 1}) == ()
    assert compile_schema(schema).complaints({"b": 1}) == (
        "Unevaluated properties are not allowed ('b' was unexpected)",
    )


def test_items_of_draft_7_are_counted_as_jsonschema_counts_them() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#",
              "dependencies": {"a": ["b"], "c": {"required": ["d"]}}, "contains": {"const": 1}}  # fmt: skip
    for value in ({"a": 1}, {"a": 1, "b": 1}, {"c": 1}, {"c": 1, "d": 1}, [], [1], [2]):
        assert (compile_schema(schema).complaints(value) == ()) == Draft7Validator(schema).is_valid(
            value
        )


def test_a_budget_says_what_ended() -> None:
    with pytest.raises(BudgetExceeded):
        Budget("the check", 1).spend(2)
