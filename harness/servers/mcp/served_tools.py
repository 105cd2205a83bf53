"""The tools that clients see.  They are these whatever can be called behind them: a list that changes
would cost every client its prompt cache, and the protocol forbids one that differs by connection."""

from typing import NamedTuple

from mcp import types

from . import answers, arguments
from .arguments import schema_of

INSTRUCTIONS = """\
Programs run in cells of the kernel: no network, no files of the host. To work with tools:
1. search_tools finds them by what they do.
2. describe_tools tells their parameters.
3. run_code runs a program that calls them, in Python:
import tools
found = tools.github.list_issues(repo="a/b")
or call_tool("name", {...}) of that module. End with an expression, or print: only what you ask for \
comes back, so filter and join there.
call_tool makes one call without a program. create_tool keeps a function for later. \
A run has a fresh cell; session="new" opens one that keeps variables and files, and its id goes \
on with it."""


class Definition(NamedTuple):
    """A tool; `hints` are read_only, destructive and idempotent; `reaches`: what it calls may act
    outside this host."""

    name: str
    description: str
    takes: type[arguments.Arguments]
    gives: type[answers.Answer]
    hints: tuple[bool, bool, bool]
    reaches: bool = False


_LOOKS = (True, False, True)
_ACTS = (False, True, False)
_ADDS = (False, False, True)
_REPLACES = (False, True, True)

DEFINITIONS = (
    Definition(
        "search_tools",
        "Find tools by what they do, or by name.",
        arguments.SearchTools,
        answers.FoundTools,
        _LOOKS,
    ),
    Definition(
        "describe_tools",
        "Tell the parameters and results of tools.",
        arguments.DescribeTools,
        answers.Described,
        _LOOKS,
    ),
    Definition(
        "run_code",
        "Run python, javascript, typescript, bash or ruby in a sandbox. "
        "The first two can call tools.",
        arguments.RunCode,
        answers.Ran,
        _ACTS,
        reaches=True,
    ),
    Definition(
        "call_tool",
        "Call one tool.",
        arguments.CallTool,
        answers.Called,
        _ACTS,
        reaches=True,
    ),
    Definition(
        "create_tool",
        "Test a Python function in a sandbox and keep it as a tool.",
        arguments.CreateTool,
        answers.Created,
        _ADDS,
    ),
    Definition(
        "sessions",
        "List your open sessions, or end one.",
        arguments.Sessions,
        answers.Listed,
        _REPLACES,
    ),
    Definition(
        "list_files", "List a session's files.", arguments.ListFiles, answers.FileList, _LOOKS
    ),
    Definition(
        "download_file",
        "Get a file of a session.",
        arguments.DownloadFile,
        answers.Downloaded,
        _LOOKS,
    ),
    Definition(
        "upload_file",
        "Put a file, text or base64, into a session.",
        arguments.UploadFile,
        answers.Uploaded,
        _REPLACES,
    ),
)
BY_NAME = {each.name: each for each in DEFINITIONS}


def definitions(*, open_world: bool) -> list[types.Tool]:
    """Return the list; `open_world`: some of what can be called is a server of others."""
    return [_tool(each, open_world=open_world and each.reaches) for each in DEFINITIONS]


def _tool(definition: Definition, *, open_world: bool) -> types.Tool:
    read_only, destructive, idempotent = definition.hints
    return types.Tool(
        name=definition.name,
        description=definition.description,
        input_schema=schema_of(definition.takes),
        output_schema=schema_of(definition.gives),
        annotations=types.ToolAnnotations(
            read_only_hint=read_only,
            destructive_hint=None if read_only else destructive,
            idempotent_hint=None if read_only else idempotent,
            open_world_hint=open_world,
        ),
    )
