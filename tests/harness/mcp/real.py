"""Public MCP servers, configured as a user would; scripts/servers installs them."""

import subprocess
from pathlib import Path
from typing import Any

from cellwright.benchmarks import servers
from cellwright.benchmarks.servers import NAMES, open_up

__all__ = ["NAMES", "configured", "make_repository", "open_up"]


def configured(folder: Path, *names: str, sandboxed: bool) -> dict[str, Any]:
    """Return a configuration with these servers, whose data is below `folder`."""
    every = servers.configured(folder)
    chosen = {name: every[name] | {"sandboxed": sandboxed} for name in names or NAMES}
    if not sandboxed:
        for each in chosen.values():
            each.pop("read", None)
            each.pop("write", None)
    return {"mcpServers": chosen}


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
