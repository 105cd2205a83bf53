"""The tools `search_tools`, `describe_tools`, `call_tool` and `create_tool`."""

import functools
from typing import Any

from msgspec import UNSET

from ....policies.errors import ToolError
from ....runner.budget import CANCEL
from ...runs.durable_runs import RunPaused
from ...schemas.spec import ToolSpec
from ...search.documents import summary
from ...tools.catalogue import Catalogue
from ..plain_values import plain
from ..services import ClientServices, shown_parameters
from .answers import Called, Created, DescribedTools, FoundTools, answered
from .approvals import SINGLE_APPROVAL, ApprovalQuestion, SingleApproval, Verdicts
from .arguments import (
    CallToolArguments,
    CreateToolArguments,
    DescribeToolsArguments,
    SearchToolsArguments,
)
from .calls import Outcome, PausedCall
from .request_threads import RequestControl

_DESCRIBED_CHARACTERS = 60_000  # of one answer, as much as a model reads
_CALL = "call"


def search(services: ClientServices, asked: SearchToolsArguments) -> Outcome:
    """Find tools; a query without a match returns none and a hint."""
    found = services.search(asked.query, asked.limit)
    return answered(
        FoundTools(tools=found["tools"], more=found["more"], hint=found.get("hint", ""))
    )


def describe(services: ClientServices, asked: DescribeToolsArguments) -> Outcome:
    """Return what a caller has to know of each named tool."""
    room = _DESCRIBED_CHARACTERS
    tools: list[dict[str, Any]] = []
    hints: list[str] = []
    for name in dict.fromkeys(asked.names):
        try:
            told = _description_of(services.catalogue, name)
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


def call(
    services: ClientServices,
    asked: CallToolArguments,
    about: tuple[str, str],
    control: RequestControl,
    *,
    can_ask: bool,
) -> Outcome:
    """Make one call, or pause it for approval; `about` is the id and the traceparent of the caller."""
    return _call(services, asked, about, SingleApproval() if can_ask else None, control)


def _call(
    services: ClientServices,
    asked: CallToolArguments,
    about: tuple[str, str],
    approval: SingleApproval | None,
    control: RequestControl,
) -> Outcome:
    tokens = SINGLE_APPROVAL.set(approval), CANCEL.set(control.stop)
    try:
        caller = services.caller(*about)
        value = services.broker.call(asked.name, asked.arguments, caller)
    except RunPaused:
        if approval is None or approval.asked is None:
            raise
        question = ApprovalQuestion(
            _CALL, approval.asked.tool, approval.asked.arguments, approval.asked.reason
        )
        go_on = functools.partial(_go_on, services, asked, about, approval)
        return PausedCall([question], go_on, _nothing)
    finally:
        SINGLE_APPROVAL.reset(tokens[0])
        CANCEL.reset(tokens[1])
    return answered(Called(result=plain(value)))


def _go_on(
    services: ClientServices, asked: CallToolArguments, about: tuple[str, str],
    approval: SingleApproval, verdicts: Verdicts, control: RequestControl,
) -> Outcome:  # fmt: skip
    """Make the call again, with all its checks, now that the person has decided."""
    approval.answer(approved=verdicts.get(_CALL, False))
    return _call(services, asked, about, approval, control)


def create(services: ClientServices, asked: CreateToolArguments) -> Outcome:
    """Make a tool; it has no more rights than every cell."""
    tests = None if asked.tests is UNSET else asked.tests
    spec = services.factory.create_tool(
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
