"""Workspaces that outlive their cells: what is kept, what is refused, and who may have one when."""

import fcntl
import io
import os
import signal
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cellwright import (
    BusyError,
    PolicyError,
    Sandbox,
    SandboxStatus,
    SessionSettings,
    WorkspaceError,
    Workspaces,
)
from cellwright.harness.sandbox.workspaces import workspace_files as workspace_files
from cellwright.policies.policy import MIB, Limits
from cellwright.results import Executable
from cellwright.runner.cells.workspace import read_file
from cellwright.runner.sessions.events import SessionEvents
from cellwright.runner.sessions.session_cell import SessionCell
from cellwright.testing import inspect
from tests.conftest import ROOT, open_descriptors, policy_named, soon

WRITE = "open('f', 'w').write('here')"
READ = "open('f').read()"


@pytest.fixture
def store(tmp_path: Path) -> Workspaces:
    return Workspaces(tmp_path / "kept", wait_seconds=0.2)


@pytest.fixture
def sandbox(strict: Sandbox, store: Workspaces) -> Iterator[Sandbox]:
    before = inspect(strict).replace_workspaces(store)
    yield strict
    inspect(strict).replace_workspaces(before)


# What is kept


def test_files_are_there_in_the_next_call_and_in_another_sandbox(
    sandbox: Sandbox, store: Workspaces
) -> None:
    made = sandbox.execute(
        "import os\nos.makedirs('d/e')\nopen('d/e/\u00fc', 'wb').write(bytes(range(256)))",
        workspace="mine",
    )
    assert made.workspace is not None
    assert (made.workspace.state, made.workspace.size_bytes, made.workspace.files) == (
        "saved", 256, 1,
    )  # fmt: skip
    with Sandbox(policy=policy_named("strict"), pool=0, workspaces=store.directory) as other:
        read = other.execute("list(open('d/e/\u00fc', 'rb').read())", workspace="mine")
    assert read.value == list(range(256))
    assert read.workspace is not None
    assert read.workspace.state == "unchanged"
    assert read.files == ()
    assert "FileNotFoundError" in str(sandbox.execute("open('d/e/\u00fc')").error)


def test_other_languages_have_them_too(standard: Sandbox, tmp_path: Path) -> None:
    before = inspect(standard).replace_workspaces(Workspaces(tmp_path / "kept"))
    try:
        standard.execute("printf 'echo hi' > run.sh; chmod +x run.sh", "bash", workspace="mine")
        result = standard.execute("./run.sh; cat run.sh", "sh", workspace="mine")
        assert result.stdout == "hi\necho hi"
    finally:
        inspect(standard).replace_workspaces(before)


def test_a_file_stays_executable_and_no_other_right_is_kept(
    sandbox: Sandbox, store: Workspaces
) -> None:
    code = "import os\nfor n, mode in (('x', 0o4711), ('r', 0o666)):\n    open(n, 'w').close()\n    os.chmod(n, mode)"
    assert sandbox.execute(code, workspace="mine").ok
    modes = "import os\n[os.stat(n).st_mode & 0o7777 for n in ('x', 'r')]"
    assert sandbox.execute(modes, workspace="mine").value == [0o700, 0o644]
    assert isinstance(store.read("mine", "x"), Executable)
    assert sandbox.execute(modes, files={"x": Executable(b"1"), "r": b""}).value == [0o700, 0o644]


@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("1 / 0", SandboxStatus.FAILED),
        ("import os\nos._exit(3)", SandboxStatus.FAILED),
        ("while True: pass", SandboxStatus.TIMEOUT),
        ("import os\nos.write(3, b'garbage')", SandboxStatus.KILLED),
    ],
)
def test_what_is_there_is_kept_however_a_program_ends(
    sandbox: Sandbox, store: Workspaces, then: str, status: SandboxStatus
) -> None:
    result = sandbox.execute(f"{WRITE}\n{then}", workspace="mine", timeout=2)
    assert result.status is status
    assert store.read("mine", "f") == b"here"


@pytest.mark.needs("cgroup")
def test_a_program_that_is_out_of_memory_leaves_its_files(
    sandbox: Sandbox, store: Workspaces
) -> None:
    assert sandbox.execute(f"{WRITE}\nbytearray(1 << 30)", workspace="mine").reason == "memory"
    assert store.read("mine", "f") == b"here"


def test_nothing_runs_any_more_when_files_are_taken(sandbox: Sandbox) -> None:
    """So that what is saved is what was there at one moment."""
    writer = "import os, threading\nn = os.open('n', os.O_WRONLY | os.O_CREAT)\ndef write():\n    number = 0\n    while True:\n        number += 1\n        os.pwrite(n, b'%09d' % number, 0)\nthreading.Thread(target=write).start()"
    with sandbox.session() as session:
        session.execute(writer)
        held = session.cell._held
        moving = {read_file(held.cell.workspace, "n", 9) for _ in range(3000)}
        workspace = held.workspace_at_rest()
        resting = {read_file(workspace, "n", 9) for _ in range(3000)}
        assert (len(moving) > 1, len(resting)) == (True, 1)


def test_a_refused_program_touches_nothing(sandbox: Sandbox, store: Workspaces) -> None:
    assert sandbox.execute("", workspace="mine").workspace is None
    assert store.list() == ()


def test_an_empty_workspace_is_not_made_and_one_that_was_emptied_is(
    sandbox: Sandbox, store: Workspaces
) -> None:
    sandbox.execute("1", workspace="mine")
    assert store.list() == ()
    sandbox.execute(WRITE, workspace="mine")
    sandbox.execute("import os\nos.unlink('f')", workspace="mine")
    assert (store.list(), store.files("mine")) == (("mine",), ())


def test_clean_removes_it_once_a_program_completes(sandbox: Sandbox, store: Workspaces) -> None:
    failed = sandbox.execute(f"{WRITE}\n1 / 0", workspace="mine", clean=True)
    assert failed.workspace is not None
    assert failed.workspace.state == "saved"
    done = sandbox.execute(READ, workspace="mine", clean=True)
    assert done.workspace is not None
    assert (done.value, done.workspace.state, os.listdir(store.directory)) == (
        "here",
        "removed",
        [],
    )
    with pytest.raises(PolicyError, match="clean: there is no workspace"):
        sandbox.execute("1", clean=True)


def test_files_of_a_call_take_the_place_of_those_of_the_same_path(
    sandbox: Sandbox, store: Workspaces
) -> None:
    sandbox.execute(WRITE, workspace="mine")
    assert sandbox.execute(READ, workspace="mine", files={"f": "given"}).value == "given"
    assert store.read("mine", "f") == b"given"
    with pytest.raises(PolicyError, match="is also given as a file"):
        sandbox.execute("1", workspace="mine", files={"f/g": ""})


# What is refused


def test_nothing_is_saved_beyond_the_quota_and_the_result_says_so(
    sandbox: Sandbox, store: Workspaces
) -> None:
    sandbox.execute(WRITE, workspace="mine")
    store.max_bytes, store.max_files = 1000, 3
    large = sandbox.execute("open('g', 'wb').write(bytes(997))", workspace="mine")
    many = sandbox.execute("for n in range(3): open(str(n), 'w')", workspace="mine")
    for result, why in ((large, "1001 bytes, at most 1000"), (many, "4 files, at most 3")):
        assert result.ok
        assert result.workspace is not None
        assert result.workspace.state == "refused"
        assert why in result.workspace.why
    assert [file.path for file in store.files("mine")] == ["f"]
    assert sandbox.execute("open('g', 'wb').write(bytes(996))", workspace="mine").workspace.state == "saved"  # type: ignore[union-attr]  # fmt: skip
    with pytest.raises(WorkspaceError, match="1001 bytes, at most 1000"):
        store.write("mine", "g", bytes(997))
    assert store.size("mine") == 1000


def test_the_caps_of_the_cell_are_the_kernels_while_a_program_runs(
    sandbox: Sandbox, store: Workspaces
) -> None:
    full = sandbox.execute("for n in 'fg': open(n, 'wb').write(bytes(33 << 20))", workspace="mine")
    assert "No space left" in str(full.error)


def test_a_workspace_that_does_not_go_into_a_cell_is_said_before_it_runs(
    store: Workspaces, sandbox: Sandbox
) -> None:
    store.write("mine", "f", bytes(5000))
    small = policy_named("strict", limits=Limits(workspace_bytes=4096))
    with (
        Sandbox(policy=small, pool=0, workspaces=store) as tight,
        pytest.raises(
            PolicyError, match="together larger than the workspace, which has 4096 bytes"
        ),
    ):
        tight.execute("1", workspace="mine")
    assert store.size("mine") == 5000


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("open('f', 'w').truncate(1 << 24)", None),
        (
            "open('f', 'w').truncate(60 << 20)\nopen('g', 'w').truncate(60 << 20)",
            "bytes, at most",
        ),
        ("import os\nopen(os.fsencode('f') + b'\\xff', 'w')", "a name that is not UTF-8"),
        ("import os\nos.makedirs('/'.join(map(str, range(40))))", "more than 32 levels"),
        (
            "import os\nfor _ in range(20):\n    os.mkdir('d' * 250)\n    os.chdir('d' * 250)\nopen('f', 'w')",
            "a path of more than 4084 bytes",
        ),
    ],
)
def test_what_cannot_be_told_whole_is_not_told_in_part(
    sandbox: Sandbox, store: Workspaces, code: str, why: str | None
) -> None:
    sandbox.execute("open('before', 'w').write('1')", workspace="mine")
    kept = sandbox.execute(code, workspace="mine").workspace
    assert kept is not None
    assert kept.state == ("refused" if why else "saved"), kept
    assert str(why or "") in kept.why
    assert ("f" in [file.path for file in store.files("mine")]) is (why is None)


@pytest.mark.parametrize("length", [255, 1024, 1025, 4084])
def test_what_was_saved_can_be_put_into_a_cell_again(
    sandbox: Sandbox, store: Workspaces, length: int
) -> None:
    """A path that may be saved and not be given would keep its workspace shut for ever."""
    code = f"""
import os
directories, rest = divmod({length} - 1, 200)
path = "/".join(["d" * 199] * directories + ["f" * (rest + 1)])
os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
open(path, "w").write("here")
len(path)"""
    made = sandbox.execute(code, workspace="mine")
    assert made.value == length
    assert made.workspace
    assert made.workspace.state == "saved"
    ((path, size),) = ((file.path, file.size_bytes) for file in store.files("mine"))
    assert (len(path), size) == (length, 4)
    again = sandbox.execute("open(path).read()", inputs={"path": path}, workspace="mine")
    assert again.value == "here"
    with sandbox.session(workspace="mine") as session:
        assert session.download(path) == b"here"
        session.restore(session.snapshot())
    store.write("mine", "f", b"beside it")


def test_only_regular_files_are_kept_and_no_link_is_followed(
    sandbox: Sandbox, store: Workspaces
) -> None:
    code = f"import os\n{WRITE}\nos.symlink('/etc/passwd', 'l')\nos.symlink('/', 'd')\nos.mkfifo('p')\nos.mkdir('empty')"
    assert sandbox.execute(code, workspace="mine").ok
    assert [file.path for file in store.files("mine")] == ["f"]


# What lies on the disk


def test_it_is_an_archive_of_the_user_alone(store: Workspaces) -> None:
    store.write("mine", "d/f", "here")
    path = store.directory / "mine.tar"
    assert os.listdir(store.directory) == ["mine.tar"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["d/f"]


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(WorkspaceError, match="others may write"):
        Workspaces(tmp_path).write("mine", "f", "")


def _foreign() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../../out"))
    return data.getvalue()


def _flipped(at: int) -> object:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE = {
    "cut at a header": lambda data: data[:2048],
    "cut within": lambda data: data[:-1],
    "more at the end": lambda data: data + b"\0" * 512,
    "empty": lambda data: b"",
    "foreign": lambda data: _foreign(),
    "a bit of the seal": _flipped(600),
    "a bit of a name": _flipped(1024),
    "a bit of content": _flipped(1540),
    "a bit of padding": _flipped(-1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_was_damaged_is_never_guessed_at(store: Workspaces, sandbox: Sandbox, damage: object) -> None:  # fmt: skip
    for name in "fg":
        store.write("mine", name, "here" * 10)
    path = store.directory / "mine.tar"
    whole = path.read_bytes()
    path.write_bytes(damaged := damage(whole))  # type: ignore[operator]
    for attempt in (
        lambda: store.files("mine"),
        lambda: store.write("mine", "h", ""),
        lambda: sandbox.execute("1", workspace="mine"),
        lambda: sandbox.session(workspace="mine"),
    ):
        with pytest.raises(WorkspaceError, match="is damaged, or not a workspace"):
            attempt()
    assert path.read_bytes() == damaged
    assert store.list() == ("mine",)
    path.write_bytes(whole)
    assert store.read("mine", "g") == b"here" * 10


def test_a_save_that_fails_leaves_the_old_one_and_nothing_else(
    store: Workspaces, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("mine", "f", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(workspace_files.os, "fsync", full)
        with pytest.raises(WorkspaceError, match="cannot write .*: No space left on device"):
            sandbox.execute(WRITE, workspace="mine")
    assert os.listdir(store.directory) == ["mine.tar"]
    assert store.read("mine", "f") == b"old"


def test_what_a_killed_writer_left_is_neither_seen_nor_kept(store: Workspaces) -> None:
    store.write("mine", "f", "old")
    (store.directory / ".mine.new").write_bytes(b"half")
    assert store.list() == ("mine",)
    assert store.read("mine", "f") == b"old"
    store.write("mine", "f", "new")
    assert os.listdir(store.directory) == ["mine.tar"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a.b", "-a", "a\n", "\u00fc", "x" * 65, 5])
def test_what_is_no_name_is_refused(store: Workspaces, sandbox: Sandbox, name: str) -> None:
    with pytest.raises(PolicyError, match="workspace: invalid name"):
        sandbox.execute("1", workspace=name)
    with pytest.raises(PolicyError, match="workspace: invalid name"):
        store.files(name)


def test_what_is_not_there_is_said(store: Workspaces) -> None:
    for attempt in (store.files, store.size, store.remove):
        with pytest.raises(WorkspaceError, match="workspace 'mine' not found"):
            attempt("mine")
    store.write("mine", "f", "")
    for attempt_file in (store.read, store.remove):
        with pytest.raises(WorkspaceError, match="has no file 'g'"):
            attempt_file("mine", "g")
    with pytest.raises(PolicyError, match="is not a plain relative path"):
        store.write("mine", "../g", "")
    with pytest.raises(PolicyError, match="is also given as a file"):
        store.write("mine", "f/g", "")
    store.remove("mine", "f")
    assert store.files("mine") == ()
    store.remove("mine")
    assert (store.list(), os.listdir(store.directory)) == ((), [])


@pytest.mark.parametrize(
    "wrong",
    [{"max_bytes": -1}, {"max_bytes": 1 << 40}, {"max_files": 50_000}, {"wait_seconds": "1"}],
)
def test_quotas_that_make_no_sense_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(PolicyError):
        Workspaces(tmp_path, **wrong)  # type: ignore[arg-type]


def test_the_usual_place_is_in_the_users_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert Workspaces().directory == tmp_path / "cellwright" / "workspaces"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Workspaces().directory == tmp_path / ".local/state/cellwright/workspaces"


# One at a time


def test_calls_in_one_workspace_are_one_after_the_other(
    sandbox: Sandbox, store: Workspaces
) -> None:
    store.wait_seconds = 30.0
    store.write("mine", "n", "0")
    count = "n = int(open('n').read())\nopen('n', 'w').write(str(n + 1))"
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: sandbox.execute(count, workspace="mine"), range(12)))
    assert all(result.ok for result in results)
    assert store.read("mine", "n") == b"12"
    assert os.listdir(store.directory) == ["mine.tar"]


def test_waiting_too_long_for_a_workspace_raises_busy(store: Workspaces, sandbox: Sandbox) -> None:
    with store.open("mine"):
        with pytest.raises(BusyError, match=r"'mine' is in use, and was not released within 0.2 s"):
            sandbox.execute("1", workspace="mine")
        assert sandbox.execute("1", workspace="another").ok
    assert sandbox.execute("1", workspace="mine").ok


def test_waiting_for_a_workspace_can_be_cancelled(store: Workspaces, sandbox: Sandbox) -> None:
    store.wait_seconds = 60.0
    with store.open("mine"):
        run = sandbox.start("1", workspace="mine")
        run.cancel()
        assert run.result().status is SandboxStatus.CANCELLED


def test_a_process_that_is_killed_gives_it_back(store: Workspaces) -> None:
    code = f"from cellwright import Workspaces\nwith Workspaces({str(store.directory)!r}).open('mine'):\n    print('up', flush=True)\n    input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        with pytest.raises(BusyError):
            store.write("mine", "f", "")
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    store.wait_seconds = 5.0
    store.write("mine", "f", "here")
    assert os.listdir(store.directory) == ["mine.tar"]


def test_a_lock_on_an_unlinked_file_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiting process may have opened the file that the last holder unlinks, while a third makes another."""
    path, real = tmp_path / ".mine.lock", fcntl.flock

    def late(lock: int, operation: int) -> None:
        path.unlink()
        path.touch()
        real(lock, operation)

    monkeypatch.setattr(workspace_files.fcntl, "flock", late)
    assert workspace_files.try_lock(tmp_path, "mine") is None


# Sessions


def test_a_session_is_kept_when_it_is_closed_and_when_asked(
    sandbox: Sandbox, store: Workspaces
) -> None:
    store.write("mine", "before", "1")
    with sandbox.session(workspace="mine") as session:
        assert session.workspace is None
        session.execute(f"{WRITE}\nopen('before').read()")
        assert session.save().state == "saved"
        assert store.read("mine", "f") == b"here"
        session.execute("open('f', 'w').write('later')")
        with pytest.raises(BusyError):
            sandbox.execute("1", workspace="mine")
    assert session.workspace is not None
    assert (session.workspace.state, session.workspace.files) == ("saved", 2)
    assert sandbox.execute(READ, workspace="mine").value == "later"


def test_a_session_that_is_closed_while_it_runs_is_kept(
    sandbox: Sandbox, store: Workspaces
) -> None:
    session = sandbox.session(workspace="mine")
    run = session.start(f"{WRITE}\nprint('up', flush=True)\nwhile True: pass")
    next(run.output())
    session.close()
    assert store.read("mine", "f") == b"here"


@pytest.mark.parametrize(
    "end", ["import os\nos._exit(1)", "import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass"]
)  # fmt: skip
def test_a_session_that_is_lost_is_kept(sandbox: Sandbox, store: Workspaces, end: str) -> None:
    session = sandbox.session(workspace="mine")
    session.execute(WRITE)
    lost = session.execute(end, timeout=1.5)
    assert lost.session_lost
    assert lost.workspace is not None
    assert lost.workspace.state == "saved"
    assert store.read("mine", "f") == b"here"
    session.close()


@pytest.mark.needs("cgroup")
def test_a_session_that_is_out_of_memory_is_kept(sandbox: Sandbox, store: Workspaces) -> None:
    session = sandbox.session(workspace="mine")
    assert session.execute(f"{WRITE}\nbytearray(1 << 30)").reason == "memory"
    assert store.read("mine", "f") == b"here"


def test_a_session_that_is_evicted_is_kept(store: Workspaces) -> None:
    settings = SessionSettings(alive=1, evict=True)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=settings, workspaces=store) as box:
        session = box.session(workspace="mine")
        session.execute(WRITE)
        box.session(workspace="other")
        assert session.lost
        assert store.read("mine", "f") == b"here"
        assert box.execute(READ, workspace="mine").value == "here"


def test_sessions_are_kept_when_their_sandbox_closes_and_when_they_expire(
    store: Workspaces,
) -> None:
    settings = SessionSettings(idle_seconds=0.3)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=settings, workspaces=store) as box:
        expired = box.session(workspace="expired")
        expired.execute(WRITE)
        assert soon(lambda: expired.workspace is not None)
    with Sandbox(policy=policy_named("strict"), pool=0, workspaces=store) as box:
        box.session(workspace="closed").execute(WRITE)
    assert store.list() == ("closed", "expired")
    assert os.listdir(store.directory).count("closed.tar") == 1
    assert len(os.listdir(store.directory)) == 2


def test_closing_a_session_raises_if_its_workspace_cannot_be_saved(
    sandbox: Sandbox, store: Workspaces
) -> None:
    store.max_files = 1
    session = sandbox.session(workspace="mine")
    session.execute(f"{WRITE}\nopen('g', 'w')")
    with pytest.raises(WorkspaceError, match="2 files, at most 1"):
        session.save()
    with pytest.raises(WorkspaceError, match="not saved: .*2 files, at most 1"):
        session.close()
    assert session.workspace is not None
    assert session.workspace.state == "refused"
    assert (store.list(), os.listdir(store.directory)) == ((), [])


def test_clean_removes_the_workspace_of_a_session_that_is_closed(
    sandbox: Sandbox, store: Workspaces
) -> None:
    store.write("mine", "f", "here")
    with sandbox.session(workspace="mine", clean=True) as session:
        assert session.execute(READ).value == "here"
    assert os.listdir(store.directory) == []


def test_a_name_of_a_session_leads_to_one_in_the_same_workspace(sandbox: Sandbox) -> None:
    with sandbox.session("agent", workspace="mine") as session:
        assert sandbox.session("agent", workspace="mine") is session
        assert sandbox.session("agent") is session
        with pytest.raises(PolicyError, match="does not use 'other'"):
            sandbox.session("agent", workspace="other")
    with sandbox.session() as session, pytest.raises(PolicyError, match="no named workspace"):
        session.save()


def test_a_fork_has_the_files_and_keeps_nothing(sandbox: Sandbox, store: Workspaces) -> None:
    store.write("mine", "f", "here")
    with sandbox.session(workspace="mine") as session:
        with session.fork() as branch:
            assert branch.execute(f"open('g', 'w')\n{READ}").value == "here"
        assert branch.workspace is None
    assert [file.path for file in store.files("mine")] == ["f"]


def test_a_workspace_that_cannot_be_laid_leaves_no_session(
    store: Workspaces, sandbox: Sandbox
) -> None:
    store.write("mine", "f", bytes(5 * MIB))
    limits = Limits(workspace_bytes=6 * MIB, workspace_inodes=8)
    for number in range(20):
        store.write("many", str(number), "")
    with Sandbox(policy=policy_named("strict", limits=limits), pool=0, workspaces=store) as tight:
        with pytest.raises(WorkspaceError, match="No space left"):
            tight.session(workspace="many")
        tight.session(workspace="mine").close()
    assert len(store.files("many")) == 20
    assert sorted(os.listdir(store.directory)) == ["many.tar", "mine.tar"]


# Beside the rest


def test_the_trail_says_what_became_of_it(sandbox: Sandbox, store: Workspaces) -> None:
    assert sandbox.audit is not None
    result = sandbox.execute(WRITE, workspace="mine")
    store.max_bytes = 1
    with pytest.raises(WorkspaceError), sandbox.session(workspace="mine") as session:
        session.execute("open('g', 'w').write('much')")
    told = [each for each in sandbox.audit.get_entries(category="file") if each.target == "mine"]
    assert [(each.action, each.allowed) for each in told[-2:]] == [("saved", True), ("refused", False)]  # fmt: skip
    assert told[-2].details["execution_id"] == result.execution_id
    assert told[-1].details["session_id"] == session.id


def test_a_call_without_a_workspace_imports_and_opens_nothing_of_it(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom cellwright import Sandbox\nfrom tests.conftest import policy_named\n"
        "with Sandbox(policy=policy_named('strict'), pool=0) as box: box.execute('1')\n"
        "named = [name for name in sys.modules if 'workspaces.' in name]\n"
        "print([name for name in named if not name.endswith('.archive')])"  # tar, of sessions too
    )
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n"
    assert os.listdir(tmp_path) == []


def test_calls_in_workspaces_leave_no_descriptor(sandbox: Sandbox) -> None:
    sandbox.execute(WRITE, workspace="mine")
    before, threads = open_descriptors(), threading.active_count()
    for _ in range(5):
        sandbox.execute(READ, workspace="mine")
        sandbox.session(workspace="mine").close()
    assert soon(lambda: open_descriptors() <= before and threading.active_count() <= threads)


def test_a_workspace_is_free_again_when_its_session_ended_while_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_to = SessionCell.report_to

    def end_first(cell: SessionCell, session: SessionEvents) -> None:
        cell.end("it ended early")
        report_to(cell, session)

    stored = Workspaces(tmp_path, wait_seconds=0.1)
    with Sandbox(policy=policy_named("strict"), pool=0, workspaces=stored) as box:
        with monkeypatch.context() as patched:
            patched.setattr(SessionCell, "report_to", end_first)
            assert box.session(workspace="kept").lost == "it ended early"
        with box.session(workspace="kept") as session:
            assert session.execute("1").ok
