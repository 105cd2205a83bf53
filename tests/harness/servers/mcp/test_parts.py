"""Quotas, threads, owners and sessions of the MCP server, without a client."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import anyio
import pytest
from mcp import MCPError

from cellwright import Sandbox, Session
from cellwright.harness.servers.client_quota import CLIENT, GONE, ClientQuota
from cellwright.harness.servers.http_access import body_length
from cellwright.harness.servers.mcp import call_runner as work
from cellwright.harness.servers.mcp.approvals import PIPE, Owner, owner_of
from cellwright.harness.servers.mcp.call_runner import RequestControl, RequestThreads
from cellwright.harness.servers.mcp.mcp_lifecycle import LINE_BYTES
from cellwright.harness.servers.mcp.mcp_server import BUSY, McpServer
from cellwright.harness.servers.services import OwnedSessions, SessionLimits
from cellwright.policies.errors import BusyError, SessionLost
from tests.conftest import ROOT, policy_named, soon
from tests.harness.servers.mcp.servers import Inside

ANN, BOB, CAT = (Owner(name, name) for name in ("ann", "bob", "cat"))


@pytest.mark.needs("userns")
def test_requests_beyond_a_limit_are_refused_with_the_busy_code(server: Inside) -> None:
    """The conversations of one client share its limit."""
    handler = McpServer(server.services, server.sessions, server.runs, open_world=False)
    handler._requests = ClientQuota("requests at work", per_client=2, total=3)
    first, second, third = (Owner("ann", f"ann/{number}") for number in range(3))
    with handler._counted(first), handler._counted(second):
        with pytest.raises(MCPError, match="2 for each client") as refused, handler._counted(third):
            pass
        assert refused.value.error.code == BUSY
        with (
            handler._counted(BOB),
            pytest.raises(MCPError, match="3 for all"),
            handler._counted(CAT),
        ):
            pass
        with handler._counted(CAT):
            pass
    with handler._counted(ANN), handler._counted(ANN):
        pass


class Silent:
    """A client that takes none of its progress."""

    async def report_progress(self, *_: object) -> None:
        await anyio.sleep_forever()


def asking(client: str) -> Any:
    scope = {CLIENT: client, GONE: anyio.Event()}
    return SimpleNamespace(
        request=SimpleNamespace(scope=scope, headers={}), protocol_version="2026-07-28",
        meta={"progress_token": 1}, session=Silent(),
    )  # fmt: skip


def test_a_client_that_does_not_read_progress_does_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(work, "_TAKING_SECONDS", 0.01)

    def tell(control: RequestControl) -> str:
        assert control.on_output
        control.on_output("stdout", b"words")
        return "done"

    async def call() -> str:
        with anyio.fail_after(30):
            return await RequestThreads().do(asking("ann"), tell)

    assert anyio.run(call) == "done"


def test_one_client_never_has_all_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_AT_ONCE", 2)
    monkeypatch.setattr(work, "_AT_ONCE_OF_ONE", 1)
    bob_was_here = threading.Event()
    heard: list[bool] = []

    def wait(_: RequestControl) -> None:
        heard.append(bob_was_here.wait(10))

    async def call() -> None:
        threads = RequestThreads()
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(threads.do, asking("ann"), wait)
                await anyio.wait_all_tasks_blocked()
                await threads.do(asking("bob"), lambda _: bob_was_here.set())

    anyio.run(call)
    assert heard == [True, True]


@pytest.mark.parametrize(
    ("headers", "length"),
    [
        ({}, 0),
        ({"content-length": "7"}, 7),
        ({"content-length": "9" * 30}, LINE_BYTES),
        ({"content-length": "-1", "transfer-encoding": "chunked"}, LINE_BYTES),
        ({"transfer-encoding": "chunked"}, LINE_BYTES),
        ({"content-length": "0", "transfer-encoding": "chunked"}, LINE_BYTES),
    ],
)
def test_a_body_counts_for_what_it_may_be(headers: dict[str, str], length: int) -> None:
    found = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert body_length({"headers": found}, LINE_BYTES) == length


def context(version: str, **headers: str) -> Any:
    request = SimpleNamespace(scope={CLIENT: "ann"}, headers=headers)
    return SimpleNamespace(request=request, protocol_version=version)


def test_the_owner_is_derived_from_the_connection() -> None:
    legacy, modern = "2025-11-25", "2026-07-28"
    header = {"mcp-session-id": "0123"}
    owner = owner_of(context(legacy, **header))
    assert (owner.client, owner.may_list) == ("ann", True)
    assert owner.id.startswith("ann/")
    assert "0123" not in owner.id  # it is a secret, and owners stand in trails
    assert owner.id != owner_of(context(legacy, **{"mcp-session-id": "0124"})).id
    assert owner_of(context(modern, **header)) == Owner("ann", "ann", may_list=False)
    assert owner_of(SimpleNamespace(request=None, protocol_version=modern)) == PIPE  # type: ignore[arg-type]
    with pytest.raises(KeyError):  # whom nobody let in
        owner_of(SimpleNamespace(request=SimpleNamespace(scope={}), protocol_version=legacy))  # type: ignore[arg-type]


@pytest.mark.needs("userns")
def test_sessions_are_limited_for_each_owner() -> None:
    limits = SessionLimits(of_one=2, of_all=3)
    sessions = OwnedSessions(limits)
    policy = policy_named("strict")
    with Sandbox(policy=policy, pool=0, audit=False, sessions=limits.settings) as sandbox:
        first = sessions.open(ANN, sandbox, "python")
        sessions.open(ANN, sandbox, "python")
        with pytest.raises(BusyError, match="open sessions: at most 2 for each conversation"):
            sessions.open(ANN, sandbox, "python")
        sessions.open(BOB, sandbox, "python")
        with pytest.raises(BusyError, match="at most 3 for all"):
            sessions.open(BOB, sandbox, "python")
        assert not first.lost  # no session was ended to make room
        with pytest.raises(SessionLost):
            sessions.close(BOB, first.id)
        sessions.close(ANN, first.id)
        sessions.open(BOB, sandbox, "python")
        assert [len(sessions.of(each)) for each in (ANN, BOB, CAT)] == [1, 2, 0]
        sessions.close_all(BOB.id)
        assert [len(sessions.of(each)) for each in (ANN, BOB, CAT)] == [1, 0, 0]


@pytest.mark.needs("userns")
def test_a_client_with_many_conversations_leaves_sessions_for_others() -> None:
    limits = SessionLimits(of_one=1, of_all=4)
    sessions = OwnedSessions(limits)
    policy = policy_named("strict")
    with Sandbox(policy=policy, pool=0, audit=False, sessions=limits.settings) as sandbox:
        for number in range(3):
            sessions.open(Owner("ann", f"ann/{number}"), sandbox, "sh")
        with pytest.raises(BusyError, match="at most 3 for each client"):
            sessions.open(Owner("ann", "ann/3"), sandbox, "sh")
        sessions.open(BOB, sandbox, "sh")


@pytest.mark.needs("userns")
def test_a_session_that_could_not_be_opened_counts_no_more() -> None:
    limits = SessionLimits(of_one=1)
    sessions = OwnedSessions(limits)
    policy = policy_named("strict")
    with Sandbox(policy=policy, pool=0, audit=False, sessions=limits.settings) as sandbox:
        with pytest.raises(ValueError, match="cobol"):
            sessions.open(ANN, sandbox, "cobol")
        sessions.open(ANN, sandbox, "python")


class EndingTheLast(NamedTuple):
    """A sandbox in which a named session ends, as by another request, just before it is asked for."""

    sandbox: Sandbox
    sessions: OwnedSessions

    def session(self, name: str, language: str, packages: Sequence[str] = ()) -> Session:
        for each in self.sessions.of(ANN):
            each.close()
        self.sessions.of(ANN)  # forgets it
        return self.sandbox.session(name, language, packages=packages)


@pytest.mark.needs("userns")
def test_named_sessions_that_end_meanwhile_still_count() -> None:
    limits = SessionLimits(of_one=2, of_all=4)
    sessions = OwnedSessions(limits)
    policy = policy_named("strict")
    with Sandbox(policy=policy, pool=0, audit=False, sessions=limits.settings) as sandbox:
        ending: Any = EndingTheLast(sandbox, sessions)
        sessions.named(ANN, "a", sandbox, "sh")
        for _ in range(3):
            sessions.named(ANN, "a", ending, "sh")
        sessions.named(ANN, "b", sandbox, "sh")
        with pytest.raises(BusyError, match="open sessions: at most 2"):
            sessions.named(ANN, "c", sandbox, "sh")
        assert len(sessions.of(ANN)) == 2


@pytest.mark.needs("userns")
def test_an_unused_session_is_ended() -> None:
    limits = SessionLimits(idle_seconds=0.05)
    sessions = OwnedSessions(limits)
    policy = policy_named("strict")
    with Sandbox(policy=policy, pool=0, audit=False, sessions=limits.settings) as sandbox:
        session = sessions.open(ANN, sandbox, "python")
        assert soon(lambda: sessions.of(ANN) == [])
        assert "idle" in session.lost


def test_without_the_sdk_the_command_says_how_to_have_it() -> None:
    code = (
        "import sys; sys.modules['mcp'] = None\n"
        "from cellwright.harness.cli.main import main\nsys.exit(main(['mcp']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "'.[mcp]'" in done.stderr
