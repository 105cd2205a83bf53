"""`http.request` against real servers: what the rules allow happens, and nothing else leaves the host."""

import base64
import contextlib
import gzip
import http.client
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cellwright import AuditLog, Broker, NetworkDenial, NetworkRule, PolicyError, Sandbox, Vault
from cellwright.errors import ToolArgumentsInvalid, ToolDenied, ToolFailed
from cellwright.harness.making.builtin import api_query
from cellwright.harness.tools.http.http_exchange import (
    CallDeadline,
    HttpError,
    addresses_of,
    answering,
    decompressed,
)
from cellwright.harness.tools.tool import Caller
from cellwright.tools import HttpCaps, HttpClient, HttpCredential, http_tool
from tests.conftest import policy_named

LOOPBACK = ("127.0.0.0/8",)
NAMES = ("api.example.org", "other.example.org")
SECRET = "s3cr3t-of-the-vault"
JSON = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"a": 1}\n'


class Server:
    """Answers each connection's one request by `answer`, in a thread; keeps the requests."""

    def __init__(self, answer: Callable[[bytes], Any], context: ssl.SSLContext | None) -> None:
        self.requests: list[bytes] = []
        self._answer, self._context = answer, context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.settimeout(60)
            try:
                if self._context:
                    sock = self._context.wrap_socket(sock, server_side=True)
                request = self._read(sock)
                self.requests.append(request)
                answer = self._answer(request)
                for part in [answer] if isinstance(answer, bytes) else answer:
                    sock.sendall(part)
            except OSError:  # the client hung up, which some tests are about
                pass
            finally:
                sock.close()

    @staticmethod
    def _read(sock: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            if not (part := sock.recv(65536)):
                return data
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                while len(body) < int(line.partition(b":")[2]):
                    body += sock.recv(65536)
        return head + b"\r\n\r\n" + body

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ssl.SSLContext]:
    """The file of an authority, and the server side of a certificate of it for the first name only."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the keys")
    folder = tmp_path_factory.mktemp("keys")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-keyout", folder / "key.pem", "-out", folder / "cert.pem", "-subj", "/CN=test", "-addext", f"subjectAltName=DNS:{NAMES[0]}",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return str(folder / "cert.pem"), context


Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def make(answer: Any = JSON, context: ssl.SSLContext | None = None) -> Server:
        reply = answer if callable(answer) else lambda _: answer
        servers.append(Server(reply, context))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


class Names:
    """A resolver that leads every name to `answers`, one after the other, and keeps what was asked."""

    def __init__(self, *answers: tuple[str, ...]) -> None:
        self.answers = list(answers) or [("127.0.0.1",)]
        self.asked: list[str] = []

    def __call__(self, name: str, port: int) -> tuple[str, ...]:
        self.asked.append(name)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def rule(host: str, port: int, scheme: Any = "http", **more: Any) -> NetworkRule:
    return NetworkRule(
        host=host, ports=(port,), schemes=(scheme,), **{"addresses": LOOPBACK} | more
    )


def broker(*allow: NetworkRule, names: Names | None = None, vault: dict[str, str] | None = None, **more: Any) -> Broker:  # fmt: skip
    client = HttpClient(allow, resolve=names or Names(), **more)
    return Broker([http_tool(client)], vault=Vault(vault or {}))


def call(tools: Broker, url: str, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = tools.call("http.request", {"url": url, **more})
    return found


def answer(status: str = "200 OK", body: bytes = b"", **headers: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


# allowed requests


def test_a_request_over_tls_and_its_json(serve: Serve, keys: tuple[str, ssl.SSLContext]) -> None:
    server = serve(JSON, keys[1])
    tools = broker(
        rule(NAMES[0], server.port, "https", methods=("POST",), paths=("/v1/*",)), ca_file=keys[0]
    )
    found = call(
        tools,
        f"https://{NAMES[0].upper()}.:{server.port}/v1/x?q=1",
        method="POST",
        json={"b": 2},
        headers={"X-A": "1"},
    )
    assert found["status_code"] == 200
    assert found["response_json"] == {"a": 1}
    assert found["url"] == f"https://{NAMES[0]}:{server.port}/v1/x?q=1"
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[:2] == [
        b"POST /v1/x?q=1 HTTP/1.1",
        f"Host: {NAMES[0]}:{server.port}".encode(),
    ]
    assert b"X-A: 1" in head
    assert json.loads(body) == {"b": 2}


@pytest.mark.parametrize(
    ("reply", "field", "value"),
    [
        (answer(body="caf\u00e9".encode(), Content_Type="text/plain"), "body", "caf\u00e9"),
        (answer(body="caf\u00e9".encode("latin-1"), Content_Type="text/plain; charset=ISO-8859-1"), "body", "caf\u00e9"),
        (answer(body=b"\xff\0", Content_Type="image/png"), "body_base64", base64.b64encode(b"\xff\0").decode()),
        (answer(body=gzip.compress(b"packed"), Content_Encoding="gzip"), "body", "packed"),
        (answer(body=b"NaN", Content_Type="application/json"), "body", "NaN"),
        (answer(body=b"[" * 100_000, Content_Type="application/json"), "body", "[" * 100_000),
        (answer(body=b"{}", Content_Type="application/problem+json"), "response_json", {}),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", "body", "abc"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", "body", "until the end"),
        (answer("404 Not Found", b"no"), "body", "no"),
    ],
)  # fmt: skip
def test_bodies_come_as_json_text_or_bytes(
    serve: Serve, reply: bytes, field: str, value: Any
) -> None:
    server = serve(reply)
    found = call(broker(rule(NAMES[0], server.port)), f"http://{NAMES[0]}:{server.port}/")
    assert found[field] == value
    assert len({"body", "body_base64", "response_json"} & found.keys()) == 1


def test_bytes_are_sent_and_two_bodies_are_refused(serve: Serve) -> None:
    server = serve()
    tools, url = broker(rule(NAMES[0], server.port)), f"http://{NAMES[0]}:{server.port}/"
    call(
        tools,
        url,
        method="PUT",
        body_base64=base64.b64encode(b"\0\xff\r\n\r\nGET / HTTP/1.1").decode(),
    )
    assert server.requests[0].endswith(b"Content-Length: 20\r\n\r\n\0\xff\r\n\r\nGET / HTTP/1.1")
    with pytest.raises(ToolArgumentsInvalid, match="pass one of them"):
        call(tools, url, method="PUT", body="a", json={})
    with pytest.raises(ToolArgumentsInvalid, match="body"):
        call(tools, url, method="PUT", body="a" * 2_000_000)
    assert len(server.requests) == 1


@pytest.mark.needs("userns")
def test_a_program_in_a_cell_makes_a_request(serve: Serve) -> None:
    server = serve()
    tools = broker(rule(NAMES[0], server.port))
    trail = AuditLog()
    with Sandbox(policy=policy_named("strict"), tools=tools, audit=trail, pool=0) as sandbox:
        code = "import tools\nanswer = tools.http.request(url=url)\nanswer['response_json']"
        result = sandbox.execute(
            code, inputs={"url": f"http://{NAMES[0]}:{server.port}/?token=private"}
        )
    assert result.value == {"a": 1}
    (record,) = (each for each in trail.get_entries() if each.category == "network")
    assert record.target == f"{NAMES[0]}:{server.port}"
    assert record.allowed
    expected = {
        "method": "GET",
        "scheme": "http",
        "address": "127.0.0.1",
        "status": 200,
        "outcome": "ok",
        "rule": f"allow {NAMES[0]}:{server.port}",
    }
    assert expected.items() <= record.details.items()
    assert record.details["received_bytes"] == len(JSON)
    assert not [each for each in trail.get_entries() if "private" in repr(each)]


def test_api_query_has_the_form_of_the_seed(serve: Serve) -> None:
    server = serve()
    client = HttpClient([rule(NAMES[0], server.port)], resolve=Names())
    tools = Broker([api_query(client)])
    asked = {
        "url": f"http://{NAMES[0]}:{server.port}/",
        "method": "POST",
        "headers": {"A": "b"},
        "body": "c",
    }
    assert tools.call("api_query", asked) == {"status_code": 200, "response_json": {"a": 1}}
    with pytest.raises(ToolDenied, match="no rule allows it"):
        tools.call("api_query", {"url": "http://evil.example/"})


# names and addresses


@pytest.mark.parametrize(
    "url",
    [
        "http://evil.example/", "http://api.example.org.evil.example/", "http://evilapi.example.org/", "http://example.org/",
        "http://127.0.0.1/", "http://[::1]/", "http://2130706433/", "http://0x7f.1/", "http://localhost/",
        "http://api.example.org@evil.example/", "http://api.example.org\0.evil.example/", "http://api.example.org%00.evil.example/",
        "http://api.example.org:1/", "https://api.example.org/",
    ],
)  # fmt: skip
def test_a_name_that_is_not_allowed_is_not_even_resolved(url: str) -> None:
    names = Names()
    with pytest.raises(ToolDenied):
        call(broker(rule("api.example.org", 80), names=names), url)
    assert names.asked == []


def test_nothing_is_allowed_without_rules_and_a_denial_wins() -> None:
    names = Names()
    with pytest.raises(ToolDenied, match="no rule allows it"):
        call(broker(names=names), "https://api.example.org/")
    denied = broker(
        rule("*.example.org", 80), names=names, deny=[NetworkDenial(host="api.example.org")]
    )
    with pytest.raises(ToolDenied, match="a rule denies it"):
        call(denied, "http://API.example.org./")
    assert names.asked == []


def test_a_name_is_resolved_once_and_the_checked_address_is_dialled(serve: Serve) -> None:
    """A name server that gives another answer the second time (rebinding) is not asked twice."""
    server = serve()
    names = Names(("127.0.0.1",), ("169.254.169.254",))
    found = call(
        broker(rule(NAMES[0], server.port), names=names), f"http://{NAMES[0]}:{server.port}/"
    )
    assert found["status_code"] == 200
    assert names.asked == [NAMES[0]]


@pytest.mark.parametrize(
    "addresses",
    [
        ("127.0.0.1",), ("10.0.0.1",), ("::1",), ("::ffff:127.0.0.1",), ("64:ff9b::7f00:1",), ("2002:7f00:1::",), ("fe80::1%lo",),
        ("169.254.169.254",), ("8.8.8.8", "127.0.0.1"), ("127.0.0.1", "8.8.8.8"), ("0.0.0.0",), ("nonsense",),
    ],
)  # fmt: skip
def test_an_address_that_no_rule_names_is_not_dialled(
    serve: Serve, addresses: tuple[str, ...]
) -> None:
    server = serve()
    tools = broker(rule(NAMES[0], server.port, addresses=()), names=Names(addresses))
    with pytest.raises(ToolDenied, match="not public") as caught:
        call(tools, f"http://{NAMES[0]}:{server.port}/")
    assert server.requests == []
    assert "127.0.0.1" not in str(
        caught.value
    )  # the caller does not learn addresses of the host's network


def test_no_rule_names_a_metadata_service() -> None:
    tools = broker(
        rule(NAMES[0], 80, addresses=("0.0.0.0/0", "::/0")), names=Names(("169.254.169.254",))
    )
    with pytest.raises(ToolDenied, match="not public"):
        call(tools, f"http://{NAMES[0]}/")


OWN = """
import fcntl, ipaddress, socket, struct, sys
sys.path.insert(0, {root!r})
from cellwright.runner.egress.addresses import is_own_address

def add(interface, address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:  # SIOCSIFADDR
        fcntl.ioctl(sock, 0x8916, struct.pack("16sHH4s8x", interface, socket.AF_INET, 0, address.packed))

add(b"lo", ipaddress.ip_address("127.0.0.1"))
address = ipaddress.ip_address("8.8.8.8")
before = is_own_address(address)
add(b"lo:1", address)
print(before, is_own_address(address))
"""


@pytest.mark.needs("userns")
def test_a_public_address_of_this_host_is_its_own() -> None:
    import sys

    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", OWN.format(root=root)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "True"]


def test_an_address_of_this_host_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellwright.harness.tools.http.http_client.is_own_address", lambda _: True)
    with pytest.raises(ToolDenied, match="not public"):
        call(
            broker(rule(NAMES[0], 80, addresses=()), names=Names(("8.8.8.8",))),
            f"http://{NAMES[0]}/",
        )


# TLS


def test_a_certificate_of_another_name_and_an_unknown_authority_are_refused(
    serve: Serve, keys: tuple[str, ssl.SSLContext]
) -> None:
    server = serve(JSON, keys[1])
    rules = [rule(name, server.port, "https") for name in NAMES]
    with pytest.raises(ToolFailed, match="invalid certificate: Hostname mismatch"):
        call(broker(*rules, ca_file=keys[0]), f"https://{NAMES[1]}:{server.port}/")
    with pytest.raises(ToolFailed, match="invalid certificate"):
        call(broker(*rules), f"https://{NAMES[0]}:{server.port}/")
    assert server.requests == []


# methods and paths


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/x"), ("GET", "/v2"), ("GET", "/"), ("GET", "/v1/../admin"), ("GET", "/v1/%2e%2e/admin"), ("GET", "/v1/..%2Fadmin"),
        ("GET", "/v1/%2e%2e%2fadmin"), ("GET", "/v1/..;/admin"), ("GET", "/v1//x"), ("GET", "//v1/x"), ("GET", "/v1/%5c..%5cadmin"),
        ("GET", "/v1/%00"), ("GET", "/V1/x"), ("GET", "/v1/%252e%252e/admin"),
    ],
)  # fmt: skip
def test_a_method_or_path_that_no_rule_allows_is_not_sent(
    serve: Serve, method: str, path: str
) -> None:
    server = serve()
    tools = broker(rule(NAMES[0], server.port, methods=("GET",), paths=("/v1/*",)))
    with pytest.raises(ToolDenied, match="no rule allows"):
        call(tools, f"http://{NAMES[0]}:{server.port}{path}", method=method)
    assert server.requests == []
    assert call(tools, f"http://{NAMES[0]}:{server.port}/v1/x")["status_code"] == 200


# redirects


def away(location: str, status: str = "302 Found") -> bytes:
    return answer(status, Location=location)


def test_a_redirect_is_decided_again(serve: Serve) -> None:
    names = Names()
    targets = [
        "http://evil.example/", "http://127.0.0.1/", "http://[::1]/", "https://api.example.org/", "//evil.example", "/v2/",
        "http://api.example.org@evil.example/", "http:\\\\evil.example", "file:///etc/passwd",
    ]  # fmt: skip
    server = serve(lambda request: away(targets[int(request.split(b"/v1/")[1].split(b" ")[0])]))
    tools = broker(rule(NAMES[0], server.port, paths=("/v1/*",)), names=names)
    for number in range(len(targets)):
        with pytest.raises(ToolDenied):
            call(tools, f"http://{NAMES[0]}:{server.port}/v1/{number}")
    assert set(names.asked) == {NAMES[0]}
    assert len(server.requests) == len(targets)


def test_the_address_behind_a_redirect_is_checked_too(serve: Serve) -> None:
    server = serve(lambda request: away(f"http://{NAMES[1]}:{server.port}/"))
    names = Names(("127.0.0.1",), ("169.254.169.254",))
    with pytest.raises(ToolDenied, match="not public"):
        call(
            broker(*(rule(name, server.port) for name in NAMES), names=names),
            f"http://{NAMES[0]}:{server.port}/",
        )
    assert len(server.requests) == 1


def test_redirects_end(serve: Serve) -> None:
    server = serve(lambda request: away("/again"))
    with pytest.raises(ToolFailed, match="more than 5 redirects"):
        call(broker(rule(NAMES[0], server.port)), f"http://{NAMES[0]}:{server.port}/")
    assert len(server.requests) == 6


@pytest.mark.parametrize(
    ("status", "method", "then"),
    [("301 M", "POST", b"GET"), ("303 S", "PUT", b"GET"), ("303 S", "HEAD", b"HEAD"), ("307 T", "POST", b"POST"), ("308 P", "PUT", b"PUT")],
)  # fmt: skip
def test_a_redirect_keeps_or_changes_the_method(
    serve: Serve, status: str, method: str, then: bytes
) -> None:
    server = serve(lambda request: JSON if b" /end " in request else away("/end", status))
    call(
        broker(rule(NAMES[0], server.port)),
        f"http://{NAMES[0]}:{server.port}/",
        method=method,
        body="data",
    )
    assert server.requests[1].startswith(then + b" /end ")
    assert server.requests[1].endswith(b"data") == (then not in (b"GET",))


# credentials


def credential(port: int, **more: Any) -> HttpCredential:
    return HttpCredential(
        **{
            "key": "KEY",
            "host": NAMES[0],
            "ports": (port,),
            "methods": ("GET",),
            "paths": ("/v1/*",),
        }
        | more
    )


def test_a_credential_is_added_for_its_requests_only_and_comes_back_to_nobody(
    serve: Serve, keys: tuple[str, ssl.SSLContext]
) -> None:
    server = serve(
        lambda request: answer(
            body=request, Echo=request.split(b"\r\n")[-3].decode(), Content_Type="text/plain"
        ),
        keys[1],
    )
    tools = broker(
        rule(NAMES[0], server.port, "https"), ca_file=keys[0], credentials=[credential(server.port)], vault={"KEY": SECRET},
    )  # fmt: skip
    url = f"https://{NAMES[0]}:{server.port}"
    found = call(tools, f"{url}/v1/x")
    assert f"Authorization: Bearer {SECRET}".encode() in server.requests[0]
    assert "Authorization: Bearer [credential]" in found["body"]
    assert SECRET not in repr(found)
    for path, method in (
        ("/v2/x", "GET"),
        ("/v1/x", "POST"),
        ("/v1/%2e%2e/x", "GET"),
        ("/v1/..%2fx", "GET"),
    ):
        call(tools, f"{url}{path}", method=method)
        assert SECRET.encode() not in server.requests[-1]
    with pytest.raises(ToolArgumentsInvalid, match="the host sets it"):
        call(tools, f"{url}/v1/x", headers={"authorization": "mine"})
    with pytest.raises(ToolArgumentsInvalid, match="host sets this argument"):
        call(tools, f"{url}/v1/x", **{"credential KEY": "mine"})


def test_a_credential_is_not_sent_without_tls(serve: Serve) -> None:
    server = serve()
    tools = broker(
        rule(NAMES[0], server.port), credentials=[credential(server.port)], vault={"KEY": SECRET}
    )
    call(tools, f"http://{NAMES[0]}:{server.port}/v1/x")
    assert SECRET.encode() not in server.requests[0]


def test_a_credential_with_a_line_break_is_not_sent(
    serve: Serve, keys: tuple[str, ssl.SSLContext]
) -> None:
    server = serve(JSON, keys[1])
    tools = broker(
        rule(NAMES[0], server.port, "https"), ca_file=keys[0], credentials=[credential(server.port)], vault={"KEY": f"{SECRET}\r\nX: y"},
    )  # fmt: skip
    with pytest.raises(ToolFailed, match="control character") as caught:
        call(tools, f"https://{NAMES[0]}:{server.port}/v1/x")
    assert SECRET not in str(caught.value)
    assert server.requests == []


def test_nothing_of_the_first_host_goes_with_a_redirect_to_another(
    serve: Serve, keys: tuple[str, ssl.SSLContext]
) -> None:
    """Nor does a credential, when the other host leads back to the first one."""
    other = serve(lambda request: away(f"https://{NAMES[0]}:{first.port}/v1/chosen"))

    def lead(request: bytes) -> bytes:
        return JSON if b"/v1/chosen" in request else away(f"http://{NAMES[1]}:{other.port}/")

    first = serve(lead, keys[1])
    tools = broker(
        rule(NAMES[0], first.port, "https"), rule(NAMES[1], other.port), ca_file=keys[0],
        credentials=[credential(first.port)], vault={"KEY": SECRET},
    )  # fmt: skip
    call(
        tools,
        f"https://{NAMES[0]}:{first.port}/v1/x",
        headers={"Cookie": "of the guest", "X-Key": "of the guest", "Accept": "a/b"},
    )
    assert SECRET.encode() in first.requests[0]
    assert b"of the guest" in first.requests[0]
    for request in (other.requests[0], first.requests[1]):
        assert SECRET.encode() not in request
        assert b"of the guest" not in request
        assert b"Accept: a/b" in request


# hostile answers


def drip(_: bytes) -> Iterator[bytes]:
    """An answer that is whole after more pauses than a call may take."""
    pause = threading.Event()
    yield b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n"
    for _each in range(200):
        yield b"x"
        pause.wait(0.02)


def endless(head: bytes, part: bytes) -> Callable[[bytes], Iterator[bytes]]:
    def parts(_: bytes) -> Iterator[bytes]:
        yield head
        while True:
            yield part

    return parts


BOMB = gzip.compress(b"\0" * 50_000_000)
HOSTILE = {
    "slow": (drip, "no whole answer after 0.5 seconds"),
    "a large body": (answer(body=b"x" * 200_000), "larger than 100000 bytes"),
    "an endless body": (endless(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536), "larger than|too large"),
    "endless chunks": (endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + b"x" * 4096 + b"\r\n"), "larger than|too large"),
    "endless chunk extensions": (endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x" * 65536), "too large|invalid"),
    "endless trailers": (endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 1000), "too large|invalid"),
    "endless headers": (endless(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * 1000), "too large|invalid"),
    "an endless status": (endless(b"HTTP/1.1 200 ", b"x" * 65536), "too large|invalid"),
    "endless interim answers": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100), "too large|invalid"),
    "endless hints": (endless(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100), "more than 16 interim answers"),
    "another protocol": (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n", "answered 101"),
    "a compressed bomb": (answer(body=BOMB, Content_Encoding="gzip"), "larger than 100000 bytes, decompressed"),
    "many members": (answer(body=gzip.compress(b"") * 1000, Content_Encoding="gzip"), "too many compressed parts"),
    "half a member": (answer(body=gzip.compress(b"x" * 1000)[:-4], Content_Encoding="gzip"), "ended early"),
    "not compressed": (answer(body=b"plain", Content_Encoding="gzip"), "invalid"),
    "compressed twice": (answer(body=b"x", Content_Encoding="gzip, gzip"), "unknown encoding"),
    "half a body": (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "ended early|invalid"),
    "no answer": (b"", "invalid"),
    "not HTTP": (b"SSH-2.0-OpenSSH_9\r\n", "invalid"),
}  # fmt: skip


@pytest.mark.parametrize(("reply", "said"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_answer_is_an_error_in_time_and_size(serve: Serve, reply: Any, said: str) -> None:
    server = serve(reply)
    caps = HttpCaps(seconds=0.5 if said.startswith("no whole") else 20.0, response_bytes=100_000)
    with pytest.raises(ToolFailed, match=said):
        call(broker(rule(NAMES[0], server.port), caps=caps), f"http://{NAMES[0]}:{server.port}/")


def test_interim_answers_are_left_out(serve: Serve) -> None:
    interim = (
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 8 + b"HTTP/1.1 100 Continue\r\n\r\n" * 8
    )
    server = serve(lambda _: interim + answer(body=b"ok"))
    tools = broker(rule("api.example.org", server.port))
    assert call(tools, f"http://api.example.org:{server.port}/")["body"] == "ok"


@pytest.mark.parametrize("path", ["?_method=DELETE", "%c0%ae%c0%ae/x", "%ef%bc%8e%ef%bc%8e/x"])
def test_a_request_that_servers_may_take_for_another_is_not_sent(serve: Serve, path: str) -> None:
    server = serve(lambda _: JSON)
    tools = broker(
        rule("api.example.org", server.port, methods=("POST",), paths=("/a/*",)),
        rule("other.example.org", server.port),
    )
    with pytest.raises(ToolDenied, match="which|parameter"):
        call(tools, f"http://api.example.org:{server.port}/a/{path}", method="POST")
    assert server.requests == []
    call(tools, f"http://other.example.org:{server.port}/a/{path}", method="POST")
    assert len(server.requests) == 1


def test_a_second_path_is_not_sent_where_rules_have_paths(serve: Serve) -> None:
    server = serve(lambda _: JSON)
    tools = broker(
        rule("api.example.org", server.port, paths=("/a/*",)),
        rule("other.example.org", server.port),
    )
    headers = {"X-Amz-Copy-Source": "/secret"}
    with pytest.raises(ToolDenied, match="X-Amz-Copy-Source names another"):
        call(tools, f"http://api.example.org:{server.port}/a/b", method="PUT", headers=headers)
    assert server.requests == []
    call(tools, f"http://other.example.org:{server.port}/a/b", method="PUT", headers=headers)
    assert len(server.requests) == 1


def test_a_caller_whose_names_resolve_slowly_leaves_lookups_to_others() -> None:
    answered = threading.Event()

    def resolve(name: str, port: int) -> list[str]:
        if name.startswith("slow"):
            answered.wait()
        return ["192.0.2.1"]

    def slow() -> None:
        with contextlib.suppress(HttpError):
            addresses_of("slow.example.org", 443, resolve, CallDeadline(0.2), "greedy")

    greedy = [threading.Thread(target=slow) for _ in range(64)]
    for each in greedy:
        each.start()
    try:
        for each in greedy:
            each.join()
        assert addresses_of("api.example.org", 443, resolve, CallDeadline(10), "other")
        # Lookups whose callers gave up count.
        with pytest.raises(HttpError, match="no whole answer"):
            addresses_of("api.example.org", 443, resolve, CallDeadline(0.01), "greedy")
    finally:
        answered.set()
    assert addresses_of("api.example.org", 443, resolve, CallDeadline(10), "greedy")


def test_a_second_answer_is_not_read(serve: Serve) -> None:
    server = serve(JSON + answer(body=b"smuggled"))
    found = call(broker(rule(NAMES[0], server.port)), f"http://{NAMES[0]}:{server.port}/")
    assert found["response_json"] == {"a": 1}
    assert "smuggled" not in repr(found)


def test_a_server_that_never_answers_the_handshake_and_one_that_is_gone(
    serve: Serve, keys: tuple[str, ssl.SSLContext]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, and no one answers
        port = silent.getsockname()[1]
        tools = broker(rule(NAMES[0], port, "https"), ca_file=keys[0], caps=HttpCaps(seconds=0.5))
        with pytest.raises(ToolFailed, match=r"no whole answer after 0\.5 seconds"):
            call(tools, f"https://{NAMES[0]}:{port}/")
    with pytest.raises(ToolFailed, match="no connection|no whole answer"):
        call(tools, f"https://{NAMES[0]}:{port}/")


def test_a_lookup_that_never_ends_ends_the_call() -> None:
    never = threading.Event()

    def wait(name: str, port: int) -> tuple[str, ...]:
        never.wait(30)
        return ()

    client = HttpClient([rule(NAMES[0], 80)], resolve=wait, caps=HttpCaps(seconds=0.2))
    try:
        with pytest.raises(ToolFailed, match="no whole answer"):
            Broker([http_tool(client)]).call("http.request", {"url": f"http://{NAMES[0]}/"})
    finally:
        never.set()


def test_decompression_stops_at_the_cap() -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises(HttpError, match="decompressed"):
            decompressed(BOMB, "gzip", 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


# an upstream proxy


class TunnelProxy:
    """A proxy that leads every CONNECT to one port of 127.0.0.1, and answers other requests itself."""

    def __init__(self, port: int, reply: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> None:
        self.requests: list[bytes] = []
        self._target, self._reply = port, reply
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with sock, contextlib.suppress(OSError):
            sock.settimeout(60)
            self.requests.append(Server._read(sock))
            if not self.requests[0].startswith(b"CONNECT"):
                sock.sendall(JSON)
                return
            sock.sendall(self._reply)
            with socket.create_connection(("127.0.0.1", self._target), 10) as target:
                back = threading.Thread(target=_pump, args=(target, sock))
                back.start()
                _pump(sock, target)
                back.join()

    def close(self) -> None:
        self._thread.join(10)
        self._listener.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def test_requests_go_through_the_proxy_that_the_host_names(
    serve: Serve, keys: tuple[str, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS stays end to end, names are decided before, and the proxy resolves them."""
    server = serve(JSON, keys[1])
    names = Names()
    proxy = TunnelProxy(server.port)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:pass%20word@proxy.example:{proxy.port}")
    tools = broker(
        rule(NAMES[0], 443, "https", addresses=()),
        names=names,
        ca_file=keys[0],
        proxy="environment",
    )
    try:
        with pytest.raises(ToolDenied):
            call(tools, "https://evil.example/")
        assert proxy.requests == []
        assert call(tools, f"https://{NAMES[0]}/")["response_json"] == {"a": 1}
    finally:
        proxy.close()
    assert names.asked == ["proxy.example"]
    authorization = base64.b64encode(b"me:pass word").decode()
    assert proxy.requests[0].decode().split("\r\n")[:3] == [
        f"CONNECT {NAMES[0]}:443 HTTP/1.1", f"Host: {NAMES[0]}:443", f"Proxy-Authorization: Basic {authorization}",
    ]  # fmt: skip
    assert b"Proxy-Authorization" not in server.requests[0]


def test_plain_http_goes_to_the_proxy_whole(serve: Serve) -> None:
    proxy = TunnelProxy(0)
    tools = broker(rule(NAMES[0], 80, addresses=()), proxy=f"http://127.0.0.1:{proxy.port}")
    try:
        assert call(tools, f"http://{NAMES[0]}/a?b")["status_code"] == 200
    finally:
        proxy.close()
    assert proxy.requests[0].startswith(
        f"GET http://{NAMES[0]}/a?b HTTP/1.1\r\nHost: {NAMES[0]}\r\n".encode()
    )


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "the proxy refused: 407"),
        (b"nonsense\r\n\r\n", "the proxy refused: not HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\nand more", "invalid"),
        (b"x" * 20_000, "invalid"),
    ],
)  # fmt: skip
def test_a_proxy_that_does_not_connect_is_an_error(serve: Serve, reply: bytes, said: str) -> None:
    server = serve()
    proxy = TunnelProxy(server.port, reply)
    tools = broker(
        rule(NAMES[0], 443, "https", addresses=()), proxy=f"http://127.0.0.1:{proxy.port}"
    )
    try:
        with pytest.raises(ToolFailed, match=said):
            call(tools, f"https://{NAMES[0]}/")
    finally:
        proxy.close()


def test_a_proxy_of_the_environment_is_not_used_unasked_and_an_invalid_one_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://proxy.invalid:1")
    server = serve()
    assert (
        call(broker(rule(NAMES[0], server.port)), f"http://{NAMES[0]}:{server.port}/")[
            "status_code"
        ]
        == 200
    )
    for url in (
        "https://p.example:1",
        "p.example:1",
        "http://p.example",
        "http://p.example:x",
        "http://u:secret@[::1",
        "socks5://p:1",
        "http://p:1/x",
    ):
        with pytest.raises(PolicyError, match="^proxy: must be") as caught:
            HttpClient([], proxy=url)
        assert "secret" not in str(caught.value)
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.delenv("https_proxy", raising=False)
    with pytest.raises(PolicyError, match="HTTPS_PROXY is not set"):
        HttpClient([], proxy="environment")


# caps of rules, and the trail


def test_the_caps_of_every_matching_rule_hold(serve: Serve) -> None:
    server = serve()
    url = f"http://{NAMES[0]}:{server.port}/"
    tools = broker(
        rule(NAMES[0], server.port),
        rule("*.example.org", server.port, connections_per_second=0.001),
    )
    assert call(tools, url)["status_code"] == 200
    with pytest.raises(ToolDenied, match="connections a second"):
        call(tools, url)
    tools = broker(rule(NAMES[0], server.port, received_bytes=10))
    assert call(tools, url)["status_code"] == 200
    with pytest.raises(ToolDenied, match="more than 10 bytes received"):
        call(tools, url)
    expired = broker(rule(NAMES[0], server.port, lifetime_seconds=1e-9))
    with pytest.raises(ToolDenied, match="now"):
        call(expired, url)


def test_only_so_many_requests_run_at_a_time(serve: Serve) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold(_: bytes) -> bytes:
        entered.set()
        leave.wait(10)
        return JSON

    server = serve(hold)
    tools, url = (
        broker(rule(NAMES[0], server.port, connections=1)),
        f"http://{NAMES[0]}:{server.port}/",
    )
    first = threading.Thread(target=call, args=(tools, url))
    first.start()
    try:
        assert entered.wait(10)
        with pytest.raises(ToolDenied, match="more than 1 connections at a time"):
            call(tools, url)
    finally:
        leave.set()
        first.join(10)
    assert call(tools, url)["status_code"] == 200


def test_the_trail_has_one_record_for_each_request_refused_ones_too(serve: Serve) -> None:
    server = serve(lambda request: away("http://evil.example/secret-path?secret-query"))
    trail = AuditLog()
    with pytest.raises(ToolDenied):
        broker(rule(NAMES[0], server.port)).call(
            "http.request", {"url": f"http://{NAMES[0]}:{server.port}/secret-path?secret-query", "headers": {"A": "secret-header"}},
            Caller(id="agent", trails=(trail,)),
        )  # fmt: skip
    first, second = (each for each in trail.get_entries() if each.category == "network")
    assert (first.target, first.allowed, first.details["status"]) == (
        f"{NAMES[0]}:{server.port}",
        True,
        302,
    )
    assert (second.target, second.allowed, second.details["address"]) == (
        "evil.example:80",
        False,
        "",
    )
    assert second.details["outcome"] == "evil.example: no rule allows it"
    assert "secret-" not in repr(trail.get_entries())


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", b"x"])
def test_an_answer_is_closed_before_its_buffer(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.13 and newer report it when the finalizer of an answer finds the buffer closed."""
    made: list[http.client.HTTPResponse] = []

    class Noted(http.client.HTTPResponse):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    monkeypatch.setattr(http.client, "HTTPResponse", Noted)
    near, far = socket.socketpair()
    with near, far:
        far.sendall(answer)
        far.shutdown(socket.SHUT_WR)
        with contextlib.suppress(HttpError), answering(near, "GET", 100, CallDeadline(30)):
            pass
    assert [each.closed for each in made] == [True]
