"""Programs of the distribution, unmodified, in a cell of the profile `workshop`."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cellwright import HostSettings, Sandbox
from cellwright.runner.host import system_files
from cellwright.runner.host.system_files import SystemPath
from tests.conftest import OPTIONAL, policy_named, with_limits

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
    "Python has headers": (
        "cc",
        "printf '#include <Python.h>\\n' >p.c; cc -c -I$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"include\"))') p.c && echo compiled",
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
    "the class of disk time as at the start": ("ionice", "ionice -c 2 -n 6 -p $$ && ionice -c 0 -p $$ && ionice -p $$", "none: prio 0"),
    "the size of packets of lo": ("bash", "cat /sys/class/net/*/mtu", "65536"),
    "a process names itself to set limits": (
        "python3",
        "python3 -c 'import os\nfrom resource import *\nprint(end=f\"{prlimit(os.getpid(), RLIMIT_NOFILE, (98, 99))[0] > 98} {getrlimit(RLIMIT_NOFILE)} \")\ntry: prlimit(99999, RLIMIT_NOFILE, (9, 9))\nexcept ProcessLookupError: print(\"none\")'",
        "True (98, 99) none",
    ),
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
    "node lists interfaces": (
        "node",
        "node -p 'Object.values(os.networkInterfaces())[0][0].address'",
        "127.0.0.1",
    ),
    "ip lists interfaces": ("ip", "ip -brief address show | awk '{print $1, $2, $3}'", "lo UNKNOWN 127.0.0.1/8"),
    "localhost has an address of each kind": (
        "python3",
        "python3 -c 'from socket import *\nfor family in AF_INET, AF_INET6: print(end=getaddrinfo(\"localhost\", 0, family, 1, 0, AI_ADDRCONFIG)[0][4][0] + \" \")'",
        "127.0.0.1 ::1 ",
    ),
    "getifaddrs": (
        "python3", "python3 -c 'import socket; print(socket.if_nameindex())'", "[(1, 'lo')]",
    ),
    "an interface is found by number and name": (
        "python3",
        "python3 -c 'import fcntl, socket; s = socket.socket(); mtu, flags = (fcntl.ioctl(s, n, b\"lo\".ljust(40, b\"\\0\")) for n in (0x8921, 0x8913)); print(socket.if_indextoname(1), socket.if_nametoindex(\"lo\"), int.from_bytes(mtu[16:20], \"little\"), flags[16])'",
        "lo 1 65536 73",
    ),
    "java lists interfaces": (  # by ioctl(2) alone; Gradle does not start without
        "java",
        "printf 'import java.net.*; class N { public static void main(String[] a) throws Exception { for (var each : NetworkInterface.getNetworkInterfaces().nextElement().getInterfaceAddresses()) if (each.getAddress() instanceof Inet4Address) System.out.println(each); } }' >N.java; java N.java 2>/dev/null",
        "/127.0.0.1/8 [null]",
    ),
    "interfaces are listed by ioctl": (
        "python3",
        "python3 -c 'import ctypes, fcntl, socket, struct\ns, room = socket.socket(), ctypes.create_string_buffer(80)\nfor length, at in (0, 0), (39, ctypes.addressof(room)), (80, ctypes.addressof(room)):\n print(struct.unpack(\"i\", fcntl.ioctl(s, 0x8912, struct.pack(\"iQ\", length, at))[:4])[0], end=\" \")\nprint(room.raw[:2], *room.raw[20:24], *fcntl.ioctl(s, 0x891B, b\"lo\".ljust(40, b\"\\0\"))[20:24], end=\"\")'",
        "40 0 40 b'lo' 127 0 0 1 255 0 0 0",
    ),
    "scopes of addresses have names": (
        "python3", "python3 -c 'import socket; print(socket.getnameinfo((\"ff02::1\", 1, 0, 1), socket.NI_NUMERICHOST)[0])'", "ff02::1%lo",
    ),
    "an interface has no speed": (
        "python3",
        "python3 -c 'import fcntl, socket\nfor name in b\"lo\", b\"eth0\":\n try: fcntl.ioctl(socket.socket(), 0x8946, name.ljust(40, b\"\\0\"))\n except OSError as error: print(end=f\"{error.errno} \")'",
        "95 19 ",
    ),
    "a machine has no disk and no battery": ("bash", "ls /sys/block /sys/class/power_supply | tr -d '\\n'", "/sys/block:/sys/class/power_supply:"),
    "a socket sets how far its packets to groups go": (
        "python3",
        "python3 -c 'from socket import *\nfor family, level, options in (AF_INET, 0, (32, 33, 34)), (AF_INET6, 41, (17, 18, 19)):\n s = socket(family, SOCK_DGRAM)\n for each in options: s.setsockopt(level, each, 0); print(end=f\"{s.getsockopt(level, each)} \")'",
        "0 0 0 0 0 0 ",
    ),
    "a socket tells the sender": (  # SCM_CREDENTIALS
        "python3",
        "python3 -c 'import os\nfrom socket import *\na, b = socketpair()\nb.setsockopt(SOL_SOCKET, SO_PASSCRED, 1)\na.send(b\"x\")\nsent = b.recvmsg(1, 99)[1][0]\nprint(sent[1], sent[2][:4] == os.getpid().to_bytes(4, \"little\"))'",
        "2 True",
    ),
    "a descriptor that is no socket has no interface": (
        "python3",
        "python3 -c 'import fcntl\nfor file in 0, 99:\n try: fcntl.ioctl(file, 0x8910, bytes(40))\n except OSError as error: print(end=f\"{error.errno} \")'",
        "25 9 ",
    ),
    "tail follows": (  # it looks itself but every hour
        "tail",
        "echo a >f; tail -s 3600 -f f >o & until grep -q a o; do :; done; echo b >>f; until grep -q b o; do :; done; kill $!; echo told",
        "told",
    ),
    "tail follows what may only be read": (
        "tail", "timeout -s INT 1 tail -n 1 -f /etc/passwd 2>&1; tail -n 1 /etc/passwd >p; test -s p && echo went on", "went on",
    ),
    "node watches": (
        "node",
        "node -e 'fs.mkdirSync(\"d\"); const w = fs.watch(\"d\", (_, name) => { console.log(name); w.close() }); fs.watch(\"/usr\").close(); fs.writeFileSync(\"d/seen\", \"\")'",
        "seen",
    ),
    "df of a table of mounts": ("df", "df /tmp | tail -n 1 | grep -o '/tmp$'; grep -c ' /tmp ' /etc/mtab", "1"),
    "temporary files that stay": ("sync", "touch /var/tmp/kept && sync /var/tmp/kept && ls /tmp", "kept"),
    "a device is no terminal": (
        "python3",
        "python3 -c 'import os; os.get_terminal_size(0)' 2>&1 </dev/urandom | tail -n 1",
        "OSError: [Errno 22] Invalid argument",
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


def test_a_file_is_given_to_nobody_else_as_by_linux(strict: Sandbox) -> None:
    """The kernel says EINVAL to an id that the user namespace does not have."""
    code = """
import os
def answer(call, *ids):
    try: call(*ids)
    except OSError as error: return error.errno
open("f", "w").close(); os.symlink("f", "l"); file = os.open("f", os.O_RDONLY)
calls = (lambda *ids: os.chown("f", *ids)), (lambda *ids: os.chown(file, *ids)), (lambda *ids: os.lchown("l", *ids)), (
    lambda *ids: os.chown("f", *ids, dir_fd=os.open(".", os.O_RDONLY)))
[list({answer(call, *ids) for call in calls for ids in some}) for some in (
    [(-1, -1), (1000, 1000), (1000, -1), (-1, 1000)], [(0, 0), (1001, 1000), (1000, 65534), (0, -1), (-1, 0)])]
"""
    result = strict.execute(code)
    assert result.value == [[None], [errno.EPERM]]
    assert result.violations == ()


@pytest.mark.parametrize(
    ("attempt", "call"),
    [
        ("os.setuid(0)", "setuid"),
        ("import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 2))", "prlimit64"),
        ("import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (9, 9))", "prlimit64"),
        (
            "import resource; resource.prlimit(os.getpid(), resource.RLIMIT_CORE, (0, 0))",
            "prlimit64",
        ),
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
    found = system_files.find_system_files()
    assert {"/usr/include", "/etc/alternatives"} <= {each.path for each in found}
    for each in found:
        for path in [Path(each.source), *Path(each.source).rglob("*")]:
            if path.is_symlink() or not path.is_file() or each.path == "/usr/include":
                continue
            public = path.stat().st_mode & 0o004
            assert not public or b"PRIVATE KEY-----" not in path.read_bytes(), path


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("make", "is_shown"),
    [
        (lambda path, secret: path.write_text("x"), True),
        (lambda path, secret: path.symlink_to("/etc/passwd"), True),
        (lambda path, secret: path.symlink_to(secret), False),
        (lambda path, secret: (path.write_text("x"), path.chmod(0o640)), False),
        (lambda path, secret: (path.write_text("x"), path.chmod(0o666)), False),
        (lambda path, secret: (path.write_text("x"), os.chown(path, 12345, 0)), False),
        (lambda path, secret: path.symlink_to("/etc/shadow"), False),
        (lambda path, secret: os.mkfifo(path), False),
    ],
    ids=["file", "link", "link out", "private", "for all to write", "a user's", "shadow", "pipe"],
)
def test_a_system_file_that_is_not_roots_and_public_is_left_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path, Path], object],
    is_shown: bool,
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with tempfile.TemporaryDirectory(dir="/etc", prefix="cellwright-test-") as directory:
        os.chmod(directory, 0o755)
        path = Path(directory, "file")
        make(path, secret)
        listed = (SystemPath(str(path), "a test"),)
        monkeypatch.setattr(system_files, "system_paths", lambda: listed)
        assert bool(system_files.find_system_files()) == is_shown


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
    with Sandbox(policy=policy, pool=0, host=HostSettings(cgroup_root="/nonexistent")) as box:
        assert "rlimit_as" in box.layers
        assert box.execute(script, "bash").stdout.strip() == last
        undone = box.execute(f"unset NODE_OPTIONS JAVA_TOOL_OPTIONS; {script}", "bash")
        assert undone.stdout.strip() != last


THREADS = """
import threading
for _ in range(32): threading.Thread(target=threading.Event().wait, daemon=True).start()
print(threading.active_count())
"""
ARENAS = "import ctypes\nctypes.CDLL(None).mallopt(-8, 64)\n"  # M_ARENA_MAX


def test_threads_start_without_a_memory_cgroup() -> None:
    policy = msgspec.structs.replace(
        with_limits(policy_named("workshop"), memory_bytes=256 * 1024 * 1024),
        optional_layers=(*OPTIONAL, "cgroup_memory", "cgroup_cpu", "cgroup_pids"),
    )
    child = f"python3 -c '{THREADS}'"
    with Sandbox(policy=policy, pool=0, host=HostSettings(cgroup_root="/nonexistent")) as box:
        assert box.execute(THREADS).stdout == "33\n"
        assert "can't start new thread" in (box.execute(ARENAS + THREADS).error or "")
        assert box.execute(child, "bash").stdout == "33\n"
        assert not box.execute(f"unset MALLOC_ARENA_MAX; {child}", "bash").ok
