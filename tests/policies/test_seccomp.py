"""The compiled filters, evaluated: what every number and every condition comes to.

`verdict` is the interpreter of seccomp(2)'s BPF: a small accumulator machine over struct seccomp_data.
"""

import errno
import itertools
import os
import random
import struct
import tempfile
import tomllib
from pathlib import Path

import msgspec
import pyseccomp
import pytest

import cellwright.policies.compiling.syscalls as syscalls_module
from cellwright.policies.compiling import seccomp
from cellwright.policies.compiling.compile import CellLanguage, compile_policy
from cellwright.policies.compiling.gpus import DriverFile, GpuFiles, GpuNode, vendors
from cellwright.policies.compiling.host import Host
from cellwright.policies.compiling.ranges import with_ranges
from cellwright.policies.compiling.syscalls import NEWEST_NUMBER, refused_forms, syscall_table
from cellwright.policies.narrowing import exceeds
from cellwright.policies.plan import Condition, Rule
from cellwright.policies.policy import Devices, Filesystem, Network, Policy, Processes, Syscalls

MACHINE = os.uname().machine
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FOREIGN = {"i386": 0x40000003, "arm": 0x40000028, "mips": 0x8, "riscv64": 0xC00000F3, "zero": 0}
ALLOW, KILL, ERRNO, NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
EPERM, ENOSYS = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS
NATIVE = AUDIT_ARCH.get(MACHINE, 0)
HIGH = 0xDEADBEEF << 32

pytestmark = pytest.mark.skipif(MACHINE not in AUDIT_ARCH, reason="no filter for this machine")

Program = list[tuple[int, int, int, int]]


def verdict(
    program: Program, number: int, arguments: tuple[int, ...] = (), arch: int = NATIVE
) -> int:
    """Run the filter on one system call and return its action."""
    six = [argument & 0xFFFFFFFFFFFFFFFF for argument in (*arguments, *[0] * 6)][:6]
    data = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, arch, 0x7FFF12345678, *six)
    at = accumulator = 0
    memory = [0] * 16
    index = 0
    for _ in range(len(program) + 1):
        code, if_true, if_false, k = program[at]
        at += 1
        if code == 0x20:  # ld [k]
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif code == 0x06:  # ret k
            return k
        elif code == 0x16:  # ret a
            return accumulator
        elif code == 0x05:  # ja
            at += k
        elif code in (0x15, 0x25, 0x35, 0x45):  # jeq, jgt, jge, jset
            taken = {
                0x15: accumulator == k, 0x25: accumulator > k, 0x35: accumulator >= k,
                0x45: bool(accumulator & k),
            }[code]  # fmt: skip
            at += if_true if taken else if_false
        elif code == 0x54:  # and
            accumulator &= k
        elif code == 0x02:  # st
            memory[k] = accumulator
        elif code == 0x60:  # ld mem
            accumulator = memory[k]
        elif code == 0x07:  # tax
            index = accumulator
        elif code == 0x87:  # txa
            accumulator = index
        else:
            raise AssertionError(f"an instruction that this test does not know: {code:#x}")
    raise AssertionError("the program does not end")


def parse(program: bytes) -> Program:
    return [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]


POLICIES = {
    "strict": Policy(),
    "no threads": Policy(processes=Processes(threads=False)),
    "loopback": Policy(network=Network(loopback=True)),
    "standard": Policy(processes=Processes(subprocesses=True), network=Network(loopback=True)),
}
GROUPS = {
    "strict": {"base", "threads"},
    "no threads": {"base"},
    "loopback": {"base", "local_sockets", "unix_sockets", "threads", "loopback_sockets"},
    "standard": {
        *("base", "local_sockets", "unix_sockets", "threads", "loopback_sockets"),
        *("processes", "exec", "sysv_ipc"),
    },
}
GPUS = GpuFiles(
    tuple(map(GpuNode, ("nvidia0", "dri/renderD128", "nvhost-gpu")))
    + tuple(GpuNode(node) for vendor in vendors().values() for node in vendor.control),
    tuple(
        DriverFile(f"/usr/lib/{vendor.needed}", "/usr/lib/driver") for vendor in vendors().values()
    ),
)
HOST = Host(landlock_abi=7, cgroups={"memory": "", "cpu": "", "pids": ""}, gpu=GPUS)
DEAF = msgspec.structs.replace(HOST, listener="none")  # the filter itself refuses
TABLE = syscall_table()
FILTERS = {
    name: parse(
        compile_policy(
            msgspec.structs.replace(policy, optional_layers=("listener",)), DEAF
        ).guest_filter
    )
    for name, policy in POLICIES.items()
}
LISTENED = {
    name: parse(compile_policy(policy, HOST).guest_filter) for name, policy in POLICIES.items()
}
INIT = parse(compile_policy(Policy(), HOST).init_filter)
RULES = {name: TABLE.rules(tuple(sorted(groups))) for name, groups in GROUPS.items()}


def number_of(call: str) -> int:
    """Return the number here, negative if this machine never had the call."""
    if (number := TABLE.numbers.get(call, -1)) >= 0:
        return number
    resolved: int = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, call)
    return resolved


LOCKS = {"record": errno.ENOLCK, "whole": errno.ENOLCK, "open_file": errno.EINVAL}
ALONE = {"strict", "no threads", "loopback"}  # one process in a cell


def holds(condition: Condition, arguments: tuple[int, ...]) -> bool:
    return arguments[condition.argument] & condition.mask == condition.value


def expected(name: str, call: str, arguments: tuple[int, ...]) -> int:
    """Say what the table means under the policy `name`, without libseccomp or a listener."""
    if call in TABLE.unknown:
        return ENOSYS
    rules = RULES[name]
    for kind, number in LOCKS.items():
        for rule in TABLE.locks[kind]:
            if rule.call == call and all(holds(each, arguments) for each in rule.conditions):
                return ERRNO | (0 if kind == "record" and name in ALONE else number)
    for group in GROUPS[name]:
        for each in TABLE.ignored[group]:
            if each.rule.call == call and each.rule.holds(arguments) and not each.at_most:
                return ERRNO
    for rule in rules:
        if rule.call == call and all(holds(each, arguments) for each in rule.conditions):
            return ALLOW
    return ERRNO | refusal(call)


def refusal(call: str) -> int:
    """Return the errno of a call that is refused in every form."""
    answers = (each.errno for each in TABLE.answers if each.rule.call == call)
    return next(answers, errno.EPERM) if call in TABLE.refused else errno.EPERM


CALLS = {
    number_of(call): call
    for call in {
        *(rule.call for group in TABLE.groups.values() for rule in group),
        *(rule.call for kind in TABLE.locks.values() for rule in kind),
        *(each.rule.call for some in TABLE.ignored.values() for each in some),
        *(rule.call for some in TABLE.judged.values() for rule in some),
        *TABLE.refused, *TABLE.unknown, *(rule.call for rule in TABLE.init),
    }
    if number_of(call) >= 0
}  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_every_number_gets_what_the_table_says(name: str) -> None:
    program = FILTERS[name]
    wrong = {}
    for number in range(1024):
        call = CALLS.get(number, "")
        wanted = ENOSYS if number > NEWEST_NUMBER else expected(name, call, (0,) * 6)
        got = verdict(program, number)
        if got != wanted:
            wrong[number, call] = (hex(got), hex(wanted))
    assert not wrong


WATCHING = [rule.call for rule in TABLE.groups["file_watching"]]


def heard(name: str, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Say what the filter with a listener must answer, from what the one without does."""
    call = CALLS.get(number, "")
    plain = verdict(FILTERS[name], number, arguments)
    if call in WATCHING and name in ("standard", 'syscalls.groups = ["file_watching"]'):
        return ALLOW  # but without a listener no file is watched
    if call in (*TABLE.watched, *TABLE.measured, *TABLE.noted) or plain == ERRNO | errno.ENOLCK:
        return NOTIFY
    if plain == ALLOW or call in (*TABLE.quiet, *TABLE.unknown) or number > NEWEST_NUMBER:
        return plain
    is_lock = any(rule.call == call for kind in TABLE.locks.values() for rule in kind)
    return plain if is_lock and plain != EPERM else NOTIFY


@pytest.mark.parametrize("name", POLICIES)
def test_a_listener_hears_of_what_is_refused_and_changes_nothing_else(name: str) -> None:
    wrong = {
        number: (got, heard(name, number))
        for number in range(1024)
        if (got := verdict(LISTENED[name], number)) != heard(name, number)
    }
    assert not wrong


@pytest.mark.parametrize("policy", [Policy(), POLICIES["standard"]], ids=["strict", "standard"])
def test_only_the_status_channel_may_pass_a_descriptor_on(policy: Policy) -> None:
    limits = msgspec.structs.replace(policy.limits, open_files=77)
    plan = compile_policy(msgspec.structs.replace(policy, limits=limits), HOST)
    program, number = parse(plan.guest_filter), number_of("sendmsg")
    otherwise = ALLOW if policy.processes.subprocesses else NOTIFY
    assert plan.open_files == 77
    assert verdict(program, number, (77,)) == ALLOW
    assert verdict(program, number, (HIGH | 77,)) == ALLOW
    for descriptor in (0, 3, 76, 78, 77 << 8):
        assert verdict(program, number, (descriptor,)) == otherwise


def test_the_status_channels_number_stays_below_the_hosts_limit() -> None:
    plan = compile_policy(Policy(), msgspec.structs.replace(HOST, open_files=512))
    assert plan.open_files == 256


def test_a_policy_that_watches_no_files_lets_them_open_unheard() -> None:
    policy = Policy(filesystem=Filesystem(watch=False))
    program = parse(compile_policy(policy, HOST).guest_filter)
    assert {verdict(program, number_of(call)) for call in TABLE.watched} == {ALLOW}
    assert verdict(program, number_of("ptrace")) == NOTIFY


def test_what_is_quiet_is_refused_without_a_word() -> None:
    assert "mbind" in TABLE.quiet
    assert not set(TABLE.quiet) & {"ptrace", "mount", "keyctl", "bpf", "io_uring_setup"}
    for call in TABLE.quiet:
        if (number := number_of(call)) >= 0:
            assert verdict(LISTENED["standard"], number) == ERRNO | refusal(call)


def test_refusals_name_every_call_that_a_listener_may_hear_of() -> None:
    for policy in POLICIES.values():
        plan = compile_policy(policy, HOST)
        program = parse(plan.guest_filter)
        for number, call in CALLS.items():
            if verdict(program, number, (2**40,) * 6) == NOTIFY and call not in TABLE.watched:
                if call == "flock":
                    assert plan.locks[number] == call
                    continue
                if call in TABLE.noted and number in plan.noted:
                    continue
                if call in TABLE.measured:
                    assert plan.measured[number] == call
                    continue
                assert plan.refusals[number][0] == call
                assert plan.refusals[number][1]


SETTING = {
    "processes.threads = true": Policy(processes=Processes(threads=True)),
    "processes.subprocesses = true": Policy(processes=Processes(subprocesses=True)),
    "processes.terminal = true": Policy(processes=Processes(subprocesses=True, terminal=True)),
    "processes.debug = true": Policy(processes=Processes(subprocesses=True, debug=True)),
    "network.loopback = true": Policy(network=Network(loopback=True)),
    **{
        f'devices.gpu = "{name}"': Policy(devices=Devices(gpu=name))
        for name in ("nvidia", "amd")  # of Jetson no request is allowed
    },
    'syscalls.groups = ["file_watching"]': Policy(syscalls=Syscalls(groups=("file_watching",))),
}


def succeeds(policy: Policy, number: int, arguments: tuple[int, ...]) -> bool:
    """Tell whether the listener answers that the call succeeded."""
    answers = compile_policy(policy, HOST).answers.get(number, ())
    return next((each.errno == 0 for each in answers if each.rule.holds(arguments)), False)


@pytest.mark.parametrize("name", POLICIES)
def test_a_setting_that_a_refusal_names_allows_the_call(name: str) -> None:
    plans = {word: compile_policy(each, HOST) for word, each in SETTING.items()}
    image = CellLanguage(groups=("ids",))  # no setting, but what a sandbox is given
    plans["an image"] = compile_policy(POLICIES["standard"], HOST, runs=image)
    allowing = {word: parse(each.guest_filter) for word, each in plans.items()}
    plan, named = compile_policy(POLICIES[name], HOST), set()
    attempts = [
        (number, (0x5A5A5A5A,) * 6, why)
        for number, (_, why) in plan.refusals.items()
        if why.startswith("needs ")
    ]
    for call, forms in refused_forms(plan.groups).items():
        for rule, why in forms:
            arguments = [0x5A5A5A5A] * 6
            for each in rule.conditions:
                arguments[each.argument] = arguments[each.argument] & ~each.mask | each.value
            assert rule.holds(arguments)
            if (number := number_of(call)) >= 0:
                attempts.append((number, tuple(arguments), why))
    for number, arguments, why in attempts:
        assert verdict(LISTENED[name], number, arguments) == NOTIFY
        for setting in why.removeprefix("needs ").split(" or "):
            named.add(setting)
            got = verdict(allowing[setting], number, arguments)
            given = plans[setting]
            judged = any(rule.holds(arguments) for rule in given.judged.get(number, ()))
            is_allowed = got == ALLOW or number in given.noted or judged
            assert is_allowed or succeeds(SETTING[setting], number, arguments), (number, setting)
    granted = {word for word, each in SETTING.items() if exceeds(each, POLICIES[name])}
    assert named == granted | {"an image"}


@pytest.mark.parametrize(
    ("call", "arguments", "why"),
    [
        ("clone", (0x1200011,), "needs processes.subprocesses = true"),
        ("socket", (1, 1, 0), "needs processes.subprocesses = true or network.loopback = true"),
        ("socket", (2, 1, 0), "needs network.loopback = true"),
    ],
)
def test_the_reason_depends_on_the_arguments(
    call: str, arguments: tuple[int, ...], why: str
) -> None:
    forms = refused_forms(compile_policy(Policy(), HOST).groups)[call]
    six = (*arguments, *[0] * (6 - len(arguments)))
    assert [reason for form, reason in forms if form.holds(six)] == [why]
    assert not any(
        form.holds((16, 3, 12, 0, 0, 0)) for form, _ in refused_forms(("base",))["socket"]
    )


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("command", [6, 7, HIGH | 6], ids=["F_SETLK", "F_SETLKW", "high bits"])
def test_only_a_cell_of_one_process_locks_ranges_unheard(name: str, command: int) -> None:
    program, number = LISTENED[name], number_of("fcntl")
    assert verdict(program, number, (0, command)) == (ERRNO if name in ALONE else NOTIFY)
    plan = compile_policy(POLICIES[name], HOST)
    assert (number in plan.locks) == (name not in ALONE)


def test_a_cell_that_shares_a_writable_file_locks_for_real() -> None:
    policy = Policy(filesystem=Filesystem(write=("/srv",)))
    program = parse(compile_policy(policy, HOST).guest_filter)
    assert verdict(program, number_of("fcntl"), (0, 6)) == NOTIFY


def test_a_cell_has_no_files_in_memory_where_no_cgroup_counts_them() -> None:
    """A memfd is on no tmpfs that has a size, and no rlimit counts its pages."""
    policy, number = Policy(optional_layers=("cgroup_memory",)), number_of("memfd_create")
    uncounted = msgspec.structs.replace(HOST, cgroups=HOST.cgroups | {"memory": "none"})
    assert verdict(parse(compile_policy(policy, uncounted).guest_filter), number) == NOTIFY
    assert verdict(parse(compile_policy(policy, HOST).guest_filter), number) == ALLOW


@pytest.mark.parametrize("flags", [0x7D0F00 & ~0x400, 0x400, 0x500], ids=hex)
def test_threads_alone_share_a_table_of_descriptors(flags: int) -> None:
    """Locks live as long as the table: one that another process shares could not be counted."""
    program, number = FILTERS["standard"], number_of("clone")
    assert verdict(program, number, (flags,)) == EPERM
    assert verdict(program, number, (0x7D0F00,)) == ALLOW
    assert verdict(program, number, (0x100,)) == ALLOW


def test_every_number_gets_what_the_table_says_of_init() -> None:
    plain = {number_of(rule.call) for rule in TABLE.init if not rule.conditions}
    for number in range(1024):
        allowed = verdict(INIT, number) == ALLOW
        assert allowed == (number in plain), CALLS.get(number, number)


@pytest.mark.parametrize(
    ("call", "arguments", "expected"),
    [
        ("clone", (0x00004711,), ALLOW),  # processes.sleeper: a child that is waited for
        ("clone", (0x00001711,), ALLOW),  # the init
        ("clone", (0x6C001711,), EPERM),  # with namespaces
        ("clone", (0x00001611,), EPERM),  # without CLONE_VM
        ("unshare", (0x6C000000,), ALLOW),  # CLONE_NEWPID, NEWNET, NEWIPC, NEWUTS
        ("unshare", (0x2C000000,), ALLOW),  # without CLONE_NEWNET
        ("unshare", (0x7C000000,), EPERM),  # with CLONE_NEWUSER too
        ("unshare", (0x00020000,), EPERM),  # CLONE_NEWNS
        ("prctl", (15, 1), ALLOW),  # PR_SET_NAME
        ("prctl", (4, 1), EPERM),  # PR_SET_DUMPABLE: an init is of the same memory
        ("setns", (7, 0x40000000), ALLOW),  # CLONE_NEWNET
        ("setns", (7, 0), EPERM),
        ("setns", (7, 0x10000000), EPERM),
        ("setns", (7, 0x20000000), EPERM),
        ("setns", (7, 0x00020000), EPERM),
    ],
)
def test_the_nursery_makes_inits_and_moves_between_network_namespaces_alone(
    call: str, arguments: tuple[int, ...], expected: int
) -> None:
    assert verdict(INIT, number_of(call), arguments) == expected


@pytest.mark.parametrize("name", POLICIES)
def test_no_x32_number_is_allowed(name: str) -> None:
    for number in range(1024):
        assert verdict(FILTERS[name], 0x40000000 + number) in (KILL, ENOSYS)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("number", [-1, 0x7FFFFFFF, 0x80000000, NEWEST_NUMBER + 1, 2**32 - 1])
def test_no_number_past_the_table_is_allowed(name: str, number: int) -> None:
    assert verdict(FILTERS[name], number) in (KILL, ENOSYS)


@pytest.mark.parametrize("arch", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("name", POLICIES)
def test_a_foreign_architecture_is_killed(name: str, arch: int) -> None:
    for number in range(NEWEST_NUMBER + 1):
        assert verdict(FILTERS[name], number, arch=arch) == KILL


@pytest.mark.parametrize("arch", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_architecture_is_killed_or_unknown_past_the_table(arch: int) -> None:
    for number in (NEWEST_NUMBER + 1, 0x40000000, 2**32 - 1):
        assert verdict(FILTERS["strict"], number, arch=arch) in (KILL, ENOSYS)


def values_to_try(rules: list[Rule], argument: int) -> list[int]:
    """Return what decides in this argument: each value, its neighbours by one bit, high bits set."""
    seeds = {0, 1, 2**31, 2**32 - 1, 2**64 - 1, HIGH}
    for rule in rules:
        for condition in rule.conditions:
            if condition.argument == argument:
                seeds |= {condition.value, condition.value ^ 1, condition.value + 1}
                seeds |= {condition.value ^ (1 << bit) for bit in range(64)}
                seeds |= {condition.value | ~condition.mask & 0xFFFFFFFFFFFFFFFF}
    low = [seed & 0xFFFFFFFFFFFFFFFF for seed in sorted(seeds)]
    return list(dict.fromkeys(low + [value | HIGH for value in low]))


CONDITIONAL = sorted(
    {rule.call for group in TABLE.groups.values() for rule in group if rule.conditions}
)


@pytest.mark.parametrize("call", CONDITIONAL)
def test_conditions_hold_under_every_perturbation_of_their_arguments(call: str) -> None:
    number = number_of(call)
    if number < 0:
        assert MACHINE != "x86_64"
        return
    for name, rules in RULES.items():
        of_call = [rule for rule in rules if rule.call == call]
        used = sorted({each.argument for rule in of_call for each in rule.conditions})
        choices = [values_to_try(of_call, argument) for argument in used]
        whole = [list(dict.fromkeys(choice)) for choice in choices]
        if len(used) > 1:  # all pairs of what matters most, not of every bit
            whole = [
                [v for v in choice if v in key_values(of_call, argument)] or choice[:4]
                for choice, argument in zip(choices, used, strict=True)
            ]
            singles = itertools.chain.from_iterable(
                (
                    tuple(
                        value if other == argument else key_values(of_call, other)[0]
                        for other in used
                    )
                    for value in choice
                )
                for choice, argument in zip(choices, used, strict=True)
            )
        else:
            singles = iter(())
        for combination in itertools.chain(itertools.product(*whole), singles):
            arguments = [0x5A5A5A5A] * 6
            for argument, value in zip(used, combination, strict=True):
                arguments[argument] = value
            got = verdict(FILTERS[name], number, tuple(arguments))
            assert got == expected(name, call, tuple(arguments)), (
                name,
                call,
                list(map(hex, arguments)),
            )


def key_values(rules: list[Rule], argument: int) -> list[int]:
    found = [
        each.value for rule in rules for each in rule.conditions if each.argument == argument
    ] or [0]
    return list(
        dict.fromkeys(
            [
                *found,
                *(value | HIGH for value in found),
                *(value ^ 1 for value in found),
                0,
                2**32 - 1,
            ]
        )
    )


INT_ARGUMENTS = {
    "ioctl": 1, "fcntl": 1, "prctl": 0, "socket": 0, "futex": 1, "madvise": 2, "fadvise64": 3,
    "setrlimit": 0, "timer_create": 0, "getsockopt": 1, "setsockopt": 1,
}  # fmt: skip


@pytest.mark.parametrize("call", INT_ARGUMENTS)
def test_the_high_bits_of_an_int_never_decide(call: str) -> None:
    """The kernel drops them: a filter that looked would be passed (CVE-2019-10063)."""
    for rules in RULES.values():
        for rule in rules:
            for each in rule.conditions:
                if rule.call == call and each.argument == INT_ARGUMENTS[call]:
                    assert each.mask <= 0xFFFFFFFF, rule


TIOCSTI, TIOCLINUX = 0x5412, 0x541C
NEVER = {
    "terminal injection": ("ioctl", (0, TIOCSTI)),
    "terminal injection by high bits": ("ioctl", (0, TIOCSTI | HIGH)),
    "console selection": ("ioctl", (0, TIOCLINUX)),
    "vsock": ("socket", (40, 1, 0)),
    "vsock by high bits": ("socket", (40 | HIGH, 1, 0)),
    "netfilter": ("socket", (16, 3, 12)),

    "packet": ("socket", (17, 3, 0)),
    "interfaces, but by the listener": ("socket", (16, 3, 0)),
    "kernel crypto": ("socket", (38, 5, 0)),
    "raw IP": ("socket", (2, 3, 1)),
    "IPv6 raw": ("socket", (10, 3, 58)),
    "new user namespace": ("clone", (0x10000000 | 17, 0, 0, 0, 0)),
    "new mount namespace": ("clone", (0x00020000 | 17, 0, 0, 0, 0)),
    "new pid namespace by high bits": ("clone", (0x20000000 | HIGH | 17, 0, 0, 0, 0)),
    "own filter": ("prctl", (22, 2, 0)),
    "dumpable": ("prctl", (4, 1)),
    "ambient capability": ("prctl", (47, 2, 21)),
    "core limit": ("prlimit64", (0, 4, 0x7000, 0)),
    "another's limits": ("prlimit64", (1, 7, 0x7000, 0)),
    "block device": ("mknod", (0x7000, 0o60666, 0)),
    "character device": ("mknodat", (-100, 0x7000, 0o20666, 0)),
    "unshare": ("unshare", (0x10000000,)),
    "setns": ("setns", (3, 0)),
    "ptrace": ("ptrace", (16, 1)),
    "mount": ("mount", ()),
    "bpf": ("bpf", (0,)),
    "io_uring": ("io_uring_setup", (1,)),
    "keyctl": ("keyctl", (0,)),
    "userfaultfd": ("userfaultfd", (1,)),
    "perf": ("perf_event_open", ()),
    "handles": ("open_by_handle_at", ()),
    "another's memory": ("process_vm_readv", (1,)),
    "another's descriptor": ("pidfd_getfd", (3, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize(("call", "arguments"), NEVER.values(), ids=NEVER)
@pytest.mark.parametrize("name", POLICIES)
def test_what_must_never_be_allowed_is_refused(
    name: str, call: str, arguments: tuple[int, ...]
) -> None:
    number = number_of(call)
    if number < 0:
        assert MACHINE != "x86_64"
        return
    assert verdict(FILTERS[name], number, arguments) & 0xFFFF0000 == ERRNO
    assert verdict(LISTENED[name], number, arguments) == NOTIFY


@pytest.mark.parametrize("name", POLICIES)
def test_clone3_is_unknown_so_that_glibc_falls_back(name: str) -> None:
    assert verdict(FILTERS[name], number_of("clone3")) == ENOSYS


ONLY_WITH = {
    "threads": (("clone", (0x3D0F00, 0, 0, 0, 0)), {"strict", "loopback", "standard"}),
    "fork": (("clone", (0x1200011, 0, 0, 0, 0)), {"standard"}),
    "exec": (("execve", ()), {"standard"}),
    "internet": (("socket", (2, 1, 0)), {"loopback", "standard"}),
    "internet 6": (("socket", (10, 1, 0)), {"loopback", "standard"}),
}


@pytest.mark.parametrize(("attempt", "policies"), ONLY_WITH.values(), ids=ONLY_WITH)
def test_a_permission_opens_its_call_and_nothing_else_does(
    attempt: tuple[str, tuple[int, ...]], policies: set[str]
) -> None:
    call, arguments = attempt
    open_in = {
        name for name in POLICIES if verdict(FILTERS[name], number_of(call), arguments) == ALLOW
    }
    assert open_in == policies


def test_the_filters_fit_into_the_kernels_limit() -> None:
    for program in (*FILTERS.values(), INIT):
        assert len(program) <= 4096  # BPF_MAXINSNS


# syscalls.toml itself

TEXT = (Path(syscalls_module.__file__).with_name("syscalls.toml")).read_text()
DATA = tomllib.loads(TEXT)


def test_a_host_without_a_directory_for_temporary_files_compiles_them_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile._candidate_tempdir_list", list)
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(FileNotFoundError):
        tempfile.gettempdir()
    assert compile_policy(Policy(), HOST).guest_filter


def test_a_call_stands_in_one_place_only() -> None:
    answered = {entry["call"] for entry in DATA["answers"]}
    assert not answered & {*DATA["unknown"]["calls"], *TABLE.refused}
    plain = [call for group in DATA["groups"].values() for call in group.get("calls", {})]
    conditional = {
        entry["call"] for group in DATA["groups"].values() for entry in group.get("conditional", [])
    }
    refused = [call for part in DATA["refused"].values() for call in part["calls"]]
    places = [*plain, *conditional, *refused, *DATA["unknown"]["calls"]]
    assert sorted({call for call in places if places.count(call) > 1}) == []


def test_every_entry_carries_its_reason() -> None:
    for part in (
        *DATA["groups"].values(),
        *DATA["refused"].values(),
        DATA["init"],
        DATA["unknown"],
    ):
        assert all(isinstance(why, str) and why.strip() for why in part.get("calls", {}).values())
        assert all(entry["reason"].strip() for entry in part.get("conditional", []))


def test_a_condition_asks_only_for_bits_in_its_mask() -> None:
    for group in TABLE.groups.values():
        for rule in group:
            for each in rule.conditions:
                assert each.value & ~each.mask == 0, rule
                assert 0 <= each.argument <= 5


def test_every_name_is_known_to_this_machine_or_was_never_there() -> None:
    """A misspelt name would be skipped in silence: each must be known to some architecture."""
    for call in CALLS.values():
        assert call.isidentifier()
    for group in TABLE.groups.values():
        for rule in group:
            assert rule.call in TABLE.numbers or number_of(rule.call) != -1, rule.call


def test_numbers_given_by_hand_agree_with_libseccomp_where_it_knows_them() -> None:
    for call, number in TABLE.numbers.items():
        known = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, call)
        assert known < 0 or known == number, call


@pytest.mark.skipif(MACHINE != "x86_64", reason="the numbers are x86_64's")
def test_every_number_of_this_machine_is_in_the_table() -> None:
    """A call that the table forgot would be refused without a reason that anyone decided on."""
    gaps = set(range(337, 424))
    missing = set(range(NEWEST_NUMBER + 1)) - CALLS.keys() - gaps
    assert sorted(missing) == []


ID, KEEP, OTHER = 1000, 2**32 - 1, 0
NOTHING_CHANGES = {
    "to the own id": ("setuid", (ID,)),
    "by posix_spawn with RESETIDS": ("setresuid", (KEEP, ID, KEEP)),
    "all ids": ("setresgid", (ID, ID, ID)),
    "not dumpable": ("prctl", (4, 0)),
    "an empty ambient set": ("prctl", (47, 4)),
    "to disk": ("sync", ()),
    "out of the page cache": ("fadvise64", (3, 0, 0, 4)),
}


@pytest.mark.parametrize(("call", "arguments"), NOTHING_CHANGES.values(), ids=NOTHING_CHANGES)
@pytest.mark.parametrize("name", POLICIES)
def test_a_call_that_changes_nothing_succeeds(
    name: str, call: str, arguments: tuple[int, ...]
) -> None:
    six, number = (*arguments, *[0] * 6)[:6], number_of(call)
    assert verdict(FILTERS[name], number, six) == ERRNO
    assert verdict(LISTENED[name], number, six) == NOTIFY
    assert succeeds(POLICIES[name], number, six)


ANSWERS = {
    "another id": ("setresuid", (KEEP, OTHER, KEEP), errno.EPERM),
    "an old limit is wanted": ("prlimit64", (0, 4, 0x7000, 0x7000), errno.EPERM),
    "netfilter": ("socket", (16, 3, 12), errno.EAFNOSUPPORT),
    "vsock": ("socket", (40, 1, 0), errno.EAFNOSUPPORT),
    "raw": ("socket", (2, 3, 1), errno.EPERM),
    "multipath": ("socket", (2, 1, 262), errno.EPROTONOSUPPORT),
    "urgent data": ("sendto", (3, 0, 1, 1), errno.EOPNOTSUPP),
    "an option of sockets": ("setsockopt", (3, 1, 26), errno.ENOPROTOOPT),
    "an interface": ("setsockopt", (3, 1, 25), errno.EPERM),
    "a mark": ("setsockopt", (3, 1, 36), errno.EPERM),
    "foreign addresses": ("setsockopt", (3, 0, 19), errno.EPERM),
    "an own filter": ("prctl", (22, 2), errno.EINVAL),
    "a capability": ("prctl", (47, 2, 21), errno.EPERM),
    "own restrictions": ("landlock_create_ruleset", (), errno.ENOSYS),
    "rings": ("io_uring_setup", (1,), errno.ENOSYS),
    "programs in the kernel": ("bpf", (0,), errno.ENOSYS),
    "typing into a terminal": ("ioctl", (0, 0x5412), errno.EPERM),
    "a device's request": ("ioctl", (0, 0xC0DE), errno.ENOTTY),
    "mounting": ("mount", (), errno.EPERM),
}


@pytest.mark.parametrize(("call", "arguments", "answer"), ANSWERS.values(), ids=ANSWERS)
def test_a_refusal_reads_as_that_of_a_linux_without_the_feature(
    call: str, arguments: tuple[int, ...], answer: int
) -> None:
    six, number = (*arguments, *[0] * 6)[:6], number_of(call)
    assert verdict(LISTENED["standard"], number, six) == NOTIFY
    answers = compile_policy(POLICIES["standard"], HOST).answers.get(number, ())
    assert next((each.errno for each in answers if each.rule.holds(six)), errno.EPERM) == answer


def test_what_a_setting_of_the_policy_would_allow_is_refused_with_eperm() -> None:
    answers = compile_policy(POLICIES["strict"], HOST).answers
    for arguments in ((1, 1, 0, 0, 0, 0), (2, 1, 0, 0, 0, 0), (10, 2, 17, 0, 0, 0)):
        found = (each for each in answers[number_of("socket")] if each.rule.holds(arguments))
        assert next(found).errno == errno.EPERM


def values_compared(program: Program) -> dict[int, set[int]]:
    """Return what the tests of arguments compare with, by the offset that was loaded before."""
    found: dict[int, set[int]] = {}
    offset = 0
    for code, _, _, k in program:
        if code == 0x20:
            offset = k
        elif code in (0x15, 0x25, 0x35, 0x45):
            found.setdefault(offset, set()).update({k, k ^ 1, k + 1 & 0xFFFFFFFF})
    return found


def test_a_search_by_ranges_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each filter is compared with what libseccomp wrote, over every number and the values of its tests."""
    pairs: dict[bytes, bytes] = {}

    def noted(program: bytes, *given: int) -> bytes:
        pairs[program] = with_ranges(program, *given)
        return pairs[program]

    monkeypatch.setattr(seccomp, "with_ranges", noted)
    for policy in POLICIES.values():
        for host in (HOST, DEAF):
            compile_policy(msgspec.structs.replace(policy, optional_layers=("listener",)), host)
    assert len(pairs) >= 2 * len(POLICIES)
    chosen = random.Random(7)
    for program, ranged in pairs.items():
        old, new = parse(program), parse(ranged)
        assert len(new) < len(old)
        values = {
            offset: sorted(some) for offset, some in values_compared(old).items() if offset >= 16
        }
        halves = [[0, 1, 0xFFFFFFFF, *values.get(offset, ())] for offset in range(16, 64, 4)]
        for number in range(NEWEST_NUMBER + 1):
            has_tests = verdict(new, number) != verdict(new, number, (2**64 - 1,) * 6)
            for _ in range(400 if has_tests else 20):
                low_first = [chosen.choice(half) for half in halves]
                six = tuple(
                    map(int.__or__, low_first[::2], (each << 32 for each in low_first[1::2]))
                )
                assert verdict(new, number, six) == verdict(old, number, six), (number, six)
