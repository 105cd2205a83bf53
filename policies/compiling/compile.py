"""The compiler: a policy and a host become a plan, or one Unenforceable that lists every gap."""

import errno
import socket
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from ..denied import denied_by
from ..errors import PolicyError
from ..languages import LANGUAGES, PYTHON, RESERVED_MIB
from ..plan import (
    CERTIFICATES,
    FILE_WATCHING,
    Bind,
    CallAnswer,
    Condition,
    NetworkPlan,
    PathRule,
    Plan,
    Rule,
)
from ..policy import MIB, Policy, check_policy, has_sockets, lies_in, shown_paths
from .environment import (
    check_changes,
    check_own_directories,
    check_protected,
    environment_of,
    own_filesystems,
)
from .gpus import GpuPlan, gpu_plan, vendor_of
from .host import SOCKETS_ABI, Host, layers_in_force
from .seccomp import Listened, compile_filter, number_of
from .syscalls import ADDED_BY, OF_IMAGES, UNIX_SOCKETS, SyscallTable, syscall_table

# sendmsg(2) fails with ETOOMANYREFS while all processes of the uid together have more descriptors in
# flight than the sender's RLIMIT_NOFILE; one message carries up to 253 (unix(7)).  If a guest could
# have as many as the launcher, it could block the launcher's messages, and so end every cell.
_IN_FLIGHT = 2 * 253 + 6
# RLIMIT_FSIZE where all files lie in memory: a tmpfs has a size, and a memfd is charged to the cgroup.
# Runtimes reserve their largest need in a memfd: .NET 2 TiB, ZGC its heap, Erlang 64 MiB. The limit is
# not larger, so that the sizes of all files of a cell add up to less than 2^63.
_SPARSE_BYTES = 2 << 40
_MOST_PORTS, _DNS_PORT = 12, 53  # each port needs a socket, and one message hands over all


class CellLanguage(NamedTuple):
    """The language of a cell, the address space that its runtime reserves, the files that execve(2)
    opens for it: the interpreter first; and groups of system calls that its root needs."""

    language: str = PYTHON
    executables: tuple[str, ...] = ()
    reserves_mib: int = RESERVED_MIB
    groups: tuple[str, ...] = ()


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
    check_own_directories(policy)
    check_changes(policy)
    check_protected(policy)
    gpu = gpu_plan(policy, host.gpu)
    layers, limits, table = layers_in_force(policy, host), policy.limits, syscall_table()
    calls = _system_calls(
        policy, host, layers, runs, learning=learning, shows_sockets=shows_sockets
    )
    groups, rules = calls.groups, calls.rules
    return Plan(
        policy=policy.name,
        binds=_binds(policy, host, gpu),
        optional=policy.filesystem.optional,
        hidden=policy.filesystem.hidden,
        tmpfs=own_filesystems(policy),
        hostname="cell",
        rlimits=_rlimits(policy, layers, runs),
        open_files=_open_files(policy, host),
        landlock_abi=host.landlock_abi if "landlock" in layers else 0,
        reaches_sockets=UNIX_SOCKETS in policy.syscalls.groups,
        path_rules=(
            *_path_rules(policy, gpu),
            *(PathRule(path=path, execute=True) for path in runs.executables),
        ),
        language=runs.language,
        program=runs.executables[0] if runs.executables else "",
        guest_filter=compile_filter(rules, table, calls.listened, calls.answered),
        init_filter=compile_filter(table.init, table),
        branching_filter=_branching_filter(table),
        groups=groups,
        judged=_by_call(
            table, ((each.call, each) for name in groups for each in table.judged[name])
        ),
        locks=_numbered(table, calls.locks),
        environment=environment_of(policy, host, layers, runs.language),
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
        protected=policy.filesystem.protected,
        guarded=_by_call(table, ((each.call, each) for each in _guarded(policy, table))),
        guard_filter=_guard_filter(table) if policy.filesystem.protected else b"",
        devices=gpu.nodes if gpu else (),
        **_listening(policy, table, calls),
    )


class _SystemCalls(NamedTuple):
    """The answers to a guest's system calls: the rules of those that are allowed, what the listener
    hears (None without a listener), what the filter answers, and the calls that lock files."""

    groups: tuple[str, ...]
    rules: tuple[Rule, ...]
    listened: Listened | None
    answered: tuple[tuple[Rule, int], ...]
    locks: dict[str, str]
    left_out: dict[str, str]  # call of an allowed group -> why it is refused nevertheless


def _system_calls(
    policy: Policy, host: Host, layers: tuple[str, ...], runs: CellLanguage,
    *, learning: bool, shows_sockets: bool,
) -> _SystemCalls:  # fmt: skip
    table = syscall_table()
    groups = ("base",) if learning else _groups(policy, runs)
    if shows_sockets and not _refuses_foreign_sockets(host, layers):
        named = policy.syscalls.groups
        groups = tuple(each for each in groups if each != UNIX_SOCKETS or each in named)
    if host.file_watching or "listener" not in layers:
        groups = tuple(each for each in groups if each != FILE_WATCHING)
    listened = _listened(policy, table, runs) if "listener" in layers else None
    left_out = _left_out(policy, layers)
    granted = _granted(table, groups, left_out)
    # Record locks of one process never conflict, and a read-only file can only have shared locks
    # (fcntl(2), "Advisory record locking").
    is_alone = not (learning or policy.processes.subprocesses or policy.filesystem.write)
    locks = _answers_to_locks(table, has_listener=bool(listened), is_alone=is_alone)
    answered = locks.answered
    if not listened:
        whole = {rule.call for rule in granted if not rule.conditions}
        given = tuple(each for each in table.answers_of(groups) if each.rule.call not in whole)
        answered = (*answered, *_given_by_filter(given, table))
    rules = (*granted, _hand_over(_open_files(policy, host)))
    if leaves_files := policy.filesystem.write and not {*OF_IMAGES} & {*groups}:
        rules = _instead(rules, table.modes)
        answered = (*answered, *((rule, errno.EPERM) for rule in table.set_uid))
        left_out |= dict.fromkeys(("chmod", "fchmod", "fchmodat", "fchmodat2"), _SET_UID)
    if heard := {rule.call for rule in _guarded(policy, table)}:
        rules = (*(rule for rule in rules if rule.call not in heard), *table.unguarded)
    if heard or leaves_files:  # its flags and its mode lie behind a pointer
        rules = tuple(rule for rule in rules if rule.call != _OPENAT2)
        answered = (*answered, (Rule(_OPENAT2), errno.ENOSYS))
    return _SystemCalls(
        groups, rules, listened, answered,
        {rule.call: rule.call for rule in locks.heard}, left_out,
    )  # fmt: skip


_SET_UID = "a set-uid program in a path for writing would have your rights for every user"


def _instead(rules: tuple[Rule, ...], forms: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return `rules` with `forms` in the place of those of the same calls."""
    calls = {rule.call for rule in forms}
    return (*(rule for rule in rules if rule.call not in calls), *forms)


def _granted(
    table: SyscallTable, groups: tuple[str, ...], left_out: dict[str, str]
) -> tuple[Rule, ...]:
    """Return the rules of `groups`; one without conditions, also for a call that is ignored, takes the
    place of all others for its call."""
    rules = table.rules(groups)
    whole = {rule.call for rule in rules if not rule.conditions}
    ignored = [each.rule for group in groups for each in table.ignored[group]]
    without = {*left_out, *(rule.call for rule in ignored if not rule.conditions)}
    return tuple(
        rule for rule in rules
        if rule.call not in without and not (rule.conditions and rule.call in whole)
    )  # fmt: skip


_OPENAT2 = "openat2"


def _guarded(policy: Policy, table: SyscallTable) -> tuple[Rule, ...]:
    """Return the forms of calls that the guard makes."""
    return table.guarded if policy.filesystem.protected else ()


def _open_files(policy: Policy, host: Host) -> int:
    most = max(host.open_files // 2, host.open_files - _IN_FLIGHT)
    return min(policy.limits.open_files, most)


def _listening(policy: Policy, table: SyscallTable, calls: _SystemCalls) -> dict[str, Any]:
    """Return the fields of a plan by which the listener answers; empty ones without a listener."""
    groups = calls.groups
    if calls.listened is None:
        return {name: {} for name in ("refusals", "answers", "watched", "measured", "noted")}
    reasons = table.refusals(groups) | calls.left_out
    noted = [rule.call for rule in calls.rules if rule.call in table.noted]
    by_name = {"watched": _watched(policy, table), "measured": table.measured, "noted": noted}
    return {
        "refusals": _numbered(table, {call: (call, why) for call, why in reasons.items()}),
        "answers": _by_call(table, ((each.rule.call, each) for each in table.answers_of(groups))),
        **{name: _numbered(table, {call: call for call in each}) for name, each in by_name.items()},
    }


def _binds(policy: Policy, host: Host, gpu: GpuPlan | None) -> tuple[Bind, ...]:
    """Return one bind for each path, with all the rights that the policy grants it."""
    write = policy.filesystem.write
    shown = shown_paths(policy)
    # mmap(2) refuses to map a shared library from a noexec mount (EPERM).
    execute = (*policy.processes.execute, *policy.python.path)
    owned = (*policy.filesystem.read, *write) if policy.filesystem.as_owner else ()
    binds = [
        Bind(
            path=path,
            writable=path in write,
            executable=path in execute,
            changes=policy.filesystem.changes.get(path, ""),
            owned=path in owned,
        )
        for path in shown
    ]
    if policy.filesystem.system_files:
        denied = denied_by(policy.filesystem.hidden)
        # Certificates that lie elsewhere on this host are shown at the usual place in cells.
        is_elsewhere = policy.network.allow and host.certificates not in ("", CERTIFICATES)
        binds += [
            Bind(path=each.path, executable=each.executable)
            for each in host.system_files
            if not lies_in(each.path, shown) and not denied.denies(each.path)
            and not (is_elsewhere and lies_in(CERTIFICATES, (each.path,)))
        ]  # fmt: skip
    if gpu:
        had = tuple(each.path for each in binds)
        binds += [
            Bind(path=each.path, executable=True)
            for each in gpu.libraries
            if not lies_in(each.path, had)
        ]
    return tuple(sorted(binds, key=attrgetter("path")))


def _rlimits(
    policy: Policy, layers: tuple[str, ...], runs: CellLanguage
) -> tuple[tuple[str, int], ...]:
    limits = policy.limits
    rlimits = [
        # 1, not 0: a core_pattern pipe ignores 0, and 1 stops it (core(5), fs/coredump.c).
        ("CORE", 1),
        ("CPU", int(limits.cpu_seconds) + 1),
        ("FSIZE", limits.workspace_bytes if policy.filesystem.write else _SPARSE_BYTES),
        # gpg and OpenSSL lock some KiB of secrets; the memory cgroup is charged for what is locked.
        ("MEMLOCK", MIB if policy.processes.subprocesses else 0),
        ("MSGQUEUE", 0),
        ("NICE", 0),
        ("RTPRIO", 0),
        ("SIGPENDING", 1024),
        ("STACK", limits.stack_bytes),
    ]
    if "rlimit_as" in layers:
        rlimits.append(("AS", limits.memory_bytes + runs.reserves_mib * MIB))
    if "rlimit_nproc" in layers:
        rlimits.append(("NPROC", limits.processes))
    return tuple(rlimits)


def _path_rules(policy: Policy, gpu: GpuPlan | None) -> tuple[PathRule, ...]:
    """Return the Landlock rules, a second fence around the mounts: reading everywhere, writing and
    execution by name."""
    subprocesses = policy.processes.subprocesses
    rules = [PathRule(path="/", execute=subprocesses)]
    rules += [
        PathRule(path=tmpfs.target, write=True, execute=tmpfs.executable)
        for tmpfs in own_filesystems(policy)
    ]
    rules += [PathRule(path=path, write=True) for path in policy.filesystem.write]
    # null, zero and full have no ioctl(2): the kernel itself answers ENOTTY, which isatty(3) expects
    devices = ("null", "zero", "full", *(("tty", "pts") if policy.processes.terminal else ()))
    devices = (*devices, *(gpu.nodes if gpu else ()))
    rules += [PathRule(path=f"/dev/{name}", write=True, control=True) for name in devices]
    if subprocesses:  # so that random and urandom answer ioctl themselves too
        rules.append(PathRule(path="/dev", control=True))
    return tuple(rules)


def _groups(policy: Policy, runs: CellLanguage) -> tuple[str, ...]:
    groups = ["base"]
    for setting, added in ADDED_BY.items():
        if attrgetter(setting)(policy):
            groups += added
    if policy.network.allow:
        groups += ADDED_BY["network.loopback"]
    if runs.executables:  # for the interpreter, the only executable file
        groups.append("exec")
    if vendor := vendor_of(policy.devices.gpu):
        groups.append(vendor.group)
    return tuple(dict.fromkeys((*groups, *policy.syscalls.groups, *runs.groups)))


def _refuses_foreign_sockets(host: Host, layers: tuple[str, ...]) -> bool:
    """Tell whether Landlock refuses connections to Unix sockets that other processes than the cell's
    made (LANDLOCK_ACCESS_FS_RESOLVE_UNIX, Linux 7.1)."""
    return "landlock" in layers and host.landlock_abi >= SOCKETS_ABI


def _network(policy: Policy, host: Host, table: SyscallTable) -> NetworkPlan | None:
    section = policy.network
    if not section.allow:
        return None
    from ..network.rules import encode_rules  # most policies have no rules

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


_UNIX = Condition(0, 0xFFFFFFFF, socket.AF_UNIX)  # the family of socket(2) and socketpair(2)


# Calls that the branching process uses on processes of cells; no cell may make them.
_TRACING = (
    "ptrace", "process_vm_readv", "process_vm_writev", "get_robust_list", "pidfd_send_signal",
    "prlimit64",
)  # fmt: skip


def _branching_filter(table: SyscallTable) -> bytes:
    """Return the filter of the branching process: computation and tracing, no new process or socket."""
    rules = (*table.rules(("base",)), *map(Rule, (*_TRACING, "sendmsg", "recvmsg")))
    return compile_filter(rules, table)


def _guard_filter(table: SyscallTable) -> bytes:
    """Return the filter of the guard: computation and files, no new process or socket."""
    rules = (*table.rules(("base",)), *map(Rule, ("sendmsg", "recvmsg")))
    return compile_filter(rules, table)


# Calls for memory, time, signals and one socket, for a process that only computes.
_COMPUTING = frozenset((
    "read", "pread64", "write", "recvfrom", "sendto", "close", "poll", "ppoll", "mmap", "munmap",
    "mremap", "mprotect", "madvise", "brk", "futex", "rt_sigaction", "rt_sigprocmask", "rt_sigreturn",
    "sigaltstack", "setitimer", "clock_gettime", "gettimeofday", "getrandom", "getrusage", "getpid",
    "gettid", "tgkill", "sched_yield", "restart_syscall", "exit", "exit_group",
))  # fmt: skip


def computing_filter() -> bytes:
    """Return the filter of a process that only computes: no file, no new socket, no new process."""
    table = syscall_table()
    rules = table.rules(("base",))
    return compile_filter(tuple(rule for rule in rules if rule.call in _COMPUTING), table)


# setsockopt for buffer sizes: the egress process makes the buffers of its relays small, and cells may
# not.
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
    """Tell whether only Unix sockets can change a network namespace: those of netlink, about which the
    listener decides, read it, as a guest has no capability over it."""
    makes = [rule for rule in rules if rule.call in ("socket", "socketpair")]
    return all(_UNIX in rule.conditions for rule in makes)


def _left_out(policy: Policy, layers: tuple[str, ...]) -> dict[str, str]:
    """Return calls of allowed groups that could bypass the policy, each with the reason.

    A memfd is on no mount, so neither noexec nor Landlock prevents its execution (memfd_create(2)): it
    is refused if only named programs may run.  Without a memory cgroup nothing counts the pages of a
    memfd or of System V IPC.
    """
    left_out: dict[str, str] = {}
    if "cgroup_memory" not in layers:
        left_out |= dict.fromkeys(("memfd_create", "shmget", "semget"), "needs a memory cgroup")
    if policy.processes.subprocesses and not policy.processes.execute_own:
        left_out["memfd_create"] = "needs processes.execute_own = true"
    return left_out


class _LockAnswers(NamedTuple):
    """Calls that set locks: `answered` by the filter with the errno, or `heard`, sent to the
    listener."""

    answered: tuple[tuple[Rule, int], ...]
    heard: tuple[Rule, ...]


def _answers_to_locks(table: SyscallTable, *, has_listener: bool, is_alone: bool) -> _LockAnswers:
    answers = {
        "record": 0 if is_alone else None if has_listener else errno.ENOLCK,
        "whole": None if has_listener else errno.ENOLCK,
        "open_file": errno.EINVAL,
    }
    pairs = [(rule, number) for kind, number in answers.items() for rule in table.locks[kind]]
    answered = tuple((rule, number) for rule, number in pairs if number is not None)
    return _LockAnswers(answered, tuple(rule for rule, number in pairs if number is None))


def _listened(policy: Policy, table: SyscallTable, runs: CellLanguage) -> Listened:
    interpreters = LANGUAGES[runs.language].quiet if runs.language in LANGUAGES else ()
    quiet = (*table.quiet, *interpreters)
    return Listened(quiet, (*_watched(policy, table), *table.measured, *table.noted))


def _watched(policy: Policy, table: SyscallTable) -> tuple[str, ...]:
    """Return the calls whose attempts are recorded although the filter allows them: those that name a
    path, and with network rules connect(2), which the kernel refuses for addresses without a name."""
    # the listener answers some opens of cells with a GPU
    opens = table.watched if policy.filesystem.watch or policy.devices.gpu else ()
    return (*opens, "connect") if policy.network.allow else opens


def _hand_over(descriptor: int) -> Rule:
    """Return the rule for the message that tells that the guest is ready: sendmsg(2) on one descriptor.

    The number equals RLIMIT_NOFILE of the guest: once the descriptor is closed and the limit lowered,
    no guest can have that number again.  The message brings the listener, if there is one.
    """
    return Rule("sendmsg", (Condition(0, 0xFFFFFFFF, descriptor),))


def _given_by_filter(
    answers: tuple[CallAnswer, ...], table: SyscallTable
) -> Iterator[tuple[Rule, int]]:
    """Yield the answers that a filter without a listener gives: a call with forms that are allowed is
    refused with EPERM in its others."""
    for each in answers:
        if (each.errno == 0 and not each.at_most) or each.rule.call in table.refused:
            yield each.rule, each.errno


def _by_call(table: SyscallTable, named: Iterable[tuple[str, Any]]) -> dict[int, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for call, each in named:
        found[call] = (*found.get(call, ()), each)
    return _numbered(table, found)


def _numbered(table: SyscallTable, by_name: dict[str, Any]) -> dict[int, Any]:
    """Return `by_name` by call number, without calls that this architecture never had."""
    numbered = {number_of(call, table): value for call, value in by_name.items()}
    return {number: value for number, value in numbered.items() if number >= 0}
