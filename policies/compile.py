"""Policy and host to plan: every gap is collected, then either a plan or one Unenforceable."""

import errno
import os
from typing import Any, NamedTuple

from .host import Host
from .languages import LANGUAGES, PYTHON, TOOL_CLIENT
from .layers import layers_in_force
from .plan import Bind, PathRule, Plan, Tmpfs
from .policy import MIB, Policy, check_policy, shown_paths
from .seccomp import Listened, compile_filter, number_of
from .syscalls import Condition, Rule, SyscallTable, syscall_table

# A descriptor cannot be sent while more than the sender's RLIMIT_NOFILE are on their way, of all
# processes with its uid, and one message has up to 253 (unix(7), ETOOMANYREFS): a guest with as many
# as the launcher may have would silence the launcher, and so end every cell.
_ON_THEIR_WAY = 2 * 253 + 6
_ENVIRONMENT = {
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "TMPDIR": "/tmp",  # noqa: S108 - the cell's own tmpfs
    "TZ": "UTC",
}


class CellLanguage(NamedTuple):
    """What cells run: a language, and the files that execve(2) opens for it, its interpreter first."""

    language: str = PYTHON
    executables: tuple[str, ...] = ()


def compile_policy(
    policy: Policy,
    host: Host,
    *,
    learning: bool = False,
    runs: CellLanguage = CellLanguage(),  # noqa: B008 - a constant
) -> Plan:
    """Return the plan of `policy` on `host` for cells that run what `runs` says; with `learning`, one
    whose filter leaves everything but plain computation to the listener, to find out what a program
    needs.

    Raises PolicyError if the policy makes no sense and Unenforceable, naming every gap, if the
    host cannot give a layer that the policy does not call optional.
    """
    policy = check_policy(policy)
    layers = layers_in_force(policy, host)
    table = syscall_table()
    limits = policy.limits
    groups = ("base",) if learning else _groups(policy, runs)
    open_files = min(limits.open_files, max(host.open_files // 2, host.open_files - _ON_THEIR_WAY))
    listened = _listened(policy, table, runs) if "listener" in layers else None
    rules = _granted(policy, layers, table.rules(groups))
    rules += (_hand_over(open_files),) if listened else ()
    locks = _answers_to_locks(table, is_heard=bool(listened), is_alone=_is_alone(policy, learning))
    ignored = ((rule, 0) for group in groups for rule in table.ignored[group])
    return Plan(
        policy=policy.name,
        binds=_binds(policy),
        hidden=policy.filesystem.hidden,
        tmpfs=_tmpfs(policy),
        hostname="cell",
        rlimits=_rlimits(policy, layers, runs.language),
        open_files=open_files,
        landlock_abi=host.landlock_abi if "landlock" in layers else 0,
        path_rules=(
            *_path_rules(policy),
            *(PathRule(path=path, execute=True) for path in runs.executables),
        ),
        language=runs.language,
        program=runs.executables[0] if runs.executables else "",
        guest_filter=compile_filter(rules, table, listened, (*locks.answered, *ignored)),
        init_filter=compile_filter(table.init, table),
        refusals=_refusals(table, groups) if listened else {},
        watched=_numbered(table, {call: call for call in listened.watched}) if listened else {},
        locks=_numbered(table, {rule.call: rule.call for rule in locks.heard}),
        environment=_environment(policy, runs),
        python_path=policy.python.path,
        preload=policy.python.preload,
        loopback=policy.network.loopback,
        memory_bytes=limits.memory_bytes,
        socket_bytes=limits.memory_bytes // 4 if policy.network.loopback else 0,
        cpus=limits.cpus,
        processes=limits.processes,
        layers=layers,
    )


def _binds(policy: Policy) -> tuple[Bind, ...]:
    """Return one bind a path, with all the rights that the policy names for it."""
    write = policy.filesystem.write
    # A shared library cannot be mapped from a mount that is noexec (mmap(2), EPERM).
    execute = (*policy.processes.execute, *policy.python.path)
    return tuple(
        Bind(path=path, writable=path in write, executable=path in execute)
        for path in shown_paths(policy)
    )


def _environment(policy: Policy, runs: CellLanguage) -> dict[str, str]:
    variables = _ENVIRONMENT | _for_libraries(policy)
    if runs.language in LANGUAGES and LANGUAGES[runs.language].is_shell:
        variables["PATH"] += ":" + os.path.dirname(TOOL_CLIENT)
    return variables | policy.environment


def _for_libraries(policy: Policy) -> dict[str, str]:
    """Tell drawing libraries that there is no screen, and numerical ones of as many CPUs as the cell
    has, else they start a thread for each of the host's; of one where they are loaded in the
    launcher, which must stay single-threaded."""
    if not policy.python.path:
        return {}
    threads = 1 if policy.python.preload else max(1, int(policy.limits.cpus))
    drawing = {"MPLBACKEND": "Agg", "MPLCONFIGDIR": "/tmp"}  # noqa: S108 - no screen; the cell's own
    return drawing | dict.fromkeys(
        ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)
    )


def _tmpfs(policy: Policy) -> tuple[Tmpfs, ...]:
    limits = policy.limits
    executable = policy.processes.subprocesses and policy.processes.execute_own
    return tuple(
        Tmpfs(
            target=target,
            size_bytes=limits.workspace_bytes,
            inodes=limits.workspace_inodes,
            executable=executable,
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
        ("MEMLOCK", 0),
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


# What an interpreter has mapped, or reserves, before it runs anything. V8 reserves 640 MiB and more
# to place its code in, and ends at once if it cannot (measured: node 18 and 20).
_ADDRESS_SPACE = dict.fromkeys(("javascript", "typescript"), 1024 * MIB)


def _path_rules(policy: Policy) -> tuple[PathRule, ...]:
    """Return the second fence around what the mounts show: reading everywhere, the rest by name."""
    subprocesses = policy.processes.subprocesses
    rules = [PathRule(path="/", execute=subprocesses)]
    rules += [
        PathRule(path=tmpfs.target, write=True, execute=tmpfs.executable)
        for tmpfs in _tmpfs(policy)
    ]
    rules += [PathRule(path=path, write=True) for path in policy.filesystem.write]
    rules += [PathRule(path=f"/dev/{name}", write=True) for name in ("null", "zero", "full")]
    return tuple(rules)


def _groups(policy: Policy, runs: CellLanguage) -> tuple[str, ...]:
    # base has socketpair, for asyncio.  local_sockets can pass descriptors, which the kernel counts
    # per uid over all cells (unix(7), ETOOMANYREFS): only for those who need it.
    groups = ["base"]
    if policy.processes.threads:
        groups.append("threads")
    if policy.processes.subprocesses:
        groups += ["processes", "exec", "local_sockets"]
    if runs.executables:  # the interpreter is exec'd, and nothing else is executable
        groups.append("exec")
    if policy.network.loopback:
        groups += ["loopback_sockets", "local_sockets"]
    return tuple(dict.fromkeys((*groups, *policy.syscalls.groups)))


def _granted(policy: Policy, layers: tuple[str, ...], rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Leave out memfd_create where only named programs may run: such a file is on no mount, so neither
    noexec nor Landlock keeps it from being executed (memfd_create(2)).  Leave it out as well where no
    memory cgroup counts its pages: no tmpfs size and no rlimit bounds them."""
    runs_only_named = policy.processes.subprocesses and not policy.processes.execute_own
    if runs_only_named or "cgroup_memory" not in layers:
        return tuple(rule for rule in rules if rule.call != "memfd_create")
    return rules


class _LockAnswers(NamedTuple):
    """The calls that set locks: those that the filter answers, with the errno, and those that the
    listener does."""

    answered: tuple[tuple[Rule, int], ...]
    heard: tuple[Rule, ...]


def _is_alone(policy: Policy, learning: bool) -> bool:
    """Tell whether a cell is one process that shares no file that can be written.

    No record lock of it can conflict with another one: within a process they never do, and on a file
    that is only read there are none but shared ones (fcntl(2), "Advisory record locking").
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
    return Listened(quiet, table.watched if policy.filesystem.watch else ())


def _hand_over(descriptor: int) -> Rule:
    """Allow what passes the listener on: sendmsg(2) on the one descriptor that, once closed and the
    limit lowered, no guest can have again."""
    return Rule("sendmsg", (Condition(0, 0xFFFFFFFF, descriptor),))


def _refusals(table: SyscallTable, groups: tuple[str, ...]) -> dict[int, tuple[str, str]]:
    return _numbered(table, {call: (call, why) for call, why in table.refusals(groups).items()})


def _numbered(table: SyscallTable, by_name: dict[str, Any]) -> dict[int, Any]:
    """Return `by_name` by call number, without what this architecture never had."""
    numbered = {number_of(call, table): value for call, value in by_name.items()}
    return {number: value for number, value in numbered.items() if number >= 0}
