"""Tools that the policy of `cellwright mcp` asks for."""

from pathlib import Path

import pytest
from mcp import Client

from tests.harness.servers.mcp.servers import call, drive, piped

pytestmark = pytest.mark.needs("userns")
_POLICY = """
extends = "standard"
optional_layers = ["cgroup"]

[[http.allow]]
host = "api.example.org"
methods = ["GET"]
paths = ["/v1/*"]
"""


def test_programs_of_clients_have_the_http_tool_by_the_policy_alone(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(_POLICY)

    async def body(client: Client) -> None:
        code = (
            "from tools import http, ToolError\n"
            "try: found = http.request(url='https://api.example.org/v2')\n"
            "except ToolError as error: found = str(error)\nfound"
        )
        told = await call(client, "run_code", code=code)
        assert told["value"] == "api.example.org: no rule allows GET of this path", told

    drive(piped("--policy", str(policy)), body)
