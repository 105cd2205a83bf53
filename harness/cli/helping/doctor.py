"""`cellwright doctor`: tests each layer by trying, in a throwaway cell, what the layer forbids."""

import argparse
import contextlib
import os
import platform
import socket
import sys
import tempfile
import threading
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit

import psutil

from ....policies.compiling.gpus import with_gpu
from ....policies.errors import CellwrightError, LaunchError, PolicyError, Unenforceable
from ....policies.languages.table import language_table
from ....policies.network.rule import NetworkRule
from ....policies.policy import OPTIONAL_LAYERS, Limits, Network, Policy, Processes
from ....runner.egress.addresses import loopback_name
from ....runner.host.interpreters import host_languages
from ....runner.host.runtime import find_runtime
from ....runner.launching.spawn import interpreter
from ....runner.requests.result import SandboxResult
from ...sandbox import inspection
from ...sandbox.sandbox import Sandbox
from ...sandbox.sandbox_arguments import HostSettings
from ...text.terminal_text import ProgressLine, coloured
from ..options import (
    SANDBOX_FAILED,
    SUCCEEDED,
    add_gpu,
    add_json,
    add_policy,
    policy_of,
    print_json,
)
from .repairs import MOUNT_PROC, apparmor_profile, repair_of_launch, repair_of_layer

if TYPE_CHECKING:
    from ....runner.oci.oci_runtime import OciRuntime
    from ...mcp.server_config import ServerConfig

_MIB = 1024 * 1024
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_REPORT = "please report this"
_NO_GPU = "this host has no NVIDIA GPU"  # as the compiler says it
_GPU_SUM = 7 << 20  # the sum of the numbers that its program fills in


class Check(NamedTuple):
    """The result of one check; `repair` is empty if there is nothing to repair."""

    layer: str
    verdict: Literal["PASS", "WARN", "FAIL"]
    proof: str
    repair: str = ""


def add(parser: argparse.ArgumentParser) -> None:
    add_policy(parser)
    add_gpu(parser)
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


_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")  # as curl(1) reads them


def examine(
    wanted: Policy = Policy(name="strict"),  # noqa: B008 - a constant
    say: Callable[[str], object] = str,
) -> list[Check]:
    """Check every layer; if no launcher starts, that is one failed check with its repair.

    The last check is the verdict: whether a program runs on this host under the policy `wanted`. `say`
    is called with the name of the next test.
    """
    checks = [Check("python", "PASS", platform.python_version()), _kernel(), _machine()]
    policy = _policy(
        processes=Processes(subprocesses=True),
        limits=Limits(memory_bytes=128 * _MIB, processes=32, cpus=0.5, wall_seconds=30),
    )
    programs = _programs()
    try:
        with Sandbox(policy=policy, pool=0) as sandbox:
            checks.append(Check("launcher", "PASS", "it builds the root and forks cells"))
            lacking = _why_lacking() if set(OPTIONAL_LAYERS) - set(sandbox.layers) else {}
            for attempt in programs["attempt"]:
                say(f"testing {attempt['layer']}")
                checks.append(_try(sandbox, lacking, attempt))
            checks.append(_freezer(sandbox))
        say("testing images")
        checks.append(_images())
        checks.append(_sockets())
        checks.append(_egress())
        for name, hello in programs["hello"].items():
            say(f"testing {name}")
            checks.append(_language(name, hello))
        checks.append(_languages())
        checks.append(_gpu())
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
        return Check("verdict", "PASS", f"programs run on this host under the policy {wanted.name}")
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


def _try(sandbox: Sandbox, lacking: dict[str, str], attempt: dict[str, Any]) -> Check:
    layer, proof = attempt["layer"], attempt["proof"]
    if layer not in sandbox.layers:
        why = f"this host lacks it: {lacking.get(layer, 'unknown reason')}"
        return Check(layer, "WARN", why, repair_of_layer(layer))
    result = sandbox.execute(attempt["program"])
    if _is_expected(attempt, result):
        return Check(layer, "PASS", proof)
    seen = f"not so: {proof}; got {result.reason}, {result.value!r}, {result.error}"
    return Check(layer, "FAIL", seen, repair_of_layer(layer) or _REPORT)


def _is_expected(attempt: dict[str, Any], result: SandboxResult) -> bool:
    if reason := attempt.get("reason"):
        return bool(result.reason == reason)
    if syscall := attempt.get("syscall"):
        return [each.syscall for each in result.violations] == [syscall]
    if "value" in attempt:
        return bool(result.value == attempt["value"])
    low, high = attempt["between"]
    return isinstance(result.value, int | float) and low < result.value < high


def _programs() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("doctor.toml").read_text())


def _policy(**settings: Any) -> Policy:
    return Policy(name="doctor", optional_layers=OPTIONAL_LAYERS, **settings)


def _kernel() -> Check:
    release = os.uname().release
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    if numbers < (5, 19):
        return Check("kernel", "FAIL", release, "Linux 5.19 or newer is needed (Landlock ABI 2)")
    return Check("kernel", "PASS", f"Linux {release}")


def _freezer(sandbox: Sandbox) -> Check:
    """Check whether idle sessions can be stopped, which is no layer: they can do no more without."""
    if why := inspection.Inspection(sandbox).no_freezer:
        repair = "idle sessions go on running; repair cgroup_pids, use cgroup v2, or mount the freezer of cgroup v1"
        return Check("freezer", "WARN", f"idle sessions are not frozen: {why}", repair)
    return Check("freezer", "PASS", "idle sessions are frozen")


def _sockets() -> Check:
    """Check whether the memory of TCP and UDP sockets is counted, and against which cap."""
    layer, subject = "cgroup_sockets", "the memory of TCP and UDP sockets"
    limits = Limits(memory_bytes=64 * _MIB, wall_seconds=30)
    policy = _policy(network=Network(loopback=True), limits=limits)
    with Sandbox(policy=policy, pool=0) as sandbox:
        if layer not in sandbox.layers:
            return Check(layer, "WARN", f"{subject} has no cap", repair_of_layer("cgroup_memory"))
        result = sandbox.execute(_programs()["datagrams"])
    if result.reason == "memory":
        return Check(layer, "PASS", f"{subject} counts as the cell's")
    if isinstance(result.value, int) and result.value < 16 * _MIB:
        own = "has a cap of its own, a quarter of the memory cap (cgroup v1)"
        return Check(layer, "PASS", f"{subject} {own}")
    seen = f"a cell with a cap of 64 MiB: {result.reason}, {result.value!r} bytes in UDP sockets"
    return Check(layer, "FAIL", seen, _REPORT)


def _oci_runtimes() -> list[Check]:
    """Check each OCI runtime that is installed by running a program in a container that it makes."""
    from ....runner.oci.oci_runtime import KERNELS, find_oci_runtime

    failures: dict[OciRuntime, str] = {}
    for name in KERNELS:
        with contextlib.suppress(LaunchError):
            runtime = find_oci_runtime(name)
            failures[runtime] = _failure_of_runtime(name)
    working = next((each.name for each, why in failures.items() if not why), "")
    return [_oci_runtime(runtime, why, working) for runtime, why in failures.items()]


def _failure_of_runtime(name: str) -> str:
    """Return why a container of this runtime runs no program; empty if it runs one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the check itself names the runtime's holes
            host = HostSettings(backend="oci", runtime=name)
            with Sandbox(policy=_policy(), pool=0, host=host) as sandbox:
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
    proof = f'{runtime}, for HostSettings(backend="oci"): containers have {kernel}'
    if runtime.holes:
        repair = "install a newer version, unless your distribution has repaired this one"
        return Check(name, "WARN", f"{proof}; this version has {runtime.holes}", repair)
    return Check(name, "PASS", proof)


def _images() -> Check:
    """Check that programs of an image are root of ids of its own, by an image that has one file."""
    from ...sandbox.images.image_store import ImageStore

    with tempfile.TemporaryDirectory(prefix="cellwright-doctor-") as folder:
        root = Path(folder, "root")
        root.mkdir()
        root.joinpath("one").write_text("")
        try:
            store = ImageStore(Path(folder, "images"))
            image = store.import_(root)
            policy = _policy(processes=Processes(subprocesses=True))
            with Sandbox(policy=policy, image=image, pool=0) as sandbox:
                result = sandbox.execute(_programs()["image"])
            store.remove(image.digest)
        except CellwrightError as error:
            return Check("images", "WARN", _in_one_line(error), error.hint)
    if result.value == 5:
        count = store.ids.uids[-1][0] + store.ids.uids[-1][2]
        return Check("images", "PASS", f"programs of an image are root of {count:,} ids of its own")
    if result.value == 0 and store.ids.kind == "one":
        why, _, repair = store.ids.why_one.partition("; ")
        return Check("images", "WARN", f"programs of an image are root of one id: {why}", repair)
    seen = f"the owner of a file in an image: {result.reason}, {result.value!r}, {result.error}"
    return Check("images", "FAIL", seen, _REPORT)


def _egress() -> Check:
    """Check that a cell reaches a host that its policy names, and no other, by a server of our own."""
    own = loopback_name()
    if own is None:
        why = "not tried: no name but localhost stands for this host's loopback"
        repair = "have this host's name stand for 127.0.1.1 in /etc/hosts"
        return Check("egress", "WARN", why, repair)
    family = socket.AF_INET6 if ":" in own.address else socket.AF_INET
    if not _is_reached(own.address, family):
        return Check("egress", "FAIL", "the loopback interface is down", "ip link set lo up")
    with socket.create_server((own.address, 0), family=family) as server:
        port: int = server.getsockname()[1]
        threading.Thread(target=_greet, args=(server,), daemon=True).start()
        rule = NetworkRule(host=own.name, ports=(port,), schemes=("tcp",))
        policy = _policy(network=Network(allow=(rule,), addresses=(own.network,)))
        with Sandbox(policy=policy, pool=0) as sandbox:
            result = sandbox.execute(_programs()["names"], inputs={"name": own.name, "port": port})
        server.shutdown(socket.SHUT_RDWR)
    refused = [each.arguments[:1] for each in result.violations]
    if result.value != ["hello", socket.EAI_NONAME] or ("denied.invalid",) not in refused:
        seen = f"the name {own.name} in a cell: {result.reason}, {result.value!r}, {result.error}"
        return Check("egress", "FAIL", seen, _REPORT)
    proof = "a name that the policy allows is reached, another one is refused"
    proxies = [name for name in _PROXIES if os.environ.get(name)]
    if not proxies:
        return Check("egress", "PASS", f"{proof}; no upstream proxy is configured")
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


def _language(name: str, hello: str) -> Check:
    """Check that the interpreter of another language is installed and runs in a cell."""
    try:
        with Sandbox(policy=_policy(), pool=0) as sandbox:
            result = sandbox.execute(hello, name)
    except CellwrightError as error:
        return Check(name, "WARN", str(error).partition("\n")[0], error.hint)
    if result.stdout == "hello\n":
        return Check(name, "PASS", "its interpreter starts in a cell")
    return Check(name, "FAIL", f"{result.reason}: {result.stderr[-200:]}", _REPORT)


def _languages() -> Check:
    """Tell which of the languages without sessions this host has, and what brings the others."""
    found = host_languages(language_table(), find_runtime(interpreter()))
    named = [each for each in found if each.kind != "sessions"]
    here = ", ".join(each.name for each in named if not each.missing) or "none"
    missing = [f"{each.name} ({each.package})" for each in named if each.missing]
    proof = f"this host also has {here}"
    if missing:
        proof += f"; packages of Debian bring {', '.join(missing)}"
    return Check("languages", "PASS", proof)


def _gpu() -> Check:
    """Check that a GPU computes in a cell; cellwright works without one."""
    policy = with_gpu(Policy(name="doctor"), True)
    try:
        with Sandbox(policy=policy, pool=0) as sandbox:
            result = sandbox.execute(_programs()["gpu"])
    except CellwrightError as error:
        why = _in_one_line(error)
        if _NO_GPU in why:
            return Check("gpu", "PASS", f"{_NO_GPU}; cellwright works without one")
        return Check("gpu", "WARN", why, error.hint)
    if result.ok and result.value[1] == _GPU_SUM:
        return Check("gpu", "PASS", f"{result.value[0]} computes in a cell")
    missed = [" ".join((each.syscall, *each.arguments)) for each in result.violations]
    seen = f"{result.reason}, {result.error}; refused: {', '.join(missed[:20]) or 'nothing'}"
    return Check("gpu", "FAIL", f"no GPU computes in a cell: {seen}", _REPORT)


def _daemon() -> Check:
    """Check whether a daemon answers at the default path; cellwright works without one."""
    from ...sandbox.remote.address import default_path

    try:
        path = default_path()
        if not path.exists():
            return Check("daemon", "PASS", f"none at {path}; cellwright works without one")
        with Sandbox(connect=path) as sandbox:
            proof = f"one answers at {path} with the policy {sandbox.policy.name}"
            return Check("daemon", "PASS", proof)
    except PolicyError as error:
        return Check("daemon", "PASS", f"none: {_in_one_line(error)}")
    except CellwrightError as error:
        repair = 'restart it with "cellwright serve", which removes the socket of a daemon that was killed'
        return Check("daemon", "WARN", _in_one_line(error), repair)


def _machine() -> Check:
    try:
        memory = psutil.virtual_memory()
    except OSError as error:
        return Check("machine", "FAIL", f"{error.filename}: {error.strerror}", MOUNT_PROC)
    gib = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    return Check("machine", "PASS", f"{psutil.cpu_count()} CPUs, {gib}")


def check_servers(path: str) -> list[Check]:
    """Check the configuration of MCP servers without starting any; raises PolicyError."""
    from ...mcp.server_config import read_servers

    return [_server(config) for config in read_servers(path)]


def _server(config: "ServerConfig") -> Check:
    name = f"server {config.name}"
    if config.disabled:
        return Check(name, "PASS", "it is disabled")
    if config.url:
        return _remote_server(name, config)
    if config.sandboxed:
        return Check(name, "PASS", "it runs in a cell")
    proof = "sandboxed is false: it runs on the host with all rights of this user"
    return Check(name, "WARN", proof, "remove sandboxed, and list in read what it needs")


def _remote_server(name: str, config: "ServerConfig") -> Check:
    address = urlsplit(config.url)
    if address.scheme == "https" or address.hostname in _LOOPBACK:
        return Check(name, "PASS", f"it runs elsewhere: {address.hostname}")
    proof = f"its connection is not encrypted: {address.hostname}"
    return Check(name, "WARN", proof, "use https, or others on the network can read its headers")


_VERDICTS = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}


def report(checks: list[Check], *, as_json: bool) -> None:
    """Print the checks as a table or as one JSON array."""
    if as_json:
        print_json([check._asdict() for check in checks])
        return
    told: dict[str, str] = {}
    for check in checks:
        verdict = coloured(check.verdict, _VERDICTS[check.verdict], sys.stdout)
        print(f"{verdict}  {check.layer:14} {check.proof}")
        if first := told.get(check.repair):
            print(f"      {'':14} repair: that of {first}")
        elif check.repair:
            print(f"      {'':14} repair: {check.repair}")
            told[check.repair] = check.layer
