"""A server over HTTP, in a process of its own: access, and isolation between clients."""

import contextlib
import http.client
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx2
import psutil
import pytest
from mcp import Client
from mcp_types.version import LATEST_MODERN_VERSION

from cellwright.harness.cli.serving.mcp import _place_of
from cellwright.harness.servers.client_quota import MCP_VARIABLE, Tokens, tokens_of
from cellwright.policies.errors import PolicyError
from cellwright.runner.audit.verification import read
from tests.conftest import soon
from tests.harness.servers.mcp.servers import (
    BOUND_SECONDS,
    ERAS,
    Http,
    call,
    drive,
    failing,
    over_http,
    tools_file,
    yes,
)  # fmt: skip
from tests.harness.servers.mcp.test_stdio import ENDLESS, HELLO, ends_in
from tests.runner.test_leftovers import cgroups_of, descendants

ANN, BOB = "a-token-that-is-anns-alone", "a-token-that-is-bobs-alone"


class Served(NamedTuple):
    http: Http
    trail: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("http")
    tokens = directory / "tokens"
    tokens.write_text(f"# who may come\nann {ANN}\n\nbob {BOB}\n")
    tokens.chmod(0o600)
    trail = directory / "trail"
    options = ("--token-file", str(tokens), "--tools", str(tools_file(directory)))
    with over_http(*options, "--audit", str(trail), "--origin", "http://page.example") as http:
        yield Served(http, trail)


userns = pytest.mark.needs("userns")


@userns
@pytest.mark.parametrize("mode", ["auto", *ERAS])
def test_a_client_of_the_sdk_is_served(place: Served, mode: str) -> None:
    person, heard = yes(), []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message)

    async def body(client: Client) -> None:
        assert (await call(client, "run_code", code="import tools\ntools.add(1, 2)"))["value"] == 3
        code = "import tools\ntools.pay('ann', 3)"
        assert (await call(client, "run_code", code=code))["value"] == "paid 3 to ann"
        await client.call_tool("run_code", {"code": "print('hi')"}, progress_callback=hear)

    drive(place.http.connected(ANN, mode, person), body)
    assert len(person.asked) == 1
    assert heard == ["hi\n"]


# Access


def post(place: Served, headers: dict[str, str], body: bytes = b"{}", method: str = "POST") -> int:
    """Return the status of a request with just these headers, and those that HTTP wants."""
    usual = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    connection = http.client.HTTPConnection(place.http.base.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        connection.request(method, "/mcp", body, usual | headers)
        return connection.getresponse().status


BEARER = f"Bearer {ANN}"
UNWELCOME: dict[str, tuple[dict[str, str], int]] = {
    "no token": ({}, 401),
    "another's": ({"Authorization": "Bearer nobody-has-this-token"}, 401),
    "an empty one": ({"Authorization": "Bearer "}, 401),
    "the name of one": ({"Authorization": "Bearer ann"}, 401),
    "a part of one": ({"Authorization": BEARER[:-1]}, 401),
    "more than one": ({"Authorization": BEARER + "x"}, 401),
    "another scheme": ({"Authorization": f"Basic {ANN}"}, 401),
    "no scheme": ({"Authorization": ANN}, 401),
    "a foreign page": ({"Authorization": BEARER, "Origin": "http://evil.example"}, 403),
    "a page of this host": ({"Authorization": BEARER, "Origin": "http://localhost:3000"}, 403),
    "a page without a name": ({"Authorization": BEARER, "Origin": "null"}, 403),
    "a name like one": ({"Authorization": BEARER, "Origin": "http://page.example.evil"}, 403),
    "another port of ours": ({"Authorization": BEARER, "Origin": "http://127.0.0.1:1"}, 403),
    "a name of theirs for both": (
        {"Authorization": BEARER, "Host": "evil.example", "Origin": "http://evil.example"},
        421,
    ),
    "another name of ours": ({"Authorization": BEARER, "Host": "evil.example"}, 421),
    "and a port": ({"Authorization": BEARER, "Host": "evil.example:8808"}, 421),
    "another name behind the port": (
        {"Authorization": BEARER, "Host": "127.0.0.1:8808.evil.example"},
        421,
    ),
    "a picture in a foreign page": (
        {"Authorization": BEARER, "Sec-Fetch-Site": "cross-site"},
        403,
    ),
    "a name that begins so": ({"Authorization": BEARER, "Host": "localhost.evil.example"}, 421),
}


@userns
@pytest.mark.parametrize("modern", [False, True], ids=["legacy", "modern"])
@pytest.mark.parametrize(("headers", "status"), UNWELCOME.values(), ids=UNWELCOME)
def test_an_unauthorized_request_is_refused(
    place: Served, headers: dict[str, str], status: int, modern: bool
) -> None:
    version = {"MCP-Protocol-Version": LATEST_MODERN_VERSION} if modern else {}
    body = json.dumps(HELLO).encode()
    assert post(place, {**headers, **version}, body) == status


@userns
def test_an_authorized_request_is_served(place: Served) -> None:
    body = json.dumps(HELLO).encode()
    here = place.http.base.removeprefix("http://")
    for more in (
        {}, {"Origin": "http://page.example"}, {"Host": "localhost:1"},
        {"Origin": f"http://{here}"}, {"Origin": f"https://{here}"},  # behind a proxy
        {"Host": "localhost:1", "Origin": "http://localhost:1"},
    ):  # fmt: skip
        assert post(place, {"Authorization": BEARER, **more}, body) == 200


@userns
def test_two_authorization_headers_are_refused(place: Served) -> None:
    connection = http.client.HTTPConnection(place.http.base.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/mcp")
        connection.putheader("Authorization", BEARER)
        connection.putheader("Authorization", "Bearer x")
        connection.putheader("Content-Length", "0")
        connection.endheaders()
        assert connection.getresponse().status == 401


@userns
def test_a_body_is_bounded_and_read_only_of_authorized_clients(place: Served) -> None:
    large = {"Content-Length": str(17 << 20)}
    assert post(place, {"Authorization": BEARER, **large}, b"") == 413
    assert post(place, large, b"") == 401


@userns
def test_bodies_that_are_much_together_are_refused_before_they_are_read(
    place: Served,
) -> None:
    """Nine of 16 MiB that say so and do not come: one more than one client may have."""
    held = []
    try:
        for _ in range(8):
            connection = http.client.HTTPConnection(
                place.http.base.removeprefix("http://"), timeout=30
            )
            connection.putrequest("POST", "/mcp")
            connection.putheader("Authorization", BEARER)
            connection.putheader("Content-Length", str(16 << 20))
            connection.endheaders(b"{")
            held.append(connection)
        assert soon(lambda: post(place, {"Authorization": BEARER}, b"{}") == 503)
        other = {"Authorization": f"Bearer {BOB}"}
        assert post(place, other, json.dumps(HELLO).encode()) == 200
    finally:
        for connection in held:
            connection.close()
    assert soon(lambda: post(place, {"Authorization": BEARER}, json.dumps(HELLO).encode()) == 200)


@userns
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_body_that_decodes_to_many_times_its_size_is_refused(
    place: Served, in_pieces: bool
) -> None:
    """As a line of stdin is; one of the same length that does not is served."""
    many = b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":[' + b"{}," * 400_000 + b"1]}}"
    long = json.dumps(HELLO).encode() + b" " * len(many)
    connection = http.client.HTTPConnection(place.http.base.removeprefix("http://"), timeout=30)
    headers = {"Authorization": BEARER, "Content-Type": "application/json",
               "Accept": "application/json, text/event-stream"}  # fmt: skip
    with contextlib.closing(connection):
        for body, status in ((many, 400), (long, 200)):
            pieces = [body[at : at + 50_000] for at in range(0, len(body), 50_000)]
            connection.request("POST", "/mcp", iter(pieces) if in_pieces else body, headers)
            answer = connection.getresponse()
            told = answer.read()
            assert answer.status == status
            assert (b"that decode to some" in told) == (status == 400)


GARBAGE = [b"", b"{", b"\xff", b"[]", b"null", b"[" * 100_000, b'{"jsonrpc":"2.0"}', b"1" * 5000,
           b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"\\ud800"}}']  # fmt: skip


@userns
@pytest.mark.parametrize("modern", [False, True], ids=["legacy", "modern"])
@pytest.mark.parametrize("method", ["POST", "PUT", "GET", "DELETE"])
def test_garbage_is_refused(place: Served, method: str, modern: bool) -> None:
    version = {"MCP-Protocol-Version": LATEST_MODERN_VERSION} if modern else {}
    for body in GARBAGE:
        assert 400 <= post(place, {"Authorization": BEARER, **version}, body, method) < 500


# What one client is to another


async def opened(client: Client) -> str:
    return str((await call(client, "run_code", code="secret = 42", session="new"))["session"])


async def assert_unknown(client: Client, id: str) -> None:
    """See that a session does not exist for a client, in any way that there is to ask."""
    words = {await failing(client, "run_code", code="secret", session=id)}
    words.add(await failing(client, "list_files", session=id))
    words.add(await failing(client, "download_file", session=id, path="x"))
    words.add(await failing(client, "upload_file", session=id, path="x", text="y"))
    words.add(await failing(client, "sessions", close=id))
    (said,) = words
    invented = "0" * len(id)
    assert said.replace(id, "") == (
        await failing(client, "run_code", code="secret", session=invented)
    ).replace(invented, "")
    assert id not in str(await call(client, "sessions"))


@userns
@pytest.mark.parametrize("theirs", ERAS)
@pytest.mark.parametrize("token", [ANN, BOB], ids=["the same token", "another token"])
def test_a_session_is_its_conversations_alone(place: Served, theirs: str, token: str) -> None:
    """Whoever knows its id, as somebody who guessed it would."""

    async def body(client: Client) -> None:
        id = await opened(client)
        async with place.http.connected(token, theirs)() as other:
            await assert_unknown(other, id)
        assert (await call(client, "run_code", code="secret", session=id))["value"] == 42
        assert id in str(await call(client, "sessions"))

    drive(place.http.connected(ANN, "legacy"), body)


@userns
def test_without_conversations_a_session_needs_the_token_and_its_id(
    place: Served,
) -> None:
    async def body(client: Client) -> None:
        id = await opened(client)
        told = await call(client, "sessions")
        assert told["sessions"] == []
        assert "use their ids" in told["hint"]
        for mode in ERAS:
            async with place.http.connected(BOB, mode)() as other:
                await assert_unknown(other, id)
        async with place.http.connected(ANN, "legacy")() as other:
            await assert_unknown(other, id)
        async with place.http.connected(ANN, LATEST_MODERN_VERSION)() as again:
            assert (await call(again, "run_code", code="secret", session=id))["value"] == 42
            await call(again, "sessions", close=id)

    drive(place.http.connected(ANN, LATEST_MODERN_VERSION), body)


async def shaken(client: httpx2.AsyncClient, url: str) -> str:
    """Shake hands, and return the id of the conversation."""
    usual = {"Accept": "application/json, text/event-stream"}
    answer = await client.post(url, json=HELLO, headers=usual)
    assert answer.status_code == 200
    return str(answer.headers["mcp-session-id"])


@userns
def test_a_conversation_is_of_the_token_that_began_it(place: Served) -> None:
    async def main() -> None:
        async with httpx2.AsyncClient(timeout=60) as client:
            client.headers["Authorization"] = BEARER
            id = await shaken(client, place.http.url)
            for method in ("POST", "GET", "DELETE"):
                answer = await client.request(
                    method, place.http.url, json=HELLO if method == "POST" else None,
                    headers={"Authorization": f"Bearer {BOB}", "Mcp-Session-Id": id,
                             "Accept": "application/json, text/event-stream"},
                )  # fmt: skip
                assert answer.status_code == 404

    anyio.run(main)


@userns
def test_sessions_end_with_their_conversation(place: Served) -> None:
    """The client says goodbye as it leaves, and its cells are gone."""
    ids: list[str] = []

    async def body(client: Client) -> None:
        ids.append(await opened(client))

    drive(place.http.connected(ANN, "legacy"), body)

    def ended() -> bool:
        found = [each for each in read(place.trail) if each.category == "session"]
        return [each.action for each in found if each.details.get("session_id") == ids[0]] == [
            "opened", "closed",
        ]  # fmt: skip

    assert soon(ended)


@userns
@pytest.mark.parametrize("era", ERAS)
def test_a_program_whose_client_goes_away_is_killed(place: Served, era: str) -> None:
    """Without a word, as one whose process was killed."""
    before = len(ends_in(place.trail))

    async def main() -> None:
        begun = anyio.Event()

        async def hear(*_: object) -> None:
            begun.set()

        with anyio.fail_after(BOUND_SECONDS):
            async with anyio.create_task_group() as beside:

                async def run() -> None:
                    async with place.http.connected(ANN, era)() as client:
                        with contextlib.suppress(Exception):
                            await client.call_tool(
                                "run_code", {"code": ENDLESS}, progress_callback=hear
                            )

                beside.start_soon(run)
                await begun.wait()
                assert len(ends_in(place.trail)) == before
                beside.cancel_scope.cancel()

    anyio.run(main)
    assert soon(lambda: ends_in(place.trail)[before:] == ["cancelled"])


@userns
def test_a_connection_that_breaks_ends_what_it_asked_for(place: Served) -> None:
    before = len(ends_in(place.trail))
    params: dict[str, Any] = {
        "name": "run_code",
        "arguments": {"code": ENDLESS},
        "_meta": {"progressToken": 1},
    }
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}

    async def main() -> None:
        async with httpx2.AsyncClient(headers={"Authorization": BEARER}, timeout=60) as client:
            id = await shaken(client, place.http.url)
            headers = {"Mcp-Session-Id": id, "Accept": "application/json, text/event-stream"}
            ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
            await client.post(place.http.url, json=ready, headers=headers)
            async with client.stream("POST", place.http.url, json=asked, headers=headers) as answer:
                async for line in answer.aiter_lines():
                    if "begun" in line:
                        return

    anyio.run(main)
    assert soon(lambda: ends_in(place.trail)[before:] == ["cancelled"])


@userns
def test_many_clients_are_served_at_once(place: Served) -> None:
    async def one(number: int, values: list[int]) -> None:
        mode = ERAS[number % 2]
        async with place.http.connected((ANN, BOB)[number % 3 == 0], mode)() as client:
            id = (await call(client, "run_code", code=f"x = {number}", session="new"))["session"]
            values.append((await call(client, "run_code", code="x", session=id))["value"])
            await call(client, "sessions", close=id)

    async def main() -> None:
        values: list[int] = []
        with anyio.fail_after(BOUND_SECONDS):
            async with anyio.create_task_group() as group:
                for number in range(7):
                    group.start_soon(one, number, values)
        assert sorted(values) == list(range(7))

    anyio.run(main)


@userns
def test_the_trail_tells_the_whole_of_a_request(place: Served) -> None:
    async def body(client: Client) -> None:
        code = "import tools\ntools.add(1, 2)"
        told = await call(client, "run_code", code=code)
        mine = [each for each in read(place.trail) if each.trace_id == told["trace_id"]]
        assert [f"{each.category} {each.action} {each.target}" for each in mine] == [
            "mcp run_code ann", "execution start python", "tool call add", "tool returned add", "execution ok ",
        ]  # fmt: skip
        by_span = {each.span_id: each for each in mine}
        parents = [by_span[each.parent_id].category for each in mine if each.parent_id]
        assert parents == ["mcp", "execution", "execution", "mcp"]
        assert ANN not in place.trail.read_text()

    drive(place.http.connected(ANN, "legacy"), body)


@userns
def test_a_trace_of_the_clients_goes_on(place: Served) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"

    async def body(client: Client) -> None:
        meta: Any = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        result = await client.call_tool("run_code", {"code": "1"}, meta=meta)
        assert (result.structured_content or {})["trace_id"] == trace

    drive(place.http.connected(ANN, "legacy"), body)


# Tokens, and where one listens


@userns
def test_a_token_is_made_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MCP_VARIABLE, raising=False)
    with over_http() as http:
        assert http.process.stderr
        token = http.process.stderr.readline().split()[-1]
        assert len(token) >= 43

        async def body(client: Client) -> None:
            assert (await call(client, "run_code", code="1"))["value"] == 1

        drive(http.connected(token, "legacy"), body)
        http.process.terminate()
        assert http.process.wait(BOUND_SECONDS) == 0


@userns
def test_a_server_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    trail = tmp_path / "trail"
    file = tokens_in(tmp_path, ANN)
    below: list[int] = []
    with over_http("--token-file", file, "--audit", str(trail)) as http:

        async def main() -> None:
            begun = anyio.Event()

            async def hear(*_: object) -> None:
                begun.set()

            async def run(era: str) -> None:
                with contextlib.suppress(Exception):
                    async with http.connected(ANN, era)() as client:
                        await client.call_tool(
                            "run_code", {"code": ENDLESS}, progress_callback=hear
                        )

            with anyio.fail_after(BOUND_SECONDS):
                async with anyio.create_task_group() as beside:
                    for era in ERAS:
                        begun = anyio.Event()
                        beside.start_soon(run, era)
                        await begun.wait()
                    below.extend(descendants(http.process.pid))
                    http.process.terminate()
                    assert await anyio.to_thread.run_sync(http.process.wait, BOUND_SECONDS) == 0
                    beside.cancel_scope.cancel()

        anyio.run(main)
        assert below
        assert soon(lambda: not [pid for pid in below if psutil.pid_exists(pid)])
        assert cgroups_of(http.process.pid) == set()
        assert ends_in(trail) == ["cancelled", "cancelled"]


def tokens_in(tmp_path: Path, text: str) -> str:
    file = tmp_path / "tokens"
    file.write_text(text)
    file.chmod(0o600)
    return str(file)


def test_tokens_come_from_a_file_of_ones_own(tmp_path: Path) -> None:
    tokens, made = tokens_of(tokens_in(tmp_path, f"# x\nann {ANN}\n{BOB}\n"), MCP_VARIABLE)
    assert made == ""
    assert tokens.client_of(f"Bearer {ANN}") == "ann"
    assert tokens.client_of(f"bearer {BOB}") == "client"
    assert tokens.client_of("Bearer x") is None
    assert ANN not in repr(vars(tokens))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no token"),
        ("short", "at least 16 characters"),
        (f"ann {ANN}\nbob {ANN}", "same token"),
        (f"ann {ANN}\nann {BOB}", "unique names"),
        (f"ann bob {ANN}", "TOKEN or NAME TOKEN"),
        (f"an/n {ANN}", "TOKEN or NAME TOKEN"),
    ],
)
def test_an_invalid_file_of_tokens_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        tokens_of(tokens_in(tmp_path, text), MCP_VARIABLE)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tokens_in(tmp_path, ANN)
    os.chmod(file, stat.S_IRUSR | stat.S_IRGRP)
    with pytest.raises(PolicyError, match="can be read by other users"):
        tokens_of(file, MCP_VARIABLE)


def test_a_token_comes_from_the_environment_else_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MCP_VARIABLE, ANN)
    tokens, made = tokens_of(None, MCP_VARIABLE)
    assert (tokens.client_of(BEARER), made) == ("client", "")
    monkeypatch.delenv(MCP_VARIABLE)
    made = {tokens_of(None, MCP_VARIABLE)[1] for _ in range(3)}  # type: ignore[assignment]
    assert len(made) == 3


def test_a_token_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(PolicyError, match="at least 16 characters"):
        Tokens({"ann": "x" * 15})


class Options(NamedTuple):
    http: str | None
    remote: tuple[str, ...] = ()
    origin: tuple[str, ...] = ()
    token_file: str | None = None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options("0.0.0.0:1"), "not a loopback"),
        (Options("192.0.2.1:1"), "not a loopback"),
        (Options("[::]:1"), "not a loopback"),
        (Options("8808"), "must be HOST:PORT"),
        (Options("localhost:x"), "must be HOST:PORT"),
        (Options("localhost:70000"), "must be HOST:PORT"),
        (Options(None, remote=("x",)), "requires --http"),
        (Options(None, token_file="x"), "requires --http"),
        (Options(None, origin=("x",)), "requires --http"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(options: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        _place_of(options)


def test_a_server_for_remote_clients_accepts_the_names_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(MCP_VARIABLE, ANN)
    options: Any = Options("0.0.0.0:1", remote=("box.example",))
    place = _place_of(options)
    assert place
    assert (place.host, place.hosts) == ("0.0.0.0", ("box.example",))
    here: Any = Options("127.0.0.1:1")
    assert "localhost" in _place_of(here).hosts  # type: ignore[union-attr]
