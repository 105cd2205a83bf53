"""Tools and skills: find, describe, call and make them."""

from ....policies.errors import SkillNotFound
from ....runner.audit.spans import span_of
from ....runner.budget import CANCEL
from ...schemas.spec import ToolSpec
from ..plain_values import plain
from ..services import shown_parameters
from .endpoint import ContentAnswer, Endpoint, WebCall
from .messages import (
    CallToolBody,
    CreateToolBody,
    SkillAnswer,
    SkillsAnswer,
    SkillSummary,
    ToolDescription,
    ToolQuery,
    ToolResultAnswer,
    ToolsAnswer,
    ToolSummary,
)

_LINE = 200  # characters of a description in a list


def list_tools(call: WebCall) -> ToolsAnswer:
    """Find tools by what they do; without a query list all that can be called."""
    asked: ToolQuery = call.query
    services = call.state.services.of(call.client)
    if not asked.query:
        specs = [*services.catalogue.specs()]
        shown = [_summary(each.name, each.description) for each in specs[: asked.limit]]
        return ToolsAnswer(tools=shown, more=len(specs) > len(shown))
    found = services.search(asked.query, asked.limit)
    tools = [
        _summary(each["name"], each.get("summary", ""))
        for each in found["tools"] if each.get("kind") != "skill"
    ]  # fmt: skip
    return ToolsAnswer(tools=tools, more=found["more"], hint=found.get("hint", ""))


def show_tool(call: WebCall) -> ToolDescription:
    """Return the parameters and the result of a tool."""
    return _about(call.state.services.of(call.client).catalogue.get(call.path["tool"]).spec)


def call_tool(call: WebCall) -> ToolResultAnswer:
    """Call a tool; a risky one must be called by a program of a run, which can wait for a person."""
    body: CallToolBody = call.body
    services = call.state.services.of(call.client)
    token = CANCEL.set(call.stop)
    try:
        caller = services.caller(call.client, span_of(call.traceparent or None).traceparent or "")
        value = services.broker.call(call.path["tool"], body.arguments, caller)
    finally:
        CANCEL.reset(token)
    return ToolResultAnswer(result=plain(value))


def create_tool(call: WebCall) -> ToolDescription:
    """Test Python source in a cell and keep it as a tool, with no more rights than every cell."""
    body: CreateToolBody = call.body
    spec = call.state.services.of(call.client).factory.create_tool(
        body.name, body.description, body.source_code, tests=body.tests, calls=body.calls,
        requirements=body.requirements, allow_similar=body.allow_similar,
    )  # fmt: skip
    return _about(spec)


def list_skills(call: WebCall) -> SkillsAnswer:
    """List the skills that programs see below /skills."""
    if not call.state.services.has_skills:
        return SkillsAnswer(skills=[])
    skills = call.state.services.of(call.client).sandbox.skills
    return SkillsAnswer(
        skills=[
            SkillSummary(name=each.name, description=each.description) for each in skills.usable()
        ]
    )


def show_skill(call: WebCall) -> SkillAnswer:
    """Return the instructions of a skill, labelled as untrusted text for a model."""
    name = call.path["skill"]
    _require_skills(call)
    text = call.state.services.of(call.client).sandbox.skills.load(name)
    return SkillAnswer(name=name, text=text)


def skill_file(call: WebCall) -> ContentAnswer:
    """Return a file of a skill."""
    _require_skills(call)
    path = call.path["file"]
    skills = call.state.services.of(call.client).sandbox.skills
    return ContentAnswer(skills.read(call.path["skill"], path), path)


def _require_skills(call: WebCall) -> None:
    if not call.state.services.has_skills:
        raise SkillNotFound("this server offers no skills", "its owner adds them by --skills")


def _summary(name: str, description: str) -> ToolSummary:
    return ToolSummary(name=name, summary=description.partition("\n")[0][:_LINE])


def _about(spec: ToolSpec) -> ToolDescription:
    return ToolDescription(
        name=spec.name, description=spec.description, parameters=shown_parameters(spec),
        result=spec.output_schema or {}, risky=spec.risky, owner=spec.owner.value,
        state=spec.state.value, version=spec.version,
    )  # fmt: skip


TOOL_ENDPOINTS = (
    Endpoint(
        "GET", "/v1/tools", "Find tools by what they do, or list them.", ToolsAnswer,
        query=ToolQuery, handler=list_tools,
    ),
    Endpoint(
        "POST", "/v1/tools", "Test Python source in a cell, and keep it as a tool.", ToolDescription,
        CreateToolBody, handler=create_tool, status=201, executes=True,
    ),
    Endpoint("GET", "/v1/tools/{tool}", "Describe a tool.", ToolDescription, handler=show_tool),
    Endpoint(
        "POST", "/v1/tools/{tool}/calls", "Call a tool.", ToolResultAnswer, CallToolBody,
        handler=call_tool, executes=True,
    ),
    Endpoint("GET", "/v1/skills", "List the skills.", SkillsAnswer, handler=list_skills),
    Endpoint(
        "GET", "/v1/skills/{skill}", "Return the instructions of a skill.", SkillAnswer,
        handler=show_skill,
    ),
    Endpoint(
        "GET", "/v1/skills/{skill}/files/{file:path}", "Return a file of a skill.", bytes,
        handler=skill_file,
    ),
)  # fmt: skip
