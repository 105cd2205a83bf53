"""A server of the SDK's: over stdio, or over HTTP at a port of loopback that it prints.

sdk_server.py stdio | http
"""

import socket
import sys
from typing import Annotated

import uvicorn
from mcp.server import MCPServer
from mcp.server.mcpserver import AcceptedElicitation, Context, Elicit, ElicitationResult, Resolve
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

server = MCPServer("sdk", version="1")


class Sure(BaseModel):
    ok: bool


@server.tool()
def add(a: int, b: int = 2) -> int:
    return a + b


@server.tool()
def header(ctx: Context, name: str) -> str:
    request = ctx.request_context.request
    return str(request.headers.get(name)) if request else ""


@server.tool()
def refuse() -> str:
    raise ToolError("not today")


@server.tool()
def long(size: int) -> str:
    return "x" * size


@server.tool()
async def steps(count: int, ctx: Context) -> str:
    for done in range(count):
        await ctx.report_progress(done + 1, count, "step")
    return "done"


async def ask(path: str) -> Elicit[Sure]:
    return Elicit(f"Delete {path}?", Sure)


@server.tool()
async def delete(path: str, sure: Annotated[ElicitationResult[Sure], Resolve(ask)]) -> str:
    return f"{isinstance(sure, AcceptedElicitation) and sure.data.ok} {path}"


@server.tool()
async def grow(ctx: Context) -> str:
    server.remove_tool("refuse")
    await ctx.notify_tools_changed()
    return "grown"


if sys.argv[1] == "stdio":
    server.run()
else:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # connections wait in the queue from now on
    print(listening.getsockname()[1], flush=True)
    app = server.streamable_http_app()
    config = uvicorn.Config(app, log_level="error", lifespan="on")
    uvicorn.Server(config).run(sockets=[listening])
