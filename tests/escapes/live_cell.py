"""A live cell, read from the host."""

import os
from pathlib import Path

from cellwright import Sandbox
from cellwright.benchmarks.census import children
from cellwright.testing import inspect
from tests.conftest import soon

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


class LiveCell:
    """The pids of a cell in which a program waits, as the host sees them."""

    def __init__(self, sandbox: Sandbox, guest: int) -> None:
        self.keeper, self.nursery, self.launcher = inspect(
            sandbox
        ).supervisor.generation.launcher.pids()
        self.guest = guest
        soon(self._launcher_is_home)
        self.init = next(
            child
            for child in children(self.nursery)
            if os.readlink(f"/proc/{child}/ns/pid") == os.readlink(f"/proc/{guest}/ns/pid")
        )

    def _launcher_is_home(self) -> bool:
        """Tell whether it has left the namespaces of its newest cell, which it enters to fork it."""
        return all(
            os.readlink(f"/proc/{self.guest}/ns/{kind}")
            != os.readlink(f"/proc/{self.launcher}/ns/{kind}")
            for kind in ("ipc", "net", "uts")
        )


def status(pid: int, task: str = "") -> dict[str, str]:
    lines = Path(f"/proc/{pid}/{task}status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
