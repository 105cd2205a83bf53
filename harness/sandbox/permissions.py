"""Translation of permissions into a policy; their globs are matched on this host."""

import fnmatch
import os
from collections.abc import Iterator, Sequence

import msgspec

from ...policies.errors import PolicyError
from ...policies.languages import SHEBANG_BYTES, shebang_of
from ...policies.network.rule import NetworkDenial, NetworkRule
from ...policies.permissions import (
    FilePermission,
    NetworkPermission,
    PermissionLevel,
    PermissionSet,
    ProcessPermission,
)
from ...policies.policy import Policy, check_limit, check_policy
from .expansion import denied_patterns, dot_names, expand, from_wildcards, with_files

_SEARCHED = ("/usr/local/bin", "/usr/bin", "/usr/sbin")
_LIBRARIES = ("/usr/lib", "/usr/local/lib")  # directories of libraries that programs map
_SHELLS = (
    "sh",
    "ash",
    "bash",
    "rbash",
    "dash",
    "zsh",
    "ksh",
    "mksh",
    "fish",
    "csh",
    "tcsh",
    "busybox",
)
_OWN_TASKS = 1  # the main process of the program


def policy_of(permissions: PermissionSet, base: Policy | None = None) -> Policy:
    """Return `base`, by default the deny-all policy, widened by `permissions`.

    Raises PolicyError for permissions that are invalid or cannot be granted.
    """
    policy = base or Policy(name="permissions")
    files = [each for each in permissions.permissions if isinstance(each, FilePermission)]
    for permission in permissions.permissions:
        if isinstance(permission, ProcessPermission):
            policy = _with_programs(policy, permission)
        elif isinstance(permission, NetworkPermission):
            policy = _with_network(policy, permission)
    # Denials of all permissions take precedence over the paths that any of them, or the base, shows.
    policy = with_files(policy, hidden=[path for each in files for path in _denied(each)])
    for permission in files:
        policy = _with_files(policy, permission, files)
    return check_policy(policy)


def _denied(permission: FilePermission) -> tuple[str, ...]:
    """Return the paths that a permission denies; of level NONE, all that it names."""
    denied = denied_patterns("denied_paths", permission.denied_paths)
    if permission.level is not PermissionLevel.NONE:
        return denied
    return (*denied, *denied_patterns("allowed_paths", permission.allowed_paths))


def _with_files(
    policy: Policy, permission: FilePermission, files: Sequence[FilePermission]
) -> Policy:  # fmt: skip
    if permission.level is PermissionLevel.NONE:
        return policy
    shown = expand("allowed_paths", permission.allowed_paths)
    written = permission.level is PermissionLevel.WRITE
    executed = permission.level is PermissionLevel.EXECUTE
    hidden = [path for each in files for path in _denied(each)]
    if not permission.allow_hidden:
        hidden += dot_names("allowed_paths", shown, writable=written)
    if executed:
        policy = _executing(policy)
    return with_files(
        policy,
        read=() if written else shown,
        write=shown if written else (),
        execute=shown if executed else (),
        hidden=hidden,
        optional=from_wildcards(permission.allowed_paths, shown),
    )


def _executing(policy: Policy) -> Policy:
    processes = msgspec.structs.replace(policy.processes, subprocesses=True, execute_own=False)
    return msgspec.structs.replace(policy, processes=processes)


def _with_network(policy: Policy, permission: NetworkPermission) -> Policy:
    if permission.allow_inbound:
        raise PolicyError(
            "allow_inbound: must be False: a cell accepts no connections from outside"
        )
    if not permission.allowed_hosts and (permission.allow_outbound or permission.allowed_ports):
        raise PolicyError(
            "allowed_hosts: must name the hosts that programs may reach, got none",
            "NetworkPermission(allowed_hosts=[...], allowed_ports=[443])",
        )
    network = policy.network
    allow = tuple(_allowed(permission))
    deny = tuple(NetworkDenial(host=host) for host in permission.denied_hosts)
    return msgspec.structs.replace(
        policy,
        network=msgspec.structs.replace(
            network,
            loopback=network.loopback or permission.allow_localhost,
            allow=(*network.allow, *allow),
            deny=(*network.deny, *deny),
        ),
    )


def _allowed(permission: NetworkPermission) -> Iterator[NetworkRule]:
    """Yield the rules of a permission, which has no schemes: on other ports than 80 and 443 programs
    may send any bytes."""
    standard = tuple(port for port in permission.allowed_ports or (443,) if port in (80, 443))
    others = tuple(port for port in permission.allowed_ports if port not in standard)
    for host in permission.allowed_hosts:
        if standard:
            yield NetworkRule(host=host, ports=standard)
        if others:
            yield NetworkRule(host=host, ports=others, schemes=("tcp",))


def _with_programs(policy: Policy, permission: ProcessPermission) -> Policy:
    check_limit("max_processes", permission.max_processes, whole=True)
    most = max(permission.max_processes, 0) + _OWN_TASKS
    limits = msgspec.structs.replace(policy.limits, processes=min(policy.limits.processes, most))
    policy = msgspec.structs.replace(policy, limits=limits)
    if not permission.allow_subprocess:
        return policy
    libraries = tuple(path for path in _LIBRARIES if os.path.isdir(path))
    return with_files(_executing(policy), execute=(*_programs(permission), *libraries))


def _programs(permission: ProcessPermission) -> tuple[str, ...]:
    """Return the files of the allowed commands, and the interpreters of those that are scripts."""
    found: dict[str, None] = {}
    for path in _commands():
        chain = _chain(path)
        if _is_allowed(path, permission) and all(_may_run(each, permission) for each in chain):
            found.update(dict.fromkeys(chain))
    if not found and permission.allowed_commands:
        raise PolicyError(
            f"allowed_commands: {permission.allowed_commands!r} match no program in {_SEARCHED}"
        )
    return tuple(found)


def _commands() -> Iterator[str]:
    for directory in _SEARCHED:
        if os.path.isdir(directory):
            yield from (os.path.join(directory, name) for name in sorted(os.listdir(directory)))


def _is_allowed(path: str, permission: ProcessPermission) -> bool:
    name = os.path.basename(path)
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in permission.allowed_commands)


def _may_run(path: str, permission: ProcessPermission) -> bool:
    """Tell whether the file itself may be executed, by its own name."""
    name = os.path.basename(path)
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in permission.denied_commands):
        return False
    return permission.allow_shell or name not in _SHELLS


def _chain(path: str) -> list[str]:
    """Return the path, the file that it leads to, and the interpreter if that is a script."""
    real = os.path.realpath(path)
    if not os.path.isfile(real):
        return [path]
    with open(real, "rb") as file:
        words = shebang_of(file.read(SHEBANG_BYTES))
    chain = [path, real] if os.path.islink(path) else [real]
    if words:
        interpreter = words[0]
        return chain if interpreter == path else [*chain, *_chain(interpreter)]
    return chain
