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
from typing import NamedTuple

from ...policies.plan import PathRule, Plan, Tmpfs
from ..fixed_root import ANY_ADDRESS, DNS_ADDRESS, TERMINALS
from ..kernel import landlock, mounts, processes
from ..kernel import privileges as kernel
from ..kernel.libc import AT_FDCWD
from ..kernel.steps import Result, Steps
from ..messages import Ready, WaysOut, encode
from . import privileges

CELL_ID = 1000  # the only uid and gid inside
CONTROL = 3  # where the guest's process finds its control channel
STATUS, _CONTROL, _STDIN, _STDOUT, _STDERR, TASKS = range(6)  # what a Fork frame brings, in order
INIT = 15  # the pidfd of the cell's init
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _IFF_UP = 0x8914, 0x8916, 0x891C, 0x1
_INTERFACE, _NETMASK = "198.18.0.1", "255.254.0.0"  # egress/addresses.py gives names the others
_SOCKET_ADDRESS_BYTES, _BACKLOG = 16, 64
_MOST_TOLD = 4  # descriptors of one step
_MOST_TERMINALS = 16  # the host has a few thousand for all (kernel.pty.max)
_HARD = mounts.NOSUID | mounts.NODEV
_OPEN = os.O_CLOEXEC


class LauncherFacts(NamedTuple):
    """Facts of the launcher that its cells inherit."""

    plan: Plan
    host_proc: int  # /proc as the launcher sees it, to write the id maps through
    launcher_id: int  # the launcher's uid and gid in its user namespace
    last_capability: int
    beneath_memory: dict[str, tuple[str, ...]]  # a Tmpfs' target -> what the root has there
    joins: int  # how many cgroups are joined by a write to their `tasks` (v1)
    is_for_one_cell: bool = False  # nothing is done only so that further cells take less


def confinement(facts: LauncherFacts) -> Steps:
    """Return what confines a process behind every layer, and hands over what the supervisor keeps.

    If the kernel refuses a step there is no cell.
    """
    plan, do = facts.plan, Steps()
    do.layer("descriptor sweep")
    _keep_only(do, facts.host_proc)  # first: other cells' descriptors came too
    do.layer("cgroup")
    _join_cgroups(do, facts.joins)  # before any work, so that the work is charged to the cell
    do.layer("cgroup_ns")
    # After joining: the cell's cgroup is its root.
    do.call("unshare", processes.CLONE_NEWCGROUP, about="new cgroup namespace")
    do.layer("own mounts")
    privileges.set_process_name(do, "cell-guest")
    do.call("setsid")  # no terminal, and signals of no foreign process group
    _ignore_interrupts(do)
    workspace = _mount_own_filesystems(do, plan, facts.beneath_memory)
    if plan.terminal:
        _mount_terminals(do, facts.launcher_id)
    if plan.loopback:
        _bring_loopback_up(do)
    if plan.network:
        _open_ways_out(do, plan.network.ports)
    guest = do.call("pidfd_open", do.call("getpid"), 0, about="itself")
    do.layer("user_ns")
    # The launcher is not dumpable, and our id maps are ours to write only if we are.
    privileges.make_dumpable(do)
    _enter_user_namespace(do, facts)  # after the mounts: here nothing can be mounted any more
    do.call(
        "close", facts.host_proc, about="/proc of the launcher"
    )  # the last sight of anything outside
    do.layer("rlimits")
    _limit_resources(do, plan.rlimits)
    do.layer("capabilities")
    privileges.give_up_all(do, facts.last_capability)  # sets no_new_privs, for Landlock and seccomp
    do.call("umask", 0o022, about="022")
    do.call("chdir", b"/workspace", about="/workspace")
    do.layer("landlock")
    if plan.landlock_abi:
        _fence_paths(do, plan)
    do.layer("pages")
    do.own_pages()
    do.layer("seccomp")
    _filter_system_calls(
        do, plan, [do.input(INIT), guest, workspace]
    )  # last: it refuses most of the above
    return do


def _filter_system_calls(do: Steps, plan: Plan, kept: list[Result]) -> None:
    if plan.refusals:
        # The filter allows descriptors to be sent once more, on the status channel alone.
        kept = [*kept, kernel.install_seccomp_filter(do, plan.guest_filter, listens=True)]
    else:
        kernel.install_seccomp_filter(do, plan.guest_filter, listens=False)
    ready = b"\0" + encode(Ready(listens=bool(plan.refusals)))
    do.tell(ready, *kept, about="init, guest, /workspace and the listener to the supervisor")
    # How many descriptors a uid may have on their way is judged by the sender's RLIMIT_NOFILE, and
    # another cell may have used up a low one (unix(7)): so this limit comes after they were sent.
    _limit_resources(do, (("NOFILE", plan.open_files),))
    for descriptor in kept:
        do.call("close", descriptor)
    do.call("close", plan.open_files, about="the status channel")


def _keep_only(do: Steps, host_proc: int) -> None:
    """Put the guest's four descriptors where it finds them and close what has no business here.

    The launcher keeps 0 to 3 occupied, so that nothing it passes on has one of those numbers.
    """
    for number, stream in enumerate((_STDIN, _STDOUT, _STDERR)):
        do.call("dup3", do.input(stream), number, 0, about=f"descriptor {number}")
    do.call("dup3", do.input(_CONTROL), CONTROL, os.O_CLOEXEC, about="the control channel")
    do.keep_only(host_proc)


def _join_cgroups(do: Steps, joins: int) -> None:
    for n in range(joins):
        tasks = do.input(TASKS + n)
        do.call("write", tasks, b"0", 1, about="the cgroup's tasks")
        do.call("close", tasks)


def _ignore_interrupts(do: Steps) -> None:
    """Ignore SIGINT until a program is there: one that comes too early ends nothing (sigaction(2))."""
    ignore = do.structure(struct.pack("=4Q", _signal.SIG_IGN, 0, 0, 0))
    do.call("rt_sigaction", _signal.SIGINT, ignore, None, 8, about="SIGINT ignored")


def _mount_own_filesystems(do: Steps, plan: Plan, beneath: dict[str, tuple[str, ...]]) -> Result:
    """Mount what belongs to this cell alone; return a descriptor of /workspace."""
    for tmpfs in plan.tmpfs:
        _mount_tmpfs(do, tmpfs, [f"{tmpfs.target}/{name}" for name in beneath[tmpfs.target]])
    # subset=pid: neither /proc/sys nor any other file of the whole machine exists (proc(5)).
    proc = mounts.new(do, "proc", _HARD | mounts.NOEXEC | mounts.RDONLY, subset="pid")
    mounts.put(do, proc, "/proc")
    flags = os.O_DIRECTORY | _OPEN
    return do.call("openat", AT_FDCWD, b"/workspace", flags, about="/workspace")


def _mount_terminals(do: Steps, owner: int) -> None:
    """Mount a devpts that has no terminal yet: each mount is an instance of its own (Linux 4.7).

    The supervisor opens masters in it, by way of /workspace, as long as the cell lives; their terminals
    belong to the cell's id.  A guest may open masters too.
    """
    attributes = mounts.NOSUID | mounts.NOEXEC  # not NODEV: terminals are devices
    limits = {"uid": str(owner), "gid": str(owner), "ptmxmode": "0666", "max": str(_MOST_TERMINALS)}
    mounts.put(do, mounts.new(do, "devpts", attributes, **limits), TERMINALS)


def _mount_tmpfs(do: Steps, tmpfs: Tmpfs, covered: list[str]) -> None:
    """Mount a fresh tmpfs and, on top, again what the root has there: host paths that are shown.

    The directories above them come along from the root and are as read-only as it is: a program that
    wrote beside a shown file would believe that it wrote to the host, and lose it with the cell.
    """
    trees = [(mounts.clone(do, path), path, os.path.isdir(path)) for path in covered]
    attributes = _HARD | (0 if tmpfs.executable else mounts.NOEXEC)
    limits = {"size": str(tmpfs.size_bytes), "nr_inodes": str(tmpfs.inodes)}
    mounts.put(do, mounts.new(do, "tmpfs", attributes, mode="0700", **limits), tmpfs.target)
    for tree, path, is_directory in trees:
        mounts.put_making(do, tree, path, is_directory=is_directory)
    if tmpfs.also:
        mounts.put(do, mounts.clone(do, tmpfs.target), tmpfs.also)


def _bring_loopback_up(do: Steps) -> None:
    """Switch lo on (netdevice(7)); a new network namespace has it down, and nothing else."""
    any_socket = do.call("socket", _socket.AF_INET, _socket.SOCK_DGRAM, 0)
    request = do.structure(struct.pack("16sH22x", b"lo", _IFF_UP))
    do.call("ioctl", any_socket, _SIOCSIFFLAGS, request, about="lo up")
    do.call("close", any_socket)


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
    """Move into a user namespace that knows one id and owns nothing (user_namespaces(7)).

    It inherits from the launcher's that setgroups(2) is denied.
    """
    do.call("unshare", processes.CLONE_NEWUSER, about="new user namespace")
    privileges.map_ids(do, facts.host_proc, CELL_ID, facts.launcher_id, facts.launcher_id)


def _limit_resources(do: Steps, rlimits: tuple[tuple[str, int], ...]) -> None:
    """Lower limits, never raise one that the host set lower (sandlock d4a8543 widened it)."""
    for name, value in rlimits:
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        new = do.structure(struct.pack("=2Q", limit, limit))
        do.call("prlimit64", 0, number, new, None, about=f"{name} {limit}")


def _fence_paths(do: Steps, plan: Plan) -> None:
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
    is_directory = stat.S_ISDIR(os.stat(rule.path).st_mode)  # isdir would take any error for a no
    return rights if is_directory else rights & landlock.FILE_RIGHTS
