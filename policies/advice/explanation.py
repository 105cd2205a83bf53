"""Explanations: a policy as text, one line for each operation: first the plan of a cell in build
order, then the limits that the supervisor enforces."""

import tomllib
from pathlib import Path

from ..compiling.gpus import vendor_of
from ..plan import Plan
from ..policy import OPTIONAL_LAYERS, Limits, Policy

_MIB = 1024 * 1024


def explain(plan: Plan, policy: Policy) -> list[str]:
    """Return the operations of `plan`, one a line, and the limits of its `policy` that the
    supervisor enforces."""
    layers = tomllib.loads(Path(__file__).with_name("layers.toml").read_text())
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
        *(("let programs trace each other",) if policy.processes.debug else ()),
        *_gpu(plan, policy),
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
        *(f"layer {name}: {layers.get(name, name)}" for name in plan.layers),
        *(f"MISSING {name}" for name in missing_layers(plan)),
    ]


def missing_layers(plan: Plan) -> list[str]:
    """Return the optional layers that are not in force."""
    return [layer for layer in OPTIONAL_LAYERS if layer not in plan.layers]


def _gpu(plan: Plan, policy: Policy) -> list[str]:
    vendor = vendor_of(policy.devices.gpu)
    if vendor is None:
        return []
    tried = f"tried on {vendor.tried}" if vendor.tried else "not tried on any host yet"
    return [
        *(f"show /dev/{node} as a device" for node in plan.devices),
        f"trust the driver of {vendor.name} in the kernel of the host: an error in it leads out",
        "GPU memory: no cap by the kernel; cells share a GPU, and one may take all of its memory",
        f"{vendor.name} GPUs in cells: {tried}",
    ]


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
    """Describe how `path` is hidden: in writable directories only existing entries have covers."""
    if is_writable:
        return f"hide {path}: in writable directories only what exists when the launcher starts"
    return f"hide {path}: it does not exist in the cell"


def _caps(plan: Plan) -> str:
    memory = f"{plan.memory_bytes // _MIB} MiB"
    return f"cap memory at {memory}, tasks at {plan.processes}, CPUs at {plan.cpus:g}"


def _ends(limits: Limits) -> list[str]:
    output, total = f"{limits.output_bytes:,}", f"{limits.output_total_bytes:,}"
    value, artifacts = f"{limits.value_bytes:,}", f"{limits.artifact_bytes:,}"
    return [
        f"end it after {limits.wall_seconds:g} s of wall time or {limits.cpu_seconds:g} s of CPU time",
        f"keep {output} bytes of each output stream, and end it after {total} bytes of both",
        f"keep {value} bytes of its value, and {artifacts} bytes of files that are collected",
        f"kill it after {limits.violations:,} refused attempts",
    ]


def _host_rules(policy: Policy) -> list[str]:
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
