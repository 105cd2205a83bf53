"""The definitions that a model sees first: short, always the same, and true."""

import json
import subprocess
import sys

import jsonschema
import msgspec
import pytest

from cellwright.harness.servers.mcp.catalogue_tools import schema_of
from cellwright.harness.servers.mcp.mcp_server import TOOLS
from cellwright.harness.servers.mcp.served_tools import SERVED_TOOLS, served_tools
from tests.conftest import ROOT

NAMES = [
    "search_tools", "describe_tools", "run_code", "call_tool", "create_tool", "sessions",
    "list_files", "download_file", "upload_file",
]  # fmt: skip


def wire(open_world: bool = False) -> list[dict[str, object]]:
    tools = served_tools(open_world=open_world)
    return [json.loads(tool.model_dump_json(by_alias=True, exclude_none=True)) for tool in tools]


def test_the_tools_are_these_in_this_order() -> None:
    assert [tool["name"] for tool in wire()] == NAMES
    assert wire() == wire()


def test_what_finds_and_runs_is_small() -> None:
    """500 tokens of o200k_base on the day that this was written; a byte more has to be weighed."""
    sizes = [len(json.dumps(tool, separators=(",", ":"))) for tool in wire()]
    assert sum(sizes[:3]) <= 2450
    assert sum(sizes) <= 5800
    assert len(TOOLS) <= 650


@pytest.mark.parametrize("definition", SERVED_TOOLS, ids=lambda each: each.name)
def test_schemas_are_schemas_and_name_every_field(definition: object) -> None:
    for kind in (definition.takes, definition.gives):  # type: ignore[attr-defined]
        schema = schema_of(kind)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert "$ref" not in json.dumps(schema)
        fields = msgspec.structs.fields(kind)
        assert list(schema["properties"]) == [field.encode_name for field in fields]
        required = [field.encode_name for field in fields if field.required]
        assert schema.get("required", []) == required


def test_annotations_say_what_may_happen() -> None:
    said = {str(tool["name"]): tool["annotations"] for tool in wire()}
    looks = {name for name, each in said.items() if each["readOnlyHint"]}  # type: ignore[index]
    assert looks == {"search_tools", "describe_tools", "list_files", "download_file"}
    destroys = {
        name for name, each in said.items() if each.get("destructiveHint")  # type: ignore[attr-defined]
    }  # fmt: skip
    assert destroys == {"run_code", "call_tool", "sessions", "upload_file"}
    assert not any(each["openWorldHint"] for each in said.values())  # type: ignore[index]


def test_only_what_calls_tools_reaches_the_servers_of_others() -> None:
    reaches = {tool["name"] for tool in wire(True) if tool["annotations"]["openWorldHint"]}  # type: ignore[index]
    assert reaches == {"run_code", "call_tool"}


@pytest.mark.parametrize(
    "code",
    [
        "import cellwright",
        "from cellwright import Sandbox, ToolFactory, Broker, Runs",
        "from cellwright.harness.cli.commands import parser_of; parser_of('run'); parser_of('serve'); parser_of('tools')",
    ],
)
def test_nothing_else_imports_the_sdk(code: str) -> None:
    heavy = "{'mcp', 'anyio', 'pydantic', 'starlette', 'uvicorn'}"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print({heavy} & sys.modules.keys())"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "set()\n"


def test_the_arguments_of_the_command_are_known_without_the_sdk() -> None:
    code = (
        "import sys; from cellwright.harness.cli.commands import parser_of; parser_of('mcp'); "
        "print('mcp' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
