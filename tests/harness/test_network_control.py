"""Network rules that a person changes from another process, and who may not."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cellwright import PolicyError, Sandbox
from cellwright.harness.cli.commands import run_command
from cellwright.harness.sandbox.network import network_control
from cellwright.harness.sandbox.network.network_control import (
    AllowHost,
    Greeting,
    RulesShown,
    ShowRules,
    ask,
)
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import Filesystem, Network, Syscalls
from cellwright.runner.launching import living
from cellwright.runner.messages import decode, encode
from tests.conftest import ROOT
from tests.forked import exit_code_of
from tests.network import LOOPBACK, NAME, Server, answer_http, policy, resolving, serving, tcp

OTHER = "other.example.org"
REACH = f"""
import socket
def reach():
    try:
        sock = socket.create_connection(({OTHER!r}, port), 10)
        sock.sendall(b"GET /reached HTTP/1.1\\r\\n\\r\\n")
        return sock.recv(200).decode()[-8:]
    except OSError as error:
        return type(error).__name__
reach()
"""


@pytest.fixture(autouse=True)
def resolved(own_records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, {NAME: [["127.0.0.1"]], OTHER: [["127.0.0.1"]]})


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(answer_http) as server:
        yield server


@pytest.fixture
def box(server: Server) -> Iterator[Sandbox]:
    with Sandbox(policy=policy(tcp(server.port)), pool=0) as box:
        yield box


def command(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert run_command(["network", *words], None) == 0
    return capsys.readouterr().out


def listed(capsys: pytest.CaptureFixture[str], what: str = "pending") -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(command(capsys, what, "--json"))
    return rows


def control_of(box: Sandbox) -> str:
    (found,) = [each for each in living.list_living() if each.record.policy == box.policy.name]
    return found.control


def test_a_person_allows_a_refused_name_and_denies_it_while_the_program_runs(
    box: Sandbox, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(server.port)
    with box.session() as session:
        assert session.execute(REACH, inputs={"port": server.port}).value == "gaierror"
        (row,) = [each for each in listed(capsys) if each["name"] == OTHER]
        assert (row["port"], row["policy"]) == (None, "network")
        assert row["id"] in ids_of_ps(capsys)
        told = command(capsys, "allow", OTHER, "--port", port, "--scheme", "tcp")
        assert told.split() == [row["id"], "allow", f"{OTHER}:{port}"]
        assert listed(capsys) == []
        assert session.execute("reach()").value == "/reached"
        command(capsys, "deny", OTHER, "--id", str(os.getpid()))
        assert session.execute("reach()").value == "gaierror"
    (rules,) = listed(capsys, "rules")
    assert rules["rules"] == [f"allow {NAME}:{port}", f"deny {OTHER}"]
    assert box.audit
    records = [each for each in box.audit.get_entries() if each.category == "network"]
    changes = [each.target for each in records if each.action in ("allow", "deny")]
    assert changes == [f"allow {OTHER}:{port}", f"deny {OTHER}"]


def ids_of_ps(capsys: pytest.CaptureFixture[str]) -> list[object]:
    capsys.readouterr()
    assert run_command(["ps", "--json"], None) == 0
    return [row["id"] for row in json.loads(capsys.readouterr().out)]


def test_pending_names_and_rules_are_printed_for_a_person(
    box: Sandbox, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(capsys, "pending") == ""
    box.execute(REACH, inputs={"port": server.port})
    assert OTHER in command(capsys, "pending")
    assert f"allow {NAME}:{server.port}" in command(capsys, "rules")


def test_what_the_sandbox_refuses_is_said_as_it_says_it(box: Sandbox) -> None:
    with pytest.raises(PolicyError, match=r"ports: must be among those .*, got 443"):
        run_command(["network", "allow", OTHER], None)


def test_among_several_sandboxes_one_is_named(
    box: Sandbox, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    allow = ("allow", OTHER, "--port", str(server.port))
    with Sandbox(policy=policy(tcp(server.port)), pool=0) as second:
        with pytest.raises(PolicyError, match="--id: several"):
            run_command(["network", *allow], None)
        with pytest.raises(PolicyError, match="--id: no sandbox"):
            run_command(["network", *allow, "--id", "1.0"], None)
        with pytest.raises(PolicyError, match="--all: cannot"):
            run_command(["network", *allow, "--id", "1.0", "--all"], None)
        second.execute(REACH, inputs={"port": server.port})
        command(capsys, *allow)
        assert [len(each.network.rules) for each in (box, second)] == [1, 2]  # it had refused it
        with pytest.raises(PolicyError, match="--id: several"):
            run_command(["network", "deny", OTHER], None)
        command(capsys, "deny", OTHER, "--all")
        first, _ = listed(capsys, "rules")
        command(capsys, *allow, "--id", str(first["id"]))
        last = [each.network.rules[-1] for each in (box, second)]
        assert last == [f"allow {OTHER}:{server.port}", f"deny {OTHER}"]
        command(capsys, *allow, "--all")
        assert {each.network.rules[-1] for each in (box, second)} == {
            f"allow {OTHER}:{server.port}"
        }


def test_without_network_rules_there_is_no_socket_and_nothing_to_change(own_records: Path) -> None:
    threads = set(threading.enumerate())
    with Sandbox(policy=policy(addresses=()), pool=0) as box:
        box.execute("1")
        assert set(threading.enumerate()) <= threads
        assert [each.suffix for each in own_records.iterdir()] == [".json"]
        assert "cellwright.harness.sandbox.network.network_control" not in _imports_of_a_sandbox()
        with pytest.raises(PolicyError, match="no sandbox that lives has network rules"):
            run_command(["network", "allow", OTHER], None)


def _imports_of_a_sandbox() -> str:
    code = (
        "import sys; from cellwright import Sandbox, Policy\n"
        "from cellwright.policies.policy import OPTIONAL_LAYERS\n"
        "with Sandbox(policy=Policy(optional_layers=OPTIONAL_LAYERS), pool=0) as box: box.execute('1')\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout


def test_the_socket_goes_with_its_sandbox(server: Server, own_records: Path) -> None:
    with Sandbox(policy=policy(tcp(server.port)), pool=0) as box:
        path = control_of(box)
        assert os.stat(path).st_mode & 0o777 == 0o600
        assert own_records.stat().st_mode & 0o777 == 0o700
        assert exit_code_of(box.close) == 0  # the socket is not the child's
        assert ask(path, ShowRules()).rules
    assert not os.path.exists(path)
    assert [each.name for each in threading.enumerate() if "network" in each.name] == []


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
from cellwright import Network, NetworkRule, Policy, Sandbox
network = Network(allow=(NetworkRule(host="a.example.org"),))
box = Sandbox(policy=Policy(network=network, optional_layers={optional!r}), pool=0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_neither_asked_nor_kept(
    own_records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cellwright.policies.policy import OPTIONAL_LAYERS

    code = KILLED.format(path=sys.path, optional=OPTIONAL_LAYERS)
    subprocess.run([sys.executable, "-I", "-c", code], check=False)
    (left,) = own_records.glob("*.sock")
    assert listed(capsys, "rules") == []
    assert run_command(["gc"], None) == 0
    assert str(left) in capsys.readouterr().out
    assert list(own_records.iterdir()) == []


def test_a_guest_that_sees_the_socket_cannot_allow_itself_anything(
    server: Server, own_records: Path
) -> None:
    """As root starts cells they have another user id; see test_ordinary_user.py for the same one."""
    given = policy(tcp(server.port))
    shown = msgspec.structs.replace(
        given,
        filesystem=Filesystem(write=(str(own_records),)),
        network=Network(loopback=True, allow=given.network.allow, addresses=(LOOPBACK,)),
        syscalls=Syscalls(groups=("unix_sockets",)),
    )
    own_records.mkdir(parents=True, mode=0o700)
    for directory in (own_records, *own_records.parents[:4]):
        directory.chmod(0o755)
    with Sandbox(policy=shown, pool=0) as box:
        path = control_of(box)
        os.chmod(path, 0o666)
        wanted = encode(AllowHost(tcp(server.port, OTHER)))
        result = box.execute(
            "import socket\n"
            "sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
            "sock.connect(path)\n"
            "answer = sock.recv(65536)\n"
            "try: sock.send(bytes([0]) + bytes(wanted))\n"
            "except OSError: pass\n"
            "answer.decode('latin1')",
            inputs={"path": path, "wanted": list(wanted)},
        )
        assert result.ok, result
        assert "network rules: changed " in str(result.value)
        assert box.network.rules == (f"allow {NAME}:{server.port}",)
        assert ask(path, AllowHost(tcp(server.port, OTHER))).rules[1:]  # as a person may


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_a_process_in_another_user_namespace_is_refused_though_it_has_the_same_uid(
    box: Sandbox,
) -> None:
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from cellwright.harness.sandbox.network.network_control import ShowRules, ask\n"
        f"print(ask({control_of(box)!r}, ShowRules()).policy)"
    )
    python = [sys.executable, "-I", "-c", code]
    served = subprocess.run(python, capture_output=True, text=True, check=True)
    assert served.stdout == "network\n", served.stderr
    refused = subprocess.run(
        ["unshare", "--user", "--map-root-user", *python],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "in the user namespace of their sandbox's owner" in refused.stderr


def test_a_peer_that_has_ended_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another process's by now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        network_control.require_person(ours)
        monkeypatch.setattr(network_control.channel, "has_news", lambda _: True)
        with pytest.raises(PolicyError, match="user namespace"):
            network_control.require_person(ours)


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        monkeypatch.setattr(network_control, "peer_of", lambda _: (os.getpid(), os.geteuid() + 1))
        with pytest.raises(PolicyError, match="by user"):
            network_control.require_person(ours)


@pytest.mark.parametrize("sent", [b"", b"\0", b"\0nonsense", b"\7" + bytes(100)])
def test_nonsense_is_answered_and_the_next_request_is_served(box: Sandbox, sent: bytes) -> None:
    path = control_of(box)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(path)
        assert decode(sock.recv(99)[1:], Greeting) == Greeting()
        if sent:
            sock.send(sent)
    shown = ask(path, ShowRules())
    assert decode(encode(shown), RulesShown) == shown


def test_a_rule_is_remembered_in_a_policy_file_if_it_holds(
    box: Sandbox, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "web.toml"
    before = f'[[network.allow]]\nhost = "{NAME}"\nports = [{server.port}]\n'
    file.write_text(before)
    file.chmod(0o640)
    with pytest.raises(PolicyError, match="ports"):
        run_command(["network", "allow", OTHER, "--remember", str(file)], None)
    with pytest.raises(PolicyError, match="--for"):
        run_command(["network", "allow", OTHER, "--remember", str(file), "--for", "9"], None)
    with pytest.raises(PolicyError, match="--remember: 'strict'"):
        run_command(["network", "deny", OTHER, "--remember", "strict"], None)
    assert file.read_text() == before
    port = str(server.port)
    command(capsys, "allow", OTHER, "--port", port, "--remember", str(file))
    command(capsys, "deny", NAME, "--remember", str(file))
    assert file.stat().st_mode & 0o777 == 0o640
    assert file.read_text() == (
        f'{before}\n[[network.allow]]\nhost = "{OTHER}"\nports = [{port}]\n'
        f'\n[[network.deny]]\nhost = "{NAME}"\n'
    )
    with Sandbox(policy=str(file), pool=0) as again:
        assert again.network.rules == (*box.network.rules,)


def test_a_rule_may_hold_for_seconds_only(
    box: Sandbox, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    command(capsys, "allow", OTHER, "--port", str(server.port), "--for", "0.001")
    assert box.execute(REACH, inputs={"port": server.port}).value == "gaierror"


def test_a_rule_of_any_kind_is_one_frame() -> None:
    frame = AllowHost(NetworkRule(host="*.example.org", ports=(80, 443), schemes=("http",)))
    assert decode(encode(frame), AllowHost) == frame
