"""The cost of a program for a client of the MCP server, beside an empty tool of the SDK.

Both servers are processes behind a pipe, spoken to by the same few lines, so that no client's own work
is in the numbers.  The SDK is imported by the servers only.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from .measuring import (
    MS,
    Contender,
    median,
    percentile,
    percentile_columns,
    percentile_row,
    side_by_side,
)
from .programs import SUM
from .report import Column, Criterion, Report, ReportTable
from .settings import Settings, sandbox

_ECHO = "a tool that gives back what it got, of the SDK alone"
_RUN, _SESSION = "`run_code` of `1+1`, a fresh cell", "`run_code` of `1+1`, in a session"
_SEARCH, _TOOL = "`search_tools`", "`run_code` of a program that calls a made tool"
_OWN = "`execute('1+1')`, no protocol"
_ECHO_SERVER = """
import anyio
from mcp import types
from mcp.server import Server
from mcp.server.stdio import stdio_server

async def list_tools(context, params):
    return types.ListToolsResult(tools=[types.Tool(name="echo", input_schema={"type": "object"})])

async def call_tool(context, params):
    text = types.TextContent(type="text", text=str(params.arguments))
    return types.CallToolResult(content=[text], structured_content=params.arguments)

async def main():
    server = Server("echo", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())

anyio.run(main)
"""
_HELLO = {
    "protocolVersion": "2025-11-25", "capabilities": {},
    "clientInfo": {"name": "bench", "version": "1"},
}  # fmt: skip
_DOUBLE = "def double(n: int) -> int:\n    return n * 2"
_PROGRAM = "import tools\ntools.double(21)"


class StdioClient:
    """A minimal client of a server behind a pipe."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin
        assert process.stdout
        self._stdin, self._stdout = process.stdin, process.stdout
        self._id = 0
        self.instructions = ""

    def greet(self) -> None:
        self.instructions = self.ask("initialize", _HELLO).get("instructions", "")
        self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def call(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Return the result of a tool; raises RuntimeError for an error."""
        result = self.ask("tools/call", {"name": name, "arguments": arguments})
        if result.get("isError"):
            raise RuntimeError(str(result["content"]))
        found: dict[str, Any] = result["structuredContent"]
        return found

    def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._id += 1
        self._send({"jsonrpc": "2.0", "id": self._id, "method": method, "params": params})
        while True:
            answer = json.loads(self._stdout.readline())
            if answer.get("id") == self._id:
                found: dict[str, Any] = answer["result"]
                return found

    def _send(self, message: dict[str, Any]) -> None:
        self._stdin.write(json.dumps(message).encode() + b"\n")
        self._stdin.flush()


@contextlib.contextmanager
def served(*command: str, env: Mapping[str, str] | None = None) -> Iterator[StdioClient]:
    """Start a server, greet it, and end it after; `env` adds variables."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **(env or {})}
    )
    try:
        peer = StdioClient(process)
        peer.greet()
        yield peer
    finally:
        process.communicate()


def measure(settings: Settings) -> Report:
    """Return percentiles of calls in turn."""
    layers = settings.policy.optional_layers
    optional = [part for layer in layers for part in ("--optional", layer)]
    with (
        served(sys.executable, "-I", "-c", _ECHO_SERVER) as echo,
        served(sys.executable, "-I", "-m", "cellwright", "mcp", *optional) as ours,
        sandbox(settings, audit=False) as own,
    ):
        ours.call("create_tool", name="double", source_code=_DOUBLE)
        session = ours.call("run_code", code=SUM.source, session="new")["session"]
        run = partial(ours.call, "run_code", code=SUM.source)
        times = side_by_side(
            [
                Contender(_OWN, partial(own.execute, SUM.source), own.settle),
                Contender(_ECHO, partial(echo.call, "echo", code=SUM.source)),
                Contender(_SEARCH, partial(ours.call, "search_tools", query="double")),
                Contender(_RUN, run),
                Contender(_SESSION, partial(run, session=session)),
                Contender(_TOOL, partial(ours.call, "run_code", code=_PROGRAM)),
            ],
            settings.amount(1000, 30),
        )
    return _report(times)


def _report(times: dict[str, list[float]]) -> Report:
    bare, quiet = median(times[_ECHO]), _quiet(times[_ECHO])
    table = ReportTable(
        title="One call over a pipe",
        columns=(
            Column("what"), Column("p10 ms", 2), Column("ratio", 2), *percentile_columns(),
            Column("ratio of p50", 2),
        ),
        rows=tuple(
            (
                way, _quiet(seconds) * MS, _quiet(seconds) / quiet, *percentile_row(seconds),
                median(seconds) / bare,
            )
            for way, seconds in times.items()
        ),
        note="Ratios are to the tool that does nothing. A call of ours wakes several processes in "
        "turn, each of which waits beside busy neighbours: the first ratio is that of quiet moments.",
    )  # fmt: skip
    return Report(
        name="mcp",
        title="What a program costs a client of the MCP server",
        tables=(table,),
        verdicts=(_verdict(times),),
        notes=("Default policy, every layer on, no audit trail; in turn, each server a process.",),
        samples={way: tuple(seconds) for way, seconds in times.items()},
    )


def _verdict(times: dict[str, list[float]]) -> Criterion:
    ratio = _quiet(times[_RUN]) / _quiet(times[_ECHO])
    return Criterion(
        "in a quiet moment a program in a fresh cell takes less than six times as long as a tool "
        "that does nothing",
        ratio < 6,
        f"{ratio:.2f} times",
    )


def _quiet(seconds: list[float]) -> float:
    return percentile(seconds, 0.1)
