"""`ServerConfig`: what is said of one MCP server; read from the files that people already have."""

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...policies.errors import PolicyError
from .names import server_name
from .variables import Expanded, expand

MAX_FILE_BYTES = 1024 * 1024
_TABLES = ("mcpServers", "mcp_servers", "servers")  # what Claude, Codex and VS Code call it
_LONGEST_SECONDS = 86_400.0
_OF_A_CELL = ("policy", "read", "write", "execute")
_OF_A_PROCESS = ("args", "env", "cwd", *_OF_A_CELL)
_Protocol = Literal["auto", "legacy", "2026-07-28"]


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """What is written of a server and stays so."""

    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str = ""
    url: str = ""
    headers: dict[str, str] = {}
    disabled: bool = False
    timeout: float = 30.0
    connect_timeout: float = 30.0
    protocol: _Protocol = "auto"
    sandboxed: bool = True
    policy: str = ""
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    execute: tuple[str, ...] = ()
    trusted: bool = False
    approved: tuple[str, ...] = ()


class _Written(_Said, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file may say of a server."""

    type: Literal["stdio", "http", "streamable-http"] | None = None
    risky: bool | tuple[str, ...] = ()


class ServerConfig(_Said, frozen=True, kw_only=True):
    """One server.  `command` with `args`, `env` and `cwd` starts it; `url` with `headers` reaches it.

    `timeout` is for a call, `connect_timeout` until its tools are known, both in seconds.  `sandboxed`
    starts it in a cell, under `policy` (a profile or a TOML file), with `read`, `write` and `execute`
    shown to it.  `risky` and `approved` are globs over its tools' own names: calls of the former have
    to be approved; of the latter not, whatever the server says.  `trusted`: what it says of them is
    believed.  `secrets` were put into headers.
    """

    name: str
    risky: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"ServerConfig({self.name!r}, {self.place})"

    @property
    def place(self) -> str:
        """Return where it is, without credentials: its command, or its address without the query."""
        return self.url.partition("?")[0] if self.url else os.path.basename(self.command)


def read_servers(path: str | os.PathLike[str]) -> list[ServerConfig]:
    """Return the servers that a JSON or TOML file names; raises PolicyError."""
    shown = os.fspath(path)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PolicyError(f"cannot read {shown}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise PolicyError(f"{shown}: larger than {MAX_FILE_BYTES} bytes")
    try:
        return servers_of(_parse(data, Path(path).suffix))
    except PolicyError as error:
        raise PolicyError(f"{shown}: {error.what}", error.hint) from None


def _parse(data: bytes, suffix: str) -> Any:
    try:
        text = data.decode()
        return tomllib.loads(text) if suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"it cannot be read: {error}") from None


def servers_of(given: Any, environment: Mapping[str, str] | None = None) -> list[ServerConfig]:
    """Return the servers of a parsed file; what else stands in it is none of ours.

    Raises PolicyError for what is not known, contradicts itself, or needs a variable that is not set.
    """
    found = [name for name in _TABLES if isinstance(given, dict) and name in given]
    if len(found) != 1 or not isinstance(given[found[0]], dict):
        raise PolicyError(f"one table of servers is needed, called {', or '.join(_TABLES)}")
    environment = os.environ if environment is None else environment
    servers = [_server(name, each, environment) for name, each in given[found[0]].items()]
    if len({server.name for server in servers}) < len(servers):
        names = sorted(server.name for server in servers)
        raise PolicyError(f"two servers would have one name: {', '.join(names)}")
    return servers


def _server(name: object, given: Any, environment: Mapping[str, str]) -> ServerConfig:
    where = f"server {name!a}"
    try:
        written = msgspec.convert(_told_apart(given), _Written, strict=True)
        _check(written)
        return _expanded(server_name(name), written, environment)
    except msgspec.ValidationError as error:
        known = ", ".join(each.name for each in msgspec.structs.fields(_Written))
        hint = f"known are {known}" if "unknown field" in str(error) else ""
        raise PolicyError(f"{where}: {error}", hint) from None
    except PolicyError as error:
        raise PolicyError(f"{where}: {error.what}", error.hint) from None


def _told_apart(given: Any) -> Any:
    """Return what is written, with the one name that others have for `approved`."""
    if not isinstance(given, dict):
        raise PolicyError("must be a table")
    if given.get("type") == "sse":
        raise PolicyError("type: sse was replaced by http", "ask the server for streamable HTTP")
    same = {"autoApprove": "approved", "alwaysAllow": "approved"}
    return {same.get(key, key): value for key, value in given.items()}


def _check(written: _Written) -> None:
    if bool(written.command) == bool(written.url):
        raise PolicyError("either command or url is needed")
    if written.type and (written.type == "stdio") != bool(written.command):
        raise PolicyError(f"type: {written.type} does not go with what else is said")
    elsewhere = _OF_A_PROCESS if written.url else ("headers",)
    for key in elsewhere:
        if getattr(written, key):
            raise PolicyError(
                f"{key}: context nothing beside {'url' if written.url else 'command'}"
            )
    if written.url and not written.url.startswith(("http://", "https://", "${")):
        raise PolicyError("url: must begin with https:// or http://")
    for key in _OF_A_CELL:
        if not written.sandboxed and getattr(written, key):
            raise PolicyError(f"{key}: is about its cell, and sandboxed is false")
    for key in ("timeout", "connect_timeout"):
        if not 0 < getattr(written, key) <= _LONGEST_SECONDS:
            raise PolicyError(f"{key}: must be seconds, more than 0 and at most a day")


def _expanded(name: str, written: _Written, environment: Mapping[str, str]) -> ServerConfig:
    def plain(text: str) -> str:
        return expand(text, environment).text

    env = {key: expand(value, environment, vault=True) for key, value in written.env.items()}
    headers = {key: expand(each, environment, vault=True) for key, each in written.headers.items()}
    said = {field.name: getattr(written, field.name) for field in msgspec.structs.fields(written)}
    del said["type"]
    risky = ("*",) if written.risky is True else written.risky or ()
    return ServerConfig(
        **said | {
            "name": name, "command": plain(written.command), "cwd": plain(written.cwd),
            "args": tuple(map(plain, written.args)), "url": plain(written.url),
            "read": tuple(map(plain, written.read)), "write": tuple(map(plain, written.write)),
            "env": _texts(env), "headers": _texts(headers), "risky": risky,
            "secrets": tuple(value for each in headers.values() for value in each.values),
        }
    )  # fmt: skip


def _texts(expanded: Mapping[str, Expanded]) -> dict[str, str]:
    return {key: each.text for key, each in expanded.items()}
