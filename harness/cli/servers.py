"""`cellwright servers`: a look at MCP servers and their tools, calls of them, and what is pinned.

The SDK is imported by commands that need a server, when they do.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ...policies.errors import PolicyError, ToolError
from ..schemas.spec import ToolSpec
from ..text.terminal import harmless
from ..tools.approval import Approve, ask_terminal, refuse_approval

if TYPE_CHECKING:
    from ..mcp.servers import McpServers
    from ..mcp.status import ServerStatus
    from ..tools.registry import ToolRegistry

_WELL, _FAILED, _DIFFERS = 0, 1, 1
Command = Callable[["McpServers", argparse.Namespace], int]


def add_servers(servers: argparse.ArgumentParser) -> None:
    """Add the commands about servers."""
    commands = servers.add_subparsers(required=True, metavar="WHAT")

    def add(name: str, summary: str, command: Command) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=summary)
        add_file(parser, required=True)
        parser.set_defaults(command=_carry_out, carry_out=command)
        return parser

    listed = add("list", "the servers, without starting any", _list)
    tools = add("tools", "their tools, as they are now", _tools)
    check = add("check", "start each and ask for its tools", _check)
    call = add("call", "call a tool, as a program would", _call)
    call.add_argument("name", metavar="NAME", help="server.tool")
    call.add_argument("arguments", nargs="?", default="{}", metavar="JSON", help="an object")
    call.add_argument("--yes", action="store_true", help="approve the call, if it has to be")
    diff = add("diff", "how tools differ from those that are pinned", _diff)
    pin = add("pin", "believe a server's tools as they are now", _pin)
    pin.add_argument("server", metavar="SERVER")
    for parser in (tools, check, diff):
        parser.add_argument("server", nargs="?", metavar="SERVER", help="this one alone")
    for parser in (listed, tools, check):
        parser.add_argument("--json", action="store_true", help="one JSON array on stdout")


def add_file(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add what says which servers there are."""
    parser.add_argument(
        "--servers", metavar="FILE", required=required, help="MCP servers: JSON or TOML"
    )
    parser.add_argument(
        "--pins", metavar="FILE", help="where their tools are pinned, if not with the user's state"
    )


def require_sdk() -> None:
    """Raise PolicyError if the protocol's SDK is not installed."""
    if importlib.util.find_spec("mcp") is None:
        raise PolicyError("the extra `mcp` is not installed", "pip install 'cellwright[mcp]'")


@contextmanager
def opened(
    options: argparse.Namespace, registry: "ToolRegistry | None" = None
) -> Iterator["McpServers"]:
    """Give the servers that the options name, whose tools are then among those of `registry` too.

    Raises PolicyError if the SDK is not installed.
    """
    require_sdk()
    from ..mcp.servers import McpServers

    with McpServers(options.servers, pins=options.pins, registry=registry) as servers:
        yield servers


def asking() -> Approve:
    """Return who is asked about risky calls: the terminal, if there is one."""
    return ask_terminal if sys.stdin is not None and sys.stdin.isatty() else refuse_approval


def _carry_out(options: argparse.Namespace) -> int:
    with opened(options) as servers:
        try:
            return int(options.carry_out(servers, options))
        except ToolError as error:
            print(f"cellwright: {harmless(str(error))}", file=sys.stderr)
            return _FAILED


def _list(servers: "McpServers", options: argparse.Namespace) -> int:
    return _show_status(servers.status(), options)


def _check(servers: "McpServers", options: argparse.Namespace) -> int:
    if options.server:
        servers.check(options.server)
    else:
        servers.list_tools()
    found = [each for each in servers.status() if options.server in (None, each.name)]
    bad = [each for each in found if each.state == "failed" or any(each.drift)]
    return _show_status(found, options) or (_FAILED if bad else _WELL)


def _show_status(found: list["ServerStatus"], options: argparse.Namespace) -> int:
    if options.json:
        _write([each._asdict() | {"drift": each.drift._asdict()} for each in found])
        return _WELL
    for each in found:
        where = "in a cell" if each.sandboxed else "elsewhere" if each.remote else "on the host"
        print(f"{each.name}  {each.state}, {where}: {harmless(each.place)}, {each.tools} tools")
        for line in (each.error, *(f"left out: {why}" for why in each.dropped), str(each.drift)):
            if line:
                print(f"    {harmless(line)}")
    return _WELL


def _tools(servers: "McpServers", options: argparse.Namespace) -> int:
    specs = servers.list_tools(options.server)
    if options.json:
        _write([_told(spec) for spec in specs])
    else:
        for spec in specs:
            risk = "  [has to be approved]" if spec.risky else ""
            print(f"{spec.name}{risk}  {harmless(spec.description.partition(chr(10))[0][:120])}")
    failed = [each for each in servers.status() if each.state == "failed"]
    for each in failed:
        print(f"cellwright: {each.name}: {harmless(each.error)}", file=sys.stderr)
    return _FAILED if failed else _WELL


def _told(spec: ToolSpec) -> dict[str, Any]:
    return {
        "name": spec.name, "wire_name": spec.function, "server": spec.server,
        "description": spec.description, "parameters": spec.parameters,
        "output_schema": spec.output_schema, "risky": spec.risky,
    }  # fmt: skip


def _call(servers: "McpServers", options: argparse.Namespace) -> int:
    from ..tools.broker import Broker

    try:
        arguments = msgspec.json.decode(options.arguments, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise PolicyError(f"arguments: {error}") from None
    broker = Broker(servers, approve=_approved if options.yes else asking())
    _write(broker.call(options.name, arguments))
    return _WELL


def _approved(_: object) -> bool:
    return True


def _diff(servers: "McpServers", options: argparse.Namespace) -> int:
    names = [options.server] if options.server else sorted(servers.configs)
    told = [servers.difference(name) for name in names if not servers.configs[name].disabled]
    sys.stdout.write("".join(told))
    return _DIFFERS if any(told) else _WELL


def _pin(servers: "McpServers", options: argparse.Namespace) -> int:
    drift = servers.pin(options.server)
    print(harmless(str(drift)) or "as it was")
    return _WELL


def _write(value: Any) -> None:
    """Write JSON in ASCII: on a terminal nothing in it hides or moves a cursor."""
    sys.stdout.write(json.dumps(msgspec.to_builtins(value)) + "\n")
