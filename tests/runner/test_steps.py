"""Lists of system calls: how they are laid out, executed and refused, and the loop that forks cells."""

import array
import ctypes
import errno
import mmap
import os
import random
import re
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright import Sandbox
from cellwright.runner import channel
from cellwright.runner.cell.enter import TASKS
from cellwright.runner.kernel import _steps, syscall
from cellwright.runner.kernel.steps import MAY_FAIL, Result, Steps
from cellwright.runner.messages import (
    MOST_AT_ONCE,
    Ended,
    Failed,
    Fork,
    InitMade,
    OpenSocket,
    decode,
    encode,
)
from cellwright.testing import inspect
from tests.conftest import ROOT, policy_named
from tests.forked import exit_code_of

STATUS = 900
FRAME = channel.packets(encode(Fork(into_cgroup=False, cells=1)))[0]


def execute(do: Steps, inputs: tuple[int, ...] = ()) -> tuple[object, ...]:
    return _steps.execute(do.layout(STATUS, 0), inputs)


def test_a_step_takes_what_an_earlier_one_answered(tmp_path: Path) -> None:
    do = Steps()
    file = str(tmp_path / "f").encode()
    opened = do.call("openat", -100, file, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    do.call("write", opened, b"text", 4)
    do.call("close", opened)
    assert execute(do) == ()
    assert (tmp_path / "f").read_bytes() == b"text"


def test_an_input_is_what_the_caller_gives() -> None:
    read, write = os.pipe()
    do = Steps()
    do.call("write", do.input(3), b"x", 1)
    assert execute(do, (-1, -1, -1, write)) == ()
    assert os.read(read, 9) == b"x"
    for each in (read, write):
        os.close(each)


def test_an_input_that_was_not_given_is_no_descriptor() -> None:
    do = Steps()
    do.call("write", do.input(7), b"x", 1, about="nowhere")
    assert execute(do) == (0, errno.EBADF, "write: nowhere")


def test_a_descriptor_is_stored_in_a_structure_and_pointers_lead_to_their_target() -> None:
    ours, theirs = socket.socketpair()
    do = Steps()
    place = do.structure(bytes(16), {8: b"abc"})
    do.store(place, 0, do.input(0))
    do.call("write", do.input(0), place, 16)
    with ours, theirs:
        assert execute(do, (theirs.fileno(),)) == ()
        seen = ours.recv(100)
        assert int.from_bytes(seen[:4], "little") == theirs.fileno()
        assert int.from_bytes(seen[8:], "little") > 4096


def test_a_frame_is_sent_with_its_descriptors() -> None:
    ours, status = channel.pair()
    os.dup2(status.fileno(), STATUS)
    do = Steps()
    do.tell(b"\0frame", do.input(0), about="a pipe")
    read, write = os.pipe()
    try:
        assert execute(do, (read,)) == ()
        frame, (received,) = channel.receive_with_descriptors(ours)
    finally:
        os.close(STATUS)
    os.write(write, b"x")
    assert (frame, os.read(received, 1)) == (b"frame", b"x")
    for each in (read, write, received):
        os.close(each)
    ours.close()
    status.close()


def test_the_first_step_that_is_refused_ends_the_list(tmp_path: Path) -> None:
    do = Steps()
    do.call("close", -1, about="nothing", flags=MAY_FAIL)
    do.call("close", -1, about="nothing")
    do.call("mkdirat", -100, str(tmp_path / "d").encode(), 0o700)
    assert execute(do) == (1, errno.EBADF, "close: nothing")
    assert not (tmp_path / "d").exists()


def test_a_list_ends_where_a_layer_does() -> None:
    do = Steps()
    for layer in ("a", "b", "c"):
        do.layer(layer)
        do.call("getpid")
        do.call("getpid")
    assert [step.layer for step in do.up_to(["a", "b"]).steps] == ["a", "a", "b", "b"]
    assert do.up_to(["d"]).steps == []
    assert len(do.steps) == 6


def test_every_descriptor_is_closed_but_those_that_are_kept() -> None:
    do = Steps()
    kept = os.open("/dev/null", os.O_RDONLY)
    also = os.open("/dev/null", os.O_RDONLY)
    do.keep_only(kept)
    program = do.layout(STATUS, 0)
    read, write = os.pipe()
    os.dup2(write, STATUS)

    def close() -> None:
        _steps.execute(program, (-1, -1, -1, -1, -1, also))
        left = [number for number in range(1024) if _is_open(number)]
        os.write(STATUS, repr(left).encode())

    assert exit_code_of(close) == 0
    stood = [number for number in range(4) if _is_open(number)]
    assert os.read(read, 4096).decode() == repr(sorted({*stood, kept, also, STATUS}))
    for each in (kept, also, read, write, STATUS):
        os.close(each)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_what_has_no_place_in_a_list_is_refused() -> None:
    do = Steps()
    with pytest.raises(ValueError, match="number: must be from 0 to 15, got 16"):
        do.input(16)
    with pytest.raises(ValueError, match="more than 6 arguments"):
        do.call("write", 1, 2, 3, 4, 5, 6, 7)


def test_pages_are_copied_in_one_step_and_those_that_are_not_there_are_passed_over() -> None:
    size = mmap.PAGESIZE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, 4 * size, private) as fresh:
        held = ctypes.c_char.from_buffer(fresh)
        start = ctypes.addressof(held)
        del held
        nowhere, some, region = ((0, size), (start, 3 * size), (start, start + 4 * size))
        do = Steps()
        do.own_pages()
        program, pages = do.layout(STATUS, 0), struct.pack("=4Q", *nowhere, *some)
        assert rehearse(lambda: 0, region) == b""
        copied = rehearse(lambda: len(_steps.execute(program, (), pages)), region)
        assert copied == struct.pack("=2Q", *some)
        assert rehearse(lambda: 0, region) == b""  # pages of the child alone


def rehearse(work: Callable[[], int], region: tuple[int, int], of_files: bool = False) -> bytes:
    near, far = socket.socketpair()
    regions = struct.pack("=2Q", *region)
    return _steps.rehearse(work, near.detach(), far.detach(), regions, of_files)


def test_pages_after_a_range_that_is_refused_are_copied() -> None:
    size = mmap.PAGESIZE
    with mmap.mmap(-1, 4 * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        held = ctypes.c_char.from_buffer(fresh)
        start = ctypes.addressof(held)
        del held
        do = Steps()
        do.own_pages()
        program = do.layout(STATUS, 0)
        pages = struct.pack("=6Q", start, size, 0, size, start + 2 * size, size)
        copied = rehearse(
            lambda: len(_steps.execute(program, (), pages)), (start, start + 4 * size)
        )
        assert copied == pages[:16] + pages[32:]


def test_gathered_memory_keeps_its_addresses_and_content() -> None:
    size = 3 << 20
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, size, private) as one, mmap.mmap(-1, size, private) as other:
        content = os.urandom(size)
        one[:] = other[:] = content
        spans = b""
        for each in (one, other):
            held = ctypes.c_char.from_buffer(each)
            start = ctypes.addressof(held)
            spans += struct.pack("=2Q", start, start + size)
            del held
        moved = _steps.gather(spans)
        assert moved in (0, 2 * size)  # 0: a kernel without huge pages, or with none free
        assert one[:] == other[:] == content
        assert _steps.gather(spans[:16]) in (0, size)
        pid = os.fork()
        if pid == 0:
            one[0] = other[0] = content[0] ^ 1
            os._exit(one[0] == other[0] == content[0] ^ 1 and one[1:] == content[1:])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        assert one[:] == other[:] == content
        assert _steps.gather(b"") == 0


ADVISED = """
import ctypes, mmap, os, sys
from cellwright.runner.kernel import process_calls
size, libc = 4 << 20, ctypes.CDLL(None, use_errno=True)
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
kept = []
for advice in map(int, sys.argv[1:]):
    kept.append(memory := mmap.mmap(-1, size, flags))
    memory[:] = bytes([7]) * size
    place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    if libc.madvise(place, ctypes.c_size_t(size), advice):
        sys.exit("refused")
    kept.append(mmap.mmap(-1, 4096, mmap.MAP_SHARED))  # so that the kernel joins no two
def advised():
    return [line for line in open("/proc/self/smaps") if {"wf", "dc", "dd"} & {*line.split()}]
before = advised()
process_calls.gather_memory()
print(advised() == before)
if os.fork() == 0:
    print(set(kept[0][:]), flush=True)
    os._exit(0)
os.wait()
"""


def test_memory_that_forks_must_not_copy_is_not_gathered() -> None:
    """Preloaded libraries keep the state of random generators, and keys, in such memory: cells that had
    it would draw the same numbers.  Moved memory has no advice of madvise(2) any more."""
    advice = (18, 10, 16)  # MADV_WIPEONFORK, MADV_DONTFORK, MADV_DONTDUMP
    command = [sys.executable, "-c", ADVISED, *map(str, advice)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines() == ["True", "{0}"], ran.stdout + ran.stderr


def test_a_rehearsal_finds_what_its_child_wrote_or_used_of_a_file() -> None:
    size = mmap.PAGESIZE
    with tempfile.TemporaryFile() as file:
        file.write(bytes(4 * size))
        file.flush()
        with mmap.mmap(file.fileno(), 4 * size, mmap.MAP_PRIVATE) as mapped:
            held = ctypes.c_char.from_buffer(mapped)
            start = ctypes.addressof(held)
            del held
            region, third = (start, start + 4 * size), (start + 2 * size, size)

            def write() -> int:
                mapped[2 * size] = 7
                return 0

            def read() -> int:
                return mapped[2 * size]

            assert rehearse(write, region) == struct.pack("=2Q", *third)
            assert rehearse(read, region) == b""
            assert mapped[2 * size] == 0
            used = dict(struct.iter_unpack("=2Q", rehearse(read, region, of_files=True)))
            assert used  # the page, and what the kernel maps around it (fault_around_bytes)
            assert (
                rehearse(lambda: 1 // 0, region, of_files=True) == b""
            )  # no word of one that fails


def test_a_rehearsal_closes_its_channel_here() -> None:
    near, far = socket.socketpair()
    ends = near.detach(), far.detach()
    assert _steps.rehearse(lambda: 0, *ends, b"") == b""
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


SAMPLE_STEPS = 6


def sample() -> bytes:
    do = Steps()
    opened = do.call("openat", -100, b"/dev/null", os.O_CLOEXEC, about="null")
    do.store(do.structure(bytes(16), {8: b"abc"}), 0, opened)
    do.tell(b"frame", opened, about="it")
    do.keep_only(7)
    do.call("close", opened, flags=MAY_FAIL)
    do.own_pages()
    return do.layout(STATUS, 5)


def malformed() -> list[bytes]:
    """Return lists that must be refused: cut at every length, too long, and with each field off."""
    whole = sample()
    found = [whole[:length] for length in range(len(whole))]
    found += [whole + b"\0", b"\0" * 24, b"\xff" * len(whole)]
    for at, value in (
        (0, 0),
        (4, 5000),
        (8, 1 << 30),
        (12, 5000),
        (20, 15),
    ):  # fields of the header
        found.append(whole[:at] + value.to_bytes(4, "little") + whole[at + 4 :])
    step = 24
    # fields of the first step
    for at, value in ((0, 9), (2, 6), (8, 0xF), (8, 1 << 24), (12, 1 << 20)):
        size = 2 if at < 4 else 4
        found.append(
            whole[: step + at] + value.to_bytes(size, "little") + whole[step + at + size :]
        )
    forward = (2).to_bytes(4, "little") + whole[step + 12 : step + 16] + (16).to_bytes(8, "little")
    found.append(whole[: step + 8] + forward + whole[step + 24 :])  # refers to its own result
    store, size = step + 64 + 16, int.from_bytes(whole[8:12], "little")  # its place in the data
    for value in (size - 1, size - 3, size, 1 << 62, (1 << 64) - 1):
        found.append(whole[:store] + value.to_bytes(8, "little") + whole[store + 8 :])
    too_long = Steps()
    too_long.tell(bytes(513), about="more than a packet of the launcher")
    found.append(too_long.layout(STATUS, 5))
    relocation = 24 + SAMPLE_STEPS * 64
    for value in (1 << 30, 0xFFFFFFFF):
        found.append(whole[:relocation] + value.to_bytes(4, "little") + whole[relocation + 4 :])
    return found


def test_a_list_that_is_malformed_is_refused_before_its_first_step() -> None:
    assert _steps.count(sample()) == SAMPLE_STEPS
    for program in malformed():
        with pytest.raises(ValueError, match="a list of steps cannot be loaded"):
            _steps.count(program)
        with pytest.raises(ValueError, match="a list of steps cannot be loaded"):
            _steps.execute(program, ())


@given(st.integers(0, len(sample()) - 1), st.binary(min_size=1, max_size=16))
def test_a_list_with_other_bytes_has_its_steps_or_is_refused(at: int, data: bytes) -> None:
    """It is not executed: other bytes are other system calls."""
    program = sample()
    program = program[:at] + data + program[at + len(data) :]
    try:
        assert _steps.count(program) <= SAMPLE_STEPS
    except ValueError as error:
        assert "cannot be loaded" in str(error)


# The same with a compiler that watches memory and arithmetic

UNDER_SANITIZERS = """
import importlib.util, random, sys
spec = importlib.util.spec_from_file_location("cellwright.runner.kernel._steps", sys.argv[1])
checked = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checked)
sys.path[:0] = sys.argv[2:]
from tests.runner import test_steps as tests
whole = tests.sample()
assert checked.count(whole) == tests.SAMPLE_STEPS
for program in tests.malformed():
    for take in (checked.count, lambda each: checked.execute(each, ())):
        try:
            take(program)
        except ValueError:
            continue
        raise AssertionError(program)
dice = random.Random(7)
for _ in range(20_000):
    torn = bytearray(whole)
    for _ in range(dice.randint(1, 4)):
        torn[dice.randrange(len(torn))] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
    try:
        checked.count(bytes(torn))
    except ValueError:
        pass
tests.talk_nonsense(checked, dice)
do = tests.Steps()
do.keep_only(1 << 31, -(1 << 31), 2**63 - 1, -(2**63), 900, 899)
assert checked.execute(do.layout(tests.STATUS, 0), ()) == ()
print("clean")
"""


MOST_DESCRIPTORS = 150  # more than the reader takes
ROUNDS = 300


def talk_nonsense(checked: Any, dice: random.Random) -> None:
    """Have a launcher read invalid Fork and OpenSocket frames and invalid answers of a nursery: it forks nothing, ends,
    and leaves no descriptor open but its epoll instance."""
    made = b"\0" + encode(InitMade())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(ROUNDS):
        ours, sock = channel.pair()
        nursery, theirs = channel.pair()
        status, cell = channel.pair()
        forever, held = os.pipe()
        # Of more than one cell only without an answer: a launcher that cannot go on leaves the rest open.
        cells = dice.choice((1, 1, 2, MOST_AT_ONCE, MOST_AT_ONCE + 1))
        count = dice.choice((5 * cells, 5 * cells, dice.randint(0, MOST_DESCRIPTORS)))
        frame = FRAME[:-1] + bytes([cells])
        if (
            dice.randrange(3) == 0
        ):  # for a guest outside of cells: refused with a reason, and nothing made
            cells, frame = 1, b"\0" + encode(OpenSocket(dice.randbytes(4)))
            count = dice.choice((2, 2, dice.randint(0, MOST_DESCRIPTORS)))
        send_of(ours, torn(frame, dice), [cell.fileno()] * count)
        answer = torn(made, dice)
        if cells == 1:
            send_of(nursery, answer, [held] * dice.choice((5, dice.randint(0, MOST_DESCRIPTORS))))
        for each in (ours, nursery):
            each.shutdown(socket.SHUT_WR)
        near, far = socket.socketpair()
        rehearsal = (int, near.detach(), far.detach(), struct.pack("=2Q", 0, 1 << 20))
        given = (
            sample(),
            sock.fileno(),
            theirs.fileno(),
            forever,
            (held,) * 3,
            False,
            True,
            b"booted",
        )
        assert checked.serve(*given, rehearsal) is None
        cell.close()
        told = status.recv(1024)
        assert told in (b"", answer) or decode(told[1:], Failed)
        for each in (ours, sock, nursery, theirs, status):
            each.close()
        os.close(forever)
        os.close(held)
    assert len(os.listdir("/proc/self/fd")) == before + ROUNDS


def torn(packet: bytes, dice: random.Random) -> bytes:
    """Return a packet as it is, cut, lengthened or with other bytes."""
    how = dice.randrange(4)
    if how == 1:
        return packet[: dice.randrange(1, len(packet))]
    if how == 2:
        return packet + dice.randbytes(dice.choice((1, 500, 600)))
    if how == 3:
        changed = bytearray(packet)
        changed[dice.randrange(len(changed))] = dice.randrange(256)
        return bytes(changed)
    return packet


def send_of(sock: socket.socket, packet: bytes, descriptors: list[int]) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    sock.sendmsg([packet], [rights] if descriptors else [])


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """steps.c without a warning, and with checks of its own."""
    module = tmp_path_factory.mktemp("steps") / "_steps.so"
    command = [
        "gcc", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-shared", "-fPIC",
        "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
        f"-I{sysconfig.get_path('include')}", str(ROOT / "runner/kernel/steps.c"), "-o", str(module),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return module


@pytest.mark.needs("aarch64_gcc")
def test_it_compiles_for_the_other_architecture(tmp_path: Path) -> None:
    """Debian keeps what a Python was configured with by architecture; both have the same sizes."""
    header = Path(sysconfig.get_config_h_filename())
    of_this = header.parents[1] / f"{sysconfig.get_config_var('MULTIARCH')}/{header.parent.name}"
    found = of_this / header.name
    copy = tmp_path / "aarch64-linux-gnu" / header.parent.name / header.name
    copy.parent.mkdir(parents=True)
    copy.write_text((found if found.is_file() else header).read_text())
    command = [
        "aarch64-linux-gnu-gcc", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{tmp_path}",
        f"-I{sysconfig.get_path('include')}", str(ROOT / "runner/kernel/steps.c"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_list_makes_the_reader_touch_memory_that_is_not_its(checked: Path) -> None:
    libraries = [
        subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    done = subprocess.run(
        [sys.executable, "-I", "-c", UNDER_SANITIZERS, str(checked), str(ROOT), *sys.path],
        capture_output=True, text=True, check=False, timeout=300,
        env={"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-4000:]


# The launcher's loop


@pytest.mark.needs("userns")
@pytest.mark.parametrize(
    ("packet", "more"),
    [
        (FRAME, -1), (FRAME, 1), (FRAME, -100), (FRAME, 200), (FRAME[:-2] + b"\xc3\1", 0), (FRAME[:-1], 0),
        (FRAME + b"\xc2", 0), (FRAME[:-2] + b"\xc0\1", 0), (b"\0", 0), (b"\0" + bytes(60_000), 0),
        (FRAME.replace(b"k", b"m"), 0), (FRAME[:-1] + b"\0", -100), (FRAME[:-1] + b"\2", 0),
        (FRAME[:-1] + b"\xff", 0), (FRAME[:-1] + bytes([MOST_AT_ONCE + 1]), 0),
    ],
    ids=range(15),
)  # fmt: skip
def test_a_frame_that_is_no_fork_ends_the_launcher(packet: bytes, more: int) -> None:
    """The supervisor sends no such thing: whatever it is, no cell comes of it."""
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        launcher = inspect(sandbox).supervisor.generation.launcher
        joins = inspect(sandbox).supervisor.generation.boot.joins
        pidfd = os.pidfd_open(launcher.pids()[2])
        send_of(launcher._sock, packet, [launcher._sock.fileno()] * max(0, TASKS + joins + more))
        assert channel.has_news(pidfd, 20)
        os.close(pidfd)
        assert sandbox.execute("1 + 1").value == 2  # by another launcher


def test_frames_that_c_reads_and_writes_are_those_of_python() -> None:
    """Fork is compared there byte by byte; Failed and Ended are put together there."""
    assert FRAME == b"\0\x93\xa4Fork\xc2\1"
    failed = b"\x93\xa6Failed\xd3" + (5).to_bytes(8, "big") + b"\xd9\x01x"
    assert decode(failed, Failed) == Failed(5, "x")
    one, half = (1).to_bytes(8, "big"), struct.pack(">d", 0.5)
    ended = b"\x95\xa5Ended\xd3" + one + b"\xcb" + half + b"\xcb" + half + b"\xd3" + one
    assert decode(ended, Ended) == Ended(1, 0.5, 0.5, 1)


_CELLS = 50
_MOST_FAULTS = 10  # faults of the launcher for a cell: 4 were measured
_MOST_FAULTS_OF_A_GUEST = 210  # 188 were measured
_MOST_MAPPINGS = (
    110  # 88 with Python's own build of 25 libraries, where 151 were before they were joined
)
# Its code with the constants, what the loader has written and closed, and its variables, in two pieces
# where some are zero at first.
_MOST_OF_A_LIBRARY = 4


@pytest.mark.needs("userns")
def test_the_launcher_writes_hardly_any_page_for_a_cell_and_the_guest_few() -> None:
    """Each page that the launcher writes between two forks is copied once more, and in each guest each
    page that it writes itself."""
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        sandbox.execute("1")
        launcher = inspect(sandbox).supervisor.generation.launcher.pids()[2]
        before = minor_faults(launcher)
        for _ in range(_CELLS):
            sandbox.execute("1")
        after = minor_faults(launcher)
    assert after[0] - before[0] <= _MOST_FAULTS * _CELLS
    assert after[1] - before[1] <= _MOST_FAULTS_OF_A_GUEST * _CELLS


@pytest.mark.needs("userns")
def test_a_fork_copies_few_mappings() -> None:
    """A fork copies each mapping, and the end of a guest removes each. Libraries that no guest uses are not loaded."""
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        maps = sandbox.execute("open('/proc/self/maps').read()").value
    rows = [line.split() for line in maps.splitlines()]
    assert not [row for row in rows if "w" in row[1] and "x" in row[1]]
    libraries = Counter(row[5] for row in rows if len(row) > 5 and ".so" in row[5])
    assert max(libraries.values()) <= _MOST_OF_A_LIBRARY, libraries
    assert len(rows) <= _MOST_MAPPINGS, libraries
    assert not [path for path in libraries if re.search("libz|binascii|fcntl", path)]


@pytest.mark.needs("userns")
def test_the_module_of_tools_is_made_in_the_launcher() -> None:
    """The garbage collector of a guest does not list what the launcher has made (gc.freeze)."""
    program = "import gc, tools\nhere = []\n[any(each is it for each in gc.get_objects()) for it in (tools, here)]"
    with Sandbox(policy=policy_named("strict"), pool=0, tools=[add]) as sandbox:
        assert sandbox.execute(program).value == [False, True]
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        assert "tools" in sandbox.execute("import tools").error


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def minor_faults(pid: int) -> tuple[int, int]:
    """Return those of a process, and of the children that it has waited for (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7]), int(fields[8])


def test_an_index_of_a_result_is_after_the_inputs() -> None:
    assert Steps().call("getpid") == Result(16)


def test_a_system_call_reads_bytes_writes_bytearrays_and_takes_numbers_and_none() -> None:
    how = bytearray(struct.pack("=3Q", os.O_RDONLY | os.O_CLOEXEC, 0, 0))
    opened = syscall("openat2", -100, b"/proc/self/stat", how, len(how))  # AT_FDCWD
    assert os.pread(opened, 100, 0).startswith(str(os.getpid()).encode())
    head, length = bytearray(8), bytearray(8)
    syscall("get_robust_list", 0, head, length)
    assert int.from_bytes(length, "little") == 24  # struct robust_list_head
    assert syscall("close", opened) == 0
    assert syscall("prctl", 3, None, None, None, None) in (0, 1)  # PR_GET_DUMPABLE


def test_a_system_call_that_fails_names_itself_and_what_it_was_about() -> None:
    with pytest.raises(FileNotFoundError, match="chdir there") as caught:
        syscall("chdir", b"/no/such/directory", about="there")
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("arguments", [(), ("1",), (1, 2.0), (1,) * 8])
def test_a_system_call_takes_nothing_else(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="system call"):
        _steps.syscall(*arguments)
    for memory, why in (
        (b"", "bytearray"),
        ("", "bytes-like"),
        (memoryview(b"abc")[::2], "contiguous"),
    ):
        with pytest.raises((TypeError, BufferError), match=why):
            _steps.address(memory)  # type: ignore[arg-type]
