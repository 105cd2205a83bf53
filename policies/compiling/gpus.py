"""GPUs that `devices.gpu` of a policy gives to cells: their vendors, nodes and limits (gpus.toml).

A name is checked against the patterns of a vendor, so that no other device can be shown.
"""

import os
import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import msgspec

from ..argument_checks import check_names, did_you_mean
from ..errors import PolicyError
from ..policy import Devices, Policy

_FIELD = "devices.gpu"
ANY = "nvidia"  # the vendor of `gpu=True`, the only one that was tried


class Vendor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of gpus.toml, which says what the fields are."""

    name: str
    tried: str
    cards: str
    control: tuple[str, ...]
    further: tuple[str, ...]
    group: str
    load: str
    needed: str
    libraries: tuple[str, ...]
    limits: dict[str, int]

    def is_card(self, node: str) -> bool:
        return re.fullmatch(self.cards, node) is not None

    def knows(self, node: str) -> bool:
        return node in (*self.control, *self.further) or self.is_card(node)


class GpuNode(msgspec.Struct, frozen=True):
    """A node below /dev that this host has; `why_not` says why cells could not open it."""

    name: str
    why_not: str = ""


class DriverFile(msgspec.Struct, frozen=True):
    """A library of the driver: its place in cells, and that of its file on the host."""

    path: str
    source: str


class GpuFiles(msgspec.Struct, frozen=True):
    """The nodes and libraries of one vendor on this host; `search`: folders for LD_LIBRARY_PATH;
    `refused`: files with names of libraries that others than root may change."""

    nodes: tuple[GpuNode, ...] = ()
    libraries: tuple[DriverFile, ...] = ()
    search: str = ""
    refused: tuple[str, ...] = ()


def with_gpu(policy: Policy, gpu: object) -> Policy:
    """Return `policy` with a GPU, and with limits that are at least those that it needs.

    `gpu`: True for all GPUs of the vendor that was tried, or a value of `devices.gpu`; False, and an
    empty value, leave the policy as it is. Raises PolicyError.
    """
    if isinstance(gpu, list | tuple):
        gpu = check_names("gpu", gpu)
    elif not isinstance(gpu, bool | str):
        raise PolicyError(f"gpu: must be True, a vendor or a list of nodes, got {gpu!r}")
    wanted = (ANY if gpu else "") if isinstance(gpu, bool) else gpu
    vendor = vendor_of(wanted)
    if vendor is None:
        return policy
    least = {
        name: max(value, getattr(policy.limits, name)) for name, value in vendor.limits.items()
    }
    return msgspec.structs.replace(
        policy,
        devices=Devices(gpu=wanted),
        limits=msgspec.structs.replace(policy.limits, **least),
    )


class GpuPlan(NamedTuple):
    """The GPU of a policy: its vendor, the nodes of its cells, and the libraries."""

    vendor: Vendor
    nodes: tuple[str, ...]
    libraries: tuple[DriverFile, ...]


@cache
def vendors() -> dict[str, Vendor]:
    """Return the vendors by the word that a policy uses."""
    import tomllib  # few policies have a GPU

    with open(os.path.join(os.path.dirname(__file__), "gpus.toml"), "rb") as file:
        return msgspec.convert(tomllib.load(file), dict[str, Vendor])


def vendor_of(gpu: str | tuple[str, ...]) -> Vendor | None:
    """Return the vendor of the value of `devices.gpu`; None if that is empty.

    Raises PolicyError for an unknown vendor, and for nodes that are not all of one.
    """
    if not gpu:
        return None
    if isinstance(gpu, str):
        if gpu not in vendors():
            known = ", ".join(vendors())
            raise PolicyError(
                f"{_FIELD}: must be one of {known}, or a list of nodes, got {gpu!r}",
                did_you_mean(gpu, vendors(), 'for one GPU write gpu = ["nvidia0"]'),
            )
        return vendors()[gpu]
    nodes = check_names(_FIELD, gpu)
    for vendor in vendors().values():
        if all(map(vendor.knows, nodes)) and any(map(vendor.is_card, nodes)):
            return vendor
    raise PolicyError(
        f"{_FIELD}: must be names below /dev of one vendor's GPUs, got {list(nodes)!r}",
        'for example ["nvidia0", "nvidia1"], or ["dri/renderD128"]',
    )


def check_gpu(policy: Policy) -> Vendor | None:
    """Return the vendor of the policy's GPU; raises PolicyError if the rest of the policy leaves it
    without what it needs."""
    vendor = vendor_of(policy.devices.gpu)
    if vendor is None:
        return None
    if policy.isolation.kernel == "own":
        raise PolicyError(
            f'{_FIELD}: cannot be combined with isolation.kernel = "own": the driver of a GPU is part '
            "of the kernel of the host"
        )
    for layer, need in (
        ("listener", "which answers for the names of the driver's threads"),
        ("cgroup_memory", "since the driver reserves more addresses than RLIMIT_AS could allow"),
    ):
        if layer in policy.optional_layers:
            raise PolicyError(
                f"{_FIELD}: needs the layer {layer}, {need}",
                f"take {layer} out of optional_layers",
            )
    return vendor


def gpu_plan(policy: Policy, files: GpuFiles) -> GpuPlan | None:
    """Return the GPU of `policy` on a host that has `files`; None if the policy has none.

    Raises PolicyError if the host has not all that the policy names.
    """
    vendor = check_gpu(policy)
    if vendor is None:
        return None
    had = {node.name: node.why_not for node in files.nodes}
    cards = tuple(name for name in had if vendor.is_card(name))
    named = cards if isinstance(policy.devices.gpu, str) else policy.devices.gpu
    if not cards:
        raise PolicyError(
            f"{_FIELD}: this host has no {vendor.name} GPU, or its kernel does not drive it",
            vendor.load,
        )
    nodes = tuple(dict.fromkeys((*named, *vendor.control)))
    for node in nodes:
        if node not in had:
            raise PolicyError(f"{_FIELD}: this host has no /dev/{node}", vendor.load)
        if had[node]:
            raise PolicyError(f"{_FIELD}: cells cannot open /dev/{node}: {had[node]}")
    if not _has(vendor.needed, files.libraries):
        for path in files.refused:
            if os.path.basename(path).startswith(vendor.needed):
                raise PolicyError(
                    f"{_FIELD}: {path} is not used, since others than root may change it",
                    "chown root and chmod go-w the file that it leads to",
                )
        raise PolicyError(
            f"{_FIELD}: {vendor.needed} of the driver was not found on this host",
            "install the driver's libraries for programs, and run ldconfig; or name their folder in "
            "LD_LIBRARY_PATH",
        )
    return GpuPlan(vendor, nodes, files.libraries)


def _has(library: str, files: Iterable[DriverFile]) -> bool:
    return any(each.path.endswith(f"/{library}") for each in files)


def common_gpu(some: str | tuple[str, ...], others: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Return the GPUs that both values of `devices.gpu` give."""
    if some == others:
        return some
    if isinstance(some, str) or isinstance(others, str):
        whole, nodes = (some, others) if isinstance(some, str) else (others, some)
        if isinstance(nodes, str) or not whole:  # two vendors, or none
            return ""
        return nodes if vendor_of(nodes) == vendors().get(str(whole)) else ""
    return tuple(node for node in some if node in others) or ""


def gpu_exceeds(some: str | tuple[str, ...], limit: str | tuple[str, ...]) -> list[str]:
    """Return the GPUs that `some` gives and `limit` does not, a line each."""
    named = (some,) if isinstance(some, str) else some
    allowed = common_gpu(some, limit)
    within = (allowed,) if isinstance(allowed, str) else allowed
    return [f"{_FIELD}: the GPU {each}" for each in named if each and each not in within]
