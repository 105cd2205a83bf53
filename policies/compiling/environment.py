"""The variables of every program in a cell: its directories, its certificate authorities, and settings
of runtimes; and the file systems in memory that each cell has for itself.

Runtimes learn the size of a cell from /proc, /sys and system calls (runner/fixed_root.py).
runtimes.toml has variables for those that do not, and for those that take more than a limit allows.
Variables of the policy, and of a request, replace any of them.
"""

import math
import os
from functools import cache

from ..denied import patterns_beneath
from ..errors import PolicyError
from ..languages import LANGUAGES, OWN_PROGRAMS, PYTHON, SPOKEN
from ..plan import CERTIFICATES, Tmpfs
from ..policy import MIB, Policy, check_path, lies_in, places_shown, shown_paths
from .host import Host

_ALWAYS = {
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "TMPDIR": "/tmp",  # noqa: S108 - the cell's own tmpfs
    "TZ": "UTC",
}
# Variables by which clients find the authorities that they trust, at whatever place they were built to
# look: OpenSSL (SSL_CTX_set_default_verify_paths(3)), curl(1), git-config(1), requests, pip, node(1).
TRUSTING = (
    "SSL_CERT_FILE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "REQUESTS_CA_BUNDLE", "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
)  # fmt: skip


def environment_of(
    policy: Policy, host: Host, layers: tuple[str, ...], language: str
) -> dict[str, str]:
    variables = _ALWAYS | _for_runtimes(policy, host, layers, language)
    if policy.python.path:  # tell drawing libraries that there is no screen
        variables |= {"MPLBACKEND": "Agg", "MPLCONFIGDIR": "/tmp"}  # noqa: S108 - in the cell
    if policy.network.allow and host.certificates:
        variables |= dict.fromkeys(TRUSTING, CERTIFICATES)
    if policy.processes.subprocesses:  # `python3` is the sandbox's, and imports its packages
        variables["PATH"] = f"{OWN_PROGRAMS}:{variables['PATH']}"
        if policy.python.path:
            variables["PYTHONPATH"] = os.pathsep.join(policy.python.path)
    elif language in LANGUAGES and LANGUAGES[language].is_shell:
        variables["PATH"] += f":{OWN_PROGRAMS}"
    if host.gpu.search:
        variables["LD_LIBRARY_PATH"] = host.gpu.search
    return variables | policy.environment


def _for_runtimes(
    policy: Policy, host: Host, layers: tuple[str, ...], language: str
) -> dict[str, str]:
    """Return the variables of runtimes; texts for one variable are put together, but the first of
    numbers is taken."""
    programs, memory = policy.processes.subprocesses, policy.limits.memory_bytes
    runs_others = programs or language != PYTHON
    now = {
        "programs": programs or language not in SPOKEN,
        "queries": programs or bool(policy.python.path),
        "rlimit_as": runs_others and "rlimit_as" in layers,
        "node": runs_others and "rlimit_as" in layers and not host.node_option,
        "write": runs_others and bool(policy.filesystem.write),
        "preload": bool(policy.python.path and policy.python.preload),
        "deaf": (runs_others or bool(policy.python.path)) and "listener" not in layers,
    }
    sizes = {
        "processors": max(1, math.ceil(policy.limits.cpus)),
        "memory_bytes": memory,
        "most_bytes": memory // 10 * 9,  # the rest is for its code, its stacks, and the cell
        "beside_files_mib": (memory - min(policy.limits.workspace_bytes, memory // 2)) // MIB,
        "heap_bytes": memory // 4 * 3,
        "heap_mib": max(1, memory // 2 // MIB),
    }
    found: dict[str, str] = {}
    for each in _runtimes():
        if now[each["when"]]:
            name, value = each["name"], each["value"].format_map(sizes)
            before = found.setdefault(name, value)
            if before is not value and before.startswith("-"):
                found[name] = f"{before} {value}"
    return found


@cache
def _runtimes() -> list[dict[str, str]]:
    import tomllib  # a plan that was compiled before needs no table

    with open(os.path.join(os.path.dirname(__file__), "runtimes.toml"), "rb") as file:
        variables: list[dict[str, str]] = tomllib.load(file)["variable"]
    return variables


# Places of the cell that HOME cannot lie in.
_SYSTEM = (
    "/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/workspace",
)  # fmt: skip
_MOST_OWN = 16  # mounts that each cell makes
_SYSTEM_TREES = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/var", "/sys", "/home",
    "/tmp",  # noqa: S108 - of the cell
)  # fmt: skip


def check_own_directories(policy: Policy) -> None:
    """Raise PolicyError unless each directory of the cell's own lies outside all others that it has."""
    own = policy.filesystem.own
    for path in own:
        check_path(path, "filesystem.own")
        others = [each for each in own if each != path]
        if len(others) < len(own) - 1 or len(own) > _MOST_OWN:
            raise PolicyError(
                f"filesystem.own: must be at most {_MOST_OWN} different paths, got {list(own)!r}"
            )
        taken = (*places_shown(policy), *_SYSTEM_TREES, *others)
        if lies_in(path, taken) or any(lies_in(each, (path,)) for each in taken):
            raise PolicyError(
                "filesystem.own: must neither lie in a directory of the system, nor in a shown one, "
                f"nor contain one, got {path}"
            )


def check_changes(policy: Policy) -> None:
    """Raise PolicyError unless what is changed in a path goes to a directory that cells do not see."""
    for path, place in policy.filesystem.changes.items():
        check_path(place, "filesystem.changes")
        if path not in policy.filesystem.write:
            raise PolicyError(f"filesystem.changes: must be of filesystem.write, got {path}")
        if lies_in(place, shown_paths(policy)):
            raise PolicyError(f"filesystem.changes: must not lie in a shown path, got {place}")


def check_protected(policy: Policy) -> None:
    """Raise PolicyError unless each protected path lies beneath a path of `filesystem.write`, and a
    listener is required."""
    for pattern in policy.filesystem.protected:
        check_path(pattern, "filesystem.protected")
        if not patterns_beneath((pattern,), policy.filesystem.write):
            raise PolicyError(
                f"filesystem.protected: must lie beneath a path of filesystem.write, got {pattern}"
            )
    if policy.filesystem.protected and "listener" in policy.optional_layers:
        raise PolicyError(
            "filesystem.protected: needs the layer listener, which hands over what makes a name",
            "take listener out of optional_layers",
        )


def own_home(policy: Policy) -> str:
    """Return HOME of a policy if cells have a directory of their own there, such as /home/user; empty
    if it is a place of the system, or the policy shows it or a directory above it."""
    home = policy.environment.get("HOME", "")
    if home in ("/", "/tmp") or not home.startswith("/") or lies_in(home, _SYSTEM):  # noqa: S108
        return ""
    return "" if lies_in(home, shown_paths(policy)) else os.path.normpath(home)


def own_filesystems(policy: Policy) -> tuple[Tmpfs, ...]:
    """Return the file systems in memory that each cell has for itself.  /workspace is HOME too; where
    host paths are shown beneath HOME, that is another one."""
    limits, home = policy.limits, own_home(policy)
    has_shown = any(lies_in(each, (home,)) for each in shown_paths(policy)) if home else False
    further = (*policy.filesystem.own, *((home,) if has_shown else ()))
    return tuple(
        Tmpfs(
            target=target,
            size_bytes=limits.workspace_bytes,
            inodes=limits.workspace_inodes,
            executable=policy.processes.subprocesses and policy.processes.execute_own,
            also=home if target == "/workspace" and not has_shown else "",
            is_home=has_shown and target == home,
        )
        for target in ("/workspace", "/tmp", *further)  # noqa: S108 - inside the cell
    )
