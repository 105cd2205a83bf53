"""A policy: what one cell may do.  An empty policy denies everything that can be denied."""

import os
from typing import Literal, get_args

import msgspec

from .denied import denied_by
from .errors import PolicyError
from .source.findings import BLOCKED_BUILTINS, BLOCKED_IMPORTS
from .tools import Tools, check_tools

MIB = 1024 * 1024

# Every layer that can be named optional, and so be missing on a host.  The rest is always required.
OPTIONAL_LAYERS = ("listener", "landlock", "cgroup_memory", "cgroup_cpu", "cgroup_pids")
CGROUP = "cgroup"  # the name for the three layers that need a control group

# Every layer that can be named optional, and so be missing on a host.  The rest is always required.
OPTIONAL_LAYERS = ("listener", "landlock", "cgroup_memory", "cgroup_cpu", "cgroup_pids")


CGROUP = "cgroup"  # the name for the three layers that need a control group


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Filesystem(_Section, frozen=True):
    """Host paths shown in the cell at the same place; nothing else of the host is visible.

    With `watch`, opening a path that is not shown, or for writing where that is not allowed, is
    noted as a violation; it costs each open(2) about 10 µs.  `hidden` are paths beneath shown ones,
    or patterns of such paths (`policies/denied.py`), that do not exist in the cell.
    """

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    watch: bool = True


class Processes(_Section, frozen=True):
    """Whether a program may start others, what of the host it may execute, and whether that includes
    what it writes itself."""

    threads: bool = True
    subprocesses: bool = False
    execute: tuple[str, ...] = ()
    execute_own: bool = True


class Network(_Section, frozen=True):
    """A cell has a network namespace of its own: at most its own loopback."""

    loopback: bool = False


class Python(_Section, frozen=True):
    """What Python programs can import besides the standard library.

    `path`: directories of packages, shown read-only and put on sys.path.  `preload`: modules that the
    launcher imports once, so that a cell has them for nothing.  They run there with more rights than in
    a cell, though without a network: preload only what you would import yourself.
    """

    path: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()


class Syscalls(_Section, frozen=True):
    """System calls beyond those that the rest of the policy implies, by group (syscalls.toml)."""

    groups: tuple[str, ...] = ()


class Limits(_Section, frozen=True):
    """Caps of one execution.  Times in seconds, sizes in bytes."""

    wall_seconds: float = 30.0
    cpu_seconds: float = 30.0
    cpus: float = 1.0
    memory_bytes: int = 256 * MIB
    processes: int = 64
    output_bytes: int = 100_000
    output_total_bytes: int = 256 * MIB
    value_bytes: int = 1 * MIB
    artifact_bytes: int = 16 * MIB  # collected of one execution
    workspace_bytes: int = 64 * MIB
    workspace_inodes: int = 16_384
    open_files: int = 1024
    stack_bytes: int = 8 * MIB
    violations: int = 10_000  # after so many the cell is killed


Mode = Literal["off", "advise", "enforce"]
_MODES = get_args(Mode)


class Validation(_Section, frozen=True):
    """Source checks before a program runs: advice, never the boundary.

    `mode`: "off"; "advise", findings ride on the result; "enforce", a program with findings is
    rejected.  `allowed_imports`, if any, are the only ones.
    """

    mode: Mode = "advise"
    blocked_imports: tuple[str, ...] = BLOCKED_IMPORTS
    allowed_imports: tuple[str, ...] = ()
    blocked_builtins: tuple[str, ...] = BLOCKED_BUILTINS


class Policy(_Section, frozen=True):
    """What one cell may do; see policies/README.md for every field."""

    name: str = "custom"
    filesystem: Filesystem = Filesystem()
    processes: Processes = Processes()
    network: Network = Network()
    python: Python = Python()
    syscalls: Syscalls = Syscalls()
    limits: Limits = Limits()
    validation: Validation = Validation()
    tools: Tools = Tools()
    environment: dict[str, str] = {}
    optional_layers: tuple[str, ...] = ()


# Groups that a policy may add; the others follow from `processes` and `network`.
EXTRA_GROUPS = ("file_watching",)
_SMALLEST = {"wall_seconds": 0.001, "cpu_seconds": 0.001, "cpus": 0.01, "memory_bytes": 8 * MIB}
_SMALLEST |= {"workspace_bytes": 4096, "workspace_inodes": 8, "processes": 1, "open_files": 16}
_SMALLEST |= {"stack_bytes": 256 * 1024}
_LARGEST = 2**53  # past this a float or another language's number is no longer exact


def check_policy(policy: Policy) -> Policy:
    """Return `policy`, with its optional layers written out.

    Raises PolicyError naming the first field that is invalid.
    """
    for field in msgspec.structs.fields(Limits):
        check_limit(
            f"limits.{field.name}", getattr(policy.limits, field.name), whole=field.type is int
        )
    check_validation(policy.validation)
    check_tools(policy.tools)
    check_names("python.preload", policy.python.preload)
    for name in policy.python.preload:
        if not all(part.isidentifier() for part in name.split(".")):
            raise PolicyError(f"python.preload: {name!r} is not the name of a module")
    for field_name, path in named_paths(policy):
        check_path(path, field_name)
    _check_hidden(policy)
    if policy.processes.execute and not policy.processes.subprocesses:
        raise PolicyError("processes.execute: nothing can be executed without subprocesses = true")
    for name, value in policy.environment.items():
        check_variable(name, value)
    for group in policy.syscalls.groups:
        if group not in EXTRA_GROUPS:
            known = ", ".join(EXTRA_GROUPS)
            raise PolicyError(f"syscalls.groups: {group!r} is not one of {known}")
    layers = named_layers("optional_layers", policy.optional_layers)
    if layers == policy.optional_layers:
        return policy
    return msgspec.structs.replace(policy, optional_layers=layers)


def named_layers(where: str, names: object) -> tuple[str, ...]:
    """Return the layers that `names` stand for: "cgroup" for the three that need one.

    Raises PolicyError, with `where` the names were given, for what is no optional layer.
    """
    named = check_names(where, names)
    for name in named:
        if name not in (*OPTIONAL_LAYERS, CGROUP):
            known = ", ".join(OPTIONAL_LAYERS)
            raise PolicyError(
                f"{where}: {name!r} is not one of {known}, or {CGROUP} for the last three"
            )
    together = tuple(layer for layer in OPTIONAL_LAYERS if layer.startswith(f"{CGROUP}_"))
    return tuple(each for name in named for each in (together if name == CGROUP else (name,)))


def check_validation(validation: Validation) -> None:
    """Raise PolicyError for a mode that there is not, which would enforce nothing, or for what is no
    list of names."""
    if validation.mode not in _MODES:
        raise PolicyError(f"validation.mode: {validation.mode!r} is not one of {', '.join(_MODES)}")
    for name in ("blocked_imports", "allowed_imports", "blocked_builtins"):
        check_names(f"validation.{name}", getattr(validation, name))


def check_names(where: str, names: object) -> tuple[str, ...]:
    """Return `names` if they are a list or tuple of text; one text alone is a mistake."""
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(names)
    raise PolicyError(f"{where}: must be a list of names, not {names!r}")


def check_limit(name: str, value: object, *, whole: bool = False) -> None:
    """Raise PolicyError unless `value` is a finite number that is large enough to run at all."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        kind = "a whole number" if whole else "a number"
        raise PolicyError(f"{name} must be {kind}, not {value!r}")
    smallest = _SMALLEST.get(name.rpartition(".")[2], 0)
    if not smallest <= value <= _LARGEST:  # NaN compares false
        shown = f"{value:.3g}" if isinstance(value, float) else str(value)[:40]
        raise PolicyError(f"{name} must lie between {smallest} and 2^53, not {shown}")


def _check_hidden(policy: Policy) -> None:
    """Raise PolicyError unless each hidden path lies beneath a shown one and none hides a shown one."""
    for pattern in policy.filesystem.hidden:
        check_path(pattern, "filesystem.hidden")
        denied, applies = denied_by((pattern,)), False
        for field_name, path in named_paths(policy):
            beneath = denied.beneath(path)
            if beneath is None:
                raise PolicyError(
                    f"filesystem.hidden: {pattern} hides {path}, which {field_name} shows",
                    "name it in one of the two only",
                )
            applies = applies or bool(beneath)
        if not applies:
            raise PolicyError(f"filesystem.hidden: {pattern} is not beneath a path that is shown")


def check_path(path: str, where: str = "path") -> None:
    """Raise PolicyError, naming the field `where`, unless `path` is plain, absolute, and no place that
    a cell makes itself."""
    if not isinstance(path, str) or "\0" in path:
        raise PolicyError(f"{where}: {path!r} is not a path")
    _check_encodable(where, path)
    if path != os.path.normpath(path) or not path.startswith("/") or path.startswith("//"):
        raise PolicyError(f"{where}: {path!r} is not a plain absolute path")
    own = path.startswith(_OWN_TREES) and not path.startswith(_SHARED_MEMORY)
    if own or path in _OWN_PLACES:
        raise PolicyError(
            f"{where}: {path} is a place of the cell's own and cannot be the host's",
            "move what the cell needs elsewhere on the host, or pass it with files=",
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
    """Return the host paths that a cell sees, each once."""
    return tuple(sorted({path for _, path in named_paths(policy)}))


def lies_in(path: str, directories: tuple[str, ...]) -> bool:
    """Tell whether `path` is one of `directories` or beneath one."""
    return any(path == each or path.startswith(each.rstrip("/") + "/") for each in directories)


_OWN_PLACES = ("/", "/proc", "/dev", "/dev/shm", "/workspace", "/tmp", "/etc")  # noqa: S108
_OWN_TREES = ("/proc/", "/dev/", "/workspace/")
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - a memory filesystem of the host's, where anything may lie


def check_variable(name: object, value: object) -> None:
    """Raise PolicyError unless name and value can be an environment variable (environ(7))."""
    if not (isinstance(name, str) and isinstance(value, str)):
        raise PolicyError(f"environment: {name!r} and its value must be text")
    if not name or any(forbidden in name for forbidden in "=\n\0"):
        raise PolicyError(
            f"environment: {name!r} is not a name: empty, or holds '=', newline or NUL"
        )
    if "\0" in value or "\n" in value:
        raise PolicyError(f"environment: the value of {name!r} holds a NUL or a newline")
    _check_encodable("environment", name + value)


def _check_encodable(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PolicyError(f"{where}: {text!r} holds a lone surrogate") from None
