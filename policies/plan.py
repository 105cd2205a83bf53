"""A plan: a policy compiled for a host.  Data only; nothing after it decides."""

import msgspec


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Bind(_Data, frozen=True):
    """A host path shown in the cell at the same place."""

    path: str
    writable: bool = False
    executable: bool = False


class Tmpfs(_Data, frozen=True):
    """A fresh memory filesystem of the cell's own."""

    target: str
    size_bytes: int
    inodes: int
    executable: bool


class PathRule(_Data, frozen=True):
    """Landlock rights beneath a path; everything not named is refused."""

    path: str
    write: bool = False
    execute: bool = False


class Plan(_Data, frozen=True):
    """What a launcher and its cells need to know, in the order of use."""

    policy: str
    binds: tuple[Bind, ...]
    hidden: tuple[str, ...]
    tmpfs: tuple[Tmpfs, ...]
    hostname: str
    rlimits: tuple[tuple[str, int], ...]
    open_files: int  # RLIMIT_NOFILE, and so the first number that no guest can give a descriptor
    landlock_abi: int
    path_rules: tuple[PathRule, ...]
    language: str
    program: str  # the interpreter of the host that runs it; empty for Python
    guest_filter: bytes
    init_filter: bytes
    refusals: dict[int, tuple[str, str]]  # number -> (call, why); empty without a listener
    watched: dict[int, str]  # allowed; the listener takes note and lets them go on
    locks: dict[int, str]  # calls that set locks on files, which the listener counts and answers
    environment: dict[str, str]
    python_path: tuple[str, ...]
    preload: tuple[str, ...]
    loopback: bool
    memory_bytes: int
    socket_bytes: int  # of TCP and UDP, what no cgroup or v1 apart counts; 0 in a cell without them
    cpus: float
    processes: int
    layers: tuple[str, ...]

    def __repr__(self) -> str:
        """Return all but the bytes of the filters and the tables about system calls, which are long."""
        words = []
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, bytes):
                value = f"<{len(value):,} bytes>"
            elif name in ("refusals", "watched"):
                value = f"<{len(value)} system calls>"
            words.append(
                f"{name}={value if isinstance(value, str) and value[:1] == '<' else repr(value)}"
            )
        return f"Plan({', '.join(words)})"
