"""Conversations over HTTP: how many a client has, how they end, and streams that are resumed."""

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx2
import pytest

from cellwright.harness.servers.mcp.call_runner import READER, EventReader
from cellwright.harness.servers.mcp.mcp_lifecycle import MOST, Conversations
from cellwright.policies.errors import BusyError
from tests.conftest import soon
from tests.harness.servers.mcp.servers import BOUND_SECONDS, Http, over_http
from tests.harness.servers.mcp.test_stdio import ENDLESS, ends_in, request

ANN, BOB = "a-token-that-is-anns-alone", "a-token-that-is-bobs-alone"
VERSION = "2025-11-25"
pytestmark = pytest.mark.needs("userns")
SLOW = "import time\nprint('begun', flush=True)\ntime.sleep(1)\nprint('later', flush=True)\n6 * 7"


class Served(NamedTuple):
    http: Http
    trail: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("conversations")
    tokens, trail = directory / "tokens", directory / "trail"
    tokens.write_text(f"ann {ANN}\nbob {BOB}\n")
    tokens.chmod(0o600)
    with over_http("--token-file", str(tokens), "--audit", str(trail)) as http:
        yield Served(http, trail)


class Event(NamedTuple):
    """An event of a stream; `message` is None for one without content."""

    id: str
    retry: str
    message: Any


class Talk:
    """A conversation of a client, by hand."""

    def __init__(self, place: Served, token: str) -> None:
        self._url = place.http.url
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {token}", "Accept": "application/json, text/event-stream"},
            timeout=BOUND_SECONDS,
        )  # fmt: skip

    async def __aenter__(self) -> "Talk":
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *about: Any) -> None:
        await self._client.__aexit__(*about)

    async def begin(self) -> int:
        """Begin a conversation, and return the status."""
        given = {"protocolVersion": VERSION, "capabilities": {}}
        hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize",
                 "params": {**given, "clientInfo": {"name": "x", "version": "1"}}}  # fmt: skip
        answer = await self._client.post(self._url, json=hello)
        if answer.status_code == 200:
            self._client.headers["Mcp-Session-Id"] = answer.headers["mcp-session-id"]
            self._client.headers["MCP-Protocol-Version"] = VERSION
            ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
            await self._client.post(self._url, json=ready)
        return answer.status_code

    def leave(self) -> str:
        """Forget the conversation, and return its id."""
        return self._client.headers.pop("Mcp-Session-Id")

    async def end(self, url: str = "", id: str = "") -> int:
        """End a conversation, and return the status."""
        headers = {"Mcp-Session-Id": id} if id else {}
        return (await self._client.delete(url or self._url, headers=headers)).status_code

    async def call(self, code: str) -> AsyncGenerator[Event, None]:
        """Yield the events of the answer to a call; leaving breaks the connection."""
        asked = request(7, "run_code", {"code": code}, _meta={"progressToken": 7})
        async with self._client.stream("POST", self._url, json=asked) as answer:
            async for event in events_of(answer):
                yield event

    async def call_until_output(self, code: str) -> list[Event]:
        """Return the events of the answer up to the first output, and break the connection."""
        seen = []
        async with contextlib.aclosing(self.call(code)) as events:
            async for event in events:
                seen.append(event)
                if event.message:
                    break
        return seen

    async def resume(self, id: str) -> AsyncIterator[Event]:
        """Yield the events after that one."""
        headers = {"Last-Event-ID": id}
        async with self._client.stream("GET", self._url, headers=headers) as answer:
            assert answer.status_code == 200
            async for event in events_of(answer):
                yield event


async def events_of(answer: httpx2.Response) -> AsyncIterator[Event]:
    fields: dict[str, str] = {}
    async for line in answer.aiter_lines():
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
            continue
        if "id" in fields:
            message = json.loads(fields["data"]) if fields.get("data") else None
            yield Event(fields["id"], fields.get("retry", ""), message)
        fields = {}


def output_in(event: Event) -> str:
    """Return the output that an event reports."""
    return str((event.message or {}).get("params", {}).get("message", ""))


def value_in(events: list[Event]) -> Any:
    """Return the value of the program whose answer is the last event."""
    return events[-1].message["result"]["structuredContent"]["value"]


def drive(main: Any) -> None:
    async def bounded() -> None:
        with anyio.fail_after(BOUND_SECONDS):
            await main()

    anyio.run(bounded)


def test_a_stream_is_resumed_after_its_connection_broke(place: Served) -> None:
    async def main() -> None:
        async with Talk(place, ANN) as talk:
            assert await talk.begin() == 200
            seen = await talk.call_until_output(SLOW)
            assert (seen[0].message, seen[0].retry) == (None, "500")
            assert seen[-1].message["params"]["message"] == "begun\n"
            later = [each async for each in talk.resume(seen[-1].id)]
            assert [output_in(each) for each in later if output_in(each)] == ["later\n"]
            assert value_in(later) == 42
            again = [each async for each in talk.resume(seen[0].id)]
            assert value_in(again) == 42  # from the beginning, after its end
            assert [each async for each in talk.resume(again[-1].id)] == []

    drive(main)


def test_a_program_ends_if_nobody_resumes_its_stream(place: Served) -> None:
    before = len(ends_in(place.trail))

    async def main() -> None:
        async with Talk(place, ANN) as talk:
            assert await talk.begin() == 200
            await talk.call_until_output(ENDLESS)

    drive(main)
    assert soon(lambda: ends_in(place.trail)[before:] == ["cancelled"])


@pytest.mark.parametrize("token", [ANN, BOB])
def test_an_event_is_unknown_in_another_conversation(place: Served, token: str) -> None:
    async def main() -> None:
        async with Talk(place, ANN) as talk, Talk(place, token) as other:
            assert (await talk.begin(), await other.begin()) == (200, 200)
            seen = [each async for each in talk.call("6 * 7")]
            assert value_in([each async for each in talk.resume(seen[0].id)]) == 42
            assert [each async for each in other.resume(seen[0].id)] == []

    drive(main)


def test_conversations_of_a_client_are_limited_and_given_back(place: Served) -> None:
    async def main() -> None:
        begun = []
        async with Talk(place, ANN) as ann, Talk(place, BOB) as bob:
            while await ann.begin() == 200:
                assert await ann.end(place.http.base + "/elsewhere") == 404  # ends no session
                begun.append(ann.leave())
            assert len(begun) < MOST
            assert await bob.begin() == 200
            for each in begun:
                assert await ann.end(id=each) == 200
            assert await ann.begin() == 200

    drive(main)


def reader() -> EventReader:
    """Return the reader of the current request."""
    found = READER.get()
    assert found
    return found


async def _begun(conversations: Conversations, client: str, id: str) -> None:
    with conversations.used(client, "", anyio.Event()) as conversation:
        assert conversation
        conversations.keep(conversation, id)


@pytest.mark.anyio
async def test_an_idle_conversation_releases_what_it_held() -> None:
    ended = anyio.Event()
    told: list[tuple[str, str]] = []

    def on_end(client: str, id: str) -> None:
        told.append((client, id))
        anyio.from_thread.run_sync(ended.set)

    conversations = Conversations(on_end, most_of_one=1, idle_seconds=-1)
    with conversations.used("ann", "", anyio.Event()) as conversation:
        assert conversation
        conversations.keep(conversation, "1")
        assert conversation.events.keep("7", None, reader())
        with pytest.raises(BusyError, match="1 for each client"):
            await _begun(conversations, "ann", "2")
        await _begun(conversations, "bob", "3")
    with anyio.fail_after(BOUND_SECONDS):
        await ended.wait()
    assert ("ann", "1") in told or ("bob", "3") in told
    while conversations._open:
        await anyio.lowlevel.checkpoint()
    assert not conversations._event_bytes._held
    assert not conversations._quota._held


@pytest.mark.anyio
async def test_a_handshake_that_fails_counts_no_more() -> None:
    conversations = Conversations(lambda client, id: None, most_of_one=1)
    for _ in range(3):
        with conversations.used("ann", "", anyio.Event()):
            pass
    assert not conversations._quota._held


@pytest.mark.anyio
async def test_kept_events_are_bounded() -> None:
    conversations = Conversations(lambda client, id: None)
    with conversations.used("ann", "", anyio.Event()) as conversation:
        assert conversation
        ids = [conversation.events.keep("7", None, reader()) for _ in range(3000)]
        assert conversation.events.after(ids[0]) is None
        assert conversation.events.after(ids[-1])
        assert conversations._event_bytes._held["ann"] < 1_000_000
