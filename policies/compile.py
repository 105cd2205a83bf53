"""The compiler: a policy and a host become a plan, or one Unenforceable that lists every gap."""

import errno
import os
import re
import socket
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from .denied import denied_by
from .errors import PolicyError
from .host import SOCKETS_ABI, Host
from .languages import LANGUAGES, OWN_PROGRAMS, PYTHON
from .layers import layers_in_force
from .plan import (
    CERTIFICATES,
    Bind,
    CallAnswer,
    Condition,
    NetworkPlan,
    PathRule,
    Plan,
    Rule,
    Tmpfs,
)
from .policy import MIB, Policy, check_policy, has_sockets, lies_in, shown_paths
from .seccomp import Listened, compile_filter, number_of
from .syscalls import ADDED_BY, UNIX_SOCKETS, SyscallTable, syscall_table

# sendmsg(2) fails with ETOOMANYREFS while all processes of the uid together have more descriptors in
# flight than the sender's RLIMIT_NOFILE; one message carries up to 253 (unix(7)).  If a guest could
# have as many as the launcher, it could block the launcher's messages, and so end every cell.
_IN_FLIGHT = 2 * 253 + 6
_MOST_PORTS, _DNS_PORT = 12, 53  # a socket each, all handed over in one message
_ENVIRONMENT = {
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "TMPDIR": "/tmp",  # noqa: S108 - the cell's own tmpfs
    "TZ": "UTC",
}
# Variables by which clients find the authorities that they trust, at whatever place they were built to
# look: OpenSSL (SSL_CTX_set_default_verify_paths(3)), curl(1), git-config(1), requests, pip, node(1).
_TRUSTING = (
    "SSL_CERT_FILE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "REQUESTS_CA_BUNDLE", "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
)  # fmt: skip


_HOME = re.compile(r"/home/[a-z][a-z0-9_-]{0,31}")
# Without a memory cgroup RLIMIT_AS is the cap.  Node reserves 10 GiB for an instance of WebAssembly, of
# which its fetch has one, and the JVM 1.2 GiB for classes and code (measured).
_FOR_LITTLE_ADDRESS_SPACE = {
    "JAVA_TOOL_OPTIONS": "-XX:CompressedClassSpaceSize=64m -XX:ReservedCodeCacheSize=64m",
    "NODE_OPTIONS": "--disable-wasm-trap-handler",
}


class CellLanguage(NamedTuple):
    """The language of a cell, and the files that execve(2) opens for it: the interpreter first."""

    language: str = PYTHON
    executables: tuple[str, ...] = ()


def compile_policy(
    policy: Policy,
    host: Host,
    *,
    learning: bool = False,
    runs: CellLanguage = CellLanguage(),  # noqa: B008 - a constant
    shows_sockets: bool = False,
) -> Plan:
    """Return the plan of `policy` on `host` for cells of the language `runs`.

    With `learning`, the filter allows plain computation only and leaves every other call to the
    listener, which records what the program needs.  `shows_sockets`: a directory is shown in which
    processes of the host can have Unix sockets.

    Raises PolicyError if the policy is invalid, and Unenforceable, which lists every gap, if the host
    lacks a layer that the policy does not name optional.
    """
    policy = check_policy(policy)
    layers = layers_in_force(policy, host)
    table = syscall_table()
    limits = policy.limits
    groups = ("base",) if learning else _groups(policy, runs)
    if shows_sockets and not _refuses_foreign_sockets(host, layers):
        named = policy.syscalls.groups
        groups = tuple(each for each in groups if each != UNIX_SOCKETS or each in named)
    open_files = min(limits.open_files, max(host.open_files // 2, host.open_files - _IN_FLIGHT))
    listened = _listened(policy, table, runs) if "listener" in layers else None
    rules = (*_granted(policy, layers, table.rules(groups)), _hand_over(open_files))
    locks = _answers_to_locks(table, is_heard=bool(listened), is_alone=_is_alone(policy, learning))
    answers = table.answers_of(groups)
    answered = locks.answered if listened else (*locks.answered, *_given_by_filter(answers, table))
    return Plan(
        policy=policy.name,
        binds=_binds(policy, host),
        optional=policy.filesystem.optional,
        hidden=policy.filesystem.hidden,
        tmpfs=_tmpfs(policy),
        hostname="cell",
        rlimits=_rlimits(policy, layers, runs.language),
        open_files=open_files,
        landlock_abi=host.landlock_abi if "landlock" in layers else 0,
        reaches_sockets=UNIX_SOCKETS in policy.syscalls.groups,
        path_rules=(
            *_path_rules(policy),
            *(PathRule(path=path, execute=True) for path in runs.executables),
        ),
        language=runs.language,
        program=runs.executables[0] if runs.executables else "",
        guest_filter=compile_filter(rules, table, listened, answered),
        init_filter=compile_filter(table.init, table),
        branching_filter=_branching_filter(table),
        groups=groups,
        refusals=_refusals(table, groups) if listened else {},
        answers=_by_call(table, answers) if listened else {},
        watched=_numbered(table, {call: call for call in _watched(policy, table)})
        if listened
        else {},
        measured=_numbered(table, {call: call for call in table.measured}) if listened else {},
        noted=_numbered(table, {rule.call: rule.call for rule in rules if rule.call in table.noted})
        if listened
        else {},
        locks=_numbered(table, {rule.call: rule.call for rule in locks.heard}),
        environment=_environment(policy, host, layers, runs),
        python_path=policy.python.path,
        preload=policy.python.preload,
        loopback=has_sockets(policy),
        reuses_network=_makes_only_unix_sockets(rules) and not learning,
        network=_network(policy, host, table),
        terminal=policy.processes.terminal,
        memory_bytes=limits.memory_bytes,
        socket_bytes=limits.memory_bytes // 4 if has_sockets(policy) else 0,
        cpus=limits.cpus,
        processes=limits.processes,
        layers=layers,
    )


def _binds(policy: Policy, host: Host) -> tuple[Bind, ...]:
    """Return one bind for each path, with all the rights that the policy grants it."""
    write = policy.filesystem.write
    shown = shown_paths(policy)
    # mmap(2) refuses to map a shared library from a noexec mount (EPERM).
    execute = (*policy.processes.execute, *policy.python.path)
    binds = [Bind(path=path, writable=path in write, executable=path in execute) for path in shown]
    if policy.filesystem.system_files:
        denied = denied_by(policy.filesystem.hidden)
        # The file of certificates that lies elsewhere on this host gets its place in cells.
        is_elsewhere = policy.network.allow and host.certificates not in ("", CERTIFICATES)
        binds += [
            Bind(path=each.path, executable=each.executable)
            for each in host.system_files
            if not lies_in(each.path, shown) and not denied.denies(each.path)
            and not (is_elsewhere and lies_in(CERTIFICATES, (each.path,)))
        ]  # fmt: skip
    return tuple(sorted(binds, key=attrgetter("path")))


def _environment(
    policy: Policy, host: Host, layers: tuple[str, ...], runs: CellLanguage
) -> dict[str, str]:
    variables = _ENVIRONMENT | _for_libraries(policy)
    if "rlimit_as" in layers and (policy.processes.subprocesses or runs.language != PYTHON):
        variables |= _FOR_LITTLE_ADDRESS_SPACE
    if policy.network.allow and host.certificates:
        variables |= dict.fromkeys(_TRUSTING, CERTIFICATES)
    if policy.processes.subprocesses:  # `python3` is the sandbox's, and imports its packages
        variables["PATH"] = f"{OWN_PROGRAMS}:{variables['PATH']}"
        if policy.python.path:
            variables["PYTHONPATH"] = os.pathsep.join(policy.python.path)
    elif runs.language in LANGUAGES and LANGUAGES[runs.language].is_shell:
        variables["PATH"] += f":{OWN_PROGRAMS}"
    return variables | policy.environment


def _for_libraries(policy: Policy) -> dict[str, str]:
    """Return variables for drawing and numerical libraries.

    Drawing libraries learn that there is no screen.  Numerical libraries otherwise start a thread for
    each CPU of the host: they get the cell's number of CPUs, or 1 if modules are preloaded, because
    the launcher must stay single-threaded.
    """
    if not policy.python.path:
        return {}
    threads = 1 if policy.python.preload else max(1, int(policy.limits.cpus))
    drawing = {"MPLBACKEND": "Agg", "MPLCONFIGDIR": "/tmp"}  # noqa: S108 - no screen; the cell's own
    return drawing | dict.fromkeys(
        ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)
    )


def home_below_home(policy: Policy) -> str:
    """Return HOME of a policy if it is a directory such as /home/user, where /workspace is mounted too;
    empty if it is not, or the policy shows host paths there."""
    home = policy.environment.get("HOME", "")
    is_free = not any(
        lies_in(each, ("/home",)) or lies_in("/home", (each,)) for each in shown_paths(policy)
    )
    return home if is_free and _HOME.fullmatch(home) else ""


def _tmpfs(policy: Policy) -> tuple[Tmpfs, ...]:
    limits = policy.limits
    executable = policy.processes.subprocesses and policy.processes.execute_own
    return tuple(
        Tmpfs(
            target=target,
            size_bytes=limits.workspace_bytes,
            inodes=limits.workspace_inodes,
            executable=executable,
            also=home_below_home(policy) if target == "/workspace" else "",
        )
        for target in ("/workspace", "/tmp")  # noqa: S108 - inside the cell
    )


def _rlimits(policy: Policy, layers: tuple[str, ...], language: str) -> tuple[tuple[str, int], ...]:
    limits = policy.limits
    rlimits = [
        # 1, not 0: a core_pattern pipe ignores 0, and 1 stops it (core(5), fs/coredump.c).
        ("CORE", 1),
        ("CPU", int(limits.cpu_seconds) + 1),
        ("FSIZE", limits.workspace_bytes),
        # gpg and OpenSSL lock some KiB of secrets; the memory cgroup is charged for what is locked.
        ("MEMLOCK", MIB if policy.processes.subprocesses else 0),
        ("MSGQUEUE", 0),
        ("NICE", 0),
        ("RTPRIO", 0),
        ("SIGPENDING", 1024),
        ("STACK", limits.stack_bytes),
    ]
    if "rlimit_as" in layers:
        rlimits.append(("AS", limits.memory_bytes + _ADDRESS_SPACE.get(language, 128 * MIB)))
    if "rlimit_nproc" in layers:
        rlimits.append(("NPROC", limits.processes))
    return tuple(rlimits)


# Address space that an interpreter maps or reserves before it runs anything.  V8 reserves 640 MiB and
# more for its code, and exits at once if it cannot (measured: node 18 and 20).
_ADDRESS_SPACE = dict.fromkeys(("javascript", "typescript"), 1024 * MIB)


def _path_rules(policy: Policy) -> tuple[PathRule, ...]:
    """Return the Landlock rules, a second fence around the mounts: reading everywhere, writing and
    execution by name."""
    subprocesses = policy.processes.subprocesses
    rules = [PathRule(path="/", execute=subprocesses)]
    rules += [
        PathRule(path=tmpfs.target, write=True, execute=tmpfs.executable)
        for tmpfs in _tmpfs(policy)
    ]
    rules += [PathRule(path=path, write=True) for path in policy.filesystem.write]
    rules += [PathRule(path=f"/dev/{name}", write=True) for name in ("null", "zero", "full")]
    if policy.processes.terminal:
        rules += [
            PathRule(path=f"/dev/{name}", write=True, control=True) for name in ("tty", "pts")
        ]
    return tuple(rules)


def _groups(policy: Policy, runs: CellLanguage) -> tuple[str, ...]:
    groups = ["base"]
    for setting, added in ADDED_BY.items():
        if attrgetter(setting)(policy):
            groups += added
    if policy.network.allow:
        groups += ADDED_BY["network.loopback"]
    if runs.executables:  # for the interpreter; no other file is executable
        groups.append("exec")
    return tuple(dict.fromkeys((*groups, *policy.syscalls.groups)))


def _refuses_foreign_sockets(host: Host, layers: tuple[str, ...]) -> bool:
    """Tell whether Landlock refuses connections to Unix sockets that other processes than the cell's
    made (LANDLOCK_ACCESS_FS_RESOLVE_UNIX, Linux 7.1)."""
    return "landlock" in layers and host.landlock_abi >= SOCKETS_ABI


def _network(policy: Policy, host: Host, table: SyscallTable) -> NetworkPlan | None:
    section = policy.network
    if not section.allow:
        return None
    from .network.rules import encode_rules  # most policies have no rules

    ports = tuple(sorted({port for rule in section.allow for port in rule.each_port()}))
    if len(ports) > _MOST_PORTS or _DNS_PORT in ports:
        raise PolicyError(
            f"network.allow: must have at most {_MOST_PORTS} different ports, and not {_DNS_PORT}, "
            f"got {', '.join(map(str, ports[:20]))}"
        )
    words = (*(rule.in_full() for rule in section.allow), *map(str, section.deny))
    return NetworkPlan(
        rules=encode_rules(section.allow, section.deny, section.addresses),
        words=words,
        ports=ports,
        has_proxy=section.proxy != "none",
        reads_requests=any(rule.has_requests for rule in section.allow),
        egress_filter=_egress_filter(table),
        certificates=host.certificates,
    )


_UNIX = Condition(0, 0xFFFFFFFF, socket.AF_UNIX)  # the family, of socket(2) and socketpair(2)


# What the branching process does to processes of cells; no cell may do any of it.
_TRACING = (
    "ptrace", "process_vm_readv", "process_vm_writev", "get_robust_list", "pidfd_send_signal",
    "prlimit64",
)  # fmt: skip


def _branching_filter(table: SyscallTable) -> bytes:
    """Return the filter of the branching process: computation and tracing, no new process or socket."""
    rules = (*table.rules(("base",)), *map(Rule, (*_TRACING, "sendmsg", "recvmsg")))
    return compile_filter(rules, table)


# A cell may not, but the egress process makes the buffers of its relays small.
_RECEIVE_BUFFER = Rule(
    "setsockopt",
    (
        Condition(1, 0xFFFFFFFF, socket.SOL_SOCKET),
        Condition(2, 0xFFFFFFFF, socket.SO_RCVBUF),
    ),
)


def _egress_filter(table: SyscallTable) -> bytes:
    """Return the filter of the egress process: computation, threads, and TCP and UDP.

    It makes no Unix socket: through one it could reach a service of the host, and Landlock judges no
    connection to a path.
    """
    groups = ("base", "threads", "local_sockets", "loopback_sockets")
    return compile_filter((*table.rules(groups), _RECEIVE_BUFFER), table)


def _makes_only_unix_sockets(rules: tuple[Rule, ...]) -> bool:
    makes = [rule for rule in rules if rule.call in ("socket", "socketpair")]
    return all(_UNIX in rule.conditions for rule in makes)


def _granted(policy: Policy, layers: tuple[str, ...], rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return `rules` without calls that could bypass the policy.

    A memfd is on no mount, so neither noexec nor Landlock prevents its execution (memfd_create(2)): it
    is refused if only named programs may run.  Without a memory cgroup nothing counts the pages of a
    memfd or of System V IPC.
    """
    left_out: set[str] = set()
    if policy.processes.subprocesses and not policy.processes.execute_own:
        left_out |= {"memfd_create"}
    if "cgroup_memory" not in layers:
        left_out |= {"memfd_create", "shmget", "semget"}
    return tuple(rule for rule in rules if rule.call not in left_out)


class _LockAnswers(NamedTuple):
    """Calls that set locks: `answered` by the filter, with the errno, or `heard` by the listener."""

    answered: tuple[tuple[Rule, int], ...]
    heard: tuple[Rule, ...]


def _is_alone(policy: Policy, learning: bool) -> bool:
    """Tell whether a cell is one process without writable host files.

    Its record locks cannot conflict: within one process they never do, and a read-only file can only
    have shared locks (fcntl(2), "Advisory record locking").
    """
    return not (learning or policy.processes.subprocesses or policy.filesystem.write)


def _answers_to_locks(table: SyscallTable, *, is_heard: bool, is_alone: bool) -> _LockAnswers:
    answers = {
        "record": 0 if is_alone else None if is_heard else errno.ENOLCK,
        "whole": None if is_heard else errno.ENOLCK,
        "open_file": errno.EINVAL,
    }
    answered = [
        (rule, number)
        for kind, number in answers.items()
        if number is not None
        for rule in table.locks[kind]
    ]
    heard = [
        rule for kind, number in answers.items() if number is None for rule in table.locks[kind]
    ]
    return _LockAnswers(tuple(answered), tuple(heard))


def _listened(policy: Policy, table: SyscallTable, runs: CellLanguage) -> Listened:
    interpreters = LANGUAGES[runs.language].quiet if runs.language in LANGUAGES else ()
    quiet = (*table.quiet, *interpreters)
    return Listened(quiet, (*_watched(policy, table), *table.measured, *table.noted))


def _watched(policy: Policy, table: SyscallTable) -> tuple[str, ...]:
    """Return the calls whose attempts are recorded although the filter allows them: those that name a
    path, and with network rules connect(2), which the kernel refuses for addresses without a name."""
    opens = table.watched if policy.filesystem.watch else ()
    return (*opens, "connect") if policy.network.allow else opens


def _hand_over(descriptor: int) -> Rule:
    """Return the rule for the message that tells that the guest is ready: sendmsg(2) on one descriptor.

    The number equals RLIMIT_NOFILE of the guest: once the descriptor is closed and the limit lowered,
    no guest can have that number again.  The message brings the listener, if there is one.
    """
    return Rule("sendmsg", (Condition(0, 0xFFFFFFFF, descriptor),))


def _refusals(table: SyscallTable, groups: tuple[str, ...]) -> dict[int, tuple[str, str]]:
    return _numbered(table, {call: (call, why) for call, why in table.refusals(groups).items()})


def _given_by_filter(
    answers: tuple[CallAnswer, ...], table: SyscallTable
) -> Iterator[tuple[Rule, int]]:
    """Yield the answers that a filter without a listener gives: a call with forms that are allowed is
    refused with EPERM in its others."""
    for each in answers:
        if (each.errno == 0 and not each.at_most) or each.rule.call in table.refused:
            yield each.rule, each.errno


def _by_call(
    table: SyscallTable, answers: tuple[CallAnswer, ...]
) -> dict[int, tuple[CallAnswer, ...]]:
    found: dict[str, tuple[CallAnswer, ...]] = {}
    for each in answers:
        found[each.rule.call] = (*found.get(each.rule.call, ()), each)
    return _numbered(table, found)


def _numbered(table: SyscallTable, by_name: dict[str, Any]) -> dict[int, Any]:
    """Return `by_name` by call number, without calls that this architecture never had."""
    numbered = {number_of(call, table): value for call, value in by_name.items()}
    return {number: value for number, value in numbered.items() if number >= 0}
