"""What a host offers: facts as data, gathered by `runner.host.probe`, so that compiling stays pure."""

import msgspec


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What this kernel and this user have.  A text field is empty where all is well, else says why
    not, in words for the person who has to repair it."""

    machine: str = "x86_64"
    user_namespaces: str = ""
    seccomp: str = ""
    listener: str = ""
    open_files: int = 1_048_576  # the hard RLIMIT_NOFILE
    landlock_abi: int = 0
    cgroups: dict[str, str] = {}  # "memory", "cpu", "pids" -> "" or why not
