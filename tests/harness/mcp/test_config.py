"""Configuration of servers: other clients' files work, and errors name the server and the key."""

import json
from pathlib import Path
from typing import Any

import pytest

from cellwright import Vault
from cellwright.harness.cli.helping.doctor import check_servers
from cellwright.harness.mcp.server_config import (
    ServerConfig,
    expand,
    from_vault,
    read_servers,
    server_name,
    servers_of,
    tool_names,
)
from cellwright.harness.schemas.spec import normalised
from cellwright.policies.errors import PolicyError
from tests.conftest import SHARED

ENVIRONMENT = {"HOME": "/home/ann", "KEY": "secret", "EMPTY": ""}


def one(given: dict[str, Any]) -> ServerConfig:
    return servers_of({"mcpServers": {"x": given}}, ENVIRONMENT)[0]


def test_a_file_as_others_have_it_is_read(tmp_path: Path) -> None:
    as_json, as_toml = tmp_path / "servers.json", tmp_path / "servers.toml"
    server = {"command": "server", "args": ["-v"], "env": {"A": "b"}, "type": "stdio"}
    as_json.write_text(json.dumps({"mcpServers": {"Sequential Thinking": server}, "theme": "dark"}))
    as_toml.write_text(
        '[mcp_servers.sequential_thinking]\ncommand = "server"\nargs = ["-v"]\nenv = {A = "b"}'
    )
    assert read_servers(as_json) == read_servers(as_toml)
    assert read_servers(as_json)[0].name == "sequential_thinking"
    assert read_servers(as_json)[0].sandboxed


def test_everything_that_can_be_said_is_taken() -> None:
    config = one({
        "command": "${HOME}/server", "args": ["${NO:-default}", "${EMPTY:-full}", "${EMPTY}"],
        "cwd": "/data", "env": {"KEY": "${env:KEY}", "OTHER": "${vault:OTHER}"}, "timeout": 5,
        "policy": "server", "read": ["${HOME}/data"], "write": ["/out"], "risky": True,
        "alwaysAllow": ["get_*"], "trusted": True, "disabled": False,
    })  # fmt: skip
    assert config.command == "/home/ann/server"
    assert config.args == ("default", "full", "")
    assert config.env == {"KEY": "secret", "OTHER": "${vault:OTHER}"}
    assert (config.read, config.write) == (("/home/ann/data",), ("/out",))
    assert (config.risky, config.approved) == (("*",), ("get_*",))


def test_what_goes_into_a_header_is_a_secret_and_is_not_shown() -> None:
    config = one({"url": "https://a.org/mcp?key=1", "headers": {"Authorization": "Bearer ${KEY}"}})
    assert config.headers == {"Authorization": "Bearer secret"}
    assert config.secrets == ("secret",)
    assert repr(config) == "ServerConfig('x', https://a.org/mcp)"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "either command or url"),
        ({"command": "a", "url": "https://a.org"}, "either command or url"),
        ({"command": "a", "comand": "b"}, "unknown field `comand`"),
        ({"command": "a", "args": "b"}, "Expected `array`"),
        ({"command": "a", "headers": {"A": "b"}}, "headers: cannot be combined with command"),
        ({"url": "https://a.org", "read": ["/a"]}, "read: cannot be combined with url"),
        ({"url": "ftp://a.org"}, "must begin with https"),
        ({"url": "https://a.org", "type": "stdio"}, "stdio contradicts url"),
        ({"url": "https://a.org", "type": "sse"}, "sse is not supported"),
        ({"command": "a", "timeout": 0}, "timeout: must be > 0 and <= 86400 seconds, got 0"),
        ({"command": "a", "timeout": "5"}, "Expected `float`"),
        ({"command": "a", "sandboxed": False, "write": ["/"]}, "sandboxed: false"),
        ({"command": "${UNSET}"}, "the variable UNSET is not set"),
        ({"command": "${vault:KEY}"}, "only in headers and env"),
        ({"command": "${input:key}"}, "is not a valid variable"),
        ({"command": "a", "risky": "all"}, "risky"),
        ([], "must be a table"),
    ],
)
def test_an_invalid_configuration_is_refused_with_the_servers_name(given: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=words) as refused:
        one(given)
    assert "'x'" in str(refused.value)


@pytest.mark.parametrize(
    "given", [{}, [], {"mcpServers": []}, {"mcpServers": {}, "servers": {}}, None]
)
def test_one_table_is_needed(given: Any) -> None:
    with pytest.raises(PolicyError, match="one table"):
        servers_of(given)


def test_two_servers_have_two_names() -> None:
    both = {"mcpServers": {"A b": {"command": "a"}, "a_b": {"command": "a"}}}
    with pytest.raises(PolicyError, match="the same name"):
        servers_of(both)


@pytest.mark.parametrize("name", ["", "___", "x" * 25, "results", "tools", 7, "\u0130"])
def test_what_cannot_name_a_server_is_refused(name: Any) -> None:
    with pytest.raises(PolicyError, match="is not a valid name of a server"):
        server_name(name)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000])
def test_an_invalid_file_is_reported(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "servers.json"
    path.write_bytes(content)
    with pytest.raises(PolicyError, match="servers.json: invalid file"):
        read_servers(path)


def test_a_credential_is_put_in_once_and_what_it_holds_is_not_looked_at() -> None:
    filled = from_vault("${vault:A}${HOME}", Vault({"A": "${vault:B}"}))
    assert filled.text == "${vault:B}${HOME}"
    assert expand("$HOME $$ {HOME}", ENVIRONMENT).text == "$HOME $$ {HOME}"


# names


def test_names_of_tools_are_told_apart_whatever_the_order() -> None:
    wires = ["getUser", "get_user", "get-user", "API-post-search", "Add Label", "查询", "x" * 128]
    names = tool_names("s", wires)
    assert names == tool_names("s", reversed(wires))
    assert sorted(names.values()) == sorted(wires)
    found = {wire: name for name, wire in names.items()}
    assert found["get_user"] == "s.get_user"
    assert found["getUser"].startswith("s.get_user_")
    assert found["API-post-search"] == "s.api-post-search"
    assert found["Add Label"] == "s.add_label"
    assert found["查询"].startswith("s.tool_")


@pytest.mark.needs("shared")
def test_every_tool_of_real_servers_has_a_name() -> None:
    for path in (SHARED / "data" / "mcp-catalogue").glob("*.json"):
        wires = {each["name"] for each in json.loads(path.read_text())["tools"]}
        names = tool_names(server_name(path.stem), wires)
        assert set(names.values()) == wires
        assert [name for name in names if normalised(name) != name] == []


# doctor


def test_doctor_shows_what_nothing_confines(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    servers = {
        "cell": {"command": "a"}, "host": {"command": "a", "sandboxed": False},
        "off": {"command": "a", "disabled": True}, "far": {"url": "https://a.org"},
        "plain": {"url": "http://a.org"}, "here": {"url": "http://localhost:1/mcp"},
    }  # fmt: skip
    path.write_text(json.dumps({"mcpServers": servers}))
    found = {each.layer: each.verdict for each in check_servers(str(path))}
    assert [name for name, verdict in found.items() if verdict != "PASS"] == [
        "server host", "server plain",
    ]  # fmt: skip
