"""The launcher: the single-threaded process that cells are forked from.

Started by the supervisor as `python -I -S` with an empty environment and one SOCK_SEQPACKET socket
as descriptor 3.  It imports first, builds the root that all its cells share, gives up root if it had
it, and from then on only forks.  It is three processes: a keeper, which watches the supervisor; under
it the nursery, which makes the inits of cells and is pid 1 of a pid namespace that holds them all, so
that its end, for whatever reason, is the end of everything; and the launcher proper, which forks.
"""

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`
import _socket
import contextlib
import gc
import os
import resource
import select
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from ...policies.plan import FILE_WATCHING
from .. import channel
from ..cell import interpreter, privileges
from ..cell.enter import CONTROL, TASKS, LauncherFacts, confinement
from ..kernel import _steps, mounts
from ..kernel import credentials as kernel
from ..kernel import process_calls as processes
from ..kernel.steps import Now, Steps
from ..messages import Boot, Booted, Failed, Listed, SharedFilesMade, Viewed, Views, decode, encode
from ..shared_files import SKILLS
from .inits import NAMES, Nursery, own_namespaces
from .root import enter_new_root, image_trees, lies_in, outermost
from .views import ViewError

if TYPE_CHECKING:
    from ..kernel._steps import Rehearsal

_CONTROL = 3
_BOOT_BYTES = 4 * 1024 * 1024
_TOO_MUCH = "show fewer directories, or deny fewer names: allow_hidden=True, no pattern with **"
_TOO_MANY = "show a directory that holds them, or paths that lie elsewhere"
_NOT_PRELOADED = "name a module of the standard library, or of a directory in python.path"
_TCP_TABLES = "sys/net/ipv4/tcp_child_ehash_entries"
_TCP_TABLE = 2048  # 2,048 entries take 16 KiB and keep chains short for the sockets of a cell
_LAUNCHER_ID = 1000  # the launcher's uid and gid in its own user namespace


def serve(
    facts: LauncherFacts, steps: Steps, sock: int, nursery: int, keeper: int, home: list[int]
) -> None:
    """Say that it is ready, and fork cells until the supervisor closes `sock` or the process behind
    `keeper` is gone."""
    (booted,) = channel.packets(encode(Booted()))
    program = steps.layout(facts.plan.open_files, TASKS + facts.joins)
    hooks, opens_sockets = interpreter.has_hooks(), facts.plan.loopback
    given = program, sock, nursery, keeper, tuple(home), hooks, opens_sockets, booted
    _steps.serve(*given, rehearsal(is_for_one_cell=facts.is_for_one_cell))


def main(
    own_paths: int, serve: Callable[[LauncherFacts, Steps, int, int, int, list[int]], None] = serve
) -> NoReturn:
    """Read the boot frame, become keeper and launcher, and `serve` until the supervisor is gone.  It
    is `serve` that answers Booted.

    The first `own_paths` entries of sys.path are ours, not the guest's.
    """
    sock = _socket.socket(fileno=_CONTROL)
    # Remove Python's own SIGINT handler: pid 1 ignores only those signals from its namespace that it
    # does not handle (pid_namespaces(7)), and a guest could interrupt init.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    processes.close_range(_CONTROL + 1, 0xFFFFFFFF)
    os.umask(0o022)  # another id must be able to enter the directories that root makes
    try:
        del sys.path[:own_paths]  # all modules of cellwright are imported
        boot = decode(channel.Receiver(sock, _BOOT_BYTES).receive_whole(), Boot)
        _leave_the_host(boot)
        keeper = os.pidfd_open(os.getpid())
        pid = os.fork()
        if pid:
            _keep(pid, sock, boot.host_uid)
        start_guards = _maker_of_guards(boot)  # imported while cellwright's files are visible
        facts = _settle(boot, sock)
        nursery = _part_from_nursery(facts, boot.cells_per_network)
        privileges.make_undumpable(Now())
        if start_guards:
            start_guards(facts, sock)
        if "AS" in dict(boot.plan.rlimits):  # else 256 MiB have room for five threads (measured)
            _steps.share_arena()
        with _writable_workspace(boot.plan.preload):
            interpreter.prepare(
                boot.plan, CONTROL,
                has_skills=SKILLS in boot.shared, is_for_one_cell=boot.is_for_one_cell,
            )  # fmt: skip
        if not boot.is_for_one_cell:
            gc.collect()
        steps = confinement(facts)
        _check_length(steps, facts)
        home = own_namespaces(NAMES, facts.host_proc)
        if not boot.is_for_one_cell:
            _make_forks_cheap()
        serve(facts, steps, sock.fileno(), nursery.fileno(), keeper, home)
    except BaseException as error:  # noqa: BLE001 - the line before os._exit
        _explain(sock, error)
    os._exit(1)


def list_calls(own_paths: int) -> NoReturn:
    """Be a launcher that tells which system calls confine its cells, in the place of forking any."""

    def tell(_facts: LauncherFacts, steps: Steps, sock: int, *_: object) -> None:
        calls = tuple((step.layer, str(step)) for step in steps.steps if step.is_call)
        supervisor = _socket.socket(fileno=sock)
        channel.send(supervisor, encode(Booted()))
        channel.send(supervisor, encode(Listed(calls)))
        supervisor.recv(1)  # until it hangs up: `cellwright ps` looks for a living launcher

    main(own_paths, tell)


def rehearsal(*, is_for_one_cell: bool = False) -> "Rehearsal":
    """Return the work of a guest's process, and the place where it can write, for a child that
    rehearses it. There is no control channel, and so no rehearsal, if it takes longer than it saves a
    single cell.

    Which pages that writes depends on where the next objects will lie: the rehearsal comes last.
    """
    if is_for_one_cell:
        return interpreter.work(), -1, -1, b""
    interpreter.begin_new_pools()  # after the work above, which would scatter free places again
    privileges.make_dumpable(Now())  # otherwise /proc/self is not readable
    writable = processes.writable_memory()
    privileges.make_undumpable(Now())
    return *interpreter.rehearsal(), writable


def _make_forks_cheap() -> None:
    """Leave less for a fork to copy: fewer mappings, memory in huge pages, and the page tables of those
    parts of libraries that a guest uses."""
    privileges.make_dumpable(Now())
    processes.join_mappings()
    processes.gather_memory()
    processes.share_page_tables(
        _steps.rehearse(*interpreter.rehearsal(), processes.mapped_files(), True)
    )
    privileges.make_undumpable(Now())


class _TooManyPathsError(Exception):
    """A cell would need more steps than it can have to show each path on top of a memory filesystem."""


def _check_length(steps: Steps, facts: LauncherFacts) -> None:
    if (fullness := steps.fullness()) > 1:
        counts = {place: len(paths) for place, paths in facts.beneath_memory.items() if paths}
        count = sum(counts.values())
        raise _TooManyPathsError(
            f"{count} paths are shown below {', '.join(counts)}, where a cell has memory of its own; "
            f"it can show about {int(count / fullness)} there"
        )


def _explain(sock: _socket.socket, error: BaseException) -> None:
    if isinstance(error, ViewError):
        failed = Failed(0, str(error), "filesystem.hidden", _TOO_MUCH)
    elif isinstance(error, _TooManyPathsError):
        failed = Failed(0, str(error), "filesystem.read", _TOO_MANY)
    elif isinstance(error, interpreter.PreloadError):
        failed = Failed(0, str(error), "python.preload", _NOT_PRELOADED)
    else:
        failed = Failed.of(error)
    channel.send(sock, encode(failed))


def _maker_of_guards(
    boot: Boot,
) -> Callable[[LauncherFacts, _socket.SocketType], None] | None:
    if not boot.plan.protected:  # as most policies
        return None
    from .guard import start_maker

    return start_maker


def _enters_ids(boot: Boot) -> Callable[[], None] | None:
    if not boot.plan.image:
        return None
    from .image_stage import enter_ids

    return partial(enter_ids, boot.plan.image)


def _is_root(boot: Boot) -> bool:
    """Tell whether this is root of the host, and not of a container's user namespace."""
    return os.geteuid() == 0 and boot.host_uid != 0 and privileges.has_sys_admin()


def _leave_the_host(boot: Boot) -> None:
    """Move the next child into a pid namespace of its own, and us into its mount namespace.

    Root does it as root, because only root may read every path that has to be shown; anyone else,
    root without CAP_SYS_ADMIN included, does it in a user namespace.
    """
    privileges.set_process_name(Now(), "cell-keeper")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a pidfd and a socket for every cell
    _prefer_to_be_killed()
    if not _is_root(boot):
        if os.geteuid() == 0 and boot.host_uid:
            privileges.become(boot.host_uid)
        if not boot.plan.image:  # else it was entered before (image_stage.py)
            _enter_user_namespace()
    processes.unshare(processes.CLONE_NEWNS | processes.CLONE_NEWPID)


def _prefer_to_be_killed() -> None:
    """Let the OOM killer take cells before the process that embeds us (proc(5), oom_score_adj)."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _enter_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    processes.unshare(processes.CLONE_NEWUSER)
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    privileges.deny_setgroups(Now(), proc)
    privileges.map_ids(Now(), proc, _LAUNCHER_ID, uid, gid)
    os.close(proc)


def _settle(boot: Boot, sock: _socket.socket) -> LauncherFacts:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last_capability = int(file.read())
    root = _is_root(boot)
    enter_ids = _enters_ids(boot)  # imported while cellwright's files are visible
    of_host = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    shared_files, views = enter_new_root(boot)
    if shared_files:  # before any fork, because a child would inherit them
        channel.send(sock, encode(SharedFilesMade()), shared_files)
        for each in shared_files:
            os.close(each)
    if boot.plan.hidden:
        _hand_over(views, sock)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if root and os.getuid() == 0:
        if enter_ids:
            enter_ids()
            privileges.make_dumpable(Now())
        else:
            privileges.become(boot.host_uid)
            _enter_user_namespace()
        processes.unshare(processes.CLONE_NEWNS)
    # Descriptors of its own namespaces, to return to. Each cell's uts namespace starts as a copy of its
    # own.
    processes.unshare(processes.CLONE_NEWNET | processes.CLONE_NEWIPC | processes.CLONE_NEWUTS)
    if boot.plan.loopback:
        _keep_tcp_tables_small(of_host)
    settings = -1
    if FILE_WATCHING in boot.plan.groups or boot.plan.image:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        settings = os.open("sys", flags, dir_fd=of_host)
    os.close(of_host)
    kernel.sethostname(boot.plan.hostname)
    beneath = _beneath_memory(boot)
    own_id = 0 if boot.plan.image else _LAUNCHER_ID
    given = boot.plan, proc, own_id, last_capability, beneath, boot.joins
    return LauncherFacts(*given, boot.is_for_one_cell, settings, image_trees(boot))


def _keep_tcp_tables_small(proc: int) -> None:
    """Give each network namespace that is made from this one a table of its own TCP sockets, where
    the kernel can (6.1): to read the sockets of a namespace from the host's table takes milliseconds
    (ip-sysctl, tcp_child_ehash_entries). `proc` shows the namespace of the process that opens it."""
    with contextlib.suppress(
        OSError
    ):  # an older kernel, or a read-only /proc/sys, as in containers
        file = os.open(_TCP_TABLES, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(file, str(_TCP_TABLE).encode())
        finally:
            os.close(file)


def _hand_over(views: Views, sock: _socket.socket) -> None:
    """Send the list of covers to the supervisor in a memfd, because it may be larger than a packet."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    memory = os.memfd_create("views", os.MFD_CLOEXEC)
    with open(os.dup(memory), "wb") as file:
        file.write(encode(views))
    channel.send(sock, encode(Viewed()), (root, memory))
    os.close(root)
    os.close(memory)


def _beneath_memory(boot: Boot) -> dict[str, tuple[str, ...]]:
    """Return the paths of the root at places where each cell mounts a memory filesystem, to be put on
    top of it: its entries there, and for HOME the shown paths themselves."""
    shown = (*(bind.path for bind in boot.plan.binds), *boot.files)
    shown = (*shown, *(path for path, _ in boot.links if not lies_in(path, shown)))
    return {
        each.target: tuple(
            outermost(path for path in shown if lies_in(path, (each.target,)))
            if each.is_home
            else (f"{each.target}/{name}" for name in os.listdir(each.target))
        )
        for each in boot.plan.tmpfs
    }


def _part_from_nursery(facts: LauncherFacts, cells_per_network: int) -> _socket.socket:
    """Fork: this process becomes the nursery; in the child, the launcher, this function returns."""
    nursery, launcher = channel.pair()
    _skip_the_number_of_guests()
    if os.fork():
        if facts.settings >= 0:
            os.close(facts.settings)
        makes = Nursery(launcher, facts.host_proc, cells_per_network)
        makes.serve(facts.last_capability, facts.plan.init_filter)
    privileges.set_process_name(Now(), "cell-launcher")
    launcher.close()
    return nursery


def _skip_the_number_of_guests() -> None:
    """Use up the number that each guest's process has: the second in a pid namespace.

    OpenSSL and tempfile notice a fork by another getpid() alone.  With the same number, every cell
    would draw the same random bytes from a generator that a preloaded module has used.
    """
    if _steps.fork(0, -1, True) == 0:
        os._exit(0)


@contextlib.contextmanager
def _writable_workspace(preload: tuple[str, ...]) -> Iterator[None]:
    """Let modules that are preloaded write somewhere, as some do when imported."""
    if not preload:
        yield
        return
    flags = mounts.NOSUID | mounts.NODEV | mounts.NOEXEC
    do = Now()
    mounts.put(do, mounts.new(do, "tmpfs", flags, size="64M", mode="0700"), "/workspace")
    for name in os.listdir("/tmp"):  # noqa: S108 - of the root: what programs read there
        os.symlink(f"/tmp/{name}", f"/workspace/{name}")  # noqa: S108 - of the root
    yield
    mounts.detach("/workspace")


def _keep(nursery: int, sock: _socket.socket, host_uid: int) -> NoReturn:
    if os.geteuid() == 0 and host_uid:
        privileges.become(host_uid)
    pidfd = os.pidfd_open(nursery)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(sock, 0)  # only POLLHUP: the launcher reads what the supervisor sends
    while not any(descriptor == pidfd for descriptor, _ in poll.poll()):
        os.kill(nursery, _signal.SIGKILL)  # works on a stopped launcher too
        poll.unregister(sock)
    os.waitpid(nursery, 0)
    os._exit(0)
