"""The guest payloads of ../shared/attacks, each in a cell of its own, canaries planted on the host.

A payload prints one JSON line with its verdict.  `escaped: true` fails; a payload that reports no
verdict must be one that we are known to end.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cellwright import Sandbox, SandboxResult
from tests.conftest import SHARED, policy_named

pytestmark = [pytest.mark.needs("shared"), pytest.mark.slow]

# Payloads for what does not exist, an egress proxy, and what test_payloads_in_sessions.py runs.
_LATER = ("PXY-", "SESS-")
ATTACKS = sorted(
    path for path in (SHARED / "attacks").glob("*.py") if not path.name.startswith(_LATER)
)
# Those that end by being ended: for a flood of refused calls, garbage on the control channel, or
# running past the limit.
ENDED = {
    "NOTIF-01",
    "NOTIF-03",
    "PROTO-01",
    "PROTO-02",
    "PROTO-03",
    "PROTO-05",
    "PROTO-06",
    "PROTO-13",
    "RES-14",
    "RES-15",
}
# Those that start other programs, which a profile may not show.
OF_PROGRAMS = {"LANG-01"}
PLANTED = ["/", "/etc", "/root", "/home", "/var", "/var/tmp", "/var/lib", "/run", "/opt", "/srv", "/mnt", "/tmp", "/dev/shm", "/usr/local"]  # fmt: skip
# What payloads may expect, and what of the host they are to recognize if they see it.
SETTINGS = {
    "SBXT_INSIDE": "1",
    "SBXT_TIMEOUT_S": "3",
    "SBXT_ALLOW_FDS": "[3]",
    "SBXT_HOST_NODENAME": os.uname().nodename,
}
_NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
PORT = 47391


class Host:
    """Canaries where the guest must not look, and listeners that nobody may reach."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.canary = "SBX" + "CANARY-" + os.urandom(16).hex()
        for directory in PLANTED:
            self._plant_file(stack, Path(directory, "sbx_canary"))
        os.environ["SBX_CANARY_ENV"] = self.canary
        stack.callback(os.environ.pop, "SBX_CANARY_ENV")
        command = [sys.executable, "-I", "-c", "import time; time.sleep(900)", self.canary]
        self.process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        stack.callback(self.process.kill)
        self.listeners = [stack.enter_context(each) for each in self._listeners()]

    def _plant_file(self, stack: contextlib.ExitStack, path: Path) -> None:
        with (
            contextlib.suppress(FileExistsError, PermissionError, FileNotFoundError),
            path.open("x") as file,
        ):
            file.write(self.canary)
            stack.callback(path.unlink, missing_ok=True)

    def _listeners(self) -> Iterator[socket.socket]:
        yield socket.create_server(("127.0.0.1", PORT))
        with contextlib.suppress(OSError):
            yield socket.create_server(("::1", PORT), family=socket.AF_INET6)
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(b"\0sbx-canary")
        abstract.listen()
        yield abstract

    def connections(self) -> int:
        """Count who came to a listener."""
        count = 0
        for listener in self.listeners:
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                count += 1
        return count


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with contextlib.ExitStack() as stack:
        yield Host(stack)


@pytest.fixture(scope="module", params=["standard", "strict"])
def sandbox(request: pytest.FixtureRequest, host: Host) -> Iterator[Sandbox]:
    """Made after the canaries were planted: what the launcher inherits, it inherits with them."""
    policy = policy_named(request.param)
    limits = msgspec.structs.replace(policy.limits, wall_seconds=34.0, cpu_seconds=60.0)
    with Sandbox(policy=msgspec.structs.replace(policy, limits=limits)) as box:
        yield box


def settings_for(sandbox: Sandbox) -> dict[str, str]:
    """Return `SETTINGS` with namespaces that a cell does not share: the launcher's, which only root may
    read, or ours."""
    pid = sandbox._supervisor.generation.launcher.pids()[2] if os.geteuid() == 0 else os.getpid()
    links = {name: os.readlink(f"/proc/{pid}/ns/{name}") for name in _NAMESPACES}
    numbers = {name: re.sub("[^0-9]", "", link) for name, link in links.items()}
    return {**SETTINGS, "SBXT_HOST_NS": json.dumps(numbers)}


def verdict_of(result: SandboxResult, case: str) -> tuple[bool | None, str]:
    """Return (escaped, detail) as the payload reported it; None if it never came to that."""
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"case"')]
    if not lines:
        return None, f"{result.reason}: {result.error}"
    verdict = json.loads(lines[-1])
    assert verdict["case"] == case
    return verdict["escaped"], verdict["detail"]


@pytest.mark.parametrize("payload", ATTACKS, ids=lambda path: path.name.partition("_")[0])
def test_a_payload_stays_inside(
    sandbox: Sandbox, host: Host, payload: Path, record_property: pytest.FixtureRequest
) -> None:
    case = payload.name.partition("_")[0]
    timeout = 7.0 if case in ("RES-14", "RES-15") else None
    header = f"import os; os.environ.update({settings_for(sandbox)!r})\n"
    result = sandbox.execute(header + payload.read_text(), timeout=timeout)
    escaped, detail = verdict_of(result, case)
    record_property("verdict", f"{escaped} {result.status.value} ({result.reason}) {detail[:120]}")
    assert not escaped, detail
    if escaped is None:
        assert case in ENDED, (result.status, result.reason, result.error, result.stderr[-500:])
        assert result.reason in ("violation", "wall_time")
    no_programs = case in OF_PROGRAMS and not sandbox.policy.processes.subprocesses
    assert not detail.startswith("REFUSED" if no_programs else ("REFUSED", "SKIP"))
    assert host.canary not in str(result.to_dict())
    assert "FORGED-OK" not in (result.stdout if case == "PROTO-06" else "")
    assert host.connections() == 0
    assert host.process.poll() is None
    assert sandbox.execute("1 + 1").value == 2


@pytest.mark.parametrize("case", ["SIDE-01", "SIDE-03"])
def test_nothing_is_left_for_the_next_cell(sandbox: Sandbox, case: str) -> None:
    (payload,) = (path for path in ATTACKS if path.name.startswith(case))
    header = f"import os; os.environ.update({SETTINGS!r})\n"
    for _ in range(2):
        escaped, detail = verdict_of(sandbox.execute(header + payload.read_text()), case)
        assert not escaped, detail
