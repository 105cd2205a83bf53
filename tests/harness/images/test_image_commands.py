"""The commands with --image, and daemons with images, asked by programs of busybox inside."""

import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from e2b_code_interpreter import Sandbox as E2b
from mcp import Client

from cellwright.errors import PolicyError
from cellwright.harness.servers.daemon.configuration import read_configuration
from tests.conftest import ROOT, soon
from tests.harness.cli.test_shell import person
from tests.harness.images.test_image_cells import files
from tests.harness.servers.daemon.configured import configured
from tests.harness.servers.e2b.e2b_server import serving
from tests.harness.servers.mcp.servers import BOUND_SECONDS, call, drive, environment, piped
from tests.harness.servers.web.test_command import started

__all__ = ["files"]  # a fixture
pytestmark = [
    pytest.mark.needs("busybox", "root", "cgroup", "image"),
    # E2B's SDK opens a client for each call, and leaves it for the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]  # fmt: skip
READ = "open('/usr/share/notes').read()"  # a file of the image
NOTES = "of the image\n"


@pytest.fixture(autouse=True)
def _own_store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands have a store of their own."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)


def cellwright(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "cellwright", *words], cwd=ROOT, env=environment(),
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=BOUND_SECONDS,
    )  # fmt: skip


def test_run_and_batch_execute_programs_in_the_image(files: Path, tmp_path: Path) -> None:
    done = cellwright("run", "--image", str(files), "-c", f"import os; print(os.getuid(), {READ})")
    assert done.stdout == f"0 {NOTES}\n", done.stderr
    done = cellwright(
        "run", "--image", str(files), "--language", "sh", "-c", "chown 8 /bin && id -u"
    )
    assert done.stdout == "0\n", done.stderr
    (tmp_path / "rows").write_text(f'{{"code": "print({READ})"}}\n')
    output = tmp_path / "results"
    cellwright("batch", str(tmp_path / "rows"), "--image", str(files), "--output", str(output))
    assert "of the image" in output.read_text()


def test_a_shell_is_one_of_the_images_root_or_of_its_user(files: Path) -> None:
    with person("--image", str(files)) as typing:
        typing.type(b"id -u; touch /etc/mine; ls /etc/mine; cat /usr/share/notes\n")
        typing.until(b"0\r\n/etc/mine\r\nof the image\r\n")
        typing.type(b"exit 4\n")
        assert typing.end() == 4
    with person("--image", str(files), "--user", "joe", "--", "sh", "-c", "id -u; pwd") as typing:
        typing.until(b"1000\r\n/\r\n")
        assert typing.end() == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--image", "absent:1"], "cellwright image pull absent:1"),
        (["--image", "a", "--backend", "oci"], "--image: cannot be combined with --backend oci"),
        (["--image", "a", "--connect", "/s"], "--image cannot be combined with --connect"),
        (["--image", "FILES", "--policy", "strict"], "needs processes.subprocesses"),
    ],
)
def test_what_an_image_excludes_is_named(options: list[str], complaint: str, files: Path) -> None:
    given = [str(files) if each == "FILES" else each for each in options]
    done = cellwright("run", *given, "-c", "1")
    assert done.returncode == 2
    assert complaint in done.stderr


def test_clients_of_web_and_mcp_have_the_image(files: Path) -> None:
    with started("--image", str(files)) as server:
        answer = httpx2.post(
            f"{server.url}/v1/executions", json={"code": READ}, timeout=BOUND_SECONDS,
            headers={"Authorization": f"Bearer {server.token}"},
        ).json()  # fmt: skip
    assert (answer["value"], "image_root" in answer["layers"]) == (NOTES, True)

    async def body(client: Client) -> None:
        source = "def seven() -> int:\n    return 7"
        await call(client, "create_tool", name="seven", description="d", source_code=source)
        told = await call(client, "run_code", code=f"import tools\n[{READ}, tools.seven()]")
        assert told["value"] == [NOTES, 7]

    drive(piped("--image", str(files)), body)


def test_sandboxes_of_e2b_are_cells_of_the_image(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving("--image", str(files)) as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        with E2b.create() as made:
            assert made.run_code(READ).text == NOTES.replace("\n", "\\n")
            assert made.files.read("/usr/share/notes") == NOTES


def test_a_daemon_has_an_image_for_each_policy_that_names_one(files: Path, tmp_path: Path) -> None:
    text = 'policies = ["workshop", "strict"]\n'
    with configured(tmp_path, f'{text}[images]\nworkshop = "{files}"\n') as daemon:
        with daemon.sandbox(policy="workshop") as sandbox:
            assert sandbox.execute(READ).value == NOTES
            assert sandbox.run(["id", "-u"]).stdout == "0\n"
            with sandbox.session() as session:
                session.execute("open('/etc/kept', 'w').close()")
                assert session.run("ls /etc/kept", shell=True).stdout == "/etc/kept\n"
        with daemon.sandbox(policy="strict") as sandbox:
            assert sandbox.execute(READ).value is None
        daemon.reload(text)  # without the image
        assert soon(lambda: "configuration reloaded" in daemon.log.read_text())
        with daemon.sandbox(policy="workshop") as sandbox:
            assert sandbox.execute(READ).value is None


def test_a_configuration_names_images_by_policies(tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text(
        'policies = ["workshop", "standard"]\n[images]\nworkshop = "debian:12"\nstandard = "./a"\n'
    )
    found = read_configuration(file).images
    assert found == {"workshop": "debian:12", "standard": str(tmp_path / "a")}
    for text, complaint in (
        ('[images]\nworkshop = "a"\n', "images: 'workshop' is not of strict"),
        ('backend = "oci"\n[images]\nstrict = "a"\n', "images: cannot be combined"),
    ):
        file.write_text(text)
        with pytest.raises(PolicyError, match=complaint):
            read_configuration(file)
