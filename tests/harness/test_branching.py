"""Branches of sessions: what they have of the state, what is refused by name, and what is left."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cellwright import AuditLog, BusyError, HostSettings, PolicyError, Sandbox, Session
from cellwright.errors import PauseError
from cellwright.policies.policy import Processes
from cellwright.runner import channel
from cellwright.runner.cells.cell import pid_of
from cellwright.runner.cells.held_cell import HeldCell
from cellwright.runner.kernel import process_calls as processes
from cellwright.runner.sessions import branches as session_branches
from cellwright.runner.sessions.branches import BranchingProcess, CannotBranch
from cellwright.runner.settings import SessionSettings
from cellwright.testing import inspect
from tests.conftest import ROOT, policy_named

# Code that makes a state, and an expression that shows it and changes it.
STATES = {
    "objects": ("class C: n = 1\nc = C(); c.me = c; d = {c: [c]}", "setattr(c, 'n', c.n + 1), c.n, d[c][0] is c.me"),
    "generators": ("def g():\n  n = 0\n  while True:\n    n += yield n\nit = g(); next(it)", "it.send(3)"),
    "closures": ("def f():\n  n = 0\n  def h():\n    nonlocal n; n += 1; return n\n  return h\nh = f(); h()", "h()"),
    "an exception": (
        "try:\n  {}['key']\nexcept KeyError as e:\n  error = e",
        "(error.args, error.__traceback__.tb_lineno, setattr(error, 'args', ('x', *error.args)))",
    ),
    "SQLite in memory": (
        "import sqlite3\ndb = sqlite3.connect(':memory:'); db.execute('create table t (n)')",
        "(db.execute('insert into t values (1)').rowcount, db.execute('select count(*) from t').fetchone())",
    ),
    "an open file": (
        "f = open('notes', 'w+'); f.write('abc'); f.flush()",
        "(f.tell(), f.write('d'), f.flush(), open('notes').read())",
    ),
    "a file open to append": ("f = open('log', 'a')", "(f.write('x'), f.flush(), open('log').read())"),
    "flags of a file": (
        ("import os, fcntl; a = os.open('f', os.O_CREAT | os.O_RDWR | os.O_APPEND); b = os.open('g', os.O_CREAT)\n"
        "os.set_inheritable(b, True); c = os.open('/dev/null', os.O_RDWR | os.O_NONBLOCK)"),
        ("[(fcntl.fcntl(each, fcntl.F_GETFL), os.get_inheritable(each)) for each in (a, b, c)], os.close(a),"
        " globals().update(a=os.open('h', os.O_CREAT | os.O_WRONLY | os.O_TRUNC))"),
    ),
    "a library's file": ("import random; f = open(random.__file__); f.read(7)", "f.read(5), f.tell()"),
    "big memory": ("b = bytearray(range(256)) * 80_000", "(len(b), b[-1], b.extend(b'x'))"),
    "random numbers": ("import random; random.random()", "random.random()"),
    "imports": ("import decimal, zlib, hashlib\ndigest = hashlib.sha256(b'a')", "(digest.update(b'b'), digest.hexdigest())"),
    "a deep stack": ("def f(n): return n and f(n - 1)\nimport sys\nsys.setrecursionlimit(9000)\nf(4000); n = 0", "f(3000)"),
    "a directory": ("import os; os.mkdir('d'); os.chdir('d')", "(os.getcwd(), os.mkdir('e'), os.chdir('e'))"),
    "kernel state": (
        ("import os, signal, resource\nos.umask(0o027); os.nice(2); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))"),
        ("(os.umask(0o022), os.nice(1), signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,"
        " open('/proc/self/status').read().split('SigIgn:')[1].split()[0],"
        " signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]), resource.getrlimit(resource.RLIMIT_STACK))"),
    ),
    "environment": ("import os; os.environ['A'] = '1'", "(os.environ.get('A'), os.environ.update(A='2'))"),
    "nothing yet": ("", "globals().setdefault('n', 0), globals().update(n=1)"),
}  # fmt: skip

REFUSED = {
    "threads": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "signals (signal.signal)": "import signal; signal.signal(signal.SIGALRM, print)",
    "a socket": "import socket; s = socket.socketpair()",
    "a pipe": "import os; p = os.pipe()",
    "one file": "import os; f = open('f', 'w'); d = os.dup(f.fileno())",
    "without a name": "import os; f = open('f', 'w'); os.unlink('f')",
    "descriptors 0 to 3": "import os; os.close(0)",
    "descriptor 1 is not": "import os; os.dup2(os.open('f', os.O_CREAT | os.O_WRONLY), 1)",
    "shares memory": "import mmap; m = mmap.mmap(-1, 4096)",
    "laid out": "import mmap; f = open('f', 'w+'); f.write('x' * 5000); f.flush()\n"
    "m = mmap.mmap(f.fileno(), 4096, mmap.MAP_PRIVATE); f.close()",
    "holds a lock": "import fcntl; f = open('f', 'w'); fcntl.flock(f, fcntl.LOCK_EX)",
    "special file": "import os; os.mkfifo('fifo')",
    "several names": "import os; open('f', 'w').close(); os.link('f', 'g')",
    "directory was removed": "import os; os.mkdir('d'); os.chdir('d'); os.rmdir('/workspace/d')",
    "page sizes": "import ctypes; assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0",
}  # fmt: skip


def branches(session: Session, n: int = 1) -> tuple[Session, ...]:
    made = session.branch(n)
    assert [(each.forked_by, each.not_copied) for each in made] == [("memory", "")] * n
    return made


def value(session: Session, code: str) -> object:
    result = session.execute(code)
    assert result.ok, (result.error, result.stderr)
    return result.value


@pytest.mark.parametrize("name", STATES)
def test_a_branch_and_its_source_go_on_as_a_twin_does(sandbox: Sandbox, name: str) -> None:
    make, show = STATES[name]
    with contextlib.ExitStack() as closing:
        source = closing.enter_context(sandbox.session())
        assert source.execute(make).ok or not make
        (branch,) = branches(source)
        closing.enter_context(branch)
        answers = [[value(each, show) for _ in range(3)] for each in (source, branch)]
        assert answers[0] == answers[1]
        assert len(set(map(str, answers[0]))) > 1 or name in ("a deep stack",)


def test_the_copies_share_nothing(sandbox: Sandbox) -> None:
    with sandbox.session() as source:
        source.execute("x = [1]", files={"f": b"old"})
        first, second = branches(source, 2)
        first.execute("x.append(2); open('f', 'w').write('new')")
        for each, expected in (
            (source, [[1], "old"]),
            (first, [[1, 2], "new"]),
            (second, [[1], "old"]),
        ):
            assert value(each, "x, open('f').read()") == expected


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_copied_is_named_and_the_calls_are_replayed(
    sandbox: Sandbox, why: str
) -> None:
    with sandbox.session(id="hostile") as source:
        result = source.execute(REFUSED[why] + "\nkept = 7")
        assert result.ok, result.stderr
        (branch,) = source.branch()
        with branch:
            assert branch.forked_by == "replay"
            assert why in branch.not_copied
            assert value(branch, "kept") == 7
        assert value(source, "kept") == 7


def test_a_watch_of_files_is_named_by_branch_and_pause() -> None:
    watches = "import ctypes; i = ctypes.CDLL(None).inotify_init1(0x80000); assert i >= 0"
    with (
        Sandbox(policy=policy_named("standard"), host=HostSettings(pausable=True)) as box,
        box.session() as source,
    ):
        assert source.execute(watches).ok
        (branch,) = source.branch()
        with branch:
            assert (branch.forked_by, "inotify" in branch.not_copied) == ("replay", True)
        with pytest.raises(PauseError, match="inotify"):
            source.pause()
        assert source.execute("i").ok


def test_files_keep_their_modes_times_links_and_holes(sandbox: Sandbox) -> None:
    make = """
import os
os.makedirs('a/b'); open('a/b/f', 'w').write('x'); os.chmod('a/b/f', 0o640); os.utime('a/b/f', ns=(5, 7))
os.symlink('b/f', 'a/l'); os.symlink('/etc/passwd', 'out'); open(b'a/\\xff', 'w').close()
with open('/tmp/sparse', 'wb') as f: f.truncate(1 << 24); f.seek(1 << 23); f.write(b'middle')
os.chmod('a/b', 0o500); os.utime('a', ns=(1, 2)); os.chmod('/workspace', 0o550); os.chmod('/tmp', 0o1700)
"""
    show = """
found = []
for top in ('/workspace', '/tmp'):
    s = os.stat(top); found.append((top, s.st_mode, s.st_mtime_ns, 0, 0, ''))
    for directory, names, files in os.walk(top.encode()):
        for name in (*names, *files):
            path = os.path.join(directory, name); s = os.lstat(path)
            target = os.readlink(path).decode() if os.path.islink(path) else ''
            found.append((repr(path), s.st_mode, s.st_mtime_ns, s.st_size, s.st_blocks, target))
sorted(found)
"""
    with sandbox.session() as source:
        value(source, make)
        (branch,) = branches(source)
        assert value(branch, show) == value(source, show)
        assert (
            value(branch, "f = open('/tmp/sparse', 'rb'); f.seek(1 << 23); f.read(6).decode()")
            == "middle"
        )
        branch.close()


def test_empty_files_are_copied_without_opening_them(sandbox: Sandbox) -> None:
    """Each open asks the supervisor."""
    make = "for n in range(500): open(f'{n}', 'w').close()\nopen('full', 'w').write('x')"
    with sandbox.session() as source:
        value(source, make)
        (branch,) = branches(source)
        with branch:
            listener = branch.cell._held.listener  # type: ignore[attr-defined]
            assert listener._opens < 100
            assert value(branch, "import os; len(os.listdir('.')), os.path.getsize('499')") == [
                501,
                0,
            ]


def test_files_are_not_copied_while_a_child_changes_them(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child would end between the copy of the files and the stop, which would not find it."""
    make = """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.mkdir('old')
if not os.fork():
    while os.path.exists('old'): pass
    os.mkdir('new'); os._exit(0)
"""

    def write(*given: Any) -> None:
        written(*given)
        held: HeldCell = source.cell._held  # type: ignore[attr-defined]
        os.rmdir("old", dir_fd=held.cell.workspace)
        init = pid_of(held.cell.pidfd)
        while processes.company_of(pid_of(held.cell.guest), init):
            continue

    written = session_branches.write_files
    policy = policy_named("strict", processes=Processes(subprocesses=True))
    with Sandbox(policy=policy) as box, box.session() as source:
        value(source, make)
        monkeypatch.setattr(session_branches, "write_files", write)
        (branch,) = source.branch()
        assert (branch.forked_by, branch.not_copied) == ("replay", "it has child processes")
        branch.close()


def test_without_replay_nothing_is_executed_and_none_is_made(sandbox: Sandbox) -> None:
    with sandbox.session() as source:
        source.execute(REFUSED["threads"] + "\nx = 1")
        before = sandbox._state().sessions
        with pytest.raises(PolicyError, match="by memory: it runs threads"):
            source.branch(2, replay=False)
        assert sandbox._state().sessions == before
        assert value(source, "x") == 1
    with sandbox.session() as source:
        source.execute("x = 1")
        (branch,) = source.branch(replay=False)
        with branch:
            assert (branch.forked_by, value(branch, "x")) == ("memory", 1)


def test_a_branch_of_a_branch_replays_every_call(sandbox: Sandbox) -> None:
    with sandbox.session() as source:
        source.execute("x = 1")
        (child,) = branches(source)
        child.execute("x += 1")
        (grandchild,) = branches(child)
        assert value(grandchild, "x") == 2
        fork = grandchild.fork()
        assert (value(fork, "x"), fork.forked_by, fork.diverged) == (2, "replay", ())
        for each in (child, grandchild, fork):
            each.close()


# Memory that a fork wipes, as glibc 2.41 marks the state of getrandom(3).
WIPED = """
import mmap
m = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
m.madvise(18); m[:5] = b"state"
def is_marked():
    flags = [line for line in open("/proc/self/smaps") if line.startswith("VmFlags")]
    return any(" wf " in line for line in flags)
"""


def test_memory_that_a_fork_wipes_has_no_content_in_a_branch(sandbox: Sandbox) -> None:
    with sandbox.session() as source:
        source.execute(WIPED)
        made = branches(source, 2)
        assert value(source, "m[:5] == b'state', is_marked()") == [True, True]
        for each in made:
            assert value(each, "m[:] == bytes(4096), is_marked()") == [True, True]
            each.close()


def test_branches_have_random_bytes_of_their_own(sandbox: Sandbox) -> None:
    with sandbox.session() as source:
        value(source, "import os; os.urandom(8).hex()")
        made = branches(source, 3)
        numbers = {value(each, "os.urandom(8).hex()") for each in (source, *made)}
        assert len(numbers) == 4
        for each in made:
            each.close()


def test_reseeding_gives_each_branch_other_numbers(sandbox: Sandbox) -> None:
    with sandbox.session() as source:
        source.execute("import random; _ = 5")
        same, seeded = branches(source, 2), source.branch(2, reseed=True)
        numbers = [value(each, "random.random()") for each in (*same, *seeded)]
        assert numbers[0] == numbers[1]
        assert len(set(numbers)) == 3
        assert value(seeded[0], "sorted(name for name in globals() if name[0] != '_')") == [
            "random"
        ]
        for each in (*same, *seeded):
            each.close()


def test_a_frozen_session_is_thawed_and_branched() -> None:
    settings = SessionSettings(freeze_seconds=0.05)
    with Sandbox(policy=policy_named("strict"), sessions=settings) as box, box.session() as source:
        source.execute("x = 1")
        cell = source.cell  # type: ignore[attr-defined]
        assert cell.freeze()
        (branch,) = branches(source)
        assert value(branch, "x") == value(source, "x") == 1


def test_all_branches_are_made_or_none() -> None:
    settings = SessionSettings(alive=3)
    with Sandbox(policy=policy_named("strict"), sessions=settings) as box, box.session() as source:
        source.execute("x = 1")
        first = branches(source, 2)
        with contextlib.ExitStack() as busy:
            for each in first:
                busy.enter_context(each.cell.resting())  # type: ignore[attr-defined]
            with pytest.raises(BusyError):
                source.branch(1)
        first[0].close()
        with first[1].cell.resting(), pytest.raises(BusyError):  # type: ignore[attr-defined]
            source.branch(2)
        first[1].close()
        branches(source, 2)
        assert value(source, "x") == 1


@pytest.mark.parametrize("n", [0, 9, True, "1"])
def test_an_invalid_number_of_branches_is_refused(sandbox: Sandbox, n: int) -> None:
    with sandbox.session() as source, pytest.raises(PolicyError, match="n: must be"):
        source.branch(n)


def test_a_branch_that_has_no_room_fails_alone(sandbox: Sandbox) -> None:
    """The fresh cell may hold less than what the source does: it is killed, and the source goes on."""
    with sandbox.session() as source, sandbox.session() as target:
        source.execute("hog = b'x' * 60_000_000")
        held, fresh = (each.cell._held for each in (source, target))  # type: ignore[attr-defined]
        lower_memory_cap(fresh, 30 << 20)
        process, plan = box_process(sandbox), inspect(sandbox).supervisor.plan
        with pytest.raises(CannotBranch, match="the copy failed"):
            process.branch(held, [fresh], plan.branching_filter)
        assert value(source, "len(hog)") == 60_000_000
        assert not fresh.is_alive()
        branches(source)[0].close()


def box_process(sandbox: Sandbox) -> BranchingProcess:
    return sandbox._cells._branching  # type: ignore[attr-defined]


def lower_memory_cap(held: HeldCell, size: int) -> None:
    places = held.cell.cgroup.places
    for place, name in (("memory", "memory.limit_in_bytes"), ("v2", "memory.max")):
        if place in places and Path(places[place], name).exists():
            Path(places[place], name).write_text(str(size))
            return
    pytest.skip("no memory cgroup")


def test_the_trail_says_which_session_a_branch_is_of() -> None:
    log = AuditLog()
    with (
        Sandbox(policy=policy_named("strict"), audit=log) as box,
        box.session(id="first") as source,
    ):
        source.execute("x = 1")
        (branch,) = branches(source)
        opened = [each for each in log.get_entries() if each.action == "opened"]
        assert [each.target for each in opened] == ["", "a branch of first"]
        branch.close()


def test_a_branch_has_the_cpu_time_that_its_source_had_left() -> None:
    with Sandbox(policy=policy_named("strict")) as box, box.session() as source:
        source.execute(
            "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
        )
        (branch,) = branches(source)
        turns = branch.cell._turns  # type: ignore[attr-defined]
        assert turns.cpu_before > 0.25  # the kernel counts a cgroup by a clock of its own


STEPS = (
    "checked",
    "require_copyable",
    "lay_out",
    "copy_state",
    "copy_pages",
    "copy_limits",
    "require_equal",
)
TRACER = """
import os, signal, sys
from cellwright.runner.branching import copying
step, uid, *descriptors = sys.argv[1], *map(int, sys.argv[2:])
if uid:
    os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
setattr(copying, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
copying.branch(copying.BranchedProcesses(descriptors[0], descriptors[1], (descriptors[2],)))
"""


@pytest.mark.parametrize("step", STEPS)
def test_a_tracer_that_is_killed_harms_no_source_and_leaves_no_target(
    sandbox: Sandbox, step: str
) -> None:
    with sandbox.session() as source, sandbox.session() as target:
        source.execute("x = 41")
        cells = [each.cell._held.cell for each in (source, target)]  # type: ignore[attr-defined]
        given = [cells[0].guest, cells[0].pidfd, cells[1].guest]
        uid = inspect(sandbox).supervisor.generation.boot.host_uid if os.geteuid() == 0 else 0
        command = [sys.executable, "-c", TRACER, step, str(uid), *map(str, given)]
        ended = subprocess.run(command, pass_fds=given, cwd=ROOT, timeout=30, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert value(source, "x + 1") == 42
        assert channel.has_news(cells[1].guest, 60.0)  # it has ended


def test_a_branching_process_that_was_killed_is_replaced(sandbox: Sandbox) -> None:
    with sandbox.session() as source:
        source.execute("x = 1")
        process = box_process(sandbox)
        branches(source)[0].close()
        before = process.pid
        assert before
        os.kill(before, signal.SIGKILL)
        killed = process._process.running
        assert killed
        assert channel.has_news(killed.control.fileno(), 5.0)
        branches(source)[0].close()
        assert process.pid != before


@pytest.mark.needs("cgroup")
def test_system_v_objects_are_not_left_out_of_a_branch_in_silence() -> None:
    code = "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.shmget(7, 4096, 0o1600) >= 0"
    with Sandbox(policy=policy_named("standard"), pool=2) as box, box.session() as source:
        assert value(source, "1") == 1
        (plain,) = branches(source)
        plain.close()
        assert value(source, code) is True
        (branch,) = source.branch()
        with branch:
            assert branch.forked_by == "replay"
            assert "System V" in branch.not_copied
            assert value(branch, "libc.shmget(7, 4096, 0o600) >= 0") is True  # made again
