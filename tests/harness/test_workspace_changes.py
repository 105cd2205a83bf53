"""Changes of named workspaces that wait for review, and workspaces that expire."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cellwright import BusyError, PolicyError, Sandbox, WorkspaceError, Workspaces
from cellwright.results import Executable, FileChange, FileVersion
from cellwright.testing import inspect
from tests.conftest import ROOT
from tests.harness.test_cli import OPTIONS

EDIT = (
    "import os\n"
    "open('new', 'w').write('added')\n"
    "open('old', 'a').write(' more')\n"
    "os.unlink('gone')\n"
    "os.chmod('tool', 0o700)"
)
DAY = 24 * 60 * 60


@pytest.fixture
def plain(tmp_path: Path) -> Workspaces:
    """The workspaces as a person sees them, with one of four files."""
    store = Workspaces(tmp_path / "kept", wait_seconds=0.2)
    for name in ("old", "gone", "tool", "same"):
        store.write("mine", name, name)
    return store


@pytest.fixture
def store(plain: Workspaces) -> Workspaces:
    """The same for programs, whose changes a person reviews."""
    return Workspaces(plain.directory, wait_seconds=0.2, review=True)


@pytest.fixture
def sandbox(strict: Sandbox, store: Workspaces) -> Iterator[Sandbox]:
    before = inspect(strict).replace_workspaces(store)
    yield strict
    inspect(strict).replace_workspaces(before)


def contents(store: Workspaces) -> dict[str, bytes]:
    return {each.path: store.read("mine", each.path) for each in store.files("mine")}


def version(content: bytes, *, executable: bool = False) -> FileVersion:
    return FileVersion(len(content), hashlib.sha256(content).hexdigest(), executable)


def _age(store: Workspaces, seconds: float) -> None:
    """Set the last use of the workspace `mine` back."""
    for path in store.archives("mine"):
        if path.exists():
            os.utime(path, (time.time() - seconds,) * 2)


# What a program changes


def test_a_change_waits_until_it_is_committed(
    sandbox: Sandbox, store: Workspaces, plain: Workspaces
) -> None:
    before = contents(plain)
    result = sandbox.execute(EDIT, workspace="mine")
    assert result.workspace is not None
    assert (result.workspace.state, result.workspace.files) == ("staged", 4)
    assert contents(plain) == before
    diff = plain.diff("mine")
    assert diff.changes == (
        FileChange("gone", "removed", version(b"gone"), None),
        FileChange("new", "added", None, version(b"added")),
        FileChange("old", "changed", version(b"old"), version(b"old more")),
        FileChange("tool", "changed", version(b"tool"), version(b"tool", executable=True)),
    )
    kinds = ([each.path for each in found] for found in (diff.added, diff.changed, diff.removed))
    assert list(kinds) == [["new"], ["old", "tool"], ["gone"]]
    assert contents(store)["new"] == b"added"  # programs see their change

    assert plain.commit("mine", diff.id) == diff
    assert contents(plain) == {
        "new": b"added", "old": b"old more", "tool": b"tool", "same": b"same",
    }  # fmt: skip
    assert isinstance(plain.read("mine", "tool"), Executable)
    assert os.listdir(plain.directory) == ["mine.tar"]
    assert plain.diff("mine").changes == ()
    assert plain.diff("mine").id == ""


def test_a_change_that_is_discarded_was_never_there(sandbox: Sandbox, plain: Workspaces) -> None:
    before = contents(plain)
    sandbox.execute(EDIT, workspace="mine")
    assert len(plain.discard("mine").changes) == 4
    assert contents(plain) == before
    assert os.listdir(plain.directory) == ["mine.tar"]
    assert sandbox.execute("open('old').read()", workspace="mine").value == "old"


def test_programs_go_on_with_the_change_of_the_last_one(
    sandbox: Sandbox, plain: Workspaces
) -> None:
    sandbox.execute("open('new', 'w').write('1')", workspace="mine")
    sandbox.execute("open('new', 'a').write('2')", workspace="mine")
    with sandbox.session(workspace="mine") as session:
        session.execute("open('new', 'a').write('3')")
        assert session.save().state == "staged"
        session.execute("open('new', 'a').write('4')")
    assert session.workspace is not None
    assert session.workspace.state == "staged"
    assert plain.diff("mine").changes == (FileChange("new", "added", None, version(b"1234")),)


def test_a_change_that_is_taken_back_does_not_wait(sandbox: Sandbox, plain: Workspaces) -> None:
    sandbox.execute("open('old', 'w').write('x')", workspace="mine")
    assert plain.is_pending("mine")
    result = sandbox.execute("open('old', 'w').write('old')", workspace="mine")
    assert result.workspace is not None
    assert result.workspace.state == "unchanged"
    assert not plain.is_pending("mine")


def test_a_new_workspace_is_empty_until_its_files_are_committed(
    sandbox: Sandbox, plain: Workspaces
) -> None:
    sandbox.execute("open('f', 'w').write('1')", workspace="other")
    assert plain.list() == ("mine", "other")
    assert plain.files("other") == ()
    plain.commit("other")
    assert plain.read("other", "f") == b"1"
    sandbox.execute("open('f', 'w').write('1')", workspace="third")
    plain.discard("third")
    assert plain.list() == ("mine", "other")


# What is refused


def test_nothing_but_programs_under_review_uses_a_workspace_with_a_change(
    sandbox: Sandbox, store: Workspaces, plain: Workspaces
) -> None:
    sandbox.execute("open('new', 'w').write('1')", workspace="mine")
    inspect(sandbox).replace_workspaces(plain)
    for attempt in (
        lambda: sandbox.execute("1", workspace="mine"),
        lambda: sandbox.session(workspace="mine"),
        lambda: plain.write("mine", "f", ""),
        lambda: plain.remove("mine", "old"),
    ):
        with pytest.raises(WorkspaceError, match="has a change that waits for review"):
            attempt()
    assert [each.path for each in plain.diff("mine").changes] == ["new"]
    plain.commit("mine")
    assert sandbox.execute("open('new').read()", workspace="mine").value == "1"


def test_only_the_change_that_was_reviewed_is_committed(
    sandbox: Sandbox, plain: Workspaces
) -> None:
    sandbox.execute("open('new', 'w').write('harmless')", workspace="mine")
    reviewed = plain.diff("mine").id
    sandbox.execute("open('new', 'w').write('hostile')", workspace="mine")
    for decide in (plain.commit, plain.discard):
        with pytest.raises(WorkspaceError, match=f"the pending change is .*, not '{reviewed}'"):
            decide("mine", reviewed)
    assert "new" not in contents(plain)
    sandbox.execute("open('new', 'w').write('harmless')", workspace="mine")
    plain.commit("mine", reviewed)
    assert contents(plain)["new"] == b"harmless"


def test_a_call_cannot_remove_what_a_person_reviews(sandbox: Sandbox, plain: Workspaces) -> None:
    with pytest.raises(PolicyError, match="clean: a workspace with review=True"):
        sandbox.execute("1", workspace="mine", clean=True)
    assert len(plain.files("mine")) == 4


def test_without_a_change_there_is_nothing_to_decide(plain: Workspaces) -> None:
    for decide in (plain.commit, plain.discard):
        with pytest.raises(WorkspaceError, match="has no pending change"):
            decide("mine")
        with pytest.raises(WorkspaceError, match="not found"):
            decide("other")
    with pytest.raises(WorkspaceError, match="not found"):
        plain.diff("other")
    with pytest.raises(PolicyError, match=r"workspaces\.review: must be True or False"):
        Workspaces(review="yes")  # type: ignore[arg-type]


def test_the_quota_holds_for_a_change_and_again_when_it_is_committed(
    sandbox: Sandbox, store: Workspaces, plain: Workspaces
) -> None:
    store.max_bytes = plain.max_bytes = 100
    refused = sandbox.execute("open('f', 'wb').write(bytes(101))", workspace="mine").workspace
    assert refused is not None
    assert (refused.state, plain.is_pending("mine")) == ("refused", False)
    sandbox.execute("open('f', 'wb').write(bytes(50))", workspace="mine")
    plain.max_bytes = 60
    with pytest.raises(WorkspaceError, match="65 bytes, at most 60"):
        plain.commit("mine")
    assert plain.is_pending("mine")


def test_a_damaged_change_is_neither_shown_nor_committed(
    sandbox: Sandbox, store: Workspaces, plain: Workspaces
) -> None:
    before = contents(plain)
    sandbox.execute(EDIT, workspace="mine")
    pending = plain.archives("mine")[1]
    pending.write_bytes(damaged := pending.read_bytes()[:-1] + b"x")
    attempts: list[Callable[[], object]] = [
        lambda: plain.diff("mine"), lambda: plain.commit("mine"), lambda: plain.discard("mine"),
        lambda: store.files("mine"), lambda: sandbox.execute("1", workspace="mine"),
    ]  # fmt: skip
    for attempt in attempts:
        with pytest.raises(WorkspaceError, match="is damaged, or not a workspace"):
            attempt()
    assert pending.read_bytes() == damaged
    assert contents(plain) == before
    plain.remove("mine")
    assert os.listdir(plain.directory) == []


def test_a_change_is_not_decided_while_a_program_makes_it(
    sandbox: Sandbox, plain: Workspaces
) -> None:
    with sandbox.session(workspace="mine") as session:
        session.execute(EDIT)
        session.save()
        for attempt in (plain.diff, plain.commit, plain.discard):
            with pytest.raises(BusyError, match="'mine' is in use"):
                attempt("mine")
    plain.commit("mine")


KILLED = """
import os, signal, sys
from cellwright import Workspaces

store, work = Workspaces(sys.argv[1]), sys.argv[2]
for name in ("mine.tar", "mine.pending"):
    whole = (store.directory / name).read_bytes()
    with open(sys.argv[1] + "/../" + name, "wb") as copy:
        copy.write(whole)
for count in range(1, 200):
    for name in ("mine.tar", "mine.pending"):
        os.system(f"cp {sys.argv[1]}/../{name} {sys.argv[1]}/{name}")
    child = os.fork()
    if not child:
        left = count
        def hook(event, arguments):
            global left
            if event.startswith(("os.", "open", "fcntl.")):
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        getattr(store, work)("mine")
        left = -1
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(sorted(each.path for each in store.files("mine")), store.is_pending("mine"), flush=True)
    if os.waitstatus_to_exitcode(status) == 0:
        break
else:
    raise SystemExit("it never ended by itself")
"""


@pytest.mark.parametrize(
    ("work", "after"),
    [
        ("commit", "['new', 'old', 'same', 'tool'] False"),
        ("discard", "['gone', 'old', 'same', 'tool'] False"),
    ],
)
def test_a_decision_that_is_killed_was_made_or_was_not(
    store: Workspaces, work: str, after: str
) -> None:
    """It is killed before each of its operations on files, the last time before none."""
    with store.open("mine") as opened:
        files = {key: data for key, data in opened.files().items() if key != "gone"}
        opened.save(files | {"new": b"1"})
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(store.directory), work],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    states = done.stdout.splitlines()
    assert set(states) == {"['gone', 'old', 'same', 'tool'] True", after}
    assert states == sorted(states, key=lambda state: state == after)
    assert len(states) > 5


# Hostile files


def test_names_and_links_of_a_program_are_data_of_the_change(
    sandbox: Sandbox, plain: Workspaces
) -> None:
    code = (
        "import os\n"
        "open('\\x1b[2J\\n\\u202e', 'w').write('1')\n"
        "os.makedirs('a/' * 30)\n"
        "open('a/' * 30 + 'f' * 255, 'w')\n"
        "os.symlink('/etc/passwd', 'link')\n"
        "os.mkfifo('pipe')\n"
        "os.unlink('old')\n"
        "os.symlink('same', 'old')\n"
        "open('sparse', 'w').truncate(1 << 20)"
    )
    assert sandbox.execute(code, workspace="mine").ok
    diff = plain.diff("mine")
    assert {each.path: each.kind for each in diff.changes} == {
        "\x1b[2J\n\u202e": "added", "a/" * 30 + "f" * 255: "added", "old": "removed",
        "sparse": "added",
    }  # fmt: skip
    (sparse,) = (each for each in diff.changes if each.path == "sparse")
    assert sparse.after == version(bytes(1 << 20))


def test_a_file_that_becomes_a_directory_is_removed_and_its_files_are_added(
    sandbox: Sandbox, plain: Workspaces
) -> None:
    code = "import os\nos.unlink('old')\nos.mkdir('old')\nopen('old/f', 'w').write('1')"
    assert sandbox.execute(code, workspace="mine").ok
    assert [(each.path, each.kind) for each in plain.diff("mine").changes] == [
        ("old", "removed"), ("old/f", "added"),
    ]  # fmt: skip
    plain.commit("mine")
    assert sandbox.execute("open('old/f').read()", workspace="mine").value == "1"


# Time


def test_a_workspace_expires_that_was_not_used_for_long(
    sandbox: Sandbox, store: Workspaces, plain: Workspaces
) -> None:
    store.max_age_seconds = DAY
    _age(plain, DAY / 2)
    sandbox.execute("open('new', 'w').write('1')", workspace="mine")
    assert time.time() - plain.used("mine") < DAY / 4  # a use counts, even without a commit
    _age(plain, DAY - 60)
    assert sandbox.execute("open('new').read()", workspace="mine").value == "1"
    _age(plain, DAY)
    assert sandbox.execute("import os\nos.listdir()", workspace="mine").value == []
    assert plain.list() == ()


def test_pruning_removes_what_has_expired_and_is_not_in_use(
    store: Workspaces, plain: Workspaces
) -> None:
    plain.write("young", "f", "")
    store.write("mine", "f", "pending too")
    with plain.open("mine"):
        _age(plain, 2 * DAY)
        assert plain.prune(max_age_seconds=DAY) == ()
    assert plain.prune(max_age_seconds=DAY) == ()  # its use has just ended
    _age(plain, 2 * DAY)
    assert plain.prune(max_age_seconds=3 * DAY) == ()
    assert plain.prune(max_age_seconds=DAY) == ("mine",)  # to look at it was no use
    assert os.listdir(plain.directory) == ["young.tar"]
    plain.max_age_seconds = 0.001
    _ = [os.utime(path, (1, 1)) for path in plain.directory.iterdir()]
    assert plain.prune() == ("young",)


@pytest.mark.parametrize("age", [-1, "1", float("nan")])
def test_an_invalid_age_is_refused(plain: Workspaces, age: float) -> None:
    with pytest.raises(PolicyError, match="max_age_seconds: must be"):
        plain.prune(max_age_seconds=age)
    with pytest.raises(PolicyError, match=r"workspaces\.max_age_seconds: must be"):
        Workspaces(max_age_seconds=age)
    with pytest.raises(PolicyError, match="max_age_seconds: required"):
        plain.prune()


# The commands


def test_the_commands_show_a_change_and_decide_on_it(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cellwright", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip

    staged = call(
        "run", *OPTIONS, "--workspace", "mine", "--review", "-c", "open('d\x1b', 'w').write('1234')"
    )
    assert (staged.returncode, "waits for review" in staged.stderr) == (0, True)
    (row,) = json.loads(call("workspace", "list", "--json").stdout)
    assert (row["name"], row["files"], row["pending"]) == ("mine", 0, True)
    assert call("workspace", "show", "mine").stdout == ""
    assert call("workspace", "get", "mine", "d\x1b", "--pending").stdout == "1234"

    shown = call("workspace", "diff", "mine")
    digest = hashlib.sha256(b"1234").hexdigest()
    assert shown.stdout.split() == ["added", "-", "4", digest[:12], "d\\x1b"]
    change = json.loads(call("workspace", "diff", "mine", "--json").stdout)
    assert change["changes"] == [
        {
            "path": "d\x1b", "kind": "added", "before": None,
            "after": {"size_bytes": 4, "sha256": digest, "executable": False},
        }
    ]  # fmt: skip
    assert f"--change {change['id']}" in shown.stderr

    blocked = call("run", *OPTIONS, "--workspace", "mine", "-c", "1")
    assert (blocked.returncode, "waits for review" in blocked.stderr) == (70, True)
    other = call("workspace", "commit", "mine", "--change", "0" * 32)
    assert (other.returncode, "the pending change is" in other.stderr) == (70, True)
    trail = ("--audit", str(tmp_path / "trail"))
    done = call("workspace", "commit", "mine", "--change", change["id"], *trail)
    assert done.stderr == "cellwright: committed in 'mine': 1 added, 0 changed, 0 removed\n"
    assert call("workspace", "get", "mine", "d\x1b").stdout == "1234"
    assert call("workspace", "diff", "mine").stderr.endswith("has no pending change\n")

    edit = ("--workspace", "mine", "--review", "-c", "open('d\x1b', 'a').write('5')")
    assert call("run", *OPTIONS, *edit).returncode == 0
    assert call("workspace", "discard", "mine", *trail).returncode == 0
    records = [json.loads(line) for line in (tmp_path / "trail").read_text().splitlines()]
    decided = [each for each in records if each.get("category") == "file"]
    assert [(each["action"], each["target"]) for each in decided] == [
        ("committed", "mine"), ("discarded", "mine"),
    ]  # fmt: skip
    assert change["id"] in (tmp_path / "trail").read_text()
    assert "1 file " in call("workspace", "list").stdout
    assert call("workspace", "get", "mine", "d\x1b").stdout == "1234"
    assert call("workspace", "prune", "--days", "1").stdout == ""
    os.utime(tmp_path / "cellwright/workspaces/mine.tar", (1, 1))
    assert call("workspace", "prune", "--days", "1").stdout == "mine\n"
    for where in (OPTIONS, ("--connect", str(tmp_path / "socket"))):
        alone = call("run", *where, "--review", "-c", "1")
        assert (alone.returncode, "--review: there is no workspace" in alone.stderr) == (2, True)
    both = call("run", *OPTIONS, *edit, "--clean")
    assert (both.returncode, "--clean: cannot be combined with --review" in both.stderr) == (
        2,
        True,
    )
    assert "`cellwright workspace remove`" in both.stderr
