"""Ready-made tools for agents: files and tables of a named workspace, summaries, and HTTP requests.

They run on the host, but cannot reach its files: a file is a member of the workspace's archive, and
its name is never used as a path.
"""

import csv
import io
from collections.abc import Callable
from typing import Any

import msgspec

from ...policies.errors import ToolArgumentsInvalid, WorkspaceError
from ..sandbox.workspaces.workspace_store import Workspaces
from ..schemas.spec import ToolOwner, ToolSpec, ToolState
from ..tools.http.http_client import HttpClient
from ..tools.http.http_tool import http_tool
from ..tools.tool import Caller, Tool, tool_of

Summarise = Callable[[str, int], str]  # text, greatest length of the summary in characters
_TEXT_CHARACTERS = 1_000_000
_ROWS = 1000


def file_tools(workspaces: Workspaces, name: str) -> list[Tool]:
    """Return `file_read`, `file_write` and `csv_process` for the workspace `name`."""

    def file_read(filepath: str) -> dict[str, str]:
        """Read a text file of the workspace.

        Args:
            filepath: below the workspace
        """
        return {"content": _text_of(workspaces, name, filepath)}

    def file_write(filepath: str, content: str) -> dict[str, bool]:
        """Write a text file of the workspace.

        Args:
            filepath: below the workspace; an existing file is replaced
            content: the whole new content
        """
        workspaces.write(name, filepath, content.encode())
        return {"success": True}

    def csv_process(
        filepath: str, columns: list[str] | None = None, where: dict[str, str] | None = None,
        limit: int = _ROWS,
    ) -> dict[str, Any]:  # fmt: skip
        """Read a CSV file of the workspace, choosing columns and rows.

        Args:
            filepath: below the workspace; its first line names the columns
            columns: the columns to return, default all
            where: the value that each of these columns must have
            limit: the greatest number of rows to return
        """
        rows = _rows(_text_of(workspaces, name, filepath))
        return _chosen(rows, columns, where or {}, max(0, min(limit, _ROWS)))

    return [_repeatable(tool_of(each)) for each in (file_read, file_write, csv_process)]


def text_summarize(model: Summarise) -> Tool:
    """Return `text_summarize`, which calls `model` with the text and a length in characters."""

    def perform(arguments: dict[str, Any], _: Caller) -> dict[str, str]:
        return {"summary": model(arguments["text"], arguments.get("length", 500))}

    text = {"type": "string", "maxLength": _TEXT_CHARACTERS, "description": "the text to summarize"}
    length = {"type": "integer", "minimum": 1, "description": "of the summary, in characters"}
    words = {"text": text, "length": length}
    return _repeatable(_tool("text_summarize", "Summarise a long text.", perform, words, ["text"]))


def api_query(client: HttpClient | None = None) -> Tool:
    """Return `api_query`, which makes the requests that `client` allows; without it, none.

    An answer that is not JSON comes as text.
    """
    http = http_tool(client or HttpClient(()))

    def perform(arguments: dict[str, Any], caller: Caller) -> dict[str, Any]:
        answer = http.perform(arguments, caller)
        found = answer.get("response_json", answer.get("body", answer.get("body_base64")))
        return {"status_code": answer["status_code"], "response_json": found}

    words = {
        "url": {"type": "string"},
        "method": {"type": "string", "enum": ["GET", "POST"]},
        "headers": {"type": "object", "additionalProperties": {"type": "string"}},
        "body": {"type": "string"},
    }
    tool = _tool("api_query", "Query an HTTP API.", perform, words, ["url"])
    spec = msgspec.structs.replace(tool.spec, credentials=http.spec.credentials)
    return tool._replace(spec=spec)


def _tool(
    name: str, description: str, perform: Callable[[dict[str, Any], Caller], Any],
    properties: dict[str, Any], required: list[str],
) -> Tool:  # fmt: skip
    parameters = {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False,
    }  # fmt: skip
    spec = ToolSpec(
        name=name, description=description, parameters=parameters,
        owner=ToolOwner.DEVELOPER, state=ToolState.TRUSTED,
    )  # fmt: skip
    return Tool(spec, perform)


def _repeatable(tool: Tool) -> Tool:
    """Return the tool as one that may be called again when the outcome of a call is unknown."""
    return tool._replace(spec=msgspec.structs.replace(tool.spec, idempotent=True))


def _text_of(workspaces: Workspaces, name: str, path: str) -> str:
    try:
        return workspaces.read(name, path).decode()
    except UnicodeDecodeError:
        raise WorkspaceError(f"{path!r} is not a text file: it is not valid UTF-8") from None


def _rows(text: str) -> "csv.DictReader[str]":
    return csv.DictReader(io.StringIO(text, newline=""), restkey="", restval="")


def _chosen(
    rows: "csv.DictReader[str]", columns: list[str] | None, where: dict[str, str], limit: int
) -> dict[str, Any]:
    names = list(rows.fieldnames or ())
    if unknown := {*(columns or ()), *where} - set(names):
        raise ToolArgumentsInvalid(
            f"unknown column: {', '.join(sorted(unknown))}; known are {', '.join(names)}"
        )
    wanted = columns or names
    found: list[dict[str, str]] = []
    for row in rows:
        if all(row[column] == value for column, value in where.items()):
            if len(found) == limit:
                return {"rows": found, "more": True}
            found.append({column: row[column] for column in wanted})
    return {"rows": found, "more": False}
