"""Narrowing and comparison of policies: a caller may narrow a policy, never widen it."""

from typing import TYPE_CHECKING

import msgspec

from .denied import denied_by, is_pattern
from .policy import (
    SYSTEM_PLACES,
    Evaluator,
    Filesystem,
    Http,
    Isolation,
    Limits,
    Network,
    Packages,
    Policy,
    Processes,
    Python,
    Syscalls,
    Validation,
    lies_in,
    places_shown,
    shown_paths,
)  # fmt: skip
from .privacy import narrow_privacy, privacy_exceeds
from .source.findings import Rules
from .tools import narrow_tools, tools_exceed

if TYPE_CHECKING:
    from .network.comparison import RuleSet

_STRICTER = ("off", "advise", "enforce")
_NO_PACKAGE = "-"  # not a name: stands for an empty list of allowed packages
_NONE = "none"  # not a module: stands for an empty list of allowed imports


def narrow(policy: Policy, by: Policy) -> Policy:
    """Return the policy that allows what both allow: never more than `policy`, never more than `by`."""
    hidden = _union(policy.filesystem.hidden, by.filesystem.hidden)
    execute = _common(policy.processes.execute, by.processes.execute, hidden)
    write = _common(policy.filesystem.write, by.filesystem.write, hidden)
    read = _common(shown_paths(policy), shown_paths(by), hidden)
    packages = _common(policy.python.path, by.python.path, hidden)
    system_files = policy.filesystem.system_files and by.filesystem.system_files
    subprocesses = policy.processes.subprocesses and by.processes.subprocesses
    return Policy(
        name=policy.name if policy.name == by.name else f"{policy.name} narrowed by {by.name}",
        filesystem=Filesystem(
            read=tuple(path for path in read if path not in (*write, *packages)),
            write=write,
            optional=tuple(
                path
                for path in _union(policy.filesystem.optional, by.filesystem.optional)
                if path in (*read, *execute)
            ),
            hidden=_beneath(hidden, (*read, *(SYSTEM_PLACES if system_files else ()))),
            system_files=system_files,
            watch=policy.filesystem.watch or by.filesystem.watch,
        ),
        processes=Processes(
            threads=policy.processes.threads and by.processes.threads,
            subprocesses=subprocesses,
            execute=execute if subprocesses else (),
            execute_own=policy.processes.execute_own and by.processes.execute_own,
            terminal=policy.processes.terminal and by.processes.terminal,
        ),
        network=_common_network(policy.network, by.network),
        http=_common_http(policy.http, by.http),
        python=Python(
            path=packages,
            preload=tuple(each for each in policy.python.preload if each in by.python.preload),
        ),
        packages=_fewer(policy.packages, by.packages),
        syscalls=Syscalls(
            groups=tuple(name for name in policy.syscalls.groups if name in by.syscalls.groups)
        ),
        isolation=Isolation(
            kernel="own" if "own" in (policy.isolation.kernel, by.isolation.kernel) else "any"
        ),
        evaluator=Evaluator(
            monty=policy.evaluator.monty
            and by.evaluator.monty
            and "own" not in (policy.isolation.kernel, by.isolation.kernel)
        ),
        limits=_least(policy.limits, by.limits),
        validation=_stricter(policy.validation, by.validation),
        tools=narrow_tools(policy.tools, by.tools),
        privacy=narrow_privacy(policy.privacy, by.privacy),
        environment={
            name: value
            for name, value in policy.environment.items()
            if by.environment.get(name) == value
        },
        optional_layers=tuple(
            layer for layer in policy.optional_layers if layer in by.optional_layers
        ),
    )


def exceeds(policy: Policy, limit: Policy) -> tuple[str, ...]:
    """Return as text what `policy` allows and `limit` does not, each line beginning with the field."""
    return (
        *_paths("filesystem: reading", shown_paths(policy), shown_paths(limit)),
        *_paths("python.path: importing from", policy.python.path, limit.python.path),
        *(
            f"python.preload: importing {name} ahead"
            for name in policy.python.preload
            if name not in limit.python.preload
        ),
        *_packages(policy.packages, limit.packages),
        *_paths("filesystem.write: writing", policy.filesystem.write, limit.filesystem.write),
        *_paths("processes.execute: executing", policy.processes.execute, limit.processes.execute),
        *_uncovered(policy, limit),
        *_switches(policy, limit),
        *_network(policy.network, limit.network),
        *(each.replace("network", "http", 1) for each in _network(policy.http, limit.http)),
        *(
            f"syscalls.groups: the system calls of {group}"
            for group in policy.syscalls.groups
            if group not in limit.syscalls.groups
        ),
        *(
            ("isolation.kernel: sharing the host's kernel",)
            if limit.isolation.kernel == "own" != policy.isolation.kernel
            else ()
        ),
        *(
            ("evaluator.monty: answering expressions outside a cell",)
            if policy.evaluator.monty and not limit.evaluator.monty
            else ()
        ),
        *_limits(policy.limits, limit.limits),
        *_validation(policy.validation, limit.validation),
        *tools_exceed(policy.tools, limit.tools),
        *privacy_exceeds(policy.privacy, limit.privacy),
        *_environment(policy, limit),
        *(
            f"optional_layers: going on without {layer}"
            for layer in policy.optional_layers
            if layer not in limit.optional_layers
        ),
    )


def _uncovered(policy: Policy, limit: Policy) -> list[str]:
    """Return the paths that `limit` hides and `policy` shows, by name or beneath a shown path."""
    shown, denied = places_shown(policy), denied_by(limit.filesystem.hidden)
    plain = tuple(path for path in policy.filesystem.hidden if not is_pattern(path))
    found = [path for path in shown_paths(policy) if denied.denies(path)]
    found += [
        path
        for path in _beneath(limit.filesystem.hidden, shown)
        if path not in policy.filesystem.hidden and not lies_in(path, plain)
    ]
    return [f"filesystem.hidden: reading {path}" for path in found]


def _beneath(patterns: tuple[str, ...], shown: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns that deny a path beneath `shown` paths."""
    return tuple(
        each for each in patterns if any(denied_by((each,)).beneath(path) for path in shown)
    )


def _common(
    some: tuple[str, ...], others: tuple[str, ...], hidden: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the paths of either list that lie in the other, without the hidden ones."""
    within = {path for path in some if lies_in(path, others)}
    within |= {path for path in others if lies_in(path, some)}
    denied = denied_by(hidden)
    return tuple(sorted(path for path in within if not denied.denies(path)))


def _least(some: Limits, others: Limits) -> Limits:
    names = (field.name for field in msgspec.structs.fields(Limits))
    return Limits(**{name: min(getattr(some, name), getattr(others, name)) for name in names})


def _fewer(some: Packages, others: Packages) -> Packages:
    """Return the packages that both allow; an empty list of allowed ones allows all."""
    allow = some.allow or others.allow
    if some.allow and others.allow:
        allow = tuple(name for name in some.allow if name in others.allow) or (_NO_PACKAGE,)
    return Packages(
        require=tuple(each for each in some.require if each in others.require),
        allow=allow,
        max_bytes=min(some.max_bytes, others.max_bytes),
        preload=tuple(each for each in some.preload if each in others.preload),
        learn_preload=some.learn_preload and others.learn_preload,
    )


def _packages(some: Packages, limit: Packages) -> list[str]:
    found = [
        f"packages.require: importing {each}" for each in some.require if each not in limit.require
    ]
    if limit.allow and not some.allow:
        found.append("packages.allow: more than allowed")
    found += [
        f"packages.allow: {name} is among them"
        for name in some.allow
        if limit.allow and name not in (*limit.allow, _NO_PACKAGE)
    ]
    found += [
        f"packages.preload: importing {name} ahead"
        for name in some.preload
        if name not in limit.preload
    ]
    if some.learn_preload and not limit.learn_preload:
        found.append("packages.learn_preload: importing ahead what programs import")
    if some.max_bytes > limit.max_bytes:
        found.append(f"packages.max_bytes: {some.max_bytes:,} instead of {limit.max_bytes:,}")
    return found


def _common_network(some: Network, others: Network) -> Network:
    loopback = some.loopback and others.loopback
    if not (some.allow and others.allow):
        return Network(loopback=loopback)
    from .network.comparison import common_rules  # imports ipaddress, which few policies need

    shared = common_rules(_rules_of(some), _rules_of(others))
    is_same = some.proxy == others.proxy  # without the proxy, addresses are checked
    return Network(
        loopback=loopback, allow=tuple(shared.allow), deny=tuple(shared.deny),
        proxy=some.proxy if is_same else "none",
    )  # fmt: skip


def _common_http(some: Http, others: Http) -> Http:
    if not (some.allow and others.allow):
        return Http()
    from .network.comparison import common_rules

    shared = common_rules(_rules_of(some), _rules_of(others))
    proxy = some.proxy if some.proxy == others.proxy else "none"
    return Http(allow=tuple(shared.allow), deny=tuple(shared.deny), proxy=proxy)


def _network(some: Network | Http, limit: Network | Http) -> list[str]:
    if not some.allow:
        return []
    from .network.comparison import rules_exceed

    found = rules_exceed(_rules_of(some), _rules_of(limit))
    if some.proxy != "none" and limit.proxy == "none":
        found.append(f"network.proxy: {some.proxy}: addresses are not checked")
    return found


def _rules_of(network: Network | Http) -> "RuleSet":
    from .network.comparison import RuleSet

    return RuleSet(network.allow, network.deny, network.addresses)


def _stricter(some: Validation, other: Validation) -> Validation:
    return Validation(
        mode=max(some.mode, other.mode, key=_STRICTER.index),
        blocked_imports=_union(some.blocked_imports, other.blocked_imports),
        allowed_imports=_allowed(some, other),
        blocked_builtins=_union(some.blocked_builtins, other.blocked_builtins),
    )


def _union(some: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*some, *others)))


def _allowed(some: Validation, other: Validation) -> tuple[str, ...]:
    """Return the imports that both allow.  An empty list allows all, so "none" stands for no import."""
    if not some.allowed_imports and not other.allowed_imports:
        return ()
    names = _union(some.allowed_imports, other.allowed_imports)
    return tuple(name for name in names if _gives(some, name) and _gives(other, name)) or (_NONE,)


def _gives(validation: Validation, module: str) -> bool:
    """Tell whether `module` and all of its submodules may be imported."""
    allowed, blocked = tuple(validation.allowed_imports), tuple(validation.blocked_imports)
    if Rules(blocked, allowed).forbids_import(module):
        return False
    return bool(allowed) or not any(name.startswith(f"{module}.") for name in blocked)


def _paths(what: str, some: tuple[str, ...], limit: tuple[str, ...]) -> list[str]:
    return [f"{what} {path}" for path in some if not lies_in(path, limit)]


def _switches(policy: Policy, limit: Policy) -> list[str]:
    switches = {
        "processes.threads: starting threads": (policy.processes.threads, limit.processes.threads),
        "processes.subprocesses: starting programs": (
            policy.processes.subprocesses, limit.processes.subprocesses,
        ),
        "processes.execute_own: executing what it writes": (
            policy.processes.subprocesses and policy.processes.execute_own,
            limit.processes.subprocesses and limit.processes.execute_own,
        ),
        "processes.terminal: a terminal": (policy.processes.terminal, limit.processes.terminal),
        "network.loopback: sockets on its loopback": (policy.network.loopback, limit.network.loopback),
        "filesystem.system_files: reading the files of the host's programs": (
            policy.filesystem.system_files, limit.filesystem.system_files,
        ),
        "filesystem.watch: opening files unnoticed": (
            not policy.filesystem.watch, not limit.filesystem.watch,
        ),
    }  # fmt: skip
    return [what for what, (allowed, within) in switches.items() if allowed and not within]


def _limits(some: Limits, limit: Limits) -> list[str]:
    pairs = (
        (field.name, getattr(some, field.name), getattr(limit, field.name))
        for field in msgspec.structs.fields(Limits)
    )
    return [
        f"limits.{name}: {mine:,} instead of {most:,}" for name, mine, most in pairs if mine > most
    ]


def _validation(some: Validation, limit: Validation) -> list[str]:
    found = []
    if _STRICTER.index(some.mode) < _STRICTER.index(limit.mode):
        found.append(f"validation.mode: {some.mode} instead of {limit.mode}")
    for name in ("blocked_imports", "blocked_builtins"):
        missing = [each for each in getattr(limit, name) if each not in getattr(some, name)]
        found += [f"validation.{name}: {each} is not among them" for each in missing]
    if limit.allowed_imports and not some.allowed_imports:
        found.append("validation.allowed_imports: more than allowed")
    return found + [
        f"validation.allowed_imports: {name} is among them"
        for name in some.allowed_imports
        if name != _NONE and not _gives(limit, name)
    ]


def _environment(policy: Policy, limit: Policy) -> list[str]:
    return [
        f"environment: {name}={value}"
        for name, value in policy.environment.items()
        if limit.environment.get(name) != value
    ]
