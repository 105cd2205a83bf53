"""`AgentTools`: what an agent's programs may call: its actions, made tools and the caller's tools."""

from collections.abc import Callable, Iterable
from typing import Any

from ...policies.errors import ToolError, ToolNotFound
from ..making.builtin import Summarise, text_summarize
from ..sandbox.sandbox import Sandbox
from ..schemas.spec import ToolOwner, ToolSpec, ToolState
from ..skills.skills import SkillSet
from ..tools.caller import Caller, Tool
from ..tools.catalogue import Catalogue
from .research import Research, as_data

ACTIONS = "agent"  # the server that actions seem to be of: the first part of their names
FINAL_ANSWER, BUILD_TOOL = "agent.final_answer", "agent.build_tool"
SEARCH_WEB, READ_PAGE = "agent.search_web", "agent.read_page"
FIND_SKILL, LOAD_SKILL = "agent.find_skill", "agent.load_skill"

Build = Callable[[str, str, Caller], ToolSpec]  # name, description, and for whom
SkillsOf = Callable[[], SkillSet]  # of the sandbox, which is made after its tools
_TEXT = {"type": "string", "minLength": 1, "maxLength": 4000}


def actions(
    build: Build, research: Research | None, sandbox: Sandbox, skills: SkillsOf | None = None
) -> list[Tool]:
    """Return the tools by which a program acts on its run; `sandbox` reads pages."""
    looking = [_search_web(research), _read_page(research, sandbox)] if research else []
    loading = [_find_skill(skills), _load_skill(skills)] if skills else []
    return [_final_answer(), _build_tool(build), *looking, *loading]


def _final_answer() -> Tool:
    """A call of this tool is the answer: the run's record has it, so nothing else is done here."""
    spec = _spec(
        FINAL_ANSWER, "End the task with this answer.",
        {"answer": {"description": "the answer, as JSON has it"}}, ["answer"],
    )  # fmt: skip
    return Tool(spec, lambda arguments, caller: "the task is over")


def _build_tool(build: Build) -> Tool:
    spec = _spec(
        BUILD_TOOL, "Write, test and keep a new tool for a job that no tool does.",
        {"name": _TEXT, "description": _TEXT}, ["name", "description"],
    )  # fmt: skip

    def perform(arguments: dict[str, Any], caller: Caller) -> dict[str, Any]:
        made = build(arguments["name"], arguments["description"], caller)
        return {
            "name": made.name, "state": made.state.value, "description": made.description,
            "parameters": made.parameters.get("properties", {}),
        }  # fmt: skip

    return Tool(spec, perform)


def _search_web(research: Research) -> Tool:
    spec = _spec(
        SEARCH_WEB, "Look documents and pages up: a list with title, source and text.",
        {"query": _TEXT}, ["query"],
    )  # fmt: skip
    return Tool(spec, lambda given, caller: as_data(research.search(given["query"], caller)))


def _read_page(research: Research, sandbox: Sandbox) -> Tool:
    spec = _spec(
        READ_PAGE, "The text of a page or document that search_web found.", {"source": _TEXT},
        ["source"],
    )  # fmt: skip
    return Tool(spec, lambda given, caller: research.read(given["source"], sandbox, caller))


def _find_skill(skills: SkillsOf) -> Tool:
    spec = _spec(FIND_SKILL, "Find skills for a task.", {"query": _TEXT}, ["query"])
    return Tool(spec, lambda given, caller: skills().search(given["query"]))


def _load_skill(skills: SkillsOf) -> Tool:
    spec = _spec(
        LOAD_SKILL, "A page of the instructions of a skill, or of a text file of it.",
        {"name": _TEXT, "path": {"type": "string", "maxLength": 4000},
         "page": {"type": "integer", "minimum": 1}},
        ["name"],
    )  # fmt: skip

    def perform(given: dict[str, Any], caller: Caller) -> str:
        return skills().load_page(given["name"], given.get("path", ""), given.get("page", 1))

    return Tool(spec, perform)


def summary_tool(model_of: Callable[[Caller], Summarise]) -> Tool:
    """Return `text_summarize`, which asks the model of the run whose program calls it."""
    spec = text_summarize(lambda text, length: "").spec
    return Tool(spec, lambda given, caller: text_summarize(model_of(caller)).perform(given, caller))


def _spec(name: str, description: str, properties: dict[str, Any], required: list[str]) -> ToolSpec:
    parameters = {
        "type": "object", "properties": properties, "required": required,
        "additionalProperties": False,
    }  # fmt: skip
    # Idempotent: a tool that was made is found, and an answer is given, the second time.
    return ToolSpec(
        name=name, description=description, parameters=parameters, server=ACTIONS, idempotent=True,
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

    def spec_of(self, name: str) -> ToolSpec | None:
        """Return the spec of a tool that can be called; None if there is none."""
        try:
            return self.get(name).spec
        except ToolError:
            return None

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
