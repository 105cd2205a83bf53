"""`cellwright servers`: lists MCP servers and their tools, calls tools, and compares and pins them.

The MCP SDK is imported only when a server is started.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ....policies.errors import PolicyError, ToolError
from ....policies.extras import how_to_install
from ...schemas.spec import ToolSpec
from ...text.terminal_text import ProgressLine, harmless
from ...tools.approval import Approve, ask_terminal, refuse_approval
from ..options import FAILED, SUCCEEDED, add_json, add_subcommands, print_json

if TYPE_CHECKING:
    from ...mcp.mcp_servers import McpServers, ServerStatus
    from ...tools.approval import ApprovalRequest
    from ...tools.registry import ToolRegistry


def add(parser: argparse.ArgumentParser) -> None:
    add_command = add_subcommands(parser, partial(add_configuration, required=True))
    listed = add_command("list", "list the servers without starting any", _list)
    tools = add_command("tools", "list the tools that the servers offer now", _tools)
    check = add_command("check", "start each server and list its tools", _check)
    call = add_command("call", "call a tool as a program would", _call)
    call.add_argument("name", metavar="NAME", help="the tool, as server.tool")
    call.add_argument(
        "arguments",
        nargs="?",
        default="{}",
        metavar="JSON",
        help="its arguments, a JSON object; default {}",
    )
    call.add_argument("--yes", action="store_true", help="approve the call if it needs approval")
    diff = add_command("diff", "compare the tools with their pins", _diff)
    pin = add_command("pin", "pin the tools that a server offers now", _pin)
    pin.add_argument("server", metavar="SERVER", help="the server")
    for each in (tools, check, diff):
        each.add_argument(
            "server", nargs="?", metavar="SERVER", help="the server; default all servers"
        )
    for each in (listed, tools, check):
        add_json(each)


def run(options: argparse.Namespace) -> int:
    with opened(options) as servers:
        try:
            return int(options.action(servers, options))
        except ToolError as error:
            print(f"cellwright: {harmless(str(error))}", file=sys.stderr)
            return FAILED


def add_configuration(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add --servers and --pins."""
    parser.add_argument(
        "--servers", metavar="FILE", required=required, help="MCP servers, in JSON or TOML"
    )
    parser.add_argument(
        "--pins", metavar="FILE", help="the pins of their tools; default in the user's state"
    )


def require_sdk() -> None:
    """Raise PolicyError if the MCP SDK is not installed."""
    if importlib.util.find_spec("mcp") is None:
        raise PolicyError("the extra `mcp` is not installed", how_to_install("mcp"))


@contextmanager
def opened(
    options: argparse.Namespace, registry: "ToolRegistry | None" = None
) -> Iterator["McpServers"]:
    """Open the servers that the options name; `registry` then has their tools, too.

    Raises PolicyError if the MCP SDK is not installed.
    """
    require_sdk()
    from ...mcp.mcp_servers import McpServers

    with McpServers(options.servers, pins=options.pins, registry=registry) as servers:
        yield servers


def approver() -> Approve:
    """Return the approver of risky calls: the person at the terminal; without one all are refused."""
    return ask_terminal if sys.stdin is not None and sys.stdin.isatty() else refuse_approval


def _list(servers: "McpServers", options: argparse.Namespace) -> int:
    return _show_status(servers.status(), options)


def _check(servers: "McpServers", options: argparse.Namespace) -> int:
    with ProgressLine("asking the servers"):
        if options.server:
            servers.check(options.server)
        else:
            servers.list_tools()
    found = [each for each in servers.status() if options.server in (None, each.name)]
    bad = [each for each in found if each.state == "failed" or any(each.drift)]
    return _show_status(found, options) or (FAILED if bad else SUCCEEDED)


def _show_status(found: list["ServerStatus"], options: argparse.Namespace) -> int:
    if options.json:
        print_json([each._asdict() | {"drift": each.drift._asdict()} for each in found])
        return SUCCEEDED
    for each in found:
        where = "in a cell" if each.sandboxed else "elsewhere" if each.remote else "on the host"
        print(f"{each.name}  {each.state}, {where}: {harmless(each.place)}, {each.tools} tools")
        for line in (
            each.error,
            *(f"tool not offered: {why}" for why in each.dropped),
            str(each.drift),
        ):
            if line:
                print(f"    {harmless(line)}")
    return SUCCEEDED


def _tools(servers: "McpServers", options: argparse.Namespace) -> int:
    with ProgressLine("asking the servers"):
        specs = servers.list_tools(options.server)
    if options.json:
        print_json([_summary(spec) for spec in specs])
    else:
        for spec in specs:
            risk = "  [needs approval]" if spec.risky else ""
            print(f"{spec.name}{risk}  {harmless(spec.description.partition(chr(10))[0][:120])}")
    failed = [each for each in servers.status() if each.state == "failed"]
    for each in failed:
        print(f"cellwright: {each.name}: {harmless(each.error)}", file=sys.stderr)
    return FAILED if failed else SUCCEEDED


def _summary(spec: ToolSpec) -> dict[str, Any]:
    return {
        "name": spec.name, "wire_name": spec.function, "server": spec.server,
        "description": spec.description, "parameters": spec.parameters,
        "output_schema": spec.output_schema, "risky": spec.risky,
    }  # fmt: skip


def _call(servers: "McpServers", options: argparse.Namespace) -> int:
    from ...tools.broker import Broker

    try:
        arguments = msgspec.json.decode(options.arguments, type=dict[str, Any])
    except ValueError as error:
        raise PolicyError(f"JSON: {error}", "give the arguments as a JSON object") from None
    decide = _approve_all if options.yes else approver()
    with ProgressLine("calling the tool") as progress:

        def approve(asked: "ApprovalRequest") -> bool:
            with progress.hidden():  # it may ask at the terminal
                return decide(asked)

        result = Broker(servers, approve=approve).call(options.name, arguments)
    print_json(result)
    return SUCCEEDED


def _approve_all(_: object) -> bool:
    return True


def _diff(servers: "McpServers", options: argparse.Namespace) -> int:
    names = [options.server] if options.server else sorted(servers.configs)
    with ProgressLine("asking the servers"):
        changes = [servers.difference(name) for name in names if not servers.configs[name].disabled]
    sys.stdout.write("".join(changes))
    return FAILED if any(changes) else SUCCEEDED


def _pin(servers: "McpServers", options: argparse.Namespace) -> int:
    with ProgressLine("asking the servers"):
        drift = servers.pin(options.server)
    print(harmless(str(drift)) or "unchanged")
    return SUCCEEDED
