"""`run_tool`: runs pip or uv on the host, until a deadline, and returns what it said of errors."""

import os
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from ....policies.errors import PackageError
from .deadline import Deadline

MEMORY_BYTES = 1 << 30  # of a tool, which reads metadata that others wrote
_SECONDS = 600
_MOST_READ = 1 << 20  # bytes of what it said


def run_tool(
    name: str, command: Sequence[str], variables: Mapping[str, str], folder: str, deadline: Deadline
) -> tuple[int, str]:
    """Run a command in `folder` and return its exit code and the end of its standard error.

    It is killed at the deadline, or if that is cancelled; raises PackageError for both.
    """
    with tempfile.TemporaryFile() as stderr:
        with subprocess.Popen(
            command, env=variables, cwd=folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=stderr,
        ) as process:  # fmt: skip
            try:
                _wait(name, process.pid, deadline)
                code = process.wait()
            finally:
                process.kill()
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _MOST_READ))
        return code, stderr.read(_MOST_READ).decode("utf-8", "replace")


def _wait(name: str, pid: int, deadline: Deadline) -> None:
    patience = deadline.left(_SECONDS)
    ended = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        if deadline.cancel >= 0:
            poll.register(deadline.cancel, select.POLLIN)
        readable = [each for each, _ in poll.poll(patience * 1000)]
    finally:
        os.close(ended)
    if ended in readable:
        return
    if readable:
        raise PackageError("cancelled while the set of packages was built")
    deadline.left()
    raise PackageError(f"{name} took longer than {_SECONDS} s")
