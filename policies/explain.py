"""Explanations: a policy as text, one line for each operation: first the plan of a cell in the order in
which it is built, then what the supervisor enforces."""

from .plan import Plan
from .policy import OPTIONAL_LAYERS, Limits, Policy

_MIB = 1024 * 1024
_LAYERS = {
    "user_ns": "a user namespace of its own: one id, which is nobody on the host",
    "mount_ns": "a mount namespace: of the host only what is named above",
    "pid_ns": "a pid namespace: no process of the host can be named",
    "net_ns": "a network namespace with no interface but its own loopback, down unless the policy asks",
    "ipc_ns": "an ipc namespace: no System V or POSIX queue, segment or semaphore of the host",
    "uts_ns": "a uts namespace: a host name that says nothing",
    "cgroup_ns": "a cgroup namespace: its own cgroup looks like the root",
    "capabilities": "no capability in any set, securebits locked",
    "no_new_privs": "no_new_privs: no set-uid program gives anything",
    "rlimits": "resource limits, listed above",
    "seccomp": "a system call allowlist; what is newer than the list does not exist",
    "listener": "a listener: what the filter refuses, and what is opened, is noted by the supervisor",
    "landlock": "Landlock: a second fence around the same files",
    "cgroup_memory": "a memory cap by cgroup, no swap",
    "cgroup_sockets": "a cap on what TCP and UDP hold, part of the memory cap on v2, beside it on v1",
    "cgroup_cpu": "a CPU share by cgroup",
    "cgroup_pids": "a cap on processes and threads by cgroup",
    "rlimit_as": "instead of a memory cap: RLIMIT_AS, each process's address space",
    "container": "a container, made by an OCI runtime, that holds the launcher and its cells",
    "kernel_shared": "the kernel of the host, as every cell without a container has it",
    "kernel_gvisor": "the kernel of gVisor, and not the host's",
    "kernel_vm": "a kernel of its own, in a virtual machine",
    "rlimit_nproc": "instead of a process cap: RLIMIT_NPROC, counted in the cell's user namespace",
}


def explain(plan: Plan, policy: Policy) -> list[str]:
    """Return the operations of `plan`, one a line, and what the supervisor enforces of its `policy`."""
    return [
        f"policy {plan.policy}",
        "show the interpreter's standard library and shared libraries, read-only",
        *(f"import from {path}" for path in plan.python_path),
        *(f"import {name} ahead, in the launcher" for name in plan.preload),
        *(_bind(each.path, each.writable, each.executable) for each in plan.binds),
        *(_hide(path, any(each.writable for each in plan.binds)) for path in plan.hidden),
        *(_tmpfs(each.target, each.size_bytes, each.inodes) for each in plan.tmpfs),
        *(f"mount {each.target} at {each.also} too" for each in plan.tmpfs if each.also),
        *(("show /dev/tty, and a devpts of its own, for terminals",) if plan.terminal else ()),
        f"host name {plan.hostname}",
        *(f"environment {name}={value}" for name, value in sorted(plan.environment.items())),
        *(
            f"limit {name} to {value}"
            for name, value in (*plan.rlimits, ("NOFILE", plan.open_files))
        ),
        *_network(plan),
        _caps(plan),
        *_ends(policy.limits),
        *_host_rules(policy),
        _filters(plan),
        *(f"layer {name}: {_LAYERS.get(name, name)}" for name in plan.layers),
        *(f"MISSING {name}" for name in missing_layers(plan)),
    ]


def missing_layers(plan: Plan) -> list[str]:
    """Return the optional layers that are not in force."""
    return [layer for layer in OPTIONAL_LAYERS if layer not in plan.layers]


def _network(plan: Plan) -> list[str]:
    if plan.network is None:
        return []
    lines = [f"network: {words}, through the egress process" for words in plan.network.words]
    if plan.network.has_proxy:
        lines.append(
            "network: all through the proxy in HTTPS_PROXY of the host, which resolves the names: "
            "their addresses are not checked"
        )
    return lines


def _hide(path: str, is_writable: bool) -> str:
    """Say what hides `path`: in writable directories only existing entries have covers."""
    if is_writable:
        return f"hide {path}: in writable directories only what exists when the launcher starts"
    return f"hide {path}: it does not exist in the cell"


def _caps(plan: Plan) -> str:
    memory = f"{plan.memory_bytes // _MIB} MiB"
    return f"cap memory at {memory}, tasks at {plan.processes}, CPUs at {plan.cpus:g}"


def _ends(limits: Limits) -> list[str]:
    """Return the limits that end a program, and how much of its output is kept."""
    output, total = f"{limits.output_bytes:,}", f"{limits.output_total_bytes:,}"
    value, artifacts = f"{limits.value_bytes:,}", f"{limits.artifact_bytes:,}"
    return [
        f"end it after {limits.wall_seconds:g} s of wall time or {limits.cpu_seconds:g} s of CPU time",
        f"keep {output} bytes of each output stream, and end it after {total} bytes of both",
        f"keep {value} bytes of its value, and {artifacts} bytes of files that are collected",
        f"kill it after {limits.violations:,} refused attempts",
    ]


def _host_rules(policy: Policy) -> list[str]:
    """Return the rules that hold outside the cell: for tools, packages, personal data and sources."""
    http, tools, privacy, packages = policy.http, policy.tools, policy.privacy, policy.packages
    found = [f"tool http.request: {rule.in_full()}" for rule in http.allow]
    found += [f"tool http.request: {denial}" for denial in http.deny if http.allow]
    if http.allow and http.proxy != "none":
        found.append("tool http.request: all through the proxy in HTTPS_PROXY of the host")
    for rules in filter(None, (tools.rules, *tools.further)):  # each list must allow a call
        found += [f"tools: {rule}" for rule in rules]
        found.append("tools: deny every other")
    found.append(
        f"tools: {tools.calls:,} calls of one execution, {tools.calls_per_second:,g} a second"
    )
    if policy.evaluator.monty:
        found.append("answer pure expressions by Monty, in a process outside every layer")
    if policy.isolation.kernel == "own":
        found.append("isolation: refuse to run under the kernel of the host")
    found += [f"packages: install {requirement}" for requirement in packages.require]
    if packages.allow:
        found.append(f"packages: no others than {', '.join(packages.allow)}")
    if privacy.enabled:
        found.append(f"privacy: tokens in place of {', '.join(privacy.kinds) or 'every kind'}")
        found += [f"privacy: values in place of tokens in {place}" for place in privacy.restore]
    if policy.validation.mode != "off":
        found.append(f"check the source before it runs: {policy.validation.mode}")
    return found


def _filters(plan: Plan) -> str:
    guest, init = len(plan.guest_filter) // 8, len(plan.init_filter) // 8
    return f"filter system calls: {guest} instructions for the guest, {init} for init"


def _bind(path: str, writable: bool, executable: bool) -> str:
    rights = ("read-write" if writable else "read-only") + (", executable" if executable else "")
    return f"show {path}, {rights}"


def _tmpfs(target: str, size_bytes: int, inodes: int) -> str:
    return f"give it {target}, in memory: {size_bytes // 1024} KiB, {inodes} inodes"
