"""Capabilities of a host as data, which `runner.host.probe` gathers so that compiling stays pure."""

from typing import Literal

import msgspec

SOCKETS_ABI = 9  # the Landlock ABI that judges connections to the paths of Unix sockets
Kernel = Literal["shared", "gvisor", "vm"]  # the host's, or one of the container's own


class SystemFile(msgspec.Struct, frozen=True):
    """A path of `filesystem.system_files` that the host has, and the place that it leads to."""

    path: str
    source: str
    executable: bool = False


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The capabilities of the kernel and the user.  A text field is empty if the capability is there,
    else it tells the person who repairs the host why it is missing; only `machine`, `certificates`,
    `kernel` and `system_files` are what they say."""

    machine: str = "x86_64"
    user_namespaces: str = ""
    seccomp: str = ""
    listener: str = ""
    open_files: int = 1_048_576  # the hard RLIMIT_NOFILE
    landlock_abi: int = 0
    certificates: str = (
        ""  # the file of the authorities that the host trusts, empty if there is none
    )
    cgroups: dict[str, str] = {}  # "memory", "cpu", "pids" -> "" or the reason why it is missing
    kernel: Kernel = "shared"  # of cells
    system_files: tuple[SystemFile, ...] = ()  # for policies that show them
