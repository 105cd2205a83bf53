"""The trail: what is written, what nobody can write, and what is left after a bad day."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cellwright import AuditLevel, AuditLog, verify
from cellwright.errors import AuditError
from cellwright.runner.audit import verification as audit_summary
from cellwright.runner.audit.record import GENESIS, RecordForm, parse, span_of
from cellwright.runner.audit.verification import read
from tests.conftest import ROOT
from tests.forked import forked


def filled(path: Path, records: int = 3, **settings: object) -> list[bytes]:
    """Write a trail and return its lines."""
    with AuditLog(path=path, **settings) as log:  # type: ignore[arg-type]
        for number in range(records):
            log.record("test", "event", target=f"t{number}", number=number)
    return path.read_bytes().splitlines(keepends=True)


def test_a_record_is_one_line_of_ascii_in_a_chain(tmp_path: Path) -> None:
    first, second, _ = filled(tmp_path / "a")
    assert first.startswith(b'{"prev":"' + GENESIS + b'","seq":1,')
    assert json.loads(second)["prev"] == json.loads(first)["hash"]
    assert {"time", "monotonic", "trace_id", "span_id", "parent_id"} <= json.loads(first).keys()
    last = json.loads((tmp_path / "a").read_bytes().splitlines()[-1])
    assert verify(tmp_path / "a") == (3, "", (3, last["hash"]), 1)


HOSTILE = [
    "\n",
    "\r",
    "\x1b[2J",
    "\x00",
    "\x7f",
    "\x9b",
    "\u202e",
    "\u2028",
    "\ud800",
    '"}\n{"prev":"',
    "é",
    "😀",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_ends_a_line_or_moves_a_cursor(tmp_path: Path, text: str) -> None:
    with AuditLog(path=tmp_path / "a") as log:
        log.record("c", "a", target=f"x{text}y", span=span_of(text * 3), evil=text, k=[text])
        log.record("c", "b")
    data = (tmp_path / "a").read_bytes()
    lines = data.splitlines()
    assert len(lines) == data.count(b"\n") == 2
    assert all(32 <= byte < 127 for line in lines for byte in line)
    assert verify(tmp_path / "a").ok


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.text(),
    st.dictionaries(
        st.text(), st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.lists(st.text()))
    ),
)
def test_any_text_can_be_recorded(tmp_path: Path, text: str, details: dict[str, object]) -> None:
    path = tmp_path / os.urandom(8).hex()
    reserved = {"target", "allowed", "level", "sandbox_id", "span", "category", "action", "self"}
    with AuditLog(path=path) as log:
        log.record("c", "a", target=text, **{k: v for k, v in details.items() if k not in reserved})  # type: ignore[arg-type]
    assert verify(path).ok
    assert parse(path.read_bytes()).action == "a"


def test_what_is_long_is_cut(tmp_path: Path) -> None:
    with AuditLog(path=tmp_path / "a") as log:
        log.record("c", "a", target="x" * 10**6, big="y" * 10**6, many=["z" * 10**4] * 10**4)
    assert (tmp_path / "a").stat().st_size < 64 * 1024


# changes are seen


def changed(lines: list[bytes]) -> dict[str, list[bytes]]:
    return {
        "a byte changed": [lines[0], lines[1].replace(b'"t1"', b'"t9"'), *lines[2:]],
        "a record taken out": [lines[0], *lines[2:]],
        "two exchanged": [lines[1], lines[0], *lines[2:]],
        "one put in": [lines[0], lines[0], *lines[1:]],
        "the first taken out and renumbered": [
            lines[1].replace(b'"seq":2', b'"seq":1'),
            *lines[2:],
        ],
        "a hash made up": [lines[0][:-10] + b'0000000"}\n', *lines[1:]],
        "an empty line": [lines[0], b"\n", *lines[1:]],
        "garbage": [lines[0], b"\xff\x00\n", *lines[1:]],
        "a torn end": [*lines[:-1], lines[-1][:-5]],
    }


@pytest.mark.parametrize("case", changed([b"", b"", b""]))
def test_a_change_is_found_where_it_is(tmp_path: Path, case: str) -> None:
    lines = filled(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"".join(changed(lines)[case]))
    verdict = verify(tmp_path / "a")
    assert not verdict.ok
    assert verdict.broken.startswith("a, line ")


def test_a_key_is_needed_to_go_on(tmp_path: Path) -> None:
    filled(tmp_path / "a", key=b"secret")
    assert verify(tmp_path / "a", b"secret").ok
    assert not verify(tmp_path / "a").ok
    assert not verify(tmp_path / "a", b"other").ok


def test_a_cut_tail_is_found_by_a_head_that_was_kept(tmp_path: Path) -> None:
    with AuditLog(path=tmp_path / "a") as log:
        log.record("c", "a")
        log.record("c", "b")
        head = log.head
    assert verify(tmp_path / "a", expect=head).ok
    lines = (tmp_path / "a").read_bytes().splitlines(keepends=True)
    (tmp_path / "a").write_bytes(lines[0])
    assert verify(tmp_path / "a").ok  # nothing in the file tells
    assert "missing" in verify(tmp_path / "a", expect=head).broken


# recovery


def test_a_tail_cut_at_any_byte_is_recovered_and_recorded(tmp_path: Path) -> None:
    lines = filled(tmp_path / "whole", 4)
    whole = b"".join(lines)
    begin = len(lines[0])
    for cut in range(begin, len(whole)):
        path = tmp_path / f"cut-{cut}"
        path.write_bytes(whole[:cut])
        good = max(n for n in range(1, 5) if len(b"".join(lines[:n])) <= cut)
        with AuditLog(path=path) as log:
            log.record("c", "after")
        assert verify(path).ok, cut
        actions = [entry.action for entry in read(path)]
        assert actions[:good] == ["event"] * good
        torn = cut != len(b"".join(lines[:good]))
        assert actions[good:] == (["recovery", "after"] if torn else ["after"])
        aside = list(tmp_path.glob(f"cut-{cut}.damaged-*"))
        assert len(aside) == torn
        if torn:
            assert aside[0].read_bytes() == whole[len(b"".join(lines[:good])) : cut]
            aside[0].unlink()
        path.unlink()


@pytest.mark.parametrize("tail", [b"garbage", b"\x00" * 4096, b"\r\n", b"x" * 10**6, b'{"prev":"'])
def test_a_bad_tail_is_put_aside(tmp_path: Path, tail: bytes) -> None:
    filled(tmp_path / "a")
    with (tmp_path / "a").open("ab") as file:
        file.write(tail)
    with AuditLog(path=tmp_path / "a") as log:
        log.record("c", "after")
    assert verify(tmp_path / "a").ok
    assert [entry.action for entry in read(tmp_path / "a")][-2:] == ["recovery", "after"]


WRITER = """
import sys
sys.path[:0] = {paths!r}
from cellwright import AuditLog
log = AuditLog(path={path!r})
print("ready", flush=True)
while True: log.record("c", "a", text="x" * 500)
"""


def test_a_killed_writer_leaves_a_trail_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for _ in range(5):
        script = WRITER.format(paths=[str(ROOT), *sys.path], path=str(path))
        with subprocess.Popen(
            [sys.executable, "-I", "-c", script], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout
            assert writer.stdout.readline() == b"ready\n"
            while path.stat().st_size < 20_000:
                threading.Event().wait(0.001)
            writer.send_signal(signal.SIGKILL)
            writer.wait(60)
        before = path.read_bytes().count(b"\n")
        with AuditLog(path=path) as log:
            log.record("c", "after")
        assert verify(path).ok
        assert len(list(read(path))) >= before


# a bad day


@pytest.mark.needs("root")
def test_a_full_disk_refuses_or_is_said(tmp_path: Path) -> None:
    """In a mount namespace of its own, on a tmpfs of 64 KiB."""
    script = f"""
import os, sys
sys.path[:0] = {[str(ROOT), *sys.path]!r}
from cellwright import AuditLog, Sandbox, verify
from cellwright.errors import AuditError
os.unshare(os.CLONE_NEWNS) if hasattr(os, "unshare") else __import__("ctypes").CDLL(None).unshare(0x20000)
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mount(None, b"/", None, 0x44000, None)
place = {str(tmp_path)!r}.encode()
assert libc.mount(b"tmpfs", place, b"tmpfs", 0, b"size=64k") == 0
path = os.fsdecode(place) + "/a"
log = AuditLog(path=path)
try:
    while True: log.record("c", "a", text="x" * 900)
except AuditError as error:
    print("required:", "No space left" in str(error))
size = os.stat(path).st_size
print("whole lines:", open(path, "rb").read().endswith(b"\\n"), verify(path).ok)
with Sandbox(audit=log, pool=0) as sandbox: pass
""".replace(
        "with Sandbox(audit=log, pool=0) as sandbox: pass",
        """
try:
    Sandbox(audit=log, pool=0)
    print("ran unrecorded")
except AuditError: print("refused")
log.close()
optional = AuditLog(path=path, required=False)
print("kept:", optional.record("c", "b", text="x" * 900))
fill = [name for name in os.listdir(os.fsdecode(place)) if name != "a"]
libc.mount(b"tmpfs", place, b"tmpfs", 32, b"size=256k")
print("kept again:", optional.record("c", "c"))
optional.close()
from cellwright.runner.audit.verification import read
gap = [entry for entry in read(path) if entry.action == "gap"]
print("gap:", len(gap), gap and gap[0].details["records_lost"], verify(path).ok)
""",
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "required: True", "whole lines: True True", "refused", "kept: False", "kept again: True",
        "gap: 1 1 True",
    ], done.stderr  # fmt: skip


def test_a_file_that_is_replaced_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with AuditLog(path=path) as log:
        log.record("c", "before")
        path.rename(tmp_path / "moved")
        log.record("c", "after")
    assert [entry.action for entry in read(path)] == ["replaced", "after"]
    assert verify(tmp_path / "moved").ok
    assert verify(path).ok


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "deleted"])
def test_what_takes_its_place_is_not_written_to(tmp_path: Path, kind: str) -> None:
    path, victim = tmp_path / "a", tmp_path / "victim"
    victim.write_text("mine")
    with AuditLog(path=path) as log:
        log.record("c", "before")
        path.unlink()
        if kind == "symlink":
            path.symlink_to(victim)
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        if kind == "deleted":
            log.record("c", "after")
            assert [entry.action for entry in read(path)] == ["replaced", "after"]
        else:
            with pytest.raises(AuditError):
                log.record("c", "after")
    assert victim.read_text() == "mine"


def test_records_that_another_writer_added_are_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with AuditLog(path=path) as log:
        log.record("c", "before")
        with path.open("ab") as file:
            file.write(b'{"forged":1}\n')
        log.record("c", "after")
    assert [entry.action for entry in read(path)] == ["before", "recovery", "after"]
    assert verify(path).ok


def test_a_second_process_is_turned_away(tmp_path: Path) -> None:
    with AuditLog(path=tmp_path / "a"), pytest.raises(AuditError, match="another process"):
        AuditLog(path=tmp_path / "a")


@pytest.mark.parametrize("path", ["/nowhere/a", "/proc/self/mem/a", "/dev/null"])
def test_a_trail_that_cannot_be_had_is_said(path: str) -> None:
    with pytest.raises(AuditError):
        AuditLog(path=path)


def test_rotation_keeps_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for _ in range(3):
        with AuditLog(path=path, rotate_bytes=2000) as log:
            for number in range(20):
                log.record("c", "a", number=number)
    assert len(list(tmp_path.glob("a.*"))) > 5
    assert verify(path)[:2] == (60, "")
    assert [entry.seq for entry in read(path)] == list(range(1, 61))
    (tmp_path / "a.1").unlink()  # the oldest may go
    assert verify(path).ok
    (tmp_path / "a.3").unlink()  # one from the middle may not
    assert not verify(path).ok


def test_many_threads_write_one_chain(tmp_path: Path) -> None:
    with AuditLog(path=tmp_path / "a") as log:
        threads = [
            threading.Thread(target=lambda: [log.record("c", "a") for _ in range(200)])
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert verify(tmp_path / "a")[:2] == (1600, "")


@pytest.mark.parametrize("durability", ["none", "batched", "every"])
def test_durability_changes_nothing_that_is_written(tmp_path: Path, durability: str) -> None:
    filled(tmp_path / "a", 300, durability=durability)
    assert verify(tmp_path / "a")[:2] == (300, "")


# the seeds' interface


def test_entries_are_filtered_counted_and_exported(tmp_path: Path) -> None:
    heard = []
    log = AuditLog(max_entries=10_000, on_entry=heard.append)
    log.record("file", "read", sandbox_id="abc123", level=AuditLevel.WARNING, allowed=False)
    log.record("file", "write", sandbox_id="abc123")
    log.record("network", "connect", sandbox_id="other", allowed=False)
    assert [
        e.action
        for e in log.get_entries(
            level=AuditLevel.WARNING, category="file", sandbox_id="abc123", limit=100
        )
    ] == ["read"]
    assert [e.action for e in log.get_denied_actions(sandbox_id="abc123")] == ["read"]
    assert [e.action for e in log.get_entries(limit=1)] == ["connect"]
    summary = log.get_summary()
    assert (summary["total_entries"], summary["denied"]) == (3, 2)
    assert len(heard) == 3
    log.export_to_file(tmp_path / "out.jsonl")
    log.export_to_file(tmp_path / "out.jsonl")  # the seed's example, run twice
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]
    log.record(
        "violation", "openat", target="'/etc/shadow'", allowed=False, rule="mount_ns: not shown"
    )
    log.record(
        "violation", "socket", target="AF_INET", allowed=False, rule="seccomp: needs network"
    )
    assert [each.action for each in log.get_entries(category="file")][1:] == ["write", "openat"]


def test_the_summary_names_hosts_and_how_often_each_was_reached_or_refused() -> None:
    log = AuditLog()
    assert "connections" not in log.get_summary()
    for name in ("a.example", "a.example", "b.example"):
        log.record("network", "connection", target=f"{name}:443")
    for target, count in (("x.example", 2), ("y.example 80", 1), ("x.example", 3)):
        log.record("violation", "resolve", target=target, rule="network: no rule", count=count)
    log.record("violation", "openat", target="/etc/shadow", rule="mount_ns: not shown", count=9)
    summary = log.get_summary()
    assert summary["connections"] == {"a.example:443": 2, "b.example:443": 1}
    assert summary["refused_hosts"] == {"x.example": 5, "y.example:80": 1}


def test_the_summary_is_bounded_though_programs_choose_the_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit_summary, "_MOST_COUNTED", 3)
    log = AuditLog()
    for number in range(30):
        log.record("violation", "resolve", target=f"\n{number}", rule="network: x", count=1)
    hosts = log.get_summary()["refused_hosts"]
    assert (len(hosts), hosts["others"]) == (4, 27)
    assert not any("\n" in host for host in hosts)


def test_memory_is_bounded() -> None:
    log = AuditLog(max_entries=5)
    for number in range(20):
        log.record("c", "a", number=number)
    assert [entry.details["number"] for entry in log.get_entries()] == list(range(15, 20))


FORM = RecordForm("tool", "call", "sp\x1bace", ("caller", "number"))


def test_records_of_a_form_are_the_same_in_memory_and_in_a_file(tmp_path: Path) -> None:
    span = span_of("größe\n" * 50)
    with AuditLog(path=tmp_path / "a") as written, AuditLog() as kept:
        for log in (written, kept):
            log.record("c", "first")
            assert log.record_formed(FORM, span, ("\n" * 2000, 7))
            log.record("c", "last")
    assert verify(tmp_path / "a")[0] == 3
    found = [
        [replace(each, time=0.0, monotonic=0.0) for each in log.get_entries()]
        for log in (kept, kept, written)
    ]
    assert found[0] == found[1] == found[2]
    entry = found[0][1]
    assert (entry.seq, entry.target, entry.details["number"]) == (2, "sp\\x1bace", 7)
    assert entry.details["caller"] == "\\n" * 1024 + "..."
    assert (entry.level, entry.allowed, entry.span_id) == (AuditLevel.INFO, True, span.span_id)


def test_what_matters_less_than_the_level_is_not_kept() -> None:
    log = AuditLog(level=AuditLevel.WARNING)
    log.record("c", "a")
    log.record("c", "b", level=AuditLevel.ERROR)
    log.record_formed(FORM, span_of(None), ("x", 1))
    assert [entry.action for entry in log.get_entries()] == ["b"]


def test_ids_of_spans_are_random_and_a_child_of_a_fork_draws_its_own() -> None:
    ids = [span_of(None).span_id for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in ids)
    reading, writing = os.pipe()
    with open(reading) as read, forked(lambda: os.write(writing, span_of(None).span_id.encode())):
        os.close(writing)
        others = read.read()
    assert others not in {span_of(None).span_id for _ in range(1000)}
