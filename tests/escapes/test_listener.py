"""The listener: what a guest attempts and is refused is told by the kernel, not by the guest."""

import errno
import json

import msgspec
import pytest

from cellwright import Sandbox, SandboxResult
from cellwright.policies.policy import Policy
from tests.conftest import policy_named
from tests.escapes.without import (
    ALLOW_EVERYTHING,
    by_number,
    errno_of,
    errno_of_call,
    sandbox_with_plan,
    without_listener,
)

# fields of an attempt: the call, its arguments in words, the returned errno
ATTEMPTS = {
    "socket": (
        errno_of("socket.socket()", "import socket"),
        "socket", ("AF_INET", "SOCK_STREAM", "0"), errno.EPERM,
    ),
    "vsock": (
        errno_of("socket.socket(40, 1)", "import socket"),
        "socket", ("AF_VSOCK", "SOCK_STREAM", "0"), errno.EAFNOSUPPORT,
    ),
    "mount": (
        errno_of_call("mount(b'/a', b'/b', b'ext4', 7, 0)"),
        "mount", ("'/a'", "'/b'", "'ext4'", "0x7"), errno.EPERM,
    ),
    "ptrace": (errno_of_call("ptrace(16, 1, 0, 0)"), "ptrace", ("16", "1"), errno.EPERM),
    "keyctl": (errno_of_call(by_number("keyctl", "-1, 0, 0")), "keyctl", ("-1",), errno.ENOSYS),
    "bpf": (errno_of_call(by_number("bpf", "5, 0, 0")), "bpf", ("5",), errno.ENOSYS),
    "unshare": (errno_of_call("unshare(0x10000000)"), "unshare", ("CLONE_NEWUSER",), errno.EPERM),
    "setns": (errno_of_call("setns(9, 0x40000000)"), "setns", ("9", "CLONE_NEWNET"), errno.EPERM),
    "io_uring": (errno_of_call(by_number("io_uring_setup", "8, 0")), "io_uring_setup", ("8", "0x0"), errno.ENOSYS),
    "own filter": (errno_of_call(by_number("seccomp", "1, 0, 0")), "seccomp", ("1", "0x0"), errno.ENOSYS),
    "prctl": (errno_of_call("prctl(22, 2, 0, 0, 0)"), "prctl", ("22", "0x2"), errno.EINVAL),
    "namespaces by clone": (
        errno_of_call(by_number("clone", "0x40000000, 0, 0, 0, 0")), "clone", ("CLONE_NEWNET",), errno.EPERM,
    ),
    "reading outside": (
        errno_of("open('/etc/shadow')"), "openat", ("'/etc/shadow'", "O_RDONLY"), errno.ENOENT,
    ),
    "climbing outside": (
        errno_of("open('../../root/.ssh/id_rsa')"),
        "openat", ("'../../root/.ssh/id_rsa'", "O_RDONLY"), errno.ENOENT,
    ),
    "writing outside": (
        errno_of("open('/usr/evil', 'w')"),
        "openat", ("'/usr/evil'", "O_WRONLY|O_CREAT|O_TRUNC"), errno.EROFS,
    ),
    "by openat2": (
        errno_of_call(
            "syscall(437, -100, b'/etc/shadow', (ctypes.c_uint64 * 3)(), 24)"
        ),
        "openat2", ("'/etc/shadow'", "O_RDONLY"), errno.ENOENT,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("code", "call", "words", "number"), ATTEMPTS.values(), ids=ATTEMPTS)
def test_an_attempt_is_refused_and_noted(
    strict: Sandbox, code: str, call: str, words: tuple[str, ...], number: int
) -> None:
    result = strict.execute(code)
    assert result.value == number
    (seen,) = (each for each in result.violations if each.syscall == call)
    assert seen.arguments == words
    assert seen.rule
    assert seen.count == 1
    assert seen.process.endswith(" (2)")


def test_without_the_listener_the_same_is_refused_and_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Sandbox(policy=without_listener(monkeypatch)) as sandbox:
        assert "listener" not in sandbox.layers
        for code, _, _, number in ATTEMPTS.values():
            result = sandbox.execute(code)
            assert result.value in (number, errno.EPERM)  # EPERM for a form of a call
            assert result.violations == ()


def test_without_the_filter_nothing_is_refused_and_nothing_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = {"guest_filter": ALLOW_EVERYTHING, "refusals": {}}
    with sandbox_with_plan(monkeypatch, policy_named("strict"), **plan) as sandbox:
        result = sandbox.execute(ATTEMPTS["unshare"][0])
    assert (result.value, result.violations) == (0, ())


ORDINARY = {
    "arithmetic": "1 + 1",
    "modules": "import json, re, math, random, datetime, decimal, sqlite3, ssl, ctypes, mimetypes\n"
    "datetime.datetime.now().isoformat(), mimetypes.guess_type('a.txt'), random.random()",
    "files": "open('a', 'w').write('x'); open('a').read(); import tempfile\n"
    "tempfile.NamedTemporaryFile().write(b'x')",
    "threads": "from concurrent.futures import ThreadPoolExecutor as P\nlist(P(4).map(str, range(9)))",
    "clocks": "import time, zoneinfo; time.localtime(); zoneinfo.ZoneInfo('Europe/Zurich')",
    "the system": "import os, platform, locale; os.cpu_count(); platform.machine(); os.times()\n"
    "locale.setlocale(locale.LC_ALL, 'C')",
    "its own process": "open('/proc/self/status').read(); import os; os.listdir('/proc/self/fd')",
    "asyncio": "import asyncio; asyncio.run(asyncio.sleep(0))",
}


@pytest.mark.parametrize("code", ORDINARY.values(), ids=ORDINARY)
def test_an_ordinary_program_is_accused_of_nothing(strict: Sandbox, code: str) -> None:
    result = strict.execute(code)
    assert result.ok, result.traceback
    assert result.violations == ()


def test_the_same_attempt_is_counted(strict: Sandbox) -> None:
    result = strict.execute(
        errno_of_call("ptrace(16, 1, 0, 0)") + "\nfor _ in range(9): c.ptrace(16, 1, 0, 0)"
    )
    (seen,) = result.violations
    assert (seen.syscall, seen.count) == ("ptrace", 10)


@pytest.mark.needs("real_cpu")
def test_a_flood_is_ended(strict: Sandbox) -> None:
    code = "import ctypes\nc = ctypes.CDLL(None)\nwhile True: c.ptrace(16, 1, 0, 0)"
    result = strict.execute(code)
    assert result.reason == "violation"
    assert "10000 refused calls" in str(result.error)
    assert result.violations[0].count == 10_001
    assert strict.execute("1 + 1").value == 2


def test_many_different_attempts_are_kept_within_bounds(strict: Sandbox) -> None:
    code = (
        "import ctypes\nc = ctypes.CDLL(None)\n"
        "for n in range(500): c.mount(str(n).encode() + b'x' * 5000, b'/', b'', 0, 0)"
    )
    result = strict.execute(code)
    assert result.ok
    assert len(result.violations) == 101
    assert result.violations[-1].syscall == "mount"
    assert result.violations[-1].arguments == ()
    assert sum(each.count for each in result.violations) == 500
    assert len(json.dumps(result.to_dict())) < 100_000


@pytest.mark.needs("real_cpu")
def test_opening_a_great_many_files_is_slowed_down_not_ended(strict: Sandbox) -> None:
    code = "import os\nfor _ in range(30_000): os.close(os.open('/dev/null', 0))\n'done'"
    result = strict.execute(code)
    assert (result.value, result.violations) == ("done", ())


def test_what_is_read_from_the_guest_is_one_line_of_ascii(strict: Sandbox) -> None:
    hostile = b'/x\n{"seq":1}\r\x1b[2J\x00'.replace(b"\x00", "\u202e\u00e9\u2028".encode())
    result = strict.execute(errno_of_call(f"mount({hostile!r}, b'\\xff', 0, 0, 0)"))
    (seen,) = result.violations
    text = " ".join(seen.arguments)
    assert text.isascii()
    assert text.isprintable()
    assert "\\n" in text
    assert "\\u202e" in text


def test_a_bad_pointer_is_no_trouble(strict: Sandbox) -> None:
    for pointer in (0, 1, -1, 2**63, 2**63 - 1, 0xFFFF800000000000):
        result = strict.execute(
            errno_of_call(by_number("mount", f"ctypes.c_ulong({pointer}), 0, 0, 0, 0"))
        )
        assert (result.value, result.violations[0].syscall) == (errno.EPERM, "mount")
        assert (
            strict.execute(
                f"import ctypes\nctypes.CDLL(None).open(ctypes.c_ulong({pointer}), 0)"
            ).value
            == -1
        )


def test_a_name_at_the_end_of_a_page_is_read(strict: Sandbox) -> None:
    code = """
import ctypes, mmap
c = ctypes.CDLL(None)
page = mmap.mmap(-1, 8192)
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
c.mprotect(ctypes.c_void_p(start + 4096), 4096, 0)
page[4090:4096] = b'/etc/\\0'
c.mount(ctypes.c_void_p(start + 4090), b'/', 0, 0, 0)
page[4090:4096] = b'/etc/x'  # no end within the page
c.mount(ctypes.c_void_p(start + 4090), b'/', 0, 0, 0)
"""
    result = strict.execute(code)
    assert [each.arguments[0] for each in result.violations] == ["'/etc/'", "'/etc/x'"]


def test_children_and_threads_are_heard_and_named(standard: Sandbox) -> None:
    code = """
import ctypes, os, threading
c = ctypes.CDLL(None)
thread = threading.Thread(target=c.ptrace, args=(16, 1, 0, 0)); thread.start(); thread.join()
if os.fork() == 0:
    c.prctl(15, b'child', 0, 0, 0)
    c.unshare(0x10000000)
    os._exit(0)
os.wait()
"""
    seen = {each.syscall: each.process for each in standard.execute(code).violations}
    assert seen["unshare"].startswith("child (")
    assert "ptrace" in seen


def test_a_program_that_is_exec_d_is_heard_too(standard: Sandbox) -> None:
    result = standard.execute("import subprocess; subprocess.run(['cat', '/etc/shadow'])")
    (seen,) = (each for each in result.violations if "shadow" in each.arguments[0])
    assert seen.process.startswith("cat (")


def test_one_that_dies_while_it_is_heard_does_no_harm(standard: Sandbox) -> None:
    code = """
import ctypes, os, signal
c = ctypes.CDLL(None)
for n in range(200):
    pid = os.fork()
    if pid == 0:
        while True: c.keyctl(-1, 0, 0, 0, 0) or c.KEYCTL
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
'survived'
"""
    result = standard.execute(code.replace("KEYCTL", by_number("keyctl", "-1, 0, 0")))
    assert result.value == "survived" or result.reason == "violation"
    assert standard.execute("1 + 1").value == 2


@pytest.mark.needs("real_cpu")
def test_a_signal_does_not_count_a_call_twice(standard: Sandbox) -> None:
    code = """
import ctypes, signal
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
c = ctypes.CDLL(None)
for _ in range(3000): c.ptrace(16, 1, 0, 0)
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    result = standard.execute(code)
    # A signal that comes before the listener has heard ends the call with EINTR: that one was none.
    assert 1000 < sum(each.count for each in result.violations) <= 3000


def test_no_guest_holds_the_listener_or_the_number_it_went_through(standard: Sandbox) -> None:
    code = """
import os, resource
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
kinds = []
for number in os.listdir('/proc/self/fd'):
    try: kinds.append(os.readlink(f'/proc/self/fd/{number}'))
    except OSError: pass  # that of listdir itself
e = 0
try: os.dup2(1, limit)
except OSError as error: e = error.errno
['seccomp' in ' '.join(kinds), limit, e]
"""
    assert standard.execute(code).value == [False, 1024, errno.EBADF]


def test_a_strict_guest_can_pass_no_descriptor(strict: Sandbox) -> None:
    code = (
        "import socket, array\na, b = socket.socketpair()\ne = 0\n"
        "try: a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [1]))])\n"
        "except OSError as error: e = error.errno\ne"
    )
    result = strict.execute(code)
    assert result.value == errno.EPERM
    assert result.violations[0].syscall == "sendmsg"


def test_a_policy_may_stop_watching_files(strict: Sandbox) -> None:
    policy = policy_named("strict")
    files = msgspec.structs.replace(policy.filesystem, watch=False)
    with Sandbox(policy=msgspec.structs.replace(policy, filesystem=files)) as sandbox:
        result: SandboxResult = sandbox.execute(errno_of("open('/etc/shadow')"))
        assert (result.value, result.violations) == (errno.ENOENT, ())
        assert sandbox.execute(errno_of_call("ptrace(16, 1, 0, 0)")).violations


def test_the_limit_is_the_policys(strict: Sandbox) -> None:
    limits = msgspec.structs.replace(Policy().limits, violations=3)
    with Sandbox(policy=policy_named("strict", limits=limits)) as sandbox:
        code = "import ctypes\nc = ctypes.CDLL(None)\nfor _ in range({}): c.ptrace(16, 1, 0, 0)"
        assert sandbox.execute(code.format(3)).ok
        assert sandbox.execute(code.format(4)).reason == "violation"
