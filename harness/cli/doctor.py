"""`cellwright doctor`: every layer is proved by trying the forbidden thing in a throwaway cell."""

import json
import os
import platform
import sys
from collections.abc import Callable

import psutil

from ...policies.errors import CellwrightError, PolicyError, Unenforceable
from ...policies.policy import OPTIONAL_LAYERS, Limits, Network, Policy, Processes
from ...runner.result import SandboxResult
from ..sandbox.sandbox import Sandbox
from ..text.terminal import coloured
from .repairs import MOUNT_PROC, repair_of_launch, repair_of_layer
from .verdicts import Finding

_MIB = 1024 * 1024
Judge = Callable[[SandboxResult], bool]


def _value_is(expected: object) -> Judge:
    return lambda result: bool(result.value == expected)


def _reason_is(*expected: str) -> Judge:
    return lambda result: result.reason in expected


def _errno_of(attempt: str) -> str:
    """Return a program whose value is the errno of `attempt`, 0 if it succeeds."""
    return f"import os\ntry:\n    {attempt}\n    e = 0\nexcept OSError as error:\n    e = error.errno\ne"


def _status(field: str) -> str:
    return f"[l.split()[1] for l in open('/proc/self/status') if l.startswith('{field}:')][0]"


_CAPABILITY_SETS = " ".join(f"Cap{name}" for name in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
_IDS_AND_PEERS = (
    "import os; os.getuid() == 1000 and '4294967295' not in open('/proc/self/uid_map').read()"
)
_SYSV = "import ctypes; ctypes.CDLL(None).shmget(0x5BCA0001, 1, 0)"
_CORE = "import resource; resource.getrlimit(resource.RLIMIT_CORE)[1]"
_BUSY = "import time\nused, end = time.process_time(), time.monotonic() + 0.5\nwhile time.monotonic() < end: pass\ntime.process_time() - used"
_FORKS = "import os, time\nn = 0\ntry:\n    while n < 60:\n        if os.fork() == 0: time.sleep(9)\n        n += 1\nexcept OSError:\n    pass\nn"
_DATAGRAMS = """
import socket
held, kept = 0, []
sender = socket.socket(type=socket.SOCK_DGRAM)
sender.setblocking(False)
try:
    while True:
        kept.append(socket.socket(type=socket.SOCK_DGRAM))
        kept[-1].setblocking(False)
        kept[-1].bind(("127.0.0.1", 0))
        for _ in range(100):
            sender.sendto(bytes(1000), kept[-1].getsockname())
except OSError:  # as many as there are descriptors for
    pass
for each in kept:
    try:
        while True:
            held += len(each.recv(1000))
    except OSError:
        pass
held
"""
_CGROUPS = repair_of_layer("cgroup_memory")

# layer, what is tried, the program, what must come of it
_ATTEMPTS: tuple[tuple[str, str, str, Judge], ...] = (
    ("user_ns", "its only id is nobody's on the host", _IDS_AND_PEERS, _value_is(True)),
    ("mount_ns", "opening /etc/shadow answers ENOENT", _errno_of("open('/etc/shadow')"), _value_is(2)),
    ("pid_ns", "it sees two processes, init and itself", "import os; len([p for p in os.listdir('/proc') if p.isdigit()])", _value_is(2)),
    ("net_ns", "connecting to the host's loopback fails", _errno_of("import socket; socket.socket().connect(('127.0.0.1', 1))"), lambda r: bool(r.value)),
    ("ipc_ns", "a System V key of the host is unknown", _SYSV, _value_is(-1)),
    ("uts_ns", "the host name is generic", "import os; os.uname().nodename", _value_is("cell")),
    ("cgroup_ns", "its cgroup looks like the root", "all(line.rstrip().endswith(':/') for line in open('/proc/self/cgroup'))", _value_is(True)),
    ("capabilities", "all five sets are empty", f"sum(int(l.split()[1], 16) for l in open('/proc/self/status') if l[:6] in {_CAPABILITY_SETS!r}.split())", _value_is(0)),
    ("no_new_privs", "NoNewPrivs is 1", _status("NoNewPrivs"), _value_is("1")),
    ("rlimits", "no core file can be written", _CORE, _value_is(1)),
    ("seccomp", "unshare(CLONE_NEWUSER) answers EPERM", "import ctypes; c = ctypes.CDLL(None, use_errno=True); c.unshare(0x10000000); ctypes.get_errno()", _value_is(1)),
    ("listener", "a refused ptrace is told by the kernel", "import ctypes; ctypes.CDLL(None).ptrace(16, 1, 0, 0)", lambda r: [v.syscall for v in r.violations] == ["ptrace"]),
    ("landlock", "writing to /dev/urandom answers EACCES, which mode and mount would allow", _errno_of("os.open('/dev/urandom', os.O_WRONLY)"), _value_is(13)),
    ("cgroup_memory", "a program that needs twice its cap is killed", f"x = bytearray({256 * _MIB})", _reason_is("memory")),
    ("cgroup_pids", "forking stops at the cap", _FORKS, lambda r: isinstance(r.value, int) and 0 < r.value < 32),
    ("cgroup_cpu", "a busy loop gets half a CPU", _BUSY, lambda r: isinstance(r.value, float) and r.value < 0.4),
)  # fmt: skip


def examine(wanted: Policy = Policy(name="strict")) -> list[Finding]:  # noqa: B008 - a constant
    """Try every layer; a launch that fails is itself a finding, with its repair.

    The last finding is the verdict: whether a program runs on this host under the policy `wanted`.
    """
    findings = [_python(), _kernel(), _machine()]
    policy = Policy(
        name="doctor",
        optional_layers=OPTIONAL_LAYERS,
        processes=Processes(subprocesses=True),
        limits=Limits(memory_bytes=128 * _MIB, processes=32, cpus=0.5, wall_seconds=30),
    )
    try:
        with Sandbox(policy=policy, pool=0) as sandbox:
            findings.append(Finding("launcher", "PASS", "it built the root and forks cells", ""))
            lacking = _why_lacking() if set(OPTIONAL_LAYERS) - set(sandbox.layers) else {}
            findings += [_try(sandbox, lacking, *attempt) for attempt in _ATTEMPTS]
        findings.append(_sockets())
        findings += [_language(name) for name in _HELLO]
        findings.append(_daemon())
    except CellwrightError as error:
        message = _in_one_line(error)
        findings.append(Finding("launcher", "FAIL", message, repair_of_launch(message)))
    return [*findings, _verdict(wanted)]


def _verdict(wanted: Policy) -> Finding:
    """Tell whether a program runs here, by running one as `cellwright run` does."""
    try:
        with Sandbox(policy=wanted, pool=0) as sandbox:
            result = sandbox.execute("1 + 1")
    except CellwrightError as error:
        why = f"no program runs here under the policy {wanted.name}: {_in_one_line(error)}"
        return Finding("verdict", "FAIL", why, error.hint.partition("; ")[2] or "see above")
    if result.value == 2:
        return Finding("verdict", "PASS", f"programs run here, under the policy {wanted.name}", "")
    why = f"1 + 1 under the policy {wanted.name}: {result.reason}, {result.error}"
    return Finding("verdict", "FAIL", why, "please report this")


def _in_one_line(error: CellwrightError) -> str:
    if isinstance(error, Unenforceable):
        return "; ".join(f"{layer}: {reason}" for layer, reason in error.gaps)
    return str(error).partition("\n")[0]


def _why_lacking() -> dict[str, str]:
    """Return what this host lacks, with the reason: what a policy that needs all is refused with."""
    try:
        Sandbox(policy=Policy(name="doctor"), pool=0).close()
    except Unenforceable as refusal:
        return dict(refusal.gaps)
    return {}


def _try(
    sandbox: Sandbox, lacking: dict[str, str], layer: str, proof: str, program: str, judge: Judge
) -> Finding:
    if layer not in sandbox.layers:
        why = f"this host does not have it: {lacking.get(layer, 'no reason is known')}"
        return Finding(layer, "WARN", why, repair_of_layer(layer))
    result = sandbox.execute(program)
    if judge(result):
        return Finding(layer, "PASS", proof, "")
    seen = f"{proof}: no, {result.reason}, {result.value!r}, {result.error}"
    return Finding(layer, "FAIL", seen, repair_of_layer(layer) or "please report this")


def _python() -> Finding:
    version = platform.python_version()
    return Finding("python", "PASS", version, "")


def _kernel() -> Finding:
    release = os.uname().release
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    if numbers < (5, 19):
        return Finding("kernel", "FAIL", release, "Linux 5.19 or newer is needed (Landlock ABI 2)")
    return Finding("kernel", "PASS", f"Linux {release}", "")


def _sockets() -> Finding:
    """Tell whether what TCP and UDP hold is counted, and as what."""
    policy = Policy(
        name="doctor",
        optional_layers=OPTIONAL_LAYERS,
        network=Network(loopback=True),
        limits=Limits(memory_bytes=64 * _MIB, wall_seconds=30),
    )
    with Sandbox(policy=policy, pool=0) as sandbox:
        if "cgroup_sockets" not in sandbox.layers:
            return Finding(
                "cgroup_sockets", "WARN", "nothing counts what TCP and UDP hold", _CGROUPS
            )
        result = sandbox.execute(_DATAGRAMS)
    if result.reason == "memory":
        proof = "what TCP and UDP hold counts as the cell's memory"
        return Finding("cgroup_sockets", "PASS", proof, "")
    if isinstance(result.value, int) and result.value < 16 * _MIB:
        proof = (
            "what TCP and UDP hold is counted apart, up to a quarter of the memory cap (cgroup v1)"
        )
        return Finding("cgroup_sockets", "PASS", proof, "")
    seen = f"a cell that may have 64 MiB: {result.reason}, {result.value!r} bytes held by UDP"
    return Finding("cgroup_sockets", "FAIL", seen, "please report this")


def _language(name: str) -> Finding:
    """Tell whether the interpreter of another language is there, and runs in a cell."""
    try:
        with Sandbox(policy=Policy(name="doctor", optional_layers=OPTIONAL_LAYERS), pool=0) as box:
            result = box.execute(_HELLO[name], name)
    except CellwrightError as error:
        return Finding(name, "WARN", str(error).partition("\n")[0], error.hint)
    if result.stdout == "hello\n":
        return Finding(name, "PASS", "its interpreter starts in a cell", "")
    return Finding(name, "FAIL", f"{result.reason}: {result.stderr[-200:]}", "please report this")


_HELLO = {
    "bash": "echo hello", "javascript": "console.log('hello')", "ruby": "puts 'hello'",
    "sh": "echo hello", "typescript": "const text: string = 'hello'; console.log(text)",
}  # fmt: skip


def _daemon() -> Finding:
    """Tell whether a daemon answers at the default path; nothing needs one."""
    from ..sandbox.remote.address import default_path

    try:
        path = default_path()
        if not path.exists():
            return Finding("daemon", "PASS", f"none listens at {path}; nothing needs one", "")
        with Sandbox(connect=path) as sandbox:
            proof = f"one answers at {path}, with the policy {sandbox.policy.name}"
            return Finding("daemon", "PASS", proof, "")
    except PolicyError as error:
        return Finding("daemon", "PASS", f"none: {_in_one_line(error)}", "")
    except CellwrightError as error:
        repair = 'start it again with "cellwright serve", which removes what a killed one left'
        return Finding("daemon", "WARN", _in_one_line(error), repair)


def _machine() -> Finding:
    try:
        memory = psutil.virtual_memory()
    except OSError as error:
        return Finding("machine", "FAIL", f"{error.filename}: {error.strerror}", MOUNT_PROC)
    gib = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    return Finding("machine", "PASS", f"{psutil.cpu_count()} CPUs, {gib}", "")


_VERDICTS = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}


def report(findings: list[Finding], *, as_json: bool) -> None:
    """Print the findings: a table, or one JSON array."""
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings]))
        return
    for finding in findings:
        verdict = coloured(finding.verdict, _VERDICTS[finding.verdict], sys.stdout)
        print(f"{verdict}  {finding.layer:14} {finding.proof}")
        if finding.repair:
            print(f"      {'':14} repair: {finding.repair}")
