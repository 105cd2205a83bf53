"""`AgentTools`: what an agent's programs may call: its actions, made tools and the caller's tools."""

from collections.abc import Callable, Iterable
from typing import Any

from ...policies.errors import ToolNotFound
from ..schemas.spec import ToolOwner, ToolSpec, ToolState
from ..tools.caller import Caller, Tool
from ..tools.catalogue import Catalogue

FINAL_ANSWER, BUILD_TOOL = "agent.final_answer", "agent.build_tool"

Build = Callable[[str, str, Caller], ToolSpec]  # name, description, and for whom


def actions(build: Build) -> list[Tool]:
    """Return the tools that a program acts on its own run with."""
    return [_final_answer(), _build_tool(build)]


def _final_answer() -> Tool:
    """A call of this tool is the answer: the run's record has it, so nothing else is done here."""
    spec = _spec(
        FINAL_ANSWER, "End the task with this answer.",
        {"answer": {"description": "the answer, as JSON has it"}}, ["answer"],
    )  # fmt: skip
    return Tool(spec, lambda arguments, caller: "the task is over")


def _build_tool(build: Build) -> Tool:
    text = {"type": "string", "minLength": 1, "maxLength": 4000}
    spec = _spec(
        BUILD_TOOL, "Write, test and keep a new tool for a job that no tool does.",
        {"name": text, "description": text}, ["name", "description"],
    )  # fmt: skip

    def perform(arguments: dict[str, Any], caller: Caller) -> dict[str, Any]:
        made = build(arguments["name"], arguments["description"], caller)
        return {
            "name": made.name, "state": made.state.value, "description": made.description,
            "parameters": made.parameters.get("properties", {}),
        }  # fmt: skip

    return Tool(spec, perform)


def _spec(name: str, description: str, properties: dict[str, Any], required: list[str]) -> ToolSpec:
    parameters = {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False,
    }  # fmt: skip
    # Idempotent: a tool that was made is found, and an answer is given, the second time.
    return ToolSpec(
        name=name, description=description, parameters=parameters, server="agent", idempotent=True,
        owner=ToolOwner.DEVELOPER, state=ToolState.TRUSTED,
    )  # fmt: skip


class AgentTools:
    """A catalogue of several; the first that has a name decides what it means."""

    def __init__(self, *catalogues: Catalogue) -> None:
        self._catalogues = catalogues

    def get(self, name: str) -> Tool:
        """Return a tool; raises ToolNotFound."""
        for each in self._catalogues:
            try:
                return each.get(name)
            except ToolNotFound:
                continue
        raise ToolNotFound(f"there is no tool {name!r}", tool=name)

    def specs(self) -> Iterable[ToolSpec]:
        """Return the specs of all, each name once."""
        found: dict[str, ToolSpec] = {}
        for catalogue in self._catalogues:
            for spec in catalogue.specs():
                found.setdefault(spec.name, spec)
        return list(found.values())

    def revision(self) -> int | None:
        """Return a number that changes with each change of the tools; None if one cannot tell."""
        found = [getattr(each, "revision", None) for each in self._catalogues]
        return None if None in found else sum(each() for each in found if each)
