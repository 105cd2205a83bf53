"""A container for each call, by runtimes whose containers have a kernel of their own.

Where gVisor and krun are installed, they run the contract.  Everywhere a program that has gVisor's
command line runs it by runc: the kernel is then the host's, and all else is the same.
"""

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cellwright import HostSettings, LaunchError, PolicyError, Sandbox, SandboxStatus, Unenforceable
from tests.conftest import OPTIONAL
from tests.harness.containers.test_containers import as_user, bundles
from tests.runner.test_ordinary_user import PYTHON, readable

__all__ = ["readable"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore:.*known holes")
LESS = ["listener", "landlock", *OPTIONAL]
POLICY: dict[str, Any] = {
    "extends": "strict", "isolation": {"kernel": "own"}, "optional_layers": LESS,
}  # fmt: skip
FRONT = """#!/bin/sh
[ "$1" = --version ] && { echo "runsc version release-20260105.0"; exit 0; }
while :; do case $1 in --network=none|--rootless|--ignore-cgroups) shift;; *) break;; esac; done
"""
BEGUN = "b\n"


def program(path: Path, text: str) -> str:
    path.write_text(FRONT + text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture(
    params=[
        pytest.param("runsc", marks=pytest.mark.needs("runsc")),
        pytest.param("krun", marks=pytest.mark.needs("krun")),
        pytest.param("front", marks=pytest.mark.needs("root", "runc")),
    ]
)
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        program(tmp_path / "runsc", 'exec runc "$@"') if request.param == "front" else request.param
    )


def sandbox_of(runtime: str, **changes: object) -> Sandbox:
    return Sandbox(policy=POLICY | changes, host=HostSettings(backend="oci", runtime=runtime))


def line(kind: str, data: bytes = b"") -> str:
    return kind + base64.b64encode(data).decode()


def test_a_call_has_values_files_streams_and_an_end(runtime: str) -> None:
    before = bundles()
    with sandbox_of(runtime) as sandbox:
        result = sandbox.execute(
            "import os, sys\nprint(open('in').read(), sys.stdin.read())\nprint('err', file=sys.stderr)\n"
            "os.mkdir('sub')\nopen('sub/out', 'w').write('made')\n[name, os.getuid() > 0]",
            files={"in": "given"}, inputs={"name": "x"}, stdin="typed", collect=["sub/*"],
        )  # fmt: skip
        assert result.value == ["x", True]
        assert (result.stdout, result.stderr, result.reason) == ("given typed\n", "err\n", "exit")
        assert [(each.name, each.data) for each in result.artifacts] == [("sub/out", b"made")]
        assert [each.path for each in result.files] == ["sub/out"]
        assert result.layers == sandbox.layers
        assert {"container", "seccomp", "no_new_privs"} <= set(sandbox.layers)
        assert any(each in sandbox.layers for each in ("kernel_gvisor", "kernel_vm"))
        assert not {"listener", "landlock", "user_ns", "kernel_shared"} & set(sandbox.layers)
        failed = sandbox.execute("1 / 0")
        assert (failed.status, failed.reason) == (SandboxStatus.FAILED, "exception")
        assert sandbox.execute("import sys; sys.exit(3)").exit_code == 3
        assert sandbox.audit
        assert len(sandbox.audit.get_entries()) >= 6
    assert bundles() == before


def test_a_program_ends_at_its_limits(runtime: str) -> None:
    before = bundles()
    limits = {"limits": {"output_total_bytes": 100_000}}
    with sandbox_of(runtime, **limits) as sandbox:
        assert sandbox.execute("while True: pass", timeout=2).reason == "wall_time"
        assert sandbox.execute("while True: print('x' * 1000)").reason == "output"
        killed = sandbox.execute("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert (killed.status, killed.reason) == (SandboxStatus.FAILED, "signal")
        run = sandbox.start("import time; time.sleep(100)")
        run.cancel()
        assert run.result().reason == "cancelled"
    assert bundles() == before


def test_the_policy_holds_inside(runtime: str) -> None:
    """By the filter of system calls, as in a cell without a listener."""
    with sandbox_of(runtime) as sandbox:
        for attempt in ("os.fork()", "socket.socket()", "os.execv('/bin/sh', ['sh'])"):
            result = sandbox.execute(f"import os, socket\n{attempt}")
            assert result.status is SandboxStatus.FAILED, attempt
        assert sandbox.execute("import os\nos.path.exists('/etc/shadow')").value is False
        tried = "import os\n[os.access(p, os.W_OK) for p in ('/', '/usr', '/etc/passwd', '/.cellwright/call')]"
        assert sandbox.execute(tried).value == [False] * 4
        assert (
            sandbox.execute("open('/proc/self/status').read().split('CapEff:')[1].split()[0]").value
            == "0" * 16
        )


def test_nothing_is_left_for_the_next_call(runtime: str) -> None:
    with sandbox_of(runtime) as sandbox:
        sandbox.execute("open('/workspace/left', 'w'); open('/tmp/left', 'w')")
        seen = sandbox.execute("import os\nos.listdir('/workspace') + os.listdir('/tmp')")
        assert seen.value == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (lambda box: box.session(), "session: each call has a container of runsc"),
        (lambda box: box.program(["/bin/true"]), "program: each call"),
        (lambda box: box.execute("1", language="bash"), "language: each call"),
        (lambda box: box.execute("1", workspace="w"), "workspace: each call"),
    ],
)
def test_what_needs_a_cell_is_refused(asked: Any, message: str, tmp_path: Path) -> None:
    runtime = program(tmp_path / "runsc", "exit 1")
    with sandbox_of(runtime) as sandbox, pytest.raises(PolicyError, match=message):
        asked(sandbox)


def test_layers_that_it_cannot_have_must_be_optional(tmp_path: Path) -> None:
    runtime = program(tmp_path / "runsc", "exit 1")
    with pytest.raises(Unenforceable, match="listener: the kernel of a container reports nothing"):
        Sandbox(
            policy=POLICY | {"optional_layers": OPTIONAL},
            host=HostSettings(backend="oci", runtime=runtime),
        )
    with pytest.raises(PolicyError, match="tools: not with runsc"):
        Sandbox(policy=POLICY, tools=[], host=HostSettings(backend="oci", runtime=runtime))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("echo 'no KVM' >&2; exit 1", "runsc made no container that runs a program: no KVM"),
        ("exit 0", "runsc made no container that runs a program: no message"),
        ("kill -9 $$", "runsc made no container that runs a program"),
    ],
)
def test_a_runtime_that_begins_nothing_is_our_error(
    said: str, message: str, tmp_path: Path
) -> None:
    before = bundles()
    runtime = program(tmp_path / "runsc", said)
    with sandbox_of(runtime) as sandbox, pytest.raises(LaunchError, match=message):
        sandbox.execute("1")
    assert bundles() == before


@pytest.mark.parametrize(
    "lines",
    [
        [line("o", b"early")],
        [line("b"), line("b")],
        [line("b"), "o***"],
        [line("b"), line("z")],
        [line("b"), line("w", b"\0garbage")],
        [line("b"), line("w", b"")],
        [line("b"), line("x", b"many")],
        [line("b"), line("x", b"127")],
        [line("b"), line("x", b"-1")],
        [line("b"), line("x", b"99999999999999999999")],
        [line("b"), "o" + "A" * 1_000_000],
    ],
)
def test_a_container_that_says_anything_else_is_ended(lines: list[str], tmp_path: Path) -> None:
    """What comes out of it may be the program's word, however it got there."""
    (tmp_path / "said").write_text("".join(f"{each}\n" for each in lines))
    runtime = program(
        tmp_path / "runsc", f"cat {tmp_path}/said; [ $3 = run ] && exec sleep 10; exit 0"
    )
    with sandbox_of(runtime) as sandbox:
        result = sandbox.execute("1")
    assert (result.status, result.reason) == (SandboxStatus.KILLED, "violation")
    assert str(result.error).startswith("broke the protocol: ")


def test_a_container_that_ends_before_its_program_was_killed(tmp_path: Path) -> None:
    with sandbox_of(program(tmp_path / "runsc", "echo b; exit 0")) as sandbox:
        result = sandbox.execute("1")
    assert (result.status, result.reason) == (SandboxStatus.FAILED, "signal")


def test_files_beyond_the_workspace_end_it(tmp_path: Path) -> None:
    piece = line("f", bytes(100_000))
    runtime = program(tmp_path / "runsc", f"echo b; while :; do echo {piece}; done")
    with sandbox_of(
        runtime, limits={"workspace_bytes": 1_000_000, "workspace_inodes": 8}
    ) as sandbox:
        assert "more files than fit" in str(sandbox.execute("1").error)


def test_a_call_leaves_no_temporary_files(tmp_path: Path) -> None:
    before = set(Path(tempfile.gettempdir()).glob("cellwright-*"))
    with sandbox_of(program(tmp_path / "runsc", "echo b; exit 0")) as sandbox:
        sandbox.execute("1")
    assert set(Path(tempfile.gettempdir()).glob("cellwright-*")) <= before


@pytest.mark.needs("root", "runc")
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="the system has no Python of this version")
def test_without_root_a_program_has_no_capability_either(readable: Path) -> None:
    runtime = program(readable / "runsc", 'exec runc "$@"')
    code = """
import warnings
warnings.simplefilter("ignore")
policy = {"extends": "strict", "isolation": {"kernel": "own"},
          "optional_layers": ["listener", "landlock", "cgroup"]}
with Sandbox(policy=policy, host=HostSettings(backend="oci", runtime=RUNTIME)) as sandbox:
    result = sandbox.execute("open('/proc/self/status').read().split('CapEff:')[1].split()[0]")
    tell(value=result.value, layers=sandbox.layers)
"""
    done = as_user(readable, code.replace("RUNTIME", repr(runtime)))
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["value"] == "0" * 16
    assert not [layer for layer in told["layers"] if layer.startswith("cgroup")]
