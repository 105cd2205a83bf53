"""The fixed part of every tree of stubs: the functions of `tools` beside the tools themselves.

Constant source text; no text of a tool is inserted into it.
"""

PLACE = "/tools"  # in cells

INTERFACE = '''\
"""The tools that this program may call.

Each is a function: `from tools.SERVER import TOOL`.  A file that describes it is SERVER/TOOL.py in
this folder; SERVER/__init__.py lists what a server has.  In a coroutine a call is awaited.
"""
from collections.abc import Mapping
from typing import Any, Literal

Detail = Literal["name", "summary", "full"]

UNSET: Any
"""Stands for an argument that is not given."""

class ToolError(Exception):
    """A call of a tool that was refused, or that failed; `kind` says how."""

    kind: str
    def __init__(self, kind: str, message: str) -> None: ...

def call_tool(name: str, args: Mapping[str, Any] | None = None) -> Any:
    """Call a tool by its name."""

def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not UNSET."""

def search_tools(
    query: str, detail: Detail = "summary", server: str | None = None, limit: int = 5, offset: int = 0
) -> Any:
    """Find tools by name or by what they are for: {"tools": [...], "more": bool, "hint": str}."""

def browse(server: str | None = None, limit: int = 50, offset: int = 0) -> Any:
    """List servers and how many tools each has; or the tools of one, each in a line."""

def describe(name: str, detail: Detail = "full") -> Any:
    """Say how a tool is called: its signature, and in full its types and what they mean."""
'''

MODULE = """\
export const callTool = (name, args = {}) => globalThis.callTool(name, args);
export const searchTools = (query, options = {}) => callTool("tools.search", { query, ...options });
export const browse = (options = {}) => callTool("tools.browse", options);
export const describe = (name, options = {}) =>
  callTool("tools.describe", { name, language: "typescript", ...options });
"""

MODULE_TYPES = """\
/** The tools that this program may call: `import { TOOL } from "/tools/SERVER/index.mjs"`. */
export type Detail = "name" | "summary" | "full";
export declare function callTool(name: string, args?: { [key: string]: any }): any;
/** Find tools by name or by what they are for. */
export declare function searchTools(
  query: string, options?: { detail?: Detail; server?: string; limit?: number; offset?: number }): any;
/** List servers and how many tools each has; or the tools of one, each in a line. */
export declare function browse(options?: { server?: string; limit?: number; offset?: number }): any;
/** Say how a tool is called. */
export declare function describe(name: string, options?: { detail?: Detail }): any;
"""
