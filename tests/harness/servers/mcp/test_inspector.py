"""The protocol's own inspector, a client written in TypeScript."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import INSPECTOR, ROOT, newer_node
from tests.harness.servers.mcp.servers import (
    BOUND_SECONDS,
    COMMAND,
    OPTIONS,
    environment,
    over_http,
    tools_file,
)  # fmt: skip
from tests.harness.servers.mcp.test_definitions import NAMES

pytestmark = [pytest.mark.needs("inspector", "userns"), pytest.mark.slow]
TOKEN = "a-token-of-the-inspectors"
_PATIENCE = str(BOUND_SECONDS * 1000)  # milliseconds; it has 15 s else, which a busy host may need


def inspect(home: Path, *words: str) -> Any:
    """Return what the inspector found, as JSON."""
    node = newer_node()
    path = f"{os.path.dirname(node)}:{os.environ['PATH']}"
    env = environment() | {"PATH": path, "HOME": str(home)}
    done = subprocess.run(
        [node, str(INSPECTOR), "--cli", "--connect-timeout", _PATIENCE, *words], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=BOUND_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_it_finds_the_tools_and_calls_them_over_a_pipe(tmp_path: Path) -> None:
    server = [*COMMAND, *OPTIONS]
    assert [
        tool["name"] for tool in inspect(tmp_path, *server, "--method", "tools/list")["tools"]
    ] == NAMES
    call = ("--method", "tools/call", "--tool-name", "run_code", "--tool-arg", "code=6 * 7")
    assert inspect(tmp_path, *server, *call)["structuredContent"]["value"] == 42


def test_it_finds_the_tools_and_calls_them_over_http(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN)
    tokens.chmod(0o600)
    with over_http("--token-file", str(tokens), "--tools", str(tools_file(tmp_path))) as http:
        server = (http.url, "--transport", "http", "--header", f"Authorization: Bearer {TOKEN}")
        assert [
            tool["name"] for tool in inspect(tmp_path, *server, "--method", "tools/list")["tools"]
        ] == NAMES
        code = "code=import tools\ntools.add(40, 2)"
        call = ("--method", "tools/call", "--tool-name", "run_code", "--tool-arg", code)
        assert inspect(tmp_path, *server, *call)["structuredContent"]["value"] == 42
