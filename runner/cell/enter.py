"""The security story of a cell: `enter`, in order, with the reason where the order matters.

The guest's process was forked from the launcher into fresh mount, pid, net, ipc and uts namespaces.
Those belong to the launcher's user namespace, while the guest ends in a user namespace of its own
that owns nothing: whatever capability it regained, it would have no power over them.
"""

import fcntl
import os
import resource
import socket
import stat
import struct
from collections.abc import Callable
from typing import NamedTuple

from ...policies.plan import PathRule, Plan, Tmpfs
from ..kernel import landlock, mounts, processes
from ..kernel import privileges as kernel
from ..messages import Listening, Mounted
from . import privileges

CELL_ID = 1000  # the only uid and gid inside
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_HARD = mounts.NOSUID | mounts.NODEV
CONTROL = 3  # where the guest's process finds its control channel


# Sends a frame with a descriptor, and closes that.
Tell = Callable[[Mounted | Listening, int], None]


class Descriptors(NamedTuple):
    """What crosses into a cell, by name; everything else is closed."""

    status: int  # how far it has come, and set-up errors; never the program's
    control: int  # the guest's talk with the supervisor
    stdin: int
    stdout: int
    stderr: int
    cgroups: tuple[int, ...]  # v1: `tasks` of each hierarchy, to be joined


class Site(NamedTuple):
    """Where a cell is built: facts of the launcher that its cells inherit."""

    plan: Plan
    host_proc: int  # /proc as the launcher sees it, to write the id maps through
    launcher_id: int  # the launcher's uid and gid in its user namespace
    last_capability: int
    beneath_memory: dict[str, tuple[str, ...]]  # a Tmpfs' target -> what the root has there


def enter(site: Site, descriptors: Descriptors, tell: Tell) -> None:
    """Confine this process behind every layer, and hand over what the supervisor keeps of it.

    Raises OSError if the kernel refuses a step; there is no cell then.
    """
    plan = site.plan
    # First: other cells' descriptors came with the fork.
    _keep_only(descriptors, plan.open_files, site.host_proc)
    _join_cgroups(descriptors.cgroups)  # before any work, so that the work is charged to the cell
    processes.unshare(processes.CLONE_NEWCGROUP)  # after joining: the cell's cgroup is its root
    os.setsid()  # no terminal, and signals of no foreign process group
    tell(Mounted(), _mount_own_filesystems(plan, site.beneath_memory))
    if plan.loopback:
        _bring_loopback_up()
    privileges.make_dumpable()  # the launcher is not, and our id maps are ours to write only if we are
    _enter_user_namespace(site)  # after the mounts: here nothing can be mounted any more
    os.close(site.host_proc)  # the last sight of anything outside
    _limit_resources(plan.rlimits)
    privileges.give_up_all(site.last_capability)  # sets no_new_privs, for Landlock and seccomp
    os.umask(0o022)
    os.chdir("/workspace")
    if plan.landlock_abi:
        _fence_paths(plan.landlock_abi, plan.path_rules, deny_tcp=not plan.loopback)
    _filter_system_calls(plan, tell)  # last: it refuses most of the above


def _filter_system_calls(plan: Plan, tell: Tell) -> None:
    if plan.refusals:
        # The filter allows one more descriptor to be sent, on the status channel alone.
        tell(Listening(), kernel.install_with_listener(plan.guest_filter))
    else:
        kernel.install_seccomp_filter(plan.guest_filter)
    # How many descriptors a uid may have on their way is judged by the sender's RLIMIT_NOFILE, and
    # another cell may have used up a low one (unix(7)): so this limit comes after they were sent.
    _limit_resources((("NOFILE", plan.open_files),))


def _keep_only(descriptors: Descriptors, status: int, host_proc: int) -> None:
    """Put the guest's four descriptors where it finds them and close what has no business here.

    The launcher keeps 0 to 3 occupied, so that nothing it passes on has one of those numbers.
    """
    for number, stream in enumerate((descriptors.stdin, descriptors.stdout, descriptors.stderr)):
        os.dup2(stream, number)
    os.dup2(descriptors.control, CONTROL, inheritable=False)
    keep = [0, 1, 2, CONTROL, status, host_proc, *descriptors.cgroups]
    processes.close_all_but(keep)


def _join_cgroups(tasks_files: tuple[int, ...]) -> None:
    for tasks in tasks_files:
        os.write(tasks, b"0")
        os.close(tasks)


def _mount_own_filesystems(plan: Plan, beneath: dict[str, tuple[str, ...]]) -> int:
    """Mount what belongs to this cell alone; return a descriptor of /workspace."""
    for tmpfs in plan.tmpfs:
        _mount_tmpfs(tmpfs, [f"{tmpfs.target}/{name}" for name in beneath[tmpfs.target]])
    # subset=pid: neither /proc/sys nor any other file of the whole machine exists (proc(5)).
    proc = mounts.new_filesystem("proc", _HARD | mounts.NOEXEC | mounts.RDONLY, subset="pid")
    mounts.attach(proc, "/proc")
    return os.open("/workspace", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _mount_tmpfs(tmpfs: Tmpfs, covered: list[str]) -> None:
    """Mount a fresh tmpfs and, on top, again what the root has there: host paths that are shown.

    The directories above them come along from the root and are as read-only as it is: a program that
    wrote beside a shown file would believe that it wrote to the host, and lose it with the cell.
    """
    trees = [(mounts.clone_tree(path), path, os.path.isdir(path)) for path in covered]
    attributes = _HARD | (0 if tmpfs.executable else mounts.NOEXEC)
    limits = {"size": str(tmpfs.size_bytes), "nr_inodes": str(tmpfs.inodes)}
    mounts.attach(mounts.new_filesystem("tmpfs", attributes, mode="0700", **limits), tmpfs.target)
    for tree, path, is_directory in trees:
        if is_directory:
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o444))
        mounts.attach(tree, path)


def _bring_loopback_up() -> None:
    """Switch lo on (netdevice(7)); a new network namespace has it down, and nothing else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH22x", b"lo", _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


def _enter_user_namespace(site: Site) -> None:
    """Move into a user namespace that knows one id and owns nothing (user_namespaces(7))."""
    processes.unshare(processes.CLONE_NEWUSER)
    privileges.map_ids(site.host_proc, CELL_ID, site.launcher_id, site.launcher_id)


def _limit_resources(rlimits: tuple[tuple[str, int], ...]) -> None:
    """Lower limits, never raise one that the host set lower (sandlock d4a8543 widened it)."""
    for name, value in rlimits:
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (limit, limit))


def _fence_paths(abi: int, rules: tuple[PathRule, ...], *, deny_tcp: bool) -> None:
    rights = [(rule.path, _rights(rule)) for rule in rules]
    landlock.restrict_self(abi, rights, deny_tcp)


def _rights(rule: PathRule) -> int:
    rights = landlock.READ
    rights |= landlock.WRITE if rule.write else 0
    rights |= landlock.EXECUTE if rule.execute else 0
    is_directory = stat.S_ISDIR(os.stat(rule.path).st_mode)  # isdir would take any error for a no
    return rights if is_directory else rights & landlock.FILE_RIGHTS
