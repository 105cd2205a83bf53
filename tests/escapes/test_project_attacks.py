"""Attacks of a prompt-injected agent that `cellwright exec` runs on a project: each succeeds outside a
cell, and none inside one, as root and as an ordinary user, with and without `--review`."""

import contextlib
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import soon
from tests.network import needs_openssl
from tests.runner.test_ordinary_user import PYTHON, readable  # noqa: F401 - a fixture

pytestmark = pytest.mark.needs("userns")
USER = 54323
SECRET = "secret-2718281828"
KEPT = ("--policy", "policy.toml")  # the person's options
_MAIN = "import runpy; runpy.run_module('cellwright', run_name='__main__')"

# Lines of sh(1) in the project that print WON; each leaves what the next one needs.
ATTACKS = {
    # reading what the project does not have
    "ssh": "grep -q secret ~/.ssh/id_ed25519 && echo WON",
    "aws": "grep -q secret ~/.aws/credentials && echo WON",
    "netrc": "grep -q secret ~/.netrc && echo WON",
    "history": "grep -q secret ~/.bash_history && echo WON",
    "other project": "grep -q secret ../other/file && echo WON",
    "list the home": "ls -a ~ | grep -q .ssh && echo WON",
    "list projects": "ls .. | grep -q other && echo WON",
    "through a link": "ln -s ~/.ssh l; grep -q secret l/id_ed25519 && echo WON; rm l",
    "through a relative link": "ln -s ../other l; grep -q secret l/file && echo WON; rm l",
    "hard link": "ln ~/.ssh/id_ed25519 h && grep -q secret h && echo WON; rm -f h",
    "through /proc/self/root": "grep -q secret /proc/self/root$HOME/.netrc && echo WON",
    "through dots": "grep -q secret ../../.ssh/id_ed25519 && echo WON",
    "clone another project": "git clone -q ../other c && grep -q secret c/file && echo WON; rm -rf c",
    "git-dir of another": "git --git-dir=../other/.git show HEAD:file | grep -q secret && echo WON",
    "alternates": "echo ~/src/other/.git/objects > .git/objects/info/alternates; "
    "git cat-file -p $BLOB | grep -q secret && echo WON; rm .git/objects/info/alternates",
    "submodule": "git -c protocol.file.allow=always submodule add -q ../other s && "
    "grep -q secret s/file && echo WON; git rm -qf s .gitmodules; rm -rf .git/modules",
    "find": "find ~ -name id_ed25519 | grep -q . && echo WON",
    "archive": "tar c ~/.aws 2>/dev/null | grep -q secret && echo WON",
    "key of an agent": 'test -n "$ANTHROPIC_API_KEY" && echo WON',
    "other variable": 'test -n "$DATABASE_PASSWORD" && echo WON',
    "variables of the parent": "tr '\\0' '\\n' < /proc/$PPID/environ | grep -q ^DATABASE && echo WON",
    "variables of all": "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep -q ^DATABASE && echo WON",
    "agent of ssh": 'test -S "$SSH_AUTH_SOCK" && echo WON',
    "state of cellwright": "ls ~/.local/state/cellwright/mine && echo WON",
    # writing what other programs obey
    "new hook": "echo x > .git/hooks/post-checkout && echo WON; rm -f .git/hooks/post-checkout",
    "link for a hook": "ln -s /bin/true .git/hooks/x && echo WON; rm -f .git/hooks/x",
    "change a hook": "echo x >> .git/hooks/pre-commit && echo WON",
    "hooks made executable": "chmod 777 .git/hooks/pre-commit && echo WON",
    "rename hooks": "mv .git/hooks g && echo WON; mv g .git/hooks",
    "replace hooks": "mkdir h; mv .git/hooks h/ && echo WON; mv h/hooks .git/; rmdir h",
    "rename the directory of git": "mv .git g && echo WON; mv g .git",
    "git config": "git config core.fsmonitor x && echo WON; git config --unset core.fsmonitor",
    "append to config": "cp .git/config c; echo '[a]' >> .git/config && echo WON; cat c > .git/config",
    "rename over config": "cp .git/config c; mv -f c .git/config && echo WON; rm -f c",
    "remove config": "cp .git/config c; rm -f .git/config && echo WON; cat c > .git/config; rm -f c",
    "hard link to config": "ln .git/config h && echo WON; rm -f h",
    "write by a link": "ln -s .git/config l; echo '#' >> l && echo WON; rm l",
    "write by a directory link": "ln -s .git l; echo '#' >> l/config && echo WON; rm l",
    "write by a descriptor": "(exec 3< .git/config; echo '#' >> /proc/self/fd/3) && echo WON",
    "config of a worktree": "git worktree add -q w -b w && git -C w config core.pager x && echo WON; "
    "git config --unset core.pager; git worktree remove -f w; git branch -qD w",
    "push to oneself": "git config receive.denyCurrentBranch ignore && echo WON",
    "editor's tasks": "echo {} > .vscode/tasks.json && echo WON",
    "new file of an editor": "echo {} > .vscode/launch.json && echo WON",
    "rename an editor's directory": "mv .vscode v && echo WON; mv v .vscode",
    "direnv": "echo x >> .envrc && echo WON",
    "replace direnv's": "echo x > e; mv -f e .envrc && echo WON; rm -f e",
    "remove direnv's": "cp .envrc e; rm -f .envrc && echo WON; cat e > .envrc; rm e",
    "agent's settings": "echo {} > .claude/settings.json && echo WON",
    "directory above settings": "mv .claude c && echo WON; mv c .claude",
    "servers of an agent": "echo {} > .mcp.json && echo WON",
    "shell's files": "echo x >> ~/.bashrc; echo WON",
    "own policy": "echo '#' >> policy.toml && echo WON",
    "replace one's policy": "cp policy.toml p; mv -f p policy.toml && echo WON; rm -f p",
    "parent of one's policy": "echo '#' >> parent.toml && echo WON",
    "identity of git": "git config --global user.name x && echo WON",
    # processes, sockets
    "host's loopback": "python3 -c 'import socket;socket.create_connection((\"127.0.0.1\", {port}))'"
    " && echo WON",
    "socket by a path": 'python3 -c \'import os,socket;socket.socket(1).connect(os.environ["HOME"]+'
    '"/.s")\' && echo WON',
    "abstract socket": "python3 -c 'import socket;socket.socket(1).connect(\"\\0{name}\")' && echo WON",
    "processes of the host": "test -d /proc/{pid} && echo WON",
    "signal a process of the host": "kill -0 {pid} && echo WON",
}
HARMLESS = frozenset(("shell's files",))  # the home directory is in memory


class Person(NamedTuple):
    """A user with a home directory; `project` is a work tree of git in it."""

    home: Path
    project: Path
    uid: int
    command: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        blob = subprocess.run(
            ("git", "hash-object", "../other/file"), cwd=self.project, capture_output=True, check=True
        ).stdout.decode().strip()  # fmt: skip
        return {
            "PATH": "/usr/bin:/bin", "HOME": str(self.home), "ANTHROPIC_API_KEY": SECRET, "BLOB": blob,
            "DATABASE_PASSWORD": SECRET, "SSH_AUTH_SOCK": str(self.home / ".s"), "LC_ALL": "C.UTF-8",
        }  # fmt: skip

    def run(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        user = {} if self.uid == os.geteuid() else {"user": self.uid, "group": self.uid}
        return subprocess.run(
            words, cwd=self.project, env=self.environment(), capture_output=True, timeout=300, check=False,
            stdin=subprocess.DEVNULL, **user, **({"extra_groups": []} if user else {}),  # type: ignore[call-overload]
        )  # fmt: skip

    def state(self) -> dict[str, str]:
        """Return what no attack may change, by its path."""
        names = (
            ".git/config",
            ".git/hooks/*",
            ".vscode/*",
            ".claude/*",
            ".envrc",
            ".mcp.json",
            "*.toml",
        )
        found = [path for name in names for path in self.project.glob(name)]
        found += [path for path in self.home.glob(".*") if path.is_file()]
        return {str(path): path.read_text() for path in found}


def person_at(home: Path, uid: int, command: tuple[str, ...]) -> Person:
    for name in (
        ".ssh/id_ed25519",
        ".aws/credentials",
        ".netrc",
        ".bash_history",
        "src/other/file",
    ):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"{SECRET}\n")
    project = home / "src/project"
    (home / ".gitconfig").write_text("[user]\nname = Ada\nemail = ada@example.org\n")
    (home / ".local/state/cellwright/mine").mkdir(parents=True)
    for place in (project, home / "src/other"):
        subprocess.run(("git", "init", "-q", "-b", "main", str(place)), check=True)
    (project / ".git/hooks/pre-commit").write_text("#!/bin/sh\n")
    for name in (".vscode/tasks.json", ".claude/settings.json", ".mcp.json"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text("{ }\n")
    (project / ".envrc").write_text("export A=1\n")
    (project / "policy.toml").write_text('name = "mine"\nextends = "parent.toml"\n')
    (project / "parent.toml").write_text('name = "parent"\nextends = "project"\n')
    if uid != os.geteuid():
        for path in (home, *home.rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)
    made = Person(home, project, uid, command)
    for place in (project, home / "src/other"):
        for words in (("add", "."), ("commit", "-qm", "first")):
            done = made.run("git", "-C", str(place), *words)
            assert done.returncode == 0, done
    return made


@pytest.fixture(scope="module", params=["root", "user"])
def person(request: pytest.FixtureRequest) -> Iterator[Person]:
    if request.param == "user" and os.geteuid():
        pytest.skip("the tests run as an ordinary user already")
    with tempfile.TemporaryDirectory(prefix="cellwright-attacks-", dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        (home := Path(place, "home")).mkdir()
        if request.param == "root":
            python, uid = [sys.executable], os.geteuid()
        else:
            paths = [str(request.getfixturevalue("readable"))]
            code = f"import sys; sys.path[:0] = {paths!r}; sys.argv[0] = 'cellwright'; {_MAIN}"
            python, uid = [PYTHON, "-I", "-c", code], USER
        words = ("exec", "--optional", "cgroup")
        if uid != USER:
            python += ["-m", "cellwright"]
        yield person_at(home, uid, (*python, *words))


@pytest.fixture
def listening(person: Person) -> Iterator[dict[str, object]]:
    """Servers of the host, and a process of it."""
    name = f"cellwright-attacks-{os.getpid()}"
    path = person.home / ".s"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        user = {} if person.uid == os.geteuid() else {"user": person.uid}
        sleep = subprocess.Popen(("sleep", "600"), **user)  # type: ignore[call-overload]
        with socket.socket(socket.AF_UNIX) as by_path, sleep as process:
            by_path.bind(str(path))
            by_path.listen()
            path.chmod(0o777)
            yield {"port": tcp.getsockname()[1], "name": name, "pid": process.pid}
            process.kill()
            path.unlink()


def script(values: dict[str, object]) -> str:
    """Return all attacks as one script that names each before its output."""
    lines = []
    for name, line in ATTACKS.items():
        for key, value in values.items():
            line = line.replace(f"{{{key}}}", str(value))
        lines.append(f'echo "== {name}"\n( {line} ) 2>&1 < /dev/null')
    return "\n".join(lines)


def winners(output: bytes) -> set[str]:
    parts = output.decode(errors="replace").split("== ")[1:]
    assert {part.partition("\n")[0] for part in parts} == set(ATTACKS), output[-2000:]
    return {part.partition("\n")[0] for part in parts if "WON" in part.split("\n")}


def test_each_attack_succeeds_outside_a_cell(person: Person, listening: dict[str, object]) -> None:
    copy = person.home.with_name("copy")
    shutil.copytree(person.home, copy, symlinks=True, ignore=shutil.ignore_patterns(".s"))
    os.link(person.home / ".s", copy / ".s")
    for path in (copy, *copy.rglob("*")):
        os.chown(path, person.uid, person.uid, follow_symlinks=False)
    other = person._replace(home=copy, project=copy / "src/project")
    done = other.run("sh", "-c", 'sh -c "$0"; true', script(listening))
    assert set(ATTACKS) - winners(done.stdout) == set(), done.stdout.decode()


@pytest.mark.parametrize("mode", [(), ("--review",)], ids=["at once", "review"])
def test_no_attack_succeeds_in_a_cell(
    person: Person, listening: dict[str, object], mode: tuple[str, ...]
) -> None:
    before = person.state()
    done = person.run(*person.command, *KEPT, *mode, "--", "sh", "-c", script(listening))
    assert winners(done.stdout) == HARMLESS, done.stdout.decode()
    assert person.state() == before
    assert SECRET.encode() not in done.stdout + done.stderr


def running(mark: str) -> list[int]:
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in each.read_bytes().split(b"\0"):
                found.append(int(each.parent.name))
    return found


def test_no_process_stays(person: Person) -> None:
    mark = f"31415.{os.getpid()}"  # seconds
    hidden = f'trap "" HUP INT TERM; echo > begun; exec sleep {mark}'
    line = f"mkfifo begun; setsid sh -c '{hidden}' > /dev/null 2>&1 & cat begun; rm begun"
    assert person.run("sh", "-c", line).returncode == 0
    soon(lambda: running(mark))
    for each in running(mark):
        os.kill(each, signal.SIGKILL)
    soon(lambda: not running(mark))
    assert person.run(*person.command, "--", "sh", "-c", line).returncode == 0
    assert not running(mark)


SRT = """{"network": {"allowedDomains": [], "deniedDomains": []},
"filesystem": {"denyRead": [], "denyWrite": [], "allowWrite": [".", "build"]}}"""


@pytest.mark.parametrize("option", ["--write", "--read", "--settings"])
def test_a_link_of_the_project_is_no_path_of_the_next_command(person: Person, option: str) -> None:
    """An earlier command made it in place of a directory that the person's options name."""
    build = person.project / "build"
    settings = person.home / "srt.json"
    settings.write_text(SRT)
    words = (option, str(settings) if option == "--settings" else "build")
    read = (*person.command, *words, "--", "sh", "-c", f"cat build/id_ed25519 {person.home}/.ssh/*")
    assert person.run(*person.command, "--", "ln", "-s", "../../.ssh", "build").returncode == 0
    try:
        done = person.run(*read)
        assert b"programs could have made the link" in done.stderr
        assert SECRET.encode() not in done.stdout
        assert done.returncode == 2
        build.unlink()
        (person.home / "mine").symlink_to(".ssh")  # the person's own
        if option != "--settings":
            done = person.run(
                *person.command, option, "../../mine", "--", "sh", "-c", "cat ~/.ssh/*"
            )
            assert SECRET.encode() in done.stdout
    finally:
        build.unlink(missing_ok=True)
        (person.home / "mine").unlink(missing_ok=True)


def test_settings_in_the_project_are_read_only(person: Person) -> None:
    settings = person.project / "srt.json"
    settings.write_text(SRT.replace(', "build"', ""))
    os.chown(settings, person.uid, person.uid)
    line = "echo x > srt.json && echo WON; mv srt.json x && echo WON; rm -f srt.json && echo WON"
    try:
        assert person.run(
            *person.command, "--", "sh", "-c", f"cp srt.json s; {line}; mv -f s srt.json"
        ).stdout
        done = person.run(*person.command, "--settings", "srt.json", "--", "sh", "-c", line)
        assert done.stdout == b""
        assert done.stderr.count(b"srt.json") == 3, done
    finally:
        settings.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"])
def test_the_directories_of_cellwright_are_no_part_of_a_project(person: Person, name: str) -> None:
    words = ("env", f"{name}={person.project}/own", *person.command, "--", "true")
    done = person.run(*words)
    assert done.returncode == 2
    assert b"by which programs could leave their cell" in done.stderr


@needs_openssl
def test_the_file_of_a_credential_is_no_file_of_the_project(person: Person) -> None:
    key = person.project / "key"
    key.write_text("ghp_Secret0123456789abcdefghijklmnopqrst\n")
    key.chmod(0o600)
    os.chown(key, person.uid, person.uid)
    try:
        words = ("--credential", f"T=file:{key}@api.example.org", "--", "cat", "key")
        done = person.run(*person.command, *words)
        assert b"programs could read the file of its value" in done.stderr
        assert done.stdout == b""
    finally:
        key.unlink()


HARMFUL = r"\033]52;c;AAAA\007\033]0;t\007\033P$qm\033\\\033[5n\033[c\033[21t"


@pytest.mark.parametrize("stream", ["", " >&2"], ids=["output", "errors"])
def test_a_terminal_gets_no_harmful_sequences_where_input_is_none(
    person: Person, stream: str
) -> None:
    """Its answers would be typed text for the next program."""

    def shown(*words: str) -> bytes:
        master, own = pty.openpty()
        user = {} if person.uid == os.geteuid() else {"user": person.uid}
        with subprocess.Popen(
            words, cwd=person.project, env=person.environment(), stdin=subprocess.DEVNULL, stdout=own,
            stderr=own, **user,  # type: ignore[call-overload]
        ) as process:  # fmt: skip
            assert process.wait(120) == 0
        os.close(own)
        seen = b""
        try:
            while data := os.read(master, 65536):
                seen += data
        except OSError:  # EIO: all has been read
            os.close(master)
        return seen

    command = ("sh", "-c", f"printf '{HARMFUL}\\033[31mred'{stream}")
    assert b"\x1b]52;c;AAAA" in shown(*command)
    seen = shown(*person.command, "--", *command)
    assert seen.startswith(b"\x1b[31mred")
    assert b"]" not in seen
    assert b"P" not in seen
    assert b"[c" not in seen
    assert seen.endswith(b"\x1b[m")  # the colour is undone
