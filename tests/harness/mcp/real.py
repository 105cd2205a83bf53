"""MCP servers of others, as a user would configure them; scripts/servers installs them."""

import subprocess
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

_PLACE = ROOT / ".servers"
_NODE = _PLACE / "node_modules" / "@modelcontextprotocol"
# Who started us made the repository; in a cell somebody else looks at it.
_ANYBODYS = {
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
}
NAMES = ("everything", "files", "git", "memory", "sqlite", "time")


def configured(folder: Path, *names: str, sandboxed: bool) -> dict[str, Any]:
    """Return a configuration with these servers, whose data is below `folder`."""
    every = {
        "everything": _node("everything"),
        "files": _node("filesystem", str(folder), write=[str(folder)]),
        "git": _python("git", "--repository", str(folder / "repository"), write=[str(folder)])
        | {"env": _ANYBODYS},
        "memory": _node("memory", write=[str(folder)])
        | {"env": {"MEMORY_FILE_PATH": f"{folder}/memory.jsonl"}},
        "sqlite": _python("sqlite", "--db-path", str(folder / "data.db"), write=[str(folder)]),
        "time": _python("time"),
    }
    chosen = {name: every[name] | {"sandboxed": sandboxed} for name in names or NAMES}
    if not sandboxed:
        for each in chosen.values():
            each.pop("read", None)
            each.pop("write", None)
    return {"mcpServers": chosen}


def open_up(folder: Path) -> None:
    """Let cells write there: those that root starts are an ordinary user's."""
    for each in (folder, *folder.rglob("*")):
        each.chmod(0o777 if each.is_dir() else 0o666)


def _node(package: str, *arguments: str, **said: Any) -> dict[str, Any]:
    main = _NODE / f"server-{package}" / "dist" / "index.js"
    return {"command": "node", "args": [str(main), *arguments], "read": [str(_PLACE)], **said}


def _python(package: str, *arguments: str, **said: Any) -> dict[str, Any]:
    program = _PLACE / "venv" / "bin" / f"mcp-server-{package}"
    return {"command": str(program), "args": list(arguments), "read": [str(_PLACE)], **said}


def make_repository(folder: Path) -> None:
    """Make a git repository with one commit, and a change that is not in it."""

    def git(*arguments: str) -> None:
        subprocess.run(("git", *arguments), cwd=folder, check=True, capture_output=True)

    folder.mkdir()
    git("init", "-b", "main")
    git("config", "user.name", "Ann")
    git("config", "user.email", "ann@example.org")
    (folder / "a.txt").write_text("one\n")
    git("add", "a.txt")
    git("commit", "-m", "first")
    (folder / "a.txt").write_text("two\n")
