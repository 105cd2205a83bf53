"""Guest payloads, each in a cell of its own, canaries planted on the host: those of `payloads/`, one for
each layer that the others do not miss, and those of ../shared/attacks.

A payload prints one JSON line with its verdict.  `escaped: true` fails; a payload that reports no
verdict must be one that we are known to end.
"""

import contextlib
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cellwright import HostSettings, Sandbox, SandboxResult
from cellwright.benchmarks.census import children
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import MIB, Network, Policy
from cellwright.runner.settings import PoolSettings
from cellwright.testing import inspect
from tests.conftest import CAPS, SHARED, policy_named, with_limits
from tests.network import (
    LOOPBACK,
    NAME,
    answer_with_heads,
    count_bytes,
    resolving,
    serving,
    tcp,
)

pytestmark = pytest.mark.slow

# Payloads for what does not exist, an egress proxy, and what test_payloads_in_sessions.py runs.
_LATER = ("PXY-", "SESS-")
ATTACKS = sorted(
    path for path in (SHARED / "attacks").glob("*.py") if not path.name.startswith(_LATER)
)
OWN = sorted(Path(__file__).with_name("payloads").glob("LAY-*"))
# First ours: the time of an access tells only once that somebody read.
PAYLOADS = [*OWN, *ATTACKS]
# Those that end by being ended: for a flood of refused calls, garbage on the control channel, running
# past the limit, saying too much, or holding more memory than it may.
ENDED = {
    "LAY-14",
    "LAY-18",
    "LAY-23",
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
# The refused call that the result must tell of; those of ../shared/attacks start a child first, which
# is refused where a profile has none.
NOTED = {"LAY-09": "mount", "NS-04": "ptrace", "NS-06": "unshare", "SC-02": "bpf"}
NEEDS = {"LAY-10": "landlock", "LAY-18": "cgroup"}
UNCOUNTED = {"LAY-19"}  # run without cgroups, whatever the host has
# Run where these paths of the writable directory are protected.
PROTECTED = {
    "LAY-39": (
        ".envrc", ".tool/settings", "*/**/.git/config", "*/**/.git/commondir", "*/**/.git/hooks/*[!e]",
    )
}  # fmt: skip
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
NETWORKED = "networked"
_KEY_NAME = "key.example.org"


class Host:
    """Canaries where the guest must not look, and listeners that nobody may reach."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.canary = "SBX" + "CANARY-" + os.urandom(16).hex()
        for directory in PLANTED:
            self._plant_file(stack, Path(directory, "sbx_canary"))
        os.environ["SBX_CANARY_ENV"] = self.canary
        stack.callback(os.environ.pop, "SBX_CANARY_ENV")
        self.shown = stack.enter_context(
            tempfile.TemporaryDirectory(dir="/var/tmp", prefix="cellwright-shown-")
        )
        self.writable = stack.enter_context(
            tempfile.TemporaryDirectory(dir="/var/tmp", prefix="cellwright-writable-")
        )
        self.inner = os.path.join(self.writable, "sub", "inner")
        self.hidden = (
            *self._plant_shown(Path(self.shown)), self._plant_writable(Path(self.writable)),
        )  # fmt: skip
        command = [sys.executable, "-I", "-c", "import time; time.sleep(900)", self.canary]
        self.process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        stack.callback(self.process.kill)
        self.listeners = [stack.enter_context(each) for each in self._listeners()]
        # One host that the policy of `networked` names; the host's own resolver is not asked for it.
        self.named = stack.enter_context(serving(count_bytes))
        self.web = stack.enter_context(serving(answer_with_heads))
        self.key = stack.enter_context(serving(answer_with_heads))  # it gets a credential
        answers = {name: [["127.0.0.1"]] for name in (NAME, _KEY_NAME)}
        resolving(stack.enter_context(pytest.MonkeyPatch.context()), answers)

    def _plant_file(self, stack: contextlib.ExitStack, path: Path) -> None:
        with (
            contextlib.suppress(FileExistsError, PermissionError, FileNotFoundError),
            path.open("x") as file,
        ):
            file.write(self.canary)
            stack.callback(path.unlink, missing_ok=True)

    def _plant_shown(self, shown: Path) -> tuple[str, str]:
        """Make what a policy is to show but for two paths, which are returned; every user may read it."""
        directory, token, program = shown / "secrets", shown / "token", shown / "program"
        directory.mkdir()
        for path in (directory / "key", token):
            path.write_text(self.canary)
            path.chmod(0o644)
        program.write_text("#!/bin/sh\n")
        for path in (shown, program, directory):
            path.chmod(0o755)
        (shown / "deep").mkdir()
        for path in (shown / "pipe", shown / "deep" / "pipe"):
            os.mkfifo(path)
            path.chmod(0o666)
        return str(directory), str(token)

    def _plant_writable(self, writable: Path) -> str:
        """Make what every user may write, but for a path that is returned, and one to be shown alone."""
        secrets = writable / "conf" / "secrets"
        secrets.mkdir(parents=True)
        Path(self.inner).mkdir(parents=True)
        (secrets / "key").write_text(self.canary)
        for path in (writable, *writable.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o644)
        os.mkfifo(f"{self.inner}/pipe")
        os.chmod(f"{self.inner}/pipe", 0o666)
        return str(secrets)

    def _listeners(self) -> Iterator[socket.socket]:
        yield socket.create_server(("127.0.0.1", PORT))
        with contextlib.suppress(OSError):
            yield socket.create_server(("::1", PORT), family=socket.AF_INET6)
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(b"\0sbx-canary")
        abstract.listen()
        yield abstract
        for kind, name in ((socket.SOCK_STREAM, "stream"), (socket.SOCK_DGRAM, "dgram")):
            named = socket.socket(socket.AF_UNIX, kind)
            named.bind(f"{self.shown}/{name}")
            os.chmod(f"{self.shown}/{name}", 0o666)
            if kind == socket.SOCK_STREAM:
                named.listen()
            yield named

    def connections(self) -> int:
        """Count who came to a listener."""
        count = 0
        for listener in self.listeners:
            listener.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                if listener.type == socket.SOCK_DGRAM:
                    listener.recv(100)
                else:
                    listener.accept()[0].close()
                count += 1
        return count


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with contextlib.ExitStack() as stack:
        yield Host(stack)


def policy_for(profile: str, host: Host) -> Policy:
    """Return `profile` as payloads meet it: it shows a directory, has one that may be written, and caps
    that are reached soon.  NETWORKED is the profile `standard` with a way out to one name: on one port
    for any bytes, on another for some requests; and to one that gets a credential."""
    policy = policy_named("standard" if profile == NETWORKED else profile)
    if profile == NETWORKED:
        requests = NetworkRule(
            host=NAME, ports=(host.web.port,), schemes=("http",), methods=("GET",), paths=("/public/*",)
        )  # fmt: skip
        key = NetworkRule(host=_KEY_NAME, ports=(host.key.port,), schemes=("http",))
        network = Network(allow=(tcp(host.named.port), requests, key), addresses=(LOOPBACK,))
        policy = msgspec.structs.replace(policy, network=network)
    files = msgspec.structs.replace(
        policy.filesystem,
        read=(*policy.filesystem.read, host.inner, host.shown),
        write=(host.writable,),
        hidden=host.hidden,
    )
    policy = msgspec.structs.replace(policy, filesystem=files)
    return with_limits(policy, wall_seconds=34.0, cpu_seconds=60.0, output_total_bytes=96 * MIB)


@pytest.fixture(scope="module", params=["standard", "strict", NETWORKED])
def sandbox(request: pytest.FixtureRequest, host: Host) -> Iterator[Sandbox]:
    """Made after the canaries were planted: what the launcher inherits, it inherits with them."""
    policy = policy_for(request.param, host)
    with Sandbox(policy=policy, credentials=credentials_of(policy)) as box:
        yield box


def credentials_of(policy: Policy) -> list[str]:
    """Return the canary as a credential for the last way out of a policy, if it has some."""
    ways = [rule.each_port()[0] for rule in policy.network.allow]
    return [f"SBXT_TOKEN=SBX_CANARY_ENV@http://{_KEY_NAME}:{port}" for port in ways[2:]]


def settings_for(sandbox: Sandbox) -> dict[str, str]:
    """Return `SETTINGS` with namespaces that a cell does not share: the launcher's, which only root may
    read, or ours, and with what the policy says."""
    pid = (
        inspect(sandbox).supervisor.generation.launcher.pids()[2]
        if os.geteuid() == 0
        else os.getpid()
    )
    links = {name: os.readlink(f"/proc/{pid}/ns/{name}") for name in _NAMESPACES}
    numbers = {name: re.sub("[^0-9]", "", link) for name, link in links.items()}
    limits = sandbox.policy.limits
    return {
        **SETTINGS,
        "SBXT_HOST_NS": json.dumps(numbers),
        "SBXT_SHOWN": sandbox.policy.filesystem.read[-1],
        "SBXT_MEMORY_BYTES": str(limits.memory_bytes),
        "SBXT_PROCESSES": str(limits.processes),
        "SBXT_WRITABLE": sandbox.policy.filesystem.write[-1],
        "SBXT_WORKSPACE_BYTES": str(limits.workspace_bytes),
        "SBXT_OUTPUT_TOTAL_BYTES": str(limits.output_total_bytes),
        "SBXT_LISTENER_PORT": str(PORT),
        **_way_out(sandbox.policy),
    }


def _way_out(policy: Policy) -> dict[str, str]:
    if not policy.network.allow:
        return {}
    named, web, key = (str(rule.each_port()[0]) for rule in policy.network.allow)
    digest = hashlib.sha256(os.environ["SBX_CANARY_ENV"].encode()).hexdigest()
    return {
        "SBXT_NAME": NAME, "SBXT_NAME_PORT": named, "SBXT_WEB_PORT": web, "SBXT_KEY_NAME": _KEY_NAME,
        "SBXT_KEY_PORT": key, "SBXT_KEY_SHA256": digest,
    }  # fmt: skip


def case_of(payload: Path) -> str:
    return payload.name.partition("_")[0]


def run(sandbox: Sandbox, payload: Path) -> SandboxResult:
    """Run `payload` as it expects; one for a shell is besides what variables ask to be run before it."""
    text = payload.read_text()
    if payload.suffix == ".bash":
        variables = dict.fromkeys(("BASH_ENV", "ENV"), "/workspace/before")
        return sandbox.execute(text, "bash", files={"before": text}, env=variables)
    timeout = 7.0 if case_of(payload) in ("RES-14", "RES-15") else None
    header = f"import os; os.environ.update({settings_for(sandbox)!r})\n"
    if case_of(payload) in UNCOUNTED:
        with _without_cgroups(sandbox.policy) as other:
            return other.execute(header + text, timeout=timeout)
    if patterns := PROTECTED.get(case_of(payload)):
        with protecting(sandbox.policy, patterns) as other:
            return other.execute(header + text, timeout=timeout)
    return sandbox.execute(header + text, timeout=timeout)


def protecting(policy: Policy, patterns: tuple[str, ...]) -> Sandbox:
    files = policy.filesystem
    protected = tuple(f"{files.write[-1]}/{each}" for each in patterns)
    files = msgspec.structs.replace(files, protected=protected)
    return Sandbox(policy=msgspec.structs.replace(policy, filesystem=files), pool=0)


def _without_cgroups(policy: Policy) -> Sandbox:
    optional = tuple(dict.fromkeys((*policy.optional_layers, *CAPS)))
    policy = msgspec.structs.replace(policy, optional_layers=optional)
    return Sandbox(policy=policy, pool=0, host=HostSettings(cgroup_root="/nonexistent"))


def left_of_payloads(sandbox: Sandbox) -> list[str]:
    """Return the names that payloads gave to processes of theirs that are there once all should be gone."""
    sandbox.settle()
    names = [Path(f"/proc/{pid}/comm") for pid in descendants(sandbox)]
    return [comm for path in names if (comm := _read(path)).startswith("sbx")]


def descendants(sandbox: Sandbox) -> list[int]:
    found = [inspect(sandbox).supervisor.generation.launcher.pids()[1]]
    for pid in found:
        with contextlib.suppress(FileNotFoundError):
            found += children(pid)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def verdict_of(result: SandboxResult, case: str) -> tuple[bool | None, str]:
    """Return (escaped, detail) as the payload reported it; None if it never came to that."""
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"case"')]
    if not lines:
        return None, f"{result.reason}: {result.error}"
    verdict = json.loads(lines[-1])
    assert verdict["case"] == case
    return verdict["escaped"], verdict["detail"]


def _parameter(payload: Path) -> object:
    needs = [pytest.mark.needs(NEEDS[case_of(payload)])] if case_of(payload) in NEEDS else []
    return pytest.param(payload, id=case_of(payload), marks=needs)


@pytest.mark.parametrize("payload", [_parameter(each) for each in PAYLOADS])
def test_a_payload_stays_inside(
    sandbox: Sandbox, host: Host, payload: Path, record_property: pytest.FixtureRequest
) -> None:
    stays_inside(sandbox, host, payload, record_property)


def stays_inside(
    sandbox: Sandbox, host: Host, payload: Path, record_property: pytest.FixtureRequest,
    allowed: str = "",
) -> None:  # fmt: skip
    """Run `payload` and judge it; `allowed` is a pattern of what it may say that it achieved."""
    case, launcher = case_of(payload), inspect(sandbox).supervisor.generation
    result = run(sandbox, payload)
    escaped, detail = verdict_of(result, case)
    record_property("verdict", f"{escaped} {result.status.value} ({result.reason}) {detail[:120]}")
    assert not escaped or (allowed and re.fullmatch(allowed, detail)), detail
    if escaped is None:
        assert case in ENDED, (result.status, result.reason, result.error, result.stderr[-500:])
        assert result.reason in ("violation", "wall_time", "output", "memory")
    no_programs = case in OF_PROGRAMS and not sandbox.policy.processes.subprocesses
    assert not detail.startswith("REFUSED" if no_programs else ("REFUSED", "SKIP"))
    assert host.canary not in str(result.to_dict())
    assert "FORGED-OK" not in (result.stdout if case == "PROTO-06" else "")
    if case in NOTED and (case.startswith("LAY-") or sandbox.policy.processes.subprocesses):
        assert NOTED[case] in {each.syscall for each in result.violations}
    assert left_of_payloads(sandbox) == []
    assert inspect(sandbox).supervisor.generation is launcher, (
        "it cost the other cells their launcher"
    )
    assert host.connections() == 0
    assert host.process.poll() is None
    assert sandbox.execute("1 + 1").value == 2


@pytest.mark.needs("shared")
@pytest.mark.parametrize("case", ["SIDE-01", "SIDE-03"])
def test_nothing_is_left_for_the_next_cell(sandbox: Sandbox, case: str) -> None:
    (payload,) = (path for path in ATTACKS if path.name.startswith(case))
    for _ in range(2):
        escaped, detail = verdict_of(run(sandbox, payload), case)
        assert not escaped, detail


def test_nothing_of_a_payload_is_in_the_network_of_a_later_cell(sandbox: Sandbox) -> None:
    """More cells than stand ready, so that one would have the network namespace of another."""
    (payload,) = (path for path in OWN if case_of(path) == "LAY-24")
    for _ in range(3 * PoolSettings().size):
        escaped, detail = verdict_of(run(sandbox, payload), "LAY-24")
        assert escaped is False, detail


def test_nothing_of_a_payload_outlives_its_session(sandbox: Sandbox) -> None:
    (payload,) = (path for path in OWN if case_of(path) == "LAY-15")
    launcher = inspect(sandbox).supervisor.generation
    with sandbox.session() as session:
        assert verdict_of(session.execute(payload.read_text()), "LAY-15")[0] is False
    assert left_of_payloads(sandbox) == []
    assert inspect(sandbox).supervisor.generation is launcher, (
        "it cost the other cells their launcher"
    )


# What only programs have, which start others: the profiles for these give it with other limits.
OF_OTHER_PROFILES = ("LAY-30", "LAY-33", "LAY-34", "LAY-35", "LAY-36", "LAY-37", "LAY-39")


@pytest.mark.parametrize("profile", ["workshop", "server"])
def test_a_payload_about_programs_stays_inside_other_profiles(profile: str, host: Host) -> None:
    with Sandbox(policy=policy_for(profile, host), pool=0) as box:
        for payload in OWN:
            if (case := case_of(payload)) in OF_OTHER_PROFILES:
                escaped, detail = verdict_of(run(box, payload), case)
                assert escaped is False, (case, detail)
                assert left_of_payloads(box) == []
