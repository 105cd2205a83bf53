"""Definitions of tools: bounded, cleaned, left out one by one, and pinned."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cellwright.harness.mcp import definitions as pinning
from cellwright.harness.mcp.definitions import (
    Definition,
    Pins,
    definition_of,
    difference,
    drift_of,
    spec_of,
)
from cellwright.harness.mcp.server_config import ServerConfig
from cellwright.harness.schemas.bounds import texts_in
from cellwright.harness.search.documents import document_of
from cellwright.harness.text.hidden import first_hidden
from cellwright.policies.errors import RegistryError, ToolInvalid
from tests.conftest import SHARED

from .conftest import Serve, tool

CONFIG = ServerConfig(name="s", command="a")


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"properties": {"a": value}}
    return value


BAD: list[tuple[Any, str]] = [
    (7, "not an object"),
    ({"inputSchema": {}}, "name: must be text"),
    (tool(""), "name: must be text"),
    (tool("x" * 129), "name: must be text"),
    (tool("a\u200bb"), "hidden character"),
    ({"name": "a"}, "inputSchema: schema: must be an object"),
    (tool("a", inputSchema={"type": "string"}), "its type must be object"),
    (tool("a", inputSchema=nested(60)), "deep"),
    (tool("a", inputSchema={"properties": {"x": {"$ref": "https://a.org/x"}}}), "leads outside"),
    (tool("a", inputSchema={"properties": {"x\u202e": {}}}), "hidden character"),
    (
        tool(
            "a",
            inputSchema={
                "$defs": {"x": {"properties": {"y": {"properties": {"a\U000e0041": {}}}}}}
            },
        ),
        "hidden character",
    ),
    (tool("a", inputSchema={"properties": {"x": {"enum": ["a", "a\ufe00"]}}}), "hidden character"),
    (
        tool("a", inputSchema={"properties": {"x": {"anyOf": [{"const": ["\u3164"]}]}}}),
        "hidden character",
    ),
    (tool("a", inputSchema={"properties": {"x": {"pattern": "\u2066"}}}), "hidden character"),
    (tool("a", inputSchema={"x-help": {"en": "Obey.\u200b"}}), "hidden character"),
    (tool("a", outputSchema={"properties": {"x": {"enum": ["\U000e0153"]}}}), "hidden character"),
    (tool("a", inputSchema={"description": "x" * 300_000}), "at most 262144"),
    (tool("a", description="x" * 1_000_000), "more than 655360"),
    (tool("a", description=7), "description: must be text"),
    (tool("a", annotations=[]), "annotations: must be an object"),
    (tool("a", outputSchema={"$ref": "#/nothing"}), "outputSchema: .*leads to nothing"),
]


@pytest.mark.parametrize(("said", "why"), BAD)
def test_what_cannot_be_a_tool_is_refused_with_the_reason(said: Any, why: str) -> None:
    with pytest.raises(ToolInvalid, match=why):
        definition_of(said)


def test_bad_tools_are_left_out_and_the_good_ones_stay(serve: Serve) -> None:
    no_schema = tool("late", inputSchema={"properties": {"x": {"type": "nothing"}}})
    fake = serve("echo", *(said for said, _ in BAD), no_schema, tool("echo", description="again"))
    assert [spec.name for spec in fake.servers.list_tools("fake")] == ["fake.echo"]
    dropped = fake.servers.status()[0].dropped
    assert len(dropped) == len(BAD) + 2
    assert any("duplicate name" in each for each in dropped)
    assert fake.call("echo") == "{}"
    fake.servers.check("fake")
    assert [spec.name for spec in fake.servers.specs()] == ["fake.echo"]


def test_invisible_characters_are_removed_from_descriptions() -> None:
    words = "Adds.\u200b<!-- tell nobody -->\u202e \U000e0041Well<!-- open"
    schema = {
        "type": "object",
        "properties": {
            "description": {"type": "string", "description": words, "default": words},
            "x": {"anyOf": [{"title": words, "const": "👍️ a b", "examples": [words, "b"]}]},
        },
        "required": ["x"],
    }
    spec = spec_of(definition_of(tool("a", description=words, inputSchema=schema)), "s.a", CONFIG)
    assert spec.description == "Adds. Well"
    inside = spec.parameters["properties"]
    assert inside["description"]["description"] == "Adds. Well"
    assert "default" not in inside["description"]
    assert inside["x"]["anyOf"] == [{"title": "Adds. Well", "const": "👍️ a b"}]
    assert not [text for text in texts_in(msgspec.to_builtins(spec)) if first_hidden(text)]
    assert spec.parameters["required"] == ["x"]


@pytest.mark.parametrize(
    ("hints", "said", "risky"),
    [
        ({}, {}, False),
        ({"destructiveHint": True}, {}, True),
        ({"destructiveHint": True}, {"trusted": True}, False),
        ({"destructiveHint": True}, {"approved": ("do_*",)}, False),
        ({"readOnlyHint": True}, {"risky": ("do_it",)}, True),
        ({"readOnlyHint": True}, {"risky": ("do_it",), "trusted": True, "approved": ("*",)}, True),
        ({"readOnlyHint": True, "destructiveHint": True}, {}, True),
        ({"destructiveHint": "yes"}, {}, False),
    ],
)
def test_hints_may_add_a_gate_and_lift_none(hints: Any, said: Any, risky: bool) -> None:
    config = ServerConfig(name="s", command="a", **said)
    definition = definition_of(tool("do_it", annotations=hints))
    assert spec_of(definition, "s.do_it", config).risky is risky


def test_a_hash_is_of_all_that_counts_and_of_nothing_else() -> None:
    plain = definition_of(tool("a"))
    assert definition_of(tool("a", _meta={"x": 1}, icons=[])).digest == plain.digest
    assert definition_of(dict(reversed(tool("a").items()))).digest == plain.digest
    for changed in (
        {"description": "Does a. "}, {"title": "A"}, {"inputSchema": {"type": "object", "title": "x"}},
        {"outputSchema": {}}, {"annotations": {"readOnlyHint": True}}, {"name": "b"},
    ):  # fmt: skip
        assert definition_of(tool("a") | changed).digest != plain.digest


@pytest.mark.needs("shared")
def test_every_definition_of_real_servers_can_be_a_tool() -> None:
    count = 0
    for path in sorted((SHARED / "data" / "mcp-catalogue").glob("*.json")):
        for said in json.loads(path.read_text())["tools"]:
            spec = spec_of(definition_of(said), "s.x", CONFIG)
            assert document_of(spec.name, "x", spec.description, spec.parameters, server="s")
            count += 1
    assert count > 300


# pins


def pinned(*said: dict[str, Any]) -> dict[str, Definition]:
    return {each.wire: each for each in map(definition_of, said)}


def test_pins_are_of_one_server_at_one_place(tmp_path: Path) -> None:
    pins = Pins(tmp_path / "deep" / "pins.json")
    assert pins.of(CONFIG) is None
    pins.pin(CONFIG, pinned(tool("a")).values())
    assert pins.of(CONFIG) == pinned(tool("a"))
    assert Pins(pins.path).of(CONFIG) == pinned(tool("a"))
    assert pins.of(ServerConfig(name="s", command="b")) is None
    assert pins.of(ServerConfig(name="t", command="a")) is None
    assert pins.path.stat().st_mode & 0o077 == 0


def test_a_pinned_tool_that_can_be_none_any_more_is_left_out(tmp_path: Path) -> None:
    pins = Pins(tmp_path / "pins.json")
    pins.pin(CONFIG, pinned(tool("a"), tool("b")).values())
    pins.path.write_text(pins.path.read_text().replace('"name": "b"', '"name": "\\u200b"'))
    assert pins.of(CONFIG) == pinned(tool("a"))


@pytest.mark.parametrize("content", [b"{", b"{}x", b'{"servers": 1}', b'{"more": 1}', b"\xff"])
def test_pins_that_cannot_be_read_stop_everything(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pins.json"
    path.write_bytes(content)
    with pytest.raises(RegistryError, match="is not a valid file of pins"):
        Pins(path).of(CONFIG)
    with pytest.raises(RegistryError):
        Pins(path).pin(CONFIG, [])
    assert path.read_bytes() == content


def test_a_server_that_says_too_much_is_not_pinned_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pins.json"
    small, large = ServerConfig(name="a", command="a"), ServerConfig(name="b", command="b")
    Pins(path).pin(small, [definition_of(tool("good"))])
    for bound in ("_MAX_OF_ONE", "_MAX_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(pinning, bound, 1000)
            told = tool("good", description="x" * 1000)
            with pytest.raises(RegistryError, match="tools of b: .* more than 1000"):
                Pins(path).pin(large, [definition_of(told)])
            assert Pins(path).of(small)
    assert Pins(path).of(large) is None


def test_a_difference_shows_what_hides() -> None:
    old, new = (
        pinned(tool("a"), tool("b")),
        pinned(tool("a", description="\u200b\x1b[2J"), tool("c")),
    )
    assert drift_of(old, new) == (("c",), ("a",), ("b",))
    told = difference(old, new)
    assert told.isascii()
    assert "\x1b" not in told
    assert '+  "description": "\\u200b\\u001b[2J"' in told
    assert "--- pinned/b\n+++ now/b" in told
    assert len(difference({}, pinned(*(tool(f"t{n}") for n in range(500)))).splitlines()) == 401
