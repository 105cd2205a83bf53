"""Branches of hostile sessions: as confined as fresh ones, copied whole or refused by name."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import HostSettings, PauseSettings, Sandbox, Session
from cellwright.runner.cells.cell import pid_of
from cellwright.testing import inspect
from tests.conftest import SHARED, policy_named
from tests.escapes.live_cell import NAMESPACES, status
from tests.escapes.test_payloads import (
    ENDED,
    NEEDS,
    OWN,
    PROTECTED,
    UNCOUNTED,
    Host,
    case_of,
    left_of_payloads,
    policy_for,
    protecting,
    settings_for,
    verdict_of,
)
from tests.escapes.test_payloads import host as host

# All payloads but those for a proxy, those in other languages, which are branched by replay, and one
# that runs where nothing is counted.
PAYLOADS = [
    path
    for path in (*OWN, *sorted((SHARED / "attacks").glob("*.py")))
    if path.suffix == ".py" and not path.name.startswith("PXY-") and case_of(path) not in UNCOUNTED
]
SAME = (
    "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters",
    "Uid", "Gid", "Groups", "TracerPid", "SigIgn", "SigBlk", "SigCgt", "Umask", "Threads",
)  # fmt: skip
RETURNS_7 = bytes.fromhex("e0008052c0035fd6" if os.uname().machine == "aarch64" else "b807000000c3")
UNTOUCHED = "import os\nmine, open('kept').read(), sorted(os.listdir())"
LIBC = """\
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("standard"), pool=2) as box:
        yield box


def guest_of(session: Session) -> int:
    return pid_of(session.cell._held.cell.guest)  # type: ignore[attr-defined]


def seen_from_outside(session: Session) -> dict[str, object]:
    """Return what a process is confined by, without what is its own."""
    pid = guest_of(session)
    told = status(pid)
    mounts = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    limits = Path(f"/proc/{pid}/limits").read_text()
    files = [re.sub(r"\d+", "", os.readlink(f"/proc/{pid}/fd/{n}")) for n in range(4)]
    return {
        **{name: told.get(name) for name in SAME},
        "mounts": sorted(re.sub(r"^\d+ \d+ \d+:\d+|master:\d+|shared:\d+", "", each) for each in mounts),
        "limits": limits, "files": files, "descriptors": sorted(os.listdir(f"/proc/{pid}/fd")),
        "root": os.readlink(f"/proc/{pid}/root"), "cwd": os.readlink(f"/proc/{pid}/cwd"),
    }  # fmt: skip


@pytest.mark.needs("root")
def test_a_branch_is_confined_as_a_fresh_session_is(sandbox: Sandbox) -> None:
    with sandbox.session() as source, sandbox.session() as fresh:
        source.execute("import sqlite3; x = [1]")
        fresh.execute("y = 1")
        (branch,) = source.branch()
        assert branch.forked_by == "memory"
        branch.execute("1")
        assert seen_from_outside(branch) == seen_from_outside(fresh) == seen_from_outside(source)
        for kind in (*NAMESPACES, "pid_for_children"):
            inodes = {
                os.stat(f"/proc/{guest_of(each)}/ns/{kind}").st_ino for each in (source, branch)
            }
            assert len(inodes) == 2 - (kind == "none"), kind
        cgroups = {Path(f"/proc/{guest_of(each)}/cgroup").read_text() for each in (source, branch)}
        assert len(cgroups) == 2
        branch.close()


@pytest.mark.needs("root")
@pytest.mark.parametrize("pausable", [False, True])
def test_a_resumed_session_is_confined_as_a_fresh_one_is(tmp_path: Path, pausable: bool) -> None:
    policy, settings = policy_named("standard"), PauseSettings(tmp_path)
    with (
        Sandbox(
            policy=policy, pool=2, host=HostSettings(pauses=settings, pausable=pausable)
        ) as box,
        box.session() as source,
        box.session() as fresh,
    ):
        source.execute("import sqlite3; x = [1]")
        before = os.stat(f"/proc/{guest_of(source)}/ns/mnt").st_ino
        token = source.pause()
        fresh.execute("y = 1")
        with box.resume(token) as resumed:
            resumed.execute("1")
            assert seen_from_outside(resumed) == seen_from_outside(fresh)
            assert os.stat(f"/proc/{guest_of(resumed)}/ns/mnt").st_ino != before
            cgroups = {
                Path(f"/proc/{guest_of(each)}/cgroup").read_text() for each in (resumed, fresh)
            }
            assert len(cgroups) == 2


def test_the_process_that_copies_has_no_privilege(sandbox: Sandbox) -> None:
    with sandbox.session() as source:
        source.execute("1")
        source.branch()[0].close()
        pid = sandbox._cells._branching.pid  # type: ignore[attr-defined]
        told = status(pid)
        assert {told[name] for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {"0" * 16}
        assert (told["NoNewPrivs"], told["Seccomp"], told["Threads"]) == ("1", "2", "1")
        assert "0" not in (told["Uid"].split()[0], told["Gid"].split()[0])
        if os.geteuid() == 0:
            assert os.stat(f"/proc/{pid}/mem").st_uid == 0  # not dumpable: proc(5)
            assert sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2", "3"]


# Hostile layouts: what the branch must be, memory or replay, and the reason.
HOSTILE = {
    "a mapping for each page": (
        LIBC + "for n in range(4200):\n  libc.mmap(ctypes.c_void_p((1 << 40) + (n << 13)), 4096, 1 + n % 2, 50, -1, 0)",
        "mappings",
    ),
    "huge sparse maps": (
        LIBC
        + "for n in range(1, 20):\n"
        + "  assert libc.mmap(ctypes.c_void_p(n << 41), 1 << 40, 3, 0x4022, -1, 0) == n << 41",
        "GiB",
    ),
    "the library of its calls replaced": (
        LIBC + "import re\nat = ctypes.cast(libc.recv, ctypes.c_void_p).value & ~4095\n"
        "libc.mprotect(ctypes.c_void_p(at), 4096, 7)",
        "in place of the C library",
    ),
    "the vDSO made writable": (
        LIBC
        + "a, b = [line.split()[0].split('-') for line in open('/proc/self/maps') if '[vdso]' in line][0]\n"
        + "a, b = int(a, 16), int(b, 16); assert libc.mprotect(ctypes.c_void_p(a), b - a, 7) == 0",
        r"moved \[vdso\]",
    ),
    "a name with a newline": (
        ("import mmap, os\nname = 'x\\n7f0000000000-7f0000001000 rwxp 00000000 00:00 0 [vdso]'\n"
        "f = open(name, 'w+'); f.write('x' * 4096); f.flush()\nm = mmap.mmap(f.fileno(), 0, mmap.MAP_PRIVATE, 1)\nf.close()"),
        "laid out",
    ),
    "a name with a carriage return": (
        ("import mmap\nname = 'x\\r7f0000000000-7f0000001000 rwxp 00000000 00:00 0 [vdso]'\n"
        "f = open(name, 'w+'); f.write('x' * 4096); f.flush()\nm = mmap.mmap(f.fileno(), 0, mmap.MAP_PRIVATE, 1)\nf.close()"),
        "laid out",
    ),
    "files of long paths and links": (
        ("import os\nlong = '\\xff' * 120\nfor n in range(15): os.mkdir(long); os.chdir(long)\n"
        "for n in range(1100): os.symlink(long * 2, str(n))\nos.chdir('/workspace')"),
        "paths and links",
    ),
    "a name as of a library": (
        ("import mmap, os, sys\nos.makedirs('usr/lib'); f = open('usr/lib/libc.so.6', 'w+'); f.write('x' * 4096); f.flush()\n"
        "m = mmap.mmap(f.fileno(), 0, mmap.MAP_PRIVATE, 1); f.close()"),
        "laid out",
    ),
    "a child process": ("import os, time\nif not os.fork(): time.sleep(60)", "child processes"),
    "an orphan": (
        "import os, time\nif not os.fork():\n  if os.fork(): os._exit(0)\n  time.sleep(60)\nos.wait()",
        "child processes",
    ),
    "a working directory called deleted": (
        "import os; os.mkdir('d (deleted)'); os.chdir('d (deleted)')", "was removed",
    ),
    "pages that no one may read": (
        LIBC + "m = libc.mmap(None, 1 << 20, 3, 34, -1, 0); ctypes.memset(m, 65, 1 << 20)\n"
        "libc.mprotect(ctypes.c_void_p(m), 1 << 20, 0)",
        "",
    ),
    "zeros without an end": (
        LIBC + "n = (2 << 30) + (1 << 20); m = libc.mmap(None, n, 3, 0x4022, -1, 0)\n"
        "libc.madvise(ctypes.c_void_p(m), ctypes.c_size_t(n), 15)\n"  # MADV_NOHUGEPAGE: a huge page of zeros
        # is no page to compare.  MADV_POPULATE_READ, Linux 5.14:
        "assert libc.madvise(ctypes.c_void_p(m), ctypes.c_size_t(n), 22) == 0",
        "it never wrote|no answer within",  # an emulated host takes longer to compare so much
    ),
    "guard pages": (
        LIBC + "m = libc.mmap(None, 1 << 20, 3, 34, -1, 0)\n"
        "libc.madvise(ctypes.c_void_p(m), ctypes.c_size_t(4096), 102)",  # MADV_GUARD_INSTALL, Linux 6.13
        "cannot be read|^$",
    ),
    "code of its own": (
        LIBC + f"m = libc.mmap(None, 4096, 7, 34, -1, 0); ctypes.memmove(m, {RETURNS_7!r}, {len(RETURNS_7)})\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(m); assert f() == 7",
        "",
    ),
    "written code of a library": (
        LIBC + "at = ctypes.cast(libc.qsort, ctypes.c_void_p).value & ~4095\n"
        "assert libc.mprotect(ctypes.c_void_p(at), 4096, 7) == 0; ctypes.memmove(at, ctypes.string_at(at, 64), 64)\n"
        "assert libc.mprotect(ctypes.c_void_p(at), 4096, 5) == 0",
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_layout_is_copied_whole_or_refused_by_name(sandbox: Sandbox, name: str) -> None:
    make, why = HOSTILE[name]
    with sandbox.session() as source, sandbox.session() as neighbour:
        neighbour.execute("mine = 'kept'")
        made = source.execute(make + "\nx = 41")
        if made.session_lost:
            pytest.skip(f"the attack ended its own session: {made.reason}")
        if not made.ok and "cgroup_memory" not in made.layers:
            pytest.skip(f"without a cgroup a cell is not given so much: {made.error}")
        assert made.ok, made.error
        (branch,) = source.branch()
        assert re.search(why, branch.not_copied), branch.not_copied
        assert branch.forked_by == ("memory" if not branch.not_copied else "replay")
        for each in (source, branch):
            assert each.execute("x + 1").value == 42
        if name == "code of its own":
            assert branch.execute("f()").value == 7
        assert neighbour.execute("mine").value == "kept"
        branch.close()


@pytest.mark.parametrize("seconds", [60, 1.5])
def test_a_session_that_does_not_wait_is_refused(sandbox: Sandbox, seconds: float) -> None:
    """A program sees to it that its process sleeps instead of waiting for the next request."""
    sleep = f"""
import sys, time
def nap(self):
    while True: time.sleep({seconds})
frame = sys._getframe()
while frame:
    if "receiver" in frame.f_locals:
        type(frame.f_locals["receiver"]).receive_whole = nap
    frame = frame.f_back
"""
    with sandbox.session() as source:
        assert source.execute(sleep).ok
        (branch,) = source.branch()
        assert branch.forked_by == "replay"
        assert re.search("does not (stop|wait)", branch.not_copied), branch.not_copied
        assert not source.lost
        branch.close()


@pytest.fixture(scope="module")
def attacked(host: Host) -> Iterator[Sandbox]:
    """Made after the canaries were planted: what the launcher inherits, it inherits with them."""
    with Sandbox(policy=policy_for("standard", host), pool=2) as box:
        yield box


def _parameter(payload: Path) -> object:
    marks = [pytest.mark.needs(NEEDS[case_of(payload)])] if case_of(payload) in NEEDS else []
    return pytest.param(payload, id=case_of(payload), marks=marks)


@pytest.mark.slow
@pytest.mark.needs("shared")
@pytest.mark.parametrize("payload", [_parameter(each) for each in PAYLOADS])
def test_a_payload_stays_inside_a_branch(attacked: Sandbox, host: Host, payload: Path) -> None:
    """As the first request of a branch; the source, a sibling and the launcher outlive it."""
    case = case_of(payload)
    if patterns := PROTECTED.get(case):
        with protecting(attacked.policy, patterns) as protected:
            attack_a_branch(protected, payload, host)
    else:
        attack_a_branch(attacked, payload, host)
    assert host.connections() == 0
    assert host.process.poll() is None


def attack_a_branch(attacked: Sandbox, payload: Path, host: Host) -> None:
    case, launcher = case_of(payload), inspect(attacked).supervisor.generation
    header = f"import os; os.environ.update({settings_for(attacked)!r})\n"
    with attacked.session() as source:
        source.execute("mine = 1", files={"kept": b"mine"})
        branch, sibling = source.branch(2, replay=False)
        with branch, sibling:
            timeout = 7.0 if case in ("RES-14", "RES-15") else None
            result = branch.execute(header + payload.read_text(), timeout=timeout, collect=["*"])
            escaped, detail = verdict_of(result, case)
            assert not escaped, detail
            if escaped is None:
                assert case in ENDED, (
                    result.status, result.reason, result.error, result.stderr[-500:],
                )  # fmt: skip
            assert host.canary not in str(result.to_dict())
            for each in (source, sibling):
                assert each.execute(UNTOUCHED).value == [1, "mine", ["kept"]]
    assert left_of_payloads(attacked) == []
    assert inspect(attacked).supervisor.generation is launcher
