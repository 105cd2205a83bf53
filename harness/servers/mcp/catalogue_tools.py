"""Arguments of the tools, one struct each: they validate calls, and the tools' schemas come from
them.

The tools `search_tools`, `describe_tools`, `call_tool` and `create_tool`; and skills over MCP: two
tools, and resources with the names `skill://NAME/PATH`.

Every text of a skill is labelled as untrusted.  A URI is parsed, and its parts are looked up; nothing
is opened.
"""

import base64
import functools
import urllib.parse
from functools import partial
from typing import Annotated, Any

import msgspec
from mcp import MCPError, types
from msgspec import UNSET, Meta, UnsetType

from ....policies.errors import PolicyError, SkillError, ToolError
from ....runner.concurrency import CANCEL
from ...privacy.naming import PROGRAM
from ...runs.durable_runs import RunPaused
from ...schemas.spec import ToolSpec
from ...search.documents import summary
from ...skills.manifest import FILE
from ...skills.skills import SkillSet
from ...text.hidden import line
from ...tools.catalogue import Catalogue
from ..http_access import run_in_thread
from ..served_requests import plain
from ..services import ClientServices, ServicesByClient, shown_parameters
from .answers import Called, Created, DescribedTools, FoundTools, LoadedSkill, SavedSkill, answered
from .approvals import (
    SINGLE_APPROVAL,
    ApprovalQuestion,
    Context,
    SingleApproval,
    Verdicts,
    owner_of,
)
from .call_runner import CallContext, Outcome, PausedCall, RequestControl

NEW = "new"
_MAX_NAMES = 20
_MAX_FILES = 1000

# Bounds left out of the schemas, which cost tokens in every conversation; they are enforced
# nevertheless.
_LEFT_OUT = (
    "title", "maxLength", "maxItems", "minItems", "maxProperties", "propertyNames", "minimum",
    "maximum", "exclusiveMinimum",
)  # fmt: skip
_MAY_BE_EMPTY = ("default", "required")

_Name = Annotated[str, Meta(max_length=256)]
_Id = Annotated[str, Meta(max_length=64)]
_Path = Annotated[str, Meta(max_length=1024)]


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The arguments of one call."""


class SearchToolsArguments(Arguments, frozen=True):
    query: Annotated[str, Meta(max_length=4096)]
    limit: Annotated[int, Meta(ge=1, le=50)] = 5


class DescribeToolsArguments(Arguments, frozen=True):
    names: Annotated[list[_Name], Meta(min_length=1, max_length=_MAX_NAMES)]


class RunCodeArguments(Arguments, frozen=True):
    code: str
    language: _Name = "python"
    stdin: str = ""
    session: Annotated[_Id, Meta(description='"new", or the id of one; else a fresh cell')] = ""
    files: Annotated[
        dict[_Path, str],
        Meta(max_length=_MAX_FILES, description="path -> text, put in place first"),
    ] = {}
    collect: Annotated[
        list[_Path], Meta(max_length=64, description="globs of files to return")
    ] = []
    timeout: Annotated[float, Meta(gt=0, description="seconds")] | UnsetType = UNSET
    packages: Annotated[
        list[_Name], Meta(max_length=64, description="of python, that this server allows")
    ] = []


class CallToolArguments(Arguments, frozen=True):
    name: _Name
    arguments: dict[str, Any] = {}


class CreateToolArguments(Arguments, frozen=True):
    name: _Name
    source_code: Annotated[str, Meta(description="Python that defines a function of that name")]
    description: str = ""
    tests: (
        Annotated[
            list[str],
            Meta(
                max_length=64,
                description="programs that assert, run after the source; default the last version's",
            ),
        ]
        | UnsetType
    ) = UNSET
    calls: Annotated[list[_Name], Meta(max_length=64, description="tools that it may call")] = []
    requirements: Annotated[list[_Name], Meta(max_length=64, description="packages")] = []
    allow_similar: bool = False


class LoadSkillArguments(Arguments, frozen=True):
    name: _Name
    path: Annotated[_Path, Meta(description="of a file; default the instructions")] = ""


class SaveSkillArguments(Arguments, frozen=True):
    session: _Id
    name: Annotated[_Name, Meta(description="of a-z, 0-9 and hyphens")]
    description: Annotated[
        str, Meta(max_length=1024, description="what it does, and when to use it")
    ]
    files: (
        Annotated[
            list[_Path],
            Meta(
                max_length=64, description="globs; default the programs that succeeded, as a script"
            ),
        ]
        | UnsetType
    ) = UNSET
    body: Annotated[str, Meta(max_length=65_536, description="instructions in markdown")] = ""
    tests: Annotated[str, Meta(description="a program that asserts")] = ""
    task: Annotated[str, Meta(max_length=4096)] = ""


class SessionsArguments(Arguments, frozen=True):
    close: Annotated[_Id, Meta(description="id of one to end first")] = ""
    branch: Annotated[_Id, Meta(description="id of one to copy")] = ""
    branches: Annotated[int, Meta(ge=1, le=8)] = 1
    pause: Annotated[_Id, Meta(description="id of one to keep on disk until used")] = ""


class ListFilesArguments(Arguments, frozen=True):
    session: _Id


class DownloadFileArguments(Arguments, frozen=True):
    session: _Id
    path: _Path


class UploadFileArguments(Arguments, frozen=True):
    session: _Id
    path: _Path
    text: str | UnsetType = UNSET
    base64: str | UnsetType = UNSET


def read_arguments(kind: type[Arguments], given: dict[str, Any] | None) -> Arguments:
    """Return the validated arguments; raises PolicyError that names the field and the problem."""
    try:
        return msgspec.convert(given or {}, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise PolicyError(f"arguments: {error}{_fields_of(kind, given)}") from None


def _fields_of(kind: type[Arguments], given: object) -> str:
    """Return which fields are unknown, which are missing and which there are, if names are wrong."""
    if not isinstance(given, dict):
        return ""
    fields = {each.name: each.required for each in msgspec.structs.fields(kind)}
    unknown = sorted(set(given) - set(fields))
    missing = [name for name, required in fields.items() if required and name not in given]
    parts = [
        f"unknown: {', '.join(each[:64] for each in unknown[:10])}" if unknown else "",
        f"missing: {', '.join(missing)}" if missing else "",
        f"the fields are {', '.join(fields)}",
    ]
    return "; " + "; ".join(filter(None, parts)) if unknown or missing else ""


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the lean JSON Schema of a struct."""
    _, components = msgspec.json.schema_components([kind])
    schema = components[kind.__name__]
    schema.pop("description", None)  # the docstring addresses readers of the code
    return _lean(schema)


def _lean(schema: dict[str, Any]) -> dict[str, Any]:
    """Leave out titles, bounds and empty defaults, which a model does not need."""
    lean = {key: value for key, value in schema.items() if key not in _LEFT_OUT}
    for key in ("items", "additionalProperties"):
        if isinstance(lean.get(key), dict):
            lean[key] = _lean(lean[key])
    if "properties" in lean:
        lean["properties"] = {name: _lean(each) for name, each in lean["properties"].items()}
    return {key: value for key, value in lean.items() if value or key not in _MAY_BE_EMPTY}


_DESCRIBED_CHARACTERS = 60_000  # characters of one answer, as many as a model reads
_CALL = "call"


def search(asked: SearchToolsArguments, call: CallContext, control: RequestControl) -> Outcome:
    """Find tools; a query without a match returns none and a hint."""
    found = call.services.search(asked.query, asked.limit)
    return answered(
        FoundTools(tools=found["tools"], more=found["more"], hint=found.get("hint", ""))
    )


def describe(asked: DescribeToolsArguments, call: CallContext, control: RequestControl) -> Outcome:
    """Return the description of each named tool for a caller."""
    room = _DESCRIBED_CHARACTERS
    tools: list[dict[str, Any]] = []
    hints: list[str] = []
    for name in dict.fromkeys(asked.names):
        try:
            told = _description_of(call.services.catalogue, name)
        except ToolError as error:
            hints.append(f"{name}: {error.what}")
            continue
        room -= len(repr(told))
        if room < 0 and tools:
            hints.append(f"{name}: does not fit in this answer, ask for it alone")
        else:
            tools.append(told)
    return answered(DescribedTools(tools=tools, hint="; ".join(hints)), failed=not tools)


def _description_of(catalogue: Catalogue, name: str) -> dict[str, Any]:
    spec: ToolSpec = catalogue.get(name).spec
    told: dict[str, Any] = {
        "name": spec.name, "description": spec.description,
        "parameters": shown_parameters(spec),
    }  # fmt: skip
    if spec.output_schema:
        told["result"] = spec.output_schema
    if spec.risky:
        told["risky"] = "each call needs a person's approval"
    if len(repr(told)) > _DESCRIBED_CHARACTERS:
        told = {"name": spec.name, "description": summary(spec.description)}
        told["parameters"] = f"too large: {', '.join(spec.parameters.get('properties', ()))}"[:4000]
    return told


def call_tool(asked: CallToolArguments, call: CallContext, control: RequestControl) -> Outcome:
    """Make one call, or pause it for approval."""
    return _call(asked, call, SingleApproval() if call.can_ask else None, control)


def _call(
    asked: CallToolArguments, call: CallContext, approval: SingleApproval | None,
    control: RequestControl,
) -> Outcome:  # fmt: skip
    tokens = SINGLE_APPROVAL.set(approval), CANCEL.set(control.stop)
    try:
        caller = call.services.caller(call.owner.id, call.traceparent)
        value = call.services.broker.call(asked.name, asked.arguments, caller)
    except RunPaused:
        if approval is None or approval.asked is None:
            raise
        question = ApprovalQuestion(
            _CALL, approval.asked.tool, approval.asked.arguments, approval.asked.reason
        )
        go_on = functools.partial(_go_on, asked, call, approval)
        return PausedCall([question], go_on, _nothing)
    finally:
        SINGLE_APPROVAL.reset(tokens[0])
        CANCEL.reset(tokens[1])
    return answered(Called(result=plain(value)))


def _go_on(
    asked: CallToolArguments, call: CallContext, approval: SingleApproval, verdicts: Verdicts,
    control: RequestControl,
) -> Outcome:  # fmt: skip
    """Make the call again, with all its checks, now that the person has decided."""
    approval.answer(approved=verdicts.get(_CALL, False))
    return _call(asked, call, approval, control)


def create(asked: CreateToolArguments, call: CallContext, control: RequestControl) -> Outcome:
    """Make a tool; it has no more rights than every cell."""
    tests = None if asked.tests is UNSET else asked.tests
    spec = call.services.factory.create_tool(
        asked.name, asked.description, asked.source_code, tests=tests, calls=asked.calls,
        requirements=asked.requirements, allow_similar=asked.allow_similar,
    )  # fmt: skip
    return answered(
        Created(
            name=spec.name, version=spec.version, state=spec.state.value, parameters=spec.parameters
        )
    )


def _nothing() -> None:
    """Do nothing: a single call that is paused has not begun."""


_SCHEME = "skill"
_AUTHOR = "Described by its author: "
_UNTRUSTED = "kept, and not used until a person trusts it: cellwright skills trust"


def load_skill(asked: LoadSkillArguments, call: CallContext, control: RequestControl) -> Outcome:
    """Return the instructions of a skill, or one of its files."""
    return answered(LoadedSkill(text=_text(call.services.sandbox.skills, asked.name, asked.path)))


def save_skill(asked: SaveSkillArguments, call: CallContext, control: RequestControl) -> Outcome:
    """Keep what a session did as a skill of this client; a person decides whether it is trusted."""
    kept = call.sessions.get(call.owner, asked.session).save_skill(
        asked.name, asked.description, files=None if asked.files is UNSET else asked.files,
        body=asked.body, tests=asked.tests, task=asked.task, maker=f"mcp {call.owner.client}",
    )  # fmt: skip
    return answered(
        SavedSkill(reference=kept.skill.reference, version=kept.version, hint=_UNTRUSTED)
    )


class SkillResources:
    """The resources of the client that asks."""

    def __init__(self, services: ServicesByClient) -> None:
        self._services = services

    async def list(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        """Return the SKILL.md of each skill; it names the other files."""
        services = await self._services_of(context)
        found = [
            types.Resource(
                name=each.name, uri=f"{_SCHEME}://{each.name}/{FILE}", mime_type="text/markdown",
                description=_shown(services, _AUTHOR + line(each.description)),
            )
            for each in services.sandbox.skills.usable()
        ]  # fmt: skip
        return types.ListResourcesResult(resources=found)

    async def read(
        self, context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        """Return a file of a skill: text as a labelled block, other files as they are."""
        services = await self._services_of(context)
        most = owner_of(context).answer_bytes * 7 // 10  # base64 takes 4 bytes for 3
        try:
            content = _content(services.sandbox.skills, params.uri, most)
        except (SkillError, PolicyError) as error:
            raise MCPError(types.INVALID_PARAMS, _shown(services, error.what)[:500]) from None
        return types.ReadResourceResult(contents=[_shown_content(services, content)])

    async def _services_of(self, context: Context) -> ClientServices:
        find = partial(self._services.of, owner_of(context).client)
        return await run_in_thread(find)


def _shown(services: ClientServices, text: str) -> str:
    return services.privacy.text(text, PROGRAM) if services.privacy else text


def _shown_content(
    services: ClientServices, content: types.TextResourceContents | types.BlobResourceContents
) -> types.TextResourceContents | types.BlobResourceContents:
    if services.privacy is None:
        return content
    from .answers import private_resource  # seldom needed

    return private_resource(content, services.privacy)


def _content(
    skills: SkillSet, uri: str, most: int
) -> types.TextResourceContents | types.BlobResourceContents:
    parts = urllib.parse.urlsplit(uri)
    name, path = parts.netloc, urllib.parse.unquote(parts.path.removeprefix("/"))
    if parts.scheme != _SCHEME or parts.query or parts.fragment:
        raise PolicyError(f"uri: must be skill://NAME/PATH, got {ascii(uri)[:200]}")
    data = skills.read(name, path)
    if len(data) > most:
        raise PolicyError(f"uri: the file has {len(data)} bytes, an answer at most {most}")
    try:
        data.decode()
    except UnicodeDecodeError:
        return types.BlobResourceContents(uri=uri, blob=base64.b64encode(data).decode())
    text = _text(skills, name, path)
    return types.TextResourceContents(uri=uri, text=text, mime_type="text/markdown")


def _text(skills: SkillSet, name: str, path: str) -> str:
    return skills.load(name) if path in ("", FILE) else skills.read_text(name, path)
