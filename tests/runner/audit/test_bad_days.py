"""A trail when the disk is full, when another process meddles with it, when a writer dies."""

import contextlib
import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellwright import AuditLog, PolicyError, verify
from cellwright.errors import AuditError
from cellwright.runner.audit.record import LONGEST_LINE
from cellwright.runner.audit.verification import lines_of, read
from tests.conftest import ROOT
from tests.forked import exit_code_of


def filled(path: Path, records: int = 3, **settings: object) -> list[bytes]:
    """Write a trail and return its lines."""
    with AuditLog(path=path, **settings) as log:  # type: ignore[arg-type]
        for number in range(records):
            log.record("test", "event", target=f"t{number}")
    return path.read_bytes().splitlines(keepends=True)


def actions(path: Path) -> list[str]:
    return [entry.action for entry in read(path)]


def own(path: Path, action: str) -> dict[str, object]:
    (entry,) = [entry for entry in read(path) if entry.action == action]
    return entry.details


@contextlib.contextmanager
def nothing_there(path: Path) -> Iterator[None]:
    """Have a directory where the trail was, and the trail back afterwards."""
    away = path.with_name("away")
    path.rename(away)
    path.mkdir()
    yield
    path.rmdir()
    away.rename(path)


# opened files


def test_a_file_that_is_no_trail_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("mine\n")
    with pytest.raises(AuditError, match="not an audit trail"):
        AuditLog(path=path)
    assert path.read_text() == "mine\n"
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_link_is_not_followed_even_to_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "victim").touch()
    (tmp_path / "a").symlink_to(tmp_path / "victim")
    with pytest.raises(AuditError, match="symbolic links"):
        AuditLog(path=tmp_path / "a")


@pytest.mark.parametrize("content", [b"\0" * 100, b'{"prev"', b'{"prev":"00', b"\0"])
def test_what_a_power_cut_leaves_of_a_first_record_is_put_aside(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "a").write_bytes(content)
    with AuditLog(path=tmp_path / "a") as log:
        log.record("c", "after")
    assert actions(tmp_path / "a") == ["recovery", "after"]
    assert verify(tmp_path / "a").ok


@pytest.mark.parametrize("other", [None, b"other"])
def test_another_key_is_refused_and_puts_nothing_aside(tmp_path: Path, other: bytes | None) -> None:
    filled(tmp_path / "a", key=b"secret")
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(AuditError, match="does not fit the key"):
        AuditLog(path=tmp_path / "a", key=other)
    assert (tmp_path / "a").read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("wrong", [{"key": b""}, {"key": "text"}, {"durability": "often"}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(PolicyError):
        AuditLog(**wrong)  # type: ignore[arg-type]


def test_a_closed_log_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    required = AuditLog(path=tmp_path / "a")
    optional = AuditLog(path=tmp_path / "b", required=False)
    for log in (required, optional):
        log.close()
        log.close()
    with pytest.raises(AuditError, match="closed"):
        required.record("c", "a")
    assert not optional.record("c", "a")
    assert not required.record("c", "a", owed=True)


def test_a_forked_process_cannot_write_the_trail_of_its_parent(tmp_path: Path) -> None:
    log = AuditLog(path=tmp_path / "a")
    log.record("c", "parent")

    def write() -> None:
        with pytest.raises(AuditError):
            log.record("c", "child")
        log.close()

    assert exit_code_of(write) == 0
    log.record("c", "parent")
    log.close()
    assert actions(tmp_path / "a") == ["parent", "parent"]


# a disk that does not take it

SMALL_DISK = """
import ctypes, os, sys
sys.path[:0] = {paths!r}
from cellwright import AuditLog, verify
from cellwright.errors import AuditError
from cellwright.runner.audit.verification import read
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0  # CLONE_NEWNS
assert libc.mount(None, b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
place = {place!r}
def disk(options, flags=0):
    assert libc.mount(b"tmpfs", place.encode(), b"tmpfs", flags, options.encode()) == 0
def why(attempt):
    try: return attempt()
    except AuditError as error: return str(error).partition("\\n")[0].rpartition(": ")[2]
path = place + "/a"
"""
REMOUNT, READ_ONLY = 32, 1


def on_a_small_disk(place: Path, script: str) -> list[str]:
    begin = SMALL_DISK.format(paths=[str(ROOT), *sys.path], place=str(place))
    command = [sys.executable, "-c", begin + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.needs("root")
def test_a_disk_without_room_for_a_file_is_told(tmp_path: Path) -> None:
    script = """
disk("nr_inodes=1")
print(why(lambda: AuditLog(path=path)))
disk("", 1)
print(why(lambda: AuditLog(path=path)))
"""
    assert on_a_small_disk(tmp_path, script) == ["No space left on device", "Read-only file system"]


@pytest.mark.needs("root")
def test_a_disk_that_is_full_while_rotating_costs_no_record(tmp_path: Path) -> None:
    script = """
disk("nr_inodes=2")  # its root and one file
log = AuditLog(path=path, rotate_bytes=1000)
while (said := why(lambda: log.record("c", "a"))) is True: pass
print(said)
print(why(lambda: log.record("c", "a")))
disk("nr_inodes=9", 32)
print(log.record("c", "b"))
log.close()
print(sorted(os.listdir(place)), verify(path).ok)
print([entry.action for entry in read(path)])
"""
    assert on_a_small_disk(tmp_path, script) == [
        "No space left on device", "No space left on device", "True", "['a', 'a.1'] True",
        "['a', 'a', 'a', 'gap', 'b']",
    ]  # fmt: skip


@pytest.mark.needs("root")
def test_a_damaged_end_is_not_cut_off_before_it_is_copied(tmp_path: Path) -> None:
    script = """
disk("size=64k")
with AuditLog(path=path) as log: log.record("c", "before")
garbage = b"x" * 20_000
with open(path, "ab") as file: file.write(garbage)
size = os.path.getsize(path)
with open(place + "/full", "wb", 0) as file:
    try:
        while True: file.write(b"x" * 4096)
    except OSError: pass
print(why(lambda: AuditLog(path=path)))
print(os.path.getsize(path) == size, sorted(os.listdir(place)))
os.unlink(place + "/full")
with AuditLog(path=path) as log: log.record("c", "after")
(aside,) = [name for name in os.listdir(place) if name != "a"]
print(open(place + "/" + aside, "rb").read() == garbage)
print([entry.action for entry in read(path)], verify(path).ok)
"""
    assert on_a_small_disk(tmp_path, script) == [
        "No space left on device", "True ['a', 'full']", "True",
        "['before', 'recovery', 'after'] True",
    ]  # fmt: skip


LIMITED = """
import resource, sys
sys.path[:0] = {paths!r}
from cellwright import AuditLog, verify
from cellwright.errors import AuditError
from cellwright.runner.audit.verification import read
path = {path!r}
log = AuditLog(path=path)
log.record("c", "a", text="x" * 200)
size = log._trail._file.size
for room in range(340):  # a line is a few bytes longer
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, -1))
    try: log.record("c", "a", text="x" * 200); print("written with", room)
    except AuditError as error: assert "File too large" in str(error) or "No space" in str(error), error
    data = open(path, "rb").read()
    assert len(data) == size and verify(path).ok, room
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
log.record("c", "b")
print([(entry.action, entry.seq, entry.details.get("records_lost")) for entry in read(path)], verify(path).ok)
"""


def test_a_line_that_fits_by_half_is_taken_back_whole(tmp_path: Path) -> None:
    """At every byte of a line; the kernel's own limit on a file's size cuts it."""
    code = LIMITED.format(paths=[str(ROOT), *sys.path], path=str(tmp_path / "a"))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not done.stderr
    assert done.stdout.splitlines() == ["[('a', 1, None), ('gap', 2, 340), ('b', 3, None)] True"]


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_what_the_kernel_answered_is_told_and_the_record_is_not_there(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with AuditLog(path=tmp_path / "a", durability="every") as log:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, broken)
            with pytest.raises(AuditError, match="Input/output error"):
                log.record("c", "start")
            assert (tmp_path / "a").read_bytes() == b""
        log.record("c", "next")
    assert actions(tmp_path / "a") == ["gap", "next"]


def test_what_is_owed_comes_before_the_next_record(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with AuditLog(path=path) as log:
        log.record("c", "start")
        with nothing_there(path):
            assert not log.record("c", "end", owed=True)
            with pytest.raises(AuditError, match="Is a directory"):
                log.record("c", "refused")
        assert actions(path) == ["start"]
        log.record("c", "next")
    assert actions(path) == ["start", "gap", "end", "next"]
    assert own(path, "gap") == {"records_lost": 1}
    assert verify(path).ok


def test_what_is_owed_is_written_on_closing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with AuditLog(path=path) as log:
        log.record("c", "start")
        with nothing_there(path):
            log.record("c", "end", owed=True)
    assert actions(path) == ["start", "end"]


def test_only_so_much_is_owed_and_the_rest_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with AuditLog(path=path) as log:
        log.record("c", "start")
        with nothing_there(path):
            for _ in range(1500):
                log.record("c", "end", owed=True)
    assert own(path, "gap") == {"records_lost": 1500 - 1024}
    assert actions(path).count("end") == 1024


# somebody meddles


def test_numbers_go_on_where_the_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with AuditLog(path=path) as log:
        for _ in range(5):
            log.record("c", "before")
        head = log.head
        path.unlink()
        log.record("c", "after")
    assert [entry.seq for entry in read(path)] == [6, 7]
    gone = own(path, "replaced")
    assert gone == {"records_missing": 5, "seq_before": 5, "hash_before": head[1]}
    assert verify(path)[1:2] + verify(path)[3:] == ("", 6)


def test_a_file_that_others_rotate_goes_on_in_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with AuditLog(path=path) as log:
        log.record("c", "before")
        path.rename(tmp_path / "a.1")
        log.record("c", "after")
    assert actions(path) == ["before", "after"]
    assert verify(path)[:2] == (2, "")


def test_a_tail_that_is_cut_while_we_write_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with AuditLog(path=path) as log:
        for _ in range(5):
            log.record("c", "before")
        lines = path.read_bytes().splitlines(keepends=True)
        os.truncate(path, len(b"".join(lines[:3])))
        log.record("c", "after")
    assert actions(path) == ["before"] * 3 + ["replaced", "after"]
    assert own(path, "replaced")["records_missing"] == 2
    assert verify(path).ok


def test_a_file_that_never_stays_the_same_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cellwright.runner.audit.file import AuditFile

    log = AuditLog(path=tmp_path / "a")
    monkeypatch.setattr(AuditFile, "_is_as_we_left_it", lambda _: False)
    with pytest.raises(AuditError, match="keeps changing"):
        log.record("c", "a")


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*", "a?.b"])
def test_a_name_may_hold_what_a_pattern_would(tmp_path: Path, name: str) -> None:
    filled(tmp_path / name, 10, rotate_bytes=500)
    for other in (".²", ".01", ".0", ".x", ".1.gz"):
        (tmp_path / f"{name}{other}").write_text("not ours")
    assert verify(tmp_path / name)[:2] == (10, "")


def test_damage_in_an_old_file_costs_the_growing_one_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    filled(path, 10, rotate_bytes=1200)
    before = path.read_bytes()
    assert before
    newest = max(tmp_path.glob("a.*"), key=lambda each: int(each.suffix[1:]))
    os.truncate(newest, newest.stat().st_size - 20)
    with AuditLog(path=path) as log:
        log.record("c", "after")
    assert path.read_bytes().startswith(before)
    assert newest.name in verify(path).broken


def test_a_writer_killed_between_two_files_leaves_one_trail(tmp_path: Path) -> None:
    filled(tmp_path / "a", 3)
    (tmp_path / "a").rename(tmp_path / "a.1")
    assert verify(tmp_path / "a")[:2] == (3, "")
    filled(tmp_path / "a", 1)
    assert verify(tmp_path / "a")[:2] == (4, "")


def test_a_beginning_that_was_cut_shows_in_the_number_of_the_first(tmp_path: Path) -> None:
    lines = filled(tmp_path / "a", 5)
    (tmp_path / "a").write_bytes(b"".join(lines[2:]))
    verdict = verify(tmp_path / "a")
    assert (verdict.ok, verdict.records, verdict.first) == (True, 3, 3)


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path) -> None:
    lines = filled(tmp_path / "a", 2)
    with (tmp_path / "a").open("ab") as file:
        file.truncate(2**40)  # sparse
    verdict = verify(tmp_path / "a")
    assert (verdict.records, verdict.broken) == (2, "a, line 3: it is longer than a record can be")
    with (tmp_path / "a").open("rb") as file:
        assert max(len(line) for line in itertools.islice(lines_of(file), 4)) == LONGEST_LINE
    os.truncate(tmp_path / "a", len(b"".join(lines)))


def test_wherever_a_trail_is_cut_or_changed_the_line_is_named(tmp_path: Path) -> None:
    """At every byte: what is before that line holds, and it does not."""
    whole = b"".join(filled(tmp_path / "a", 3))
    path = tmp_path / "a"
    for at in range(len(whole)):
        line = whole[:at].count(b"\n")
        path.write_bytes(whole[:at])
        verdict = verify(path)
        torn = bool(at) and whole[at - 1 : at] != b"\n"
        assert (verdict.records, verdict.ok) == (line, not torn), at
        if torn:
            assert f"line {line + 1}: it is torn" in verdict.broken, at
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        verdict = verify(path)
        if (
            line
        ):  # a first line that begins elsewhere may be that of a trail whose oldest files are gone
            assert verdict.records == line, at
        assert f"line {line + 1}: " in verdict.broken, at


NESTED_LINES = """
import sys, threading
sys.path[:0] = {paths!r}
from cellwright import AuditLog, verify
from cellwright.errors import AuditError
from cellwright.runner.audit.verification import read
def look():
    assert "line 1" in verify({path!r}).broken
    assert list(read({path!r})) == []
    try:
        AuditLog(path={path!r})
    except AuditError as error:
        print(error.what.endswith("is not an audit trail"))
threading.stack_size(256 * 1024)
thread = threading.Thread(target=look)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("line", [b"[" * 60_000, b'{"x":' + b"[" * 60_000, b'{"x":' * 10_000])
def test_a_line_that_nests_is_no_record_and_crashes_nothing(tmp_path: Path, line: bytes) -> None:
    """Decoded, it would be the end of a process that looks from a thread with a small stack."""
    (tmp_path / "a").write_bytes(line + b"\n")
    script = NESTED_LINES.format(paths=[str(ROOT), *sys.path], path=str(tmp_path / "a"))
    command = [sys.executable, "-I", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stderr, done.stdout, done.returncode) == ("", "True\n", 0)


def test_many_long_texts_still_make_one_bounded_line(tmp_path: Path) -> None:
    with AuditLog(path=tmp_path / "a") as log:
        log.record("c", "a", **{f"k{n}": "\U0001f600" * 2000 for n in range(64)})  # type: ignore[arg-type]
        log.record("\n" * 500, "\x1b" * 500, target="\u202e" * 9999)
    assert max(map(len, (tmp_path / "a").read_bytes().splitlines())) < LONGEST_LINE
    assert own(tmp_path / "a", "a") == {"details_left_out": 64}
    assert verify(tmp_path / "a").ok


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.integers(0, 5000),
    st.integers(0, 3000),
    st.one_of(st.binary(max_size=50), st.sampled_from([b"\r", b"\0", b"\n", 0, 1, 4])),
)
def test_whatever_is_changed_what_was_before_it_stays(
    tmp_path: Path, place: int, length: int, what: bytes | int
) -> None:
    path = tmp_path / os.urandom(8).hex()
    lines = filled(path, 6)
    whole = b"".join(lines)
    at = len(lines[0]) + place % (len(whole) - len(lines[0]))
    put = lines[what] if isinstance(what, int) else what
    changed = whole[:at] + put + whole[at + length :]
    path.write_bytes(changed)
    same = (here == there for here, there in zip(whole, changed, strict=False))
    good = whole[: sum(itertools.takewhile(bool, same))].count(b"\n")
    with AuditLog(path=path) as log:
        log.record("c", "after")
    entries = list(read(path))
    assert verify(path).ok
    assert [entry.target for entry in entries[:good]] == [f"t{n}" for n in range(good)]
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    kept = path.read_bytes()
    aside = b"".join(each.read_bytes() for each in tmp_path.glob(f"{path.name}.damaged-*"))
    assert kept[: len(b"".join(lines[:good]))] + aside == changed  # not a byte is gone


# a writer dies

SUPERVISOR = """
import sys
sys.path[:0] = {paths!r}
from cellwright import AuditLog, Sandbox
from tests.conftest import policy_named
with AuditLog(path={path!r}) as log, Sandbox(policy=policy_named("strict"), audit=log, pool=0) as box:
    box.execute("1", trace_id="first")
    box.execute("print('up', flush=True); import time; time.sleep(60)", trace_id="second",
                on_output=lambda stream, data: print(data.decode(), flush=True))
"""


def test_a_program_that_ran_when_its_supervisor_was_killed_is_recorded_as_lost(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a"
    script = SUPERVISOR.format(paths=[str(ROOT), *sys.path], path=str(path))
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as supervisor:
        assert supervisor.stdout
        assert supervisor.stdout.readline() == b"up\n"
        supervisor.send_signal(signal.SIGKILL)
    for _ in range(2):  # said once
        AuditLog(path=path).close()
    ends = [(e.trace_id, e.action) for e in read(path) if e.category == "execution"]
    assert ends == [("first", "start"), ("first", "ok"), ("second", "start"), ("second", "lost")]
    start, lost = [entry for entry in read(path) if entry.trace_id == "second"]
    assert lost.details["execution_id"] == start.details["execution_id"]
    assert lost.span_id == start.span_id
    assert verify(path).ok


def test_no_text_of_a_guest_looks_like_the_end_of_an_execution(tmp_path: Path) -> None:
    path = tmp_path / "a"
    forged = '","category":"execution","action":"ok","span_id":"0123456789abcdef"'
    with AuditLog(path=path) as log:
        from cellwright.runner.audit.record import Span

        log.record("execution", "start", span=Span("t", "0123456789abcdef"), execution_id="e")
        log.record("violation", "open", target=forged, text=forged)
    AuditLog(path=path).close()
    assert actions(path) == ["start", "open", "lost"]
    raw = path.read_bytes().splitlines()[1]
    assert not re.search(rb'[^\\]","category":"execution"', raw)
    assert json.loads(raw)["target"] == forged
