"""Tools of MCP servers: results of calls, permissions, and search."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from mcp.types import CallToolResult, TextContent

from cellwright import Sandbox, ToolFactory, ToolRegistry
from cellwright.harness.mcp.managed_server import Elicitation
from cellwright.harness.mcp.mcp_servers import McpServers
from cellwright.harness.mcp.server_config import ServerConfig
from cellwright.harness.mcp.server_processes import policy_of
from cellwright.harness.mcp.tool_index import value_of
from cellwright.harness.mcp.transports import Transport
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec, key_of
from cellwright.harness.tools.broker import Broker
from cellwright.harness.tools.tool_search import ToolSearch
from cellwright.policies.compiling.environment import _runtimes
from cellwright.policies.errors import (
    ApprovalRequired,
    ClosedError,
    PolicyError,
    ToolArgumentsInvalid,
    ToolDenied,
    ToolExists,
    ToolFailed,
    ToolNotFound,
    ToolResultInvalid,
)
from cellwright.policies.profiles.loading import load_policy
from cellwright.policies.tool_rules import ToolRule, Tools
from cellwright.runner.audit.log import AuditLog
from tests.conftest import ROOT, policy_named

from .conftest import ANYTHING, Fake, Serve, tool

RISKY = tool("echo", annotations={"destructiveHint": True})


def test_text_stays_text_and_several_blocks_are_a_list(serve: Serve) -> None:
    fake = serve("echo", "blocks")
    assert fake.call("echo", a=[1]) == '{"a": [1]}'
    assert fake.call("blocks") == [
        "one",
        {"type": "image", "mime_type": "image/png", "data": "aGk="},
        {"type": "resource", "uri": "file:///a", "mime_type": "text/plain", "text": "inside"},
        {"type": "resource_link", "uri": "file:///b", "name": "b"},
    ]


WRAPPED = {
    "type": "object", "x-fastmcp-wrap-result": True, "required": ["result"],
    "properties": {"result": {"type": "array", "items": {"$ref": "#/$defs/Row"}}},
    "$defs": {"Row": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}  # fmt: skip


def test_a_result_that_fastmcp_wrapped_is_unwrapped(serve: Serve) -> None:
    fake = serve(tool("structured", outputSchema=WRAPPED))
    assert fake.call("structured", value={"result": [{"n": 1}]}) == [{"n": 1}]
    schema = fake.servers.get("fake.structured").spec.output_schema
    assert schema
    assert schema["type"] == "array"
    with pytest.raises(ToolResultInvalid, match='not of type "integer"'):
        fake.call("structured", value={"result": [{"n": "x"}]})
    with pytest.raises(ToolResultInvalid):
        fake.call("structured", value={"other": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {**WRAPPED, "x-fastmcp-wrap-result": False},
        {**WRAPPED, "properties": {**WRAPPED["properties"], "more": {}}},  # type: ignore[dict-item]
        {**WRAPPED, "properties": {"result": {"anyOf": [{"$ref": "#/properties/result/not"}, {}], "not": False}}},
    ],
)  # fmt: skip
def test_a_result_that_is_not_surely_wrapped_is_left_as_it_is(serve: Serve, schema: Any) -> None:
    value = {"result": [{"n": 1}]}
    assert serve(tool("structured", outputSchema=schema)).call("structured", value=value) == value


def test_a_call_takes_every_gate_of_the_broker(serve: Serve) -> None:
    schema = {"properties": {"to": {"type": "string"}}, "additionalProperties": False}
    fake = serve(tool("echo", inputSchema={"type": "object", **schema}), "env")
    rules = Tools(
        rules=(ToolRule("fake.e*", "allow", {"to": "a*"}), ToolRule("fake.env", "approve"))
    )
    asked: list[str] = []
    audit = AuditLog()
    broker = Broker(
        fake.servers, rules=rules, audit=audit, approve=lambda call: bool(asked.append(call.tool))
    )
    assert broker.call("fake.echo", {"to": "ann"}) == '{"to": "ann"}'
    with pytest.raises(ToolArgumentsInvalid):
        broker.call("fake.echo", {"to": 1})
    with pytest.raises(ToolDenied, match="no rule allows it"):
        broker.call("fake.echo", {"to": "bob"})
    with pytest.raises(ApprovalRequired):
        broker.call("fake.env", {})
    assert asked == ["fake.env"]
    actions = [entry.action for entry in audit.get_entries()]
    assert actions == ["call", "returned", "refused", "refused", "refused"]


def test_what_may_destroy_has_to_be_approved(serve: Serve) -> None:
    fake = serve(RISKY)
    with pytest.raises(ApprovalRequired, match="no approver is set"):
        fake.call("echo")
    assert Broker(fake.servers, approve=lambda asked: True).call("fake.echo", {}) == "{}"


@pytest.mark.needs("cgroup")
def test_a_program_calls_a_tool_and_is_told_why_not(serve: Serve) -> None:
    fake = serve("echo", RISKY | {"name": "drop-all"}, "fail")
    program = """
import tools
from tools import fake
said = [fake.echo(a=1)]
for name in ("fake.drop-all", "fake.fail", "fake.none"):
    try:
        tools.call_tool(name, {})
    except tools.ToolError as error:
        said.append(error.kind)
said
"""
    with Sandbox(policy=policy_named("strict"), pool=0, tools=fake.broker) as sandbox:
        result = sandbox.execute(program)
    assert result.value == ['{"a": 1}', "not_approved", "failed", "not_found"], result.error


def test_a_server_gets_its_own_variables_and_none_of_ours(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of ours names the cgroup that cells of `cellwright mcp` need, too."""
    monkeypatch.setenv("SECRET_OF_MINE", "1")
    monkeypatch.setenv("CELLWRIGHT_CGROUP_ROOT", "/sys/fs/cgroup/mine")
    fake = serve("env", env={"ITS_OWN": "2"})
    seen = json.loads(fake.call("env"))
    assert (seen["ITS_OWN"], seen["CELLWRIGHT_CGROUP_ROOT"]) == ("2", "/sys/fs/cgroup/mine")
    assert seen.keys() - {"ITS_OWN", "LC_CTYPE"} <= {
        "CELLWRIGHT_CGROUP_ROOT", "HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "USER",
    }  # fmt: skip


@pytest.mark.needs("cgroup")
def test_a_server_in_a_cell_sees_what_it_is_shown(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on the host sees the host."""
    monkeypatch.setenv("SECRET_OF_MINE", "1")
    host = serve("where", "env")
    assert json.loads(host.call("where"))[2] is True
    cell = in_a_cell(serve, "where", "env", "die")
    pid, where, sees_shadow = json.loads(cell.call("where"))
    assert (pid < 100, where, sees_shadow) == (True, "/workspace", False)
    variables = json.loads(cell.call("env"))
    told = {each["name"] for each in _runtimes()}  # for runtimes: the size of the cell
    assert variables.keys() - {"LC_CTYPE"} - told == {"PATH", "HOME", "LANG", "TMPDIR", "TZ"}
    assert cell.servers.status()[0].sandboxed
    with pytest.raises(ToolFailed, match="after 'Traceback [|] it is broken'"):
        cell.call("die")
    assert json.loads(cell.call("where"))[1] == "/workspace"
    assert cell.starts == 2


@pytest.mark.needs("cgroup")
@pytest.mark.parametrize(
    ("mode", "connect_timeout"), [("silent", 3), ("endless_line_first", 20), ("exit", 20)]
)
def test_a_server_in_a_cell_that_fails_is_ended_with_it(
    serve: Serve, mode: str, connect_timeout: float
) -> None:
    cell = in_a_cell(serve, mode=mode, connect_timeout=connect_timeout)
    with pytest.raises(ToolFailed, match="cannot be used"):
        cell.call("echo")


def in_a_cell(serve: Serve, *tools: Any, **said: Any) -> Fake:
    folder = Path(__file__).parent
    python = sys.base_prefix
    fake = serve(*tools, sandboxed=True, read=[str(folder)], execute=[python], **said)
    fake.given |= {"command": f"{python}/bin/python3", "write": [str(fake.folder)]}
    for path in (fake.folder, *fake.folder.iterdir()):
        path.chmod(0o777)  # root's cells are an ordinary user's
    fake.servers.close()
    fake.servers = fake.again()
    fake.broker = Broker(fake.servers)
    return fake


def test_of_the_python_of_an_environment_no_more_is_shown_than_that(tmp_path: Path) -> None:
    """Some are made from one in ~/bin or ~/.local/bin, or in /bin: a link on most hosts."""
    owner, environment = tmp_path / "ann", tmp_path / "environment"
    for folder in (owner / "bin", owner / "lib", owner / ".ssh", environment / "bin"):
        folder.mkdir(parents=True)
    (owner / "bin" / "python3").touch()
    (environment / "bin" / "python").symlink_to(owner / "bin" / "python3")

    def added(home: Path) -> set[str]:
        (environment / "pyvenv.cfg").write_text(f"home = {home}\n")
        command = str(environment / "bin" / "server")
        shown = policy_of(ServerConfig(name="fake", command=command), command)
        return {*shown.processes.execute} - {*load_policy("server").processes.execute}

    known = {str(environment), str(owner / "bin"), str(owner / "lib")}
    assert added(owner / "bin") == known
    assert added(Path("/bin")) == known
    assert added(Path("bin")) == known
    (owner / "bin").rename(owner / "programs")
    (environment / "bin" / "python").unlink()
    (environment / "bin" / "python").symlink_to(owner / "programs" / "python3")
    assert added(owner / "programs") == {str(environment)}


@pytest.mark.needs("cgroup")
def test_a_server_of_an_environment_runs_in_a_cell(serve: Serve, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    cell = in_a_cell(serve, "where")
    cell.given |= {"command": str(environment / "bin" / "python"), "execute": []}
    for path in (tmp_path, environment, *environment.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755)
    cell.servers.close()
    cell.servers = cell.again()
    assert json.loads(Broker(cell.servers).call("fake.where", {}))[1:] == ["/workspace", False]


KEEPING = """
import json, sys
from cellwright.harness.mcp.mcp_servers import McpServers
from cellwright.harness.tools.broker import Broker
given, pins, path = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
with McpServers({"mcpServers": {"fake": given}}, pins=pins) as servers:
    print(Broker(servers).call("fake.keep", {"path": path}))
"""


@pytest.mark.needs("cgroup", "root")
@pytest.mark.parametrize("owner", [0, 12345], ids=["root", "an ordinary user"])
def test_a_server_that_root_starts_opens_its_own_files_again(serve: Serve, owner: int) -> None:
    """From another process of ours, in which root's cells have another id."""
    fake = in_a_cell(serve, "keep")
    os.chown(fake.folder, owner, owner)
    fake.folder.chmod(0o700 if owner else 0o777)
    path = fake.folder / "kept"
    argv = (sys.executable, "-c", KEEPING, json.dumps(fake.given), str(fake.folder / "pins.json"))
    for kept in ("x", "xx"):
        done = subprocess.run(
            (*argv, str(path)), cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.stdout == f"{kept}\n", done.stderr
    file = path.stat()
    assert file.st_mode & 0o077 == 0
    assert file.st_uid == owner or (not owner and file.st_uid >= 1000)


@pytest.mark.parametrize("command", ["npx", "/usr/bin/uvx", "docker"])
def test_what_fetches_a_server_needs_a_network_that_cells_have_not(
    serve: Serve, command: str
) -> None:
    fake = serve(command=command, sandboxed=True)
    with pytest.raises(ToolFailed, match="cells have no network"):
        fake.call("echo")


SERVER_IN_NODE = """
import { createInterface } from "node:readline";
import { words } from "dependency";
import { more } from "./more.js";
const tool = { name: "say", inputSchema: { type: "object" } };
const answers = {
  initialize: (asked) => ({
    protocolVersion: asked.protocolVersion, capabilities: { tools: {} },
    serverInfo: { name: "say", version: "1" },
  }),
  "tools/list": () => ({ tools: [tool] }),
  "tools/call": () => ({ content: [{ type: "text", text: words + more }] }),
};
createInterface({ input: process.stdin }).on("line", (line) => {
  const { id, method, params } = JSON.parse(line);
  if (id === undefined) return;
  const result = answers[method]?.(params);
  const said = result ? { result } : { error: { code: -32601, message: "what?" } };
  console.log(JSON.stringify({ jsonrpc: "2.0", id, ...said }));
});
"""


@pytest.mark.needs("cgroup", "node")
@pytest.mark.parametrize("place", ["node_modules/@scope/server", "source"])
def test_a_link_that_npm_made_is_a_server(serve: Serve, tmp_path: Path, place: str) -> None:
    """`npm install` links to a package below node_modules, `npm link` to one that lies elsewhere."""
    package = tmp_path / place
    main, link = package / "dist" / "index.js", tmp_path / "node_modules" / ".bin" / "say"
    files = {
        package / "package.json": '{"type": "module", "bin": {"say": "./dist/index.js"}}',
        main: f"#!/usr/bin/env node{SERVER_IN_NODE}",
        package / "dist" / "more.js": 'export const more = "!";',
    }
    near = package if place == "source" else tmp_path
    dependency = near / "node_modules" / "dependency"
    files[dependency / "package.json"] = '{"type": "module", "exports": "./index.js"}'
    files[dependency / "index.js"] = 'export const words = "hello";'
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    main.chmod(0o755)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(os.path.relpath(main, link.parent))
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # root's cells are an ordinary user's
    given = {"command": str(link), "connect_timeout": 60}
    with McpServers({"mcpServers": {"node": given}}, pins=tmp_path / "pins.json") as servers:
        assert Broker(servers).call("node.say", {}) == "hello!"


@pytest.mark.parametrize("sandboxed", [True, False])
@pytest.mark.parametrize("words", ["getaddrinfo EAI_AGAIN example.org", "TypeError: fetch failed"])
def test_a_call_that_fails_for_want_of_a_network_says_so(words: str, sandboxed: bool) -> None:
    streams: Any = (None, None)
    link = Transport(streams)
    link.in_cell = sandboxed
    content: list[Any] = [TextContent(type="text", text=words)]
    with pytest.raises(ToolFailed) as told:
        value_of(CallToolResult(content=content, is_error=True), ToolSpec(name="a.b"), link)
    assert ("cells have no network" in str(told.value)) is sandboxed


# asking back


def test_a_server_that_asks_gets_an_answer_or_a_no(serve: Serve) -> None:
    asked: list[Elicitation] = []

    def answer(question: Elicitation) -> dict[str, Any]:
        asked.append(question)
        return {"ok": True}

    form = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    fake = serve("ask", elicit=answer)
    assert json.loads(fake.call("ask", schema=form)) == {
        "action": "accept",
        "content": {"ok": True},
    }
    assert asked == [("fake", "Sure?", form)]
    assert json.loads(serve("ask").call("ask", schema=form)) == {"action": "decline"}


# among others


def test_made_tools_shadow_no_server_and_servers_no_developer(serve: Serve) -> None:
    registry = ToolRegistry()
    fake = serve("echo", "env", registry=registry)

    def echo() -> str:
        return "the developer's"

    echo.__name__ = "fake_env"
    registry.register(echo)
    with ToolFactory(registry=registry, pool=0) as factory:
        assert [spec.name for spec in factory.list_tools()] == ["fake.echo", "fake_env"]
        assert factory.call("fake.echo", {"a": 1}) == '{"a": 1}'
        assert factory.call("fake.env") == "the developer's"
        for name in ("fake.echo", "fake_echo", "fake.other"):
            with pytest.raises(ToolExists, match="which is a server's"):
                registry.add(registry.get("fake.echo").__class__(name=name))
        with pytest.raises(ToolDenied, match="a server's"):
            factory.remove_tool("fake.echo")
        assert key_of(registry.get("fake-echo").name) == "fake_echo"
        assert registry.get("fake.echo").owner is ToolOwner.SERVER
        fake.servers.close()
        assert [spec.name for spec in factory.list_tools()] == ["fake_env"]
        with pytest.raises(ToolNotFound):
            factory.call("fake.echo")
    registry.close()


def test_tools_of_servers_are_found_by_kind_and_by_server(serve: Serve) -> None:
    registry = ToolRegistry()
    fake = serve(tool("read_query", description="Run a SQL query"), registry=registry)
    search = ToolSearch(registry)
    for only in ({}, {"server": "fake"}, {"kinds": ["mcp"]}):
        assert search.search("sql query", **only)["tools"][0]["name"] == "fake.read_query"
    assert search.search("sql query", server="other")["tools"] == []
    assert search.search("sql query", kinds=["made"])["tools"] == []
    assert search.search("fake.read_query")["tools"][0]["name"] == "fake.read_query"
    fake.list([tool("other")])
    fake.servers.check("fake")
    assert search.search("sql query")["tools"] == []
    fake.servers.close()
    registry.close()


def test_a_name_of_the_wire_is_kept_beside(serve: Serve) -> None:
    schema = {**ANYTHING, "title": "given"}
    fake = serve(tool("Say It!", inputSchema=schema))
    spec = fake.servers.list_tools()[0]
    assert (spec.name, spec.function, spec.server) == ("fake.say_it_", "Say It!", "fake")
    with pytest.raises(ToolFailed, match="unknown Say It!"):
        fake.call("say_it_")


def test_a_disabled_server_has_no_tools_and_an_unknown_one_is_an_error(serve: Serve) -> None:
    fake = serve("echo", disabled=True)
    assert fake.servers.specs() == []
    with pytest.raises(ToolFailed, match="disabled"):
        fake.call("echo")
    with pytest.raises(PolicyError, match="configured servers: fake"):
        fake.servers.check("other")
    assert fake.starts == 0


def test_one_server_that_fails_leaves_the_others(serve: Serve, tmp_path: Path) -> None:
    good, bad = serve("echo"), serve(mode="exit")
    given = {"mcpServers": {"good": good.given, "bad": bad.given}}
    with McpServers(given, pins=tmp_path / "pins") as servers:
        assert [spec.name for spec in servers.list_tools()] == ["good.echo"]
        states = {each.name: (each.state, bool(each.error)) for each in servers.status()}
        assert states == {"good": ("ready", False), "bad": ("failed", True)}
        with pytest.raises(ToolFailed):
            servers.list_tools("bad")


def test_what_was_closed_says_so(serve: Serve) -> None:
    fake = serve("echo")
    fake.call("echo")
    fake.servers.close()
    fake.servers.close()
    with pytest.raises(ClosedError):
        fake.servers.list_tools()
    with pytest.raises(ToolFailed, match="closed"):
        fake.call("echo")


@pytest.mark.parametrize(
    "code",
    [
        "import cellwright; cellwright.Sandbox; cellwright.Broker",
        "import cellwright.harness.cli.commands as c; c.parser_of('servers'); c.parser_of('run')",
        "import cellwright.harness.mcp.server_config, cellwright.harness.mcp.definitions",
    ],
)
def test_the_sdk_is_not_imported_without_servers(code: str) -> None:
    code += "; import sys; print({'mcp', 'anyio', 'pydantic', 'httpx2'} & set(sys.modules))"
    done = subprocess.run(
        (sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
