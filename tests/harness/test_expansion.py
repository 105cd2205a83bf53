"""Definitions of MCP servers, stubs made of them, and sources of made tools: whatever is multiplied in
them, the host's work and memory grow with their size and no faster."""

import contextlib
import json
from typing import Any

import pytest

from cellwright.harness.mcp.definitions import check, definition_of, spec_of
from cellwright.harness.mcp.server_config import ServerConfig
from cellwright.harness.schemas.functions import describe_source
from cellwright.harness.schemas.spec import ToolSpec
from cellwright.harness.stubs.stub_tree import python_tree, typescript_tree
from cellwright.policies.errors import BudgetExceeded, ToolInvalid
from cellwright.policies.policy import MIB
from cellwright.runner.concurrency import Budget
from tests.work import cost_of, multiplied

_TIMES, _MORE_TIMES = 50, 200
_STEPS = 30_000  # steps of a budget, if there is one; few, because counting lines is slow
_LINES, _LINES_PER_STEP, _LINES_PER_BYTE = 200_000, 32, 60
_MEMORY_BYTES, _MEMORY_PER_BYTE = 16 * MIB, 300

DEFINITION = {
    "name": "send",
    "title": "Send",
    "description": "Send a letter.",
    "inputSchema": {
        "type": "object",
        "properties": {
            "to": {"type": ["string", "null"], "enum": ["ann", "bob"], "description": "whom"},
            "parts": {
                "type": "array",
                "items": {"anyOf": [{"$ref": "#/$defs/part"}, {"const": 1}]},
            },
        },
        "required": ["to"],
        "$defs": {"part": {"allOf": [{"properties": {"a": {"items": {"$ref": "#/$defs/part"}}}}]}},
    },
    "outputSchema": {"type": "object", "properties": {"id": {"type": "integer"}}},
    "annotations": {"readOnlyHint": True, "title": "x"},
}
SERVER = ServerConfig(name="mail", command="a")


def test_a_definition_of_a_server_costs_as_its_size_whatever_is_multiplied() -> None:
    for said in multiplied(DEFINITION, _TIMES):

        def read(said: Any = said) -> None:
            with contextlib.suppress(ToolInvalid, BudgetExceeded):
                definition = definition_of(said)
                check(definition, Budget("checking", _STEPS))
                spec_of(definition, "mail.send", SERVER)

        assert_bounded(read, len(json.dumps(said)), _STEPS)


@pytest.mark.parametrize("tree", [python_tree, typescript_tree])
def test_stubs_cost_as_the_size_of_their_schema_whatever_is_multiplied(tree: Any) -> None:
    for schema in multiplied(DEFINITION["inputSchema"], _MORE_TIMES):
        spec = ToolSpec(name="mail.send", parameters=schema, output_schema=schema)

        def write(spec: ToolSpec = spec) -> Any:
            return tree([spec])

        size = len(json.dumps(schema))
        written = assert_bounded(write, size)
        assert sum(map(len, written.values())) <= 100_000 + 40 * size


@pytest.mark.parametrize("tree", [python_tree, typescript_tree])
def test_trees_of_stubs_cost_as_the_number_of_tools(tree: Any) -> None:
    specs = [
        ToolSpec(name=f"server{n % 7}.tool{n}", parameters=DEFINITION["inputSchema"])  # type: ignore[arg-type]
        for n in range(_TIMES)
    ]
    one = cost_of(lambda: tree(specs[:1])).lines
    assert cost_of(lambda: tree(specs)).lines <= 2 * _TIMES * one


SOURCE_PARTS = [
    "def send(to: str, parts: list[str | None] = [], *, kind: Literal['a', 'b'] = 'a') -> dict[str, int]:\n",
    '    """Send a letter.\n\n',
    "    Args:\n",
    "        to: whom\n        parts (list): what\n",
    "    Returns:\n        :param x: y\n    ----\n",
    '    """\n',
    "    return {}\n",
]


@pytest.mark.parametrize("number", range(len(SOURCE_PARTS)))
def test_a_source_costs_as_its_size_whatever_is_multiplied(number: int) -> None:
    parts = list(SOURCE_PARTS)
    for piece in (*_pieces(parts[number]), parts[number]):
        parts[number] = SOURCE_PARTS[number].replace(piece, piece * _TIMES, 1)
        source = "".join(parts)

        def read(source: str = source) -> None:
            with contextlib.suppress(ToolInvalid):
                describe_source(source, "send")

        assert_bounded(read, len(source))


def _pieces(text: str) -> list[str]:
    """Return what is multiplied in a part: each word, with what separates it."""
    return [word + " " for word in text.split(" ") if word.strip()]


def assert_bounded(work: Any, size: int, steps: int = 0) -> Any:
    most = _LINES + _LINES_PER_BYTE * size + _LINES_PER_STEP * steps
    cost = cost_of(work, most)
    assert cost.memory_bytes <= _MEMORY_BYTES + _MEMORY_PER_BYTE * size
    return cost.result
