"""MCP servers by other authors, configured as a user would, once scripts/servers has installed them."""

from pathlib import Path
from typing import Any

_PLACE = Path(__file__).resolve().parent.parent / ".servers"
_NODE = _PLACE / "node_modules" / "@modelcontextprotocol"
NAMES = ("everything", "files", "git", "memory", "sqlite", "time")
# Who started us made the repository; in a cell somebody else looks at it.
_ANYBODYS = {
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
}


def installed() -> bool:
    return (_PLACE / "stamp").is_file()


def configured(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the table of servers, whose data is below `folder`; each is run in a cell."""
    shown = {"write": [str(folder)]}
    return {
        "everything": _node("everything"),
        "files": _node("filesystem", str(folder)) | shown,
        "git": _python("git", "--repository", str(folder / "repository"))
        | shown | {"env": _ANYBODYS},
        "memory": _node("memory") | shown | {"env": {"MEMORY_FILE_PATH": f"{folder}/memory.jsonl"}},
        "sqlite": _python("sqlite", "--db-path", str(folder / "data.db")) | shown,
        "time": _python("time"),
    }  # fmt: skip


def open_up(folder: Path) -> None:
    """Let cells write there: those that root starts are an ordinary user's."""
    for each in (folder, *folder.rglob("*")):
        each.chmod(0o777 if each.is_dir() else 0o666)


def _node(package: str, *arguments: str) -> dict[str, Any]:
    main = _NODE / f"server-{package}" / "dist" / "index.js"
    return {"command": "node", "args": [str(main), *arguments], "read": [str(_PLACE)]}


def _python(package: str, *arguments: str) -> dict[str, Any]:
    program = _PLACE / "venv" / "bin" / f"mcp-server-{package}"
    return {"command": str(program), "args": list(arguments), "read": [str(_PLACE)]}
