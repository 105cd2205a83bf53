"""Tools by which a model finds and reads skills: `skills.search`, `skills.load`, `skills.read`."""

from typing import Any

from ..schemas.spec import ToolOwner, ToolSpec, ToolState
from ..tools.caller import Caller, Tool
from .skills import SkillSet

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
