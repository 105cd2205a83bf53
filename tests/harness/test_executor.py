"""Executor and backends; the examples of the interface that they keep."""

import json
import os
import stat
import sys
from functools import partial
from pathlib import Path

import pytest

import cellwright
from cellwright import ClosedError, LaunchError, PolicyError, SandboxStatus
from cellwright.audit import AuditLog
from cellwright.executor import CodeExecutor, ExecutionContext
from cellwright.isolation import ContainerIsolation, IsolationConfig, ProcessIsolation
from cellwright.permissions import FilePermission, PermissionSet, ProcessPermission

pytestmark = pytest.mark.needs("cgroup")  # an executor requires every layer


def test_code_is_executed_in_a_context_and_recorded() -> None:
    audit = AuditLog(max_entries=10_000)
    executor = CodeExecutor(permissions=PermissionSet(), backend=ProcessIsolation(), audit=audit)
    context = ExecutionContext(
        id="task_123", language="python", timeout=60.0, max_memory_mb=512, env_vars={"DEBUG": "1"},
        metadata={"user": "agent_1"},
    )  # fmt: skip
    result = executor.execute("import os; print('executed', os.environ['DEBUG'])", context)
    assert (result.success, result.output, result.context) == (True, "executed 1\n", context)
    assert [entry.action for entry in audit.get_entries(category="execution")] == ["start", "ok"]
    assert {entry.trace_id for entry in audit.get_entries(category="execution")} == {"task_123"}


def test_a_sandbox_is_kept_for_each_pair_of_limits() -> None:
    """Making one takes a hundred times as long as an execution in it."""
    with AuditLog(max_entries=100) as audit, CodeExecutor(audit=audit) as executor:
        made = partial(audit.get_entries, category="policy")
        for number in range(3):
            assert executor.execute(str(number)).result.value == number
        assert len(made()) == 1
        executor.execute("1", ExecutionContext(max_memory_mb=64))
        assert len(made()) == 2
        for timeout in range(1, 7):
            executor.execute("1", ExecutionContext(timeout=timeout))
        assert len(executor.backend._sandboxes) == 4  # type: ignore[attr-defined]
    with pytest.raises(ClosedError):
        executor.execute("1")


def test_cpu_time_grows_with_the_timeout_of_a_context() -> None:
    with CodeExecutor() as executor:
        code = "import resource\nresource.getrlimit(resource.RLIMIT_CPU)[0]"
        result = executor.execute(code, ExecutionContext(timeout=90.0)).result
    assert result.value >= 90


def test_permissions_are_the_executors_or_its_backends() -> None:
    allowed = PermissionSet([ProcessPermission(allow_subprocess=True, allowed_commands=["cat"])])
    code = "import subprocess; subprocess.run(['cat', '/dev/null']).returncode"
    with CodeExecutor(backend=ProcessIsolation(allowed)) as executor:
        assert executor.execute(code).result.value == 0
    with pytest.raises(PolicyError, match="not to both"):
        CodeExecutor(allowed, ProcessIsolation(allowed))


def test_validation_runs_nothing() -> None:
    told = CodeExecutor().validate_code(
        'import socket; socket.connect(("evil.com", 80))', language="python"
    )
    assert told["valid"] is False
    assert told["issues"][0]["pattern"] == "socket"


def test_permissions_reach_the_cell(tmp_path: Path) -> None:
    permissions = PermissionSet().add(
        ProcessPermission(allow_subprocess=True, allowed_commands=["cat"])
    )
    code = "import subprocess; subprocess.run(['cat', '/dev/null']).returncode"
    assert CodeExecutor(permissions).execute(code).result.value == 0
    assert not CodeExecutor().execute(code).success
    with pytest.raises(PolicyError, match="only ProcessIsolation"):
        CodeExecutor(
            PermissionSet([FilePermission(allowed_paths=["/usr/share"])]),
            ContainerIsolation(engine="x"),
        )


def test_limits_of_a_context_hold() -> None:
    executor = CodeExecutor()
    slow = executor.execute("while True: pass", ExecutionContext(timeout=0.3))
    assert slow.result.status is SandboxStatus.TIMEOUT
    big = executor.execute("x = bytearray(10**8)", ExecutionContext(max_memory_mb=64))
    assert big.result.reason == "memory"


def test_process_isolation_is_a_cell() -> None:
    backend = ProcessIsolation()
    assert backend.is_available()
    config = IsolationConfig(
        timeout_seconds=30.0,
        max_memory_mb=256,
        network_disabled=True,
        env_vars={"API_KEY": "secret"},
    )
    result = backend.execute(
        "import os; print('isolated', os.environ['API_KEY'])", "python", config
    )
    assert result.stdout == "isolated secret\n"
    assert "seccomp" in result.layers
    with pytest.raises(PolicyError, match="network"):
        backend.execute("1", "python", IsolationConfig(network_disabled=False))


# A stand-in for a container engine: notes what it is asked, and runs the program as it is.

ENGINE = """#!{python} -IS
import json, os, sys
client = {notes!r} + "-client"
if sys.argv[1] == "run":
    with open(client, "w") as file: file.write(str(os.getpid()))
if sys.argv[1] == "rm" and os.path.exists("/proc/" + open(client).read()): sys.argv[1] = "rm too early"
with open({notes!r}, "a") as notes: notes.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "image": sys.exit(0 if sys.argv[3] == "there" else 1)
for word in sys.argv:
    if word.startswith("--cidfile="): open(word.partition("=")[2], "w").write("0123")
if sys.argv[1] == "run": os.execv({python!r}, [{python!r}, "-I", "-"])
"""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    program = tmp_path / "engine"
    program.write_text(ENGINE.format(python=sys.executable, notes=str(tmp_path / "notes")))
    program.chmod(stat.S_IRWXU)
    return program


def asked(engine: Path) -> list[list[str]]:
    return [json.loads(line) for line in (engine.parent / "notes").read_text().splitlines()]


def test_a_container_is_closed_and_gone(engine: Path) -> None:
    backend = ContainerIsolation(image="there", engine=str(engine))
    assert backend.is_available()
    assert not ContainerIsolation(image="elsewhere", engine=str(engine)).is_available()
    result = backend.execute(
        "print('in container')", "python", IsolationConfig(env_vars={"A": "b c"})
    )
    assert (result.stdout, result.status, result.exit_code) == (
        "in container\n",
        SandboxStatus.COMPLETED,
        0,
    )
    (run,) = (each for each in asked(engine) if each[0] == "run")
    assert "b c" not in str(run)  # everybody may read a command line
    assert {
        "--network=none", "--cap-drop=ALL", "--read-only", "--security-opt=no-new-privileges", "--rm",
        "--pull=never", "--user=65534:65534", "--memory=256m", "--memory-swap=256m", "--pids-limit=64", "A",
    } <= set(run)  # fmt: skip
    assert run[-3:] == ["there", "python3", "-"]
    assert backend.execute("raise SystemExit(3)").exit_code == 3


def test_a_container_that_runs_too_long_is_removed_by_its_name(engine: Path) -> None:
    backend = ContainerIsolation(image="there", engine=str(engine))
    result = backend.execute(
        "import time; time.sleep(60)", config=IsolationConfig(timeout_seconds=2)
    )
    assert (result.status, result.reason) == (SandboxStatus.TIMEOUT, "wall_time")
    (run,) = (each for each in asked(engine) if each[0] == "run")
    (name,) = (each.partition("=")[2] for each in run if each.startswith("--name="))
    assert ["rm", "--force", name] in asked(engine)


def test_what_a_container_prints_is_bounded(engine: Path) -> None:
    result = ContainerIsolation(image="there", engine=str(engine)).execute("print('x' * 10**7)")
    assert len(result.stdout) < 110_000


def test_an_engine_that_makes_no_container_is_an_error_of_ours(engine: Path) -> None:
    said = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock."
    engine.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 125\n")
    with pytest.raises(
        LaunchError, match="started no container: Cannot connect to the Docker daemon"
    ):
        ContainerIsolation(image="there", engine=str(engine)).execute("1")
    engine.unlink()
    backend = ContainerIsolation(image="there", engine=str(engine))
    assert not backend.is_available()
    with pytest.raises(LaunchError, match="cannot start .*: No such file"):
        backend.execute("1")


@pytest.mark.parametrize(
    ("code", "words"), [(125, "or the program exited"), (126, "be executed"), (127, "lacks python3"), (3, "code 3")]
)  # fmt: skip
def test_exit_codes_of_a_container_are_explained(engine: Path, code: int, words: str) -> None:
    """A container was made, so each may be the program's own."""
    result = ContainerIsolation(image="there", engine=str(engine)).execute(
        f"raise SystemExit({code})"
    )
    assert (result.status, result.exit_code) == (SandboxStatus.FAILED, code)
    assert words in str(result.error)


def test_without_an_engine_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    backend = ContainerIsolation()
    assert not backend.is_available()
    with pytest.raises(LaunchError, match="no container engine"):
        backend.execute("1")


@pytest.mark.parametrize("image", ["", "--privileged"])
def test_an_image_that_is_an_option_is_refused(image: str) -> None:
    with pytest.raises(PolicyError):
        ContainerIsolation(image=image)


def test_every_name_of_the_interface_is_there() -> None:
    names = (
        "Sandbox SandboxConfig SandboxResult SandboxStatus PermissionSet FilePermission NetworkPermission "
        "ProcessPermission IsolationBackend ProcessIsolation ContainerIsolation CodeExecutor ExecutionContext "
        "ExecutionResult AuditLog AuditEntry AuditLevel create_sandbox PermissionLevel IsolationConfig verify"
    )
    assert all(hasattr(cellwright, name) for name in names.split())
