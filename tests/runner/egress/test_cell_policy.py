"""The rules that all cells follow: replaced while connections are open, and the names they refused."""

import socket

import pytest

from cellwright.policies.network.rule import NetworkDenial, NetworkRule
from cellwright.policies.network.rules import NetworkRules, encode_rules
from cellwright.runner.egress import cell_connection
from cellwright.runner.egress.cell_connection import CellPolicy, decoded_rules
from cellwright.runner.messages import Refusal, Settled, decode

NAME = "api.example.org"
TCP = NetworkRule(host=NAME, ports=(443,), schemes=("tcp",))
TLS = NetworkRule(host=NAME)
ANY_SNI = NetworkRule(host=NAME, sni="any")
READ = NetworkRule(host=NAME, ports=(443,), schemes=("http",), methods=("GET",))
HTTP = NetworkRule(host=NAME, ports=(443,), schemes=("http",))
PRIVATE = NetworkRule(host=NAME, addresses=("10.0.0.0/8",))


def policy(*allow: NetworkRule, deny: tuple[NetworkDenial, ...] = ()) -> CellPolicy:
    return CellPolicy(NetworkRules(allow, deny), (80, 443), 0.0)


@pytest.mark.parametrize(
    ("before", "after", "goes_on"),
    [
        (TLS, TLS, True),
        (TLS, TCP, True),
        (TCP, TLS, False),
        (TLS, PRIVATE, True),
        (PRIVATE, TLS, False),
        (TLS, ANY_SNI, True),
        (ANY_SNI, TLS, False),
        (ANY_SNI, TCP, True),
        (TCP, ANY_SNI, False),
        (READ, HTTP, True),
        (HTTP, READ, False),
        (READ, TCP, True),
        (TLS, NetworkRule(host="*.example.org"), True),
        (TLS, NetworkRule(host="other.example.org"), False),
    ],
)
def test_a_connection_goes_on_only_if_the_new_rules_allow_as_much(
    before: NetworkRule, after: NetworkRule, goes_on: bool
) -> None:
    rules = policy(before)
    grant = rules.grant(rules.decide(NAME, 443), 443)
    assert rules.why_ended(NAME, 443, grant) == ""
    rules.rules = NetworkRules([after])
    assert rules.why_ended(NAME, 443, grant) == ("" if goes_on else "the rule has ended")


def test_a_denied_connection_ends_by_the_name_of_the_denial() -> None:
    rules = policy(TLS)
    grant = rules.grant(rules.decide(NAME, 443), 443)
    rules.rules = NetworkRules([TLS], [NetworkDenial(host=NAME)])
    assert rules.why_ended(NAME, 443, grant) == f"ended by the rule 'deny {NAME}'"


def pending(rules: CellPolicy) -> list[tuple[str, int, int]]:
    return [(each.name, each.port, each.count) for each in rules.pending()]  # type: ignore[attr-defined]


def test_pending_names_are_those_that_nobody_decided_on() -> None:
    rules = policy(TLS, deny=(NetworkDenial(host="*.denied.example"),))
    for name, port in (
        ("a.example", 0), ("b.example", 0), ("b.example", 0), (NAME, 80), ("x.denied.example", 0),
        ("127.0.0.1", 0), ("c.example", 0),
    ):  # fmt: skip
        rules.note_refused(name, port, "no rule allows it")
    expected = [("a.example", 0, 1), ("b.example", 0, 2), (NAME, 80, 1), ("c.example", 0, 1)]
    assert pending(rules) == expected
    rules.rules = NetworkRules(
        [TLS, NetworkRule(host="b.example")],
        [NetworkDenial(host="c.example", ports=(80, 443)), *rules.rules.deny],
    )
    assert pending(rules) == [("a.example", 0, 1), (NAME, 80, 1)]


def test_refused_names_are_bounded_and_the_latest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_connection, "_MOST_NAMES", 2)
    rules = policy(TLS)
    for name in ("a.example", "b.example", "a.example", "c.example"):
        rules.note_refused(name, 0, "no rule allows it")
    assert pending(rules) == [("a.example", 0, 2), ("c.example", 0, 1)]


def test_refused_names_are_told_once_each_and_changes_of_rules() -> None:
    rules = policy(TLS, deny=(NetworkDenial(host="*.denied.example"),))
    rules.note_refused("before.example.org", 0, "no rule")
    told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    rules.tell_refused(theirs)
    for name in ("after.example.org", "after.example.org", "x.denied.example"):
        rules.note_refused(name, 0, "no rule")
    rules.follow(NetworkRules([TLS, NetworkRule(host="after.example.org")]))
    rules.note_refused(NAME, 80, "no rule")
    with told:
        found = [decode(told.recv(4096)[1:], Refusal | Settled) for _ in range(4)]
    names = [(each.name, each.port) if isinstance(each, Refusal) else "rules" for each in found]
    assert names == [
        ("before.example.org", 0), ("after.example.org", 0), "rules", (NAME, 80),
    ]  # fmt: skip
    rules.note_refused("later.example.org", 0, "no rule")
    assert theirs.fileno() == -1  # it was closed, since the other end has hung up


def test_a_listener_that_does_not_read_holds_up_no_cell() -> None:
    rules = policy(TLS)
    told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    with told, theirs:
        rules.tell_refused(theirs)
        for number in range(5000):
            rules.note_refused(f"{number}.example.org", 0, "no rule")
        assert decode(told.recv(4096)[1:], Refusal).name == "0.example.org"


def test_rules_are_the_same_after_their_way_to_the_process() -> None:
    rules = decoded_rules(encode_rules((TCP, PRIVATE), (NetworkDenial(host="*"),), ("10.0.0.0/8",)))
    assert rules.allow == (TCP, PRIVATE)
    assert rules.deny == (NetworkDenial(host="*"),)
    assert rules.addresses == ("10.0.0.0/8",)
