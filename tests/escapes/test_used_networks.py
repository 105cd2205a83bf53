"""A network namespace that an earlier cell had: nothing of that cell is in it, or it is not used again."""

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from cellwright import LaunchError, Sandbox
from cellwright.benchmarks.census import children
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import Network, Policy, Processes
from cellwright.runner.kernel import process_calls as processes
from cellwright.runner.launcher import inits
from cellwright.runner.settings import PoolSettings
from cellwright.testing import inspect
from tests.conftest import OPTIONAL, policy_named, soon
from tests.faults.injection import Call, injecting

pytestmark = pytest.mark.needs("root")

LOCAL = policy_named("strict", processes=Processes(subprocesses=True, threads=True))
KINDS = (1, 2, 5)  # SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET
# What a program can leave in a network namespace by sockets of AF_UNIX: names, unread bytes, and a
# process that goes on.
PLANT = """
import os, socket
kept = []
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    planted = socket.socket(socket.AF_UNIX, kind)
    planted.bind(f"\\0planted-{kind}")
    if kind != socket.SOCK_DGRAM: planted.listen()
    unnamed = socket.socket(socket.AF_UNIX, kind)
    unnamed.bind("")
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    one.send(b"unread")
    kept += [planted, unnamed, one, other]
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    while True: kept[0].accept()
"""
# Sockets that only a message between them still holds, which the kernel frees when it next looks for such.
GARBAGE = """
one, other = socket.socketpair()
for end in (one, other): socket.send_fds(end, [b"x"], [one.fileno(), other.fileno(), kept[0].fileno()])
one.close(), other.close()
"""
WAITS = "import threading\nprint('up', flush=True)\nthreading.Event().wait(60)"
# What a program sees of its network namespace: the files of the kernel, names, the socket ioctls of netdevice(7).
LOOK = """
import fcntl, os, socket, struct
def attempt(work):
    try: return work()
    except OSError as error: return error.errno
seen = {}
for top, _, names in os.walk("/proc/self/net"):
    for name in names:
        seen[name] = attempt(lambda: open(f"{top}/{name}").read())
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    with socket.socket(socket.AF_UNIX, kind) as sock:
        seen[f"connect {kind}"] = attempt(lambda: sock.connect(f"\\0planted-{kind}"))
    with socket.socket(socket.AF_UNIX, kind) as sock:
        seen[f"bind {kind}"] = attempt(lambda: sock.bind(f"\\0planted-{kind}"))
        seen[f"options {kind}"] = [sock.getsockopt(socket.SOL_SOCKET, each) for each in (socket.SO_SNDBUF, socket.SO_RCVBUF)]
with socket.socket(socket.AF_UNIX) as sock:
    for request in range(0x8910, 0x8950):
        answer = attempt(lambda: fcntl.ioctl(sock, request, struct.pack("16s24x", b"lo")))
        seen[f"ioctl {request:x}"] = answer.hex() if isinstance(answer, bytes) else answer
    seen["sockets"] = open("/proc/self/net/unix").read().count("\\n")
seen["namespace"] = os.readlink("/proc/self/ns/net")
seen
"""
# An address, a membership of every group but two that need CAP_NET_ADMIN (RTNLGRP_IPV4_MROUTE_R and
# RTNLGRP_IPV6_MROUTE_R), and an unread answer.  The kernel frees such a socket a moment after its
# process, so a namespace may not be used again at once.
ASK = """
asking = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
asking.bind((4711, 0x9FFFFFFF))
asking.send(bytes([32, 0, 0, 0, 18, 0, 1, 3]) + bytes(24))
"""
# Counted for the whole machine, or told with numbers of sockets and namespaces, which are the machine's.
_OF_THE_MACHINE = ("softnet_stat", "unix", "namespace")
_IN_PART = ("protocols", "sockstat", "netlink")


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(policy=LOCAL, pool=1) as box:
        yield box


@contextlib.contextmanager
def ended(
    sandbox: Sandbox, program: str, at_rest: Callable[[int], object] = lambda _: None
) -> Iterator[str]:
    """Give the network namespace of a cell in which `program` ran and was ended, after `at_rest` was called
    with its process.  The namespace is held open: no other one has its number."""
    sandbox.settle()
    (guest,) = children(inspect(sandbox).supervisor.generation.launcher.pids()[2])
    run = sandbox.start(f"{program}\n{WAITS}")
    next(run.output())
    held = os.open(f"/proc/{guest}/ns/net", os.O_RDONLY)
    try:
        at_rest(guest)
        run.cancel()
        run.result()
        yield os.readlink(f"/proc/self/fd/{held}")
    finally:
        os.close(held)


def later(sandbox: Sandbox) -> list[dict[str, Any]]:
    """Return what programs see of theirs that run next: more than cells and inits were ready."""
    found = [sandbox.execute(LOOK) for _ in range(2 * (1 + inits._READY) + 2)]
    assert [each.error for each in found if not each.ok] == []
    return [each.value for each in found]


def of_namespace(seen: dict[str, Any]) -> dict[str, Any]:
    """Return what the kernel keeps apart for each namespace."""
    kept = {name: value for name, value in seen.items() if name not in _OF_THE_MACHINE}
    words = {name: [line.split() for line in kept[name].splitlines()] for name in _IN_PART}
    kept["protocols"] = [line[:3] + line[4:] for line in words["protocols"]]  # without memory
    # What TCP and UDP allocated, and the count of orphans, are the machine's (sockstat_seq_show).
    of_it = {"TCP:": (0, 1, 2, 5, 6), "UDP:": (0, 1, 2)}
    kept["sockstat"] = [
        [line[n] for n in of_it.get(line[0], range(len(line)))] for line in words["sockstat"]
    ]
    kept["netlink"] = [line[1:-1] for line in words["netlink"]]  # the kernel's own sockets
    return kept


@pytest.fixture(scope="module")
def new() -> dict[str, Any]:
    """What a program sees of a network namespace that no other cell had."""
    with Sandbox(policy=LOCAL, pool=0) as box:
        seen = of_namespace(later(box)[0])
    assert len(seen) > 80
    assert {seen[f"connect {kind}"] for kind in KINDS} == {errno.ECONNREFUSED}
    return seen


@pytest.mark.parametrize(
    "program", [PLANT, PLANT + GARBAGE, PLANT + ASK], ids=["planted", "garbage", "asked"]
)
def test_a_program_sees_no_difference_from_a_new_one(
    sandbox: Sandbox, new: dict[str, Any], program: str
) -> None:
    with ended(sandbox, program) as name:
        seen = [each for each in later(sandbox) if each["namespace"] == name]
    assert seen or program != PLANT
    for each in seen:
        assert of_namespace(each) == new


def test_one_in_which_a_socket_is_left_is_not_used_again(sandbox: Sandbox) -> None:
    """The test takes a socket out of the cell, and holds it."""
    taken: list[int] = []

    def take(guest: int) -> None:
        pidfd = os.pidfd_open(guest)
        sockets = [n for n in range(4, 64) if "socket:" in _link(f"/proc/{guest}/fd/{n}")]
        taken.extend(processes.copy_descriptor(pidfd, number) for number in sockets)
        os.close(pidfd)

    with ended(sandbox, PLANT, take) as name:
        seen = later(sandbox)
    with contextlib.ExitStack() as stack:
        for descriptor in taken:
            stack.callback(os.close, descriptor)
        assert len(taken) == 4 * len(KINDS)
        assert name not in {each["namespace"] for each in seen}
        assert {each["connect 1"] for each in seen} == {errno.ECONNREFUSED}


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def networks_of(sandbox: Sandbox) -> list[str]:
    """Return those of cells one after the other, each held open, so that no number comes twice."""
    count = 2 * (1 + inits._READY) + 2
    with contextlib.ExitStack() as held:
        return [held.enter_context(ended(sandbox, "")) for _ in range(count)]


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (LOCAL, PoolSettings(1, cells_per_network=1)),
        (policy_named("standard"), PoolSettings(1)),
        (
            policy_named("standard", network=Network(allow=(NetworkRule(host="api.example.org"),))),
            PoolSettings(1),
        ),
    ],
    ids=["switched off", "loopback", "names"],
)
def test_each_cell_has_a_new_one(policy: Policy, settings: PoolSettings) -> None:
    with Sandbox(policy=policy, pool=settings) as box:
        found = networks_of(box)
    assert len(set(found)) == len(found)


def test_one_serves_as_many_cells_as_the_settings_say() -> None:
    with Sandbox(policy=LOCAL, pool=PoolSettings(1, cells_per_network=2)) as box:
        found = Counter(networks_of(box))
    assert max(found.values()) == 2


def test_few_are_kept(sandbox: Sandbox) -> None:
    nursery = inspect(sandbox).supervisor.generation.launcher.pids()[1]
    with contextlib.ExitStack() as alive:
        for _ in range(inits._MOST + 4):
            alive.enter_context(sandbox.session()).execute("1")

        def kept() -> int:
            links = [_link(f"/proc/{nursery}/fd/{n}") for n in os.listdir(f"/proc/{nursery}/fd")]
            return sum("net:" in link for link in links)

        assert soon(lambda: kept() == inits._MOST + 1)  # one more while it makes the next init


@contextlib.contextmanager
def refusing(name: str, number: int, which: Callable[[int], bool]) -> Iterator[Sandbox]:
    """Give a sandbox whose nursery is refused those calls `name` that `which` picks, counted from now on."""
    made: list[Call] = []
    ready: list[bool] = []

    def answer(call: Call, _: int) -> int:
        if not ready or call.role != "nursery":
            return 0
        made.append(call)
        return number if which(len(made)) else 0

    optional = (*OPTIONAL, "listener")  # the filter that asks takes its place
    policy = msgspec.structs.replace(LOCAL, optional_layers=optional)
    with injecting([name], answer), Sandbox(policy=policy, pool=1) as box:
        box.settle()
        ready.append(True)
        yield box
    assert made


@pytest.mark.parametrize(("call", "number"), [("setns", errno.EPERM), ("read", errno.EIO)])
def test_one_that_cannot_be_looked_at_is_not_used_again(call: str, number: int) -> None:
    with refusing(call, number, lambda _: True) as box:
        found = networks_of(box)
    assert len(set(found)) == len(found)


def test_a_nursery_that_cannot_go_home_ends() -> None:
    """The second call is the one by which it leaves the namespace of a cell."""
    with refusing("setns", errno.ENOMEM, lambda count: count == 2) as box:
        launcher = inspect(box).supervisor.generation
        for _ in range(2 * (1 + inits._READY)):
            with contextlib.suppress(LaunchError):  # a program may have begun
                assert box.execute("1 + 1").value == 2
        assert inspect(box).supervisor.generation is not launcher
        assert box.execute("1 + 1").value == 2
