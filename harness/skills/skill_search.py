"""`SkillSearch`: a search index over skills and the tools of a registry, kept up to date.

Tools by which a model finds and reads skills: `skills.search`, `skills.load`, `skills.read`.
"""

import threading
from typing import Any

from ..schemas.spec import ToolOwner, ToolSpec, ToolState
from ..search.search import Model, SearchIndex
from ..tools.tool import Caller, Tool
from ..tools.tool_search import ToolSource, document_of_tool
from .skills import SkillSet, answer_of, documents


class SkillSearch:
    """Finds skills and tools, which it ranks together.  Safe from many threads.

    `model` finds them by meaning too.
    """

    def __init__(self, skills: SkillSet, tools: ToolSource, model: Model | None = None) -> None:
        self._skills = skills
        self._tools = tools
        self._model = model
        self._lock = threading.Lock()
        self._known: tuple[int, tuple[str, ...]] | None = None
        self._index = SearchIndex()

    def search(self, query: str, limit: int = 5) -> dict[str, Any]:
        """Return the matches of a query, the best first, in the form of SkillSet.search."""
        return answer_of(self._current().search(query, limit=limit))

    def _current(self) -> SearchIndex:
        skills = self._skills.usable()
        known = self._tools.revision(), tuple(each.reference for each in skills)
        with self._lock:
            if known != self._known:
                tools = map(document_of_tool, self._tools.list_tools())
                meaning = self._model.meaning() if self._model else None
                self._index = SearchIndex([*documents(skills), *tools], meaning=meaning)
                self._known = known
            return self._index


_TEXT = {"type": "string"}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": 50}


def skill_tools(skills: SkillSet) -> list[Tool]:
    """Return the tools of some skills, for a Broker or `Sandbox(tools=...)`.

    Their results are labelled as untrusted; names and paths are looked up and never opened.
    """

    def search(arguments: dict[str, Any], _: Caller) -> dict[str, Any]:
        return skills.search(arguments["query"], arguments.get("limit", 5))

    def load(arguments: dict[str, Any], _: Caller) -> str:
        return skills.load(arguments["name"])

    def read(arguments: dict[str, Any], _: Caller) -> str:
        return skills.read_text(arguments["name"], arguments["path"])

    return [
        Tool(_spec("search", "Find skills for a task.", {"query": _TEXT, "limit": _LIMIT}), search),
        Tool(_spec("load", "Return the instructions of a skill.", {"name": _TEXT}), load),
        Tool(_spec("read", "Return a text file of a skill.", {"name": _TEXT, "path": _TEXT}), read),
    ]


def _spec(name: str, description: str, properties: dict[str, Any]) -> ToolSpec:
    parameters = {
        "type": "object", "properties": properties, "additionalProperties": False,
        "required": [each for each in properties if each != "limit"],
    }  # fmt: skip
    return ToolSpec(
        name=f"skills.{name}", description=description, parameters=parameters,
        owner=ToolOwner.DEVELOPER, state=ToolState.TRUSTED, idempotent=True,
    )  # fmt: skip
