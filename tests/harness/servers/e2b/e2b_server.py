"""A server with E2B's interface, as a user starts it, for the tests of this folder."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"


class E2bServer(NamedTuple):
    """Where it serves, and what its clients need in their environment."""

    url: str
    pid: int

    @property
    def variables(self) -> dict[str, str]:
        return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": KEY}


@contextlib.contextmanager
def serving(*options: str) -> Iterator[E2bServer]:
    command = [sys.executable, "-m", "cellwright", "e2b", "--http", "127.0.0.1:0", *options]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "E2B_API_KEY": KEY}
    )
    try:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"E2B_API_URL=(\S+)", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        yield E2bServer(found[1], process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=30)
