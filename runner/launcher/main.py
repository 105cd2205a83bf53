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
from typing import TYPE_CHECKING, NoReturn

from ...policies.plan import Plan
from .. import channel
from ..cell import interpreter, privileges
from ..cell.enter import CONTROL, TASKS, LauncherFacts, confinement
from ..kernel import _steps, memory, mounts, processes
from ..kernel import privileges as kernel
from ..kernel.now import Now
from ..kernel.steps import Steps
from ..messages import Boot, Booted, Failed, SharedFilesMade, Viewed, Views, decode, encode
from ..shared_files import SKILLS
from .inits import NAMES, Nursery, own_namespaces
from .root import enter_new_root
from .views import ViewError

if TYPE_CHECKING:
    from ..kernel._steps import Rehearsal

_CONTROL = 3
_BOOT_BYTES = 4 * 1024 * 1024
_TOO_MUCH = "show fewer directories, or deny fewer names: allow_hidden=True, no pattern with **"
_NOT_PRELOADED = "name a module of the standard library, or of a directory in python.path"
_TCP_TABLES = "sys/net/ipv4/tcp_child_ehash_entries"
_TCP_TABLE = 2048  # entries, 16 KiB: chains stay short for the sockets that fit into a cell
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
    # Python's own handler would let a guest interrupt init: pid 1 is safe only from signals for
    # which it has none (pid_namespaces(7)).
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    processes.close_range(_CONTROL + 1, 0xFFFFFFFF)
    os.umask(0o022)  # the directories that root makes are another id's to pass, whatever ours was
    try:
        del sys.path[:own_paths]  # everything of ours is imported
        boot = decode(channel.Receiver(sock, _BOOT_BYTES).receive_whole(), Boot)
        _leave_the_host(boot)
        keeper = os.pidfd_open(os.getpid())
        pid = os.fork()
        if pid:
            _keep(pid, sock, boot.host_uid)
        facts = _settle(boot, sock)
        nursery = _part_from_nursery(facts, boot.cells_per_network)
        privileges.make_undumpable(Now())
        with _writable_workspace(boot.plan.preload):
            interpreter.prepare(
                boot.plan, CONTROL,
                has_skills=SKILLS in boot.shared, is_for_one_cell=boot.is_for_one_cell,
            )  # fmt: skip
        if not boot.is_for_one_cell:
            gc.collect()
        steps = confinement(facts)
        home = own_namespaces(NAMES, facts.host_proc)
        if not boot.is_for_one_cell:
            _share_page_tables()
        serve(facts, steps, sock.fileno(), nursery.fileno(), keeper, home)
    except BaseException as error:  # noqa: BLE001 - the line before os._exit
        _explain(sock, error)
    os._exit(1)


def rehearsal(*, is_for_one_cell: bool = False) -> "Rehearsal":
    """Return what a guest's process does, and where it can write, for a child to do it once; without a
    control channel, so that no child does, where that takes longer than it saves one cell.

    Which pages that writes depends on where the next objects will lie: the rehearsal comes last.
    """
    if is_for_one_cell:
        return interpreter.work(), -1, -1, b""
    privileges.make_dumpable(Now())  # or /proc/self is not ours to read
    writable = memory.writable()
    privileges.make_undumpable(Now())
    return *interpreter.rehearsal(), writable


def _share_page_tables() -> None:
    """Have children be given the page tables of those parts of libraries that a guest uses."""
    privileges.make_dumpable(Now())
    memory.share_page_tables(_steps.rehearse(*interpreter.rehearsal(), memory.of_files(), True))
    privileges.make_undumpable(Now())


def _explain(sock: _socket.socket, error: BaseException) -> None:
    if isinstance(error, ViewError):
        failed = Failed(0, str(error), "filesystem.hidden", _TOO_MUCH)
    elif isinstance(error, interpreter.PreloadError):
        failed = Failed(0, str(error), "python.preload", _NOT_PRELOADED)
    else:
        number = getattr(error, "errno", None) or 0
        about = getattr(error, "filename", None) or type(error).__name__
        failed = Failed(number, f"{about}: {getattr(error, 'strerror', error)}")
    channel.send(sock, encode(failed))


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
    """Build the shared root, give up root, and become single-minded."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last_capability = int(file.read())
    root = _is_root(boot)
    of_host = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    shared_files, views = enter_new_root(boot)
    if shared_files:  # before any process is forked that could have them too
        channel.send(sock, encode(SharedFilesMade()), shared_files)
        for each in shared_files:
            os.close(each)
    if boot.plan.hidden:
        _hand_over(views, sock)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if root and os.getuid() == 0:
        privileges.become(boot.host_uid)
        _enter_user_namespace()
        processes.unshare(processes.CLONE_NEWNS)
    # Namespaces of its own, to come home to; each cell's uts namespace starts as a copy.
    processes.unshare(processes.CLONE_NEWNET | processes.CLONE_NEWIPC | processes.CLONE_NEWUTS)
    if boot.plan.loopback:
        _keep_tcp_tables_small(of_host)
    os.close(of_host)
    kernel.sethostname(boot.plan.hostname)
    beneath = _beneath_memory(boot.plan)
    given = boot.plan, proc, _LAUNCHER_ID, last_capability, beneath, boot.joins
    return LauncherFacts(*given, boot.is_for_one_cell)


def _keep_tcp_tables_small(proc: int) -> None:
    """Give each network namespace that is made from this one a table of its own TCP sockets, where the
    kernel can (6.1): to read the sockets of a namespace from the host's table takes milliseconds
    (ip-sysctl, tcp_child_ehash_entries).  Which namespace `proc` tells of depends on who looks."""
    with contextlib.suppress(OSError):  # older, or /proc/sys is read-only, as in containers
        file = os.open(_TCP_TABLES, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(file, str(_TCP_TABLE).encode())
        finally:
            os.close(file)


def _hand_over(views: Views, sock: _socket.socket) -> None:
    """Send what the supervisor looks at, in a memfd: it may be more than a packet holds."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    memory = os.memfd_create("views", os.MFD_CLOEXEC)
    with open(os.dup(memory), "wb") as file:
        file.write(encode(views))
    channel.send(sock, encode(Viewed()), (root, memory))
    os.close(root)
    os.close(memory)


def _beneath_memory(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return what the root has where each cell mounts a memory filesystem, to go on top of that."""
    return {each.target: tuple(os.listdir(each.target)) for each in plan.tmpfs}


def _part_from_nursery(facts: LauncherFacts, cells_per_network: int) -> _socket.socket:
    """Fork: what was becomes the nursery, and the child, in which this returns, the launcher."""
    nursery, launcher = channel.pair()
    _skip_the_number_of_guests()
    if os.fork():
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
    """Wait until the nursery ends or the supervisor is gone, and leave nothing behind."""
    if os.geteuid() == 0 and host_uid:
        privileges.become(host_uid)
    pidfd = os.pidfd_open(nursery)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(sock, 0)  # only POLLHUP: what the supervisor says is the launcher's to read
    while not any(descriptor == pidfd for descriptor, _ in poll.poll()):
        os.kill(nursery, _signal.SIGKILL)  # works on a stopped launcher too
        poll.unregister(sock)
    os.waitpid(nursery, 0)
    os._exit(0)
