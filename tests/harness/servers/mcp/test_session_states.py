"""Branches and pauses of sessions: the owner's alone, within its quotas, and nothing is left of them."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from cellwright import BusyError, PauseSettings, SessionLost
from cellwright.errors import PauseError
from cellwright.harness.servers.mcp.approvals import Owner
from cellwright.harness.servers.services import OwnedSessions
from cellwright.runner.sessions.branches import BranchingProcess, CannotBranch
from tests.harness.servers.mcp.servers import Inside, at, call, drive, failing, inside, piped

pytestmark = pytest.mark.needs("userns")

ANN, BOB = Owner("ann", "ann/1"), Owner("bob", "bob/1")
THREAD = (
    "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paused")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Inside]:
    with inside(of_one=4, of_all=8, pauses=PauseSettings(directory)) as made:
        yield made


def states(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def counted(sessions: OwnedSessions, *tables: str) -> dict[tuple[int, object], int]:
    """Return what the quotas of open and of paused sessions count."""
    quotas = [getattr(sessions, name)._quota for name in tables or ("_open", "_paused")]
    return {key: count for each in quotas for key, count in each._held.items()}


async def opened(client: Client, code: str) -> str:
    return str((await call(client, "run_code", code=code, session="new"))["session"])


async def value(client: Client, id: str, code: str) -> Any:
    return (await call(client, "run_code", code=code, session=id))["value"]


def test_branches_go_on_from_the_state_of_a_session(server: Inside, era: str) -> None:
    async def body(client: Client) -> None:
        id = await opened(client, "steps = iter(range(10)); first = next(steps)")
        made = (await call(client, "sessions", branch=id, branches=2))["branches"]
        assert len({id, *made}) == 3
        assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)  # it is a credential
        assert await value(client, made[0], "next(steps), next(steps)") == [1, 2]
        assert [await value(client, each, "next(steps)") for each in (id, *made)] == [1, 3, 1]
        for each in (id, *made):
            await call(client, "sessions", close=each)

    drive(at(server.server, era), body)


def test_no_call_is_repeated_for_a_branch(server: Inside, era: str) -> None:
    async def body(client: Client) -> None:
        id = await opened(client, f"{THREAD}; x = 7")
        assert "by memory: it runs threads" in await failing(client, "sessions", branch=id)
        listed = (await call(client, "sessions"))["sessions"]
        assert [each["id"] for each in listed] == [id]
        assert await value(client, id, "x") == 7
        await call(client, "sessions", close=id)

    drive(at(server.server, era), body)


def test_a_paused_session_comes_back_with_its_next_use(
    server: Inside, directory: Path, era: str
) -> None:
    async def body(client: Client) -> None:
        id = await opened(client, "x = 41; open('kept', 'w').write('file')")
        told = await call(client, "sessions", pause=id)
        assert told["sessions"] == [{"id": id, "language": "python", "state": "paused"}]
        (state,) = states(directory)
        assert state.stem.split(".")[0] not in str(told)  # the token stays in the server
        assert await value(client, id, "x + 1") == 42
        assert states(directory) == []
        await call(client, "sessions", pause=id)
        assert (await call(client, "list_files", session=id))["files"] == {"kept": 4}
        await call(client, "sessions", pause=id)
        await call(client, "sessions", close=id)
        assert states(directory) == []
        assert "not found" in await failing(client, "run_code", code="x", session=id)

    drive(at(server.server, era), body)


def test_what_cannot_be_paused_is_named_and_stays_open(
    server: Inside, directory: Path, era: str
) -> None:
    async def body(client: Client) -> None:
        id = await opened(client, f"{THREAD}; x = 7")
        assert "threads" in await failing(client, "sessions", pause=id)
        assert "one of close" in await failing(client, "sessions", pause=id, close=id)
        assert "branches" in await failing(client, "sessions", branch=id, branches=9)
        assert await value(client, id, "x") == 7
        assert states(directory) == []
        await call(client, "sessions", close=id)

    drive(at(server.server, era), body)


def test_branches_count_as_sessions_and_all_or_none_are_made(server: Inside) -> None:
    sandbox, sessions = server.services.of("ann").sandbox, server.sessions
    first = sessions.open(ANN, sandbox, "python")
    with pytest.raises(BusyError, match="open sessions: at most 4"):
        sessions.branch(ANN, first.id, 4)
    assert [each.id for each in sessions.of(ANN)] == [first.id]
    made = sessions.branch(ANN, first.id, 3)
    assert len(sessions.of(ANN)) == 4
    with pytest.raises(BusyError):
        sessions.open(ANN, sandbox, "python")
    sessions.pause(ANN, made[0].id, sandbox)
    other = sessions.open(ANN, sandbox, "python")  # the paused one is not open
    with pytest.raises(BusyError, match="open sessions"):
        sessions.get(ANN, made[0].id)
    sessions.close(ANN, other.id)
    assert not sessions.get(ANN, made[0].id).lost
    sessions.close_all(ANN.id)
    assert counted(sessions) == {}


def test_paused_sessions_are_limited_and_end_with_their_conversation(
    server: Inside, directory: Path
) -> None:
    sandbox, sessions = server.services.of("ann").sandbox, server.sessions
    kept = [sessions.open(ANN, sandbox, "python") for _ in range(3)]
    for each in kept:
        sessions.pause(ANN, each.id, sandbox)
    kept += [sessions.open(ANN, sandbox, "python") for _ in range(4)]
    for each in kept[3:6]:
        sessions.pause(ANN, each.id, sandbox)
    with pytest.raises(BusyError, match="paused sessions: at most 6 for each client"):
        sessions.pause(ANN, kept[6].id, sandbox)
    assert not kept[6].lost
    assert [each.is_paused for each in sessions.listed(ANN)] == [False] + [True] * 6
    assert len(states(directory)) == 6
    sessions.close_all(ANN.id)
    assert states(directory) == []
    assert sessions.listed(ANN) == []
    assert counted(sessions) == {}


def test_to_another_owner_neither_exists(server: Inside, directory: Path) -> None:
    sandbox, sessions = server.services.of("ann").sandbox, server.sessions
    others = server.services.of("bob").sandbox
    session = sessions.open(ANN, sandbox, "python")
    session.execute("secret = 1")
    sessions.pause(ANN, session.id, sandbox)
    words = set()
    for id in (session.id, "f" * 32):
        for do in (
            lambda id: sessions.get(BOB, id), lambda id: sessions.close(BOB, id),
            lambda id: sessions.branch(BOB, id, 1), lambda id: sessions.pause(BOB, id, others),
        ):  # fmt: skip
            with pytest.raises(SessionLost) as refused:
                do(id)
            words.add(str(refused.value).replace(id, "ID"))
    assert len(words) == 1
    assert len(states(directory)) == 1
    assert sessions.listed(BOB) == []
    assert sessions.get(ANN, session.id).execute("secret").value == 1
    sessions.close(ANN, session.id)


def test_one_of_many_uses_at_once_resumes_it(server: Inside) -> None:
    sandbox, sessions = server.services.of("ann").sandbox, server.sessions
    session = sessions.open(ANN, sandbox, "python")
    session.execute("x = 1")
    sessions.pause(ANN, session.id, sandbox)
    seen: list[object] = []
    threads = [
        threading.Thread(target=lambda: seen.append(sessions.get(ANN, session.id)))
        for _ in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(seen) == 8
    assert len(set(seen)) == 1
    assert sessions.get(ANN, session.id).execute("x").value == 1
    sessions.close_all(ANN.id)
    assert counted(sessions) == {}


def test_a_session_that_cannot_be_resumed_now_stays_paused(
    server: Inside, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox, sessions = server.services.of("ann").sandbox, server.sessions
    session = sessions.open(ANN, sandbox, "python")
    session.execute("x = 1")
    sessions.pause(ANN, session.id, sandbox)

    def fail(*given: object) -> None:
        raise CannotBranch("the process that copies ended")

    with monkeypatch.context() as failing:
        failing.setattr(BranchingProcess, "restore", fail)
        with pytest.raises(PauseError, match="ended"):
            sessions.get(ANN, session.id)
    assert counted(sessions, "_open") == {}
    assert sessions.get(ANN, session.id).execute("x").value == 1
    sessions.close(ANN, session.id)
    assert states(directory) == []


def test_nothing_is_left_when_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    async def body(client: Client) -> None:
        id = await opened(client, "x = 1")
        await call(client, "sessions", pause=id)
        assert len(list(tmp_path.rglob("*.session"))) == 1

    drive(piped(), body)
    assert list(tmp_path.rglob("*.session")) == []
