"""The section `http` of a policy: programs get the tool `http.request` without any Python on the host."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cellwright import Broker, PolicyError, Sandbox, exceeds, narrow, tool
from cellwright.policies.policy import Policy, check_policy
from cellwright.policies.profiles.loading import load_policy
from tests.network import NAME, answer_http, serving

_PLACE = """
[http]
addresses = ["127.0.0.0/8"]

[[http.allow]]
host = "api.example.org"
ports = [{port}]
schemes = ["http"]
methods = ["GET"]
paths = ["/v1/*"]
"""
_ASK = """
from tools import http, ToolError
def ask(path, method="GET"):
    try:
        return http.request(url=f"http://api.example.org:{port}{path}", method=method)["body"]
    except ToolError as error:
        return str(error)
[ask("/v1/a"), ask("/v2/a"), ask("/v1/a", "POST")]
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[int], str]:
    def made(port: int) -> str:
        file = tmp_path / "policy.toml"
        file.write_text(_PLACE.format(port=port) + 'optional_layers = ["cgroup", "landlock"]\n')
        text = file.read_text().split("optional_layers")
        file.write_text(f"optional_layers{text[1]}{text[0]}")
        return str(file)

    return made


@tool
def double(n: int) -> int:
    return 2 * n


@pytest.mark.parametrize("offered", [None, [double]])
def test_programs_have_the_tool_if_the_policy_has_rules_for_it(
    offered: Any, write: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def resolve(host: str, *rest: Any, **more: Any) -> Any:
        return real("127.0.0.1" if host == NAME else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with (
        serving(answer_http) as server,
        Sandbox(policy=write(server.port), tools=offered, pool=0) as box,
    ):
        result = box.execute(_ASK, inputs={"port": server.port})
        assert result.value == [
            "/v1/a",
            f"{NAME}: no rule allows GET of this path",
            f"{NAME}: no rule allows POST of this path",
        ], result
        if offered:
            assert box.execute("from tools import double\ndouble(n=2)").value == 4


def test_the_command_needs_nothing_but_the_policy(write: Callable[[int], str]) -> None:
    """The rules decide before anything is resolved."""
    done = subprocess.run(
        [sys.executable, "-m", "cellwright", "run", "--policy", write(80), "-c",
         "from tools import http\nhttp.request(url='http://api.example.org/v2')"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "api.example.org: no rule allows GET of this path" in done.stderr


def test_a_broker_has_its_own_tools(write: Callable[[int], str]) -> None:
    with Sandbox(policy=write(80), tools=Broker([double]), pool=0) as box:
        assert "http" in (box.execute("from tools import http").error or "")


def test_methods_and_paths_over_https_are_fine_and_the_section_can_be_narrowed() -> None:
    def made(**rule: Any) -> Policy:
        http = {"allow": [{"host": NAME, **rule}]}
        return check_policy(_converted({"http": http}))

    wide, narrower = made(), made(methods=["GET"], paths=["/v1/*"])
    assert exceeds(narrower, wide) == ()
    assert exceeds(wide, narrower) == (
        f"http.allow: {NAME}:443 by https, with more schemes, server names (SNI), methods or paths",
    )
    assert narrow(wide, narrower).http.allow[0].methods == ("GET",)
    assert narrow(wide, Policy()).http.allow == ()
    with pytest.raises(PolicyError, match=r"^http\.allow: .*is an address"):
        made(host="10.0.0.1")
    assert load_policy("strict").http.allow == ()


def _converted(data: dict[str, Any]) -> Policy:
    import msgspec

    return msgspec.convert(data, Policy)
