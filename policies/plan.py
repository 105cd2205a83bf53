"""Plans: policies compiled for a host.  Data only; no later step makes a decision."""

from collections.abc import Sequence

import msgspec


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Bind(_Data, frozen=True):
    """A host path shown in the cell at the same place."""

    path: str
    writable: bool = False
    executable: bool = False


class Tmpfs(_Data, frozen=True):
    """A fresh memory filesystem of the cell's own; `also` is a second place where it is mounted."""

    target: str
    size_bytes: int
    inodes: int
    executable: bool
    also: str = ""


class Condition(msgspec.Struct, frozen=True):
    """One argument must equal `value` in the bits of `mask`."""

    argument: int
    mask: int
    value: int


class Rule(msgspec.Struct, frozen=True):
    """A call that is allowed if every condition holds; several rules for one call are alternatives."""

    call: str
    conditions: tuple[Condition, ...] = ()

    def holds(self, arguments: Sequence[int]) -> bool:
        """Tell whether the rule allows the call with these arguments."""
        return all(arguments[each.argument] & each.mask == each.value for each in self.conditions)


class CallAnswer(msgspec.Struct, frozen=True):
    """The errno that a call gets in place of being made, if the rule holds; 0 is success.

    `at_most`: the largest values of the numbers of 64 bits that argument `pointer` points to; with
    larger ones the answer does not hold.
    """

    rule: Rule
    errno: int
    pointer: int = -1
    at_most: tuple[int, ...] = ()


class PathRule(_Data, frozen=True):
    """Landlock rights beneath a path; all other rights are refused."""

    path: str
    write: bool = False
    execute: bool = False
    control: bool = False  # ioctl(2) on devices, as far as the filter allows it


CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # in cells that reach names of the network


class NetworkPlan(_Data, frozen=True):
    """The way out of cells: their rules, and the confinement of the process that applies them."""

    rules: bytes  # allow, deny and addresses of the policy, in msgpack
    words: tuple[str, ...]  # a line for each rule
    ports: tuple[int, ...]  # of every rule; a cell has a listening socket for each
    reads_requests: bool  # a rule has methods or paths
    has_proxy: bool  # connections go through the host's proxy
    egress_filter: bytes
    certificates: (
        str  # the host's file that cells are shown at CERTIFICATES, empty if there is none
    )


# Among the layers of cells whose address layout is not random: so they can be resumed after a restart.
FIXED_ADDRESSES = "fixed_addresses"


class Plan(_Data, frozen=True):
    """The settings of a launcher and its cells, in the order of use."""

    policy: str
    binds: tuple[Bind, ...]
    optional: tuple[str, ...]  # binds that are left out if the host does not have the path
    hidden: tuple[str, ...]
    tmpfs: tuple[Tmpfs, ...]
    hostname: str
    rlimits: tuple[tuple[str, int], ...]
    open_files: int  # RLIMIT_NOFILE, and so the first descriptor number that no guest can have
    landlock_abi: int
    reaches_sockets: bool  # programs may connect to Unix sockets of the host that are shown
    path_rules: tuple[PathRule, ...]
    language: str
    program: str  # the host's interpreter of the language; empty for Python
    guest_filter: bytes
    init_filter: bytes
    branching_filter: bytes  # of the process that branches sessions
    groups: tuple[str, ...]  # of system calls that the guest may make
    refusals: dict[int, tuple[str, str]]  # number -> (call, reason); empty without a listener
    answers: dict[int, tuple[CallAnswer, ...]]  # of the listener; EPERM where none holds
    watched: dict[int, str]  # allowed calls that the listener records and lets continue
    measured: dict[int, str]  # calls that the listener answers with the size of the cell's machine
    noted: dict[
        int, str
    ]  # calls that the listener notes and lets continue: they make objects of System V
    locks: dict[int, str]  # calls that lock files, which the listener counts and answers
    environment: dict[str, str]
    python_path: tuple[str, ...]
    preload: tuple[str, ...]
    loopback: bool
    reuses_network: bool  # cells make no socket but AF_UNIX: one may have the namespace of another
    network: NetworkPlan | None  # None: cells reach nothing outside
    terminal: bool  # a devpts of the cell's own, and /dev/tty
    memory_bytes: int
    socket_bytes: int  # cap of TCP and UDP, which no cgroup counts, or v1 apart; 0 without them
    cpus: float
    processes: int
    layers: tuple[str, ...]

    def __repr__(self) -> str:
        """Return the single values, and the sizes of the rest; `cellwright explain` shows all of it."""
        words = []
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, bytes | tuple | dict):
                unit = " bytes" if isinstance(value, bytes) else ""
                words += [f"{name}=<{len(value):,}{unit}>"] if value else []
            else:
                words.append(f"{name}={value!r}")
        return f"Plan({', '.join(words)})"
