"""Hooks by which coding agents run each shell command by `cellwright exec`, from hooks.toml."""

import os
import re
import shutil
import sys
import tomllib
from functools import cache
from pathlib import Path

import msgspec

from .....policies.errors import PolicyError

_PLAIN = re.compile(r"[A-Za-z0-9_./+@-]+")  # the path becomes part of shell, Python and JSON
_HERE = Path(__file__).parent


class HookFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of an agent: its text, or the file in this folder that has it; `merge` if the agent may
    have the file already."""

    path: str
    text: str = ""
    source: str = ""
    merge: bool = False


class AgentHook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files of one agent, and notes for the person."""

    files: tuple[HookFile, ...]
    notes: tuple[str, ...]

    def describe(self) -> str:
        """Return the notes and the files, each below the path where it belongs."""
        parts = ["\n".join(f"# {note}" for note in self.notes)]
        for file in self.files:
            where = "to be merged into" if file.merge else "the file"
            parts.append(f"# {where} {file.path}:\n{file.text.strip()}")
        return "\n\n".join(parts)


@cache
def agent_hooks() -> dict[str, AgentHook]:
    """Return the hooks of all agents, as hooks.toml has them."""
    return msgspec.convert(tomllib.loads((_HERE / "hooks.toml").read_text()), dict[str, AgentHook])


def hook_of(agent: str, cellwright: str = "") -> AgentHook:
    """Return the hook of an agent with the paths of this host; `cellwright` is the command, default the
    one that runs.  Raises PolicyError."""
    if agent not in agent_hooks():
        raise PolicyError(f"hook: must be of {', '.join(agent_hooks())}, got {agent!r}")
    program, home = cellwright or _own_command(), os.path.expanduser("~")
    for path in (program, home):
        if not _PLAIN.fullmatch(path):
            raise PolicyError(f"hook: a path must have plain characters only, got {path!r}")

    def written(file: HookFile) -> HookFile:
        text = file.text or (_HERE / file.source).read_text()
        text = text.replace("{cellwright}", program).replace("{home}", home)
        return HookFile(file.path, text, merge=file.merge)

    hook = agent_hooks()[agent]
    return AgentHook(tuple(map(written, hook.files)), hook.notes)


def _own_command() -> str:
    beside = Path(sys.executable).with_name("cellwright")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("cellwright")
    if found is None:
        raise PolicyError("hook: the command cellwright is not in PATH", "install the package")
    return os.path.abspath(found)
