"""The nine tools that clients see, whatever the catalogue holds: a list that changes would cost every
client its prompt cache, and the protocol forbids one that differs by connection."""

from typing import NamedTuple

from mcp import types

from . import answers, arguments
from .arguments import schema_of


class ServedTool(NamedTuple):
    """A tool.  `hints` are read_only, destructive and idempotent; `reaches`: tools that it calls may
    act outside this host."""

    name: str
    description: str
    takes: type[arguments.Arguments]
    gives: type[answers.ToolAnswer]
    hints: tuple[bool, bool, bool]
    reaches: bool = False


_READS = (True, False, True)
_ACTS = (False, True, False)
_ADDS = (False, False, True)
_REPLACES = (False, True, True)

SERVED_TOOLS = (
    ServedTool(
        "search_tools",
        "Find tools by what they do, or by name.",
        arguments.SearchToolsArguments,
        answers.FoundTools,
        _READS,
    ),
    ServedTool(
        "describe_tools",
        "Tell the parameters and results of tools.",
        arguments.DescribeToolsArguments,
        answers.DescribedTools,
        _READS,
    ),
    ServedTool(
        "run_code",
        "Run python or another language in a sandbox. Python and javascript can call tools.",
        arguments.RunCodeArguments,
        answers.Ran,
        _ACTS,
        reaches=True,
    ),
    ServedTool(
        "call_tool",
        "Call one tool.",
        arguments.CallToolArguments,
        answers.Called,
        _ACTS,
        reaches=True,
    ),
    ServedTool(
        "create_tool",
        "Test a Python function in a sandbox and keep it as a tool.",
        arguments.CreateToolArguments,
        answers.Created,
        _ADDS,
    ),
    ServedTool(
        "sessions",
        "List your sessions. End, branch or pause one.",
        arguments.SessionsArguments,
        answers.SessionList,
        _ACTS,
    ),
    ServedTool(
        "list_files",
        "List a session's files.",
        arguments.ListFilesArguments,
        answers.FileList,
        _READS,
    ),
    ServedTool(
        "download_file",
        "Get a file of a session.",
        arguments.DownloadFileArguments,
        answers.Downloaded,
        _READS,
    ),
    ServedTool(
        "upload_file",
        "Put a file, text or base64, into a session.",
        arguments.UploadFileArguments,
        answers.Uploaded,
        _REPLACES,
    ),
)
BY_NAME = {each.name: each for each in SERVED_TOOLS}
LOAD_SKILL = ServedTool(
    "load_skill",
    "Get the instructions of a skill, or a file of it.",
    arguments.LoadSkillArguments,
    answers.LoadedSkill,
    _READS,
)
SAVE_SKILL = ServedTool(
    "save_skill",
    "Keep what a session did as a skill, once it works in a fresh cell.",
    arguments.SaveSkillArguments,
    answers.SavedSkill,
    _ADDS,
)
OF_SKILLS = (LOAD_SKILL, SAVE_SKILL)  # only where the server offers skills


def served_tools(*, open_world: bool, has_skills: bool = False) -> list[types.Tool]:
    """Return the list; `open_world`: other servers' tools are in the catalogue."""
    served = (*SERVED_TOOLS, *OF_SKILLS) if has_skills else SERVED_TOOLS
    return [_tool(each, open_world=open_world and each.reaches) for each in served]


def _tool(definition: ServedTool, *, open_world: bool) -> types.Tool:
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
