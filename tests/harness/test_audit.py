"""The records that sandboxes write into the trail, and the commands that read it."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from cellwright import AuditEntry, AuditLevel, AuditLog, LaunchError, Sandbox, SandboxConfig, verify
from cellwright.errors import AuditError
from cellwright.harness.cli.options import audit_of
from cellwright.runner.audit.record import Span, span_of
from cellwright.runner.audit.verification import as_html, as_svg, as_text, read, tree_of
from cellwright.testing import inspect
from tests.conftest import OPTIONAL, SHARED, policy_named

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def recorded(log: AuditLog) -> list[str]:
    return [f"{entry.category}.{entry.action}" for entry in log.get_entries()]


def test_every_execution_has_a_start_and_one_end() -> None:
    log = AuditLog()
    ends = {
        "1 + 1": "ok",
        "raise ValueError": "error",
        "import time; time.sleep(60)": "timeout",
        "import os; os.write(3, b'garbage'); __import__('time').sleep(60)": "killed",
        "x = bytearray(10**9)": "oom",
    }
    if "cgroup_memory" in OPTIONAL:
        ends.popitem()
    with Sandbox(policy=policy_named("strict"), pool=0, audit=log) as sandbox:
        for code, end in ends.items():
            result = sandbox.execute(code, timeout=0.5 if end == "timeout" else None)
            mine = [
                e
                for e in log.get_entries(category="execution")
                if e.details["execution_id"] == result.execution_id
            ]
            assert [entry.action for entry in mine] == ["start", end]
            assert {entry.trace_id for entry in mine} == {result.trace_id}
    assert recorded(log)[0] == "policy.compiled"


def test_a_refused_request_is_recorded_and_nothing_ran() -> None:
    log = AuditLog()
    with Sandbox(policy=policy_named("strict"), pool=0, audit=log) as sandbox:
        sandbox.execute("")
    assert recorded(log) == ["policy.compiled", "validation.refused"]
    assert [entry.target for entry in log.get_denied_actions()] == ["the source is empty"]


def test_violations_are_recorded_under_the_execution_that_made_them() -> None:
    log = AuditLog()
    with Sandbox(policy=policy_named("strict"), pool=0, audit=log) as sandbox:
        result = sandbox.execute(
            "import ctypes; ctypes.CDLL(None).mount(b'x\\n{}', b'y', b'z', 0, 0)"
        )
    (violation,) = log.get_entries(category="violation")
    assert (violation.action, violation.allowed, violation.details["count"]) == ("mount", False, 1)
    assert violation.target == "'x\\\\n{}' 'y' 'z' 0x0" or "\n" not in violation.target
    (start, _) = log.get_entries(category="execution")
    assert violation.parent_id == start.span_id
    assert violation.trace_id == result.trace_id


def test_the_program_itself_is_not_written_down(tmp_path: Path) -> None:
    with (
        AuditLog(path=tmp_path / "a") as log,
        Sandbox(policy=policy_named("strict"), pool=0, audit=log) as box,
    ):
        box.execute(
            "secret = 'hunter2'; print(secret); secret",
            inputs={"x": "hunter2"},
            env={"Y": "hunter2"},
        )
    assert b"hunter2" not in (tmp_path / "a").read_bytes()


def test_a_trace_is_taken_up_and_passed_on() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        result = sandbox.execute("1", trace_id=PARENT)
        assert result.trace_id == "0af7651916cd43dd8448eb211c80319c"
        assert result.traceparent
        assert result.traceparent.startswith("00-0af7651916cd43dd8448eb211c80319c-")
        assert sandbox.audit
        start = sandbox.audit.get_entries(category="execution")[0]
        assert start.parent_id == "b7ad6b7169203331"
        assert result.traceparent.split("-")[2] == start.span_id
        for broken in (
            "00-" + "0" * 32 + "-b7ad6b7169203331-01",
            PARENT.replace("00-", "ff-", 1),
            PARENT + "-x",
            "mine",
        ):
            assert sandbox.execute("1", trace_id=broken).trace_id == broken
        fresh = sandbox.execute("1")
        assert fresh.trace_id != result.trace_id
        assert fresh.traceparent


def test_a_lost_execution_is_recorded_as_lost() -> None:
    log = AuditLog()
    with Sandbox(policy=policy_named("strict"), pool=0, audit=log) as sandbox:
        run = sandbox.start("import time\nprint('up', flush=True)\ntime.sleep(60)")
        next(run.output())
        os.kill(inspect(sandbox).launcher_pids().nursery, signal.SIGKILL)
        with pytest.raises(LaunchError):
            run.result()
    assert recorded(log)[-2:] == ["execution.start", "execution.lost"]


def test_a_required_trail_that_cannot_be_written_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    log = AuditLog(path=path)
    with Sandbox(policy=policy_named("strict"), pool=0, audit=log) as sandbox:
        path.unlink()
        path.mkdir()
        with pytest.raises(AuditError):
            sandbox.execute("open('/workspace/ran', 'w')")


def test_an_optional_trail_that_cannot_be_written_is_said_in_the_result(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with (
        AuditLog(path=path, required=False) as log,
        Sandbox(policy=policy_named("strict"), pool=0, audit=log) as sandbox,
    ):
        assert sandbox.execute("1").audited
        path.unlink()
        path.mkdir()
        result = sandbox.execute("1 + 1")
        assert (result.value, result.audited) == (2, False)
        path.rmdir()
        assert sandbox.execute("1").audited
    assert any(entry.action == "gap" for entry in read(path))


def test_a_program_that_runs_ends_as_usual_where_its_end_cannot_be_written(tmp_path: Path) -> None:
    path, away = tmp_path / "a", tmp_path / "away"

    def meddle(*_: object) -> None:
        path.rename(away)
        path.mkdir()

    with AuditLog(path=path) as log, Sandbox(policy=policy_named("strict"), audit=log) as sandbox:
        result = sandbox.execute("print(); 42", on_output=meddle)
        assert (result.value, result.audited) == (42, False)
        with pytest.raises(AuditError):
            sandbox.execute("1")
        path.rmdir()
        away.rename(path)
        assert sandbox.execute("1").audited
    entries = list(read(path))
    assert [entry.action for entry in entries if entry.category == "execution"] == [
        "start",
        "ok",
    ] * 2
    assert [entry.action for entry in entries if entry.category == "log"] == ["gap"]
    assert verify(path).ok


def test_a_start_that_was_not_recorded_is_said_though_the_end_is(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with (
        AuditLog(path=path, required=False) as log,
        Sandbox(policy=policy_named("strict"), audit=log, pool=0) as sandbox,
    ):
        path.unlink()
        path.mkdir()
        assert not sandbox.execute("print()", on_output=lambda *_: path.rmdir()).audited
    assert sorted(entry.action for entry in read(path)) == ["gap", "ok", "replaced"]


def test_a_refused_request_that_could_not_be_recorded_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with (
        AuditLog(path=path, required=False) as log,
        Sandbox(policy=policy_named("strict"), audit=log, pool=0) as sandbox,
    ):
        assert sandbox.execute("").audited
        log.close()
        assert not sandbox.execute("").audited


def test_a_sandbox_refused_for_its_trail_leaves_no_process(tmp_path: Path) -> None:
    log = AuditLog(path=tmp_path / "a")
    log.close()
    before = psutil.Process().children(recursive=True)
    with pytest.raises(AuditError):
        Sandbox(policy=policy_named("strict"), audit=log)
    assert psutil.Process().children(recursive=True) == before


def test_a_callback_that_raises_takes_no_end_away() -> None:
    def raising(entry: AuditEntry) -> None:
        if entry.category == "violation":
            raise ArithmeticError

    log = AuditLog(on_entry=raising)
    with (
        Sandbox(policy=policy_named("strict"), audit=log, pool=0) as sandbox,
        pytest.raises(ArithmeticError),
    ):
        sandbox.execute("import ctypes; ctypes.CDLL(None).ptrace(16, 1, 0, 0)")
    assert [entry.action for entry in log.get_entries(category="execution")] == ["start", "ok"]


def test_a_trace_that_is_not_sampled_stays_so() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        for given, passed_on in (("00", "00"), ("01", "01"), ("03", "01"), ("fe", "00")):
            result = sandbox.execute("1", trace_id=PARENT[:-2] + given)
            assert result.traceparent
            assert result.traceparent.rpartition("-")[2] == passed_on


@pytest.mark.needs("shared")
@pytest.mark.parametrize("case", ["NOTIF-07", "OUT-03", "PROTO-06"])
def test_payloads_that_imitate_records_forge_none(tmp_path: Path, case: str) -> None:
    (payload,) = (SHARED / "attacks").glob(f"{case}_*.py")
    path = tmp_path / "a"
    header = "import os; os.environ.update(SBXT_INSIDE='1', SBXT_TIMEOUT_S='3')\n"
    with AuditLog(path=path) as log, Sandbox(policy=policy_named("strict"), audit=log) as sandbox:
        result = sandbox.execute(header + payload.read_text())
    assert verify(path).ok
    entries = list(read(path))
    kinds = [entry.category for entry in entries]
    seen = len(result.violations)
    assert kinds == ["policy", "execution", *["violation"] * seen, "execution"]
    assert seen or case != "NOTIF-07"
    assert {entry.trace_id for entry in entries[1:]} == {result.trace_id}
    assert path.read_bytes().isascii()
    assert path.read_bytes().count(b"\n") == len(entries)


def test_a_configuration_says_whether_and_how_much() -> None:
    optional = {"optional_layers": OPTIONAL}
    with Sandbox(SandboxConfig(enable_audit=False, **optional), pool=0) as sandbox:
        assert sandbox.audit is None
        assert sandbox.execute("1 + 1").value == 2
        assert sandbox.execute("").reason == "validation"
    with Sandbox(SandboxConfig(audit_level=AuditLevel.WARNING, **optional), pool=0) as sandbox:
        assert sandbox.audit
        sandbox.execute("1")
        assert recorded(sandbox.audit) == []
        sandbox.execute("raise ValueError")
        assert recorded(sandbox.audit) == ["execution.error"]


def test_a_trace_is_a_tree(tmp_path: Path) -> None:
    with (
        AuditLog(path=tmp_path / "a") as log,
        Sandbox(policy=policy_named("strict"), pool=0, audit=log) as sandbox,
    ):
        result = sandbox.execute("import ctypes; ctypes.CDLL(None).ptrace(16, 1, 0, 0)")
        sandbox.execute("1")
    (root,) = tree_of(read(tmp_path / "a"), result.trace_id or "")
    assert [entry.action for entry in root.entries] == ["start", "ok"]
    assert [child.entries[0].action for child in root.children] == ["ptrace"]
    text = as_text([root])
    assert [line.split()[2].partition("(")[0] for line in text.splitlines()] == ["ms"] * 0 + [
        "execution.start", "violation.ptrace", "execution.ok",
    ]  # fmt: skip
    assert "REFUSED" in text
    picture = as_svg([root])
    assert picture.count("<circle") == 3
    assert "<script" not in as_html([root], "<script>")


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cellwright", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def trail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit") / "a.jsonl"
    optional = [each for layer in OPTIONAL for each in ("--optional", layer)]
    for code in ("1", "import ctypes; ctypes.CDLL(None).ptrace(16, 1, 0, 0)"):
        assert cli("run", "--audit", str(path), *optional, "-c", code).returncode == 0
    return path


def test_the_command_verifies(trail: Path, tmp_path: Path) -> None:
    done = cli("audit", "verify", str(trail))
    assert (done.returncode, done.stdout.split(",")[0]) == (0, "intact: 7 records")
    broken = tmp_path / "b"
    broken.write_bytes(trail.read_bytes().replace(b"ptrace", b"ptraXe", 1))
    done = cli("audit", "verify", str(broken))
    assert done.returncode == 1
    assert "BROKEN after 5 records: b, line 6" in done.stdout
    told = json.loads(cli("audit", "verify", "--json", str(trail)).stdout)
    assert (told["ok"], told["records"]) == (True, 7)
    head = f"{told['head'][0]}:{told['head'][1]}"
    assert cli("audit", "verify", "--expect", head, str(trail)).returncode == 0
    assert cli("audit", "verify", "--expect", "7:" + "0" * 64, str(trail)).returncode == 1
    assert cli("audit", "verify", "--expect", "x", str(trail)).returncode == 2
    assert cli("audit", "verify", "/nowhere").returncode == 2


def test_the_command_shows_the_last_records(trail: Path) -> None:
    lines = cli("audit", "tail", "-n", "2", str(trail)).stdout.splitlines()
    assert len(lines) == 2
    assert "violation.ptrace REFUSED" in lines[0]
    entries = [
        json.loads(line) for line in cli("audit", "tail", "--json", str(trail)).stdout.splitlines()
    ]
    assert [entry["seq"] for entry in entries] == list(range(1, 8))


def test_the_command_shows_no_tricks_of_a_forged_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with AuditLog(path=path) as log:
        log.record("c", "a", target="x", span=Span("t", "s"))
    forged = path.read_bytes().replace(b'"target":"x"', b'"target":"\\u001b[2J\\u202e"')
    path.write_bytes(forged)
    for command in (("tail",), ("trace", "t"), ("trace", "--svg", "t")):
        words = cli("audit", command[0], str(path), *command[1:]).stdout
        assert "\\x1b[2J\\u202e" in words
        assert "\x1b" not in words


def test_the_command_finds_a_trace_by_the_name_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with AuditLog(path=path) as log:
        log.record("c", "found", span=span_of("größe\n" * 50))
    assert "c.found" in cli("audit", "trace", str(path), "größe\n" * 50).stdout


def test_the_command_takes_a_key_with_the_newline_of_an_editor(trail: Path, tmp_path: Path) -> None:
    with AuditLog(path=tmp_path / "a", key=b" secret ") as log:
        log.record("c", "a")
    (tmp_path / "key").write_bytes(b" secret \n")
    arguments = ("audit", "verify", "--key-file", str(tmp_path / "key"))
    assert cli(*arguments, str(tmp_path / "a")).returncode == 0
    assert cli(*arguments, str(trail)).returncode == 1


def test_the_command_says_where_a_trail_begins(trail: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"".join(trail.read_bytes().splitlines(keepends=True)[2:]))
    assert "begins with record 3" in cli("audit", "verify", str(tmp_path / "a")).stdout


def test_the_command_counts(trail: Path) -> None:
    assert json.loads(cli("audit", "summary", "--json", str(trail)).stdout)["denied"] == 1
    assert "denied         1" in cli("audit", "summary", str(trail)).stdout


def test_the_command_draws_a_trace(trail: Path) -> None:
    trace = msgspec.json.decode(trail.read_bytes().splitlines()[-1])["trace_id"]
    assert "violation.ptrace" in cli("audit", "trace", str(trail), trace).stdout
    assert cli("audit", "trace", "--svg", str(trail), trace).stdout.startswith("<svg")
    assert cli("audit", "trace", "--html", str(trail), trace).stdout.startswith("<!doctype html>")
    assert cli("audit", "trace", str(trail), "nowhere").returncode == 2


def test_a_trace_is_found_by_each_id_that_tail_shows(trail: Path) -> None:
    records = [msgspec.json.decode(line) for line in trail.read_bytes().splitlines()]
    start = next(each for each in records if each["action"] == "start")
    trace, execution = start["trace_id"], start["details"]["execution_id"]
    tail = cli("audit", "tail", str(trail)).stdout
    assert f"trace={trace}" in tail
    assert f"execution_id={execution}" in tail
    whole = cli("audit", "trace", str(trail), trace).stdout
    for name in (execution, trace[:8], execution[:8]):
        assert cli("audit", "trace", str(trail), name).stdout == whole
    last = cli("audit", "trace", str(trail), "last").stdout
    assert "violation.ptrace" in last
    assert last != whole
    assert cli("audit", "trace", str(trail), "abc").returncode == 2


def test_the_beginning_of_several_ids_is_refused(tmp_path: Path) -> None:
    with AuditLog(path=tmp_path / "a") as log:
        for name in ("aaaa1", "aaaa2"):
            log.record("c", "a", span=Span(name, "s"))
    done = cli("audit", "trace", str(tmp_path / "a"), "aaaa")
    assert (done.returncode, "'aaaa' begins the ids of 2 traces" in done.stderr) == (2, True)


def test_a_page_and_a_picture_show_every_text_whole(tmp_path: Path) -> None:
    with AuditLog(path=tmp_path / "a") as log:
        log.record("c", "a", target="x" * 900 + "end", span=Span("t", "s"))
    roots = tree_of(read(tmp_path / "a"), "t")
    assert "overflow-wrap:anywhere" in as_html(roots, "t")
    assert "xend" in as_html(roots, "t")
    width = int(as_svg(roots).partition('width="')[2].partition('"')[0])
    assert width > 8 * 900


def test_the_command_follows_a_trail(trail: Path, tmp_path: Path) -> None:
    path = tmp_path / "a"
    with AuditLog(path=path) as log:
        log.record("c", "before")
        command = [sys.executable, "-m", "cellwright", "audit", "tail", "-f", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as done:
            assert done.stdout is not None
            assert "c.before" in done.stdout.readline()
            log.record("c", "later")
            assert "c.later" in done.stdout.readline()
            done.terminate()


def test_a_trail_under_load_has_one_end_for_every_start(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    path = tmp_path / "a"
    with (
        AuditLog(path=path) as log,
        Sandbox(policy=policy_named("strict"), audit=log) as sandbox,
        ThreadPoolExecutor(8) as pool,
    ):
        ids = [
            result.execution_id for result in pool.map(lambda _: sandbox.execute("1"), range(100))
        ]
    assert verify(path).ok
    entries = [entry for entry in read(path) if entry.category == "execution"]
    for execution in ids:
        assert [e.action for e in entries if e.details["execution_id"] == execution] == [
            "start",
            "ok",
        ]


def test_the_trail_of_a_command_is_in_its_file_and_not_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with audit_of(argparse.Namespace(audit=path)) as log:
        assert log is not None
        log.record("execution", "start", execution_id="a")
        assert log.get_entries() == []
    assert [entry.action for entry in read(path)] == ["start"]
