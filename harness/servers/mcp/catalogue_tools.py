"""`search_tools`, `describe_tools`, `call_tool`, `create_tool`: what can be called, and one more."""

import functools
from typing import Any

from ....policies.errors import ToolError
from ....runner.budget import CANCEL
from ...runs.durable_runs import RunPaused
from ...schemas.spec import ToolSpec
from ...search.documents import summary
from ...tools.catalogue import Catalogue
from .answers import Called, Created, Described, FoundTools, answered, plain
from .approvals import WORD, Question, Verdicts, Word
from .arguments import CallTool, CreateTool, DescribeTools, SearchTools
from .calls import Asking, Outcome
from .request_threads import Line
from .services import Workshop

_DESCRIBED_CHARACTERS = 60_000  # of one answer: what a model can read
_CALL = "call"


def search(workshop: Workshop, asked: SearchTools) -> Outcome:
    """Find tools; a query that nothing answers finds nothing, and says what to do."""
    found = workshop.search(asked.query, asked.limit)
    return answered(
        FoundTools(tools=found["tools"], more=found["more"], hint=found.get("hint", ""))
    )


def describe(workshop: Workshop, asked: DescribeTools) -> Outcome:
    """Tell all that who calls a tool has to know of it."""
    room = _DESCRIBED_CHARACTERS
    tools: list[dict[str, Any]] = []
    hints: list[str] = []
    for name in dict.fromkeys(asked.names):
        try:
            told = _told(workshop.catalogue, name)
        except ToolError as error:
            hints.append(f"{name}: {error.what}")
            continue
        room -= len(repr(told))
        if room < 0 and tools:
            hints.append(f"{name}: does not fit in here, ask for it alone")
        else:
            tools.append(told)
    return answered(Described(tools=tools, hint="; ".join(hints)), failed=not tools)


def _told(catalogue: Catalogue, name: str) -> dict[str, Any]:
    spec: ToolSpec = catalogue.get(name).spec
    told: dict[str, Any] = {
        "name": spec.name, "description": spec.description,
        "parameters": _without(spec.parameters, spec.credentials),
    }  # fmt: skip
    if spec.output_schema:
        told["result"] = spec.output_schema
    if spec.risky:
        told["risky"] = "a person is asked before every call"
    if len(repr(told)) > _DESCRIBED_CHARACTERS:
        told = {"name": spec.name, "description": summary(spec.description)}
        told["parameters"] = f"too large: {', '.join(spec.parameters.get('properties', ()))}"[:4000]
    return told


def _without(parameters: dict[str, Any], hidden: dict[str, str]) -> dict[str, Any]:
    """Return a schema without the arguments that only the host gives."""
    if not hidden:
        return parameters
    kept = {
        key: each for key, each in parameters.get("properties", {}).items() if key not in hidden
    }
    required = [name for name in parameters.get("required", ()) if name not in hidden]
    return parameters | {"properties": kept, "required": required}


def call(
    workshop: Workshop, asked: CallTool, about: tuple[str, str], line: Line, *, can_ask: bool
) -> Outcome:
    """Make one call, or say what has to be asked; `about` is who calls, and his traceparent."""
    return _call(workshop, asked, about, Word() if can_ask else None, line)


def _call(
    workshop: Workshop, asked: CallTool, about: tuple[str, str], word: Word | None, line: Line
) -> Outcome:
    tokens = WORD.set(word), CANCEL.set(line.stop)
    try:
        caller = workshop.caller(*about)
        value = workshop.broker.call(asked.name, asked.arguments, caller)
    except RunPaused:
        if word is None or word.asked is None:
            raise
        question = Question(_CALL, word.asked.tool, word.asked.arguments, word.asked.reason)
        go_on = functools.partial(_go_on, workshop, asked, about, word)
        return Asking([question], go_on, _nothing)
    finally:
        WORD.reset(tokens[0])
        CANCEL.reset(tokens[1])
    return answered(Called(result=plain(value)))


def _go_on(
    workshop: Workshop, asked: CallTool, about: tuple[str, str], word: Word, verdicts: Verdicts,
    line: Line,
) -> Outcome:  # fmt: skip
    """Pass the same gates once more, with what was said."""
    word.answer(approved=verdicts.get(_CALL, False))
    return _call(workshop, asked, about, word, line)


def create(workshop: Workshop, asked: CreateTool) -> Outcome:
    """Make a tool that may do nothing beyond what every cell may."""
    spec = workshop.factory.create_tool(
        asked.name, asked.description, asked.source_code, tests=asked.tests, calls=asked.calls,
        allow_similar=asked.allow_similar,
    )  # fmt: skip
    return answered(
        Created(
            name=spec.name, version=spec.version, state=spec.state.value, parameters=spec.parameters
        )
    )


def _nothing() -> None:
    """Give up a call that has not begun."""
