"""Servers whose cells are inside containers: the same options and errors as those of `cellwright run`."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from mcp import Client

from cellwright.harness.servers.daemon.configuration import read_configuration
from cellwright.policies.errors import PolicyError
from tests.conftest import ROOT, soon
from tests.harness.containers.test_containers import bundles, programs, rootfs
from tests.harness.containers.test_own_kernel import program
from tests.harness.servers.daemon.configured import configured
from tests.harness.servers.mcp.servers import BOUND_SECONDS, call, drive, environment, piped
from tests.harness.servers.web.test_command import started

__all__ = ["programs", "rootfs"]  # fixtures
pytestmark = pytest.mark.needs("userns")
READ = "open('/etc/os-release').read()"  # a file of the rootfs


@pytest.fixture
def options(
    rootfs: Path, programs: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Options of a container by runc, whose known holes are not told."""
    quiet = {**environment(), "PYTHONWARNINGS": "ignore"}
    for module in ("mcp.servers", "web.test_command"):
        monkeypatch.setattr(f"tests.harness.servers.{module}.environment", lambda: quiet)
    return ["--backend", "oci", "--runtime", programs("runc"), "--rootfs", str(rootfs)]


@pytest.mark.needs("runc")
def test_the_daemons_calls_and_sessions_are_in_a_container(tmp_path: Path, rootfs: Path) -> None:
    before = bundles()
    text = 'backend = "oci"\nruntime = "runc"\nrootfs = "rootfs"\n'
    with configured(tmp_path, text) as daemon:
        with daemon.sandbox() as sandbox:
            assert {"container", "kernel_shared"} <= set(sandbox.layers)
            assert sandbox.execute(READ).value == "ID=tiny\n"
            with sandbox.session() as session:
                session.execute("x = 20")
                assert session.execute("x + 1").value == 21
        daemon.reload('backend = "oci"\nruntime = "runc"\n')  # without the rootfs
        assert soon(lambda: "configuration reloaded" in daemon.log.read_text())
        with daemon.sandbox() as sandbox:
            assert sandbox.execute(READ).value is None
        daemon.process.terminate()
        assert daemon.wait() == 0
    assert bundles() == before


@pytest.mark.needs("runc")
def test_programs_of_web_clients_are_in_a_container(options: list[str]) -> None:
    before = bundles()
    with started(*options) as server:
        headers = {"Authorization": f"Bearer {server.token}"}
        answer = httpx2.post(
            f"{server.url}/v1/executions", json={"code": READ}, headers=headers,
            timeout=BOUND_SECONDS,
        ).json()  # fmt: skip
    assert answer["value"] == "ID=tiny\n"
    assert {"container", "kernel_shared"} <= set(answer["layers"])
    assert bundles() == before


@pytest.mark.needs("runc")
def test_programs_and_made_tools_of_mcp_clients_are_in_a_container(options: list[str]) -> None:
    before = bundles()

    async def body(client: Client) -> None:
        source = "def seven() -> int:\n    return 7"
        await call(client, "create_tool", name="seven", description="d", source_code=source)
        told = await call(client, "run_code", code=f"import tools\n[{READ}, tools.seven()]")
        assert told["value"] == ["ID=tiny\n", 7]
        await call(client, "run_code", code="x = 20", session="new")

    drive(piped(*options), body)
    assert bundles() == before


@pytest.mark.parametrize("command", ["serve", "mcp", "web"])
def test_a_server_refuses_a_runtime_that_holds_no_sessions(command: str, tmp_path: Path) -> None:
    front = program(tmp_path / "runsc", "exit 1")
    words = [sys.executable, "-m", "cellwright", command]
    if command == "serve":
        words += ["--socket", str(tmp_path / "s")]
    for given, complaint in (
        (
            ["--backend", "oci", "--runtime", front],
            "runtime: runsc makes a container with a kernel",
        ),
        (["--rootfs", "/usr"], "--rootfs: needs --backend oci"),
        (["--runtime", "runc"], "--runtime: needs --backend oci"),
    ):
        done = subprocess.run(
            [*words, *given], cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False, timeout=BOUND_SECONDS,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert complaint in done.stderr
        assert done.stdout == ""


def test_a_configuration_names_a_backend_with_its_runtime(tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text('backend = "oci"\nruntime = "./crun"\nrootfs = "files"\n')
    read = read_configuration(file)
    assert (read.runtime, read.rootfs) == (str(tmp_path / "crun"), str(tmp_path / "files"))
    for text, complaint in (
        ('runtime = "crun"', 'runtime: needs backend = "oci"'),
        ('rootfs = "/"', 'rootfs: needs backend = "oci"'),
        ('backend = "vm"', "backend"),
    ):
        file.write_text(text)
        with pytest.raises(PolicyError, match=complaint):
            read_configuration(file)
