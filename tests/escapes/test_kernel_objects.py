"""Kernel memory that a guest makes without using any of its own: locks, buffers of sockets, files in
memory.  What of it no cgroup counts has to be bounded by us."""

import errno
import fcntl
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cellwright import HostSettings, Sandbox, SandboxStatus
from cellwright.policies.policy import MIB, Filesystem, Policy
from cellwright.runner.cells import cell
from cellwright.runner.cells import cell as cells
from cellwright.runner.kernel.notifications import Notification
from cellwright.runner.listening import interfaces, locks
from cellwright.runner.listening.cell_listener import Listener
from cellwright.runner.watching import supervision
from tests.conftest import OPTIONAL, policy_named, soon, with_limits
from tests.escapes.without import ALLOW_EVERYTHING, by_number, sandbox_with_plan

pytestmark = pytest.mark.skipif("listener" in OPTIONAL, reason="the listener counts the locks")

_SET = """
import fcntl, os, struct
def lock(fd, start, command=fcntl.F_SETLK, kind=fcntl.F_WRLCK):
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", kind, 0, start, 1, 0))
def held(*fds):
    return sum(open(f"/proc/self/fdinfo/{fd}").read().count("lock:") for fd in fds)
def lock_many(paths, each):
    fds, told = [], 0
    for path in paths:
        fds.append(os.open(path, os.O_RDWR | os.O_CREAT))
        for n in range(each):
            try: lock(fds[-1], 2 * n)
            except OSError as error: told = error.errno
    return fds, told
"""
_MANY = (
    _SET
    + """
fds, told = lock_many([f"/tmp/{n}" for n in range(6)], 400)
[held(*fds), told]
"""
)


def test_record_locks_are_capped(standard: Sandbox) -> None:
    held, told = standard.execute(_MANY).value
    assert held <= locks._MOST_RANGES
    assert held > locks._MOST_RANGES // 2
    assert told == errno.ENOLCK


def test_without_the_cap_there_are_as_many_as_are_asked_for(
    standard: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_MOST_RANGES", 100_000)
    assert standard.execute(_MANY).value == [2400, 0]


def test_a_cell_of_one_process_locks_without_the_kernel(strict: Sandbox) -> None:
    """None of its locks could conflict with another one, so the kernel has none to keep."""
    assert strict.execute(_MANY).value == [0, 0]


def test_processes_share_the_cap(standard: Sandbox) -> None:
    program = f"""{_SET}
r, w = os.pipe()
hold_r, hold_w = os.pipe()
for child in range(6):
    if os.fork() == 0:
        fds, told = lock_many([f"/tmp/{{child}}"], 400)
        os.write(w, held(*fds).to_bytes(4, "little"))
        os.close(hold_w); os.read(hold_r, 1); os._exit(0)
sum(int.from_bytes(os.read(r, 4), "little") for child in range(6))
"""
    assert standard.execute(program).value <= locks._MOST_RANGES


def test_a_lock_outlives_neither_its_descriptor_nor_the_count(standard: Sandbox) -> None:
    """Whoever sets and frees again and again is told no, however often."""
    program = f"""{_SET}
fd = os.open("/tmp/a", os.O_RDWR | os.O_CREAT)
for turn in range(3000):
    lock(fd, turn % 7)
    lock(fd, turn % 7, kind=fcntl.F_UNLCK)
held(fd)
"""
    assert standard.execute(program).value == 0


def test_locks_of_a_main_thread_that_ended_still_count(standard: Sandbox) -> None:
    program = f"""{_SET}
import ctypes, threading
r, w = os.pipe()
if os.fork() == 0:
    def go_on():
        main.join(0.2)
        fds, told = lock_many([f"/tmp/{{n}}" for n in range(6)], 400)
        count = 0
        for fd in fds:
            count += open(f"/proc/thread-self/fdinfo/{{fd}}").read().count("lock:")
        os.write(w, count.to_bytes(4, "little")); os._exit(0)
    main = threading.main_thread()
    threading.Thread(target=go_on).start()
    ctypes.CDLL(None).{by_number("exit", "0")}
os.close(w)
int.from_bytes(os.read(r, 4), "little")
"""
    assert 0 < standard.execute(program).value <= locks._MOST_RANGES


@pytest.mark.parametrize("command", [36, 37, 38])
def test_locks_of_an_open_file_are_unknown(standard: Sandbox, command: int) -> None:
    attempt = f"{_SET}\ntry:\n    lock(0, 0, {command}); e = 0\nexcept OSError as error: e = error.errno\ne"
    assert standard.execute(attempt).value == errno.EINVAL


PROGRAMS = {
    "sqlite": """
import sqlite3
one, two = (sqlite3.connect("/workspace/a.db", timeout=0, isolation_level=None) for _ in "ab")
one.execute("create table t(x)")
one.execute("begin immediate"); one.execute("insert into t values (1)")
try: two.execute("insert into t values (2)"); seen = "both"
except sqlite3.OperationalError as error: seen = str(error)
one.execute("commit"); two.execute("insert into t values (2)")
assert (seen, two.execute("select count(*) from t").fetchone()) == ("database is locked", (2,))
""",
    "mailbox": """
import mailbox
box = mailbox.mbox("/workspace/box"); box.lock(); box.add("a: b\\n\\nhello"); box.flush(); box.unlock()
assert len(mailbox.mbox("/workspace/box")) == 1
""",
    "shelve": """
import shelve
with shelve.open("/workspace/shelf") as shelf: shelf["a"] = 1
with shelve.open("/workspace/shelf") as shelf: assert shelf["a"] == 1
""",
    "lockf": """
import fcntl
with open("/workspace/a", "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_UN)
""",
    "flock": """
import fcntl
one, two = open("/workspace/a", "w"), open("/workspace/a", "w")
fcntl.flock(one, fcntl.LOCK_EX)
try: fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB); raise SystemExit("both")
except BlockingIOError: pass
fcntl.flock(one, fcntl.LOCK_UN); fcntl.flock(two, fcntl.LOCK_EX)
""",
    "flock between threads": """
import fcntl, threading
one, two = open("/workspace/a", "w"), open("/workspace/a", "w")
fcntl.flock(one, fcntl.LOCK_EX)
order, begun = [], threading.Event()
def wait():
    begun.set(); fcntl.flock(two, fcntl.LOCK_EX); order.append("two")
thread = threading.Thread(target=wait); thread.start(); begun.wait()
thread.join(0.1); order.append("one"); one.close(); thread.join()
assert order == ["one", "two"]
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("profile", ["strict", "standard"])
def test_programs_that_lock_their_own_files_work(
    request: pytest.FixtureRequest, profile: str, name: str
) -> None:
    result = request.getfixturevalue(profile).execute(PROGRAMS[name])
    assert (result.status, result.violations) == (SandboxStatus.COMPLETED, ()), result.error


def test_processes_wait_for_each_others_locks(standard: Sandbox) -> None:
    program = """
import fcntl, os
file = open("/workspace/a", "w"); fcntl.lockf(file, fcntl.LOCK_EX)
r, w = os.pipe()
if os.fork() == 0:
    own = open("/workspace/a", "w")
    try: fcntl.lockf(own, fcntl.LOCK_EX | fcntl.LOCK_NB); os.write(w, b"both ")
    except OSError: os.write(w, b"busy ")
    fcntl.lockf(own, fcntl.LOCK_EX); os.write(w, b"mine"); os._exit(0)
first = os.read(r, 5); fcntl.lockf(file, fcntl.LOCK_UN); (first + os.read(r, 4)).decode()
"""
    assert standard.execute(program).value == "busy mine"


def test_a_process_that_is_killed_while_it_waits_for_a_lock_leaves_nothing(
    standard: Sandbox,
) -> None:
    program = """
import fcntl, os, threading
one, two = open("/workspace/a", "w"), open("/workspace/a", "w")
fcntl.flock(one, fcntl.LOCK_EX)
for _ in range(4):
    threading.Thread(target=fcntl.flock, args=(two, fcntl.LOCK_EX), daemon=True).start()
"""
    before = len(os.listdir("/proc/self/fd"))
    assert standard.execute(program).status is SandboxStatus.COMPLETED
    standard.settle()
    assert len(os.listdir("/proc/self/fd")) <= before + 64  # allowance for parked cells


# Files of the host


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    with sqlite3.connect(tmp_path / "app.db") as database:
        database.execute("create table t(x)")
    (tmp_path / "lock").touch()
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    return tmp_path


@pytest.fixture(params=["strict", "standard"])
def reader(request: pytest.FixtureRequest, shown: Path) -> Iterator[Sandbox]:
    policy = policy_named(request.param)
    files = msgspec.structs.replace(policy.filesystem, read=(str(shown),))
    with Sandbox(policy=msgspec.structs.replace(policy, filesystem=files), pool=0) as box:
        yield box


def _hold(shown: Path, attempt: str) -> str:
    return f"""
import fcntl, os, struct
db, lock = (os.open(f"{shown}/{{name}}", os.O_RDONLY) for name in ("app.db", "lock"))
try: {attempt}; e = 0
except OSError as error: e = error.errno
e
"""


_SHARED_AS_SQLITE = (
    'fcntl.fcntl(db, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0x40000000, 514, 0))'
)
_THREADED = (
    "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start(); "
)


@pytest.mark.parametrize("before", ["", _THREADED], ids=["one thread", "two threads"])
@pytest.mark.parametrize(
    ("attempt", "answer"),
    [
        ("fcntl.flock(lock, fcntl.LOCK_EX)", errno.EPERM),
        ("fcntl.flock(lock, fcntl.LOCK_SH)", 0),
        (_SHARED_AS_SQLITE, 0),
    ],
    ids=["exclusive", "shared", "record"],
)
def test_a_cell_with_read_access_cannot_lock_a_file(
    reader: Sandbox, shown: Path, before: str, attempt: str, answer: int
) -> None:
    with reader.session() as session:
        result = session.execute(before + "\n" + _hold(shown, attempt))
        assert result.value == answer
        assert [each.syscall for each in result.violations] == ["flock"] * bool(answer)
        with (shown / "lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with sqlite3.connect(shown / "app.db", timeout=0) as database:
            database.execute("insert into t values (1)")


def test_a_cell_that_may_write_a_file_locks_it(shown: Path) -> None:
    for path in (shown, *shown.iterdir()):
        path.chmod(0o777)
    policy = Policy(filesystem=Filesystem(write=(str(shown),)), optional_layers=OPTIONAL)
    with Sandbox(policy=policy, pool=0) as box, box.session() as session:
        program = f"import fcntl; f = open('{shown}/lock', 'r+'); fcntl.lockf(f, fcntl.LOCK_EX)"
        assert session.execute(program).status is SandboxStatus.COMPLETED
        with (shown / "lock").open("r+") as file, pytest.raises(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_RACE = """
import fcntl, os, struct, threading
own = os.open("/workspace/own", os.O_RDWR | os.O_CREAT)
host = os.open("{shown}/app.db", os.O_RDONLY)
place = os.dup(own)
span = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0x40000000, 514, 0)
done = threading.Event()
def swap():
    while not done.is_set():
        os.dup2(own, place); os.dup2(host, place)
def begin():
    done.clear()
    thread = threading.Thread(target=swap, daemon=True); thread.start()
    return thread
thread = begin()
def held():
    try: return "POSIX" in open(f"/proc/self/fdinfo/{{host}}").read()
    except OSError: return False
turns = 0
while turns < 20000:
    turns += 1
    try: fcntl.fcntl(place, fcntl.F_SETLK, span)
    except OSError: pass
    if held():
        done.set(); thread.join()
        if held(): threading.Event().wait()
        thread = begin()
turns
"""


@pytest.mark.slow
def test_a_cell_that_wins_the_race_for_a_file_of_the_host_is_killed(shown: Path) -> None:
    policy = policy_named("standard")
    files = msgspec.structs.replace(policy.filesystem, read=(str(shown),))
    with Sandbox(policy=msgspec.structs.replace(policy, filesystem=files), pool=0) as box:
        result = box.execute(_RACE.format(shown=shown), timeout=25)
    # It may not win in all its turns; if it does it is ended for it, and never lives on with the lock.
    assert (result.reason, result.value) in (("violation", None), ("exit", 20000)), result.error


# Sockets


_SOCKETS = """
import os, signal, socket, time
def fill():
    end, keep = time.monotonic() + 8, []
    listener = socket.socket(); listener.bind(("127.0.0.1", 0)); listener.listen(64)
    try:
        while time.monotonic() < end:
            one = socket.socket(); one.connect(listener.getsockname())
            keep += [one, listener.accept()[0]]
            for each in keep[-2:]:
                each.setblocking(False)
                try:
                    while True: each.send(bytes(1 << 18))
                except BlockingIOError: pass
    except OSError: pass
    time.sleep(9)
    os._exit(0)
for child in range(30):
    if os.fork() == 0:
        before()
        fill()
"""


@pytest.mark.needs("cgroup")
def test_what_tcp_holds_counts_whoever_opened_the_sockets() -> None:
    policy = with_limits(policy_named("standard"), memory_bytes=128 * MIB, wall_seconds=20.0)
    with Sandbox(policy=policy, pool=0) as box:
        result = box.execute(f"def before(): pass\n{_SOCKETS}\ntime.sleep(9)")
    assert (result.status, result.reason) == (SandboxStatus.KILLED, "memory"), result.error


_UNACCEPTED = """
import socket, time
def fill(seconds, most):
    end, made, keep = time.monotonic() + seconds, 0, []
    while time.monotonic() < end and made < most:
        keep.append(socket.socket({family}))
        keep[-1].bind(({host!r}, 0)); keep[-1].listen(4096)
        for _ in range(4000):
            one = socket.socket({family}); one.connect(keep[-1].getsockname())
            one.close(); made += 1
    return keep
"""


@pytest.mark.parametrize(
    ("family", "host"), [("socket.AF_INET", "127.0.0.1"), ("socket.AF_INET6", "::1")]
)
def test_unaccepted_connections_are_bounded(
    standard: Sandbox, family: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        _UNACCEPTED.format(family=family, host=host) + "kept = fill(20, 60_000)\ntime.sleep(9)"
    )
    result = standard.execute(program)
    assert (result.status, result.reason) == (SandboxStatus.KILLED, "memory"), result.error
    monkeypatch.setattr(cell.Backlogs, "are_too_long", lambda self: False)
    program = _UNACCEPTED.format(family=family, host=host) + "kept = fill(20, 12_000)\nlen(kept)"
    without = standard.execute(program)
    assert without.value > 2, without.error  # of 4,000 each; 2,048 may wait


@pytest.mark.needs("cgroup")
def test_connections_that_were_reset_count_while_they_wait() -> None:
    """The kernel's count of sockets in use leaves them out."""
    program = """
import socket, struct, time
listener = socket.create_server(("127.0.0.1", 0), backlog=2000)
for _ in range(600):
    one = socket.create_connection(listener.getsockname())
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()
time.sleep(9)
"""
    policy = with_limits(policy_named("standard"), memory_bytes=64 * MIB, wall_seconds=20.0)
    with Sandbox(policy=policy, pool=0) as box:  # 256 may wait
        result = box.execute(program)
    assert (result.status, result.reason) == (SandboxStatus.KILLED, "memory"), result


def files_of_sockets_read_by(do: Callable[[], object]) -> set[str]:
    """Return which of the kernel's files about sockets this thread reads in `do`."""
    itself, pread, found = threading.get_ident(), os.pread, set()

    def note(descriptor: int, *arguments: int) -> bytes:
        if threading.get_ident() == itself:  # not the sweep of sessions
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            found.update({path.name} if path.parent.name == "net" else ())
        return pread(descriptor, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", note)
        do()
    return found


def test_the_tables_of_sockets_are_read_only_if_there_are_any(standard: Sandbox) -> None:
    """To read one to its end, the kernel looks at the sockets of the whole host."""
    with standard.session() as session:
        session.execute("import socket")
        cell = session.cell._held.cell
        counts = {"sockstat", "sockstat6"}
        assert files_of_sockets_read_by(cell.has_exceeded) == counts
        session.execute("one = socket.socket(); one.bind(('127.0.0.1', 0)); one.listen()")
        assert files_of_sockets_read_by(cell.has_exceeded) == {*counts, "tcp"}
        session.execute("one = socket.create_server(('::1', 0), family=socket.AF_INET6)")
        assert files_of_sockets_read_by(cell.has_exceeded) == {*counts, "tcp6"}


def test_the_memory_of_sockets_is_read_once_in_a_while_however_many_requests_there_are(
    standard: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_MEMORY_CHECK_SECONDS", 1000.0)  # in a long request
    with standard.session() as session:
        session.execute("1")
        monkeypatch.setattr(cells, "MEMORY_LOOK_SECONDS", 1000.0)
        assert not files_of_sockets_read_by(lambda: session.execute("1"))
        monkeypatch.setattr(cells, "MEMORY_LOOK_SECONDS", 0.0)
        assert files_of_sockets_read_by(lambda: session.execute("1"))


def test_the_buffers_of_such_connections_cannot_be_made_larger(standard: Sandbox) -> None:
    """A connection inherits the size from the socket that listens."""
    program = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
before = listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, before // 4)
[before, listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)]
"""
    before, after = standard.execute(program).value
    assert before == after
    with socket.socket() as without:
        before = without.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        without.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, before // 4)
        assert without.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) < before


def test_unaccepted_connections_are_bounded_between_two_requests(
    standard: Sandbox,
) -> None:
    later = (
        _UNACCEPTED.format(family="socket.AF_INET", host="127.0.0.1")
        + """
import threading
def run():
    go.wait(); globals()["kept"] = fill(20, 60_000)
go = threading.Event()
threading.Thread(target=run, daemon=True).start()
threading.Timer(1, go.set).start()
"""
    )
    with standard.session() as session:
        assert session.execute(later).status is SandboxStatus.COMPLETED
        assert soon(lambda: bool(session.cell.lost))
        assert "memory" in session.cell.lost


def test_a_server_may_have_hundreds_of_connections_waiting(standard: Sandbox) -> None:
    program = (
        _UNACCEPTED.format(family="socket.AF_INET", host="127.0.0.1")
        + """
listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
kept = [socket.create_connection(listener.getsockname()) for _ in range(500)]
time.sleep(0.3)
len(kept)
"""
    )
    assert standard.execute(program).value == 500


_LATER = """
def before():
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(1)  # the request has ended by then
    signal.pause()
"""


@pytest.mark.needs("v1_memory", "cgroup")
def test_what_tcp_holds_counts_between_two_requests_too() -> None:
    policy = with_limits(policy_named("standard"), memory_bytes=128 * MIB)
    with Sandbox(policy=policy, pool=0) as box, box.session() as session:
        assert session.execute(_LATER + _SOCKETS).status is SandboxStatus.COMPLETED
        assert soon(lambda: bool(session.cell.lost))
        assert "memory" in session.cell.lost


_DATAGRAMS = """
import socket
keep, sent = [], 0
sender = socket.socket(type=socket.SOCK_DGRAM); sender.setblocking(False)
for _ in range(250):
    each = socket.socket(type=socket.SOCK_DGRAM); each.bind(("127.0.0.1", 0)); keep.append(each)
    each.setblocking(False)
    for turn in range(200):
        try: sender.sendto(bytes(1000), each.getsockname())
        except BlockingIOError: break
held = 0
for each in keep:
    try:
        while True: held += len(each.recv(2000))
    except BlockingIOError: pass
held
"""


@pytest.mark.needs("cgroup")
def test_what_udp_holds_counts(standard: Sandbox) -> None:
    """A byte of data takes more than two of the kernel's; without a cap they hold 20 MB."""
    policy = with_limits(policy_named("standard"), memory_bytes=64 * MIB)
    with Sandbox(policy=policy, pool=0) as box:
        result = box.execute(_DATAGRAMS)
    assert "cgroup_sockets" in result.layers
    assert result.reason == "memory" or result.value < 16 * MIB
    assert standard.execute(_DATAGRAMS).value > result.value or result.reason == "memory"


# Files in memory


def test_a_memfd_is_refused_where_no_cgroup_counts_it() -> None:
    caps = ("cgroup_memory", "cgroup_cpu", "cgroup_pids")
    attempt = (
        "import os\ntry: os.memfd_create('a'); e = 0\nexcept OSError as error: e = error.errno\ne"
    )
    policy = Policy(optional_layers=tuple(dict.fromkeys((*OPTIONAL, *caps))))
    with Sandbox(policy=policy, pool=0, host=HostSettings(cgroup_root="/nonexistent")) as box:
        assert "cgroup_memory" not in box.layers
        result = box.execute(attempt)
    assert result.value == errno.EPERM
    assert [each.syscall for each in result.violations] == ["memfd_create"]


@pytest.mark.parametrize("call", ["shmget", "semget"])
def test_system_v_objects_are_refused_where_no_cgroup_counts_them(
    standard: Sandbox, call: str
) -> None:
    attempt = f"import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nc.{call}(0, 1, 0o1600) >= 0 or ctypes.get_errno()"
    assert standard.execute(attempt).value is True
    caps = ("cgroup_memory", "cgroup_cpu", "cgroup_pids")
    policy = policy_named("standard")
    optional = tuple(dict.fromkeys((*policy.optional_layers, *caps)))
    policy = msgspec.structs.replace(policy, optional_layers=optional)
    with Sandbox(policy=policy, pool=0, host=HostSettings(cgroup_root="/nonexistent")) as box:
        result = box.execute(attempt)
    assert result.value == errno.EPERM
    (seen,) = result.violations
    assert (seen.syscall, seen.rule) == (call, "seccomp: needs a memory cgroup")


@pytest.mark.parametrize(
    ("attempt", "answer"),
    [
        ("c.shmctl(c.shmget(0, 4096, 0o1600), 11, None)", errno.EPERM),
        ("c.shmget(0, 1 << 21, 0o5600)", errno.ENOMEM),
        ("c.msgget(0, 0o1600)", errno.ENOSYS),
    ],
    ids=["SHM_LOCK", "SHM_HUGETLB", "queue"],
)
def test_what_no_cgroup_of_the_cell_counts_of_system_v_is_refused(
    standard: Sandbox, attempt: str, answer: int
) -> None:
    """RLIMIT_MEMLOCK of segments is one for all cells of a user; huge pages are a pool of the host's."""
    code = f"import ctypes\nc = ctypes.CDLL(None, use_errno=True)\n[{attempt}, ctypes.get_errno()]"
    assert standard.execute(code).value == [-1, answer]


_ATTRIBUTES = r"""
import os, struct
open("f", "w").close()
entry = struct.Struct("<HHI").pack
others = b"".join(entry(tag, 6, 2**32 - 1) for tag in (4, 16, 32))
def access_list(size):
    named = entry(2, 6, os.getuid()) * max(0, size // 8 - 4)
    return (struct.pack("<I", 2) + entry(1, 6, 2**32 - 1) + named + others).ljust(size, b"x")[:size]
def answer(name, value):
    try: os.setxattr("f", name, value)
    except OSError as error: return error.errno
sizes = range(256, 1100)
lists = [[size % 8 for size in sizes if answer("system.posix_acl_access", access_list(size)) is None]]
own = [size % 8 for size in sizes if answer("user.own", bytes(size)) is None]
[answer("system.posix_acl_access", access_list(252)), sorted(set(*lists)), sorted(set(own)), answer("user.own", bytes(2**16))]
"""


def test_access_lists_end_below_256_bytes_and_user_attributes_do_not(
    strict: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No cgroup is charged for an access list.  All have a size that the filter can tell from others."""
    assert strict.execute(_ATTRIBUTES).value == [None, [], [0, 1, 2, 3, 5, 6, 7], None]
    policy = policy_named("strict")
    with sandbox_with_plan(monkeypatch, policy, guest_filter=ALLOW_EVERYTHING) as sandbox:
        assert sandbox.execute(_ATTRIBUTES).value == [None, [4], [*range(8)], None]


_NETLINK = """
import errno, socket
kept, told = [], 0
for number in range(100):
    try: kept.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
    except OSError as error: told = error.errno
found = [len(kept), told]
kept.pop().close()
kept.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
found
"""


def test_netlink_sockets_are_few_at_a_time(standard: Sandbox) -> None:
    """They are counted when they are made: one that has no address yet is in no table of sockets."""
    result = standard.execute(_NETLINK)
    assert result.value == [interfaces._MOST, errno.ENOBUFS]
    assert result.violations[0].rule == interfaces.TOO_MANY


_AT_ONCE = """
import socket, threading
kept = []
def one():
    try: kept.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
    except OSError: pass
threads = [threading.Thread(target=one) for _ in range(40)]
for each in threads: each.start()
for each in threads: each.join()
len(kept)
"""


@pytest.mark.parametrize("is_counted", [True, False])
def test_netlink_sockets_are_no_more_where_many_threads_ask_at_once(
    standard: Sandbox, monkeypatch: pytest.MonkeyPatch, is_counted: bool
) -> None:
    """A thread that gets no turn makes its socket long after the answer, as all do here."""
    held: list[Notification] = []
    asked: list[int] = []
    answer, count = Listener._answer_netlink, interfaces._count

    def decide(listener: Listener, notification: Notification) -> None:
        vars(listener)["_let_go_on"] = held.append
        answer(listener, notification)
        del vars(listener)["_let_go_on"]
        asked.append(notification.thread)
        if len(asked) == 40:
            for each in held:
                listener._let_go_on(each)

    monkeypatch.setattr(Listener, "_answer_netlink", decide)
    if not is_counted:
        monkeypatch.setattr(
            interfaces.NetlinkSockets, "may_have_another", lambda _, thread, __: count(thread) < 16
        )
    assert standard.execute(_AT_ONCE).value == (16 if is_counted else 40)


def test_without_the_count_there_are_as_many_netlink_sockets_as_are_asked_for(
    standard: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "_MOST", 1000)
    assert standard.execute(_NETLINK).value == [100, 0]
