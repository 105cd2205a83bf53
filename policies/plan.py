"""Plans: policies compiled for a host.  Data only; no later step makes a decision."""

from collections.abc import Sequence
from typing import Literal

import msgspec


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


COPIED = "copied"  # in a directory of changes: its `upper` is shown, in place of an overlay


class Bind(_Data, frozen=True):
    """A host path shown in the cell at the same place."""

    path: str
    writable: bool = False
    executable: bool = False
    changes: str = ""  # a directory of the host that gets what cells change, in place of the path
    owned: bool = False  # files of its owner belong to cells, where root starts them


class Tmpfs(_Data, frozen=True):
    """A fresh memory filesystem of the cell's own; `also` is a second place where it is mounted.

    `is_home`: directories above the paths that are shown beneath it are the cell's own, too.
    """

    target: str
    size_bytes: int
    inodes: int
    executable: bool
    also: str = ""
    is_home: bool = False


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
    larger ones the answer does not hold.  `quiet`: the attempt is no violation.
    """

    rule: Rule
    errno: int
    pointer: int = -1
    at_most: tuple[int, ...] = ()
    quiet: bool = False


class PathRule(_Data, frozen=True):
    """Landlock rights beneath a path; all other rights are refused."""

    path: str
    write: bool = False
    execute: bool = False
    control: bool = False  # ioctl(2) on devices, as far as the filter allows it


CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"  # path in cells with network rules


class NetworkPlan(_Data, frozen=True):
    """The way out of cells: their rules, and the confinement of the process that applies them."""

    rules: bytes  # allow, deny and addresses of the policy, in msgpack
    words: tuple[str, ...]  # a line for each rule
    ports: tuple[int, ...]  # ports of every rule; a cell has a listening socket for each
    reads_requests: bool  # a rule has methods or paths
    has_proxy: bool  # connections go through the host's proxy
    egress_filter: bytes
    # the host's file that cells are shown at CERTIFICATES, empty if there is none
    certificates: str


IdRange = tuple[int, int, int]  # a line of uid_map: first inside, first outside, count


class ImagePlan(_Data, frozen=True):
    """The image that is the root of cells.

    `layers` are directories of the host, the uppermost first.  `interpreter` is the command of the
    cell's Python, which brings its own loader and libraries.  `kind` says who maps `uids` and `gids`,
    the ids in cells to those of the host: root, newuidmap, or nobody for one id.
    """

    layers: tuple[str, ...]
    interpreter: tuple[str, ...]
    kind: Literal["root", "subordinate", "one"]
    uids: tuple[IdRange, ...]
    gids: tuple[IdRange, ...]
    changes_bytes: int
    changes_inodes: int


# Layer name of cells with a fixed address layout, which can be resumed after a restart.
FIXED_ADDRESSES = "fixed_addresses"
FILE_WATCHING = "file_watching"  # name of the group of system calls


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
    branching_filter: bytes  # filter of the process that branches sessions
    groups: tuple[str, ...]  # groups of system calls that the guest may make
    refusals: dict[int, tuple[str, str]]  # number -> (call, reason); empty without a listener
    answers: dict[int, tuple[CallAnswer, ...]]  # answers of the listener; EPERM if none matches
    watched: dict[int, str]  # allowed calls that the listener records and lets continue
    measured: dict[int, str]  # calls that the listener answers with the size of the cell's machine
    noted: dict[
        int, str
    ]  # calls that the listener notes and lets continue: they make objects of System V
    judged: dict[int, tuple[Rule, ...]]  # forms on which the listener decides
    locks: dict[int, str]  # calls that lock files, which the listener counts and answers
    environment: dict[str, str]
    python_path: tuple[str, ...]
    preload: tuple[str, ...]
    loopback: bool
    reuses_network: bool  # cells make no socket but AF_UNIX: one may have the namespace of another
    network: NetworkPlan | None  # None: cells reach nothing outside
    terminal: bool  # the cell has a devpts of its own and /dev/tty
    memory_bytes: int
    # cap of TCP and UDP memory, which only v1 counts, and apart; 0 without loopback
    socket_bytes: int
    cpus: float
    processes: int
    layers: tuple[str, ...]
    protected: tuple[str, ...] = ()  # patterns of paths that programs can neither make nor change
    guarded: dict[int, tuple[Rule, ...]] = {}  # forms of calls that the guard makes for programs
    guard_filter: bytes = b""
    image: ImagePlan | None = None  # None: the root has files of the host
    devices: tuple[str, ...] = ()  # nodes of the host's GPUs, below /dev

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
