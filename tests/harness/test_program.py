"""Programs that live: spoken with over their streams, confined as any, gone without a trace."""

import contextlib
import fcntl
import gc
import hashlib
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from cellwright import (
    AuditLog,
    BusyError,
    ClosedError,
    LaunchError,
    PolicyError,
    PoolSettings,
    Program,
    Sandbox,
    SandboxStatus,
)
from cellwright.policies.policy import Filesystem
from cellwright.results import Executable
from cellwright.runner.launching.spawn import interpreter
from cellwright.testing import inspect
from tests.conftest import ROOT, policy_named, soon
from tests.runner.test_leftovers import descendants, nothing_left_of, wait_until_ended

pytestmark = pytest.mark.needs("userns")

PYTHON = (interpreter(), "-I", "-S", "-u", "-c")
ECHO = {
    "bash": ("/usr/bin/bash", "-c", 'while read -r line; do echo "$line"; done'),
    "python": (*PYTHON, "import sys\nfor line in sys.stdin: sys.stdout.write(line)"),
    "node": ("/usr/bin/node", "-e", "process.stdin.pipe(process.stdout)"),
}
# Where the profile shows programs; a node of the host's owner may lie elsewhere.
NEEDS_NODE = pytest.mark.skipif(not Path("/usr/bin/node").exists(), reason="no /usr/bin/node")
_IN_NODE = pytest.param("node", marks=NEEDS_NODE)
SECONDS = 60


@pytest.fixture(scope="module", params=[0, 1], ids=["on demand", "parked"])
def server(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("server"), pool=request.param) as sandbox:
        sandbox.settle()
        yield sandbox


@pytest.fixture(scope="module")
def plain() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("server"), pool=0) as sandbox:
        yield sandbox


def receive(program: Program, size: int = 65536) -> bytes:
    """Return what comes, b"" at the end; fails if nothing does."""
    assert select.select([program.stdout], [], [], SECONDS)[0], program.stderr
    return os.read(program.stdout, size)


def receive_line(program: Program) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = receive(program, 1)
        assert piece, (line, program.stderr)
        line += piece
    return line


def receive_all(program: Program) -> bytes:
    return b"".join(iter(lambda: receive(program), b""))


def said(sandbox: Sandbox, *argv: str, **given: Any) -> bytes:
    """Return what a program writes from its beginning to its end."""
    with sandbox.program(argv, **given) as program:
        return receive_all(program)


def within(sandbox: Sandbox, **limits: float) -> Sandbox:
    """Return a sandbox like another, with other limits."""
    changed = msgspec.structs.replace(sandbox.policy.limits, **limits)
    return sandbox.sibling(
        msgspec.structs.replace(sandbox.policy, limits=changed), PoolSettings(size=0)
    )


# Talking


@pytest.mark.parametrize("language", ["bash", "python", _IN_NODE])
def test_thousands_of_round_trips(server: Sandbox, language: str) -> None:
    with server.program(ECHO[language]) as program:
        for number in range(3000):
            line = b"line %d\n" % number
            os.write(program.stdin, line)
            assert receive(program) == line
        assert program.is_alive()
        program.close_stdin()
        assert receive(program) == b""
        result = program.wait(SECONDS)
    assert (result.status, result.reason, result.exit_code) == (SandboxStatus.COMPLETED, "exit", 0)
    assert result.stdout == ""  # nobody but us had it
    assert result.usage.output_bytes == 0
    assert result.execution_id


@pytest.mark.parametrize("language", ["cat", "python", _IN_NODE])
def test_megabytes_go_both_ways(plain: Sandbox, language: str) -> None:
    sent = os.urandom(1 << 20) * 16
    copy = (*PYTHON, "import shutil, sys\nshutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)")
    argv = {"cat": ("/usr/bin/cat",), "python": copy}.get(language) or ECHO[language]
    with plain.program(argv) as program:

        def send() -> None:
            left = memoryview(sent)
            while left:
                left = left[os.write(program.stdin, left) :]
            program.close_stdin()

        writer = threading.Thread(target=send, daemon=True)
        writer.start()
        digest = hashlib.sha256(receive_all(program)).digest()
        writer.join(SECONDS)
        assert digest == hashlib.sha256(sent).digest()
        assert program.wait(SECONDS).ok


JSON_RPC = """
const lines = require('readline').createInterface({input: process.stdin});
lines.on('line', line => {
    const asked = JSON.parse(line);
    const result = asked.method === 'initialize' ? {serverInfo: {name: 'mine'}} : {text: asked.params.text};
    console.log(JSON.stringify({jsonrpc: '2.0', id: asked.id, result}));
});
"""


@NEEDS_NODE
def test_a_server_that_speaks_json_rpc(plain: Sandbox) -> None:
    """As MCP has it over stdio: one object a line, and it leaves at the end of its input."""
    argv = ("/usr/bin/node", "server.js")
    with plain.program(argv, files={"server.js": JSON_RPC}) as program:

        def ask(number: int, method: str, **params: str) -> Any:
            frame = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            os.write(program.stdin, json.dumps(frame).encode() + b"\n")
            answer = json.loads(receive_line(program))
            assert answer["id"] == number
            return answer["result"]

        assert ask(1, "initialize")["serverInfo"] == {"name": "mine"}
        for number in range(2, 200):
            assert ask(number, "tools/call", text="ü" * number) == {"text": "ü" * number}
        program.close_stdin()
        assert program.wait(SECONDS).ok


def test_descriptors_block_as_those_of_any_child(plain: Sandbox) -> None:
    with plain.program(("/usr/bin/cat",)) as program:
        assert os.get_blocking(program.stdin)
        assert os.get_blocking(program.stdout)
        assert not os.get_inheritable(program.stdin)
        assert not os.get_inheritable(program.stdout)


# Nobody keeps what is not read


def in_pipe(descriptor: int) -> int:
    """Return how many bytes wait in a pipe (pipe(7), FIONREAD)."""
    answer: int = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0]
    return answer


FLOODS = """
import os, sys
os.set_blocking(1, False)
written = 0
try:
    while True: written += os.write(1, b'x' * 4096)
except BlockingIOError:
    print(written, file=sys.stderr, flush=True)
os.set_blocking(1, True)
for _ in range(256): os.write(1, b'x' * 65536)
"""


def test_a_program_that_floods_its_output_waits_for_the_reader(plain: Sandbox) -> None:
    """All that it could write stands in the kernel's pipe: no byte of it went to us."""
    with plain.program((*PYTHON, FLOODS)) as program:
        assert soon(lambda: program.stderr.endswith("\n"))
        written = int(program.stderr)
        assert written == fcntl.fcntl(program.stdout, fcntl.F_GETPIPE_SZ)
        assert soon(lambda: in_pipe(program.stdout) == written)
        assert len(receive_all(program)) == written + 256 * 65536  # far beyond limits.output_bytes
        assert program.wait(SECONDS).ok


def test_who_writes_what_is_not_read_waits(plain: Sandbox) -> None:
    with plain.program(("/usr/bin/sleep", "300")) as program:
        os.set_blocking(program.stdin, False)
        written = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                written += os.write(program.stdin, b"x" * 4096)
        assert written == fcntl.fcntl(program.stdin, fcntl.F_GETPIPE_SZ)
        assert in_pipe(program.stdin) == written


def test_of_standard_error_head_and_tail_are_kept(plain: Sandbox) -> None:
    code = "import sys\nfor n in range(60_000): print(n, file=sys.stderr)\nprint('done', flush=True)\ninput()"
    with plain.program((*PYTHON, code)) as program:
        assert receive_line(program) == b"done\n"
        assert soon(lambda: program.stderr.endswith("59999\n"))
        assert program.stderr.startswith("0\n1\n")
        assert "bytes dropped" in program.stderr
        program.close_stdin()
        result = program.wait(SECONDS)
        assert result.stderr.startswith("0\n1\n")
        assert result.truncated["stderr"] > 0
        assert len(result.stderr) < plain.policy.limits.output_bytes + 100
        assert program.stderr == result.stderr


# What it is given


def test_its_environment_is_what_policy_and_caller_say(
    monkeypatch: pytest.MonkeyPatch, plain: Sandbox
) -> None:
    """An ordinary child has the variable; in the cell there are those six, and what runtimes are told."""
    monkeypatch.setenv("CELLWRIGHT_TEST_SECRET", "of the host")
    outside = subprocess.run(["/usr/bin/env"], capture_output=True, timeout=60, check=True)
    assert b"CELLWRIGHT_TEST_SECRET=of the host\n" in outside.stdout
    policy = msgspec.structs.replace(plain.policy, environment={"TZ": "CET"})
    with Sandbox(policy=policy, pool=0) as sandbox:
        lines = said(sandbox, "/usr/bin/env", env={"GIVEN": "a b", "LANG": "C"}).splitlines()
    told = {each for each in lines if each.startswith((b"GOMEMLIMIT=", b"SLURM_MEM_PER_NODE="))}
    assert len(told) == 2
    assert sorted({*lines} - told) == [
        b"GIVEN=a b", b"HOME=/workspace", b"LANG=C", b"PATH=/dev/bin:/usr/bin:/bin", b"TMPDIR=/tmp", b"TZ=CET",
    ]  # fmt: skip


def test_it_has_its_three_descriptors_and_no_others(plain: Sandbox) -> None:
    listed = said(plain, "/usr/bin/ls", "/proc/self/fd").split()
    assert listed == [b"0", b"1", b"2", b"3"]  # the last is ls(1)'s own, of the directory


def test_its_files_and_its_directory(plain: Sandbox) -> None:
    files: dict[str, str | bytes] = {
        "data/in": "given",
        "run": Executable(b"#!/usr/bin/bash\npwd; cat in; echo > /tmp/x"),
    }
    policy = msgspec.structs.replace(
        plain.policy, processes=msgspec.structs.replace(plain.policy.processes, execute_own=True)
    )
    with Sandbox(policy=policy, pool=0) as sandbox:
        argv = ("/workspace/run",)
        with sandbox.program(argv, cwd="/workspace/data", files=files) as program:
            assert receive_all(program) == b"/workspace/data\ngiven"
            result = program.wait(SECONDS)
        assert result.ok
        assert result.files == ()
    assert said(plain, "/usr/bin/pwd") == b"/workspace\n"
    with plain.program(argv, files=files) as program:  # server executes nothing of its own
        assert program.wait(SECONDS).exit_code == 127


def test_what_it_leaves_in_its_workspace_is_told(plain: Sandbox) -> None:
    with plain.program(("/usr/bin/bash", "-c", "echo made > o")) as program:
        assert [file.path for file in program.wait(SECONDS).files] == ["o"]


# Behind every layer


def test_a_file_of_the_host_is_not_there_unless_it_is_shown(
    tmp_path_factory: pytest.TempPathFactory, plain: Sandbox
) -> None:
    # /tmp and /var/tmp are the cell's own, and the user of root's cells cannot look into its home
    place = Path("/srv") if os.access("/srv", os.W_OK) else Path.home()
    secret = place / f"cellwright-test-{os.getpid()}"
    secret.mkdir(mode=0o755)
    try:
        (secret / "file").write_text("of the host")
        (secret / "file").chmod(0o644)
        argv = ("/usr/bin/cat", str(secret / "file"))
        outside = subprocess.run(argv, capture_output=True, timeout=60, check=True)
        assert outside.stdout == b"of the host"
        with plain.program(argv) as program:
            result = program.wait(SECONDS)
        assert (result.status, result.exit_code) == (SandboxStatus.FAILED, 1)
        assert "No such file" in result.stderr
        if "listener" in plain.layers:
            assert [seen.syscall for seen in result.violations] == ["openat"]
        shown = msgspec.structs.replace(plain.policy, filesystem=Filesystem(read=(str(secret),)))
        with Sandbox(policy=shown, pool=0) as sandbox:
            assert said(sandbox, *argv) == b"of the host"
    finally:
        shutil.rmtree(secret)


def test_there_is_no_network(plain: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        code = f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo through"
        argv = ("/usr/bin/bash", "-c", code)
        outside = subprocess.run(argv, capture_output=True, timeout=60, check=True)
        assert outside.stdout == b"through\n"
        listening.accept()[0].close()
        assert said(plain, *argv) == b""
        assert not select.select([listening], [], [], 0)[0]


def test_two_see_nothing_of_each_other(plain: Sandbox) -> None:
    serve = 'echo $0 > /tmp/mine; while read -r line; do eval "$line"; echo .; done'
    with (
        plain.program(("/usr/bin/bash", "-c", serve, "one")) as one,
        plain.program(("/usr/bin/bash", "-c", serve, "two")) as two,
    ):
        for program, name in ((one, b"one\n"), (two, b"two\n"), (one, b"one\n")):
            os.write(program.stdin, b"cat /tmp/mine; ls -d /proc/[0-9]* | wc -l\n")
            assert receive_line(program) == name
            assert int(receive_line(program)) <= 5  # init, the shell, ls, wc and a subshell
            assert receive_line(program) == b".\n"
        one.close()
        os.write(two.stdin, b"\n")
        assert receive_line(two) == b".\n"


@pytest.mark.needs("cgroup")
def test_memory_is_capped_and_the_result_says_so(plain: Sandbox) -> None:
    code = "print('up', flush=True); input(); hog = bytearray(1 << 30); print('through')"
    free = subprocess.run((*PYTHON, code), input=b"\n", capture_output=True, timeout=60, check=True)
    assert free.stdout == b"up\nthrough\n"
    with plain.program((*PYTHON, code)) as program:
        assert receive_line(program) == b"up\n"
        os.write(program.stdin, b"\n")
        assert receive_all(program) == b""
        result = program.wait(SECONDS)
    assert (result.status, result.reason) == (SandboxStatus.KILLED, "memory")
    assert result.error == f"needed more than {plain.policy.limits.memory_bytes} bytes"


def test_an_attempt_is_noted_with_its_arguments(plain: Sandbox) -> None:
    if "listener" not in plain.layers:
        pytest.skip("needs the seccomp listener, which reports attempts")
    code = "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))"
    with plain.program((*PYTHON, code)) as program:
        assert receive_all(program) == b"-1\n"
        seen = program.wait(SECONDS).violations
    assert ("unshare", ("CLONE_NEWUSER",)) in [(each.syscall, each.arguments) for each in seen]


# How it ends


def test_the_policys_limits_are_those_of_its_whole_life(plain: Sandbox) -> None:
    with within(plain, wall_seconds=0.2) as sandbox, sandbox.program(ECHO["bash"]) as program:
        result = program.wait(SECONDS)
        assert (result.status, result.reason) == (SandboxStatus.TIMEOUT, "wall_time")
        assert result.error == "ran longer than 0.2 s"
    spin = ("/usr/bin/bash", "-c", "while :; do :; done")
    with within(plain, cpu_seconds=0.2) as sandbox, sandbox.program(spin) as program:
        result = program.wait(SECONDS)
        assert (result.status, result.reason) == (SandboxStatus.TIMEOUT, "cpu_time")
    chatter = ("/usr/bin/bash", "-c", "while :; do echo chatter >&2; done")
    with (
        within(plain, output_total_bytes=10_000) as sandbox,
        sandbox.program(chatter) as program,
    ):
        assert program.wait(SECONDS).reason == "output"


def test_the_profile_lets_it_live_for_longer_than_poll_can_wait(plain: Sandbox) -> None:
    limits = plain.policy.limits
    assert min(limits.wall_seconds, limits.cpu_seconds) * 1000 > 2**31
    with plain.program(ECHO["bash"]) as program:
        os.write(program.stdin, b"x\n")
        assert receive(program) == b"x\n"


@pytest.mark.parametrize(
    ("code", "status", "reason", "exit_code", "number"),
    [
        ("exit 3", SandboxStatus.FAILED, "exit", 3, None),
        ("kill -TERM $$", SandboxStatus.FAILED, "signal", None, 15),
        ("kill -KILL $$", SandboxStatus.FAILED, "signal", None, 9),
        (":", SandboxStatus.COMPLETED, "exit", 0, None),
    ],
)
def test_its_own_end(
    plain: Sandbox, code: str, status: SandboxStatus, reason: str, exit_code: int, number: int
) -> None:
    with plain.program(("/usr/bin/bash", "-c", code)) as program:
        assert receive_all(program) == b""
        result = program.wait(SECONDS)
        assert not program.is_alive()
    assert (result.status, result.reason) == (status, reason)
    assert (result.exit_code, result.signal) == (exit_code, number)


def test_what_cannot_start_says_why(plain: Sandbox) -> None:
    missing = "/usr/bin/none"
    for argv, cwd, why in (
        ((missing,), None, f"{missing} cannot start: {missing}: No such file or directory"),
        (("/usr/share",), None, "/usr/share cannot start: /usr/share: Permission denied"),
        (ECHO["bash"], "/none", "/usr/bin/bash cannot start: /none: No such file or directory"),
    ):
        with plain.program(argv, cwd=cwd) as program:
            result = program.wait(SECONDS)
        assert (result.status, result.exit_code) == (SandboxStatus.FAILED, 127)
        assert result.error == result.stderr.strip() == why


def test_waiting_has_an_end_and_it_lives_on(plain: Sandbox) -> None:
    with plain.program(ECHO["bash"]) as program:
        with pytest.raises(TimeoutError, match="still runs"):
            program.wait(0.01)
        os.write(program.stdin, b"x\n")
        assert receive(program) == b"x\n"


@pytest.mark.parametrize("end", ["kill", "close", "sandbox"])
def test_it_is_ended_while_it_runs(plain: Sandbox, end: str) -> None:
    with within(plain) as sandbox:
        program = sandbox.program(ECHO["bash"])
        {"kill": program.kill, "close": program.close, "sandbox": sandbox.close}[end]()
        result = program.wait(SECONDS)
        assert (result.status, result.reason) == (SandboxStatus.CANCELLED, "cancelled")
        assert not program.is_alive()
        if end != "close":
            assert receive(program) == b""
            with pytest.raises(BrokenPipeError):
                os.write(program.stdin, b"x")
        program.close()
        program.close()
        assert (program.stdin, program.stdout) == (-1, -1)
        assert program.wait(0) == result


def test_a_sandbox_that_is_closed_starts_none(plain: Sandbox) -> None:
    sandbox = within(plain)
    sandbox.close()
    with pytest.raises(ClosedError):
        sandbox.program(ECHO["bash"])


def test_one_that_nobody_holds_is_killed(plain: Sandbox) -> None:
    program = plain.program(ECHO["bash"])
    assert soon(lambda: len(running("bash")) == 1)
    stdout = os.dup(program.stdout)
    try:
        del program
        gc.collect()
        assert select.select([stdout], [], [], SECONDS)[0]
        assert os.read(stdout, 1) == b""
    finally:
        os.close(stdout)
    assert soon(lambda: not running("bash"))


def running(program: str) -> list[int]:
    """Return the processes below us that run a program, by the name that ps(1) shows."""
    return [pid for pid in descendants(os.getpid()) if _name(pid) == os.path.basename(program)[:15]]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""  # gone


def test_a_launcher_that_is_killed_is_an_error_of_ours_and_nothing_runs_twice(
    plain: Sandbox,
) -> None:
    audit = AuditLog()
    with Sandbox(policy=plain.policy, pool=0, audit=audit) as sandbox:
        program = sandbox.program(ECHO["bash"])
        os.kill(inspect(sandbox).launcher_pids().launcher, 9)
        assert receive(program) == b""
        with pytest.raises(LaunchError):
            program.wait(SECONDS)
        assert not program.is_alive()
        program.close()
        assert [each.action for each in audit.get_entries() if each.category == "execution"] == [
            "start",
            "lost",
        ]
        assert said(sandbox, "/usr/bin/echo", "again") == b"again\n"


# What is left


GRANDCHILDREN = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(300)
        time.sleep(300)
print('up', flush=True)
time.sleep(300)
"""


def test_whatever_it_started_is_gone_with_it(server: Sandbox) -> None:
    program = server.program((*PYTHON, GRANDCHILDREN))
    assert receive_line(program) == b"up\n"
    assert soon(lambda: len(running(PYTHON[0])) == 7)
    pidfds = {pid: os.pidfd_open(pid) for pid in running(PYTHON[0])}
    program.close()
    poll = select.poll()
    for pidfd in pidfds.values():
        poll.register(pidfd, select.POLLIN)
    ended = poll.poll(0)  # at once: closing has waited
    for pidfd in pidfds.values():
        os.close(pidfd)
    assert len(ended) == len(pidfds)


def test_nothing_is_left(plain: Sandbox) -> None:
    def ends(program: Program) -> None:
        program.close_stdin()
        program.wait(SECONDS)
        program.close()

    def leaves_output(program: Program) -> None:
        os.write(program.stdin, b"x\n" * 100)
        program.close()

    def fails(_: Program) -> None:
        with plain.program(("/usr/bin/none",)) as program:
            program.wait(SECONDS)

    def is_dropped(program: Program) -> None:
        program.kill()
        program.wait(SECONDS)

    ways: tuple[Callable[[Program], None], ...] = (ends, leaves_output, fails, is_dropped)
    for way in ways:
        with plain.program(ECHO["bash"]) as program:
            way(program)
    with nothing_left_of(plain):
        for _ in range(5):
            for way in ways:
                program = plain.program(ECHO["bash"])
                way(program)
                if way is not is_dropped:
                    program.close()
                del program


VICTIM = """
import os, select, sys
sys.path[:0] = {paths!r}
from cellwright import Sandbox
from tests.conftest import policy_named
sandbox = Sandbox(policy=policy_named("server"), pool=0)
program = sandbox.program(("/usr/bin/bash", "-c", "sleep 300 & echo up; read x"))
assert os.read(program.stdout, 10) == b"up\\n"
if {forks}:
    child = os.fork()
    if child == 0:
        sys.exit()  # with all that Python does at its end
    os.waitpid(child, 0)
    os.write(program.stdin, b"on\\n")
    print(program.wait(30).reason, flush=True)
print("ready", flush=True)
sys.stdin.read()
"""


def victim(*, forks: bool) -> "subprocess.Popen[bytes]":
    script = VICTIM.format(paths=[str(ROOT), *sys.path], forks=forks)
    return subprocess.Popen(
        [sys.executable, "-I", "-W", "ignore", "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def test_an_embedding_process_that_is_killed_takes_it_along() -> None:
    with victim(forks=False) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        pids = descendants(process.pid)
        assert len(pids) >= 6  # keeper, nursery, launcher, init, the shell and its child
        pidfds = {pid: os.pidfd_open(pid) for pid in pids}
        process.kill()
        process.wait(60)
        wait_until_ended(pids, pidfds)


def test_a_child_that_the_embedding_process_forks_ends_nothing() -> None:
    with victim(forks=True) as process:
        assert process.communicate(timeout=60)[0] == b"exit\nready\n"


# How many, under which policy, in which trail


def test_so_many_live_at_once_and_calls_have_turns_of_their_own(plain: Sandbox) -> None:
    pool = PoolSettings(size=0, running=1, programs=2, queue_seconds=0.05)
    with (
        Sandbox(policy=plain.policy, pool=pool) as sandbox,
        sandbox.program(ECHO["bash"]),
        sandbox.program(ECHO["bash"]) as second,
    ):
        assert sandbox.execute("1 + 1").value == 2
        with pytest.raises(BusyError):
            sandbox.program(ECHO["bash"])
        second.close()
        sandbox.program(ECHO["bash"]).close()
    with pytest.raises(PolicyError, match=r"pool\.programs"):
        Sandbox(policy=plain.policy, pool=PoolSettings(programs=0))


class Wrong(NamedTuple):
    argv: Any
    given: dict[str, Any]
    why: str


WRONG = {
    "nothing": Wrong((), {}, r"argv\[0\]"),
    "one text": Wrong("/usr/bin/cat", {}, "argv"),
    "no absolute path": Wrong(("bin/cat",), {}, r"argv\[0\]: must be an absolute path"),
    "numbers": Wrong(("/usr/bin/cat", 1), {}, "argv"),
    "NUL": Wrong(("/usr/bin/cat", "a\0b"), {}, "NUL"),
    "surrogate": Wrong(("/usr/bin/cat", "\ud800"), {}, "surrogate"),
    "cwd": Wrong(("/usr/bin/cat",), {"cwd": "data"}, "cwd: must be an absolute path"),
    "cwd is none": Wrong(("/usr/bin/cat",), {"cwd": 3}, "cwd: must be"),
    "env": Wrong(("/usr/bin/cat",), {"env": {"A=": "b"}}, "env: a name"),
    "env is none": Wrong(("/usr/bin/cat",), {"env": ["A"]}, "env"),
    "files": Wrong(("/usr/bin/cat",), {"files": {"../x": "y"}}, "files"),
    "trace": Wrong(("/usr/bin/cat",), {"trace_id": 3}, "trace_id"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_arguments_that_make_no_sense_are_refused(plain: Sandbox, wrong: Wrong) -> None:
    threads = threading.active_count()
    with pytest.raises(PolicyError, match=wrong.why):
        plain.program(wrong.argv, **wrong.given)
    assert soon(lambda: threading.active_count() == threads)


def test_a_policy_without_subprocesses_starts_none(strict: Sandbox) -> None:
    with pytest.raises(PolicyError, match=r"processes\.subprocesses"):
        strict.program(("/usr/bin/cat",))


def test_the_trail_has_its_beginning_and_its_end_but_not_its_arguments(plain: Sandbox) -> None:
    audit = AuditLog()
    with Sandbox(policy=plain.policy, pool=0, audit=audit) as sandbox:
        argv = ("/usr/bin/bash", "-c", "cat /etc/shadow; echo SECRET")
        with sandbox.program(argv, env={"TOKEN": "HIDDEN"}, trace_id="mine") as program:
            assert receive_all(program) == b"SECRET\n"
            result = program.wait(SECONDS)
        sandbox.program(ECHO["bash"]).close()
    entries = [each for each in audit.get_entries() if each.category in ("execution", "violation")]
    assert [each.action for each in entries if each.category == "execution"] == [
        "start", "ok", "start", "cancelled",
    ]  # fmt: skip
    start = entries[0]
    assert (start.target, start.details["program"]) == ("program", "/usr/bin/bash")
    assert start.details["execution_id"] == result.execution_id
    assert result.trace_id == start.trace_id
    if "listener" in plain.layers:
        assert [each.target.split()[0] for each in entries if each.category == "violation"] == [
            "'/etc/shadow'"
        ]
    assert "SECRET" not in repr(entries)
    assert "HIDDEN" not in repr(entries)
