"""Every tool of public MCP servers, called by a program in a cell through the broker."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cellwright import Sandbox
from cellwright.harness.mcp.mcp_servers import McpServers
from cellwright.harness.tools.broker import Broker
from tests.conftest import policy_named, with_limits

from .conftest import processes_of
from .real import configured, make_repository, open_up

pytestmark = [pytest.mark.needs("mcp_servers", "cgroup"), pytest.mark.slow]

PROGRAM = """
from tools import ToolError, call_tool

def result_of(name, arguments):
    try:
        return call_tool(name, arguments)
    except ToolError as error:
        return f"{error.kind}: {error}"

[result_of(name, arguments) for name, arguments in calls]
"""
NODES = [{"name": "ann", "entityType": "person", "observations": ["sings"]},
         {"name": "bob", "entityType": "person", "observations": []}]  # fmt: skip
EDGE = {"from": "ann", "to": "bob", "relationType": "knows"}

# of each server every tool, in an order in which they make sense; what stands somewhere in the answer
CALLS: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "time": [
        ("get_current_time", {"timezone": "Europe/London"}, "Europe/London"),
        ("convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}, "+9.0h"),
    ],
    "sqlite": [
        ("create_table", {"query": "create table t (a integer)"}, "successfully"),
        ("write_query", {"query": "insert into t values (42)"}, "affected_rows"),
        ("read_query", {"query": "select a from t"}, "42"),
        ("list_tables", {}, "'t'"),
        ("describe_table", {"table_name": "t"}, "INTEGER"),
        ("append_insight", {"insight": "it is 42"}, "added"),
    ],
    "memory": [
        ("create_entities", {"entities": NODES}, "sings"),
        ("create_relations", {"relations": [EDGE]}, "knows"),
        ("add_observations", {"observations": [{"entityName": "bob", "contents": ["whistles"]}]}, "whistles"),
        ("read_graph", {}, "whistles"),
        ("search_nodes", {"query": "sings"}, "ann"),
        ("open_nodes", {"names": ["bob"]}, "whistles"),
        ("delete_observations", {"deletions": [{"entityName": "bob", "observations": ["whistles"]}]}, "success"),
        ("delete_relations", {"relations": [EDGE]}, "success"),
        ("delete_entities", {"entityNames": ["ann", "bob"]}, "success"),
    ],
    "git": [
        ("git_status", {"repo_path": "{0}/repository"}, "modified:   a.txt"),
        ("git_diff_unstaged", {"repo_path": "{0}/repository"}, "+two"),
        ("git_add", {"repo_path": "{0}/repository", "files": ["a.txt"]}, "staged"),
        ("git_diff_staged", {"repo_path": "{0}/repository"}, "+two"),
        ("git_reset", {"repo_path": "{0}/repository"}, "reset"),
        ("git_add", {"repo_path": "{0}/repository", "files": ["a.txt"]}, "staged"),
        ("git_commit", {"repo_path": "{0}/repository", "message": "second"}, "committed"),
        ("git_log", {"repo_path": "{0}/repository"}, "second"),
        ("git_create_branch", {"repo_path": "{0}/repository", "branch_name": "side"}, "side"),
        ("git_checkout", {"repo_path": "{0}/repository", "branch_name": "side"}, "Switched"),
        ("git_branch", {"repo_path": "{0}/repository", "branch_type": "local"}, "* side"),
        ("git_diff", {"repo_path": "{0}/repository", "target": "main"}, "Diff"),
        ("git_show", {"repo_path": "{0}/repository", "revision": "HEAD"}, "second"),
    ],
    "files": [
        ("write_file", {"path": "{0}/a.txt", "content": "one\ntwo\n"}, "Successfully"),
        ("read_file", {"path": "{0}/a.txt"}, "two"),
        ("read_text_file", {"path": "{0}/a.txt", "head": 1}, "one"),
        ("read_media_file", {"path": "{0}/a.png"}, "image/png"),
        ("read_multiple_files", {"paths": ["{0}/a.txt"]}, "two"),
        ("edit_file", {"path": "{0}/a.txt", "edits": [{"oldText": "two", "newText": "three"}]}, "+three"),
        ("create_directory", {"path": "{0}/new"}, "Successfully"),
        ("list_directory", {"path": "{0}"}, "[DIR] new"),
        ("list_directory_with_sizes", {"path": "{0}"}, "a.txt"),
        ("directory_tree", {"path": "{0}/new"}, "[]"),
        ("move_file", {"source": "{0}/a.txt", "destination": "{0}/new/b.txt"}, "Successfully"),
        ("search_files", {"path": "{0}", "pattern": "**/b.txt"}, "new/b.txt"),
        ("get_file_info", {"path": "{0}/new/b.txt"}, "isFile: true"),
        ("list_allowed_directories", {}, "{0}"),
        ("read_text_file", {"path": "/etc/passwd"}, "failed: "),
    ],
    "everything": [
        ("echo", {"message": "hello"}, "Echo: hello"),
        ("get-sum", {"a": 2, "b": 3}, "5"),
        ("get-structured-content", {"location": "Chicago"}, "temperature"),
        ("get-tiny-image", {}, "image/png"),
        ("get-annotated-message", {"messageType": "error", "includeImage": True}, "image"),
        ("get-resource-links", {"count": 2}, "resource_link"),
        ("get-resource-reference", {"resourceType": "Text", "resourceId": 1}, "resource"),
        ("get-env", {}, "PATH"),
        ("gzip-file-as-resource", {"name": "x", "data": "data:text/plain;base64,aGk=", "outputType": "resource"}, "gzip"),
        ("trigger-long-running-operation", {"duration": 0.2, "steps": 2}, "completed"),
        ("toggle-simulated-logging", {}, "Started"),
        ("toggle-simulated-logging", {}, "Stopped"),
        ("toggle-subscriber-updates", {}, "Started"),
        ("toggle-subscriber-updates", {}, "Stopped"),
        ("trigger-elicitation-request", {}, "declined"),
        ("trigger-url-elicitation", {"url": "https://example.org/"}, ""),
        ("simulate-research-query", {"topic": "cells"}, ""),
    ],
}  # fmt: skip


@contextmanager
def offered(folder: Path, *names: str, **options: Any) -> Iterator[tuple[McpServers, Sandbox]]:
    """Give servers, and a sandbox whose programs may call them."""
    given = configured(folder, *names, sandboxed=options.pop("sandboxed", True))
    with McpServers(given, pins=folder.parent / "pins.json", **options) as servers:
        broker = Broker(servers, approve=lambda asked: True)
        with Sandbox(
            policy=with_limits(policy_named("strict"), wall_seconds=60.0), pool=0, tools=broker
        ) as sandbox:
            yield servers, sandbox


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with what the servers work on; in the end none of them is left."""
    folder = tmp_path / "data"
    folder.mkdir()
    make_repository(folder / "repository")
    (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    open_up(folder)
    yield folder
    assert processes_of(folder) == []


@pytest.mark.parametrize("sandboxed", [True, False], ids=["in a cell", "on the host"])
@pytest.mark.parametrize("server", CALLS)
def test_every_tool_is_called_from_a_cell(folder: Path, server: str, sandboxed: bool) -> None:
    def filled(text: str) -> str:
        return text.replace("{0}", str(folder))

    expected = [(f"{server}.{name}", filled(words)) for name, _, words in CALLS[server]]
    arguments = [json.loads(filled(json.dumps(each))) for _, each, _ in CALLS[server]]
    names = [name for name, _ in expected]
    with offered(folder, server, sandboxed=sandboxed) as (servers, sandbox):
        calls = list(zip(names, arguments, strict=True))
        result = sandbox.execute(PROGRAM, inputs={"calls": calls}, timeout=60)
        assert result.ok, result.error
        assert isinstance(result.value, list)
        for (name, words), value in zip(expected, result.value, strict=True):
            assert words in (value if isinstance(value, str) else json.dumps(value)), (name, value)
        assert {spec.name for spec in servers.specs()} == set(names)
        assert servers.status()[0].dropped == ()


def test_a_program_joins_what_two_servers_have_and_only_the_result_leaves(folder: Path) -> None:
    """As an agent would: sales in a database, names in a file; neither passes before its eyes."""
    sales = ", ".join(f"({number % 7}, {number})" for number in range(500))
    people = "\n".join(f"{number},person{number}" for number in range(7))
    (folder / "people.csv").write_text(people)
    setup = """
import tools
tools.sqlite.create_table("create table sales (person integer, amount integer)")
tools.sqlite.write_query(f"insert into sales values {sales}")
"""
    program = """
import ast, csv
from tools import files, sqlite
rows = ast.literal_eval(sqlite.read_query("select person, amount from sales"))
text = files.read_text_file(path=f"{folder}/people.csv")["content"]
names = {int(number): name for number, name in csv.reader(text.splitlines())}
totals = {}
for row in rows:
    totals[names[row["person"]]] = totals.get(names[row["person"]], 0) + row["amount"]
files.write_file(path=f"{folder}/best.txt", content=max(totals, key=totals.get))
max(totals.items(), key=lambda item: item[1])
"""
    with offered(folder, "sqlite", "files") as (servers, sandbox):
        for source in (setup, program):
            result = sandbox.execute(source, inputs={"sales": sales, "folder": str(folder)})
            assert result.ok, result.traceback
        assert result.value == ["person2", 18036]
        assert len(str(result.value)) + len(result.stdout) < 50
        assert (folder / "best.txt").read_text() == "person2"
        assert sorted(status.state for status in servers.status()) == ["ready", "ready"]
