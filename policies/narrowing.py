"""Narrowing and comparison of policies: a caller may narrow a policy, never widen it."""

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from .compiling.gpus import common_gpu, gpu_exceeds
from .denied import denied_by, is_pattern, patterns_beneath
from .policy import (
    SYSTEM_PLACES,
    Devices,
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
from .privacy_rules import narrow_privacy, privacy_exceeds
from .source.findings import Rules
from .tool_rules import narrow_tools, tools_exceed

if TYPE_CHECKING:
    from .network.comparison import RuleSet

_Section = TypeVar("_Section", Network, Http)
_STRICTER = ("off", "advise", "enforce")
_NO_PACKAGE = "-"  # not a name: stands for an empty list of allowed packages
_NONE = "none"  # not a module: stands for an empty list of allowed imports


def narrow(policy: Policy, by: Policy) -> Policy:
    """Return the policy that allows what both allow: never more than `policy`, never more than `by`."""
    files, others = policy.filesystem, by.filesystem
    hidden = _union(files.hidden, others.hidden)
    execute = _common(policy.processes.execute, by.processes.execute, hidden)
    write = _common(files.write, others.write, hidden)
    read = _common(shown_paths(policy), shown_paths(by), hidden)
    packages = _common(policy.python.path, by.python.path, hidden)
    system_files = files.system_files and others.system_files
    optional = _union(files.optional, others.optional)
    processes = {
        name: getattr(policy.processes, name) and getattr(by.processes, name)
        for name in ("threads", "subprocesses", "execute_own", "terminal", "debug")
    }
    is_own = "own" in (policy.isolation.kernel, by.isolation.kernel)
    return Policy(
        name=policy.name if policy.name == by.name else f"{policy.name} narrowed by {by.name}",
        filesystem=Filesystem(
            read=tuple(path for path in read if path not in (*write, *packages)),
            write=write,
            optional=_shared(optional, (*read, *execute)),
            hidden=patterns_beneath(hidden, (*read, *(SYSTEM_PLACES if system_files else ()))),
            protected=patterns_beneath(_union(files.protected, others.protected), write),
            own=tuple(path for path in policy.filesystem.own if path in by.filesystem.own),
            changes={
                path: place
                for path, place in {**files.changes, **others.changes}.items()
                if path in write
            },
            as_owner=files.as_owner and others.as_owner,
            system_files=system_files,
            watch=files.watch or others.watch,
        ),
        processes=Processes(execute=execute if processes["subprocesses"] else (), **processes),
        network=_common_section(
            policy.network, by.network, loopback=policy.network.loopback and by.network.loopback
        ),
        http=_common_section(policy.http, by.http),
        python=Python(path=packages, preload=_shared(policy.python.preload, by.python.preload)),
        packages=_fewer(policy.packages, by.packages),
        syscalls=Syscalls(groups=_shared(policy.syscalls.groups, by.syscalls.groups)),
        devices=Devices(gpu=common_gpu(policy.devices.gpu, by.devices.gpu)),
        isolation=Isolation(kernel="own" if is_own else "any"),
        evaluator=Evaluator(monty=policy.evaluator.monty and by.evaluator.monty and not is_own),
        limits=_least(policy.limits, by.limits),
        validation=_stricter(policy.validation, by.validation),
        tools=narrow_tools(policy.tools, by.tools),
        privacy=narrow_privacy(policy.privacy, by.privacy),
        environment={
            name: value
            for name, value in policy.environment.items()
            if by.environment.get(name) == value
        },
        optional_layers=_shared(policy.optional_layers, by.optional_layers),
    )


def exceeds(policy: Policy, limit: Policy) -> tuple[str, ...]:
    """Return as text what `policy` allows and `limit` does not, each line beginning with the field."""
    python, most = policy.python, limit.python
    return (
        *_paths("filesystem: reading", shown_paths(policy), shown_paths(limit)),
        *_paths("python.path: importing from", python.path, most.path),
        *_more("python.preload: importing {} ahead", python.preload, most.preload),
        *_packages(policy.packages, limit.packages),
        *_paths("filesystem.write: writing", policy.filesystem.write, limit.filesystem.write),
        *(
            f"filesystem.changes: changing {path} itself"
            for path in limit.filesystem.changes
            if path in policy.filesystem.write and path not in policy.filesystem.changes
        ),
        *(
            f"filesystem.protected: making {path}"
            for path in patterns_beneath(limit.filesystem.protected, policy.filesystem.write)
            if path not in policy.filesystem.protected
        ),
        *(
            f"filesystem.own: writing files in {path}"
            for path in policy.filesystem.own
            if path not in limit.filesystem.own
        ),
        *_paths("processes.execute: executing", policy.processes.execute, limit.processes.execute),
        *_uncovered(policy, limit),
        *_switches(policy, limit),
        *_network(policy.network, limit.network),
        *(each.replace("network", "http", 1) for each in _network(policy.http, limit.http)),
        *_more(
            "syscalls.groups: the system calls of {}", policy.syscalls.groups, limit.syscalls.groups
        ),
        *gpu_exceeds(policy.devices.gpu, limit.devices.gpu),
        *_limits(policy.limits, limit.limits),
        *_validation(policy.validation, limit.validation),
        *tools_exceed(policy.tools, limit.tools),
        *privacy_exceeds(policy.privacy, limit.privacy),
        *(
            f"environment: {name}={value}"
            for name, value in policy.environment.items()
            if limit.environment.get(name) != value
        ),
        *_more(
            "optional_layers: going on without {}", policy.optional_layers, limit.optional_layers
        ),
    )


def _more(words: str, some: Iterable[str], limit: Container[str]) -> list[str]:
    return [words.format(each) for each in some if each not in limit]


def _shared(some: tuple[str, ...], others: Container[str]) -> tuple[str, ...]:
    return tuple(each for each in some if each in others)


def _uncovered(policy: Policy, limit: Policy) -> list[str]:
    """Return the paths that `limit` hides and `policy` shows, by name or beneath a shown path."""
    shown, denied = places_shown(policy), denied_by(limit.filesystem.hidden)
    plain = tuple(path for path in policy.filesystem.hidden if not is_pattern(path))
    found = [path for path in shown_paths(policy) if denied.denies(path)]
    found += [
        path
        for path in patterns_beneath(limit.filesystem.hidden, shown)
        if path not in policy.filesystem.hidden and not lies_in(path, plain)
    ]
    return [f"filesystem.hidden: reading {path}" for path in found]


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
        allow = _shared(some.allow, others.allow) or (_NO_PACKAGE,)
    return Packages(
        require=_shared(some.require, others.require),
        allow=allow,
        max_bytes=min(some.max_bytes, others.max_bytes),
        preload=_shared(some.preload, others.preload),
        learn_preload=some.learn_preload and others.learn_preload,
    )


def _packages(some: Packages, limit: Packages) -> list[str]:
    found = _more("packages.require: importing {}", some.require, limit.require)
    if limit.allow:
        found += [] if some.allow else ["packages.allow: more than allowed"]
        most = (*limit.allow, _NO_PACKAGE)
        found += _more("packages.allow: {} is among them", some.allow, most)
    found += _more("packages.preload: importing {} ahead", some.preload, limit.preload)
    if some.learn_preload and not limit.learn_preload:
        found.append("packages.learn_preload: importing ahead what programs import")
    if some.max_bytes > limit.max_bytes:
        found.append(f"packages.max_bytes: {some.max_bytes:,} instead of {limit.max_bytes:,}")
    return found


def _common_section(some: _Section, others: _Section, **kept: Any) -> _Section:
    kind = type(some)
    if not (some.allow and others.allow):
        return kind(**kept)
    from .network.comparison import common_rules  # imports ipaddress, which few policies need

    shared = common_rules(_rules_of(some), _rules_of(others))
    proxy = (
        some.proxy if some.proxy == others.proxy else "none"
    )  # without it, addresses are checked
    return kind(allow=tuple(shared.allow), deny=tuple(shared.deny), proxy=proxy, **kept)


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
        "processes.debug: tracing": (policy.processes.debug, limit.processes.debug),
        "network.loopback: sockets on its loopback": (policy.network.loopback, limit.network.loopback),
        "filesystem.system_files: reading the files of the host's programs": (
            policy.filesystem.system_files, limit.filesystem.system_files,
        ),
        "filesystem.as_owner: the rights of owners": (
            policy.filesystem.as_owner, limit.filesystem.as_owner,
        ),
        "filesystem.watch: opening files unnoticed": (
            not policy.filesystem.watch, not limit.filesystem.watch,
        ),
        "isolation.kernel: sharing the host's kernel": (
            policy.isolation.kernel != "own", limit.isolation.kernel != "own",
        ),
        "evaluator.monty: answering expressions outside a cell": (
            policy.evaluator.monty, limit.evaluator.monty,
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
        words = f"validation.{name}: {{}} is not among them"
        found += _more(words, getattr(limit, name), getattr(some, name))
    if limit.allowed_imports and not some.allowed_imports:
        found.append("validation.allowed_imports: more than allowed")
    return found + [
        f"validation.allowed_imports: {name} is among them"
        for name in some.allowed_imports
        if name != _NONE and not _gives(limit, name)
    ]
