"""The same as an ordinary user: what is lost is exactly the caps, and results say so."""

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.escapes.test_filesystem import SET_UID

pytestmark = [
    pytest.mark.needs("root"),
    pytest.mark.skipif(
        not Path(f"/usr/bin/python3.{sys.version_info.minor}").exists(),
        reason="the system has no Python of this version that every user may read",
    ),
]
USER = 54322
PYTHON = f"/usr/bin/python3.{sys.version_info.minor}"
LOST = ["cgroup_cpu", "cgroup_memory", "cgroup_pids"]
NEEDED = ("msgspec", "psutil", "pyseccomp", "prctl", "_prctl", "pystemd")

PRELUDE = """
import sys, json, os
sys.path[:0] = {paths!r}
import cellwright
from cellwright import HostSettings, Sandbox, Unenforceable
from cellwright.testing import inspect
from cellwright.policies.profiles.loading import load_policy
import msgspec
LOST = {lost!r}
def box(name, **limits):
    policy = load_policy(name)
    limits = msgspec.structs.replace(policy.limits, **limits)
    return Sandbox(policy=msgspec.structs.replace(policy, limits=limits, optional_layers=tuple(LOST)), pool=0)
def tell(**what):
    print(json.dumps(what))
"""


@pytest.fixture(scope="module")
def readable() -> Iterator[Path]:
    """A copy of the packages that every user may read; pytest's own tmp_path is not one."""
    with tempfile.TemporaryDirectory(prefix="cellwright-user-", dir="/var/tmp") as name:
        place = Path(name)
        shutil.copytree(
            ROOT / "cellwright", place / "cellwright", ignore=shutil.ignore_patterns("__pycache__")
        )
        for package in NEEDED:
            spec = importlib.util.find_spec(package)
            if spec is None or spec.origin is None:
                continue
            if spec.submodule_search_locations:
                shutil.copytree(Path(spec.origin).parent, place / package)
            else:
                shutil.copy(spec.origin, place)
        (place / "home").mkdir()
        subprocess.run(["chmod", "-R", "u=rwX,go=rX", name], check=True)
        os.chown(place / "home", USER, USER)
        yield place


def as_user(readable: Path, code: str) -> dict[str, Any]:
    script = PRELUDE.format(paths=[str(readable)], lost=LOST) + code
    done = subprocess.run(
        [PYTHON, "-I", "-c", script], user=USER, group=USER, extra_groups=[], cwd="/",
        env={"HOME": str(readable / "home")}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_shell_calls_tools(readable: Path) -> None:
    """Its supervisor may read the memory of its cells, and so sees which file is opened."""
    told = as_user(
        readable,
        """
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.tool import Tool
policy = msgspec.structs.replace(load_policy("strict"), optional_layers=tuple(LOST))
echo = Tool(ToolSpec(name="echo", owner=ToolOwner.DEVELOPER), lambda given, _: given)
with Sandbox(policy=policy, tools=[echo], pool=0) as sandbox:
    result = sandbox.execute("cellwright-call nobody", "sh")
tell(status=result.exit_code, stderr=result.stderr)
""",
    )
    assert told == {"status": 3, "stderr": "not_found: there is no tool 'nobody'\n"}


def test_no_program_is_left_set_uid_of_the_user(readable: Path) -> None:
    """In /workspace of a cell that may write to no path of the host the same calls succeed."""
    told = as_user(
        readable,
        f"""
import os, tempfile
from cellwright.policies.policy import Filesystem
place = tempfile.mkdtemp(dir=os.path.expanduser("~"))
policy = msgspec.structs.replace(load_policy("strict"), optional_layers=tuple(LOST))
beside = msgspec.structs.replace(policy, filesystem=Filesystem(write=(place,)))
program = {SET_UID!r}
with Sandbox(policy=policy, pool=0) as alone, Sandbox(policy=beside, pool=0) as writer:
    tell(alone=alone.execute(program.format(place="/workspace")).value,
         beside=writer.execute(program.format(place=place)).value)
""",
    )
    modes = {"0o104755", "0o102755", "0o100755", "0o42755"}
    assert set(told["alone"].values()) == modes
    assert set(told["beside"].values()) == {errno.EPERM, "0o100755", "0o42755"}


def test_locks_are_counted_and_those_on_shown_files_are_not_made(readable: Path) -> None:
    """Its supervisor may look at the descriptors of its cells, and copy them."""
    told = as_user(
        readable,
        """
policy = msgspec.structs.replace(load_policy("standard"), optional_layers=tuple(LOST))
program = '''
import fcntl, os, struct, threading
def attempt(make):
    try: make()
    except OSError as error: return error.errno
    return 0
own, shown = open("/workspace/a", "w"), open(os.__file__)
def lock_all():
    for place in range(3000):
        fcntl.fcntl(own, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 2 * place, 1, 0))
told = [attempt(lock_all), attempt(lambda: fcntl.flock(shown, fcntl.LOCK_EX))]
def in_a_thread():
    told.append(attempt(lambda: fcntl.flock(own, fcntl.LOCK_EX)))
    told.append(attempt(lambda: fcntl.flock(shown, fcntl.LOCK_EX)))
thread = threading.Thread(target=in_a_thread); thread.start(); thread.join()
told
'''
with Sandbox(policy=policy, pool=0) as sandbox:
    tell(told=sandbox.execute(program).value)
""",
    )
    assert told == {"told": [errno.ENOLCK, errno.EPERM, 0, errno.EPERM]}


def test_protected_paths_cannot_be_made_and_others_belong_to_the_user(readable: Path) -> None:
    """Its supervisor reads the memory of its cells, also of a process that hides it from its like: it
    owns the user namespaces."""
    told = as_user(
        readable,
        """
place = os.path.join(os.environ["HOME"], "project")
os.mkdir(place)
policy = load_policy("workshop")
files = msgspec.structs.replace(policy.filesystem, write=(place,), protected=(place + "/.envrc",))
policy = msgspec.structs.replace(policy, filesystem=files, optional_layers=tuple(LOST))
program = f'''
import ctypes, os
os.chdir({place!r})
def attempt(name):
    try: open(name, "w").close()
    except OSError as error: return error.errno
    return 0
told = [attempt("x"), attempt(".envrc"), attempt("/dev/fd/1"), attempt("/dev/null")]
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
[*told, attempt("hidden")]
'''
with Sandbox(policy=policy, pool=0) as sandbox:
    result = sandbox.execute(program)
rules = [each.rule for each in result.violations]
tell(told=result.value, owner=os.stat(place + "/x").st_uid, made=sorted(os.listdir(place)), rules=rules)
""",
    )
    assert told["told"] == [0, errno.EPERM, 0, 0, 0]
    assert (told["owner"], told["made"]) == (USER, ["hidden", "x"])
    assert [each.endswith("/project/.envrc") for each in told["rules"]] == [True]


def test_a_writable_directory_is_watched_for_changes(readable: Path) -> None:
    """Also for those that programs of the host make, but not for what they read, or do with pipes."""
    code = """
import msgspec, tempfile
from cellwright.policies.policy import Filesystem
SCRIPT = '''
import ctypes, os, struct
C = ctypes.CDLL(None)
def events(path, mask=0xFFF):
    fd = C.inotify_init1(os.O_NONBLOCK)
    watch = C.inotify_add_watch(fd, path.encode(), mask)
    os.listdir(PLACE); open(PLACE + "/a").close(); open(PLACE + "/a", "w").close()
    try: data = os.read(fd, 65536)
    except BlockingIOError: data = b""
    os.close(fd)
    found = set()
    while data:
        _, event, _, length = struct.unpack_from("=iIII", data)
        found.add(event & 0xFFF)
        data = data[16 + length:]
    return [watch, sorted(found)]
[events(PLACE), events(PLACE + "/a"), events(PLACE, 0x20), events(PLACE + "/read"), events("/usr")]
'''
with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
    open(place + "/a", "w").write("x")
    os.mkdir(place + "/read")
    policy = load_policy("standard")
    shown = Filesystem(read=(*policy.filesystem.read, place + "/read"), write=(place,))
    policy = msgspec.structs.replace(policy, optional_layers=tuple(LOST), filesystem=shown)
    with Sandbox(policy=policy, pool=0) as sandbox:
        result = sandbox.execute(f"PLACE = {place!r}" + SCRIPT)
        tell(value=result.value, error=str(result.error))
"""
    seen = as_user(readable, code)
    assert seen["value"] == [[1, [2, 8]], [1, [2, 8]], [1, []], [1, []], [1, []]], seen["error"]


def test_a_session_is_branched_by_memory(readable: Path) -> None:
    """Its branching process is of its own id, and sees no page's place in memory."""
    told = as_user(
        readable,
        """
with box("strict") as sandbox, sandbox.session() as source:
    source.execute("import sqlite3; it = iter(range(9)); next(it); open('f', 'w').write('x')")
    made = source.branch(2)
    values = [each.execute("next(it), open('f').read()").value for each in (source, *made)]
    tell(how=[each.forked_by + each.not_copied for each in made], values=values)
""",
    )
    assert told == {"how": ["memory", "memory"], "values": [[1, "x"]] * 3}


def test_a_session_is_paused_and_resumed_by_another_launcher(readable: Path) -> None:
    told = as_user(
        readable,
        """
import tempfile
from cellwright import PauseSettings
policy = msgspec.structs.replace(load_policy("strict"), optional_layers=tuple(LOST))
with tempfile.TemporaryDirectory() as directory:
    given = dict(policy=policy, pool=0, pausable=True, pauses=PauseSettings(directory))
    with Sandbox(**given) as sandbox:
        session = sandbox.session()
        session.execute("it = iter(range(9)); next(it); open('f', 'w').write('x')")
        token = session.pause()
    with Sandbox(**given) as sandbox, sandbox.resume(token) as session:
        tell(value=session.execute("next(it), open('f').read()").value)
""",
    )
    assert told == {"value": [1, "x"]}


def test_without_leave_the_sandbox_refuses_and_names_exactly_the_caps(readable: Path) -> None:
    told = as_user(
        readable,
        """
try:
    Sandbox()
    tell(gaps=None)
except Unenforceable as refusal:
    tell(gaps=sorted(layer for layer, _ in refusal.gaps), why=str(refusal))
""",
    )
    assert told["gaps"] == LOST, told
    assert "hint:" in told["why"]


def test_with_leave_executions_work_and_results_say_what_is_missing(readable: Path) -> None:
    told = as_user(
        readable,
        """
from cellwright.policies.compiling.host import ALWAYS
with box("strict") as sandbox:
    result = sandbox.execute("print('hi'); x + 1", inputs={"x": 1})
    tell(value=result.value, stdout=result.stdout, layers=result.layers, always=ALWAYS, user=os.getuid())
""",
    )
    assert (told["value"], told["stdout"], told["user"]) == (2, "hi\n", USER)
    layers = set(told["layers"])
    assert layers == {*told["always"], "landlock", "listener", "rlimit_as", "rlimit_nproc"}


HELLO = {
    "bash": "echo hello", "javascript": "console.log('hello')", "ruby": "puts 'hello'",
    "sh": "echo hello",
}  # fmt: skip


@pytest.mark.needs("node", "ruby")
def test_every_language_runs_under_the_rlimits_that_take_over(readable: Path) -> None:
    code = f"""
with box("strict") as sandbox:
    results = {{name: sandbox.execute(code, name) for name, code in {HELLO!r}.items()}}
    tell(**{{name: [each.stdout, each.stderr, each.layers] for name, each in results.items()}})
"""
    for stdout, stderr, layers in as_user(readable, code).values():
        assert stdout == "hello\n", stderr
        assert "rlimit_as" in layers


@pytest.mark.needs("java")
@pytest.mark.skipif(not Path("/usr/bin/javac").exists(), reason="no /usr/bin/javac")
def test_a_jvm_lives_under_the_address_space_that_takes_over(readable: Path) -> None:
    code = """
source = 'public class Main { public static void main(String[] given) { System.out.println("hello"); } }'
with box("strict") as sandbox:
    result = sandbox.execute(source, "java")
    tell(said=result.stdout, error=result.stderr, layers=result.layers)
"""
    told = as_user(readable, code)
    assert told["said"] == "hello\n", told
    assert "rlimit_as" in told["layers"]


def test_a_judge_without_cgroups_sees_memory_and_time_that_were_too_much(readable: Path) -> None:
    code = """
from cellwright.judging import Case, JudgeLimits
programs = {
    "small": "print(1)",
    "large": "x = bytearray(100 << 20); print(1)",
    "larger": "x = []\\nwhile True: x.append(bytearray(1 << 20))",
    "at once": "x = bytearray(1 << 40)",
    "waits": "import time; time.sleep(1000)",
}
limits = JudgeLimits(memory_bytes=64 << 20, time_seconds=1.0, wall_seconds=5.0)
with box("strict") as sandbox:
    done = {name: sandbox.judge(each, "python", [Case(expected="1")], limits=limits) for name, each in programs.items()}
    tell(**{name: each.verdict.value for name, each in done.items()})
"""
    assert as_user(readable, code) == {
        "small": "accepted", "large": "memory limit exceeded", "larger": "memory limit exceeded",
        "at once": "runtime error", "waits": "time limit exceeded",
    }  # fmt: skip


@pytest.mark.skipif(not Path("/usr/bin/node").exists(), reason="no /usr/bin/node")
def test_node_lives_under_the_address_space_that_takes_over(readable: Path) -> None:
    code = """
with box("server") as sandbox, sandbox.program(("/usr/bin/node", "-e", "process.stdin.pipe(process.stdout)")) as program:
    os.write(program.stdin, b"hello")
    program.close_stdin()
    tell(said=os.read(program.stdout, 100).decode(), status=program.wait(60).status.name, layers=sandbox.layers)
"""
    told = as_user(readable, code)
    assert (told["said"], told["status"]) == ("hello", "COMPLETED")
    assert "rlimit_as" in told["layers"]


def test_a_program_lives_and_goes_as_it_does_for_root(readable: Path) -> None:
    code = """
with box("server") as sandbox, sandbox.program(("/usr/bin/bash", "-c", "read -r x; echo $x; id -u; read -r x")) as program:
    os.write(program.stdin, b"hello\\n")
    said = b""
    while said.count(b"\\n") < 2:
        said += os.read(program.stdout, 100)
    program.close()
    tell(said=said.decode(), reason=program.wait().reason)
"""
    assert as_user(readable, code) == {"said": "hello\n1000\n", "reason": "cancelled"}


ESCAPES = {
    "shadow": "open('/etc/shadow').read()",
    "home": "import os; os.listdir('/root')",
    "internet": "import socket; socket.socket(socket.AF_INET)",
    "unix by name": "import socket; socket.socket(socket.AF_UNIX).connect('\\\\0x')",
    "fork": "import os; os.fork()",
    "write": "open('/usr/lib/x', 'w')",
    "set-uid": "import os; os.setuid(0)",
    "host's processes": "import os; assert len([p for p in os.listdir('/proc') if p.isdigit()]) > 5",
}


def test_attempts_are_noted_with_their_arguments(readable: Path) -> None:
    told = as_user(
        readable,
        """
with box("strict") as sandbox:
    result = sandbox.execute("try: open('/etc/shadow')\\nexcept OSError: pass\\nimport socket; socket.socket()")
    tell(seen=[[each.syscall, each.arguments] for each in result.violations])
""",
    )
    assert told["seen"] == [
        ["openat", ["'/etc/shadow'", "O_RDONLY"]],
        ["socket", ["AF_INET", "SOCK_STREAM", "0"]],
    ]


def test_escapes_are_refused(readable: Path) -> None:
    told = as_user(
        readable,
        f"""
with box("strict") as sandbox:
    results = {{name: sandbox.execute(code) for name, code in {ESCAPES!r}.items()}}
    tell(**{{name: [result.reason, result.error] for name, result in results.items()}})
""",
    )
    assert {name: reason for name, (reason, _) in told.items()} == dict.fromkeys(
        ESCAPES, "exception"
    )


def test_ids_inside_show_nothing_of_the_user(readable: Path) -> None:
    told = as_user(
        readable,
        """
with box("strict") as sandbox:
    tell(ids=sandbox.execute("import os; [os.getresuid(), os.getresgid(), os.getgroups()]").value)
""",
    )
    assert told["ids"][:2] == [[1000] * 3] * 2


def test_a_fork_bomb_is_bounded(readable: Path) -> None:
    """RLIMIT_NPROC, counted in the cell's own user namespace."""
    bomb = """
import os, time
children = 0
try:
    for _ in range(400):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        children += 1
except BlockingIOError:
    pass
children
"""
    told = as_user(
        readable,
        f"""
with box("standard", processes=20) as sandbox:
    result = sandbox.execute({bomb!r})
    again = sandbox.execute("1 + 1")
    tell(children=result.value, reason=result.reason, error=result.error, again=again.value)
""",
    )
    assert told["again"] == 2
    assert isinstance(told["children"], int), told
    assert told["children"] <= 20


def test_one_cells_processes_do_not_count_against_anothers(readable: Path) -> None:
    told = as_user(
        readable,
        """
code = "import os, time\\\\nfor _ in range(12):\\\\n    if os.fork() == 0: time.sleep(30)\\\\nprint('up', flush=True)\\\\ntime.sleep(30)"
code = code.replace("\\\\n", chr(10))
with box("standard", processes=20) as sandbox:
    runs = [sandbox.start(code) for _ in range(3)]
    ups = [next(run.output())[1].decode() for run in runs]
    for run in runs:
        run.cancel()
    tell(ups=ups, ends=[run.result().reason for run in runs])
""",
    )
    assert told == {"ups": ["up\n"] * 3, "ends": ["cancelled"] * 3}


def test_a_memory_bomb_is_a_memory_error(readable: Path) -> None:
    told = as_user(
        readable,
        """
with box("strict", memory_bytes=64 * 1024 * 1024) as sandbox:
    result = sandbox.execute("x = []\\nwhile True: x.append(bytearray(10_000_000))")
    again = sandbox.execute("1 + 1")
    tell(error=result.error, again=again.value)
""",
    )
    assert told["error"].startswith("MemoryError")
    assert told["again"] == 2


def test_cpu_time_is_capped_by_the_rlimit(readable: Path) -> None:
    told = as_user(
        readable,
        """
with box("strict", cpu_seconds=0.5) as sandbox:
    result = sandbox.execute("while True: pass")
    tell(status=result.status.value, reason=result.reason)
""",
    )
    assert told == {"status": "timeout", "reason": "cpu_time"}


def test_a_hundred_executions_leave_no_process(readable: Path) -> None:
    told = as_user(
        readable,
        """
def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return len(file.read().split())
with box("strict") as sandbox:
    sandbox.execute("1")
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        sandbox.execute("1")
    _, nursery, launcher = inspect(sandbox).generation.launcher.pids()
    inside = (children(launcher), children(nursery) <= 3, len(os.listdir("/proc/self/fd")) - fds)
tell(inside=inside, after=children(os.getpid()))
""",
    )
    assert told == {"inside": [0, True, 0], "after": 0}


def test_a_name_of_the_network_is_reached(readable: Path) -> None:
    """The egress process runs as the user, and is confined without having been root."""
    told = as_user(
        readable,
        """
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import Network, Policy
from cellwright.runner.launching import spawn
import socket, threading
spawn._BOOTSTRAP = spawn._BOOTSTRAP.replace("main(len(paths))",
    "import socket as s;e=sys.modules.get('cellwright.runner.egress.main');g=s.getaddrinfo;"
    "s.getaddrinfo=(lambda h,*a,**k:g('127.0.0.1',*a,**k)) if e else g;main(len(paths))")
server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=lambda: server.accept()[0].sendall(b"hello"), daemon=True).start()
port = server.getsockname()[1]
rule = NetworkRule(host="api.example.org", ports=(port,), schemes=("tcp",))
network = Network(allow=(rule,), addresses=("127.0.0.0/8",))
with Sandbox(policy=Policy(network=network, optional_layers=tuple(LOST)), pool=0) as sandbox:
    result = sandbox.execute(
        "import socket; socket.create_connection(('api.example.org', port)).recv(5).decode()",
        inputs={"port": port})
    status = open(f"/proc/{inspect(sandbox).egress_pid()}/status").read()
tell(value=result.value, error=result.error, seccomp="Seccomp:\\t2" in status)
""",
    )
    assert told == {"value": "hello", "error": None, "seccomp": True}


def test_a_guest_with_the_users_id_cannot_change_network_rules(readable: Path) -> None:
    """The policy shows it the socket, and its id on the host is that of the person."""
    told = as_user(
        readable,
        """
from cellwright.harness.sandbox.network.network_control import AllowHost, ask
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import Filesystem, Network, Policy, Syscalls
from cellwright.runner.launching import living
from cellwright.runner.messages import encode
os.makedirs(os.environ["HOME"] + "/.cache/cellwright/living", 0o700, exist_ok=True)
network = Network(loopback=True, allow=(NetworkRule(host="api.example.org"),))
shown = Filesystem(write=(os.environ["HOME"] + "/.cache/cellwright/living",))
calls = Syscalls(groups=("unix_sockets",))  # without the group it cannot even connect
policy = Policy(network=network, filesystem=shown, syscalls=calls, optional_layers=tuple(LOST))
code = '''
import socket
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(path)
answer = sock.recv(65536).decode("latin1")
try: sock.send(bytes([0]) + bytes(wanted))
except OSError: pass
answer
'''
with Sandbox(policy=policy, pool=0) as sandbox:
    (path,) = [each.control for each in living.list_living()]
    rule = AllowHost(NetworkRule(host="b.example.org"))
    result = sandbox.execute(code, inputs={"path": path, "wanted": list(encode(rule))})
    after = sandbox.network.rules
    person = ask(path, rule).rules
tell(value=result.value, error=result.error, rules=after, person=person)
""",
    )
    assert "in the user namespace of their sandbox's owner" in told["value"], told
    assert told["rules"] == ["allow api.example.org:443"]
    assert told["person"] == ["allow api.example.org:443", "allow b.example.org:443"]
