"""Schemas that are anything, and texts that would like to be code."""

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellwright.harness.schemas.spec import ToolSpec
from cellwright.harness.stubs.stub_tree import python_tree, typescript_tree
from cellwright.harness.stubs.stub_types import Property, Record
from cellwright.harness.text.hidden import first_hidden
from tests.harness.stubs.checking import mypy, tsc
from tests.harness.stubs.kinds import complaints

HOSTILE = [
    '"""', "'''", '\\"""', "\\", "x\\", '"; import os; os.system("id"); "', "'''\nimport os\n'''",
    "*/ process.exit(1) /*", "*/", "/*", "\u2028alert(1)", "${process.exit(1)}", "`", "{{userName}}",
    "$eq", "If-Match", "from", "class", "None", "__proto__", "constructor", "__class__", "__debug__",
    "__x", "self", "UNSET", "call_tool", "given", "more", "answer", "list", "dict", "str", "Any", "TypedDict",
    "Arguments", "Array", "a.b", "a b", "1st", "", " ", "\n", "\r\nimport os", "\x00", "\ud800", "\u202eevil",
    "a\u200bb", "\U000e0041", "\u00e9", "e\u0301", "\ufb01", "名前", "x" * 500, "%s", "{0}", "#", "# type: ignore",
    "eval('1')", "Item", "Item2", "tools", "annotations", "\\N{BULLET}", "\\x41", "\\u0041", "f'{1}'",
]  # fmt: skip

texts = st.sampled_from(HOSTILE) | st.text(max_size=20)
values = st.none() | st.booleans() | st.integers() | st.floats() | texts
json_like = st.recursive(
    values, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(texts, inside, max_size=3)
)
_KINDS = ("object", "array", "string", "integer", "number", "boolean", "null")


def _schemas(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.lists(inside, max_size=3)
    named = st.dictionaries(texts, inside, max_size=4)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(_KINDS) | st.lists(st.sampled_from(_KINDS), max_size=3) | json_like,
            "properties": named, "required": st.lists(texts, max_size=3) | json_like,
            "items": inside | many, "prefixItems": many, "additionalProperties": inside,
            "patternProperties": named, "anyOf": many, "oneOf": many, "allOf": many, "$defs": named,
            "definitions": named, "enum": st.lists(json_like, max_size=4), "const": json_like,
            "default": json_like, "description": texts | json_like, "nullable": st.booleans(),
            "$ref": st.sampled_from(["#", "#/$defs/a", "#/properties/x", "#/$defs/", "http://x"]) | texts,
        },
    )  # fmt: skip


schemas = st.recursive(st.booleans() | json_like, _schemas, max_leaves=12)
names = st.lists(texts, min_size=1, max_size=3).map(".".join)


def tool(name: str, **about: Any) -> ToolSpec:
    return ToolSpec(name=name, **about)


@settings(max_examples=80)
@given(names, texts, schemas, schemas)
def test_any_schema_makes_stubs_that_compile_and_hold_nothing_else(
    name: str, description: str, parameters: Any, output: Any
) -> None:
    spec = tool(name, description=description, parameters=parameters, output_schema=output)
    for path, text in python_tree([spec]).items():
        compile(text.encode(), path, "exec")
        assert path.endswith("pyi") or complaints(text) == []
        assert all(each.isidentifier() for each in path.partition(".")[0].split("/"))
    for text in typescript_tree([spec]).values():
        text.encode()


@settings(max_examples=60)
@given(st.dictionaries(texts, st.just({}), max_size=12))
def test_whatever_parameters_are_called_each_keeps_its_wire_name(
    properties: dict[str, Any],
) -> None:
    spec = tool("t", parameters={"properties": properties})
    (function,) = (
        node for node in ast.walk(ast.parse(python_tree([spec])["t.py"]))
        if isinstance(node, ast.FunctionDef)
    )  # fmt: skip
    (sent,) = (node for node in ast.walk(function) if isinstance(node, ast.Dict))
    wire = [key.value for key in sent.keys if isinstance(key, ast.Constant)]
    said = [value.id for value in sent.values if isinstance(value, ast.Name)]
    assert wire == [name for name in properties if len(name) <= 200]
    assert said == [each.arg for each in function.args.args]
    assert len(set(said)) == len(said)


def everywhere(text: str) -> ToolSpec:
    """Return a tool that has `text` wherever a schema has one."""
    inner = {
        "type": "object", "description": text, "title": text, "required": [text],
        "properties": {text: {"type": "string", "enum": [text, "b"], "default": text}, "b": {"const": text}},
    }  # fmt: skip
    schema = {
        "type": "object", "description": text, "$defs": {text: inner, "list": {"type": "string"}},
        "properties": {
            text: {"type": "array", "items": inner, "description": text}, "x": {"$ref": f"#/$defs/{text}"},
            "y": {"anyOf": [{"const": text}, {"$ref": "#/$defs/list"}], "default": [text]},
        },
        "required": ["x"],
    }  # fmt: skip
    return tool(f"server.{text}", description=text, parameters=schema, output_schema=inner)


@pytest.mark.slow
def test_mypy_accepts_hostile_texts_everywhere(tmp_path: Path) -> None:
    files = python_tree([everywhere(text) for text in HOSTILE])
    assert len([path for path in files if "__init__" not in path]) >= len(HOSTILE)
    assert mypy(files, tmp_path) == ""


@pytest.mark.slow
@pytest.mark.needs("tsc")
def test_tsc_accepts_hostile_texts_everywhere(tmp_path: Path) -> None:
    assert tsc(typescript_tree([everywhere(text) for text in HOSTILE]), tmp_path) == ""


def test_hidden_characters_do_not_come_out() -> None:
    specs = [everywhere(text) for text in HOSTILE]
    for files in (python_tree(specs), typescript_tree(specs)):
        for text in files.values():
            assert not set(text) & set("\u202e\u200b\u2028\x00\r\U000e0041\ud800")


def test_what_is_huge_or_deep_is_cut() -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"type": "object", "properties": {"x": deep, "y": {"type": "array"}}}
    wide = {
        "properties": {
            f"p{n}": {"properties": {f"q{m}": {} for m in range(50)}} for n in range(400)
        }
    }
    chain = {f"d{n}": {"properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(2000)}
    linked = {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": chain}
    bomb = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 20} for n in range(20)}
    merged = {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": bomb}
    for schema in (deep, wide, linked, merged, {"enum": ["x" * 1000] * 1000}):
        text = python_tree([tool("t", parameters=schema, output_schema=schema)])["t.py"]
        assert len(text) < 500_000
        assert complaints(text) == []


def test_fields_and_records_say_what_they_are() -> None:
    """The properties above would hold of a reader that understood nothing."""
    from cellwright.harness.stubs.stub_tree import described

    known = described(everywhere("from"))
    assert [field.wire for field in known.parameters] == ["from", "x", "y"]
    assert all(isinstance(each, Property) for each in known.parameters)
    assert any(isinstance(each, Record) for each in known.definitions.values())


def test_no_stub_has_hidden_characters() -> None:
    """In values and names of a schema too, which are left as they are: repr(3) writes some of them."""
    hidden = "x\ufe00\u3164\U000e0153\U000e0041\u200b"
    properties = {"kind": {"enum": [hidden, "b"], "default": hidden}, hidden: {"const": hidden}}
    schema = {"type": "object", "properties": properties, "description": hidden}
    spec = tool("server.tool", description=hidden, parameters=schema, output_schema=schema)
    for tree in (python_tree([spec]), typescript_tree([spec])):
        for text in tree.values():
            assert not first_hidden(text)
    assert any("\\ufe00" in text for text in python_tree([spec]).values())
