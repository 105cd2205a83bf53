"""The backend of Ray's own sandbox: what it promises, and what it refuses."""

import inspect
import threading
from collections.abc import Iterator

import pytest
from ray.experimental.sandbox.backend.base import BaseSandboxBackend, SandboxStatus
from ray.experimental.sandbox.config import SandboxConfig
from ray.experimental.sandbox.exceptions import (
    SandboxCreationError,
    SandboxError,
    SandboxExecError,
    SandboxNotFoundError,
    SandboxTimeoutError,
)

from cellwright.harness.fleet.ray_backend import CellSandboxBackend, CellSandboxRuntime


@pytest.fixture(scope="module")
def backend() -> CellSandboxBackend:
    return CellSandboxBackend(pool=0)


@pytest.fixture(scope="module")
def cell(backend: CellSandboxBackend) -> Iterator[str]:
    config = SandboxConfig("cellwright", env={"GREETING": "hello"}, workdir="/workspace/deep")
    name = backend.create_sandbox(config)
    yield name
    backend.delete_sandbox(name)


@pytest.mark.parametrize("name", sorted(BaseSandboxBackend.__abstractmethods__))
def test_each_method_has_the_parameters_of_the_interface(name: str) -> None:
    ours, theirs = (
        [(each.name, each.default) for each in inspect.signature(getattr(kind, name)).parameters.values()]
        for kind in (CellSandboxBackend, BaseSandboxBackend)
    )  # fmt: skip
    assert ours == theirs


def test_commands_run_as_a_line_of_a_shell_or_as_arguments(
    backend: CellSandboxBackend, cell: str
) -> None:
    line = backend.exec_command(cell, 'echo "$GREETING $OTHER"; pwd; exit 3', env={"OTHER": "you"})
    assert (line.exit_code, line.stdout) == (3, "hello you\n/workspace/deep\n")
    listed = backend.exec_command(cell, ["sh", "-c", "echo $0 >&2", "a b"], cwd="/tmp")
    assert (listed.exit_code, listed.stdout, listed.stderr) == (0, "", "a b\n")
    assert backend.exec_command(cell, "echo $0", shell="/bin/sh").stdout == "/bin/sh\n"
    assert listed.duration_seconds > 0


def test_files_are_written_appended_and_read(backend: CellSandboxBackend, cell: str) -> None:
    backend.write_file(cell, "a/b.txt", "one")
    backend.write_file(cell, "a/b.txt", b"\xff", append=True)
    assert backend.read_file(cell, "/workspace/deep/a/b.txt") == b"one\xff"
    assert backend.exec_command(cell, "wc -c < a/b.txt").stdout.strip() == "4"
    with pytest.raises(SandboxError, match="No such file"):
        backend.read_file(cell, "missing")
    with pytest.raises(SandboxError):
        backend.write_file(cell, "/etc/new", "x")


def test_a_command_does_not_see_the_host(backend: CellSandboxBackend, cell: str) -> None:
    done = backend.exec_command(cell, "cat /etc/shadow; cat /proc/net/dev | tail -n +3")
    assert "No such file" in done.stderr
    assert [line.split(":")[0].strip() for line in done.stdout.splitlines()] in ([], ["lo"])


def test_a_command_that_takes_too_long_raises_and_the_sandbox_stays(
    backend: CellSandboxBackend, cell: str
) -> None:
    with pytest.raises(SandboxTimeoutError):
        backend.exec_command(cell, "sleep 60", timeout=0.3)
    assert backend.exec_command(cell, "echo on").stdout == "on\n"


def test_limits_of_the_configuration_are_those_of_the_cell(backend: CellSandboxBackend) -> None:
    name = backend.create_sandbox(SandboxConfig("cellwright:standard", memory="64Mi", cpu=1))
    try:
        policy = backend._cells[name].cell.sandbox.policy
        assert (policy.limits.memory_bytes, policy.limits.cpus) == (64 << 20, 1.0)
        assert backend.get_status(name) is SandboxStatus.RUNNING
    finally:
        backend.delete_sandbox(name)
    assert backend.get_status(name) is SandboxStatus.TERMINATED
    with pytest.raises(SandboxNotFoundError):
        backend.exec_command(name, "true")
    backend.delete_sandbox(name)


@pytest.mark.parametrize(
    "given",
    [
        {"image": "python:3.12"},
        {"image": "cellwright:nosuch"},
        {"network": "public"},
        {"network": "host"},
        {"capabilities": ["CAP_CHOWN"]},
        {"readonly": False},
        {"memory": "1"},
        {"_oci_spec_transform_fn": lambda spec: spec},
    ],
)
def test_what_a_cell_does_not_give_is_refused(
    backend: CellSandboxBackend, given: dict[str, object]
) -> None:
    config = SandboxConfig(**{"image": "cellwright", **given})  # type: ignore[arg-type]
    with pytest.raises(SandboxCreationError):
        backend.create_sandbox(config)


def test_another_user_is_refused(backend: CellSandboxBackend, cell: str) -> None:
    with pytest.raises(SandboxExecError, match="one user"):
        backend.exec_command(cell, "id", user="0")


def test_the_runtime_of_ray_makes_cells_and_ends_them_at_their_time() -> None:
    runtime = CellSandboxRuntime(pool=0)
    name = runtime.create("cellwright", ttl_seconds=1)
    assert runtime.exec(name, "echo hi").stdout == "hi\n"
    runtime.write_file(name, "x", "y")
    assert runtime.read_file(name, "x") == b"y"
    timer = runtime._ttl_timers[name]
    assert isinstance(timer, threading.Timer)
    timer.join(20)
    assert runtime.get_status(name) is SandboxStatus.TERMINATED
    with pytest.raises(SandboxCreationError, match="cells have no images"):
        runtime.create("python:3.12")
