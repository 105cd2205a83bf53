"""Fake servers for one test, and helpers that find the processes they leave behind."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cellwright.harness.mcp.mcp_servers import McpServers
from cellwright.harness.tools.broker import Broker

FAKE = Path(__file__).with_name("fake_server.py")
ANYTHING = {"type": "object"}
Serve = Callable[..., "Fake"]


def tool(name: str, **said: Any) -> dict[str, Any]:
    return {"name": name, "description": f"Does {name}.", "inputSchema": ANYTHING, **said}


class Fake:
    """One fake server called `fake`, what it keeps, and a broker through which it is called."""

    def __init__(self, folder: Path, mode: str, tools: list[Any], **said: Any) -> None:
        self.folder = folder
        self.list(tools)
        options = {name: said.pop(name) for name in list(said) if name in _OPTIONS}
        self.given = {
            "command": sys.executable, "args": ["-I", "-S", str(FAKE), str(folder), mode],
            "sandboxed": False, "timeout": 20, "connect_timeout": 20, "protocol": "legacy", **said,
        }  # fmt: skip
        self.servers = self.again(**options)
        self.broker = Broker(self.servers)

    def again(self, **options: Any) -> McpServers:
        """Make the same servers as another process would."""
        given = {"mcpServers": {"fake": self.given}}
        return McpServers(given, pins=self.folder / "pins.json", **options)

    def list(self, tools: list[Any]) -> None:
        """Have it list these tools when it is next asked."""
        (self.folder / "tools.json").write_text(json.dumps(tools))

    def call(self, name: str, **arguments: Any) -> Any:
        return self.broker.call(f"fake.{name}", arguments)

    @property
    def starts(self) -> int:
        path = self.folder / "starts"
        return len(path.read_bytes()) if path.exists() else 0

    @property
    def pid(self) -> int:
        return self.servers.status()[0].pid


_OPTIONS = ("vault", "elicit", "on_progress", "registry", "launch")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Give a function that makes a fake with these tools; in the end nothing of any is left."""
    made: list[Fake] = []

    def make(*tools: Any, mode: str = "good", **said: Any) -> Fake:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        known = [tool(each) if isinstance(each, str) else each for each in tools or ("echo",)]
        made.append(Fake(folder, mode, known, **said))
        return made[-1]

    yield make
    for fake in made:
        fake.servers.close()
    assert [fake.folder for fake in made if processes_of(fake.folder)] == []


def processes_of(folder: Path) -> list[int]:
    """Return the processes, dead ones that nobody waited for included, that were given a folder."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", name, "cmdline").read_bytes()
            stat = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ours = int(stat[1]) == os.getpid() and stat[0] == "Z"
        if str(folder).encode() in command or ours:
            found.append(int(name))
    return found
