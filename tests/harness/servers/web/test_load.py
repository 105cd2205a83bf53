"""Many clients, slow ones, and ones that go away: the others go on, and no program is left."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator

import httpx2
import pytest

from cellwright.harness.servers.client_quota import allow_descriptors
from cellwright.harness.servers.http_access import AccessLimits
from cellwright.harness.servers.http_server import MOST_CONNECTIONS, HttpConnection
from cellwright.harness.servers.web.endpoint import WebLimits
from cellwright.policies.policy import Limits
from tests.conftest import policy_named, soon
from tests.harness.servers.web.web_servers import ANN, BOB, BOUND_SECONDS, Web, good, web_server

pytestmark = pytest.mark.needs("userns")

STREAMS, LINES = 200, 20
ENDLESS = "while True: pass"


def address_of(web: Web) -> tuple[str, int]:
    host, _, port = web.url.removeprefix("http://").rpartition(":")
    return host, int(port)


def request_bytes(path: str, body: object, token: str = ANN) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


@contextlib.contextmanager
def sent(web: Web, data: bytes, **options: int) -> Iterator[socket.socket]:
    with socket.socket() as client:
        for name, value in options.items():
            client.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        client.settimeout(BOUND_SECONDS)
        client.connect(address_of(web))
        client.sendall(data)
        yield client


def is_accepted(web: Web, token: str = ANN) -> bool:
    """Tell whether a further program is accepted; another answer than "busy" fails the test."""
    answer = web.ask("POST", "/v1/executions", token, json={"code": "1"})
    assert answer.status_code in (200, 429), answer.text
    return answer.status_code == 200


async def numbers_of(client: httpx2.AsyncClient, stream: int) -> list[int]:
    code = f"for n in range({LINES}): print({stream}, n, flush=True)"
    text = ""
    async with client.stream("POST", "/v1/executions/stream", json={"code": code}) as answer:
        events = ""
        async for piece in answer.aiter_text():
            events += piece
        assert answer.is_success, (answer.status_code, events)
    assert '"ok":true' in events, events
    for block in events.split("\n\n"):
        if block.startswith("event: output"):
            text += json.loads(block.partition("data: ")[2])["text"]
    pairs = [line.split() for line in text.splitlines()]
    assert {int(whose) for whose, _ in pairs} == {stream}
    return [int(n) for _, n in pairs]


def test_200_streams_at_once_keep_their_order() -> None:
    allow_descriptors()
    limits = WebLimits(executions_of_one=STREAMS, requests_per_second=10 * STREAMS)

    async def main(url: str) -> list[list[int]]:
        headers = {"Authorization": f"Bearer {ANN}"}
        most = httpx2.Limits(max_connections=STREAMS)
        async with httpx2.AsyncClient(
            base_url=url, headers=headers, timeout=BOUND_SECONDS, limits=most
        ) as client:
            return await asyncio.gather(*(numbers_of(client, each) for each in range(STREAMS)))

    patient = policy_named("standard", limits=Limits(wall_seconds=10 * BOUND_SECONDS))
    with web_server(patient, limits=limits) as web:
        assert asyncio.run(main(web.url)) == [[*range(LINES)]] * STREAMS


@pytest.mark.parametrize(
    "path", ["/v1/executions", "/v1/executions/stream", "/v1/run-code", "/v1/runs"]
)
def test_a_program_ends_with_its_client(path: str) -> None:
    with web_server(limits=WebLimits(executions_of_one=1)) as web:
        assert is_accepted(web)
        with sent(web, request_bytes(path, {"code": ENDLESS})):
            assert soon(lambda: not is_accepted(web))
        assert soon(lambda: is_accepted(web))


def test_a_program_ends_with_a_client_that_sent_another_request_meanwhile() -> None:
    """The server must go on reading, or it does not see the end of the connection."""
    with web_server(limits=WebLimits(executions_of_one=1)) as web:
        with sent(web, request_bytes("/v1/executions", {"code": ENDLESS})) as client:
            assert soon(lambda: not is_accepted(web))
            client.sendall(request_bytes("/v1/executions", {"code": "1"}))
            assert not is_accepted(web)  # the server has read it by now
        assert soon(lambda: is_accepted(web))


def test_a_client_that_sends_on_and_on_while_a_request_works_is_dropped() -> None:
    """What it sends would wait in the memory of the server."""
    data = request_bytes("/v1/executions", {"code": ENDLESS})
    with web_server(limits=WebLimits(executions_of_one=1)) as web, sent(web, data) as client:
        assert soon(lambda: not is_accepted(web))
        with contextlib.suppress(ConnectionError):
            client.sendall(request_bytes("/v1/executions", {"code": "#" * (4 << 20)}))
        assert soon(lambda: is_accepted(web))


def test_a_program_in_a_session_ends_with_its_client_and_the_session_stays() -> None:
    with web_server(limits=WebLimits(executions_of_one=1)) as web:
        session = f"/v1/sessions/{web.post('/v1/sessions', {})['session']}"
        web.post(f"{session}/executions", {"code": "n = 41"})
        with sent(web, request_bytes(f"{session}/executions", {"code": ENDLESS})):
            assert soon(lambda: not is_accepted(web))
        assert soon(lambda: is_accepted(web))
        assert web.post(f"{session}/executions", {"code": "n + 1"})["value"] == 42
        good(web.ask("DELETE", session))


def test_a_client_that_does_not_read_its_stream_is_dropped() -> None:
    limits = WebLimits(executions_of_one=1, stalled_seconds=0.5)
    with web_server(limits=limits) as web:
        data = request_bytes("/v1/executions/stream", {"code": "while True: print('x' * 10_000)"})
        with sent(web, data, SO_RCVBUF=4096):
            assert soon(lambda: is_accepted(web))
            assert is_accepted(web, BOB)


def test_a_client_that_does_not_read_its_answer_is_dropped() -> None:
    """Else it would hold the answer in memory."""
    dropped = []

    class Watched(HttpConnection):
        wait_seconds = 2.0 * BOUND_SECONDS  # the idle timeout does not do it

        def drop(self) -> None:
            dropped.append(self)
            super().drop()

    with web_server(limits=WebLimits(stalled_seconds=0.5), connection=Watched) as web:
        session = f"/v1/sessions/{web.post('/v1/sessions', {})['session']}"
        path = f"{session}/files/large"
        good(web.ask("PUT", path, content=bytes(8 << 20)))
        assert len(web.ask("GET", path).content) == 8 << 20
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ANN}\r\n\r\n"
        with sent(web, head.encode(), SO_RCVBUF=4096):
            assert soon(lambda: len(dropped) == 1)
        good(web.ask("DELETE", session))


def test_answers_that_a_client_does_not_read_are_limited() -> None:
    """A client that takes a few bytes now and then is never dropped, and could fill the memory."""
    size = 4 << 20
    limits = WebLimits(answer_bytes_of_one=2 * size)
    with web_server(limits=limits) as web:
        session = f"/v1/sessions/{web.post('/v1/sessions', {})['session']}"
        path = f"{session}/files/large"
        good(web.ask("PUT", path, content=bytes(size)))

        def is_sent(token: str = ANN) -> bool:
            answer = web.ask("GET", path, token)
            assert answer.status_code in (200, 404, 429), answer.text
            return answer.status_code != 429

        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {ANN}\r\n\r\n"
        with contextlib.ExitStack() as held:
            for _ in range(2):
                held.enter_context(sent(web, head.encode(), SO_RCVBUF=4096))
            assert soon(lambda: not is_sent())
            assert is_sent(BOB)
            assert web.post("/v1/executions", {"code": "print(1)"}, BOB)["stdout"] == "1\n"
            refused = web.ask("GET", path)
            assert "too many bytes of answers" in refused.json()["detail"]
        assert soon(is_sent)
        good(web.ask("DELETE", session))


def test_slow_bodies_and_headers_do_not_keep_others_waiting() -> None:
    limits = WebLimits(access=AccessLimits(body_seconds=0.5))
    with web_server(limits=limits) as web, contextlib.ExitStack() as held:
        whole = request_bytes("/v1/executions", {"code": "1"})
        slow = [held.enter_context(sent(web, whole[:-3])) for _ in range(50)]
        slow += [held.enter_context(sent(web, whole[:40])) for _ in range(50)]
        assert is_accepted(web)
        assert {client.recv(4096)[:12] for client in slow[:50]} == {b"HTTP/1.1 408"}
        assert is_accepted(web)


def test_a_thousand_idle_connections_do_not_keep_others_out() -> None:
    allow_descriptors()
    with web_server() as web, contextlib.ExitStack() as held:
        for _ in range(MOST_CONNECTIONS):
            held.enter_context(sent(web, b""))
        for _ in range(5):
            assert is_accepted(web)
            assert is_accepted(web, BOB)
