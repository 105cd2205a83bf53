"""Credentials of a cell: programs have placeholders, hosts get values, and nothing in the cell has one."""

import base64
import gzip
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cellwright import PolicyError, Sandbox, SandboxResult, SandboxStatus
from cellwright.policies.network.credential import CellCredential, credential_of
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import Limits
from cellwright.runner.audit.log import AuditLog
from cellwright.runner.launching.living import directory_prefix, remove_leftovers
from tests.network import NAME, Server, certificate, needs_openssl, policy, resolving, serving

OTHER = "other.example.org"
VALUE = "ghp_Secret0123456789abcdefghijklmnopqrst"
Answer = Callable[[bytes, bytes], bytes]


class Echo:
    """A server that keeps the requests that it got, and answers each by `answer`: head and body."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.got: list[bytes] = []
        self.answer = answer or (lambda head, body: ok(head + b"|" + body))

    def __call__(self, sock: socket.socket) -> None:
        buffer = b""
        while data := sock.recv(65536):
            buffer += data
            while b"\r\n\r\n" in buffer:
                head, _, rest = buffer.partition(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                size = int(length[1]) if length else 0
                while len(rest) < size or (b"chunked" in head and not rest.endswith(b"0\r\n\r\n")):
                    rest += sock.recv(65536)
                body, buffer = (rest, b"") if b"chunked" in head else (rest[:size], rest[size:])
                self.got.append(head + b"\r\n\r\n" + body)
                sock.sendall(self.answer(head, body))


def ok(body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_TOKEN", VALUE)
    resolving(monkeypatch, {NAME: [["127.0.0.1"]], OTHER: [["127.0.0.1"]]})


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """The context of servers that this host trusts."""
    cert, context = certificate(tmp_path, NAME, OTHER)
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    return context


def rule(server: Server, scheme: str, host: str = NAME) -> NetworkRule:
    return NetworkRule(host=host, ports=(server.port,), schemes=(scheme,))  # type: ignore[arg-type]


def credential(server: Server, scheme: str = "https", **more: object) -> CellCredential:
    given = {"variable": "TOKEN", "key": "env:HOST_TOKEN", "host": NAME, "ports": (server.port,)}
    return CellCredential(**given | {"scheme": scheme} | more)  # type: ignore[arg-type]


def ran(
    server: Server, code: str, *rules: NetworkRule, scheme: str = "https", **more: object
) -> SandboxResult:
    """Run `code`, in which `base` is the server's address and `token` the placeholder."""
    rules = rules or (rule(server, scheme),)
    given = {"credentials": (credential(server, scheme),), "pool": 0} | more
    head = f"import os, urllib.request as web\nbase = '{scheme}://{NAME}:{server.port}'\n"
    head += "token = os.environ['TOKEN']\n"
    patient = Limits(wall_seconds=120.0, cpu_seconds=60.0)
    with Sandbox(policy=policy(*rules, limits=patient), **given) as box:  # type: ignore[arg-type]
        result = box.execute(head + code)
    assert result.status is SandboxStatus.COMPLETED, (result.connections, result.stderr)
    assert VALUE not in repr(result)
    return result


_EVERYWHERE = """
asked = web.Request(base + "/a/" + token + "?key=" + token, (token + "&b=" + token).encode(), {
    "Authorization": "Bearer " + token, "X-Key": token, "Accept-Encoding": "gzip", "Range": "bytes=0-1",
    "Content-Type": "text/plain"})
with web.urlopen(asked) as answer:
    print(answer.read().decode().replace(token, "PLACEHOLDER"))
"""


@needs_openssl
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_host_gets_the_value_and_the_program_its_placeholder(
    scheme: str, tls: ssl.SSLContext
) -> None:
    echo = Echo()
    with serving(echo, tls if scheme == "https" else None) as server:
        result = ran(server, _EVERYWHERE, scheme=scheme)
    (got,) = echo.got
    assert got.startswith(f"POST /a/{VALUE}?key={VALUE} HTTP/1.1\r\n".encode())
    assert f"Authorization: Bearer {VALUE}\r\n".encode() in got
    assert got.endswith(f"\r\n\r\n{VALUE}&b={VALUE}".encode())
    assert b"gzip" not in got
    assert b"Range" not in got
    assert list(Path(tempfile.gettempdir()).glob(f"{directory_prefix()}*/authorities.*")) == []
    assert result.stdout.count("PLACEHOLDER") == 6
    assert result.violations == ()
    assert [each.name for each in result.connections] == [NAME]


def test_a_password_of_basic_is_replaced_both_ways() -> None:
    echo = Echo()
    code = """
import base64
word = base64.b64encode(("user:" + token).encode()).decode()
asked = web.Request(base, headers={"Authorization": "Basic " + word})
print(web.urlopen(asked).read().decode().count(word))
"""
    with serving(echo) as server:
        result = ran(server, code, scheme="http")
    assert base64.b64encode(f"user:{VALUE}".encode()) in echo.got[0]
    assert result.stdout == "1\n"


_ECHOES = """
import http.client
for path in ("/header", "/reason", "/pieces", "/chunks", "/forms"):
    link = http.client.HTTPConnection(base[7:]) if base.startswith("http:") else (
        http.client.HTTPSConnection(base[8:]))
    link.request("GET", path)
    answer = link.getresponse()
    print(path, answer.reason, answer.headers, answer.read().decode())
print("token", token)
"""


def _echo(head: bytes, _: bytes) -> bytes:
    """Answer with the value as a server may: whole, in pieces, encoded."""
    value = VALUE.encode()
    forms = [value.hex().encode(), base64.b64encode(value), base64.b64encode(b"x" + value)[2:]]
    path = head.split()[1]
    if path == b"/header":
        return ok(b"", b"X-Echo: a" + value + b"b")
    if path == b"/reason":
        return b"HTTP/1.1 200 " + value + b"\r\nContent-Length: 0\r\n\r\n"
    if path == b"/chunks":
        pieces = [b"%x\r\n%s\r\n" % (1, value[at : at + 1]) for at in range(len(value))]
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        return head + b"".join(pieces) + b"0\r\n\r\n"
    return ok(b" ".join(forms) if path == b"/forms" else value * 3)


def test_a_value_that_a_server_sends_is_masked() -> None:
    with serving(Echo(_echo)) as server:
        result = ran(server, _ECHOES, scheme="http")
    token = result.stdout.rsplit(None, 1)[1]
    assert result.stdout.count(token) == 7
    whole = base64.b64encode(VALUE.encode()).decode()
    for form in (VALUE, VALUE.encode().hex(), whole[:8], whole[-8:]):
        assert form not in result.stdout


def test_a_value_is_masked_wherever_its_bytes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    from cellwright.runner.egress.credential_exchange import Forms, Replacer

    text, value, put = b"aghp_aghp_Sxghp_Secret!ghp_Secre", b"ghp_Secret", b"ghp_kkkkkk"
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            replacer = Replacer(Forms([value]), lambda _: put)
            pieces = text[:first], text[first:second], text[second:]
            made = b"".join(map(replacer.feed, pieces)) + replacer.end()
            assert made == text.replace(value, put)


def test_an_answer_that_is_compressed_although_unasked_is_refused() -> None:
    def answer(head: bytes, _: bytes) -> bytes:
        return ok(gzip.compress(VALUE.encode()), b"Content-Encoding: gzip")

    code = """
import urllib.error
try:
    web.urlopen(base)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
    with serving(Echo(answer)) as server:
        result = ran(server, code, scheme="http")
    assert result.stdout == "502 cellwright: the answer is compressed, although unasked\n\n"


_SOCKET = """
import base64, socket, ssl
host, port = base.partition("//")[2].split(":")
link = socket.create_connection((host, int(port)))
if base.startswith("https"):
    link = ssl.create_default_context().wrap_socket(link, server_hostname=host)
link.sendall(f"GET /ws HTTP/1.1\\r\\nHost: {host}:{port}\\r\\nConnection: keep-alive, Upgrade\\r\\n"
    f"Upgrade: websocket\\r\\nSec-WebSocket-Extensions: permessage-deflate\\r\\nX-Key: {token}\\r\\n\\r\\n".encode())
got = b""
while not got.endswith(b"end"):
    got += link.recv(4096)
head, _, rest = got.partition(b"\\r\\n\\r\\n")
link.sendall(b"bytes of a client")
while not rest.endswith(b"client"):
    rest += link.recv(4096)
print(head.split(b"\\r\\n")[0].decode(), rest.replace(token.encode(), b"PLACEHOLDER"))
"""


@needs_openssl
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_websocket_passes_and_its_frames_are_masked(scheme: str, tls: ssl.SSLContext) -> None:
    heads: list[bytes] = []

    def serve(sock: socket.socket) -> None:
        heads.append(sock.recv(65536))
        sock.sendall(b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        sock.sendall(b"\x81" + VALUE.encode()[:7])
        sock.sendall(VALUE.encode()[7:] + b"end")
        sock.sendall(sock.recv(65536))

    with serving(serve, tls if scheme == "https" else None) as server:
        result = ran(server, _SOCKET, scheme=scheme)
    assert f"X-Key: {VALUE}".encode() in heads[0]
    assert b"deflate" not in heads[0]
    assert "HTTP/1.1 101" in result.stdout
    assert "PLACEHOLDERendbytes of a client" in result.stdout


_STORED = """
web.urlopen(web.Request(base, token.encode())).read()
for where in OTHERS:
    print(web.urlopen(where).read().decode().count(token))
"""


@needs_openssl
def test_a_value_that_its_host_stored_is_masked_on_other_ports_too(tls: ssl.SSLContext) -> None:
    echo = Echo()
    echo.answer = lambda *_: ok(b"".join(echo.got))
    with serving(echo, tls) as server, serving(echo) as plain, serving(echo, tls) as other:
        ways = ("http", plain), ("https", other)
        rules = [rule(each, scheme) for scheme, each in (*ways, ("https", server))]
        others = [f"{scheme}://{NAME}:{each.port}" for scheme, each in ways]
        result = ran(server, _STORED.replace("OTHERS", repr(others)), *rules)
    assert result.stdout == "1\n1\n"


_OTHER = """
asked = web.Request(f"http://{OTHER}:{PORT}/", headers={"X-Key": token})
print(token in web.urlopen(asked).read().decode())
"""


def test_another_host_gets_the_placeholder_and_that_is_a_violation() -> None:
    echo, other = Echo(), Echo()
    with serving(echo) as server, serving(other) as elsewhere:
        code = _OTHER.replace("{OTHER}", OTHER).replace("{PORT}", str(elsewhere.port))
        rules = rule(server, "http"), rule(elsewhere, "http", OTHER)
        result = ran(server, code, *rules, scheme="http")
    assert result.stdout == "True\n"
    assert VALUE.encode() not in other.got[0]
    (found,) = result.violations
    assert found.syscall == "credential"
    assert "placeholder of TOKEN was sent to other.example.org" in found.rule


def test_a_redirect_to_another_host_takes_the_placeholder_along() -> None:
    other = Echo()
    with serving(other) as elsewhere:
        to = f"http://{OTHER}:{elsewhere.port}/{VALUE}".encode()
        moved = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + to + b"\r\n\r\n"
        with serving(Echo(lambda *_: moved)) as server:
            rules = rule(server, "http"), rule(elsewhere, "http", OTHER)
            result = ran(server, _EVERYWHERE, *rules, scheme="http")
    assert VALUE.encode() not in other.got[0]
    assert result.stdout.count("PLACEHOLDER") >= 1


@pytest.mark.parametrize(
    "request_head",
    [
        f"GET http://{NAME}:PORT/ HTTP/1.1\\r\\nHost: {NAME}:PORT",
        f"GET / HTTP/1.1\\r\\nHost: {OTHER}",
        f"GET / HTTP/1.1\\r\\nHost: {NAME}:PORT\\r\\nHost: {OTHER}",
        f"CONNECT {OTHER}:443 HTTP/1.1\\r\\nHost: {NAME}:PORT",
        f"POST / HTTP/1.1\\r\\nHost: {NAME}:PORT\\r\\nContent-Length: 4\\r\\nTransfer-Encoding: chunked",
        f"POST / HTTP/1.1\\r\\nHost: {NAME}:PORT\\r\\nContent-Length: 4\\r\\nContent-Length: 5",
        "PRI * HTTP/2.0",
    ],
)
def test_a_request_that_servers_may_read_differently_is_refused(request_head: str) -> None:
    echo = Echo()
    code = """
import socket
host, _, port = base[7:].partition(":")
link = socket.create_connection((host, int(port)))
link.sendall(b"HEAD\\r\\nX-Key: " + token.encode() + b"\\r\\n\\r\\n0\\r\\n\\r\\n")
print(link.recv(4096).decode())
"""
    with serving(echo) as server:
        head = request_head.replace("PORT", str(server.port))
        result = ran(server, code.replace("HEAD", head), scheme="http")
    assert echo.got == []
    assert re.match("HTTP/1.1 40[03] ", result.stdout)


def test_a_method_and_a_path_that_the_credential_is_not_for_keep_the_placeholder() -> None:
    echo = Echo()
    code = """
for method, path in (("GET", "/a/b"), ("GET", "/b"), ("POST", "/a/b"), ("GET", "/a/../b")):
    web.urlopen(web.Request(base + path, headers={"X-Key": token}, method=method))
"""
    with serving(echo) as server:
        own = credential(server, "http", methods=("GET",), paths=("/a/*",))
        result = ran(server, code, scheme="http", credentials=(own,))
    assert [VALUE.encode() in each for each in echo.got] == [True, False, False, False]
    assert [(each.syscall, each.count) for each in result.violations] == [("credential", 3)]


@needs_openssl
@pytest.mark.parametrize(
    ("name", "why"), [(NAME, "self-signed certificate"), (OTHER, "Hostname mismatch")]
)
def test_a_server_that_the_host_does_not_trust_gets_nothing(
    name: str, why: str, tls: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil").mkdir()
    cert, untrusted = certificate(tmp_path / "evil", name)
    if name == OTHER:  # the host trusts it, for another name
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    echo = Echo()
    code = """
import urllib.error
try:
    web.urlopen(web.Request(base, headers={"X-Key": token}))
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
    with serving(echo, untrusted) as server:
        result = ran(server, code)
    assert f"502 cellwright: the server: {why}" in result.stdout
    assert echo.got == []


def test_a_program_reads_why_its_host_is_not_reached() -> None:
    code = """
import urllib.error
try:
    web.urlopen(base)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""
    with serving(Echo()) as server:
        pass  # it listens no more
    result = ran(server, code, scheme="http")
    assert result.stdout == f"502 cellwright: {NAME}: Connection refused\n\n"


@needs_openssl
def test_other_hosts_keep_their_own_certificates(tls: ssl.SSLContext) -> None:
    code = """
import socket, ssl
def issuer(name, port):
    context = ssl.create_default_context()
    with context.wrap_socket(socket.create_connection((name, port)), server_hostname=name) as link:
        return dict(each[0] for each in link.getpeercert()["issuer"])["commonName"]
print(issuer(NAME, PORT), "+", issuer(OTHER, ELSEWHERE))
"""
    with serving(Echo(), tls) as server, serving(Echo(), tls) as elsewhere:
        rules = rule(server, "https"), rule(elsewhere, "https", OTHER)
        names = (
            f"NAME, OTHER, PORT, ELSEWHERE = {NAME!r}, {OTHER!r}, {server.port}, {elsewhere.port}\n"
        )
        result = ran(server, names + code, *rules)
    assert result.stdout == f"cellwright cell authority + {NAME}\n"


_SEARCH = """
import re, glob
half = bytes(HALF)
for path in glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline"):
    try:
        assert half + b"ijklmnop" not in open(path, "rb").read(), path
    except OSError:
        pass
with open("/proc/self/mem", "rb", 0) as memory:
    for line in open("/proc/self/maps"):
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        try:
            memory.seek(start)
            data = memory.read(end - start)
        except (OSError, ValueError, OverflowError):
            continue
        for found in re.finditer(re.escape(half), data):
            assert data[found.end() : found.end() + 8] != bytes(REST), line
web.urlopen(web.Request(base + "/no", headers={"X-Key": token})).read()
"""


def test_the_value_is_nowhere_in_the_cell_and_in_no_record(tmp_path: Path) -> None:
    half, rest = VALUE[:20].encode(), VALUE[20:28].encode()
    code = _SEARCH.replace("HALF", str(list(half))).replace("REST", str(list(rest)))
    code = code.replace(' + b"ijklmnop"', "")
    trail = tmp_path / "trail.jsonl"
    with serving(Echo()) as server, AuditLog(path=trail) as audit:
        ran(server, code, scheme="http", audit=audit)
    assert VALUE not in trail.read_text()


_KILLED = """
import os, signal
from cellwright.harness.sandbox.network.cell_credentials import CellCredentials
from cellwright.policies.network.credential import credential_of
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import Network, Policy
policy = Policy(name="p", network=Network(allow=(NetworkRule(host="a.example.org"),)))
made = CellCredentials([credential_of("TOKEN=HOST_TOKEN@a.example.org")], policy)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_gc_removes_the_authority_that_a_killed_process_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", _KILLED], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (left,) = tmp_path.iterdir()
    assert VALUE not in "".join(path.read_text("latin-1") for path in left.iterdir())
    assert str(left) in remove_leftovers()
    assert not left.exists()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("brief", "too short"), ("sk-short-key", "too short"), ("with space" * 4, "visible"),
        ("line\nbreak" * 4, "visible"), ('quote"' * 8, "visible"), (None, "environment has no"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_hidden_is_refused_without_it(
    value: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOST_TOKEN")
    if value is not None:
        monkeypatch.setenv("HOST_TOKEN", value)
    own = CellCredential(variable="TOKEN", key="env:HOST_TOKEN", host=NAME)
    with pytest.raises(PolicyError, match=why) as raised:
        Sandbox(policy=policy(NetworkRule(host=NAME)), credentials=(own,), pool=0)
    assert not value or value not in str(raised.value)


def test_without_the_extra_an_error_names_it(
    monkeypatch: pytest.MonkeyPatch, tls: ssl.SSLContext
) -> None:
    authority = "cellwright.harness.sandbox.network.cell_authority"
    monkeypatch.delitem(sys.modules, authority, raising=False)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(PolicyError, match="cryptography is not installed") as raised:
        Sandbox(policy=policy(NetworkRule(host=NAME)), credentials=[f"T=HOST_TOKEN@{NAME}"], pool=0)
    assert "credentials" in raised.value.hint


def test_a_policy_that_shows_the_value_or_not_the_host_is_refused() -> None:
    own = CellCredential(variable="TOKEN", key="env:HOST_TOKEN", host=NAME)
    shown = policy(NetworkRule(host=NAME), environment={"COPY": f"x{VALUE}"})
    with pytest.raises(PolicyError, match="variable COPY of the policy has its value"):
        Sandbox(policy=shown, credentials=(own,), pool=0)
    with pytest.raises(PolicyError, match="does not allow its host"):
        Sandbox(policy=policy(NetworkRule(host=OTHER)), credentials=(own,), pool=0)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("A=B@a.org", ("A", "env:B", "a.org", (443,), "https")),
        ("A=file:/run/x@y@a.org:8443", ("A", "file:/run/x@y", "a.org", (8443,), "https")),
        ("A=B@http://a.org", ("A", "env:B", "a.org", (80,), "http")),
        ("A=B@http://a.org:81", ("A", "env:B", "a.org", (81,), "http")),
    ],
)  # fmt: skip
def test_the_text_of_a_credential(text: str, parts: tuple[object, ...]) -> None:
    found = credential_of(text)
    assert (found.variable, found.key, found.host, found.ports, found.scheme) == parts


@pytest.mark.parametrize("text", ["A", "A=B", "=B@c", "A=@c", "A=B@", "A=B@c:x", "A=B@https://c"])
def test_another_text_is_refused_without_it(text: str) -> None:
    with pytest.raises(PolicyError, match="another form") as raised:
        credential_of(text)
    assert text not in str(raised.value) or text == "A"
