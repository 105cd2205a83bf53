"""Tracing within a cell (`processes.debug`): what it gives, and that it reaches nothing else."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cellwright import Sandbox, SandboxStatus
from cellwright.errors import PauseError
from cellwright.policies.errors import PolicyError
from cellwright.policies.policy import Policy, Processes
from cellwright.runner.listening import cell_listener as tracing
from cellwright.testing import inspect
from tests.conftest import OPTIONAL, policy_named
from tests.escapes.test_payloads import case_of, descendants, verdict_of
from tests.escapes.without import by_number

pytestmark = pytest.mark.skipif("listener" in OPTIONAL, reason="the listener judges attachments")

PAYLOADS = sorted(Path(__file__).with_name("payloads").glob("LAY-*"))
_TRACE = """
import ctypes, os, signal, threading
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ptrace.argtypes, LIBC.ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long
def trace(*arguments):
    return LIBC.ptrace(*arguments) if LIBC.ptrace(*arguments) >= 0 else -ctypes.get_errno()
def seize(pid, options=0):
    return 0 if LIBC.ptrace(0x4206, pid, 0, options) == 0 else -ctypes.get_errno()
TRACEEXIT, WALL = 0x40, 0x40000000
def child(run):
    pid = os.fork()
    if pid == 0:
        run()
        os._exit(0)
    return pid
"""


def debugged() -> Policy:
    policy = policy_named("workshop")
    processes = msgspec.structs.replace(policy.processes, debug=True)
    limits = msgspec.structs.replace(policy.limits, wall_seconds=60.0, memory_bytes=256 << 20)
    return msgspec.structs.replace(policy, processes=processes, limits=limits)


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with Sandbox(policy=debugged(), pool=0) as opened:
        yield opened


def of_cell(box: Sandbox) -> list[int]:
    """Return the processes of cells: what is below the launcher's nursery and no process of ours."""
    box.settle()
    names = {}
    for pid in descendants(box):
        with contextlib.suppress(OSError):
            names[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
    return [pid for pid, name in names.items() if not name.startswith("cell-")]


@pytest.mark.parametrize("case", ["LAY-06", "LAY-07", "LAY-08", "LAY-30"])
@pytest.mark.needs("root")
def test_a_payload_stays_inside(box: Sandbox, case: str) -> None:
    (payload,) = (each for each in PAYLOADS if case_of(each) == case)
    launcher = inspect(box).supervisor.generation
    result = box.execute(payload.read_text())
    assert verdict_of(result, case)[0] is False, verdict_of(result, case)
    if case == "LAY-30" and os.uname().machine == "x86_64":
        assert "traced, unshare: -1" in verdict_of(result, case)[1]  # EPERM
        assert {"ptrace", "unshare"} <= {each.syscall for each in result.violations}
    assert of_cell(box) == []
    assert inspect(box).supervisor.generation is launcher


def test_without_the_setting_nothing_is_traced(workshop: Sandbox) -> None:
    result = workshop.execute(f"{_TRACE}\nseize(child(signal.pause))")
    assert result.value == -1
    (seen,) = result.violations
    assert seen.rule == "seccomp: needs processes.debug = true"
    assert any("processes.debug" in hint for hint in result.hints)


def test_a_child_is_traced_and_its_memory_read(box: Sandbox) -> None:
    result = box.execute(f"""{_TRACE}
text = ctypes.create_string_buffer(b"seen")
pid = child(signal.pause)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
copy = ctypes.create_string_buffer(4)
ours, theirs = Vector(ctypes.addressof(copy), 4), Vector(ctypes.addressof(text), 4)
count = LIBC.process_vm_readv(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
with open(f"/proc/{{pid}}/mem", "rb", buffering=0) as file:
    file.seek(ctypes.addressof(text)); read = file.read(4).decode()
[seize(pid), count, copy.raw.decode(), read]""")
    assert result.value == [0, 4, "seen", "seen"]
    assert result.violations == ()


def test_a_circle_through_others_is_refused(box: Sandbox) -> None:
    """A traces B, B traces C: C may not trace A; nor may B be traced by a parent that it may trace."""
    result = box.execute(f"""{_TRACE}
me = os.getpid()
r, w = os.pipe(); go_r, go_w = os.pipe()
def last():
    os.read(go_r, 1)
    os.write(w, str(seize(me, TRACEEXIT)).encode()); signal.pause()
def middle():
    pid = child(last)
    os.write(w, str(seize(pid, TRACEEXIT)).encode())
    os.read(go_r, 1)
    os.write(w, str(LIBC.ptrace(0, 0, 0, 0)).encode())
    signal.pause()
pid = child(middle)
first = os.read(r, 9).decode()
mine = seize(pid)
os.write(go_w, b"x"); os.write(go_w, b"x")
answers = sorted([os.read(r, 2).decode(), os.read(r, 2).decode()])
os.kill(pid, 9)
[first, mine, answers]""")
    assert result.value[:2] == ["0", 0], result
    assert set("".join(result.value[2])) <= {"-", "1"}


# No option is set: where nothing judges, what is made can be killed.
_EACH_OTHER = f"""{_TRACE}
me = os.getpid()
r, w = os.pipe()
def back():
    os.write(w, str(seize(me)).encode()); signal.pause()
pid = child(back)
answer = os.read(r, 2).decode()
[answer, seize(pid)]"""
_BY_THE_LAUNCHER = f"{_TRACE}\nLIBC.ptrace(0, 0, 0, 0)"


def test_two_processes_do_not_trace_each_other(box: Sandbox) -> None:
    assert box.execute(_EACH_OTHER).value == ["0", -errno.EPERM]


def test_the_launcher_becomes_no_tracer(box: Sandbox) -> None:
    assert box.execute(_BY_THE_LAUNCHER).value == -1


def test_without_the_judgement_the_kernel_attaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing.Tracing, "_why_not", lambda *_: "")
    with Sandbox(policy=debugged(), pool=0) as box:
        assert box.execute(_EACH_OTHER).value == ["0", 0]
        assert box.execute(_BY_THE_LAUNCHER).value == 0


def test_what_a_tracer_stops_at_its_end_ends_with_the_cell(box: Sandbox) -> None:
    """SIGKILL does not pass PTRACE_EVENT_EXIT while the tracer lives."""
    with box.session() as session:
        result = session.execute(f"""{_TRACE}
r, w = os.pipe()
pid = child(signal.pause)
def tracer():
    os.write(w, str(seize(pid, TRACEEXIT)).encode()); signal.pause()
child(tracer)
answer = os.read(r, 2).decode()
os.kill(pid, 9)
while "t (tracing" not in (state := open(f"/proc/{{pid}}/status").read()): os.sched_yield()
answer""")
        assert result.value == "0"
    assert of_cell(box) == []


@pytest.mark.needs("root")
def test_a_guest_that_a_child_traces_ends_as_any_other(box: Sandbox) -> None:
    """The kernel tells the launcher of the end only when the tracer has waited for it, or has ended."""
    launcher = inspect(box).supervisor.generation
    result = box.execute(f"""{_TRACE}
r, w = os.pipe()
me = os.getpid()
def tracer():
    os.write(w, str(seize(me)).encode()); signal.pause()
child(tracer)
assert os.read(r, 2) == b"0"
os._exit(7)""")
    assert (result.status, result.exit_code) == (SandboxStatus.FAILED, 7)
    assert box.execute("1 + 1").value == 2
    assert of_cell(box) == []
    assert inspect(box).supervisor.generation is launcher


def test_a_session_with_a_tracee_freezes_and_is_not_paused(box: Sandbox) -> None:
    with box.session() as session:
        session.execute(f"""{_TRACE}
pid = child(signal.pause)
seize(pid); LIBC.ptrace(0x4207, pid, 0, 0)""")
        assert session.execute("os.waitpid(pid, WALL)[0] == pid").value  # it is stopped
        with pytest.raises(PauseError, match="has child processes"):
            session.pause()
        frozen = session.freeze()
        assert session.execute("LIBC.ptrace(17, pid, 0, 0)").value == 0
        assert frozen or "cgroup_memory" not in box.layers
    assert of_cell(box) == []


def test_debug_needs_what_it_rests_on() -> None:
    with pytest.raises(PolicyError, match=r"processes.debug: needs processes.subprocesses"):
        Sandbox(policy=Policy(processes=Processes(debug=True)))
    policy = Policy(
        processes=Processes(subprocesses=True, debug=True), optional_layers=("listener",)
    )
    with pytest.raises(PolicyError, match=r"processes.debug: needs the layer listener"):
        Sandbox(policy=policy)


def test_what_was_granted_is_forgotten_once_it_has_ended(box: Sandbox) -> None:
    rounds = 2 * tracing._MOST_REMEMBERED
    result = box.execute(f"""{_TRACE}
def traced():
    os._exit(LIBC.ptrace(0, 0, 0, 0))
sum(os.waitpid(child(traced), 0)[1] for _ in range({rounds}))""")
    assert result.value == 0


@pytest.mark.parametrize(
    ("script", "last"),
    [
        pytest.param(
            "strace -f -o t sh -c 'echo traced | cat' && grep -c 'write(1, \"traced' t",
            "2",
            marks=pytest.mark.needs("strace"),
            id="strace",
        ),
        pytest.param(
            "printf '#include <stdio.h>\\nint main(void){puts(\"traced\");}' >a.c && gcc -O0 -fno-builtin a.c -o a && "
            "ltrace -o t ./a && grep -o 'puts(\"traced\")' t",
            'puts("traced")',
            marks=pytest.mark.needs("ltrace", "gcc"),
            id="ltrace",
        ),
        pytest.param(
            "printf 'int g;\\nint main(void)\\n{\\ng = 7;\\nreturn g - 7;\\n}\\n' >a.c && gcc -g a.c -o a && "
            "gdb -q -batch -ex 'watch g' -ex run -ex 'print g' -ex kill a 2>/dev/null | grep '^[$]1'",
            "$1 = 7",
            marks=pytest.mark.needs("gdb", "gcc"),
            id="gdb",
        ),
        pytest.param(
            "sleep 60 & gdb -q -batch -p $! -ex 'print (int) getpid()' -ex detach 2>/dev/null "
            "| grep -c '^[$]1 = '; kill $!",
            "1",
            marks=pytest.mark.needs("gdb"),
            id="gdb attaches",
        ),
        *(
            pytest.param(
                "printf '#include <stdlib.h>\\nchar *p;int main(void){p = malloc(77); p = 0; return 0;}' >l.c && "
                f"gcc -fsanitize={kind} l.c -o l && ./l 2>&1 | grep -o '77 byte(s) leaked'",
                "77 byte(s) leaked",
                marks=pytest.mark.needs("gcc"),
                id=f"LeakSanitizer, {kind}",
            )
            for kind in ("address", "leak")
        ),
    ],
)
def test_a_debugger_works(box: Sandbox, script: str, last: str) -> None:
    result = box.execute(script, "bash")
    assert result.stdout.splitlines()[-1:] == [last], (result.stderr, result.violations)
    assert result.violations == ()


def test_a_table_of_descriptors_that_was_shared_gets_no_record_locks(box: Sandbox) -> None:
    """A lock would outlive the process that is asked for it, and so be counted no more."""
    with box.session() as session:
        result = session.execute(f"""{_TRACE}
import errno, fcntl
file = open("/tmp/a", "w")
def lock():
    try: fcntl.lockf(file, fcntl.LOCK_EX)
    except OSError as error: return error.errno
before = lock()
pid = LIBC.syscall({by_number("clone", "0x800700, 0, 0, 0, 0").partition("(")[2]}
if pid == 0: LIBC._exit(0)
os.waitpid(pid, WALL)
fcntl.flock(file, fcntl.LOCK_EX)
[before, lock() == errno.ENOLCK]""")
        assert result.value == [None, True], result
        assert "LeakSanitizer" in result.violations[-1].rule
