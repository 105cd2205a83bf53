"""The kernel's own state of a process, which its memory does not show: compared, copied, or refused.

The target is a fresh cell of the same launcher. So equal state needs no copy; each difference is either
made in the target, or a reason to refuse.
"""

import os
import re
import resource
import signal
import stat
from typing import NamedTuple

from ..kernel import process_calls as processes
from ..kernel import tracing
from .layout import NotCopyable
from .traced import Traced

# Fields of /proc/PID/status that must be equal, and why they may not be (proc_pid_status(5)).
_EQUAL = {
    "SigCgt": "it handles signals (signal.signal)",
    "Seccomp": "its seccomp filter is another one",
    "Seccomp_filters": "it has added a seccomp filter",
    "NoNewPrivs": "its privileges differ", "Uid": "its ids differ", "Gid": "its ids differ",
    "Groups": "its groups differ",
    "CapInh": "its capabilities differ", "CapPrm": "its capabilities differ",
    "CapEff": "its capabilities differ", "CapBnd": "its capabilities differ",
    "CapAmb": "its capabilities differ",
    "THP_enabled": "it has changed its page sizes (prctl)",
    "Speculation_Store_Bypass": "it has changed how it speculates (prctl)",
    "SpeculationIndirectBranch": "it has changed how it speculates (prctl)",
    "x86_Thread_features": "it has a shadow stack", "untag_mask": "it masks addresses",
    "HugetlbPages": "it has huge pages",
}  # fmt: skip
# Host values, which may differ for a cell of another launcher.
IDS = frozenset(("Uid", "Gid", "Groups"))
_ZERO = {
    "VmLck": "it has locked memory (mlock)", "VmPin": "it has pinned memory",
    "SigPnd": "a signal waits for it", "ShdPnd": "a signal waits for it",
}  # fmt: skip
_OWN_NUMBERS = "NSpid", "NSpgid", "NSsid"  # the last one is of the own pid namespace
_FOUR = range(4)  # every guest's process has these descriptors
_MOST_DESCRIPTORS = 64  # in addition to those four
_OWN_FILES = "/workspace/", "/tmp/"  # noqa: S108 - in a cell
_KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_LARGE_FILE = 0o100000  # the C library adds this flag, and the kernel sets it anyway
_MEMORY_DEVICES = 1  # the major number of null, zero, full, random and urandom
_AT_FDCWD = -100
_PR_SET_NAME = 15
_SIGACTION = 32  # bytes of the kernel's struct, mask included
_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


class OpenFileStatus(NamedTuple):
    """The compared fields of an open file's status (stat(2))."""

    mode: int
    device: int
    inode: int
    represented: int  # the device number (st_rdev) of a device file
    size: int


class OpenFile(NamedTuple):
    """A file that a session has open."""

    number: int
    path: str
    flags: int
    position: int
    status: OpenFileStatus


class State(NamedTuple):
    """The kernel's state of a stopped process, its memory not included."""

    status: dict[str, str]
    directory: str
    files: tuple[OpenFile, ...]
    name: bytes
    limits: tuple[tuple[int, int], ...]
    processors: frozenset[int]
    niceness: int
    others: tuple[bytes, ...]  # must be equal: rseq, robust list, oom_score_adj, timer slack


def state_of(process: Traced) -> State:
    """Read it; raises NotCopyable if there is too much of it."""
    pid = process.pid
    others = (
        tracing.rseq(pid), b"%d" % tracing.robust_list(pid), process.text("oom_score_adj"),
        process.text("timerslack_ns") if _exists(process, "timerslack_ns") else b"",
    )  # fmt: skip
    return State(
        _status(process), process.link("cwd"), tuple(_files(process)), process.text("comm"),
        tuple(resource.prlimit(pid, each) for each in _LIMITS),
        frozenset(os.sched_getaffinity(pid)), os.getpriority(os.PRIO_PROCESS, pid), others,
    )  # fmt: skip


def _exists(process: Traced, name: str) -> bool:
    try:
        process.text(name)
    except OSError:
        return False
    return True


def _status(process: Traced) -> dict[str, str]:
    lines = process.text("status").decode("utf-8", "replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def require_alone(source: Traced, init: int) -> None:
    """Raise NotCopyable if other threads or processes run in the cell, whose init is `init`."""
    try:
        company = processes.company_of(source.pid, init)
    except FileNotFoundError:
        raise NotCopyable("this kernel does not list children (CONFIG_PROC_CHILDREN)") from None
    if company:
        raise NotCopyable(f"it {company}")
    if source.text("timers").strip():
        raise NotCopyable("it has timers (timer_create)")


def require_copyable(wanted: State, had: State, but: frozenset[str] = frozenset()) -> None:
    """Raise NotCopyable for the first difference that no copy can have, `but` in these fields."""
    for field, why in _EQUAL.items():
        if field not in but and wanted.status.get(field) != had.status.get(field):
            raise NotCopyable(why)
    for field, why in _ZERO.items():
        if wanted.status.get(field, "0").strip("0 kB"):
            raise NotCopyable(why)
    for field in _OWN_NUMBERS:
        if wanted.status[field].split()[-1] != had.status[field].split()[-1]:
            raise NotCopyable("its process group or session is its own (setpgid, setsid)")
    if wanted.others != had.others:
        raise NotCopyable("it has registered something with the kernel that a copy cannot have")
    if wanted.directory.endswith(" (deleted)"):
        raise NotCopyable("its working directory was removed")
    if had.files[4:] or [each.number for each in had.files] != list(_FOUR):
        raise NotCopyable("the fresh cell has other descriptors than the four")
    _require_streams(wanted, had)


def _require_streams(wanted: State, had: State) -> None:
    first = wanted.files[:4]
    if [each.number for each in first] != list(_FOUR):
        raise NotCopyable("it has closed one of its descriptors 0 to 3")
    for ours, theirs in zip(first, had.files, strict=True):
        same_kind = stat.S_IFMT(ours.status.mode) == stat.S_IFMT(theirs.status.mode)
        if not same_kind or ours.flags != theirs.flags:
            raise NotCopyable(f"its descriptor {ours.number} is not what it was (os.dup2, fcntl)")
    for each in wanted.files[4:]:
        _require_file(each)
    if len({each.status[1:3] for each in wanted.files}) != len(wanted.files):  # inode and device
        raise NotCopyable("two of its descriptors are of one file (os.dup)")


def _require_file(file: OpenFile) -> None:
    mode = file.status.mode
    is_device = stat.S_ISCHR(mode) and os.major(file.status.represented) == _MEMORY_DEVICES
    if not (stat.S_ISREG(mode) or is_device):
        name = file.path.removeprefix("anon_inode:").partition(":")[0]  # [eventpoll], inotify
        kind = re.sub(r"[^a-z]", "", name) or "file"
        raise NotCopyable(f"its descriptor {file.number} is open: a {kind}, which cannot be copied")
    if file.path.endswith(" (deleted)") or not file.path.startswith("/"):
        raise NotCopyable(f"its descriptor {file.number} is of a file without a name")


def _files(process: Traced) -> list[OpenFile]:
    numbers = sorted(map(int, os.listdir(f"/proc/{process.pid}/fd")))
    if len(numbers) > _MOST_DESCRIPTORS + len(_FOUR):
        raise NotCopyable(f"it has more than {_MOST_DESCRIPTORS} open descriptors")
    return [_file(process, number) for number in numbers]


def _file(process: Traced, number: int) -> OpenFile:
    lines = process.text(f"fdinfo/{number}").decode().splitlines()
    info = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "lock" in info:
        raise NotCopyable(f"its descriptor {number} holds a lock")
    seen = os.stat(f"fd/{number}", dir_fd=process.directory)
    status = OpenFileStatus(seen.st_mode, seen.st_dev, seen.st_ino, seen.st_rdev, seen.st_size)
    flags = int(info["flags"], 8)
    return OpenFile(number, process.link(f"fd/{number}"), flags, int(info["pos"]), status)


def copy_state(wanted: State, had: State, target: Traced) -> None:
    """Give `target` the state `wanted`, by calls that it makes; `require_copyable` has seen both.

    Raises NotCopyable if a file cannot be opened again, or is another one.
    """
    for file in wanted.files[4:]:
        _open_again(file, target)
    if wanted.directory != had.directory:
        target.call("chdir", os.fsencode(wanted.directory) + b"\0")
    if wanted.status["Umask"] != had.status["Umask"]:
        target.call("umask", int(wanted.status["Umask"], 8))
    if wanted.name != had.name:
        target.call("prctl", _PR_SET_NAME, wanted.name.rstrip(b"\n") + b"\0")
    _copy_signals(wanted, had, target)
    if wanted.processors != had.processors:
        os.sched_setaffinity(target.pid, wanted.processors)
    if wanted.niceness != had.niceness:
        os.setpriority(os.PRIO_PROCESS, target.pid, wanted.niceness)


def copy_limits(wanted: State, had: State, target: Traced) -> None:
    """Lower the limits of `target` to those of the source. This comes last, because the limits
    restrict later calls."""
    for number, limit, before in zip(_LIMITS, wanted.limits, had.limits, strict=True):
        if limit != before:
            resource.prlimit(target.pid, number, limit)


def require_equal(wanted: State, made: State, but: frozenset[str] = frozenset()) -> None:
    """Raise NotCopyable unless a target has become what was `wanted`: files were opened by name."""
    if (wanted.directory, wanted.name, wanted.limits) != (made.directory, made.name, made.limits):
        raise NotCopyable("its working directory or its limits cannot be copied")
    for field in ("Umask", "SigBlk", "SigIgn", *_EQUAL):
        if field not in but and wanted.status.get(field) != made.status.get(field):
            raise NotCopyable(_EQUAL.get(field, "its umask or its signals cannot be copied"))
    if len(wanted.files) != len(made.files):
        raise NotCopyable("its open files cannot be copied")
    for ours, theirs in zip(wanted.files[4:], made.files[4:], strict=True):
        _require_same(ours, theirs)


def _require_same(ours: OpenFile, theirs: OpenFile) -> None:
    same = (ours.number, ours.path, ours.position) == (theirs.number, theirs.path, theirs.position)
    same &= (ours.flags ^ theirs.flags) & ~_LARGE_FILE == 0
    a, b = ours.status, theirs.status
    if ours.path.startswith(_OWN_FILES) and stat.S_ISREG(a.mode):
        same &= stat.S_ISREG(b.mode) and a.size == b.size
    else:
        same &= a[1:4] == b[1:4]
    if not same:
        raise NotCopyable(f"its descriptor {ours.number} is of a file that a copy does not have")


def _open_again(file: OpenFile, target: Traced) -> None:
    flags = file.flags & _KEPT_FLAGS
    try:
        opened = target.call("openat", _AT_FDCWD, os.fsencode(file.path) + b"\0", flags)
        if opened != file.number:
            target.call("dup3", opened, file.number, file.flags & os.O_CLOEXEC)
            target.call("close", opened)
        if file.position:
            target.call("lseek", file.number, file.position, os.SEEK_SET)
    except OSError as error:
        why = f"its descriptor {file.number} cannot be opened again: {error.strerror}"
        raise NotCopyable(why) from None


def _copy_signals(wanted: State, had: State, target: Traced) -> None:
    ignored, before = (int(each.status["SigIgn"], 16) for each in (wanted, had))
    for number in range(1, signal.NSIG):
        bit = 1 << number - 1
        if (ignored ^ before) & bit:
            handler = signal.SIG_IGN if ignored & bit else signal.SIG_DFL
            action = int(handler).to_bytes(_SIGACTION, "little")
            target.call("rt_sigaction", number, action, 0, 8)
    blocked = int(wanted.status["SigBlk"], 16)
    if blocked != int(had.status["SigBlk"], 16):
        tracing.set_blocked_signals(target.pid, blocked)
