"""Protected paths: no program makes or changes one, in any way that Linux has, and all else works as
without them."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cellwright import PolicyError, Sandbox, SandboxResult
from cellwright.benchmarks.census import children
from cellwright.policies.compiling.environment import check_protected
from cellwright.policies.policy import Policy
from cellwright.runner.launcher.git_settings import why_not
from cellwright.testing import inspect
from tests.conftest import policy_named, soon, with_limits

PAYLOAD = next(Path(__file__).with_name("payloads").glob("LAY-39*"))
# What that payload attacks, beneath the directory that it may write.
PATTERNS = (
    ".envrc", ".tool/settings", "*/**/.git/config", "*/**/.git/commondir", "*/**/.git/hooks/*[!e]",
)  # fmt: skip
Run = Callable[[str], SandboxResult]


def policy_on(directory: Path, *, protected: bool = True) -> Policy:
    policy = with_limits(policy_named("workshop"), wall_seconds=120.0, cpu_seconds=120.0)
    patterns = tuple(f"{directory}/{each}" for each in PATTERNS) if protected else ()
    files = msgspec.structs.replace(
        policy.filesystem, write=(str(directory),), as_owner=True, protected=patterns
    )
    return msgspec.structs.replace(policy, filesystem=files)


@pytest.fixture
def project() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="cellwright-protected-") as place:
        kept = Path(place, "kept/.git/config")
        kept.parent.mkdir(parents=True)
        kept.write_text("[core]\n\tbare = false\n")
        for path in (Path(place), *Path(place).rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        yield Path(place)


def attacked(project: Path, *, protected: bool) -> tuple[dict[str, object], SandboxResult]:
    environment = {"SBXT_WRITABLE": str(project)}
    with Sandbox(policy=policy_on(project, protected=protected), pool=0) as sandbox:
        header = f"import os; os.environ.update({environment!r})\n"
        result = sandbox.execute(header + PAYLOAD.read_text())
    lines = result.stdout.splitlines()
    assert lines, result
    return msgspec.json.decode(lines[-1]), result


@pytest.mark.needs("userns")
def test_no_way_makes_or_changes_a_protected_path(project: Path) -> None:
    verdict, result = attacked(project, protected=True)
    assert verdict["escaped"] is False, verdict
    assert (project / "kept/.git/config").read_text() == "[core]\n\tbare = false\n"
    refused = {each.syscall for each in result.violations if "protected" in each.rule}
    assert {"openat", "mkdir", "symlink", "link", "rename", "renameat2", "linkat"} <= refused


@pytest.mark.needs("userns")
def test_every_way_works_where_nothing_is_protected(project: Path) -> None:
    verdict, _ = attacked(project, protected=False)
    # most of 27 ways for each of five paths, and those by directories and descriptors
    assert int(str(verdict["detail"]).partition(":")[0]) > 90, verdict


@pytest.fixture
def run(project: Path) -> Iterator[Run]:
    with Sandbox(policy=policy_on(project), pool=0) as sandbox:

        def execute(code: str) -> SandboxResult:
            result = sandbox.execute(f"import os\nos.chdir({str(project)!r})\n{code}")
            assert result.ok, (result.error, result.stderr)
            return result

        yield execute


USUAL = """
import errno, ctypes, stat, threading, tempfile
def answer(call, *arguments, **options):
    try:
        return call(*arguments, **options)
    except OSError as error:
        return errno.errorcode[error.errno]
seen = {}
os.umask(0o027)
made = os.open("file", os.O_CREAT | os.O_RDWR, 0o666)
seen["umask"] = oct(os.fstat(made).st_mode)
seen["cloexec"] = os.get_inheritable(made)
os.write(made, b"one")
extra = os.open("file", os.O_WRONLY | os.O_APPEND)
os.write(extra, b" two")
seen["append"] = open("file").read()
import fcntl
seen["flags"] = [fcntl.fcntl(each, fcntl.F_GETFL) & (os.O_NONBLOCK | os.O_APPEND) for each in (made, extra)]
libc = ctypes.CDLL(None, use_errno=True)
raw = libc.syscall(257, -100, b"raw", os.O_CREAT | os.O_WRONLY, 0o600)
seen["no cloexec"] = fcntl.fcntl(raw, fcntl.F_GETFD)
os.mkdir("d"); os.symlink("d", "to d"); os.symlink("file", "to file"); os.symlink("loop", "loop")
seen["exclusive"] = answer(os.open, "file", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
seen["exclusive link"] = answer(os.open, "to file", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
seen["nofollow"] = answer(os.open, "to file", os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW)
seen["loop"] = answer(os.open, "loop", os.O_CREAT | os.O_WRONLY)
seen["directory"] = answer(os.open, "d", os.O_CREAT | os.O_WRONLY)
seen["slash"] = answer(os.open, "nothing/", os.O_CREAT | os.O_WRONLY)
seen["dot"] = answer(os.mkdir, ".")
seen["root"] = answer(os.mkdir, "/")
seen["empty"] = answer(os.open, "", os.O_CREAT | os.O_WRONLY)
seen["no directory"] = answer(os.open, "nothing/x", os.O_CREAT | os.O_WRONLY)
seen["a file above"] = answer(os.open, "file/x", os.O_CREAT | os.O_WRONLY)
seen["long"] = answer(os.mkdir, "x" * 5000)
seen["long name"] = answer(os.mkdir, "x" * 300)
seen["descriptor"] = answer(os.mkdir, "x", dir_fd=999)
ctypes.set_errno(0); libc.syscall(83, 4096, 0o700)
seen["address"] = errno.errorcode[ctypes.get_errno()]
seen["read-only mount"] = answer(os.mkdir, "/usr/x")
seen["not shown"] = answer(os.mkdir, "/root/x")
seen["openat2"] = (ctypes.set_errno(0), libc.syscall(437, -100, b"file", (ctypes.c_uint64 * 3)(), 24), errno.errorcode.get(ctypes.get_errno()))[2]
os.link("file", "hard"); os.rename("hard", "moved"); seen["links"] = os.stat("moved").st_nlink
os.link("to file", "link of link", follow_symlinks=False); seen["link of link"] = os.readlink("link of link")
seen["exchange"] = libc.syscall(316, -100, b"moved", -100, b"d", 2), stat.S_ISDIR(os.stat("moved").st_mode)
libc.syscall(316, -100, b"moved", -100, b"d", 2)
os.truncate("file", 3); seen["truncated"] = open("file").read()
with open(os.open("to d/through a link", os.O_CREAT | os.O_WRONLY), "w"): pass
seen["through a link"] = os.listdir("d")
here = os.open("d", os.O_RDONLY); os.mkdir("beneath", dir_fd=here)
os.chdir("d"); open("../up", "w").close(); os.chdir("..")
os.mkfifo("pipe")
read = []
thread = threading.Thread(target=lambda: read.append(open("pipe").read())); thread.start()
open("pipe", "w").write("through"); thread.join(); seen["pipe"] = read
nameless = os.open(".", os.O_TMPFILE | os.O_RDWR); os.write(nameless, b"x")
libc.syscall(265, -100, b"/proc/self/fd/%d" % nameless, -100, b"named", 0x400); seen["named"] = open("named").read()
seen["null"] = open("/dev/null", "w").write("x")
with open("/dev/fd/%d" % os.open("file", os.O_RDWR), "w") as again: again.write("again")
seen["again"] = open("file").read()
with tempfile.TemporaryFile() as file: seen["temporary"] = file.write(b"x")
os.mkdir(".tool"); os.mkdir("r"); os.mkdir("r/.git"); os.mkdir("r/.git/hooks")
open("r/.git/hooks/pre-commit.sample", "w").close()
open("r/.git/config.lock", "w").write("[core]\\n\\tbare = false\\n"); os.rename("r/.git/config.lock", "r/.git/config")
seen["settings"] = open("r/.git/config").read(), sorted(os.listdir("r/.git"))
seen["a repository is moved"] = answer(os.rename, "r", "d/r"), sorted(os.listdir())
seen
"""


@pytest.mark.needs("userns")
def test_calls_that_make_names_answer_as_those_of_the_kernel(project: Path, run: Run) -> None:
    seen = run(USUAL).value
    other = project / "other"
    other.mkdir(mode=0o777)
    other.chmod(0o777)
    with Sandbox(policy=policy_on(other, protected=False), pool=0) as sandbox:
        usual = sandbox.execute(f"import os\nos.chdir({str(other)!r})\n{USUAL}").value
    assert isinstance(seen, dict)
    assert isinstance(usual, dict)
    assert seen.pop("openat2") == "ENOSYS"  # its flags lie behind a pointer
    del usual["openat2"]
    before = seen["a repository is moved"]
    before[1].remove("kept")
    assert seen == usual
    assert len(seen) > 30


@pytest.mark.needs("userns")
def test_a_refusal_is_told_with_the_path_and_the_reason(run: Run) -> None:
    result = run(
        "os.makedirs('a/.git')\nopen('a/.git/x', 'w').write('[alias]\\nst = !evil\\n')\n"
        "for act in (lambda: open('.envrc', 'w'), lambda: os.rename('a/.git/x', 'a/.git/config')):\n"
        "    try:\n        act()\n    except PermissionError: pass"
    )
    first, second = (each.rule for each in result.violations)
    assert first.startswith("filesystem.protected: /")
    assert first.endswith("/.envrc")
    assert second.endswith("/a/.git/config: a program of a cell may not set alias.st")


@pytest.mark.needs("userns")
def test_a_name_that_is_there_is_an_error_and_no_refusal(run: Run) -> None:
    result = run(
        "import errno\nat, seen = 'kept/.git/config', []\nopen('x', 'w').close()\n"
        "for make in (os.mkdir, os.mkfifo, lambda at: os.symlink('x', at), lambda at: os.link('x', at),\n"
        "        lambda at: open(at, 'x')):\n"
        "    try:\n        make(at)\n    except OSError as error: seen.append(errno.errorcode[error.errno])\n"
        "seen"
    )
    assert result.value == ["EEXIST"] * 5
    assert not result.violations


@pytest.mark.needs("userns")
def test_a_process_that_hides_its_memory_makes_names_as_others(run: Run) -> None:
    hide = "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
    assert run(hide + "open('x', 'w').close()\nos.path.exists('x')").value is True


@pytest.mark.needs("userns")
def test_a_guard_that_ends_is_replaced_and_none_is_left(project: Path) -> None:
    with Sandbox(policy=policy_on(project), pool=0) as sandbox, sandbox.session() as session:
        assert session.execute(f"open('{project}/x', 'w').close()").ok
        launcher = inspect(sandbox).supervisor.generation.launcher.pids()[2]
        (makers,) = _below(launcher, "cell-guards")
        (guard,) = _below(makers, "cell-guard")
        os.kill(guard, signal.SIGKILL)
        assert session.execute(
            f"for _ in range(2):\n    try:\n        open('{project}/y', 'w').close()\n"
            "    except OSError: pass"
        ).ok
        assert (project / "y").exists()
        (other,) = _below(makers, "cell-guard")
    assert soon(lambda: not any(os.path.exists(f"/proc/{each}") for each in (makers, other)))


def _below(pid: int, name: str) -> list[int]:
    return [each for each in children(pid) if Path(f"/proc/{each}/comm").read_text() == f"{name}\n"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"write": ()}, "must lie beneath"),
        ({"protected": ("/elsewhere/x",)}, "must lie beneath"),
        ({"protected": ("x",)}, "plain absolute path"),
    ],
)
def test_a_pattern_that_protects_nothing_is_refused(
    change: dict[str, tuple[str, ...]], complaint: str
) -> None:
    policy = policy_on(Path("/srv/project"))
    files = msgspec.structs.replace(policy.filesystem, **change)
    with pytest.raises(PolicyError, match=complaint):
        check_protected(msgspec.structs.replace(policy, filesystem=files))


def test_protecting_needs_the_listener() -> None:
    policy = policy_on(Path("/srv/project"))
    with pytest.raises(PolicyError, match="needs the layer listener"):
        check_protected(msgspec.structs.replace(policy, optional_layers=("listener",)))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[core]\n\tbare = false\n[remote "a b"]\n\turl = https://example.org/x.git\n', ""),
        (
            '# a\n[branch "main"]\n\tremote = .\n\tmerge = refs/heads/main\n[user]\nname = A "B" C\n',
            "",
        ),
        ("[core]\n\tfsmonitor = x\n", "core.fsmonitor"),
        ("[core]\n\thooksPath = x\n", "core.hookspath"),
        ("[CORE]\n\tSshCommand = x\n", "core.sshcommand"),
        ("[core] fsmonitor = x\n", "not understood"),
        ("[core]\n\tbare = false\\\n\tfsmonitor = x\n", "core.bare"),
        ("[include]\n\tpath = x\n", "include.path"),
        ('[remote "x"]\n\turl = ext::sh -c x\n', "helper"),
        ('[remote "x"]\n\turl = "ext::sh -c x"\n', "helper"),
        ('[remote "x"]\n\tuploadpack = x\n', "remote.uploadpack"),
        ("[core.x]\n\tbare = x\n", "not understood"),
        ("[core]\r\tfsmonitor = x\n", "control"),
        ("\ufeff[core]\n", "not understood"),
        ("x = y\n", ".x"),
        ("[core]\n" + "# x\n" * 20000, "more than"),
    ],
)
def test_settings_that_name_a_command_are_known(text: str, complaint: str) -> None:
    answer = why_not(text.encode())
    assert complaint in answer
    assert bool(answer) is bool(complaint)
