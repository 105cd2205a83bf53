"""Permissions and globs of host paths, translated into a policy; the globs are matched on this host."""

import fnmatch
import os
from collections.abc import Iterator, Sequence

import msgspec

from ....policies.argument_checks import check_names
from ....policies.denied import ANY_DEPTH, denied_by, fixed_part, is_pattern
from ....policies.errors import PolicyError
from ....policies.languages import SHEBANG_BYTES, shebang_of
from ....policies.network.rule import NetworkDenial, NetworkRule
from ....policies.permission_sets import (
    FilePermission,
    NetworkPermission,
    PermissionLevel,
    PermissionSet,
    ProcessPermission,
)
from ....policies.policy import (
    Policy,
    check_limit,
    check_policy,
    lies_in,
    places_shown,
    shown_paths,
)
from ....runner.host.shown_paths import is_channel, resolve

_MOST_LOOKED_AT = 100_000
_DOT_NAMES = "/**/.*"  # names that begin with a dot, at any depth below a directory


def expand(name: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the paths that the allowed `patterns` match now, links resolved.

    `**` stands for any number of directories, and at the end for the directory above it with all that
    it holds.  A link that a wildcard matches is skipped, unless root owns it and it leads to a place
    below the wildcard's own directory: a user who may write there must not choose what cells see.
    Named pipes and sockets are skipped too.
    Raises PolicyError, naming the field `name`, for a pattern that is not an absolute path or matches
    nothing, and for a path without wildcards that leads through such a link.
    """
    found: list[str] = []
    for pattern in check_names(name, patterns):
        _check_absolute(name, pattern)
        pattern = pattern.removesuffix("/" + ANY_DEPTH).rstrip("/") or "/"
        if is_pattern(pattern):
            matches = [path for path in _matches(name, pattern) if not is_channel(path)]
        else:
            matches = [resolve(name, pattern)]
        if not matches:
            raise PolicyError(
                f"{name}: {pattern!r} matches nothing on this host", _why_nothing(name, pattern)
            )
        found += matches
    return tuple(dict.fromkeys(found))


def from_wildcards(patterns: Sequence[str], found: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of `found` (from `expand`) that no pattern names literally, and that may be
    gone when a launcher starts."""
    named = {os.path.realpath(each) for each in patterns if not is_pattern(each)}
    return tuple(each for each in found if each not in named)


def denied_patterns(name: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the denied `patterns` for `Filesystem.hidden`: as given, and with links resolved.

    Raises PolicyError, naming the field `name`, for a pattern that is not an absolute path, or that
    leads through a directory which is a symbolic link that a program could have made.
    """
    found: list[str] = []
    for pattern in check_names(name, patterns):
        _check_absolute(name, pattern)
        plain = "/" + os.path.normpath(pattern).lstrip("/")
        above = fixed_part(plain)
        rest = plain.removeprefix(above)
        if os.path.lexists(parent := above if rest else os.path.dirname(above)):
            resolve(name, parent)
        found += [plain, os.path.realpath(above) + rest]
    return tuple(dict.fromkeys(found))


def dot_names(name: str, directories: Sequence[str], *, writable: bool) -> tuple[str, ...]:
    """Return the patterns or paths that hide names which begin with a dot, below `directories`.

    In writable directories these are the names that exist now, since programs make such names
    themselves; elsewhere a pattern, which also hides names that are made later.
    """
    if not writable:
        return tuple(path + _DOT_NAMES for path in directories if os.path.isdir(path))
    found: list[str] = []
    looked_at = 0
    for top in directories:
        for directory, names, files in os.walk(top):
            looked_at += len(names) + len(files)
            if looked_at > _MOST_LOOKED_AT:
                raise PolicyError(
                    f"{name}: {top} has more than {_MOST_LOOKED_AT:,} names to look through",
                    "allow fewer directories, or set allow_hidden=True",
                )
            found += [
                os.path.join(directory, each) for each in (*names, *files) if each.startswith(".")
            ]
            names[:] = [each for each in names if not each.startswith(".")]
    return tuple(found)


def with_files(
    policy: Policy, *, read: Sequence[str] = (), write: Sequence[str] = (),
    execute: Sequence[str] = (), hidden: Sequence[str] = (), optional: Sequence[str] = (),
) -> Policy:  # fmt: skip
    """Return `policy` with these paths shown too, and without the paths that `hidden` denies, also
    among those that `policy` already shows."""
    files, processes, python = policy.filesystem, policy.processes, policy.python
    hidden = tuple(dict.fromkeys((*files.hidden, *hidden)))
    denied = denied_by(hidden)

    def left(*paths: str) -> tuple[str, ...]:
        """Leave out each path that is denied by its own name or by that of its target."""
        kept = (each for each in paths if not denied.denies(each))
        return tuple(
            dict.fromkeys(each for each in kept if not denied.denies(os.path.realpath(each)))
        )

    policy = msgspec.structs.replace(
        policy,
        filesystem=msgspec.structs.replace(
            files, read=left(*files.read, *read), write=left(*files.write, *write), hidden=()
        ),
        processes=msgspec.structs.replace(processes, execute=left(*processes.execute, *execute)),
        python=msgspec.structs.replace(python, path=left(*python.path)),
    )
    shown = {name for path in places_shown(policy) for name in (path, os.path.realpath(path))}
    optional = tuple(dict.fromkeys((*files.optional, *optional)))
    beneath = tuple(
        each for each in hidden if any(denied_by((each,)).beneath(path) for path in shown)
    )
    return msgspec.structs.replace(
        policy,
        filesystem=msgspec.structs.replace(
            policy.filesystem,
            hidden=beneath,
            optional=tuple(each for each in optional if each in shown_paths(policy)),
        ),
    )


def _check_absolute(name: str, pattern: object) -> None:
    if not isinstance(pattern, str) or not os.path.isabs(pattern) or "\0" in pattern:
        raise PolicyError(f"{name}: must be absolute paths, got {pattern!r}")


def _matches(name: str, pattern: str) -> Iterator[str]:
    """Yield the paths that a pattern with wildcards matches, in order."""
    base = fixed_part(pattern)
    if not os.path.isdir(base):
        return
    real = resolve(name, base)
    for path in _Walk(name, pattern).beneath(real, _parts(pattern)):
        try:
            found = resolve(name, path)
        except PolicyError:  # the path leads through a link that root does not own, or is gone
            continue
        if lies_in(found, (real,)):
            yield found


def _parts(pattern: str) -> tuple[str, ...]:
    return tuple(part for part in pattern.removeprefix(fixed_part(pattern)).split("/") if part)


def _why_nothing(name: str, pattern: str) -> str:
    base = fixed_part(pattern)
    if not os.path.isdir(base):
        return f"there is no directory {base}"
    if any(True for _ in _Walk(name, pattern).beneath(resolve(name, base), _parts(pattern))):
        return "a symbolic link that a wildcard matches counts only if root owns it"
    return (
        f"nothing in {base} has such a name; a wildcard enters no symbolic link, and matches no name "
        "that begins with a dot"
    )


class _Walk:
    """Matches names within a bounded number of directory entries; enters no symbolic link."""

    def __init__(self, name: str, pattern: str) -> None:
        self._name, self._pattern = name, pattern
        self._looked_at = 0

    def beneath(self, directory: str, parts: tuple[str, ...]) -> Iterator[str]:
        """Yield the paths below `directory` that the components `parts` match."""
        head, further = parts[0], parts[1:]
        if head == ANY_DEPTH:
            if further:
                yield from self.beneath(directory, further)
            for entry in self._entries(directory, "*"):
                if entry.is_dir(follow_symlinks=False):
                    yield from self.beneath(entry.path, parts)
            return
        for entry in self._entries(directory, head):
            if not further:
                yield entry.path
            elif entry.is_dir(follow_symlinks=False):
                yield from self.beneath(entry.path, further)

    def _entries(self, directory: str, pattern: str) -> Iterator["os.DirEntry[str]"]:
        try:
            with os.scandir(directory) as listed:
                entries = sorted(listed, key=lambda each: each.name)
        except OSError:
            return
        self._looked_at += len(entries)
        if self._looked_at > _MOST_LOOKED_AT:
            raise PolicyError(
                f"{self._name}: {self._pattern!r} has more than {_MOST_LOOKED_AT:,} files to match",
                "name the directories themselves: their content is shown with them",
            )
        dotted = pattern.startswith(".")
        for entry in entries:
            hidden = entry.name.startswith(".") and not dotted
            if not hidden and (entry.name == pattern or fnmatch.fnmatchcase(entry.name, pattern)):
                yield entry


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
