"""Tools to search among: those of a folder of data, or made up, as many as wanted.

A folder of data holds `bfcl_live_multiple.jsonl.gz` and `bfcl_ans.jsonl.gz`, questions of people and
the functions that answer them (Berkeley Function-Calling Leaderboard, v4), and `mcp-catalogue`, the
tools of MCP servers as they list them, a file each.  It is no part of this repository.
"""

import gzip
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..harness.schemas.spec import ToolOwner, ToolSpec
from ..harness.search.documents import Document, document_of
from ..policies.errors import PolicyError

_ASKED, _ANSWERS, _TOOLS = "bfcl_live_multiple.jsonl.gz", "bfcl_ans.jsonl.gz", "mcp-catalogue"

# What a tool may be about: a copy of one is about another thing.
_SUBJECTS = (  # noqa: SIM905 - a list to read
    "payroll invoice shipment patient flight hotel ticket sensor ledger wallet contract campaign "
    "lead recipe lecture exam match weather route parcel vehicle refund auction museum vaccine "
    "tenant turbine vineyard orchard satellite archive podcast"
).split()
_VERBS = "get list create update delete search send export import archive approve compare".split()  # noqa: SIM905
_OBJECTS = "record report comment attachment member setting schedule alert template".split()  # noqa: SIM905
_INPUTS = {
    "id": "The identifier", "query": "Words to look for", "limit": "The most to return",
    "since": "Only what changed after this time, ISO 8601", "format": "json, csv or text",
}  # fmt: skip


class Questions(NamedTuple):
    """What people asked, and the ids of the documents that answer it."""

    documents: tuple[Document, ...]
    questions: tuple[tuple[str, frozenset[str]], ...]


def questions(data: Path) -> Questions:
    """Return the questions and the functions of a folder; raises PolicyError if it has none."""
    answers = {line["id"]: line["ground_truth"] for line in _lines(data / _ANSWERS)}
    functions: dict[str, dict[str, Any]] = {}
    asked: list[tuple[str, frozenset[str]]] = []
    for line in _lines(data / _ASKED):
        functions |= {each["name"]: each for each in line["function"]}
        said = [
            each["content"] for turn in line["question"] for each in turn if each["role"] == "user"
        ]
        called = {name for call in answers[line["id"]] for name in call}
        asked.append((" ".join(said), frozenset(called)))
    documents = (
        document_of(name, name, each["description"], each["parameters"])
        for name, each in functions.items()
    )
    return Questions(tuple(documents), tuple(asked))


def tool_specs(data: Path | None) -> list[ToolSpec]:
    """Return the tools of the MCP servers of `data`, or made up, as a registry has them."""
    listed = sorted((data / _TOOLS).glob("*.json")) if data else []
    servers = [json.loads(path.read_bytes()) for path in listed]
    return [
        ToolSpec(
            name=f"{each['server']}.{tool['name']}", description=tool.get("description") or "",
            parameters=tool["inputSchema"], output_schema=tool.get("outputSchema"),
            server=each["server"], owner=ToolOwner.SERVER,
        )
        for each in servers for tool in each["tools"]
    ] or [_made_up_spec(each) for each in _made_up()]  # fmt: skip


def _made_up_spec(each: Document) -> ToolSpec:
    properties = {part.name: {"description": part.description} for part in each.parameters}
    return ToolSpec(
        name=each.full_name, description=each.description,
        parameters={"type": "object", "properties": properties}, owner=ToolOwner.SERVER,
    )  # fmt: skip


def catalogue(count: int, data: Path | None) -> tuple[Document, ...]:
    """Return so many tools: those of the MCP servers of `data` and copies about other things, or
    made up."""
    listed = sorted((data / _TOOLS).glob("*.json")) if data else []
    servers = [json.loads(path.read_bytes()) for path in listed]
    tools = [
        document_of(
            f"{each['server']}/{tool['name']}", tool["name"], tool.get("description") or "",
            tool["inputSchema"], server=each["server"], kind="mcp",
        )
        for each in servers for tool in each["tools"]
    ]  # fmt: skip
    return tuple(itertools.islice(_copies(tools or _made_up()), count))


def _copies(tools: list[Document]) -> Iterable[Document]:
    yield from tools
    for number in itertools.count():
        subject = _SUBJECTS[number % len(_SUBJECTS)]
        server = f"{subject}{number // len(_SUBJECTS) or ''}"
        for tool in tools:
            yield Document(
                id=f"{server}/{tool.id}", name=f"{tool.name}_{subject}", kind="mcp",
                description=f"{tool.description} For every {subject}.",
                parameters=tool.parameters, server=f"{tool.server}-{server}",
            )  # fmt: skip


def _made_up() -> list[Document]:
    schema = {"properties": {name: {"description": text} for name, text in _INPUTS.items()}}
    return [
        document_of(
            f"office/{verb}_{thing}", f"{verb}_{thing}",
            f"{verb.capitalize()} a {thing} of the team. Returns what there is, the newest first.",
            schema, server="office", kind="mcp",
        )
        for verb in _VERBS for thing in _OBJECTS
    ]  # fmt: skip


def _lines(path: Path) -> list[Any]:
    try:
        with gzip.open(path, "rt") as file:
            return [json.loads(line) for line in file]
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error.strerror or error}") from None
