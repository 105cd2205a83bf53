"""`cellwright doctor`: tests each layer by trying, in a throwaway cell, what the layer forbids."""

import argparse
import contextlib
import os
import platform
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import urlsplit

import psutil

from ...policies.errors import CellwrightError, LaunchError, PolicyError, Unenforceable
from ...policies.network.rule import NetworkRule
from ...policies.policy import OPTIONAL_LAYERS, Limits, Network, Policy, Processes
from ...runner.host.loopback_name import LoopbackName, loopback_name
from ...runner.result import SandboxResult
from ...runner.spawn import interpreter
from ..sandbox import inspection
from ..sandbox.sandbox import Sandbox
from ..text.progress import ProgressLine
from ..text.terminal import coloured
from .options import (
    SANDBOX_FAILED,
    SUCCEEDED,
    add_json,
    add_policy,
    policy_of,
    print_json,
)
from .repairs import MOUNT_PROC, apparmor_profile, repair_of_launch, repair_of_layer

if TYPE_CHECKING:
    from ...runner.oci.runtime import OciRuntime
    from ..mcp.config import ServerConfig

_MIB = 1024 * 1024
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_REPORT = "please report this"
IsExpected = Callable[[SandboxResult], bool]


class Check(NamedTuple):
    """The result of one check; `repair` is empty if there is nothing to repair."""

    layer: str
    verdict: Literal["PASS", "WARN", "FAIL"]
    proof: str
    repair: str


def add(parser: argparse.ArgumentParser) -> None:
    add_policy(parser)
    add_json(parser)
    parser.add_argument("--servers", metavar="FILE", help="check these MCP servers too")
    parser.add_argument(
        "--apparmor", action="store_true",
        help="only print an AppArmor profile that permits user namespaces to this Python",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    if options.apparmor:
        print(apparmor_profile(interpreter()), end="")
        return SUCCEEDED
    with ProgressLine("testing layers") as progress:
        *checks, verdict = examine(policy_of(options), progress.say)
        if options.servers:
            progress.say("asking the servers")
            checks += check_servers(options.servers)
    checks.append(verdict)
    report(checks, as_json=options.json)
    return SANDBOX_FAILED if any(check.verdict == "FAIL" for check in checks) else SUCCEEDED


def _value_is(expected: object) -> IsExpected:
    return lambda result: bool(result.value == expected)


def _reason_is(*expected: str) -> IsExpected:
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
_TWO_NAMES = """
import socket
other = 0
try:
    socket.getaddrinfo("denied.invalid", None)
except OSError as error:
    other = error.errno
with socket.create_connection((name, port), 10) as sock:
    said = sock.recv(5).decode()
[said, other]
"""
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")  # as curl(1) reads them
_CGROUPS = repair_of_layer("cgroup_memory")

# layer, what is tried, the program, the test of its result
_ATTEMPTS: tuple[tuple[str, str, str, IsExpected], ...] = (
    ("user_ns", "its only id is an unprivileged one of the host", _IDS_AND_PEERS, _value_is(True)),
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
    ("listener", "the kernel reports a refused ptrace", "import ctypes; ctypes.CDLL(None).ptrace(16, 1, 0, 0)", lambda r: [v.syscall for v in r.violations] == ["ptrace"]),
    ("landlock", "writing to /dev/urandom answers EACCES, which mode and mount would allow", _errno_of("os.open('/dev/urandom', os.O_WRONLY)"), _value_is(13)),
    ("cgroup_memory", "a program that needs twice its cap is killed", f"x = bytearray({256 * _MIB})", _reason_is("memory")),
    ("cgroup_pids", "forking stops at the cap", _FORKS, lambda r: isinstance(r.value, int) and 0 < r.value < 32),
    ("cgroup_cpu", "a busy loop gets half a CPU", _BUSY, lambda r: isinstance(r.value, float) and r.value < 0.4),
)  # fmt: skip


def examine(
    wanted: Policy = Policy(name="strict"),  # noqa: B008 - a constant
    say: Callable[[str], object] = str,
) -> list[Check]:
    """Check every layer; if no launcher starts, that is one failed check with its repair.

    The last check is the verdict: whether a program runs on this host under the policy `wanted`.
    `say` is called with what is tested next.
    """
    checks = [_python(), _kernel(), _machine()]
    policy = Policy(
        name="doctor",
        optional_layers=OPTIONAL_LAYERS,
        processes=Processes(subprocesses=True),
        limits=Limits(memory_bytes=128 * _MIB, processes=32, cpus=0.5, wall_seconds=30),
    )
    try:
        with Sandbox(policy=policy, pool=0) as sandbox:
            checks.append(Check("launcher", "PASS", "it builds the root and forks cells", ""))
            lacking = _why_lacking() if set(OPTIONAL_LAYERS) - set(sandbox.layers) else {}
            for attempt in _ATTEMPTS:
                say(f"testing {attempt[0]}")
                checks.append(_try(sandbox, lacking, *attempt))
            checks.append(_freezer(sandbox))
        checks.append(_sockets())
        checks.append(_egress())
        for name in _HELLO:
            say(f"testing {name}")
            checks.append(_language(name))
        say("testing container runtimes")
        checks += _oci_runtimes()
        checks.append(_daemon())
    except CellwrightError as error:
        message = _in_one_line(error)
        checks.append(Check("launcher", "FAIL", message, repair_of_launch(message)))
    return [*checks, _verdict(wanted)]


def _verdict(wanted: Policy) -> Check:
    """Check that a program runs here, by running one as `cellwright run` does."""
    try:
        with Sandbox(policy=wanted, pool=0) as sandbox:
            result = sandbox.execute("1 + 1")
    except CellwrightError as error:
        why = f"no program runs on this host under the policy {wanted.name}: {_in_one_line(error)}"
        return Check("verdict", "FAIL", why, error.hint.partition("; ")[2] or "see above")
    if result.value == 2:
        return Check(
            "verdict", "PASS", f"programs run on this host under the policy {wanted.name}", ""
        )
    why = f"1 + 1 under the policy {wanted.name}: {result.reason}, {result.error}"
    return Check("verdict", "FAIL", why, _REPORT)


def _in_one_line(error: CellwrightError) -> str:
    if isinstance(error, Unenforceable):
        return "; ".join(f"{layer}: {reason}" for layer, reason in error.gaps)
    return str(error).partition("\n")[0]


def _why_lacking() -> dict[str, str]:
    """Return the layers that this host lacks, with reasons: the gaps that a policy without optional
    layers is refused for."""
    try:
        Sandbox(policy=Policy(name="doctor"), pool=0).close()
    except Unenforceable as refusal:
        return dict(refusal.gaps)
    return {}


def _try(
    sandbox: Sandbox,
    lacking: dict[str, str],
    layer: str,
    proof: str,
    program: str,
    is_expected: IsExpected,
) -> Check:
    if layer not in sandbox.layers:
        why = f"this host lacks it: {lacking.get(layer, 'unknown reason')}"
        return Check(layer, "WARN", why, repair_of_layer(layer))
    result = sandbox.execute(program)
    if is_expected(result):
        return Check(layer, "PASS", proof, "")
    seen = f"not so: {proof}; got {result.reason}, {result.value!r}, {result.error}"
    return Check(layer, "FAIL", seen, repair_of_layer(layer) or _REPORT)


def _python() -> Check:
    version = platform.python_version()
    return Check("python", "PASS", version, "")


def _kernel() -> Check:
    release = os.uname().release
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    if numbers < (5, 19):
        return Check("kernel", "FAIL", release, "Linux 5.19 or newer is needed (Landlock ABI 2)")
    return Check("kernel", "PASS", f"Linux {release}", "")


def _freezer(sandbox: Sandbox) -> Check:
    """Check whether idle sessions can be stopped, which is no layer: they can do no more without."""
    if why := inspection.Inspection(sandbox).no_freezer:
        repair = "idle sessions go on running; use cgroup v2, or mount the freezer of cgroup v1"
        return Check("freezer", "WARN", f"idle sessions are not frozen: {why}", repair)
    return Check("freezer", "PASS", "idle sessions are frozen", "")


def _sockets() -> Check:
    """Check whether the memory of TCP and UDP sockets is counted, and against which cap."""
    policy = Policy(
        name="doctor",
        optional_layers=OPTIONAL_LAYERS,
        network=Network(loopback=True),
        limits=Limits(memory_bytes=64 * _MIB, wall_seconds=30),
    )
    with Sandbox(policy=policy, pool=0) as sandbox:
        if "cgroup_sockets" not in sandbox.layers:
            return Check(
                "cgroup_sockets", "WARN", "the memory of TCP and UDP sockets has no cap", _CGROUPS
            )
        result = sandbox.execute(_DATAGRAMS)
    if result.reason == "memory":
        proof = "the memory of TCP and UDP sockets counts as the cell's"
        return Check("cgroup_sockets", "PASS", proof, "")
    if isinstance(result.value, int) and result.value < 16 * _MIB:
        proof = (
            "the memory of TCP and UDP sockets has a cap of its own, a quarter of the memory cap "
            "(cgroup v1)"
        )
        return Check("cgroup_sockets", "PASS", proof, "")
    seen = f"a cell with a cap of 64 MiB: {result.reason}, {result.value!r} bytes in UDP sockets"
    return Check("cgroup_sockets", "FAIL", seen, _REPORT)


def _oci_runtimes() -> list[Check]:
    """Check each OCI runtime that is installed by running a program in a container that it makes."""
    from ...runner.oci.runtime import KERNELS, find_oci_runtime

    failures: dict[OciRuntime, str] = {}
    for name in KERNELS:
        with contextlib.suppress(LaunchError):
            runtime = find_oci_runtime(name)
            failures[runtime] = _failure_of_runtime(name)
    working = next((each.name for each, why in failures.items() if not why), "")
    return [_oci_runtime(runtime, why, working) for runtime, why in failures.items()]


def _failure_of_runtime(name: str) -> str:
    """Return why a container of this runtime runs no program; empty if it runs one."""
    policy = Policy(name="doctor", optional_layers=OPTIONAL_LAYERS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its holes, which the check names
            with Sandbox(policy=policy, backend="oci", runtime=name, pool=0) as sandbox:
                result = sandbox.execute("1 + 1")
    except CellwrightError as error:
        return _in_one_line(error)
    return "" if result.value == 2 else f"1 + 1: {result.reason}, {result.error}"


def _oci_runtime(runtime: "OciRuntime", failure: str, working: str) -> Check:
    name = f"oci {runtime.name}"
    if failure:
        use = f"--runtime {working}, which works" if working else "install another runtime"
        return Check(name, "WARN", f"{runtime} runs no program: {failure}", use)
    kernel = "the kernel of this host" if runtime.kernel == "shared" else "a kernel of their own"
    proof = f'{runtime}, for Sandbox(backend="oci"): containers have {kernel}'
    if runtime.holes:
        repair = "install a newer version, unless your distribution has repaired this one"
        return Check(name, "WARN", f"{proof}; this version has {runtime.holes}", repair)
    return Check(name, "PASS", proof, "")


def _egress() -> Check:
    """Check that a cell reaches a host that its policy names, and no other, by a server of our own."""
    own = loopback_name()
    if own is None:
        why = "not tried: no name but localhost stands for this host's loopback"
        return Check(
            "egress", "WARN", why, "have this host's name stand for 127.0.1.1 in /etc/hosts"
        )
    family = socket.AF_INET6 if ":" in own.address else socket.AF_INET
    if not _is_reached(own.address, family):
        return Check("egress", "FAIL", "the loopback interface is down", "ip link set lo up")
    with socket.create_server((own.address, 0), family=family) as server:
        port: int = server.getsockname()[1]
        threading.Thread(target=_greet, args=(server,), daemon=True).start()
        with Sandbox(policy=_reaching(own, port), pool=0) as sandbox:
            result = sandbox.execute(_TWO_NAMES, inputs={"name": own.name, "port": port})
        server.shutdown(socket.SHUT_RDWR)
    refused = [each.arguments[:1] for each in result.violations]
    if result.value != ["hello", socket.EAI_NONAME] or ("denied.invalid",) not in refused:
        seen = f"the name {own.name} in a cell: {result.reason}, {result.value!r}, {result.error}"
        return Check("egress", "FAIL", seen, _REPORT)
    proof = "a name that the policy allows is reached, another one is refused"
    proxies = [name for name in _PROXIES if os.environ.get(name)]
    if not proxies:
        return Check("egress", "PASS", f"{proof}; no upstream proxy is configured", "")
    proof += (
        f"; {proxies[0]} names an upstream proxy, but the names of a policy are dialled directly, "
        'or with network.proxy = "environment" through it: it resolves them, and no address is checked'
    )
    return Check(
        "egress", "WARN", proof,
        'name hosts that this host reaches without a proxy, or set network.proxy = "environment"',
    )  # fmt: skip


def _is_reached(address: str, family: int) -> bool:
    """Tell whether the kernel has a route to an address; connecting by UDP sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        return sock.connect_ex((address, 9)) == 0


def _greet(server: socket.socket) -> None:
    with contextlib.suppress(OSError):  # nobody connected
        sock, _ = server.accept()
        with sock:
            sock.sendall(b"hello")


def _reaching(own: LoopbackName, port: int) -> Policy:
    rule = NetworkRule(host=own.name, ports=(port,), schemes=("tcp",))
    return Policy(
        name="doctor",
        optional_layers=OPTIONAL_LAYERS,
        network=Network(allow=(rule,), addresses=(own.network,)),
    )


def _language(name: str) -> Check:
    """Check that the interpreter of another language is installed and runs in a cell."""
    try:
        with Sandbox(policy=Policy(name="doctor", optional_layers=OPTIONAL_LAYERS), pool=0) as box:
            result = box.execute(_HELLO[name], name)
    except CellwrightError as error:
        return Check(name, "WARN", str(error).partition("\n")[0], error.hint)
    if result.stdout == "hello\n":
        return Check(name, "PASS", "its interpreter starts in a cell", "")
    return Check(name, "FAIL", f"{result.reason}: {result.stderr[-200:]}", _REPORT)


_HELLO = {
    "bash": "echo hello", "javascript": "console.log('hello')", "ruby": "puts 'hello'",
    "sh": "echo hello", "typescript": "const text: string = 'hello'; console.log(text)",
}  # fmt: skip


def _daemon() -> Check:
    """Check whether a daemon answers at the default path; cellwright works without one."""
    from ..sandbox.remote.address import default_path

    try:
        path = default_path()
        if not path.exists():
            return Check("daemon", "PASS", f"none at {path}; cellwright works without one", "")
        with Sandbox(connect=path) as sandbox:
            proof = f"one answers at {path} with the policy {sandbox.policy.name}"
            return Check("daemon", "PASS", proof, "")
    except PolicyError as error:
        return Check("daemon", "PASS", f"none: {_in_one_line(error)}", "")
    except CellwrightError as error:
        repair = 'restart it with "cellwright serve", which removes the socket of a daemon that was killed'
        return Check("daemon", "WARN", _in_one_line(error), repair)


def _machine() -> Check:
    try:
        memory = psutil.virtual_memory()
    except OSError as error:
        return Check("machine", "FAIL", f"{error.filename}: {error.strerror}", MOUNT_PROC)
    gib = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    return Check("machine", "PASS", f"{psutil.cpu_count()} CPUs, {gib}", "")


def check_servers(path: str) -> list[Check]:
    """Check the configuration of MCP servers without starting any; raises PolicyError."""
    from ..mcp.config import read_servers

    return [_server(config) for config in read_servers(path)]


def _server(config: "ServerConfig") -> Check:
    name = f"server {config.name}"
    if config.disabled:
        return Check(name, "PASS", "it is disabled", "")
    if config.url:
        return _remote_server(name, config)
    if config.sandboxed:
        return Check(name, "PASS", "it runs in a cell", "")
    proof = "sandboxed is false: it runs on the host with all rights of this user"
    return Check(name, "WARN", proof, "remove sandboxed, and list in read what it needs")


def _remote_server(name: str, config: "ServerConfig") -> Check:
    address = urlsplit(config.url)
    if address.scheme == "https" or address.hostname in _LOOPBACK:
        return Check(name, "PASS", f"it runs elsewhere: {address.hostname}", "")
    proof = f"its connection is not encrypted: {address.hostname}"
    return Check(name, "WARN", proof, "use https, or others on the network can read its headers")


_VERDICTS = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}


def report(checks: list[Check], *, as_json: bool) -> None:
    """Print the checks as a table or as one JSON array."""
    if as_json:
        print_json([check._asdict() for check in checks])
        return
    for check in checks:
        verdict = coloured(check.verdict, _VERDICTS[check.verdict], sys.stdout)
        print(f"{verdict}  {check.layer:14} {check.proof}")
        if check.repair:
            print(f"      {'':14} repair: {check.repair}")
