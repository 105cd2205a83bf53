"""Policies: the permissions and limits of a cell.  An empty policy denies everything that can be
denied."""

import os
from typing import Literal, get_args

import msgspec

from .argument_checks import (
    check_choice,
    check_encodable,
    check_names,
    check_variable,
    did_you_mean,
)
from .denied import denied_by
from .errors import PolicyError
from .network.rule import NetworkDenial, NetworkRule
from .privacy_rules import PrivacyRules, check_privacy
from .source.findings import BLOCKED_BUILTINS, BLOCKED_IMPORTS
from .tool_rules import Tools, check_tools

MIB = 1024 * 1024

# Layers that a policy may declare optional. All others are required.
OPTIONAL_LAYERS = ("listener", "landlock", "cgroup_memory", "cgroup_cpu", "cgroup_pids")
CGROUP = "cgroup"  # the name for the three layers that need a control group


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Filesystem(_Section, frozen=True):
    """Host paths shown in the cell at the same place; nothing else of the host is visible.

    read: paths that programs may read
    write: paths that programs may read and write
    optional: shown paths that are left out if the host does not have them when a launcher starts
    hidden: paths beneath shown ones, or patterns of them (`policies/denied.py`), that cells lack
    protected: paths beneath those of `write`, or patterns of them, that programs can neither make nor
        change, in whatever case; a call that makes a name then takes some tenths of a millisecond
    own: directories of the cell's own, such as /logs: empty at its start, writable, and in its memory
    changes: path of `write` -> a directory of the host that gets what cells change; the path itself
        stays as it is (overlayfs)
    as_owner: where root starts the cells, files of a shown path's owner are theirs (Linux 5.12)
    system_files: programs may read what the host's own need beside /usr/bin (system_files.toml)
    watch: record a violation if a program opens a path that is not shown, or opens a read-only path
        for writing; each open(2) then costs about 10 µs
    """

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    changes: dict[str, str] = {}
    as_owner: bool = False
    system_files: bool = False
    watch: bool = True


class Processes(_Section, frozen=True):
    """Threads and processes of a program.

    threads: the program may start threads
    subprocesses: the program may fork, and execute other programs
    execute: host paths whose files may be executed; needs `subprocesses`
    execute_own: the program may execute files that it writes itself; needs `subprocesses`
    terminal: the host may give the program a terminal of the cell's own; needs `subprocesses`
    debug: processes of the program may trace each other (gdb, strace); needs `subprocesses`
    """

    threads: bool = True
    subprocesses: bool = False
    execute: tuple[str, ...] = ()
    execute_own: bool = True
    terminal: bool = False
    debug: bool = False


class _Reach(_Section, frozen=True):
    allow: tuple[NetworkRule, ...] = ()
    deny: tuple[NetworkDenial, ...] = ()
    addresses: tuple[str, ...] = ()
    proxy: Literal["none", "environment"] = "none"


class Network(_Reach, frozen=True):
    """Network of a cell, which has a network namespace of its own.

    loopback: TCP and UDP over the cell's own loopback
    allow: hosts that programs may connect to by name; without rules there is no other network
    deny: hosts that they may not, whatever `allow` says
    addresses: networks that are not public and that every rule may reach, such as 10.1.0.0/16
    proxy: "environment": connections go through the host's HTTP proxy that HTTPS_PROXY names.  It
        resolves the names, so that addresses are not checked; default "none"
    """

    loopback: bool = False


class Http(_Reach, frozen=True):
    """Requests that the host makes for programs, with the tool `http.request`.

    allow: requests by host, method and path, over https too; without rules the tool is not offered
    deny, addresses, proxy: as in Network
    """


class Python(_Section, frozen=True):
    """Packages that Python programs can import besides the standard library.

    path: directories of packages, shown read-only and put on sys.path
    preload: modules that the launcher imports once, so that importing them in a cell costs nothing.
        The launcher has more rights than a cell, though no network: preload only trusted modules
    """

    path: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()


class Packages(_Section, frozen=True):
    """Packages for Python programs, which are fetched as wheels and opened in a cell.

    require: requirements such as "pandas==2.3.*" (PEP 508)
    allow: if not empty, the only packages that a set may have, dependencies among them
    max_bytes: of all files of the set
    preload: modules that the launcher imports once, of sets that have them; read `python.preload`
    learn_preload: preload also the modules of a set that programs import; only for packages that you
        trust, since the launcher has more rights than a cell
    """

    require: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    max_bytes: int = 8192 * MIB  # torch and what it needs of CUDA have 5,400
    preload: tuple[str, ...] = ()
    learn_preload: bool = False


class Syscalls(_Section, frozen=True):
    """System calls beyond those that the rest of the policy implies.

    groups: names of groups in syscalls.toml; only EXTRA_GROUPS can be added
    """

    groups: tuple[str, ...] = ()


class Devices(_Section, frozen=True):
    """Devices of the host in cells; their drivers, in the kernel of the host, are trusted then.

    gpu: a vendor of compiling/gpus.toml, whose GPUs are all shown, or names of nodes such as nvidia0
    """

    gpu: str | tuple[str, ...] = ""


class Isolation(_Section, frozen=True):
    """The boundary between programs and the host.

    kernel: "own": cells must have a kernel of their own, as containers of some OCI runtimes have;
        "any", the default: they may share that of the host
    """

    kernel: Literal["any", "own"] = "any"


class Limits(_Section, frozen=True):
    """Caps of one execution.  Times in seconds, sizes in bytes.

    wall_seconds: from the moment every layer is in force; in a session of each call
    cpu_seconds: CPU time of the whole cell
    cpus: share of processor time, in processors
    memory_bytes: memory of the whole cell, including its files in /workspace and /tmp
    processes: processes and threads, including the program's own
    output_bytes: kept of each output stream, half from its head and half from its tail
    output_total_bytes: written to both streams before the cell is killed
    value_bytes: the value of the last expression
    artifact_bytes: files and pictures collected from one execution
    workspace_bytes: files in /workspace, and again in /tmp; also the size of a single file
    workspace_inodes: number of files in each of the two
    open_files: descriptors of a process
    stack_bytes: stack of a process
    violations: refused attempts before the cell is killed
    """

    wall_seconds: float = 30.0
    cpu_seconds: float = 30.0
    cpus: float = 1.0
    memory_bytes: int = 256 * MIB
    processes: int = 64
    output_bytes: int = 100_000
    output_total_bytes: int = 256 * MIB
    value_bytes: int = 1 * MIB
    artifact_bytes: int = 16 * MIB
    workspace_bytes: int = 64 * MIB
    workspace_inodes: int = 16_384
    open_files: int = 1024
    stack_bytes: int = 8 * MIB
    violations: int = 10_000


Mode = Literal["off", "advise", "enforce"]
_MODES = get_args(Mode)


class Validation(_Section, frozen=True):
    """Source checks before a program runs: advice, never a boundary.

    mode: "off"; "advise", the result lists the findings; "enforce", a program with findings is
        rejected
    blocked_imports: modules whose import is a finding
    allowed_imports: if not empty, every other import is a finding
    blocked_builtins: builtins whose use is a finding
    """

    mode: Mode = "advise"
    blocked_imports: tuple[str, ...] = BLOCKED_IMPORTS
    allowed_imports: tuple[str, ...] = ()
    blocked_builtins: tuple[str, ...] = BLOCKED_BUILTINS


class Evaluator(_Section, frozen=True):
    """The evaluators that may answer a program instead of a cell.

    monty: Monty, an interpreter in a process outside every layer, may answer pure expressions
    """

    monty: bool = False


class Policy(_Section, frozen=True):
    """The permissions and limits of a cell; policies/README.md explains every field.

    name: the name that `explain` prints
    filesystem, processes, network, python, packages, syscalls, devices: what programs may reach
    http: requests of the tool `http.request`
    isolation: the boundary that cells must have
    evaluator: what may answer pure expressions instead of a cell
    limits: caps of one execution
    validation: source checks before a program runs
    tools: calls of the host's tools
    privacy: personal data, which programs and models get as tokens
    environment: variables beside HOME, LANG, PATH, TMPDIR and TZ, which it may replace
    optional_layers: layers that a host may lack, of OPTIONAL_LAYERS, or "cgroup" for the last three
    """

    name: str = "custom"
    filesystem: Filesystem = Filesystem()
    processes: Processes = Processes()
    network: Network = Network()
    http: Http = Http()
    python: Python = Python()
    packages: Packages = Packages()
    syscalls: Syscalls = Syscalls()
    devices: Devices = Devices()
    isolation: Isolation = Isolation()
    evaluator: Evaluator = Evaluator()
    limits: Limits = Limits()
    validation: Validation = Validation()
    tools: Tools = Tools()
    privacy: PrivacyRules = PrivacyRules()
    environment: dict[str, str] = {}
    optional_layers: tuple[str, ...] = ()


# Groups that a policy may add; all others follow from `processes` and `network`.
EXTRA_GROUPS = ("file_watching", "unix_sockets")
_SMALLEST = {"wall_seconds": 0.001, "cpu_seconds": 0.001, "cpus": 0.01, "memory_bytes": 8 * MIB}
_SMALLEST |= {"workspace_bytes": 4096, "workspace_inodes": 8, "processes": 1, "open_files": 16}
_SMALLEST |= {"stack_bytes": 256 * 1024}
_LARGEST = 2**53  # floats, and the numbers of other languages, are exact up to here


def check_policy(policy: Policy) -> Policy:
    """Return `policy` with "cgroup" in its optional layers replaced by the three layers.

    Raises PolicyError, which names the first invalid field.
    """
    for field in msgspec.structs.fields(Limits):
        check_limit(
            f"limits.{field.name}", getattr(policy.limits, field.name), whole=field.type is int
        )
    check_validation(policy.validation)
    check_tools(policy.tools)
    check_privacy(policy.privacy)
    check_choice("isolation.kernel", policy.isolation.kernel, ("any", "own"))
    if policy.evaluator.monty and policy.isolation.kernel == "own":
        raise PolicyError(
            'evaluator.monty: cannot be combined with isolation.kernel = "own": its process has the '
            "kernel of the host"
        )
    _check_network("network", policy.network)
    _check_network("http", policy.http)
    _check_modules("python.preload", policy.python.preload)
    _check_modules("packages.preload", policy.packages.preload)
    check_names("packages.require", policy.packages.require)
    check_names("packages.allow", policy.packages.allow)
    check_limit("packages.max_bytes", policy.packages.max_bytes, whole=True)
    for field_name, path in named_paths(policy):
        check_path(path, field_name)
    for path in policy.filesystem.optional:
        if path not in shown_paths(policy):
            raise PolicyError(f"filesystem.optional: must be shown by another field, got {path}")
    _check_hidden(policy)
    if policy.processes.execute and not policy.processes.subprocesses:
        raise PolicyError(
            "processes.execute: must be empty without processes.subprocesses = true, "
            f"got {list(policy.processes.execute)!r}"
        )
    for name in ("terminal", "debug"):
        if getattr(policy.processes, name) and not policy.processes.subprocesses:
            raise PolicyError(f"processes.{name}: needs processes.subprocesses = true")
    if policy.processes.debug and "listener" in policy.optional_layers:
        raise PolicyError(
            "processes.debug: needs the layer listener, which judges what attaches",
            "take listener out of optional_layers",
        )
    for name, value in policy.environment.items():
        check_variable(name, value)
    for group in policy.syscalls.groups:
        if group not in EXTRA_GROUPS:
            known = ", ".join(EXTRA_GROUPS)
            raise PolicyError(f"syscalls.groups: must be of {known}, got {group!r}")
    layers = named_layers("optional_layers", policy.optional_layers)
    if layers == policy.optional_layers:
        return policy
    return msgspec.structs.replace(policy, optional_layers=layers)


def _check_modules(field: str, names: tuple[str, ...]) -> None:
    check_names(field, names)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise PolicyError(f"{field}: must be names of modules, got {name!r}")


def named_layers(where: str, names: object) -> tuple[str, ...]:
    """Return `names` with "cgroup" replaced by the three layers that need a control group.

    Raises PolicyError, which names the parameter `where`, for a layer that is not optional.
    """
    named = check_names(where, names)
    for name in named:
        if name not in (*OPTIONAL_LAYERS, CGROUP):
            known = ", ".join(OPTIONAL_LAYERS)
            raise PolicyError(
                f"{where}: must be of {known}, or {CGROUP} for the last three, got {name!r}",
                did_you_mean(name, (*OPTIONAL_LAYERS, CGROUP)),
            )
    together = tuple(layer for layer in OPTIONAL_LAYERS if layer.startswith(f"{CGROUP}_"))
    return tuple(each for name in named for each in (together if name == CGROUP else (name,)))


def check_validation(validation: Validation) -> None:
    """Raise PolicyError for an unknown mode, which would enforce nothing, or an invalid list."""
    check_choice("validation.mode", validation.mode, _MODES)
    for name in ("blocked_imports", "allowed_imports", "blocked_builtins"):
        check_names(f"validation.{name}", getattr(validation, name))


def check_limit(
    name: str, value: object, *, whole: bool = False, limit: str = "", unit: int = 1
) -> None:
    """Raise PolicyError unless `value` is a finite number and large enough for a program to run.

    `limit` is the field of Limits that it is for, by default the last part of `name`; `value` counts
    multiples of `unit`.
    """
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        kind = "a whole number" if whole else "a number"
        raise PolicyError(f"{name}: must be {kind}, got {value!r}")
    smallest = _SMALLEST.get(limit or name.rpartition(".")[2], 0)
    if not smallest <= value * unit <= _LARGEST:  # NaN compares false
        shown = f"{value:.3g}" if isinstance(value, float) else str(value)[:40]
        most = "2^53" if unit == 1 else _LARGEST // unit
        raise PolicyError(f"{name}: must be from {smallest / unit:.9g} to {most}, got {shown}")


def _check_network(where: str, section: Network | Http) -> None:
    check_choice(f"{where}.proxy", section.proxy, ("none", "environment"))
    if section.allow or section.deny or section.addresses:
        from .network.rule_checks import check_rules  # most policies have none

        check_rules(
            section.allow, section.deny, section.addresses, where,
            reads_requests=isinstance(section, Http),
        )  # fmt: skip


def _check_hidden(policy: Policy) -> None:
    """Raise PolicyError unless each hidden path lies beneath a shown path and hides no shown path."""
    for pattern in policy.filesystem.hidden:
        check_path(pattern, "filesystem.hidden")
        denied, applies = denied_by((pattern,)), False
        for field_name, path in named_paths(policy):
            beneath = denied.beneath(path)
            if beneath is None:
                raise PolicyError(
                    f"filesystem.hidden: must not hide what {field_name} shows, "
                    f"got {pattern}, which hides {path}",
                    "name the path in one of the two fields only",
                )
            applies = applies or bool(beneath)
        if not applies and not any(map(denied.beneath, places_shown(policy))):
            raise PolicyError(f"filesystem.hidden: must lie beneath a shown path, got {pattern}")


def check_path(path: str, where: str = "path") -> None:
    """Raise PolicyError, which names the field `where`, unless `path` is a plain absolute path outside
    the places that a cell builds itself."""
    if not isinstance(path, str) or "\0" in path:
        raise PolicyError(f"{where}: must be a path without NUL, got {path!r}")
    check_encodable(where, path)
    if path != os.path.normpath(path) or not path.startswith("/") or path.startswith("//"):
        raise PolicyError(f"{where}: must be a plain absolute path, got {path!r}")
    own = path.startswith(_OWN_TREES) and not path.startswith(_SHARED_MEMORY)
    if own or path in _OWN_PLACES:
        raise PolicyError(
            f"{where}: must be outside the cell's own places, got {path}",
            "move the files elsewhere on the host, or pass them with files=",
        )


def named_paths(policy: Policy) -> tuple[tuple[str, str], ...]:
    """Return every host path that a cell sees, each with the field that names it."""
    fields = {
        "filesystem.read": policy.filesystem.read,
        "filesystem.write": policy.filesystem.write,
        "processes.execute": policy.processes.execute,
        "python.path": policy.python.path,
    }
    return tuple((name, path) for name, paths in fields.items() for path in paths)


def shown_paths(policy: Policy) -> tuple[str, ...]:
    """Return the host paths that a cell sees, sorted and without duplicates."""
    return tuple(sorted({path for _, path in named_paths(policy)}))


# Where system files lie (system_files.toml).
SYSTEM_PLACES = ("/etc", "/usr", "/var")


def places_shown(policy: Policy) -> tuple[str, ...]:
    """Return the directories and files beneath which a cell may see paths of the host."""
    system = SYSTEM_PLACES if policy.filesystem.system_files else ()
    return (*shown_paths(policy), *system)


def has_sockets(policy: Policy) -> bool:
    """Tell whether a cell has TCP and UDP."""
    return policy.network.loopback or bool(policy.network.allow)


def lies_in(path: str, directories: tuple[str, ...]) -> bool:
    """Tell whether `path` is one of `directories` or lies beneath one."""
    return any(path == each or path.startswith(each.rstrip("/") + "/") for each in directories)


_OWN_PLACES = ("/", "/proc", "/dev", "/dev/shm", "/workspace", "/tmp", "/etc")  # noqa: S108
_OWN_TREES = ("/proc/", "/dev/", "/workspace/")
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - the host's memory filesystem, which may hold any file
