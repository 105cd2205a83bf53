"""`cellwright exec` and `Sandbox.exec`: what a command on a project can do there, and what it cannot."""

import contextlib
import http.client
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import BusyError, PolicyError, Sandbox
from cellwright.harness.sandbox.projects.known_programs import known_programs
from cellwright.harness.sandbox.projects.project_changes import open_changes
from tests.conftest import OPTIONAL, policy_named, soon
from tests.harness.cli.test_shell import Person

pytestmark = pytest.mark.needs("userns")
CELLWRIGHT = (sys.executable, "-m", "cellwright")
COMMAND = (*CELLWRIGHT, "exec", *(word for each in OPTIONAL for word in ("--optional", each)))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with a secret, beside the project."""
    place = tmp_path / "home"
    (place / ".ssh").mkdir(parents=True)
    (place / ".ssh/id_ed25519").write_text("a secret")
    (place / ".gitconfig").write_text("[user]\nname = Ada\nemail = ada@example.org\n")
    monkeypatch.setenv("HOME", str(place))
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return place


@pytest.fixture
def project(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work tree of git below the home directory; this process is in it."""
    place = home / "src/project"
    place.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(place)], check=True)
    (place / "a.txt").write_text("one\n")
    monkeypatch.chdir(place)
    return place


def ran(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = (*COMMAND, *arguments)
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120, check=False)


def shell(line: str, *options: str) -> str:
    """Return what a line of sh(1) wrote."""
    done = ran(*options, "--shell", line)
    assert done.returncode == 0, done
    return done.stdout.decode()


def test_a_command_has_the_streams_and_gives_its_status(project: Path) -> None:
    data = os.urandom(3_000_000)
    done = ran("--", "sh", "-c", "cat; echo problem >&2; exit 3", stdin=data)
    assert (done.stdout, done.stderr, done.returncode) == (data, b"problem\n", 3)


@pytest.mark.parametrize(
    ("line", "status"), [("kill -9 $$", 137), ("kill -TERM $$", 143), ("exec nosuch", 127)]
)
def test_other_ends_have_the_status_of_a_shell(project: Path, line: str, status: int) -> None:
    assert ran("--shell", line).returncode == status


def test_a_command_that_does_not_exist_is_named(project: Path) -> None:
    done = ran("--", "nosuch")
    assert done.returncode == 127
    assert done.stderr == b"nosuch cannot start: no directory of PATH has it\n"


def test_a_script_whose_interpreter_is_not_shown_is_told(project: Path) -> None:
    (project / "tool").write_text("#!/nowhere/python3\n")
    (project / "tool").chmod(0o755)
    done = ran("--", "./tool")
    assert done.returncode == 127
    assert b"names an interpreter that the cell does not show" in done.stderr


def test_a_home_that_is_no_directory_of_the_user_is_told(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "here")
    assert b"HOME: must be the path of a directory, got 'here'" in ran("--", "true").stderr
    (project / "file").touch()
    monkeypatch.setenv("HOME", f"{project}/file")
    done = ran("--project", "/usr/share/misc", "--explain", "--", "true")
    assert done.returncode == 2
    assert b"set XDG_CACHE_HOME to a directory" in done.stderr


def test_words_of_the_command_are_no_options(project: Path) -> None:
    """Those that look as if another launcher were needed included."""
    done = ran("--", "printf", "%s\n", "--python", "--explain")
    assert (done.stdout, done.returncode) == (b"--python\n--explain\n", 0)


def test_a_reader_that_leaves_ends_the_command_by_sigpipe(project: Path) -> None:
    with subprocess.Popen((*COMMAND, "--", "yes"), stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"y\n"
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE


def test_signals_reach_the_command(project: Path) -> None:
    line = 'trap "echo caught; exit 5" INT; echo ready; sleep 60 & wait'
    with subprocess.Popen((*COMMAND, "--shell", line), stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == b"caught\n"
        assert process.wait(60) == 5


def test_a_command_at_a_terminal_has_its_size_and_controls_it(project: Path) -> None:
    person = Person(*["--", "sh"], command=COMMAND)
    try:
        person.type(b"stty size; tty; cat\n")
        person.until(b"30 100\r\n/dev/pts/0\r\n")
        person.type(b"words\n")
        person.until(b"words\r\nwords\r\n")  # the second are those of cat
        person.type(b"\x03")  # Ctrl-C ends cat, and not the shell
        person.until(b"^C")
        person.until(b"$ ")  # the signal drops words that are typed before
        person.type(b"exit 3\n")
        assert person.end() == 3
        assert person.is_restored()
    finally:
        person.close()


def test_it_changes_the_project_and_its_owner_owns_that(project: Path) -> None:
    assert (
        shell("pwd; echo two >> a.txt; mkdir d; echo x > d/new; chmod +x d/new") == f"{project}\n"
    )
    assert (project / "a.txt").read_text() == "one\ntwo\n"
    assert (project / "d/new").stat().st_uid == project.stat().st_uid
    assert os.access(project / "d/new", os.X_OK)


def test_it_starts_in_the_directory_of_its_caller(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "below").mkdir()
    monkeypatch.chdir(project / "below")
    assert shell("pwd; ls ..") == f"{project}/below\na.txt\nbelow\n"


def test_git_works_as_on_the_host(project: Path) -> None:
    assert "Ada <ada@example.org>" in shell("git add .; git commit -qm first; git log")
    log = subprocess.run(["git", "log", "--format=%an %s"], capture_output=True, check=True)
    assert log.stdout == b"Ada first\n"


def test_a_person_who_signs_commits_can_commit_without(home: Path, project: Path) -> None:
    with (home / ".gitconfig").open("a") as settings:
        settings.write("[commit]\n\tgpgSign = true\n[tag]\n\tgpgSign = true\n")
    said = shell("git add .; git commit -qm first && git tag -m one v1 && git log --format=%s%G?")
    assert said == "firstN\n"
    failed = ran("--shell", "git commit -S --allow-empty -qm second")
    assert failed.returncode == 128
    assert b"sign outside" in failed.stderr


def test_nothing_else_of_the_home_directory_is_there(home: Path, project: Path) -> None:
    (home / "other").mkdir()
    (home / "other/file").write_text("x")
    assert shell("cd; ls -A; touch mine; cat .ssh/id_ed25519 2>&1 || true").splitlines() == [
        ".cache", ".gitconfig", "src", "cat: .ssh/id_ed25519: No such file or directory",
    ]  # fmt: skip
    assert not (home / "mine").exists()
    assert shell(f"ls {home}/src") == "project\n"
    entry = shell("getent passwd cell").strip().split(":")
    assert entry[5] == str(home)  # the JVM takes user.home from there


@pytest.mark.parametrize(
    ("path", "protected"),
    [
        (".git/hooks/pre-commit", ".git/hooks"), (".git/config", ".git/config"),
        (".vscode/tasks.json", ".vscode"),
    ],
)  # fmt: skip
def test_what_other_programs_obey_cannot_be_changed(
    project: Path, path: str, protected: str
) -> None:
    file = project / path
    file.parent.mkdir(exist_ok=True)
    file.touch()
    before = file.read_bytes()
    for line in (f"echo x >> {path}", f"rm {path}", f"mv {path} x", f"mv {path.split('/')[0]} x"):
        done = ran("--shell", line)
        assert done.returncode != 0, line
        assert file.read_bytes() == before
    assert shell(f"echo x >> {path}", "--unprotect", protected) == ""
    assert file.read_bytes() == before + b"x\n"


def test_an_agent_has_its_state_but_not_its_settings(home: Path, project: Path) -> None:
    (home / ".claude").mkdir()
    (home / ".claude/settings.json").write_text("{}")
    agent = home / "tools/claude"
    agent.parent.mkdir()
    agent.write_text(
        "#!/bin/sh\necho mine > ~/.claude/history; echo x > ~/.claude/settings.json; echo $?\n"
    )
    agent.chmod(0o755)
    done = ran("--", str(agent))
    assert done.stdout == b"2\n"
    assert (home / ".claude/history").read_text() == "mine\n"
    assert (
        home / ".claude.json"
    ).read_text() == "{}\n"  # made, so that what it keeps there is kept
    assert (home / ".claude/settings.json").read_text() == "{}"


def test_a_file_of_the_project_is_no_agent_whatever_its_name_is(
    home: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".claude").mkdir()
    (home / ".claude/.credentials.json").write_text("a secret")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "another")
    (project / "claude").write_text('#!/bin/sh\nls -A ~/.claude; echo "$ANTHROPIC_API_KEY"\n')
    (project / "claude").chmod(0o755)
    for command in ("./claude", f"{project}/claude"):
        done = ran("--", command)
        assert (done.stdout, done.returncode) == (b"\n", 0)
        assert b"cannot access" in done.stderr
    assert "agent      none that is known\n" in ran("--explain", "--", "./claude").stdout.decode()
    missing = ran("--explain", "--", "nonesuch").stdout.decode()
    assert "agent      none that is known; no directory of PATH has nonesuch\n" in missing


def test_a_command_is_hung_up_with_the_terminal_of_its_caller(project: Path) -> None:
    line = "trap 'echo hung up > told; exit' HUP; echo ready; while :; do sleep 1; done"
    with Sandbox(policy=policy_named("project"), pool=0) as sandbox:
        with sandbox.exec(["sh", "-c", line], terminal=(24, 80)) as run:
            os.set_blocking(run.program.master, True)
            assert b"ready" in os.read(run.program.master, 100)
            run.program.hang_up()
        assert (project / "told").read_text() == "hung up\n"


def test_explain_says_it_in_ten_lines_and_runs_nothing(project: Path) -> None:
    done = ran("--explain", "--allow", "api.example.org", "--", "touch", "made")
    lines = done.stdout.decode().splitlines()
    assert len(lines) == 10
    assert lines[0] == f"project    {project} (read and write)"
    assert "hosts      api.example.org" in lines
    assert not (project / "made").exists()


def test_what_it_left_running_ends_with_it(project: Path) -> None:
    assert shell("(sleep 1000; touch late) & echo started") == "started\n"
    assert soon(lambda: not _runs("sleep 1000"))


def _runs(command: str) -> bool:
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, check=True, text=True)
    return command in done.stdout.splitlines()


@pytest.mark.parametrize(
    "path",
    [".vscode/tasks.json", ".envrc", ".mcp.json", ".claude/settings.json", ".husky/pre-commit"],
)
def test_what_other_programs_obey_cannot_be_made(project: Path, path: str) -> None:
    subprocess.run(["git", "config", "core.hooksPath", ".husky/_"], cwd=project, check=True)
    directory, name = os.path.split(path)
    line = f"mkdir -p ./{directory}; echo x > {path}"
    done = ran("-v", "--shell", line)
    assert done.returncode != 0
    assert b"filesystem.protected" in done.stderr
    assert not (project / path).exists()
    line = f"mkdir d; echo x > d/{name}; rm -rf ./{directory}; mv d {directory or name}"
    assert ran("--shell", line).returncode != 0
    assert not (project / path).exists()
    if directory:
        (project / directory).mkdir(exist_ok=True)
    protected = path if path.startswith(".claude") else directory.partition("/")[0] or name
    assert shell(f"echo x > {path}", "--unprotect", protected) == ""
    assert (project / path).read_text() == "x\n"


def test_a_repository_that_a_command_makes_runs_nothing_on_the_host(project: Path) -> None:
    line = (
        "git init -q sub && cd sub && git commit -q --allow-empty -m one && git clone -q . ../copy"
        " && git config user.name me && cd .."
    )
    assert shell(line) == ""
    made = project / "made"
    evil = project / "evil"
    evil.write_text(f"#!/bin/sh\ntouch {made}\n")
    evil.chmod(0o755)
    attempts = (
        f"git -C sub config core.fsmonitor {evil}", f"cp {evil} sub/.git/hooks/post-checkout",
        f"printf '[core]\\n\\tfsmonitor = {evil}\\n' >> sub/.git/config",
        f"mkdir s; cp {evil} s/post-checkout; mv s sub/.git/hooks", "echo gitdir: ../evil > new/.git",
        "git worktree add -q other", "mv sub/.git g && echo x >> g/config && mv g sub/.git",
    )  # fmt: skip
    for attempt in attempts:
        ran("--shell", attempt)
    for name in ("sub", "copy", "g"):
        if (project / name).exists():
            for command in (["status"], ["checkout", "-q", "-b", "new"]):
                subprocess.run(
                    ["git", *command], cwd=project / name, capture_output=True, check=False
                )
    assert (project / "copy/.git/config").exists()
    assert not made.exists()


def test_the_same_from_python(project: Path) -> None:
    with Sandbox(policy=policy_named("project"), pool=0) as sandbox:
        with sandbox.exec(["sh", "-c", "echo two >> a.txt; exit 4"]) as run:
            assert os.read(run.program.stdout, 100) == b""
        assert run.exit_code == 4
        assert (project / "a.txt").read_text() == "one\ntwo\n"
        with pytest.raises(PolicyError, match="holds your home directory"):
            sandbox.exec(["ls"], project="/")


def test_a_review_leaves_the_project_as_it_is(home: Path, project: Path) -> None:
    (project / "old").write_text("x")
    line = "echo two >> a.txt; rm old; mkdir d; echo new > d/b; ln -s a.txt link; git add -A; ls"
    assert shell(line, "--review") == "a.txt\nd\nlink\n"
    assert {each.name: each.read_bytes() for each in project.iterdir() if each.is_file()} == {
        "a.txt": b"one\n", "old": b"x",
    }  # fmt: skip
    assert shell("cat a.txt d/b; git status --short", "--review") == (
        "one\ntwo\nnew\nA  a.txt\nA  d/b\nA  link\n"  # a further command goes on from there
    )
    (directory,) = (home / ".local/state/cellwright/changes").iterdir()
    assert (directory / "upper/a.txt").read_text() == "one\ntwo\n"
    assert (directory / "upper/d/b").stat().st_uid == project.stat().st_uid


def test_changes_that_wait_are_one_commands_at_a_time(project: Path) -> None:
    with Sandbox(policy=policy_named("project"), pool=0) as sandbox:
        with sandbox.exec(["cat"], review=True), pytest.raises(BusyError, match="has the changes"):
            sandbox.exec(["true"], review=True)
        with sandbox.exec(["true"], review=True) as run:
            pass
        assert run.exit_code == 0


def test_a_server_on_the_hosts_loopback_is_reached_by_its_port(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = f"exec 3<>/dev/tcp/localhost/{port} && head -c 5 <&3"
        assert ran("--", "bash", "-c", line).returncode == 1  # localhost is the cell's own
        with subprocess.Popen(
            (*COMMAND, "--host-port", str(port), "--", "bash", "-c", line), stdout=subprocess.PIPE
        ) as process:
            client, _ = server.accept()
            with client:
                client.sendall(b"hello")
            assert process.communicate(timeout=60) == (b"hello", None)


@pytest.fixture
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes of other processes of this user are not ours to change, by commands either."""
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))


def allow(host: str) -> None:
    command = (sys.executable, "-m", "cellwright", "network", "allow", host)
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)


HOST = "files.example.org"
ASKS = f"getent hosts {HOST} || echo refused; getent hosts nosuch.localdomain"


@pytest.mark.usefixtures("own_records")
def test_a_refused_host_is_told_at_once_and_allowed_while_the_command_runs(project: Path) -> None:
    line = f"{ASKS}; read x; getent hosts {HOST}"
    with subprocess.Popen(
        (*COMMAND, "--shell", line), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"refused\n"
        assert process.stderr.readline().decode() == (
            f"cellwright: {HOST} is not among the hosts that this command may reach; to allow it: "
            f"cellwright network allow {HOST}, or from the start by --allow {HOST}\n"
        )
        allow(HOST)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline().startswith(b"198.1")
        assert process.stderr.read() == b""  # told once, and no name that only a local network has
        assert process.wait(60) == 0


@pytest.mark.usefixtures("own_records")
def test_at_a_terminal_its_title_tells_of_a_refused_host_until_it_is_allowed(project: Path) -> None:
    person = Person(*["--", "sh"], command=COMMAND)
    try:
        person.type(f"{ASKS}\n".encode())
        person.until(f"\x1b[22;2t\x1b]2;cellwright network allow {HOST}\x07".encode())
        allow(HOST)
        person.until(b"\x1b]2;\x07\x1b[23;2t")
        person.type(b"getent hosts other.example.org; exit 3\n")
        assert person.end() == 3
        person.until(b"\x1b]2;\x07\x1b[23;2t")
        assert f"{HOST} is not".encode() not in person.seen
        person.until(b"other.example.org is not among the hosts")
        assert person.is_restored()
    finally:
        person.close()


# Ctrl-Z


@pytest.fixture
def outer(project: Path) -> Iterator[Person]:
    """A person at a shell of this host."""
    command = "bash", "--norc", "--noprofile", "-i"
    person = Person(command=command)
    try:
        person.type(b"PS1='outer> '; cellwright() { %s \"$@\"; }\n" % " ".join(CELLWRIGHT).encode())
        person.until(b"outer> ")
        yield person
    finally:
        person.close()


def test_ctrl_z_stops_the_command_and_fg_continues_it(outer: Person) -> None:
    counts = "echo begun; read word; echo got $word; stty size; exit 3"
    outer.type(f"cellwright exec --shell '{counts}'; echo status $?\n".encode())
    outer.until(b"begun\r\n")
    outer.type(b"\x1a")
    outer.until(b"Stopped")
    outer.until(b"outer> ")
    outer.type(b"echo $((20 + 3))\n")  # the shell has the terminal, as it was
    outer.until(b"23\r\n")
    outer.type(b"fg >/dev/null; echo status $?\n")
    outer.until(b"fg >/dev/null; echo status $?\r\n")
    outer.type(b"word\n")
    outer.until(b"got word\r\n")
    outer.until(b"30 100\r\n")
    outer.until(b"status 3\r\n")


def test_a_command_in_the_background_goes_on_and_shows_what_it_writes(outer: Person) -> None:
    line = "echo begun; i=0; while [ $i -lt 40 ]; do sleep 0.05; i=$((i+1)); done; echo e''nd; read x; exit 4"
    outer.type(f'cellwright exec --shell "{line}"\n'.replace("$", "\\$").encode())
    outer.until(b"begun\r\n")
    outer.type(b"\x1a")
    outer.until(b"Stopped")
    outer.type(b"bg\n")
    outer.until(b"end\r")
    outer.type(b"fg >/dev/null; echo status $?\n")
    outer.until(b"status $?\r\n")
    outer.type(b"x\n")
    outer.until(b"status 4\r\n")


def test_ctrl_z_goes_to_a_shell_in_the_cell(outer: Person) -> None:
    outer.type(b"cellwright exec -- bash --norc -i\n")
    outer.until(b"bash")
    outer.type(b"PS1='in''ner> '; echo be''gun; cat\n")
    outer.until(b"begun\r\n")
    outer.type(b"words\n")
    outer.until(b"words\r\nwords\r\n")
    outer.type(b"\x1a")
    outer.until(b"Stopped")
    outer.until(b"inner> ")
    outer.type(b"exit; exit\n")
    outer.until(b"outer> ")


def test_a_full_screen_is_left_and_painted_again(outer: Person) -> None:
    paints = (
        "printf '\\033[?1049h'; trap 'echo painted' WINCH; echo begun; while :; do sleep 0.1; done"
    )
    outer.type(f'cellwright exec --shell "{paints}"\n'.encode())
    outer.until(b"\x1b[?1049h")
    outer.until(b"begun")
    outer.type(b"\x1a")
    outer.until(b"\x1b[?1049l")
    outer.until(b"outer> ")
    outer.type(b"fg\n")
    outer.until(b"\x1b[?1049h")
    outer.until(b"painted")
    outer.type(b"\x03")
    outer.until(b"outer> ")


# Review


def test_the_next_command_takes_the_lock_of_one_that_was_killed(project: Path) -> None:
    line = "echo x > first; echo ready; exec sleep 1000"
    with subprocess.Popen(
        (*COMMAND, "--review", "--shell", line), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.kill()
    assert shell("cat first; ps ax | grep -c '[s]leep 1000' || true", "--review") == "x\n0\n"


def test_a_linked_worktree_is_reviewed_and_its_repository_only_read(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = "git", "-C", str(project), "-c", "user.name=A", "-c", "user.email=a@example.org"
    linked = project.parent / "linked"
    for words in (["add", "."], ["commit", "-qm", "first"], ["worktree", "add", "-q", str(linked)]):
        subprocess.run((*git, *words), check=True, capture_output=True)
    monkeypatch.chdir(linked)
    line = "echo two >> a.txt; git diff --stat; git commit -qam second 2>/dev/null || echo refused"
    told = shell(line, "--review")
    assert "1 file changed" in told
    assert told.endswith("refused\n")
    assert (linked / "a.txt").read_text() == "one\n"
    open_changes(linked).apply()
    assert (linked / "a.txt").read_text() == "one\ntwo\n"


def test_protected_paths_of_the_caller_are_left_out_when_changes_are_applied(project: Path) -> None:
    shell("echo first > rules.md", "--review", "--protect", "rules.md")
    shell("echo second > other.md", "--review")  # the protection of a later command is none
    assert [each.path for each in open_changes(project).apply()] == ["other.md"]
    assert [each.name for each in project.glob("*.md")] == ["other.md"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts an overlay of the host")
def test_a_review_where_no_overlay_can_be_had_works_on_a_copy(
    project: Path, tmp_path: Path
) -> None:
    """On an overlay, as in many containers.  A part is applied between two commands."""
    for name in ("kept", "changed", "removed", "removed later", "part"):
        (project / name).write_text(name)
    (project / "link").symlink_to("kept")
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    first = "cat link; echo new > new; echo more >> changed; echo p > part; rm removed 'removed later'; mkdir -p d/e"
    then = "cat part changed; ls; rm kept"
    steps = f"""
mount -t overlay overlay -o {options} {tmp_path}/merged
export XDG_STATE_HOME={tmp_path}/merged
"$@" exec --review --shell {shlex.quote(first)} && "$@" changes apply part removed &&
"$@" exec --review --shell {shlex.quote(then)} && "$@" changes list &&
! "$@" changes discard new && "$@" changes apply
"""
    done = subprocess.run(
        ("unshare", "-m", "sh", "-ec", steps, "sh", *CELLWRIGHT),
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done
    said = done.stderr.decode().splitlines()
    assert (
        said.count(
            "cellwright: no overlay can be had here: the command works on a copy of the project"
        )
        == 1
    )
    shown = done.stdout.decode()
    assert "keptp\nchanged" in shown.replace("applied", ""), shown
    assert sorted(each.name for each in project.iterdir() if each.name != ".git") == [
        "a.txt", "changed", "d", "link", "new", "part",
    ]  # fmt: skip
    assert (project / "changed").read_text() == "changedmore\n"


@pytest.mark.usefixtures("own_records")
def test_the_option_for_package_registries_is_told(project: Path) -> None:
    host = known_programs().registries.hosts[0]
    done = ran("--shell", f"getent hosts {host} || echo refused")
    assert done.stdout == b"refused\n"
    assert done.stderr.endswith(b", or from the start by --allow-registries\n")


CONNECTS = """
import socket, ssl, sys
sock = socket.create_connection(("localhost", int(sys.argv[1])))
ssl.create_default_context().wrap_socket(sock, server_hostname="localhost")
"""


@pytest.mark.usefixtures("own_records")
def test_an_allowed_host_whose_address_is_not_public_is_told_with_the_option(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = f"localhost:{server.getsockname()[1]}"
        command = ("--", "/usr/bin/python3", "-c", CONNECTS, host.partition(":")[2])
        done = ran("--allow", host, *command)
        assert b"ConnectionResetError" in done.stderr
        told = f"cellwright: a connection to {host} was refused: 127.0.0.1 is loopback"
        assert told in done.stderr.decode()
        assert f"; to allow it: --allow {host}@127.0.0.1\n" in done.stderr.decode()
        with subprocess.Popen((*COMMAND, "--allow", f"{host}@127.0.0.1,::1", *command)) as process:
            server.settimeout(60)
            server.accept()[0].close()
            assert process.wait(60) == 1


# Ports that this host reaches

SERVER = """
import http.server, socket, sys
host, port, marker = sys.argv[1], int(sys.argv[2]), sys.argv[3]
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(marker.encode())
    def log_message(self, *_): pass
server = Server((host, port), Handler)
print("ready", flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def exposing(*words: str, expose: str = "0:3000") -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a command with an exposed port; yield it with the address that this host reaches."""
    command = (*COMMAND, "--expose", expose, "--", *words)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stderr
            told = process.stderr.readline().decode()
            yield process, told.split()[1] if told.startswith("cellwright: http") else told
        finally:
            process.kill()


def page(url: str) -> bytes:
    """Return what the server answers; b"" if none does."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return bytes(answer.read())
    except (OSError, http.client.HTTPException):
        return b""


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_server_is_reached_wherever_it_listens(project: Path, host: str) -> None:
    words = 'exec python3 -c "$0" "$@"', SERVER, host, "3000", "of the cell"
    with exposing("sh", "-c", *words) as (process, url):
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        assert url.startswith("http://127.0.0.1:")
        assert page(url) == b"of the cell"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ConnectionRefusedError):  # nothing listens after the command
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 60)


def test_a_server_that_starts_later_is_reached_and_again_after_its_end(project: Path) -> None:
    line = (
        'read word; while read word; do python3 -c "$0" :: 3000 "$word" & read word; '
        "kill $!; wait $!; echo ended; done"
    )
    with exposing("sh", "-c", line, SERVER) as (process, url):
        assert process.stdin
        assert process.stdout
        assert page(url) == b""
        process.stdin.write(b"begin\n")
        for word in (b"first", b"second"):
            process.stdin.write(word + b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"ready\n"
            assert page(url) == word
            process.stdin.write(b"end\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"ended\n"
            assert page(url) == b""


def test_a_port_in_use_ends_the_command_and_is_named(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = ran("--expose", f"{port}:3000", "--", "sleep", "1000")
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use".encode() in done.stderr


def test_a_command_that_stops_itself_gives_the_terminal_back_at_the_next_key(project: Path) -> None:
    bash = ("setsid", "--wait", "--ctty", "bash", "--norc", "--noediting", "-i")
    line = "echo ready; kill -STOP $$; read x; echo got$x"
    person = Person(command=bash)
    try:
        person.type(f"{shlex.join([*COMMAND, '--shell', line])}\n".encode())
        person.until(b"ready\r\n")
        while b"Stopped" not in person.seen:
            if select.select([person.master], [], [], 0.5)[0]:
                person.seen += os.read(person.master, 65536)
            else:  # the first key may have come before it stopped
                person.type(b"x")
        person.type(b"\x15echo out$((40 + 2)); fg; exit 3\n")
        person.until(b"out42")
        person.type(b"\n")
        person.until(b"got")
        assert person.end() == 3
    finally:
        person.close()


def test_a_shell_in_the_cell_gets_ctrl_z_itself(project: Path) -> None:
    person = Person("--", "bash", "--norc", "--noediting", "-i", command=COMMAND)
    try:
        person.type(b"trap 'echo caught' TSTP; kill -TSTP $$; echo still$((40 + 2))\n")
        person.until(b"still42")
        person.type(b"\x1a")
        person.type(b"echo again$((40 + 2)); exit 3\n")
        person.until(b"again42")
        assert person.end() == 3
    finally:
        person.close()
