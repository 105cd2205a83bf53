"""Requests over plain HTTP whose methods and paths rules name: each is decided, whatever comes before it."""

import asyncio
import contextlib
import re
import socket

import msgspec
import pytest

from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.network.rules import NetworkRules
from cellwright.runner.egress import http_relay
from cellwright.runner.egress.cell_connection import CellPolicy
from cellwright.runner.egress.connection_relay import PlainStream, RefusedError, Turns
from cellwright.runner.egress.http_relay import RequestReader, RequestRelay

NAME = "api.example.org"
RULE = NetworkRule(
    host=NAME, schemes=("http",), methods=("GET", "POST", "HEAD"), paths=("/public/*", "/one")
)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
GET = b"GET /public/a HTTP/1.1\r\nHost: api.example.org\r\n\r\n"
SECRET = b"GET /secret HTTP/1.1\r\nHost: api.example.org\r\n\r\n"
_END = b"\r\n\r\n"


class Relayed:
    """One connection: what both ends got, and why it ended."""

    def __init__(self, *rules: NetworkRule) -> None:
        self.policy = CellPolicy(NetworkRules(rules or (RULE,)), (80,), 0.0)
        self.received = self.reached = b""
        self.why = ""
        self.bytes = [0, 0]
        self.relay: RequestRelay | None = None

    async def run(
        self, *pieces: bytes, answers: tuple[bytes, ...] = (OK,), ends: bool = True,
        closes: bool = False,
    ) -> None:  # fmt: skip
        """Send `pieces`, and answer each request that reaches the server in turn.

        `ends`: the program ends its stream after the last piece; `closes`: the server after the last
        answer.
        """
        with contextlib.ExitStack() as stack:
            guest, ours = map(stack.enter_context, socket.socketpair())
            outside, server = map(stack.enter_context, socket.socketpair())
            for each in (guest, ours, outside, server):
                each.setblocking(False)
            serving = asyncio.create_task(self._serve(server, answers, closes))
            reading = asyncio.create_task(self._read(guest))
            relaying = asyncio.create_task(self._relay(ours, outside))
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError):
                for piece in pieces:
                    await loop.sock_sendall(guest, piece)
                    await asyncio.sleep(0)
                if ends:
                    guest.shutdown(socket.SHUT_WR)
            await relaying
            ours.close()
            outside.close()
            await asyncio.gather(serving, reading)

    async def _relay(self, ours: socket.socket, outside: socket.socket) -> None:
        try:
            reader = RequestReader(
                PlainStream(ours), b"", NAME, 80, lambda asked: self.policy.why_not_request(NAME, 80, asked), Turns()
            )  # fmt: skip
            first = await reader.next()
            assert first
            self.relay = RequestRelay(reader, first, PlainStream(outside), self._count)
            await self.relay.run(asyncio.Event())
        except (RefusedError, OSError) as error:
            self.why = str(error)

    def _count(self, sent: int, received: int) -> None:
        self.bytes[0] += sent
        self.bytes[1] += received

    async def _serve(self, server: socket.socket, answers: tuple[bytes, ...], closes: bool) -> None:
        loop, seen = asyncio.get_running_loop(), 0
        with contextlib.suppress(OSError):
            for answer in answers:
                while _END not in self.reached[seen:]:
                    data = await loop.sock_recv(server, 65536)
                    if not data:
                        return
                    self.reached += data
                seen = len(self.reached)
                await loop.sock_sendall(server, answer)
            if closes:
                server.shutdown(socket.SHUT_WR)
            while data := await loop.sock_recv(server, 65536):
                self.reached += data

    async def _read(self, guest: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := await asyncio.get_running_loop().sock_recv(guest, 65536):
                self.received += data


def relayed(*pieces: bytes, rules: tuple[NetworkRule, ...] = (), **more: object) -> Relayed:
    one = Relayed(*rules)

    async def run() -> None:
        async with asyncio.timeout(30):
            await one.run(*pieces, **more)  # type: ignore[arg-type]

    asyncio.run(run())
    return one


def post(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"POST /one HTTP/1.1", b"Host: api.example.org", *headers, b"", body])


def lines(received: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1.1 [0-9]{3} [A-Za-z]*", received)


def test_an_allowed_request_and_its_answer_pass() -> None:
    one = relayed(
        b"GET /public/a?b=/secret HTTP/1.1\r\nHost: API.example.org.:80\r\nX-A: 1\r\n\r\n"
    )
    assert (
        one.reached
        == b"GET /public/a?b=/secret HTTP/1.1\r\nHost: api.example.org\r\nX-A: 1\r\n\r\n"
    )
    assert one.received == OK
    assert (one.why, one.bytes) == ("", [len(one.reached), len(OK)])


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (SECRET, "no rule allows GET of this path"),
        (GET.replace(b"GET", b"DELETE"), "no rule allows DELETE"),
        (GET.replace(b"GET", b"get"), "no rule allows get"),
        (GET.replace(b"/public/a", b"/public/../secret"), "dot segment"),
        (GET.replace(b"/public/a", b"/public/%2e%2e/secret"), "dot segment"),
        (GET.replace(b"/public/a", b"/public/..%2fsecret"), "escaped '/'"),
        (GET.replace(b"/public/a", b"//public/a"), "empty segment"),
        (GET.replace(b"/public/a", b"/public/a#/../../secret"), "must be escaped"),
        (GET.replace(b"/public/a", b"http://api.example.org/secret"), "not a path"),
        (GET.replace(b"/public/a", b"http://api.example.org/public/a"), "not a path"),
        (GET.replace(b"/public/a", b"http://other.example/public/a"), "not a path"),
        (b"OPTIONS * HTTP/1.1\r\nHost: api.example.org\r\n\r\n", "not a path"),
        (b"CONNECT api.example.org:80 HTTP/1.1\r\nHost: api.example.org\r\n\r\n", "not a path"),
        (b"CONNECT /public/a HTTP/1.1\r\nHost: api.example.org\r\n\r\n", "not a path"),
        (GET.replace(b"api.example.org", b"other.example.org"), "Host is 'other.example.org'"),
        (GET.replace(b"api.example.org", b"api.example.org:81"), "Host is 'api.example.org:81'"),
        (GET.replace(b"api.example.org", b"api.example.org\0.evil"), "not valid HTTP"),
        (GET.replace(b"Host: api", b"Host: x\r\nHost: api"), "not valid HTTP"),
        (b"GET /public/a HTTP/1.1\r\n\r\n", "not valid HTTP"),
        (b"GET /public/a HTTP/1.0\r\nHost: other.example\r\n\r\n", "Host is"),
        (GET.replace(b"\r\n\r\n", b"\r\n folded\r\n\r\n"), "Host is"),
        (GET.replace(b"\r\n\r\n", b"\r\nX-HTTP-Method-Override: DELETE\r\n\r\n"), "x-http-method-override"),
        (GET.replace(b"\r\n\r\n", b"\r\nX-Original-URL: /secret\r\n\r\n"), "x-original-url"),
        (GET.replace(b"\r\n\r\n", b"\r\nX-Forwarded-Host: other\r\n\r\n"), "x-forwarded-host"),
        (GET.replace(b"\r\n\r\n", b"\r\nX_HTTP.Method_Override: DELETE\r\n\r\n"), "x_http.method_override"),
        (GET.replace(b"\r\n\r\n", b"\r\nScript_Name: /public\r\n\r\n"), "script_name"),
        (GET.replace(b"\r\n\r\n", b"\r\nContent_Length: 5\r\n\r\n"), "content_length"),
        (GET.replace(b"\r\n\r\n", b"\r\nTransfer_Encoding: chunked\r\n\r\n"), "transfer_encoding"),
        (GET.replace(b"\r\n\r\n", b"\r\nDestination: /secret\r\n\r\n"), "destination names another"),
        (GET.replace(b"/public/a", b"/public/a?_method=DELETE"), "'_method' can name another method"),
        (GET.replace(b"/public/a", b"/public/%c0%ae%c0%ae/secret"), "not UTF-8"),
        (GET.replace(b"/public/a", b"/public/%ef%bc%8e%ef%bc%8e/secret"), "dot segment"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "version of HTTP"),
        (b"GET /public/a\r\n\r\n", "not valid HTTP"),
        (b"\r\n" + GET, "not valid HTTP"),
        (GET.replace(b"Host:", b"Host :"), "not valid HTTP"),
        (post(b"0\r\n\r\n", b"Content-Length: 5", b"Transfer-Encoding: chunked"), "two lengths"),
        (post(b"0\r\n\r\n", b"Transfer-Encoding: chunked").replace(b"1.1", b"1.0"), "two lengths"),
        (post(b"ok", b"Content-Length: 2", b"Content-Length: 3"), "not valid HTTP"),
        (post(b"ok", b"Content-Length: +2"), "not valid HTTP"),
        (post(b"0\r\n\r\n", b"Transfer-Encoding: xchunked"), "not valid HTTP"),
        (post(b"0\r\n\r\n", b"Transfer-Encoding: chunked, identity"), "not valid HTTP"),
        (b"GET /public/" + b"a" * 100_000 + b" HTTP/1.1\r\n", "not valid HTTP"),
        (GET[:-2] + b"X: " + b"y" * 100_000, "not valid HTTP"),
    ],
)  # fmt: skip
def test_another_request_reaches_nobody_and_the_program_is_told(sent: bytes, why: str) -> None:
    one = relayed(sent)
    assert (one.reached, one.relay) == (b"", None)
    assert why in one.why
    assert lines(one.received)[0].endswith(b" Refused")
    assert f"cellwright: {one.why}\n".encode() in one.received


@pytest.mark.parametrize(
    "second",
    [SECRET, GET.replace(b"api", b"other"), GET.replace(b"GET", b"PUT"), b"nonsense\r\n\r\n"],
)
def test_a_later_request_of_the_connection_is_decided_too(second: bytes) -> None:
    for pieces in ((GET, second), (GET + second,), (*(bytes([each]) for each in GET), second)):
        one = relayed(*pieces)
        assert one.why
        assert (lines(one.reached), one.reached.count(b"GET")) == ([], 1)
        assert lines(one.received)[0] == b"HTTP/1.1 200 OK"
        assert len(lines(one.received)) == 2


def test_requests_of_one_connection_follow_each_other() -> None:
    one = relayed(GET + post(b"ok", b"Content-Length: 2") + GET, answers=(OK, OK, OK))
    assert (one.why, one.received) == ("", OK * 3)
    assert one.reached.count(b" HTTP/1.1") == 3


def test_a_second_request_waits_for_the_answer_to_the_first() -> None:
    """A server that reads it as a part of the first one would answer it without a decision."""
    one = relayed(GET + GET, answers=(OK[:-1],), closes=True)
    assert one.reached.count(b"GET") == 1


def test_a_chunked_body_is_written_anew() -> None:
    """Extensions, trailers and odd spellings, by which servers and proxies differ, do not pass."""
    body = b"2;x=y\r\nok\r\n003\r\nabc\r\n0\r\nHost: other\r\n\r\n"
    one = relayed(post(body, b"Transfer-Encoding: chunked"))
    assert one.reached.endswith(b"\r\n\r\n2\r\nok\r\n3\r\nabc\r\n0\r\n\r\n")
    assert (one.why, one.received) == ("", OK)


@pytest.mark.parametrize("body", [b"x\r\n", b"2\r\nokGET", b"-1\r\n", b"f" * 30 + b"\r\n"])
def test_an_invalid_chunk_ends_the_connection(body: bytes) -> None:
    one = relayed(post(body, b"Transfer-Encoding: chunked"), answers=())
    assert one.why == "the body of a request is not valid HTTP/1.1"


def test_a_body_does_not_hide_a_request() -> None:
    one = relayed(post(SECRET, b"Content-Length: %d" % len(SECRET)) + SECRET)
    assert "no rule allows GET of this path" in one.why
    assert one.reached.count(b"/secret") == 1
    assert one.reached.endswith(SECRET)


def test_an_upgrade_is_not_passed_on() -> None:
    offer = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
    )
    one = relayed(GET[:-2] + offer)
    assert (one.why, one.received) == ("", OK)
    assert b"pgrade" not in one.reached
    assert b"HTTP2" not in one.reached
    switched = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n"
    one = relayed(GET[:-2] + offer, b"raw bytes", answers=(switched, b"raw"))
    assert "not valid HTTP/1.1" in one.why
    assert b"raw" not in one.reached + one.received


def test_an_answer_that_ends_with_the_connection_says_so() -> None:
    one = Relayed()

    async def run() -> None:
        guest, ours = socket.socketpair()
        outside, server = socket.socketpair()
        with guest, ours, outside, server:
            for each in (ours, outside):
                each.setblocking(False)
            guest.sendall(GET)
            server.sendall(b"HTTP/1.0 200 OK\r\n\r\nall")
            server.shutdown(socket.SHUT_WR)
            await one._relay(ours, outside)
            one.received = guest.recv(65536)

    asyncio.run(run())
    assert one.why == ""
    assert b"Connection: close" in one.received
    assert one.received.endswith(b"3\r\nall\r\n0\r\n\r\n")


def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next() -> None:
    poison = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison"
    one = relayed(GET + GET, answers=(OK + poison, OK))
    assert one.received == OK


@pytest.mark.parametrize(("count", "why"), [(16, ""), (17, "more than 16 interim answers")])
def test_interim_answers_are_not_passed_on_and_are_few(count: int, why: str) -> None:
    """A server could send them without end."""
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    one = relayed(GET, answers=(hints * count + OK,))
    assert (one.why, one.received) == (why and f"[Errno 71] {why}", b"" if why else OK)


def test_a_program_that_waits_for_leave_to_send_gets_it() -> None:
    one = relayed(post(b"ok", b"Content-Length: 2", b"Expect: 100-continue"))
    assert lines(one.received) == [b"HTTP/1.1 100 ", b"HTTP/1.1 200 OK"]
    assert b"Expect" not in one.reached


@pytest.mark.parametrize("begun", [GET[:9], GET + GET[:9]])
def test_a_slow_head_is_refused(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_relay, "_HEAD_SECONDS", 0.05)
    one = relayed(begun, ends=False)
    assert "no whole request within" in one.why
    assert lines(one.received)[-1].startswith(b"HTTP/1.1 408")


def test_a_head_in_very_many_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_relay, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(http_relay, "_MOST_PIECES", 20)
    assert relayed(GET).why == "the request is not valid HTTP/1.1"


def test_a_rule_without_methods_allows_every_request_of_its_host() -> None:
    assert not _reads(NetworkRule(host=NAME, schemes=("http",)), RULE)
    assert not _reads(NetworkRule(host=NAME, ports=(80,), schemes=("tcp",)), RULE)
    assert not _reads(NetworkRule(host=NAME, ports=(80,), schemes=("https",)))
    assert _reads(NetworkRule(host=NAME, ports=(80,), schemes=("https",)), RULE)
    assert _reads(RULE, RULE)


def _reads(*rules: NetworkRule) -> bool:
    policy = CellPolicy(NetworkRules(rules), (80,), 0.0)
    return policy.grant(policy.decide(NAME, 80), 80).reads_requests


def test_a_request_that_is_being_answered_ends_when_its_rule_does() -> None:
    one = relayed(GET, answers=(OK[:-1],), closes=True)
    assert one.relay
    assert one.relay.why_not_now() == ""
    one.policy.rules = NetworkRules([msgspec.structs.replace(RULE, methods=("HEAD",))])
    assert "no rule allows GET" in one.relay.why_not_now()
