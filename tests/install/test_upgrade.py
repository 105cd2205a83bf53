"""State that cellwright 0.2.0 left is read by this version, and what an uninstall leaves is where INSTALL.md
says.  `state-0.2.0/` was written by that version: databases as SQL, a trail, and a workspace."""

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cellwright import AuditLog, Sandbox, ToolRegistry, tool
from cellwright.agent import Agent, Message, ModelReply
from cellwright.harness.agent.agent_memory import AgentMemory
from cellwright.runner.audit.verification import summary_of_file, verify
from tests.conftest import OPTIONAL, ROOT, policy_named

OLD = Path(__file__).with_name("state-0.2.0")
# The answer of a daemon of 0.2.0 to the greeting of a later version.
FAILURE = (
    b"\x00\x98\xa7Failure\xabPolicyError\xd97the daemon has version 6 of the protocol, the client 10"
    b"\xd94install the same version of cellwright on both sides\x90\xc2\xa0\x90"
)
SCRIPT = (
    "```python\nimport tools\norder = tools.find_order(number=17)\norder\n```",
    "```python\nsaid = tools.refund(number=17, amount=order['paid'])\nfinal_answer(said)\n```",
)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The files of 0.2.0, as they were on disk."""
    for file in OLD.glob("*.sql"):
        with sqlite3.connect(tmp_path / f"{file.stem}.db") as database:
            database.executescript(file.read_text())
            if file.stem == "calls":  # approvals expire a day after they were asked for
                database.execute("UPDATE approvals SET expires = strftime('%s', 'now') + 86400")
        database.close()
    for name in ("trail.jsonl", "notes.tar"):
        shutil.copy(OLD / name, tmp_path)
    return tmp_path


def test_a_trail_is_verified_and_continued(state: Path) -> None:
    path = state / "trail.jsonl"
    before = verify(path)
    assert (before.ok, before.records) == (True, 4)
    with AuditLog(path=path) as log:
        log.record("test", "continued")
    after = verify(path, expect=before.head)
    assert (after.ok, after.records) == (True, 5)
    assert summary_of_file(path)["by_category"]["violation"] == 1


@pytest.mark.needs("userns")
def test_a_workspace_is_restored(state: Path) -> None:
    with Sandbox(policy=policy_named("strict"), workspaces=state, pool=0) as box:
        assert box.execute("open('plan.txt').read()", workspace="notes").value == "buy milk"


def test_a_registry_has_its_tools(state: Path) -> None:
    with ToolRegistry(state / "registry.db", must_exist=True) as registry:
        (spec,) = registry.list_tools()
    assert (spec.name, spec.version, spec.description) == ("double", 1, "Double a number.")


def test_the_memory_of_an_agent_is_converted(state: Path) -> None:
    memory = AgentMemory(state / "memory.db")
    try:
        assert [each.text for each in memory.facts()] == ["orders are numbered from 17"]
        assert [each.status for each in memory.episodes()] == ["completed"]
    finally:
        memory.close()


@tool
def find_order(number: int) -> dict[str, int]:
    """Find an order."""
    return {"number": number, "paid": 25}


@tool(risky=True)
def refund(number: int, amount: int) -> str:
    """Pay the money of an order back."""
    return f"paid {amount} for order {number}"


class Scripted:
    """A model that says one line of the script after the other."""

    name, context_tokens = "scripted", 16_384

    def ask(self, messages: Sequence[Message], *_: Any, **__: Any) -> ModelReply:
        return ModelReply(text=SCRIPT[sum(each.role == "assistant" for each in messages)])


@pytest.mark.needs("userns")
def test_a_task_that_waits_for_approval_is_asked_again_and_completed(state: Path) -> None:
    """The identity of a tool has changed since, so the old approval holds for no call of today."""
    with Agent(Scripted(), tools=[find_order, refund], directory=state) as agent:
        answers = []
        for _ in range(2):
            (waiting,) = agent.pending()
            assert (waiting.tool, waiting.arguments) == ("refund", {"number": 17, "amount": 25})
            agent.calls.approve(waiting.approval)
            result = agent.resume(waiting.run.rpartition("-")[0])
            answers.append((result.status, result.answer))
    assert answers == [("paused", None), ("completed", "paid 25 for order 17")]


def test_a_daemon_that_runs_on_after_the_upgrade_is_named_as_what_to_restart(
    tmp_path: Path,
) -> None:
    place = os.fspath(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(place)
        listener.listen()
        client = subprocess.Popen(
            [sys.executable, "-m", "cellwright", "status", "--socket", place],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        listener.settimeout(300)
        with listener.accept()[0] as connection:
            connection.settimeout(300)
            assert connection.recv(65536)
            connection.send(FAILURE)
            said = client.communicate(timeout=300)[1]
    assert client.returncode == 70
    assert "is of another version of cellwright" in said
    assert "restart it" in said


@pytest.mark.needs("userns")
def test_what_stays_is_where_the_table_says(tmp_path: Path) -> None:
    """Everything that commands leave in a new home, without settings of XDG, is below a named folder."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "double.py").write_text(
        'def double(n: int) -> int:\n    """Double."""\n    return 2 * n\n'
    )
    optional = [f"--optional={each}" for each in OPTIONAL]
    for command in (
        ["run", *optional, "--workspace", "notes", "-c", "open('plan.txt', 'w').write('x')"],
        ["tools", "create", "double.py", *optional],
        ["ps"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "cellwright", *command], cwd=work, capture_output=True, text=True,
            timeout=300, check=False, stdin=subprocess.DEVNULL,
            env={"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    left = {path.relative_to(home) for path in home.rglob("*") if path.is_file()}
    named = (ROOT / "harness" / "INSTALL.md").read_text()
    folders = {Path(*path.parts[: path.parts.index("cellwright") + 1]) for path in left}
    assert folders >= {Path(".local/state/cellwright"), Path(".local/share/cellwright")}
    for folder in folders:
        assert f"`~/{folder}`" in named
    assert [each.name for each in work.iterdir()] == ["double.py"]
