"""`ServerConfig`: the configuration of one MCP server, read from the files of other MCP clients.

Names of servers and their tools that programs can use, mapped to the servers' own names.

MCP allows almost any name: of 888 tools of real servers, 378 have names that are no identifiers.  Here
a tool is `server.tool`: small letters, digits, `_` and `-`, at most 64 characters, as
schemas/tool_names.py requires of every tool.

Variables `${NAME}` in a server's configuration, from the environment or the vault.
"""

import hashlib
import json
import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from ...policies.errors import PolicyError
from ..tools.tool import Vault

MAX_SERVER = 24
_MAX_NAME = 64
_OTHERS = re.compile(r"[^A-Za-z0-9_-]+")
_HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SEPARATORS = re.compile(r"[_-]+")
_RESERVED = ("results", "tools")  # the broker's own tools, and the module that programs import


def server_name(name: object) -> str:
    """Return the name of a server: `Sequential Thinking` becomes `sequential_thinking`.

    Raises PolicyError for a name that becomes empty, is too long, or is reserved.
    """
    small = _small(name).strip("_-") if isinstance(name, str) and name.isascii() else ""
    if not small or len(small) > MAX_SERVER or small in _RESERVED:
        raise PolicyError(
            f"{ascii(name)[:80]} is not a valid name of a server",
            f"letters, digits, _ and -, at most {MAX_SERVER}; not {' or '.join(_RESERVED)}",
        )
    return small


def tool_names(server: str, wires: Iterable[str]) -> dict[str, str]:
    """Map our names of a server's tools to its own: `listMail` becomes `list_mail`.

    Names are compared without separators.  Where several collide, each gets eight digits of the hash of
    its own name, except one whose own name is exactly ours.  The order of `wires` does not matter.
    """
    alike: dict[str, set[str]] = defaultdict(set)
    for wire in wires:
        alike[_SEPARATORS.sub("_", _mapped(wire))].add(wire)
    names: dict[str, str] = {}
    for key, group in alike.items():
        for wire in group:
            plain = _mapped(wire)
            sure = len(group) == 1 or wire == key
            names[_fitted(server, plain if sure else f"{plain}_{_hash(wire)}", wire)] = wire
    return dict(sorted(names.items()))


def _mapped(wire: str) -> str:
    small = _small(_HUMPS.sub("_", wire))
    return small if small.strip("_-") else f"tool_{_hash(wire)}"


def _small(text: str) -> str:
    return _OTHERS.sub(
        "_", text
    ).lower()  # substitute first, because lower() turns KELVIN SIGN into k


def _fitted(server: str, name: str, wire: str) -> str:
    """Return the full name; one that is too long is cut and ends in its hash."""
    whole = f"{server}.{name}"
    if len(whole) <= _MAX_NAME:
        return whole
    return f"{whole[: _MAX_NAME - 9]}_{_hash(wire)}"


def _hash(wire: str) -> str:
    return hashlib.sha256(wire.encode("utf-8", "surrogatepass")).hexdigest()[:8]


# ${NAME}, ${NAME:-default} and ${env:NAME} as other MCP clients have them; ${vault:NAME} is ours.
_VARIABLE = re.compile(
    r"\$\{(?P<source>env:|vault:)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}"
)
_LIKE_ONE = re.compile(r"\$\{[^}]*\}?")


class Expanded(NamedTuple):
    """A text with its variables replaced, and the values that replaced them."""

    text: str
    values: tuple[str, ...] = ()


def expand(text: str, environment: Mapping[str, str], *, vault: bool = False) -> Expanded:
    """Return `text` with its variables replaced, except `${vault:...}`, which `vault` allows.

    Raises PolicyError for a variable that is not set and has no default, and for invalid syntax.
    """
    values: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match["source"] == "vault:":
            if not vault:
                raise PolicyError(
                    f"{match[0]}: credentials of the vault are allowed only in headers and env"
                )
            return match[0]
        values.append(_of(match, environment))
        return values[-1]

    _check_form(text)
    return Expanded(_VARIABLE.sub(value, text), tuple(values))


def from_vault(text: str, vault: Vault) -> Expanded:
    """Return `text` with its vault variables replaced; raises ToolFailed for a missing credential."""
    values: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match["source"] != "vault:":  # the value of a variable may look like a variable
            return match[0]
        values.append(vault.get(match["name"]))
        return values[-1]

    return Expanded(_VARIABLE.sub(value, text), tuple(values))


def _check_form(text: str) -> None:
    for found in _LIKE_ONE.finditer(text):
        if not _VARIABLE.match(text, found.start()):
            raise PolicyError(
                f"{ascii(found[0])[1:-1]} is not a valid variable",
                "use ${NAME}, ${NAME:-default}, ${env:NAME} or ${vault:NAME}",
            )


def _of(match: re.Match[str], environment: Mapping[str, str]) -> str:
    found = environment.get(match["name"])
    if not found and match["default"] is not None:  # as in a shell, empty counts as not set
        found = match["default"]
    if found is None:
        raise PolicyError(
            f"{match[0]}: the variable {match['name']} is not set",
            f"set it, or use ${{{match['name']}:-default}}",
        )
    return found


MAX_FILE_BYTES = 1024 * 1024
_TABLES = ("mcpServers", "mcp_servers", "servers")  # as Claude, Codex and VS Code name it
_LONGEST_SECONDS = 86_400.0
_OF_A_CELL = ("policy", "read", "write", "execute")
_OF_A_PROCESS = ("args", "env", "cwd", *_OF_A_CELL)
_Protocol = Literal["auto", "legacy", "2026-07-28"]


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that a file and a ServerConfig share."""

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


class _Written(_Common, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a server in a file."""

    type: Literal["stdio", "http", "streamable-http"] | None = None
    risky: bool | tuple[str, ...] = ()


class ServerConfig(_Common, frozen=True, kw_only=True):
    """One server.  `command` with `args`, `env` and `cwd` starts it; `url` with `headers` reaches it.

    `timeout` bounds a call, `connect_timeout` the time until its tools are known, both in seconds.
    `sandboxed` starts it in a cell, under `policy` (a profile or a TOML file), which also shows the
    paths `read`, `write` and `execute`.  `risky` and `approved` are globs over the server's own names
    of its tools: calls of risky tools need approval; approved tools need none, whatever the server's
    annotations are.  `trusted` accepts those annotations.  `secrets` are the values of variables in
    headers.
    """

    name: str
    risky: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"ServerConfig({self.name!r}, {self.place})"

    @property
    def place(self) -> str:
        """Return its command, or its address without the query, which may hold credentials."""
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
        raise PolicyError(f"{shown}: must be at most {MAX_FILE_BYTES} bytes")
    try:
        return servers_of(_parse(data, Path(path).suffix))
    except PolicyError as error:
        raise PolicyError(f"{shown}: {error.what}", error.hint) from None


def _parse(data: bytes, suffix: str) -> Any:
    try:
        text = data.decode()
        return tomllib.loads(text) if suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"invalid file: {error}") from None


def servers_of(given: Any, environment: Mapping[str, str] | None = None) -> list[ServerConfig]:
    """Return the servers of a parsed file, whose other tables are ignored.

    Raises PolicyError for unknown or contradictory keys, and for variables that are not set.
    """
    found = [name for name in _TABLES if isinstance(given, dict) and name in given]
    if len(found) != 1 or not isinstance(given[found[0]], dict):
        raise PolicyError(f"expected one table of servers named {', or '.join(_TABLES)}")
    environment = os.environ if environment is None else environment
    servers = [_server(name, each, environment) for name, each in given[found[0]].items()]
    if len({server.name for server in servers}) < len(servers):
        names = sorted(server.name for server in servers)
        raise PolicyError(f"two servers have the same name: {', '.join(names)}")
    return servers


def _server(name: object, given: Any, environment: Mapping[str, str]) -> ServerConfig:
    where = f"server {name!a}"
    try:
        written = msgspec.convert(_with_own_keys(given), _Written, strict=True)
        _check(written)
        return _expanded(server_name(name), written, environment)
    except msgspec.ValidationError as error:
        known = ", ".join(each.name for each in msgspec.structs.fields(_Written))
        hint = f"known keys: {known}" if "unknown field" in str(error) else ""
        raise PolicyError(f"{where}: {error}", hint) from None
    except PolicyError as error:
        raise PolicyError(f"{where}: {error.what}", error.hint) from None


def _with_own_keys(given: Any) -> Any:
    """Return the table with other clients' names for `approved` replaced."""
    if not isinstance(given, dict):
        raise PolicyError("must be a table")
    if given.get("type") == "sse":
        raise PolicyError("type: sse is not supported", "use streamable HTTP: type http")
    same = {"autoApprove": "approved", "alwaysAllow": "approved"}
    return {same.get(key, key): value for key, value in given.items()}


def _check(written: _Written) -> None:
    if bool(written.command) == bool(written.url):
        raise PolicyError("either command or url is required, not both")
    if written.type and (written.type == "stdio") != bool(written.command):
        raise PolicyError(
            f"type: {written.type} contradicts {'command' if written.command else 'url'}"
        )
    elsewhere = _OF_A_PROCESS if written.url else ("headers",)
    for key in elsewhere:
        if getattr(written, key):
            raise PolicyError(
                f"{key}: cannot be combined with {'url' if written.url else 'command'}"
            )
    if written.url and not written.url.startswith(("http://", "https://", "${")):
        raise PolicyError("url: must begin with https:// or http://")
    for key in _OF_A_CELL:
        if not written.sandboxed and getattr(written, key):
            raise PolicyError(f"{key}: cannot be combined with sandboxed: false")
    for key in ("timeout", "connect_timeout"):
        if not 0 < getattr(written, key) <= _LONGEST_SECONDS:
            raise PolicyError(
                f"{key}: must be > 0 and <= {_LONGEST_SECONDS:g} seconds, got {getattr(written, key):g}"
            )


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
