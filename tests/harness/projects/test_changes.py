"""Changes that a command made on the view of a project: listed, shown, applied and discarded.

The views are real overlays, mounted without privilege as `cellwright exec --review` mounts them.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cellwright import BusyError, PolicyError, Sandbox, WorkspaceError
from cellwright.harness.sandbox.projects import change_journal, upper
from cellwright.harness.sandbox.projects.project import find_project
from cellwright.harness.sandbox.projects.project_changes import ProjectChanges, open_changes
from cellwright.harness.sandbox.projects.review_directory import ReviewDirectory
from tests.forked import exit_code_of

pytestmark = pytest.mark.needs("userns")
USER = 1000
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "gc.auto=0")
Tree = dict[str, tuple[str, object]]


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A work tree of git with some files; pytest's own tmp_path is not one that other users reach."""
    with tempfile.TemporaryDirectory(prefix="cellwright-changes-", dir="/var/tmp") as name:
        place = Path(name, "shop")
        place.mkdir()
        Path(name).chmod(0o755)
        monkeypatch.setenv("XDG_STATE_HOME", f"{name}/state")
        (place / "a.txt").write_text("one\ntwo\nthree\n")
        (place / "run.sh").write_text("#!/bin/sh\n")
        (place / "run.sh").chmod(0o755)
        (place / "data").mkdir()
        for number in range(5):
            (place / f"data/{number}").write_text(f"{number}\n" * 10)
        (place / "data/below").mkdir()
        (place / "data/below/deep").write_text("deep\n")
        (place / "link").symlink_to("a.txt")
        for line in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
            subprocess.run([*GIT, *line], cwd=place, check=True)
        yield place


def ran(project: Path, line: str, *command: str) -> ProjectChanges:
    """Run a line of sh(1), or a command, on the view of the project; return its changes."""
    found = find_project(project)
    review = ReviewDirectory(found.root)
    with review.held():
        review.begin((line,))
        work = review.path / "work"
        mount = f"lowerdir={project},upperdir={review.upper},workdir={work},userxattr"
        begin = f'set -e; mount -t overlay overlay -o {mount} {project}; cd {project}; exec "$@"'
        given = ("sh", "-ec", line) if line else command
        subprocess.run(["unshare", "-Urm", "sh", "-c", begin, "sh", *given], check=True)
    return open_changes(found)


def review_of(project: Path) -> ReviewDirectory:
    return ReviewDirectory(str(project))


def tree(root: Path) -> Tree:
    """Return what lies in a directory: by path the type, and content and executable bit."""
    found: Tree = {}
    for above, directories, files in os.walk(os.fsencode(root)):
        for name in [*directories, *files]:
            path = os.path.join(above, name)
            mode = os.lstat(path).st_mode
            content: object = ""
            if stat.S_ISREG(mode):
                with open(path, "rb") as file:
                    content = hashlib.sha256(file.read()).hexdigest(), bool(mode & stat.S_IXUSR)
            elif stat.S_ISLNK(mode):
                content = os.readlink(path).decode("latin-1")
            relative = os.path.relpath(path, os.fsencode(root)).decode("latin-1")
            found[relative] = (stat.filemode(mode)[0], content)
    return found


def paths(changes: ProjectChanges) -> dict[str, str]:
    return {each.path: each.kind for each in changes.list()}


def test_a_view_leaves_the_project_unchanged_until_its_changes_are_applied(project: Path) -> None:
    before = tree(project)
    line = (
        "echo four >> a.txt; rm data/0; rm -r data/below; chmod -x run.sh; echo new > new; mkdir e"
    )
    changes = ran(project, f"{line}; ln -sf data/1 link; rm data/1; mkdir data/1")
    assert tree(project) == before
    assert paths(changes) == {
        "a.txt": "changed", "data/0": "removed", "data/below": "removed", "run.sh": "changed",
        "new": "added", "e": "added", "link": "changed", "data/1": "replaced",
    }  # fmt: skip
    assert len(changes.apply()) == 8
    assert (project / "a.txt").read_text() == "one\ntwo\nthree\nfour\n"
    assert not (project / "data/0").exists()
    assert not (project / "data/below").exists()
    assert not os.access(project / "run.sh", os.X_OK)
    assert (project / "e").is_dir()
    assert (project / "data/1").is_dir()
    assert os.readlink(project / "link") == "data/1"
    assert changes.list() == ()
    assert open_changes(find_project(project)).apply() == ()


def test_a_command_of_a_sandbox_leaves_its_changes(project: Path) -> None:
    line = "echo four >> a.txt; rm data/0; mkdir .vscode; echo x > .vscode/x; git add -A; exit 3"
    with Sandbox(policy="project", pool=0) as sandbox:
        begin = sandbox.exec(["sh", "-c", line], project=project, review=True)
        with begin as run, pytest.raises(BusyError):
            run.changes.list()
        assert run.exit_code == 3
        assert (project / "data/0").exists()
        assert "+four" in run.changes.show(["a.txt"])
        run.changes.apply()
        assert not (project / "data/0").exists()
        assert paths(run.changes) == {".vscode/x": "added"}
        with sandbox.exec(["cat", "a.txt", ".vscode/x"], project=project, review=True) as run:
            assert run.exit_code == 0
        run.changes.discard()
        with sandbox.exec(["cat", ".vscode/x"], project=project, review=True) as run:
            assert run.exit_code == 1


def test_an_ordinary_user_reviews_alike(project: Path) -> None:
    """As root, if it is root that runs this, it is tested by all the others."""
    if os.geteuid() == 0:
        for path in (project.parent, *project.parent.rglob("*")):
            os.chown(path, USER, USER, follow_symlinks=False)

    def work() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(USER, USER, USER)
            os.setresuid(USER, USER, USER)
        line = "echo x > data/0; rm -r data/below; mkdir data/below shut; echo y > shut/y; chmod 0 shut"
        changes = ran(project, f"{line}; echo z > z; chmod 0 z; rm data/2")
        assert set(paths(changes)) == {"data/0", "data/below/deep", "shut/y", "z", "data/2"}
        assert "+x" in changes.show()
        changes.apply(["data"])
        assert set(paths(changes)) == {"shut/y", "z"}
        ran(project, "mkdir r; echo > r/x; echo > r/y; chmod 500 r")
        changes.discard(["r/x"])
        assert "r/x" not in paths(changes)
        changes.apply()
        assert (project / "shut/y").read_text() == "y\n"
        assert (project / "z").read_text() == "z\n"
        assert review_of(project).pending() is None
        ran(project, "mkdir shut2; echo > shut2/x; chmod 0 shut2").discard()
        assert changes.list() == ()

    assert exit_code_of(work) == 0


def test_git_commits_on_the_view_and_the_project_gets_them(project: Path) -> None:
    line = "echo four >> a.txt; git mv data/0 moved; git checkout -qb other; "
    commit = " ".join(GIT)
    changes = ran(project, f"{line} {commit} commit -qam second; {commit} gc -q; git tag v1")
    changes.apply()
    for command, output in (
        (("log", "--format=%s"), "second\nfirst\n"), (("status", "--short"), ""),
        (("branch", "--show-current"), "other\n"), (("fsck", "--strict"), ""),
    ):  # fmt: skip
        done = subprocess.run(["git", *command], cwd=project, capture_output=True, check=True)
        assert done.stdout.decode() == output


def test_git_status_outside_is_no_conflict_but_git_add_is(project: Path) -> None:
    commit = " ".join(GIT)
    changes = ran(
        project, f"echo four >> a.txt; {commit} commit -qam second; echo x > data/0; git add ."
    )
    index = project / ".git/index"
    before = index.stat().st_ctime_ns
    os.utime(project / "data/2", (0, 0))  # git looks at it, and remembers the new time
    subprocess.run(["git", "status"], cwd=project, check=True, capture_output=True)
    assert index.stat().st_ctime_ns > before
    assert changes.conflicts() == ()
    changes.apply([".git", "a.txt"])
    subprocess.run(["git", "status"], cwd=project, check=True, capture_output=True)
    changes = ran(project, "git add .; echo y > data/0; git add .")
    assert changes.conflicts() == ()
    (project / "data/3").write_text("mine\n")
    subprocess.run(["git", "add", "data/3"], cwd=project, check=True)
    assert [each.path for each in changes.conflicts()] == [".git/index"]


def test_what_was_only_touched_is_no_change(project: Path) -> None:
    changes = ran(project, "touch a.txt; chmod 600 run.sh; chmod u+x run.sh; touch -h link")
    assert changes.list() == ()
    assert changes.apply() == ()
    assert review_of(project).pending() is None


def test_paths_are_applied_and_discarded_one_by_one(project: Path) -> None:
    """Also beneath a directory that was made anew, which hides that of the project."""
    line = "rm -r data; mkdir data; echo x > data/0; echo new > data/new; echo four >> a.txt"
    changes = ran(project, f"{line}; mkdir -p m/n; echo x > m/n/x")
    changes.discard(["m/n/x"])
    assert changes.apply(["data/0", "data/1"])
    assert (project / "data/0").read_text() == "x\n"
    assert not (project / "data/1").exists()
    left = {"data/2", "data/3", "data/4", "data/below", "data/new", "a.txt"}
    assert set(paths(changes)) == left
    changes.discard(["data/2", "data/new"])
    assert set(paths(changes)) == left - {"data/2", "data/new"}
    with pytest.raises(PolicyError, match="no change waits there"):
        changes.apply(["data/new"])
    changes.apply(["data"])
    assert sorted(os.listdir(project / "data")) == ["0", "2"]
    changes.discard()
    assert (project / "a.txt").read_text() == "one\ntwo\nthree\n"
    assert changes.list() == ()


def test_later_commands_see_and_add_to_the_changes_that_wait(project: Path) -> None:
    ran(project, "echo four >> a.txt; echo x > data/0")
    changes = ran(project, "grep -q four a.txt; echo five >> a.txt")
    changes.apply(["a.txt"])
    assert (project / "a.txt").read_text().endswith("four\nfive\n")
    changes = ran(project, "echo six >> a.txt")  # an applied file is no conflict later
    changes.apply()
    assert (project / "a.txt").read_text().endswith("five\nsix\n")
    assert (project / "data/0").read_text() == "x\n"


def test_what_a_later_command_changed_is_not_what_was_reviewed(project: Path) -> None:
    """Also if it gives a file its old size and time."""
    changes = ran(project, "echo good > data/0; echo x > new; chmod 0 new; rm data/1")
    reviewed, first = changes.id(), changes.id(["data/0"])
    changes.show()
    assert changes.id() == reviewed
    ran(project, "touch -r data/0 t; echo evil > data/0; touch -r t data/0; rm t")
    for path, change in ((None, reviewed), (["data/0"], first)):
        with pytest.raises(WorkspaceError, match="by now, not"):
            changes.apply(path, change=change)
    assert (project / "data/1").exists()
    changes.apply(["data/0"], change=changes.id(["data/0"]))
    assert (project / "data/0").read_text() == "evil\n"


def test_what_lies_in_place_of_a_protected_file_is_left_out_with_it(project: Path) -> None:
    (project / ".claude").write_text("a file, where others have a directory")
    changes = ran(project, "rm .claude; mkdir .claude; echo x > .claude/notes")
    assert {each.path for each in changes.list() if each.left_out} == {".claude", ".claude/notes"}
    assert changes.apply([".claude/notes"]) == ()
    assert (project / ".claude").is_file()
    changes.apply([".claude/notes"], unprotect=[".claude"])
    assert (project / ".claude/notes").read_text() == "x\n"


def test_what_the_user_made_anew_outlives_a_finished_request(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ran(project, "rm data/0 data/1; echo x > new")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(change_journal, "_note_applied", fail)
        with pytest.raises(WorkspaceError, match="Input/output error"):
            changes.apply(["data/0", "new"])
    (project / "data/0").write_text("mine")
    (project / "new").write_text("mine")
    assert paths(changes) == {"data/1": "removed"}
    assert (project / "data/0").read_text() == (project / "new").read_text() == "mine"


def test_what_the_project_changed_meanwhile_is_a_conflict(project: Path) -> None:
    line = "echo mine > a.txt; echo same > data/0; rm data/1; rm -r data/below; echo n > new; echo x > data/2"
    changes = ran(project, line)
    for path, text in (
        ("a.txt", "theirs\n"), ("data/0", "same\n"), ("data/1", "more\n"), ("data/below/other", "more\n"),
        ("new", "theirs\n"),
    ):  # fmt: skip
        (project / path).write_text(text)
    conflicts = ["a.txt", "data/1", "data/below", "new"]
    assert sorted(each.path for each in changes.conflicts()) == conflicts
    before = tree(project)
    with pytest.raises(WorkspaceError, match=r"'a.txt'.*'new'"):
        changes.apply()
    assert tree(project) == before
    changes.apply(["data/2"])
    assert (project / "data/2").read_text() == "x\n"
    changes.apply(force=True)
    assert (project / "a.txt").read_text() == "mine\n"
    assert not (project / "data/below").exists()


def test_nobody_looks_at_changes_while_a_command_runs(project: Path) -> None:
    changes = ran(project, "echo x > new")
    with review_of(project).held():
        for method in (changes.list, changes.show, changes.apply, changes.discard):
            with pytest.raises(BusyError, match="a command or a review has the changes"):
                method()
    assert paths(changes) == {"new": "added"}


# Protected paths

PROTECTED = {
    ".vscode/tasks.json": "mkdir .vscode; echo x > .vscode/tasks.json",
    ".idea/x": "mkdir i; echo x > i/x; mv i .idea",
    ".bashrc": "echo x > z; mv z .bashrc",
    ".git/hooks/pre-commit": "echo x > .git/hooks/pre-commit",
    ".git/config": "git config core.fsmonitor x",
    ".claude": "mkdir data/c; ln -s data/c .claude",
    ".git": "mv .git data/g; echo gitdir: data/g > .git",
    "data/.git": "echo gitdir: x > data/.git",
    "data/new/.git/config": "mkdir data/new; git init -q --template= data/new; rm -r data/new/.git/[!c]*",
    "nested/.git/hooks/x": "echo x > nested/.git/hooks/x",
    "nested/.git/config": "echo x >> nested/.git/config",
    ".git/modules/m/config": "mkdir -p .git/modules/m; echo x > .git/modules/m/config",
}


@pytest.mark.parametrize("path", PROTECTED)
def test_what_other_programs_obey_is_applied_only_by_name(project: Path, path: str) -> None:
    subprocess.run(["git", "init", "-q", str(project / "nested")], check=True)
    before = tree(project)
    changes = ran(project, f"{PROTECTED[path]}; echo x > harmless")
    found = {each.path: each.left_out for each in changes.list()}
    assert "protected" in found[path]
    assert not found["harmless"]
    changes.apply()
    after = tree(project)
    assert after.pop("harmless")
    assert {
        key: value for key, value in after.items() if not key.startswith(("data/g", "data/c"))
    } == before
    changes.apply(unprotect=[path])
    assert os.path.lexists(project / path)
    assert tree(project) != before
    assert path not in paths(changes)


# Everything that programs do


RANDOM = """
import json, os, random, shutil, sys
seed, count = int(sys.argv[1]), int(sys.argv[2])
choose = random.Random(seed)
def all_paths():
    found = [(above, name) for above, directories, files in os.walk(".")
             for name in directories + files if ".git" not in above.split("/") and name != ".git"]
    return sorted(os.path.join(*each) for each in found)
def new():
    above = [each for each in all_paths() if os.path.isdir(each) and not os.path.islink(each)] + ["."]
    return os.path.join(choose.choice(above), choose.choice("abcdefgh") + choose.choice(["", "1", "2"]))
def remove(path):
    shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
def operate(kind):
    old, name = choose.choice(all_paths() or ["a"]), new()
    is_file = os.path.isfile(old) and not os.path.islink(old)
    if kind == "write" and not os.path.isdir(name):
        open(name, "w").write(str(choose.random()))
    elif kind == "append" and is_file:
        open(old, "a").write("more")
    elif kind == "mkdir":
        os.mkdir(name)
    elif kind == "remove":
        remove(old)
    elif kind == "move":
        shutil.move(old, name)
    elif kind == "replace" and is_file:
        os.replace(old, name)
    elif kind == "link" and is_file:
        os.link(old, name)
    elif kind == "symlink":
        os.symlink(choose.choice(["a", "../b", "/etc/passwd", "data"]), name)
    elif kind == "chmod" and is_file:
        os.chmod(old, choose.choice([0o644, 0o755, 0o600, 0o444]))
    elif kind == "truncate" and is_file:
        os.truncate(old, choose.choice([0, 5, 1 << 20]))
    elif kind == "remake" and os.path.isdir(old) and not os.path.islink(old):
        shutil.rmtree(old)
        os.mkdir(old)
    elif kind == "retype":
        remove(old)
        choose.choice([os.mkdir, lambda each: open(each, "w").write("x"), lambda each: os.symlink("a", each)])(old)
kinds = ["write"] * 4 + ["mkdir"] * 3 + ["append", "remove", "move", "replace", "link", "symlink", "chmod",
         "truncate", "remake", "retype"]
for _ in range(count):
    try:
        operate(choose.choice(kinds))
    except OSError:
        pass
sys.path.insert(0, sys.argv[3])
from tests.harness.projects.test_changes import tree
from pathlib import Path
open(sys.argv[4], "w").write(json.dumps(tree(Path("."))))
"""
ROOT = Path(__file__).parents[3]


def randomly_changed(project: Path, seed: int, count: int = 200) -> tuple[ProjectChanges, Any]:
    told = project.parent / "told"
    command = (sys.executable, "-c", RANDOM, str(seed), str(count), str(ROOT), str(told))
    changes = ran(project, "", *command)
    return changes, {key: tuple(value) for key, value in json.loads(told.read_text()).items()}


def plain(found: Tree) -> Any:
    return {key: tuple(value) for key, value in json.loads(json.dumps(found)).items()}


@pytest.mark.parametrize("seed", range(6))
def test_a_project_gets_exactly_what_the_view_showed(project: Path, seed: int) -> None:
    changes, expected = randomly_changed(project, seed)
    changes.apply()
    assert plain(tree(project)) == expected
    assert changes.list() == ()


@pytest.mark.parametrize("seed", range(6))
def test_changes_that_are_applied_in_any_order_add_up(project: Path, seed: int) -> None:
    changes, expected = randomly_changed(project, seed, 120)
    choose = random.Random(seed)
    while waiting := list(paths(changes)):
        changes.apply(choose.sample(waiting, min(len(waiting), choose.randint(1, 5))))
    assert plain(tree(project)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_changes_that_are_discarded_in_any_order_are_gone(project: Path, seed: int) -> None:
    before = tree(project)
    changes, _ = randomly_changed(project, seed, 120)
    choose = random.Random(seed)
    while waiting := list(paths(changes)):
        changes.discard(choose.sample(waiting, min(len(waiting), choose.randint(1, 5))))
        assert tree(project) == before
    assert review_of(project).pending() is None


# kill -9

CALLS = (
    "rename",
    "replace",
    "mkdir",
    "rmdir",
    "unlink",
    "symlink",
    "fsync",
    "mknod",
    "removexattr",
)


@pytest.mark.parametrize("action", ["apply", "apply some", "discard some", "discard"])
def test_a_killed_request_is_finished_by_the_next_one(project: Path, action: str) -> None:
    line = "echo x > a.txt; rm -r data; mkdir -p data/n/m; echo y > data/n/m/y; ln -s y data/l; mv run.sh r"
    chosen = ["data/0", "data/1", "data/n", "a.txt"] if action.endswith("some") else None
    kept = project.parent / "kept"
    shutil.rmtree(project / ".git")
    changes = ran(project, line)
    copies = [(project, f"{kept}-project"), (review_of(project).path, f"{kept}-state")]
    for place, copy in copies:
        subprocess.run(["cp", "-a", str(place), copy], check=True)

    def work() -> None:
        changes.discard(chosen) if action.startswith("discard") else changes.apply(
            chosen, force=True
        )

    before = tree(project)
    work()
    after, left = tree(project), paths(changes)
    ended, calls, outcomes = -signal.SIGKILL, 0, set()
    while ended == -signal.SIGKILL:
        for place, copy in copies:
            subprocess.run(["rm", "-rf", str(place)], check=True)
            subprocess.run(["cp", "-a", copy, str(place)], check=True)
        calls += 1
        ended = exit_code_of(partial(_killed_at, calls, work))
        waiting = paths(changes)  # finishes what was begun
        outcomes.add(tree(project) == after)
        assert tree(project) in (before, after)
        if waiting != left:  # it had not begun: nothing is lost
            assert tree(project) == before
            work()
        assert (tree(project), paths(changes)) == (after, left)
    assert ended == 0
    assert calls > 3
    assert outcomes == ({True} if action.startswith("discard") else {True, False})


def _killed_at(number: int, work: Callable[[], None]) -> None:
    """Do `work`, but end this process by SIGKILL before its call `number` that changes files."""
    left = number

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*given: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **named)

        return made

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    work()


def test_a_link_that_is_put_in_the_way_leads_nowhere(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = project.parent / "outside"
    outside.mkdir()
    changes = ran(project, "echo x > data/0; echo y > data/new; rm data/1")
    written = change_journal.write

    def swap(*given: Any) -> None:
        written(*given)
        (project / "data").rename(project / "aside")
        (project / "data").symlink_to(outside)

    monkeypatch.setattr("cellwright.harness.sandbox.projects.project_changes.write", swap)
    with pytest.raises(WorkspaceError, match="cannot apply the change of 'data/0'"):
        changes.apply()
    assert list(outside.iterdir()) == []
    (project / "data").unlink()
    (project / "aside").rename(project / "data")
    assert changes.list() == ()  # it was finished
    assert (project / "data/0").read_text() == "x\n"
    assert not (project / "data/1").exists()


def test_only_the_directory_that_was_staged_is_installed(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ran(project, "echo x > data/0")
    written = change_journal.write

    def swap(*given: Any) -> None:
        written(*given)
        (staging,) = project.glob(".cellwright-*")
        shutil.copytree(staging, project / "other")
        shutil.rmtree(staging)
        (project / "other").rename(staging)

    monkeypatch.setattr(f"{ProjectChanges.__module__}.write", swap)
    with pytest.raises(WorkspaceError, match="is not the directory that was made"):
        changes.apply()
    assert (project / "data/0").read_text() == "0\n" * 10


def test_a_failure_before_the_journal_changes_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ran(project, "echo x > data/0; echo y > new")
    before = tree(project)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(change_journal, "_copy", fail)
    with pytest.raises(WorkspaceError, match="No space left"):
        changes.apply()
    assert tree(project) == before
    assert set(paths(changes)) == {"data/0", "new"}


# Hostile upper directories


def hostile(project: Path) -> tuple[ProjectChanges, Path]:
    """Return changes with an upper directory that a test fills."""
    review = review_of(project)
    with review.held():
        review.begin(("sh",))
    return open_changes(project), review.upper


def test_links_of_project_and_view_lead_nowhere(project: Path) -> None:
    outside = project.parent / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (project / "out").symlink_to(outside)
    changes, place = hostile(project)
    (place / "out").mkdir()
    (place / "out/file").write_text("x")
    (place / "data").symlink_to(outside)
    (place / "up").symlink_to("../outside")
    shown = changes.show()
    assert shown.count("leads out of the project") == 2
    assert "secret" not in shown
    changes.apply()
    assert sorted(os.listdir(outside)) == ["secret"]
    assert (project / "out/file").read_text() == "x"
    assert os.readlink(project / "data") == str(outside)
    changes, place = hostile(project)
    (place / "data").mkdir()
    (place / "data/secret").write_text("x")
    changes.apply()
    assert (outside / "secret").read_text() == "secret"


def test_special_files_are_never_opened_or_applied(project: Path) -> None:
    changes, place = hostile(project)
    os.mkfifo(place / "fifo")
    os.mkfifo(place / "a.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(place / "socket"))
    names = {"fifo", "socket", "a.txt"}
    if os.geteuid() == 0:
        os.mknod(place / "device", stat.S_IFCHR, os.makedev(1, 3))
        os.mknod(place / "disk", stat.S_IFBLK, os.makedev(0, 0))
        names |= {"device", "disk"}
    (place / "good").write_text("x")
    assert {each.path for each in changes.list() if each.left_out} == names
    assert "special file" in changes.show()
    assert [each.path for each in changes.apply()] == ["good"]
    assert set(paths(changes)) == names
    assert (project / "a.txt").is_file()
    changes.discard()
    assert changes.list() == ()


NAMES = (
    b"\x1b[31mred\x1b[2K\r", b"a\nremoved b", b"\xff\xfe", "\u202egnp.exe".encode(), b"-rf", b"$(id)", b"x" * 255,
    b"\t\x07bell", "zero\u200bwidth".encode(), b"a b'\"\\", b".cellwright-x", b"x (left out: y)",
)  # fmt: skip


def test_names_and_content_forge_no_line_of_the_diff(project: Path) -> None:
    changes, place = hostile(project)
    for name in NAMES:
        content = "x\x1b]0;title\x07\n--- a/forged\r+++ b/forged\n\x9b31m\u2028y".encode()
        Path(os.fsdecode(os.fsencode(place) + b"/" + name)).write_bytes(content)
    (place / "target").symlink_to("x\n+++ b/forged\x1b[31m")
    (place / "binary").write_bytes(b"\xff\x00\x1b[31m")
    shown = changes.show()
    assert all(each == "\n" or each.isprintable() for each in shown)
    assert "\u202e" not in shown
    for line in shown.splitlines():
        assert not line.startswith(("--- a/forged", "+++ b/forged", "removed b"))
        assert line.startswith((" ", "+", "-", "@@", "note: ", "added ", "\\ No newline"))
    assert 'added "x (left out: y)"' in shown
    assert 'added "a\\nremoved b"' in shown
    assert 'note: from nothing to link to "x\\n+++ b/forged\\x1b[31m"' in shown
    assert shown.count("+--- a/forged\\r+++ b/forged") == len(NAMES)
    assert "binary: from nothing to file, 7 bytes" in shown
    assert len(changes.apply()) == len(NAMES) + 2
    assert set(NAMES) <= set(os.listdir(os.fsencode(project)))


def test_long_lines_and_large_files_are_named(project: Path) -> None:
    changes, place = hostile(project)
    (place / "long").write_text("x" * 10_000)
    (place / "large").write_bytes(b"x\n" * 1_000_000)
    with open(place / "sparse", "wb") as file:
        file.truncate(1 << 40)
    for number in range(300):
        (place / f"many-{number}").write_text("line\n" * 2000)
    shown = changes.show()
    assert len(shown) < (1 << 20) + 1000
    assert "[and 8,000 more characters]" in shown
    assert "more than 1,048,576 bytes: from nothing to file, 2,000,000 bytes" in shown
    assert "of 303 changes are not shown" in shown.splitlines()[-1]
    assert changes.show(["many-299"]).count("+line") == 2000
    changes.apply()
    found = (project / "sparse").stat()
    assert (found.st_size, found.st_blocks < 100) == (1 << 40, True)


def test_a_diff_has_a_budget_whatever_the_files_are(project: Path) -> None:
    """difflib takes hours for such files."""
    (project / "a.txt").write_text("".join(f"{number % 7}\n" * 3 for number in range(30_000)))
    changes, place = hostile(project)
    (place / "a.txt").write_text("".join(f"{number % 11}\n" * 2 for number in range(40_000)))
    with_end = changes.show(limit_bytes=1 << 24)
    assert with_end.count("\n-") > 80_000
    assert with_end.count("\n+") > 70_000


@pytest.mark.parametrize("seed", range(20))
def test_another_program_applies_the_diff_with_the_same_result(project: Path, seed: int) -> None:
    choose = random.Random(seed)
    lines = [choose.choice("abcd") for _ in range(choose.randint(0, 60))]
    (project / "a.txt").write_text("\n".join(lines))
    changes, place = hostile(project)
    for _ in range(choose.randint(1, 12)):
        at = choose.randint(0, len(lines))
        lines[at : at + choose.randint(0, 3)] = [
            choose.choice("abcd") for _ in range(choose.randint(0, 3))
        ]
    (place / "a.txt").write_text("\n".join(lines))
    shown = changes.show()
    subprocess.run(
        ["git", "apply", "--allow-empty", "--unidiff-zero"],
        input=shown.encode(),
        cwd=project,
        check=True,
    )
    assert (project / "a.txt").read_text() == "\n".join(lines)


def test_deep_trees_are_left_out_and_discarded(project: Path) -> None:
    changes, place = hostile(project)
    above = os.open(place, os.O_RDONLY)
    for _ in range(1000):
        os.mkdir("d", dir_fd=above)
        below = os.open("d", os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = below
    os.close(above)
    found = changes.list()
    assert [each.left_out for each in found] == ["more than 128 levels"]
    assert changes.apply() == ()
    changes.discard()
    assert changes.list() == ()


def test_a_hundred_thousand_files_are_one_request(project: Path) -> None:
    changes, place = hostile(project)
    for number in range(100):
        (place / f"m/{number}").mkdir(parents=True)
        for each in range(1000):
            os.close(os.open(place / f"m/{number}/{each}", os.O_CREAT | os.O_WRONLY))
    assert len(changes.apply()) == 100_000
    assert sum(len(files) for _, _, files in os.walk(project / "m")) == 100_000
    assert changes.list() == ()


def test_too_many_entries_are_refused_and_can_be_discarded(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, place = hostile(project)
    for number in range(20):
        (place / str(number)).touch()
    monkeypatch.setattr(upper, "_MOST_ENTRIES", 10)
    with pytest.raises(WorkspaceError, match="discard"):
        changes.apply()
    changes.discard()
    assert changes.list() == ()


@pytest.mark.parametrize("name", ["user.overlay.metacopy", "user.overlay.redirect"])
def test_a_file_whose_content_lies_elsewhere_is_refused(project: Path, name: str) -> None:
    changes, place = hostile(project)
    (place / "a.txt").touch()
    os.setxattr(place / "a.txt", name, b"/etc/shadow")
    assert "cannot be read" in changes.show()
    with pytest.raises(WorkspaceError, match="its content lies elsewhere"):
        changes.apply()
    assert (project / "a.txt").read_text() == "one\ntwo\nthree\n"


def test_set_uid_bits_and_owners_are_not_applied(project: Path) -> None:
    changes, place = hostile(project)
    (place / "program").write_text("x")
    (place / "program").chmod(0o6777)
    (place / "d").mkdir()
    (place / "d").chmod(0o7777)
    if os.geteuid() == 0:
        os.chown(project, USER, USER)
    changes.apply()
    found = (project / "program").stat()
    assert stat.S_IMODE(found.st_mode) == 0o755
    assert stat.S_IMODE((project / "d").stat().st_mode) == 0o755
    assert found.st_uid == (USER if os.geteuid() == 0 else os.geteuid())


# The command


def cellwright(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cellwright", "changes", *words]
    return subprocess.run(
        command, cwd=project, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_lists_shows_applies_and_discards(project: Path) -> None:
    assert cellwright(project).stderr == "cellwright: no changes wait for this project\n"
    ran(
        project,
        "echo four >> a.txt; echo x > data/0; echo y > data/1; mkdir .vscode; echo > .vscode/x",
    )
    listed = cellwright(project)
    assert listed.stdout.splitlines()[0] == "changed   a.txt  (file, 19 bytes)"
    assert "cellwright: 3 changed, 1 added" in listed.stderr
    assert listed.returncode == 1  # a path is left out
    shown = cellwright(project, "show", "a.txt")
    assert "+four" in shown.stdout
    change = shown.stderr.split()[-1]
    assert cellwright(project, "apply", "--change", change).returncode == 70
    assert cellwright(project, "apply", "a.txt", "--change", change).returncode == 0
    done = cellwright(project / "data", "apply", "0")
    assert done.stderr.startswith("cellwright: applied 1 change\n")
    assert (project / "data/0").read_text() == "x\n"
    (project / "data/1").write_text("theirs")
    refused = cellwright(project, "apply")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "conflict: the project changed data/1 meanwhile" in refused.stderr
    assert json.loads(cellwright(project, "--json").stdout)["conflicts"] == ["data/1"]
    done = cellwright(project, "apply", "--force", "--unprotect", ".vscode")
    assert (done.returncode, done.stderr) == (0, "cellwright: applied 2 changes\n")
    assert (project / ".vscode/x").exists()
    ran(project, "echo five >> a.txt")
    assert cellwright(project, "discard").returncode == 0
    assert cellwright(project).returncode == 0
    assert cellwright(project, "apply", "/etc").returncode == 2
    assert cellwright(project, "shwo").returncode == 2
