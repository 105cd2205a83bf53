"""`cellwright web`: a server in a process of its own, from its start to its end."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx2
import psutil
import pytest

from tests.conftest import OPTIONAL, ROOT
from tests.harness.servers.mcp.servers import environment
from tests.harness.servers.web.web_servers import ANN, BOUND_SECONDS, EVE

OPTIONS = [word for layer in OPTIONAL for word in ("--optional", layer)]


class Started(NamedTuple):
    process: "subprocess.Popen[str]"
    url: str
    token: str


@contextlib.contextmanager
def started(*options: str) -> Iterator[Started]:
    """Start the command on a free port, and end it after."""
    command = [sys.executable, "-m", "cellwright", "web", "--http", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, *OPTIONS, *options], cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr
            said = process.stderr.readline()
            assert "serving at http://127.0.0.1:" in said, said + process.stderr.read()
            made = "--token-file" not in options
            token = process.stderr.readline().split()[-1] if made else ""
            yield Started(process, said.split()[-1], token)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=BOUND_SECONDS)


@pytest.mark.needs("userns")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_program_is_run_with_the_printed_token_and_nothing_is_left(workers: int) -> None:
    with started("--workers", str(workers)) as server:
        headers = {"Authorization": f"Bearer {server.token}"}
        url = f"{server.url}/v1/executions"
        body = {"code": "6 * 7"}
        assert httpx2.post(url, json=body, timeout=60).status_code == 401
        answer = httpx2.post(url, json=body, headers=headers, timeout=BOUND_SECONDS).json()
        assert answer["value"] == 42
        below = psutil.Process(server.process.pid).children(recursive=True)
        names = [each.name() for each in below if each.is_running()]
    assert server.process.returncode == 0
    assert names.count("cell-worker") == (workers if workers > 1 else 0)
    assert below
    assert not [each for each in below if each.is_running()]


@pytest.mark.needs("userns")
def test_the_roles_of_a_token_file(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"ann {ANN}\neve {EVE} operator\n")
    file.chmod(0o600)
    with started("--token-file", str(file)) as server:
        for token, is_operator in ((ANN, False), (EVE, True)):
            headers = {"Authorization": f"Bearer {token}"}
            about = httpx2.get(f"{server.url}/v1/server", headers=headers, timeout=BOUND_SECONDS)
            assert about.json()["is_operator"] is is_operator
            languages = {each["name"]: each["kind"] for each in about.json()["languages"]}
            assert languages["python"] == "sessions"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--http", "0.0.0.0:0"], "--remote"),
        (["--http", "127.0.0.1"], "HOST:PORT"),
        (["--token-file", "/nowhere/tokens"], "cannot read"),
        (["--sessions", "-1"], "--sessions"),
    ],
)
def test_options_that_cannot_hold_are_refused(options: list[str], words: str) -> None:
    command = [sys.executable, "-m", "cellwright", "web", *options]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
