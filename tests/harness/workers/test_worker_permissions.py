"""Rules, approvals, tokens and skills of a sandbox with workers: this process decides for all of them."""

import os
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from cellwright import Broker, Sandbox
from cellwright.harness.sandbox.workers import worker_frames
from cellwright.harness.servers.worker.worker_service import CellsOfWorker
from cellwright.policies.tool_rules import ToolRule, Tools
from tests.conftest import policy_named
from tests.harness.workers.test_workers import pids_of
from tests.network import NAME, Server, policy, resolving, serving, tcp

SECRET = "s3cret-value-0123456789abcdefghij"
CONNECT = """
import socket
def reach():
    try:
        with socket.create_connection((name, port), 10) as sock:
            sock.sendall(b"x")
            return sock.recv(1).decode()
    except OSError as error:
        return type(error).__name__
reach()
"""


def _echo(sock: socket.socket) -> None:
    while data := sock.recv(65536):
        sock.sendall(data)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(_echo) as server:
        yield server


def test_the_rules_of_the_network_hold_in_every_worker(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})
    with Sandbox(policy=policy(tcp(server.port)), pool=0, workers=2) as sandbox:
        given = {"name": NAME, "port": server.port}
        first, second = sandbox.session(), sandbox.session()
        assert [each.execute(CONNECT, inputs=given).value for each in (first, second)] == ["x"] * 2
        sandbox.network.deny(NAME)
        assert [each.execute("reach()").value for each in (first, second)] == ["gaierror"] * 2
        sandbox.network.allow(tcp(server.port))
        assert [each.execute("reach()").value for each in (first, second)] == ["x"] * 2
        result = sandbox.execute(CONNECT, inputs=given)
        assert [each.name for each in result.connections] == [NAME]


def test_a_person_approves_calls_in_the_process_of_the_sandbox() -> None:
    asked: list[str] = []

    def pay(amount: int) -> int:
        "Pay an amount."
        return amount

    def approve(request: object) -> bool:
        asked.append(f"{request.arguments['amount']} in {os.getpid()}")  # type: ignore[attr-defined]
        return request.arguments["amount"] < 10  # type: ignore[attr-defined,no-any-return]

    rules = Tools(rules=(ToolRule("*", "approve", reason="it costs money"),))
    broker = Broker([pay], rules=rules, approve=approve)
    program = (
        "from tools import pay, ToolError\ndef tried(n):\n"
        "    try: return pay(amount=n)\n    except ToolError as error: return error.kind\n"
        "[tried(n) for n in (5, 50)]"
    )
    with Sandbox(
        policy=policy_named("standard"), pool=1, tools=broker, workers=2
    ) as sandbox, ThreadPoolExecutor(2) as threads:  # fmt: skip
        values = [each.value for each in threads.map(sandbox.execute, [program] * 2)]
    assert values == [[5, "not_approved"]] * 2
    assert sorted(asked) == sorted([f"5 in {os.getpid()}", f"50 in {os.getpid()}"] * 2)


def test_no_worker_has_the_variables_of_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    from cellwright.policies.network.rule import NetworkRule

    monkeypatch.setenv("TOKEN_OF_TEST", SECRET)
    monkeypatch.setenv("OTHER_OF_TEST", "seen")
    rule = NetworkRule(host="api.example.org")
    with Sandbox(
        policy=policy(rule), pool=0, credentials=["TOKEN=TOKEN_OF_TEST@api.example.org"], workers=2
    ) as sandbox:  # fmt: skip
        for pid in pids_of(sandbox):
            with open(f"/proc/{pid}/environ", "rb") as file:
                given = file.read()
            assert b"OTHER_OF_TEST=seen" in given
            assert b"s3cret" not in given
        token = sandbox.execute("import os; os.environ['TOKEN']").value
        assert isinstance(token, str)
        assert len(token) == len(SECRET)
        assert "s3cret" not in token


def test_tools_may_change_while_a_worker_asks_for_the_files_of_another_language() -> None:
    changed = threading.Event()

    class Asked:
        def ask(self, upcall: worker_frames.GetFiles, kind: object) -> object:
            if upcall.language == "bash":  # the sandbox waits until each worker has the change
                change = worker_frames.ReplaceFiles("python", "/tools", {"new.py": b""})
                thread = threading.Thread(
                    target=lambda: (cells.replace_files(change), changed.set()), daemon=True
                )
                thread.start()
                assert changed.wait(30)
            return worker_frames.SharedFilesGiven({"/tools": {"old.py": b""}})

    cells = CellsOfWorker.__new__(CellsOfWorker)
    cells._of_sandbox = SimpleNamespace(shares_files=True)  # type: ignore[assignment]
    cells._upcalls, cells._files = Asked(), {}  # type: ignore[assignment]
    cells._files_locks = defaultdict(threading.Lock)
    python, bash = cells._shared_files("python"), cells._shared_files("bash")
    assert python["/tools"].follow(lambda _: None) == {"new.py": b""}
    assert bash["/tools"].follow(lambda _: None) == {"old.py": b""}
