"""Programs of the distribution, unmodified, in a cell of the profile `workshop`."""

from pathlib import Path

import msgspec
import pytest

from cellwright import Sandbox
from tests.conftest import OPTIONAL, policy_named

pytestmark = pytest.mark.needs("userns")

# program that must be on the host -> a script, and its last line of output
PROGRAMS = {
    "make runs commands": ("make", "printf 'all:\\n\\techo made\\n' >Makefile; make", "made"),
    "make asks a shell": ("make", "printf 'X:=$(shell echo asked)\\nall:;@echo $(X)\\n' >Makefile; make", "asked"),
    "awk is found": ("awk", "printf 'a b\\n' | awk '{print $2}'", "b"),
    "which is found": ("which", "which which >/dev/null && echo found", "found"),
    "gcc has headers": (
        "cc",
        "printf '#include <stdio.h>\\nint main(){puts(\"compiled\");}' >a.c; cc a.c -o a && ./a",
        "compiled",
    ),
    "posix_spawn resets ids": (
        "python3",
        "python3 -c 'import os; os.waitpid(os.posix_spawn(\"/bin/echo\", [\"echo\", \"spawned\"], os.environ, resetids=True), 0)'",
        "spawned",
    ),
    "no core is wanted": ("bash", "ulimit -c 0 && echo none", "none"),
    "a child is killed under timeout": (
        "timeout", "timeout 5 sh -c 'kill -TERM $$' 2>&1; echo $?", "143",
    ),
    "a batch priority": ("chrt", "chrt --batch 0 echo batch", "batch"),
    "an idle class of disk time": ("ionice", "ionice -c 3 echo idle", "idle"),
    "no new privileges": ("setpriv", "setpriv --no-new-privs echo none", "none"),
    "everything is written back": ("sync", "sync && echo synced", "synced"),
    "a terminal is made": ("script", "script -qc tty /dev/null | tr -d '\\r'", "/dev/pts/0"),
    "openssl makes a certificate": (
        "openssl",
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout k -out c -subj /CN=x -days 1 2>/dev/null && echo made",
        "made",
    ),
    "names of services": ("getent", "getent services http | grep -c 80/tcp", "1"),
    "names of ids": ("id", "id -un root; id -un 65534", "nobody"),
    "tmux": (
        "tmux",
        "TERM=xterm tmux new-session -d 'echo in tmux >out; exec sleep 60'; until grep -q tmux out; do :; done; tmux kill-server; cat out",
        "in tmux",
    ),
    "gpg makes a key": (
        "gpg",
        "gpg --batch --quiet --passphrase '' --quick-gen-key a@example.org 2>/dev/null; gpg --list-keys 2>/dev/null | grep -c a@example.org",
        "1",
    ),
    "semaphores of System V": ("ipcs", "ipcmk -S 3 >/dev/null && ipcs -s | grep -c '^0x'", "1"),
}  # fmt: skip

# An instance with a memory of one page.
WEBASSEMBLY = (
    "node -e 'WebAssembly.instantiate(new Uint8Array([0,97,115,109,1,0,0,0,5,3,1,0,1]))"
    ".then(() => console.log(1), error => console.log(String(error)))'"
)


@pytest.mark.parametrize(
    ("script", "last"),
    [
        pytest.param(script, last, id=name, marks=pytest.mark.needs(program))
        for name, (program, script, last) in PROGRAMS.items()
    ],
)
def test_a_program_runs_as_on_the_host(workshop: Sandbox, script: str, last: str) -> None:
    result = workshop.execute(script, "bash")
    assert result.stdout.splitlines()[-1:] == [last], (result.stderr, result.violations)
    assert result.exit_code == 0


def test_calls_that_change_nothing_succeed_in_every_profile(strict: Sandbox) -> None:
    code = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
os.setuid(os.getuid()); os.setregid(-1, os.getgid()); os.setresuid(-1, 1000, -1)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.sync()
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
answers = [libc.prctl(38, 1, 0, 0, 0), libc.prctl(4, 0, 0, 0, 0), libc.personality(0xFFFFFFFF)]
[answers, resource.getrlimit(resource.RLIMIT_CORE), libc.prctl(3, 0, 0, 0, 0)]
"""
    result = strict.execute(code)
    assert result.value == [[0, 0, 0], [1, 1], 1]  # the limit and the dumpable flag stay
    assert result.violations == ()


@pytest.mark.parametrize(
    ("attempt", "call"),
    [
        ("os.setuid(0)", "setuid"),
        ("import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 2))", "prlimit64"),
        ("os.setresgid(-1, 0, -1)", "setresgid"),
        ("os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))", "sched_setscheduler"),
    ],
)
def test_a_call_that_would_change_something_is_refused_and_recorded(
    strict: Sandbox, attempt: str, call: str
) -> None:
    result = strict.execute(f"import os\n{attempt}")
    assert "PermissionError" in str(result.error) or "not allowed to raise" in str(result.error)
    assert [each.syscall for each in result.violations] == [call]


def test_system_files_hold_no_secret() -> None:
    from cellwright.runner.host.system_files import find_system_files

    found = find_system_files()
    assert {"/usr/include", "/etc/alternatives"} <= {each.path for each in found}
    for each in found:
        for path in [Path(each.source), *Path(each.source).rglob("*")]:
            if path.is_symlink() or not path.is_file() or each.path == "/usr/include":
                continue
            public = path.stat().st_mode & 0o004
            assert not public or b"PRIVATE KEY-----" not in path.read_bytes(), path


def test_a_hidden_system_file_is_not_shown(tmp_path: Path) -> None:
    policy = tmp_path / "p.toml"
    policy.write_text('extends = "standard"\n[filesystem]\nhidden = ["/etc/alternatives"]\n')
    with Sandbox(policy=str(policy)) as box:
        result = box.execute("ls /etc/alternatives /usr/include | head -1", "bash")
    assert "/etc/alternatives" in result.stderr
    assert "/usr/include" in result.stdout


def test_files_that_nobody_has_are_no_violations(strict: Sandbox) -> None:
    """Test suites look for thousands; a file of a user counts, whether it exists or not."""
    code = """
for path in ["/etc/missing.conf", "/root/missing.conf"] * 5:
    try: open(path)
    except OSError: pass
"""
    (seen,) = strict.execute(code).violations
    assert (seen.arguments[0], seen.count) == ("'/root/missing.conf'", 5)
    assert (
        strict.execute(
            "for n in range(10_010):\n    try: open('/etc/missing.conf')\n    except OSError: pass\n1"
        ).value
        == 1
    )


@pytest.mark.parametrize(
    ("script", "last"),
    [
        pytest.param(WEBASSEMBLY, "1", marks=pytest.mark.needs("node")),
        pytest.param(
            "java -version 2>&1 | grep -c '^OpenJDK Runtime'", "1", marks=pytest.mark.needs("java")
        ),
    ],
    ids=["WebAssembly", "JVM"],
)
def test_runtimes_that_reserve_much_run_without_a_memory_cgroup(script: str, last: str) -> None:
    policy = msgspec.structs.replace(
        policy_named("workshop"),
        optional_layers=(*OPTIONAL, "cgroup_memory", "cgroup_cpu", "cgroup_pids"),
    )
    with Sandbox(policy=policy, cgroup_root="/nonexistent", pool=0) as box:
        assert "rlimit_as" in box.layers
        assert box.execute(script, "bash").stdout.strip() == last
        undone = box.execute(f"unset NODE_OPTIONS JAVA_TOOL_OPTIONS; {script}", "bash")
        assert undone.stdout.strip() != last
