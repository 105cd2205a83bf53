"""Layers in force around a cell: the requirements of a policy compared with a host."""

from .errors import Unenforceable
from .host import Host
from .policy import CGROUP, OPTIONAL_LAYERS, Policy, has_sockets

ALWAYS = (
    "user_ns", "mount_ns", "pid_ns", "net_ns", "ipc_ns", "uts_ns", "cgroup_ns",
    "capabilities", "no_new_privs", "rlimits", "seccomp",
)  # fmt: skip
_LANDLOCK_MINIMUM = 2  # ABI 1 refuses every rename between directories, which breaks programs
# Weaker fallbacks, used only if the policy names the cap optional: RLIMIT_AS counts the address space,
# not the memory, of each process alone; RLIMIT_NPROC counts per user namespace since Linux 5.14, so
# per cell.
_FALLBACKS = {"cgroup_memory": "rlimit_as", "cgroup_pids": "rlimit_nproc"}
_OWN_KERNEL = (
    'only [isolation] kernel = "any" permits that; "own" needs an OCI runtime such as runsc'
)


def layers_in_force(policy: Policy, host: Host) -> tuple[str, ...]:
    """Return the layers in force; raises Unenforceable if required layers are missing."""
    missing = _missing(host)
    if policy.isolation.kernel == "own" and host.kernel == "shared":
        raise Unenforceable((("own_kernel", "cells share the kernel of this host"),), _OWN_KERNEL)
    gaps = [gap for gap in missing.items() if gap[0] not in policy.optional_layers]
    if gaps:
        raise Unenforceable(tuple(gaps), _way_out([layer for layer, _ in gaps]))
    present = tuple(layer for layer in OPTIONAL_LAYERS if layer not in missing)
    fallback = tuple(weaker for layer, weaker in _FALLBACKS.items() if layer in missing)
    kernel = () if host.kernel == "shared" else (f"kernel_{host.kernel}",)
    return ALWAYS + present + _of_sockets(policy, present) + fallback + kernel


def _of_sockets(policy: Policy, present: tuple[str, ...]) -> tuple[str, ...]:
    """Return the layer that limits socket buffers, if a cell has TCP and UDP."""
    counted = has_sockets(policy) and "cgroup_memory" in present
    return ("cgroup_sockets",) if counted else ()


def _way_out(layers: list[str]) -> str:
    """Return how to repair the gaps and, if all are optional layers, the flag and the field that let
    the policy go on without them."""
    repair = '"cellwright doctor" says how to repair it'
    if not set(layers) <= set(OPTIONAL_LAYERS):
        return repair
    names = dict.fromkeys(CGROUP if each.startswith(CGROUP) else each for each in layers)
    flags = " ".join(f"--optional {name}" for name in names)
    fields = ", ".join(f'"{name}"' for name in names)
    fields = f"optional_layers=[{fields}]"
    return f"{repair}; to go on without: {flags}, or in Python SandboxConfig({fields})"


def _missing(host: Host) -> dict[str, str]:
    reasons = {
        "user_ns": host.user_namespaces,
        "seccomp": host.seccomp,
        "listener": host.listener,
        "landlock": "" if host.landlock_abi >= _LANDLOCK_MINIMUM else _no_landlock(host),
    }
    for controller in ("memory", "cpu", "pids"):
        reasons[f"cgroup_{controller}"] = host.cgroups.get(controller, "no cgroup controller")
    return {layer: reason for layer, reason in reasons.items() if reason}


def _no_landlock(host: Host) -> str:
    return f"Landlock ABI {host.landlock_abi}, at least {_LANDLOCK_MINIMUM} (Linux 5.19) is needed"
