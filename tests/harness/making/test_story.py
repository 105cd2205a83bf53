"""One agent's day: it lacks a tool, makes it, uses it, is refused two, and waits for a person."""

import subprocess
import sys
from pathlib import Path

import pytest

from cellwright import AuditLog, Runs, Sandbox, SandboxStatus, ToolFactory, ToolRegistry, tool
from cellwright.errors import ToolFailed, ToolInvalid
from tests.conftest import policy_named

VALIDATE = '''
import re

def validate_email(address: str) -> bool:
    """Tell whether an e-mail address is well-formed.

    Args:
        address: what somebody typed
    """
    return bool(re.fullmatch(r"[^@\\s]+@[^@\\s]+\\.[a-z]{2,}", address))
'''
OPENS_A_SOCKET = "import socket\ndef fetch(url: str) -> str:\n    return str(socket.socket())"
HIDES_IT = (  # the class of another module makes the socket
    "from logging.handlers import DatagramHandler\n"
    "def fetch(url: str) -> str:\n    return str(DatagramHandler('127.0.0.1', 80).makeSocket())"
)
APPROVE = """
import sys
from cellwright import Runs
with Runs(sys.argv[1]) as runs:
    print(*(f"{each.tool} {each.arguments['to']} {runs.approve(each.approval)}" for each in runs.pending()))
"""
LETTERS = """
import tools
addresses = ["ann@example.org", "nobody", "bob@example.org"]
good = [each for each in addresses if tools.validate_email(each)]
[tools.send_letter(to=each) for each in good]
"""
SENT: list[str] = []


@tool(risky=True)
def send_letter(to: str) -> str:
    """Send a letter."""
    SENT.append(to)
    return f"sent to {to}"


def test_an_agent_makes_a_tool_and_lives_with_what_it_may_not(tmp_path: Path) -> None:
    SENT.clear()
    trail, runs = AuditLog(), Runs(str(tmp_path / "runs.db"))
    with (
        runs,
        Sandbox(policy=policy_named("strict"), pool=0, audit=trail) as ceiling,
        ToolRegistry(str(tmp_path / "tools.db")) as registry,
        ToolFactory(ceiling, registry, maker="agent-7", approve=runs.ask) as factory,
    ):
        registry.register(send_letter)
        assert factory.search("validate an email address")["tools"] == []

        spec = factory.create_tool(
            "validate_email", "Tell whether an e-mail address is well-formed.", VALIDATE,
            tests=[({"address": "a@b.org"}, True), "assert not validate_email('nonsense')"],
        )  # fmt: skip
        assert spec.reference == "validate_email@1"
        found = factory.search("validate an email address")["tools"]
        assert [each["name"] for each in found] == ["validate_email"]
        for number in range(100):
            assert factory.call("validate_email", {"address": f"n{number}@example.org"}) is True
        assert registry.usage("validate_email").uses == 100

        with pytest.raises(ToolInvalid, match="Blocked import: socket"):
            factory.create_tool("fetch", "Fetch a page.", OPENS_A_SOCKET)
        factory.create_tool("fetch", "Fetch a page.", HIDES_IT)  # no check sees it
        with pytest.raises(ToolFailed, match="PermissionError"):
            factory.call("fetch", {"url": "http://example.org"})
        seen = trail.get_entries(category="violation")
        assert [entry.action for entry in seen] == ["socket"]

        with Sandbox(
            policy=policy_named("strict"), pool=0, audit=trail, tools=factory.broker
        ) as box:
            attempt = runs.start(box, LETTERS)
            assert attempt.result.status is SandboxStatus.PENDING
            for address in ("ann@example.org", "bob@example.org"):
                assert approved_elsewhere(tmp_path / "runs.db") == f"send_letter {address} True\n"
                attempt = runs.resume(box, attempt.run)
            assert attempt.result.value == ["sent to ann@example.org", "sent to bob@example.org"]
    assert SENT == ["ann@example.org", "bob@example.org"]
    assert registry_usage(tmp_path / "tools.db") == 103  # each address was looked at once


def approved_elsewhere(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", APPROVE, str(path)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


def registry_usage(path: Path) -> int:
    with ToolRegistry(str(path)) as registry:
        return registry.usage("validate_email").uses
