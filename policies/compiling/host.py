"""Capabilities of a host as data, which `runner.host.plans` gathers so that compiling stays pure, and
the layers of a policy that are in force there."""

from typing import Literal

import msgspec

from ..errors import Unenforceable
from ..policy import CGROUP, OPTIONAL_LAYERS, Policy, has_sockets
from .gpus import GpuFiles, vendor_of

SOCKETS_ABI = 9  # the Landlock ABI that judges connections to the paths of Unix sockets
Kernel = Literal["shared", "gvisor", "vm"]  # the host's kernel, or one of the container


class SystemFile(msgspec.Struct, frozen=True):
    """A path of `filesystem.system_files` that the host has, and the place that it leads to."""

    path: str
    source: str
    executable: bool = False


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The capabilities of the kernel and the user. A text field is empty if the capability exists,
    else it has the reason for the person who repairs the host. Only `machine`, `certificates`,
    `kernel` and `system_files` are plain facts."""

    machine: str = "x86_64"
    user_namespaces: str = ""
    seccomp: str = ""
    listener: str = ""
    file_watching: str = ""  # why the limits of inotify cannot be set; empty if they can
    node_option: str = (
        ""  # why node refuses --disable-wasm-trap-handler, which 20.15 and 22.2 brought
    )
    open_files: int = 1_048_576  # the hard RLIMIT_NOFILE
    landlock_abi: int = 0
    # the file of the authorities that the host trusts, empty if there is none
    certificates: str = ""
    cgroups: dict[str, str] = {}  # "memory", "cpu", "pids" -> "" or the reason why it is missing
    kernel: Kernel = "shared"  # the kernel of cells
    system_files: tuple[SystemFile, ...] = ()  # for policies that show them
    gpu: GpuFiles = GpuFiles()  # for policies that give one


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
    counts_sockets = has_sockets(policy) and "cgroup_memory" in present
    sockets = ("cgroup_sockets",) if counts_sockets else ()
    vendor = vendor_of(policy.devices.gpu)
    return ALWAYS + present + sockets + fallback + kernel + ((vendor.group,) if vendor else ())


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
        "landlock": ""
        if host.landlock_abi >= _LANDLOCK_MINIMUM
        else f"Landlock ABI {host.landlock_abi}, at least {_LANDLOCK_MINIMUM} (Linux 5.19) is needed",
    }
    for controller in ("memory", "cpu", "pids"):
        reasons[f"cgroup_{controller}"] = host.cgroups.get(controller, "no cgroup controller")
    return {layer: reason for layer, reason in reasons.items() if reason}
