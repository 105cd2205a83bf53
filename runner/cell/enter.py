"""The security story of a cell: `confinement`, in order, with the reason where the order matters.

It is a list of system calls.  The launcher makes it once; each guest's process, forked into fresh
mount, pid, net, ipc and uts namespaces, executes it before anything else, without Python (steps.c).
Those namespaces belong to the launcher's user namespace, while the guest ends in a user namespace of
its own that owns nothing: whatever capability it regained, it would have no power over them.
"""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import _socket
import os
import resource
import stat
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ...policies.plan import FILE_WATCHING, IdRange, PathRule, Plan, Tmpfs
from ..fixed_root import ANY_ADDRESS, CELL_ID, DNS_ADDRESS, TERMINALS
from ..kernel import AT_FDCWD, landlock, mounts
from ..kernel import credentials as kernel
from ..kernel import process_calls as processes
from ..kernel.steps import Descriptor, Result, Steps, SystemCalls
from ..messages import Ready, WaysOut, encode
from . import privileges
from .image_root import enter_image

CONTROL = 3  # where the guest's process finds its control channel
STATUS, _CONTROL, _STDIN, _STDOUT, _STDERR, TASKS = range(
    6
)  # descriptors of a Fork frame, in order
INIT = 15  # the pidfd of the cell's init
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _IFF_UP = 0x8914, 0x8916, 0x891C, 0x1
_AF_NETLINK = 16
# egress/addresses.py gives the other addresses of this network to names
_INTERFACE, _NETMASK = "198.18.0.1", "255.254.0.0"
_SOCKET_ADDRESS_BYTES, _BACKLOG = 16, 64
# RTM_NEWADDR twice (rtnetlink(7)): 127.0.0.2/8, IFA_ADDRESS and IFA_LOCAL, and fe80::1/128 of lo
_ADDRESSES = bytes.fromhex(
    "28000000 1400 0501 00000000 00000000 02 08 00fe 01000000 0800 0100 7f000002 0800 0200 7f000002"
    "2c000000 1400 0501 00000000 00000000 0a 80 00fd 01000000 1400 0100 fe80"
    "0000000000000000000000000001"
)
_MOST_TOLD = 4  # descriptors that one step reports
_MOST_TERMINALS = 16  # the whole host has a few thousand (kernel.pty.max)
_MOST_INOTIFY = 16  # all cells of an id share 128 (fs.inotify.max_user_instances)
_BYTES_A_WATCH = 64 * 1024  # one inotify watch for so much of the cell's memory
_HARD = mounts.NOSUID | mounts.NODEV
_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC


class LauncherFacts(NamedTuple):
    """Facts of the launcher that its cells inherit."""

    plan: Plan
    host_proc: int  # /proc as the launcher sees it, to write the id maps through
    launcher_id: int  # the launcher's uid and gid in its user namespace
    last_capability: int
    beneath_memory: dict[str, tuple[str, ...]]  # a Tmpfs' target -> what the root has there
    joins: int  # how many cgroups are joined by a write to their `tasks` (v1)
    is_for_one_cell: bool = False  # skip work that only further cells would profit from
    settings: int = -1  # /proc/sys, where programs watch files, or the root is an image
    image_trees: tuple[str, ...] = ()  # paths of the launcher's root that cells have in an image


def confinement(facts: LauncherFacts) -> Steps:
    """Return the steps that put a process behind every layer, and hand over the supervisor's
    descriptors.

    If the kernel refuses a step there is no cell.
    """
    plan, do = facts.plan, Steps()
    do.layer("descriptor sweep")
    _keep_only(do, facts.host_proc, facts.settings)  # first: descriptors of other cells
    do.layer("cgroup")
    _join_cgroups(do, facts.joins)  # before any work, so that the work is charged to the cell
    do.layer("cgroup_ns")
    # After joining: the cell's cgroup is its root.
    do.call("unshare", processes.CLONE_NEWCGROUP, about="new cgroup namespace")
    do.layer("own mounts")
    privileges.set_process_name(do, "cell-guest")
    do.call("setsid")  # no controlling terminal, and no signals from another process group
    _ignore_interrupts(do)
    _mount_own_filesystems(do, plan, facts.beneath_memory)
    if plan.terminal:
        _mount_terminals(do, facts.launcher_id)
    if plan.image:
        enter_image(do, plan.image, facts.image_trees)
    workspace = do.call("openat", AT_FDCWD, b"/workspace", _FOLDER, about="/workspace")
    if plan.loopback:
        _bring_loopback_up(do)
        if plan.image:
            privileges.allow_all_ports(do, facts.settings)
        if "interfaces" in plan.groups:
            _give_addresses(do)
    if plan.network:
        _open_ways_out(do, plan.network.ports)
    guest = do.call("pidfd_open", do.call("getpid"), 0, about="itself")
    do.layer("user_ns")
    # The launcher is not dumpable, and our id maps are ours to write only if we are.
    privileges.make_dumpable(do)
    _enter_user_namespace(
        do, facts
    )  # after the mounts, because nothing can be mounted from here on
    do.layer("rlimits")
    _limit_resources(do, plan.rlimits)
    _enter_inner_user_namespace(do, facts)
    do.call(
        "close", facts.host_proc, about="/proc of the launcher"
    )  # from here on nothing outside is visible
    do.layer("capabilities")
    kept = privileges.OF_AN_IMAGE if plan.image else ()
    privileges.give_up_all(
        do, facts.last_capability, kept
    )  # sets no_new_privs, for Landlock and seccomp
    do.call("umask", 0o022, about="022")
    do.call("chdir", b"/workspace", about="/workspace")
    do.layer("landlock")
    if plan.landlock_abi:
        fence_paths(do, plan)
    do.layer("pages")
    do.own_pages()
    do.layer("seccomp")
    _filter_system_calls(
        do, plan, [do.input(INIT), guest, workspace]
    )  # last, because the filter refuses most of the calls above
    return do


def _filter_system_calls(do: Steps, plan: Plan, kept: list[Result]) -> None:
    if plan.refusals:
        # The filter allows one more sending of descriptors, on the status channel only.
        kept = [*kept, kernel.install_seccomp_filter(do, plan.guest_filter, listens=True)]
    else:
        kernel.install_seccomp_filter(do, plan.guest_filter, listens=False)
    ready = b"\0" + encode(Ready(listens=bool(plan.refusals)))
    do.tell(ready, *kept, about="init, guest, /workspace and the listener to the supervisor")
    # The kernel compares the descriptors that a uid has in flight with the sender's RLIMIT_NOFILE
    # (unix(7)), and other cells may have used up a low limit. So the limit is lowered after the
    # descriptors were sent.
    _limit_resources(do, (("NOFILE", plan.open_files),))
    for descriptor in kept:
        do.call("close", descriptor)
    do.call("close", plan.open_files, about="the status channel")


def _keep_only(do: Steps, *descriptors: int) -> None:
    """Move the guest's four descriptors to their numbers and close all others.

    The launcher keeps 0 to 3 occupied, so that nothing it passes on has one of those numbers.
    """
    for number, stream in enumerate((_STDIN, _STDOUT, _STDERR)):
        do.call("dup3", do.input(stream), number, 0, about=f"descriptor {number}")
    do.call("dup3", do.input(_CONTROL), CONTROL, os.O_CLOEXEC, about="the control channel")
    do.keep_only(*(each for each in descriptors if each >= 0))


def _join_cgroups(do: Steps, joins: int) -> None:
    for n in range(joins):
        tasks = do.input(TASKS + n)
        do.call("write", tasks, b"0", 1, about="the cgroup's tasks")
        do.call("close", tasks)


def _ignore_interrupts(do: Steps) -> None:
    """Ignore SIGINT until a program is there: one that comes too early ends nothing (sigaction(2))."""
    ignore = do.structure(struct.pack("=4Q", _signal.SIG_IGN, 0, 0, 0))
    do.call("rt_sigaction", _signal.SIGINT, ignore, None, 8, about="SIGINT ignored")


def _mount_own_filesystems(do: Steps, plan: Plan, beneath: dict[str, tuple[str, ...]]) -> None:
    mode = "0755" if plan.image else "0700"  # an image has several users
    for tmpfs in plan.tmpfs:
        _mount_tmpfs(do, tmpfs, beneath[tmpfs.target], mode)
    # subset=pid: neither /proc/sys nor any other file of the whole machine exists (proc(5)).
    proc = mounts.new(do, "proc", _HARD | mounts.NOEXEC | mounts.RDONLY, subset="pid")
    mounts.put(do, proc, "/proc")


def _mount_terminals(do: Steps, owner: int) -> None:
    """Mount a devpts that has no terminal yet: each mount is an instance of its own (Linux 4.7).

    The supervisor opens masters in it, by way of /workspace, as long as the cell lives; their terminals
    belong to the cell's id.  A guest may open masters too.
    """
    attributes = mounts.NOSUID | mounts.NOEXEC  # not NODEV: terminals are devices
    limits = {"uid": str(owner), "gid": str(owner), "ptmxmode": "0666", "max": str(_MOST_TERMINALS)}
    mounts.put(do, mounts.new(do, "devpts", attributes, **limits), TERMINALS)


def _mount_tmpfs(do: Steps, tmpfs: Tmpfs, covered: Collection[str], mode: str) -> None:
    """Mount a fresh tmpfs and, on top of it, the shown host paths that the root has there.

    The directories above them come from the root and are read-only like it. Otherwise a program could
    write beside a shown file, believe that it wrote to the host, and lose the file with the cell. In
    HOME they are directories of the tmpfs: programs expect to make files there.
    """
    links = [path for path in covered if os.path.islink(path)] if tmpfs.is_home else []
    trees = [
        (mounts.clone(do, path), path, os.path.isdir(path)) for path in covered if path not in links
    ]
    attributes = _HARD | (0 if tmpfs.executable else mounts.NOEXEC)
    limits = {"size": str(tmpfs.size_bytes), "nr_inodes": str(tmpfs.inodes)}
    mounts.put(do, mounts.new(do, "tmpfs", attributes, mode=mode, **limits), tmpfs.target)
    made = {tmpfs.target}
    for path in covered:
        for directory in reversed([*_above(path, made)]):
            do.call("mkdirat", AT_FDCWD, os.fsencode(directory), 0o755, about=directory)
            made.add(directory)
    for path in links:
        target = os.fsencode(os.readlink(path))
        do.call("symlinkat", target, AT_FDCWD, os.fsencode(path), about=path)
    for tree, path, is_directory in trees:
        mounts.put_making(do, tree, path, is_directory=is_directory)
    if tmpfs.also:
        mounts.put(do, mounts.clone(do, tmpfs.target), tmpfs.also)


def _above(path: str, made: Collection[str]) -> Iterator[str]:
    """Yield the directories above `path` that were not made yet, from the lowest up."""
    while (path := os.path.dirname(path)) not in made:
        yield path


def _bring_loopback_up(do: Steps) -> None:
    """Switch lo on (netdevice(7)); a new network namespace has it down, and nothing else."""
    any_socket = do.call("socket", _socket.AF_INET, _socket.SOCK_DGRAM, 0)
    request = do.structure(struct.pack("16sH22x", b"lo", _IFF_UP))
    do.call("ioctl", any_socket, _SIOCSIFFLAGS, request, about="lo up")
    do.call("close", any_socket)


def _give_addresses(do: Steps) -> None:
    """Give lo an address beside 127.0.0.1, and one beside ::1.

    getaddrinfo(3) with AI_ADDRCONFIG asks netlink for addresses, and with these alone it finds not even
    localhost.  The answer is not read: it is an error where the kernel has no IPv6.
    """
    rtnetlink = do.call("socket", _AF_NETLINK, _socket.SOCK_RAW, 0)
    do.call("write", rtnetlink, do.structure(_ADDRESSES), len(_ADDRESSES), about="addresses of lo")
    do.call("close", rtnetlink)


def _open_ways_out(do: Steps, ports: tuple[int, ...]) -> None:
    """Give lo a range of addresses that stand for names, and make the sockets of the egress process.

    A prefix of lo is local as a whole (fib_frontend.c, fib_add_ifaddr), so a connection to any of its
    addresses reaches a listening socket, and says which address was meant.  Whatever else is asked for
    has no route.  No guest can have these ports: they are taken, and without SO_REUSEPORT.
    """
    with_address = do.call("socket", _socket.AF_INET, _socket.SOCK_DGRAM, 0)
    for request, address in ((_SIOCSIFADDR, _INTERFACE), (_SIOCSIFNETMASK, _NETMASK)):
        words = struct.pack("=16s16s8x", b"lo:1", _socket_address(address, 0))
        do.call("ioctl", with_address, request, do.structure(words), about=f"lo {address}")
    do.call("close", with_address)
    wanted = [(_socket.SOCK_DGRAM, DNS_ADDRESS, 53), (_socket.SOCK_STREAM, DNS_ADDRESS, 53)]
    wanted += [(_socket.SOCK_STREAM, ANY_ADDRESS, port) for port in ports]
    made = [_listening(do, *each) for each in wanted]
    for start in range(0, len(made), _MOST_TOLD):
        frame = b"\0" + encode(WaysOut())
        do.tell(frame, *made[start : start + _MOST_TOLD], about="sockets to the supervisor")
    for descriptor in made:
        do.call("close", descriptor)


def _listening(do: Steps, kind: int, address: str, port: int) -> Result:
    about = f"{address}:{port}"
    made = do.call("socket", _socket.AF_INET, kind, 0, about=about)
    place = do.structure(_socket_address(address, port))
    do.call("bind", made, place, _SOCKET_ADDRESS_BYTES, about=about)
    if kind == _socket.SOCK_STREAM:
        do.call("listen", made, _BACKLOG, about=about)
    return made


def _socket_address(address: str, port: int) -> bytes:
    """Lay out a struct sockaddr_in (ip(7))."""
    packed = _socket.inet_aton(address)
    return struct.pack("=H", _socket.AF_INET) + struct.pack("!H4s8x", port, packed)


def _enter_user_namespace(do: Steps, facts: LauncherFacts) -> None:
    """Move into a user namespace that knows one id, or those of an image, and owns nothing
    (user_namespaces(7)).

    It inherits from the launcher's that setgroups(2) is denied, unless there is a range of ids.
    """
    image = facts.plan.image
    if image and image.kind != "one":
        do.enter_mapped(facts.host_proc, _same_ids(image.uids), _same_ids(image.gids))
    else:
        do.call("unshare", processes.CLONE_NEWUSER, about="new user namespace")
        inside = facts.launcher_id if image else CELL_ID
        privileges.map_ids(do, facts.host_proc, inside, facts.launcher_id, facts.launcher_id)
    if facts.settings >= 0:
        if FILE_WATCHING in facts.plan.groups:
            privileges.limit_watches(do, facts.settings, *_most_watches(facts.plan))
        do.call("close", facts.settings, about="/proc/sys")


def _enter_inner_user_namespace(do: Steps, facts: LauncherFacts) -> None:
    """Where there is a range of ids, move into one more user namespace with the same ids.

    The kernel counts processes, signals and inotify descriptors by id and namespace, so that root of an
    image would have all limits once for each id.  It counts them again for the owner of a namespace in
    the one above, up to the limits of that and to the rlimits of the process that made the inner one
    (kernel/ucount.c).
    """
    image = facts.plan.image
    if image and image.kind != "one":
        do.layer("user_ns")
        do.enter_mapped(facts.host_proc, _same_ids(image.uids), _same_ids(image.gids))


def _same_ids(lines: tuple[IdRange, ...]) -> str:
    """Return a map that leads from each id to the same in the namespace above."""
    return "".join(f"{first} {first} {count}\n" for first, _, count in lines)


def _most_watches(plan: Plan) -> tuple[int, int]:
    """Return how many inotify descriptors and watches a cell may have.  A watch takes 0.2 KiB that the
    cell is not charged for, and one of the host's files keeps 1 KiB of the kernel's in memory."""
    return _MOST_INOTIFY, plan.memory_bytes // _BYTES_A_WATCH


def _limit_resources(do: Steps, rlimits: tuple[tuple[str, int], ...]) -> None:
    """Lower limits, never raise one that the host set lower (sandlock d4a8543 widened it)."""
    for name, value in rlimits:
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        new = do.structure(struct.pack("=2Q", limit, limit))
        do.call("prlimit64", 0, number, new, None, about=f"{name} {limit}")


def fence_paths(do: SystemCalls[Descriptor], plan: Plan) -> None:
    """Have Landlock refuse what the plan's rules for paths do not allow."""
    rules = [
        (rule.path, _rights(rule))
        for rule in plan.path_rules
        if rule.path not in plan.optional or os.path.lexists(rule.path)
    ]
    unhandled = landlock.RESOLVE_UNIX if plan.reaches_sockets else 0
    landlock.restrict(do, plan.landlock_abi, rules, not plan.loopback, unhandled)


def _rights(rule: PathRule) -> int:
    rights = landlock.READ
    rights |= landlock.WRITE if rule.write else 0
    rights |= landlock.EXECUTE if rule.execute else 0
    rights |= landlock.IOCTL_DEV if rule.control else 0
    is_directory = stat.S_ISDIR(os.stat(rule.path).st_mode)  # isdir hides errors
    return rights if is_directory else rights & landlock.FILE_RIGHTS
