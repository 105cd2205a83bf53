"""Network rules that are changed while cells live; servers are on the host's loopback."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import AuditLog, ClosedError, PolicyError, Sandbox
from cellwright.errors import AuditError
from cellwright.policies.network.rule import NetworkDenial, NetworkRule
from cellwright.policies.policy import Network
from cellwright.runner.confined import egress_process
from cellwright.testing import inspect
from tests.conftest import policy_named
from tests.network import NAME, Server, policy, resolving, serving, tcp

OTHER = "other.example.org"
_ASK = """
import socket
def reach(name):
    try:
        sock = socket.create_connection((name, port), 10)
    except OSError as error:
        return type(error).__name__
    return sock
def echo(sock):
    try:
        sock.sendall(b"x")
        return sock.recv(1).decode()
    except OSError as error:
        return type(error).__name__
def ask(name):
    sock = reach(name)
    return sock if isinstance(sock, str) else echo(sock)
"""


def _echo(sock: socket.socket) -> None:
    while data := sock.recv(65536):
        sock.sendall(data)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(_echo) as server:
        yield server


@pytest.fixture
def box(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    resolving(monkeypatch, {NAME: [["127.0.0.1"]], OTHER: [["127.0.0.1"]]})
    with Sandbox(policy=policy(tcp(server.port)), pool=0) as box:
        yield box


def ask(box: Sandbox, server: Server, name: str) -> object:
    result = box.execute(f"{_ASK}\nask({name!r})", inputs={"port": server.port})
    assert result.ok, result
    return result.value


def test_an_open_connection_ends_when_its_name_is_denied(box: Sandbox, server: Server) -> None:
    with box.session() as session:
        code = f"{_ASK}\nsock = reach({NAME!r})\necho(sock)"
        assert session.execute(code, inputs={"port": server.port}).value == "x"
        assert session.execute("echo(sock)").value == "x"  # it stays open between two calls
        box.network.deny(NAME)
        ended = session.execute("echo(sock)")
        assert ended.value in ("ConnectionResetError", "BrokenPipeError")
        assert [each.outcome for each in ended.connections] == [f"ended by the rule 'deny {NAME}'"]
        assert session.execute(f"ask({NAME!r})").value == "gaierror"
        box.network.allow(tcp(server.port))
        assert session.execute(f"ask({NAME!r})").value == "x"


def test_a_refused_name_is_pending_until_a_person_allows_it(box: Sandbox, server: Server) -> None:
    assert box.network.pending() == ()
    assert ask(box, server, OTHER) == "gaierror"
    (pending,) = box.network.pending()
    assert (pending.name, pending.port) == (OTHER, None)
    assert pending.count >= 1
    box.network.allow(tcp(server.port, OTHER))
    assert box.network.pending() == ()
    assert ask(box, server, OTHER) == "x"
    assert box.network.rules == (f"allow {NAME}:{server.port}", f"allow {OTHER}:{server.port}")


def test_a_name_is_pending_while_the_program_that_asked_runs_on(
    box: Sandbox, server: Server
) -> None:
    with box.session() as session:
        ask_for = "import socket\ntry: socket.getaddrinfo(NAME, 1)\nexcept OSError: pass"
        session.execute(ask_for, inputs={"NAME": OTHER})
        assert [each.name for each in box.network.pending()] == [OTHER]
        box.network.deny(OTHER)
        assert box.network.pending() == ()


def test_other_rules_take_the_place_of_the_policys(box: Sandbox, server: Server) -> None:
    with box.session() as session:
        code = f"{_ASK}\nsock = reach({NAME!r})\necho(sock)"
        assert session.execute(code, inputs={"port": server.port}).value == "x"
        box.network.replace([tcp(server.port, OTHER)])
        assert session.execute("echo(sock)").value in ("ConnectionResetError", "BrokenPipeError")
        assert session.execute(f"[ask({NAME!r}), ask({OTHER!r})]").value == ["gaierror", "x"]
        box.network.replace([])
        assert session.execute(f"ask({OTHER!r})").value == "gaierror"
        with pytest.raises(PolicyError, match="ports"):
            box.network.replace([tcp(server.port), NetworkRule(host=OTHER, ports=(1,))])
        box.network.replace([tcp(server.port)])
        assert session.execute(f"[ask({NAME!r}), ask({OTHER!r})]").value == ["x", "gaierror"]
    assert box.network.rules == (f"allow {NAME}:{server.port}",)


def test_each_change_is_recorded(box: Sandbox, server: Server) -> None:
    box.network.allow(tcp(server.port, OTHER, lifetime_seconds=60.0))
    box.network.deny(NetworkDenial(host=OTHER))
    with pytest.raises(PolicyError, match="ports"):
        box.network.allow(NetworkRule(host=OTHER, ports=(1,)))
    assert box.audit
    told = [each for each in box.audit.get_entries() if each.category == "network"]
    assert [(each.action, each.target) for each in told] == [
        ("allow", f"allow {OTHER}:{server.port}"),
        ("deny", f"deny {OTHER}"),
    ]
    assert told[0].details["lifetime_seconds"] == 60.0


def test_what_cannot_be_recorded_is_not_allowed(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, {OTHER: [["127.0.0.1"]]})
    with (
        AuditLog(path=tmp_path / "trail") as trail,
        Sandbox(policy=policy(tcp(server.port)), pool=0, audit=trail) as box,
    ):
        trail.close()
        with pytest.raises(AuditError):
            box.network.allow(tcp(server.port, OTHER))
        assert box.network.rules == (f"allow {NAME}:{server.port}",)
        box.network.deny(NAME)  # a denial is safe, and takes effect
        assert box.network.rules[-1] == f"deny {NAME}"


def test_rules_hold_for_the_next_process_too(box: Sandbox, server: Server) -> None:
    assert ask(box, server, NAME) == "x"
    pid = inspect(box).egress_pid()
    assert pid
    os.kill(pid, signal.SIGKILL)
    box.network.deny(NAME)
    box.network.allow(tcp(server.port, OTHER))
    assert ask(box, server, NAME) == "gaierror"
    assert ask(box, server, OTHER) == "x"
    assert inspect(box).egress_pid() != pid


def test_a_process_that_does_not_answer_is_ended_with_its_connections(
    box: Sandbox, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with box.session() as session:
        code = f"{_ASK}\nsock = reach({NAME!r})\necho(sock)"
        assert session.execute(code, inputs={"port": server.port}).value == "x"
        pid = inspect(box).egress_pid()
        assert pid
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        with monkeypatch.context() as patch:
            patch.setattr(egress_process, "_SETTLE_SECONDS", 0.01)
            box.network.deny(NAME)
        assert inspect(box).egress_pid() is None
        ended = session.execute("echo(sock)")
        assert ended.value in ("ConnectionResetError", "BrokenPipeError", "")
        assert "egress" in [each.syscall for each in ended.violations]


def test_changes_by_many_threads_while_programs_connect_leave_the_last_one_in_force(
    box: Sandbox, server: Server
) -> None:
    rule = tcp(server.port, OTHER)
    assert ask(box, server, NAME) == "x"
    pid = inspect(box).egress_pid()

    def change() -> None:
        for _ in range(10):
            box.network.allow(rule)
            box.network.deny(OTHER)

    threads = [threading.Thread(target=change) for _ in range(3)]
    for each in threads:
        each.start()
    code = f"{_ASK}\nsorted({{ask(name) for _ in range(40) for name in ({OTHER!r}, {NAME!r})}})"
    result = box.execute(code, inputs={"port": server.port})
    for each in threads:
        each.join()
    box.network.deny(OTHER)
    assert "x" in result.value, result
    assert {ask(box, server, OTHER), ask(box, server, NAME)} == {"gaierror", "x"}
    assert [each for each in box.network.rules if OTHER in each] == [f"deny {OTHER}"]
    assert inspect(box).egress_pid() == pid  # it was not ended for not answering


def test_a_sandbox_without_network_rules_has_none_to_change() -> None:
    with (
        Sandbox(policy=policy_named("strict"), pool=0) as box,
        pytest.raises(PolicyError, match="no network rules"),
    ):
        box.network.allow(NAME)
    with (
        Sandbox(policy=policy(addresses=()), pool=0) as box,
        pytest.raises(PolicyError, match="no network rules"),
    ):
        box.network.pending()


def test_a_closed_sandbox_changes_nothing(server: Server) -> None:
    with Sandbox(policy=policy(tcp(server.port)), pool=0) as box:
        network = box.network
    with pytest.raises(ClosedError):
        network.allow(tcp(server.port, OTHER))
    with pytest.raises(ClosedError):
        network.deny(NAME)
    with pytest.raises(ClosedError):
        network.pending()
    assert box.audit
    assert [each for each in box.audit.get_entries() if each.category == "network"] == []


def test_the_denials_of_the_policy_always_hold(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, {OTHER: [["127.0.0.1"]]})
    made = policy(tcp(server.port))
    network = Network(
        allow=made.network.allow,
        deny=(NetworkDenial(host=OTHER),),
        addresses=made.network.addresses,
    )
    denying = type(made)(name="denying", network=network, optional_layers=made.optional_layers)
    with Sandbox(policy=denying, pool=0) as box:
        with pytest.raises(PolicyError, match="the policy has"):
            box.network.allow(tcp(server.port, OTHER))
        box.network.allow(tcp(server.port, "*.example.org"))
        assert ask(box, server, OTHER) == "gaierror"
