"""A fleet over nodes with cells in this process: bytes in, bytes out, and what they refuse."""

import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from cellwright import BusyError, Fleet, PackageError, PolicyError, SandboxResult, SessionLost
from cellwright.errors import InternalError, OutcomeUnknown
from cellwright.harness.fleet import cell_node
from cellwright.harness.fleet.cell_node import (
    Answered,
    CellNode,
    Forgotten,
    NodeAnswer,
    NodeCall,
    NodeGone,
    NodeSettings,
    NotBegun,
    message_of,
)
from cellwright.harness.fleet.router import RouterLimits
from cellwright.harness.sandbox.remote.frames import (
    Describe,
    Execute,
    ExecuteArguments,
    Executed,
    Failure,
)
from cellwright.policies.policy import Packages, Policy
from cellwright.runner.messages import encode
from tests.conftest import policy_named
from tests.harness.packages.wheels import good_wheel

pytestmark = pytest.mark.needs("cgroup")


class NodeHere:
    """A `FleetNode` whose cells are those of this process."""

    def __init__(self, name: str, node: CellNode) -> None:
        self.name = name
        self.node = node
        self.is_lost = False
        self.asked = 0

    def ask(self, data: bytes, timeout: float) -> bytes:
        if self.is_lost:
            raise NodeGone("killed")
        self.asked += 1
        return self.node.answer(data)

    def close(self) -> None:
        self.node.close()


def node_here(name: str, *, slots: int = 2, keys: int = 100, policy: str = "strict") -> NodeHere:
    settings = NodeSettings(
        name=name, policy=policy_named(policy), slots=slots, pool=1, sessions=4, keys=keys
    )
    return NodeHere(name, CellNode(settings))


@pytest.fixture(scope="module")
def node() -> Iterator[CellNode]:
    with node_here("a", slots=1, keys=2).node as made:
        yield made


def call(code: bytes, key: str, version: int = 1) -> bytes:
    return encode(NodeCall(version, key, Execute(code, True, "python", ExecuteArguments())))


def told(node: CellNode, data: bytes) -> NodeAnswer:
    answer: NodeAnswer = message_of(node.answer(data), NodeAnswer)
    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x90" * 100_000,
        pickle.dumps({"a": 1}),
        encode(Describe()),
        encode(Answered(Failure("PolicyError", "x"))),
        msgspec.msgpack.encode(["NodeCall", 1, "k", ["ExposePort", "s", 80]]),
        msgspec.msgpack.encode(["NodeCall", 1, "k", ["Describe"], "more"]),
        msgspec.msgpack.encode(["NodeCall", 1, "k" * 257, ["Describe"]]),
        msgspec.msgpack.encode(["NodeCall", 1, "", ["Describe"]]),
        call(b"1", "v", version=2),
        "text",
        None,
    ],
)
def test_a_node_refuses_any_other_message_and_never_raises(node: CellNode, data: bytes) -> None:
    answer = told(node, data)
    assert isinstance(answer, NotBegun)
    assert answer.failure.kind in ("InternalError", "PolicyError")


@pytest.mark.parametrize(
    "data", [b"", pickle.dumps(1), None, 5, encode(Describe()), bytearray(b"x")]
)
def test_a_fleet_refuses_any_other_answer(data: object) -> None:
    with pytest.raises(InternalError, match="message"):
        message_of(data, NodeAnswer)


def test_a_key_runs_once_and_is_remembered_without_its_outcome_later(node: CellNode) -> None:
    code = b"import random; random.random()"
    first, again = told(node, call(code, "k")), told(node, call(code, "k"))
    assert isinstance(first, Answered)
    assert isinstance(again, Answered)
    assert isinstance(first.reply, Executed)
    assert (first.reply, first.is_repeated, again.is_repeated) == (again.reply, False, True)
    other = told(node, call(b"1", "k"))
    assert isinstance(other, NotBegun)
    assert "other arguments" in other.failure.message
    for key in ("l", "m"):
        told(node, call(b"1", key))
    assert told(node, call(code, "k")) == Forgotten()


def test_a_node_that_fails_itself_says_that_the_outcome_is_unknown(
    node: CellNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(answer: object) -> bytes:
        raise MemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(cell_node, "encode", fail)
        assert told(node, call(b"1", "short")) == Forgotten()
    assert "MemoryError: none left" in capsys.readouterr().err
    assert told(node, call(b"1", "short")) == Forgotten()  # without a wait, and without running it
    assert isinstance(told(node, call(b"1", "later")), Answered)


def test_a_full_node_begins_nothing(node: CellNode) -> None:
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(told, node, call(b"while True: pass", "long"))
        full: NodeAnswer = Answered(Failure("", ""))
        for number in range(100_000):
            full = told(node, call(b"1", f"n{number}"))
            if isinstance(full, NotBegun) or long.done():
                break
        assert isinstance(full, NotBegun)
        assert full.failure.kind == "BusyError"
        node.close()
        ended = long.result()  # it had begun, and nothing else may run it again
        assert isinstance(ended, Answered)
        assert isinstance(ended.reply, Failure)
        assert ended.reply.kind == "ClosedError"


def test_a_call_with_one_key_at_once_runs_once_and_others_wait() -> None:
    with Fleet([node_here("a"), node_here("b")], 2) as fleet:
        ready = threading.Barrier(4)

        def run() -> SandboxResult:
            ready.wait(60)
            return fleet.execute("import os; os.getpid()", key="k")

        with ThreadPoolExecutor(4) as threads:
            results = [each.result() for each in [threads.submit(run) for _ in range(4)]]
        assert len({each.execution_id for each in results}) == 1


def test_a_fleet_maps_programs_in_order_over_what_is_left_of_it() -> None:
    nodes = [node_here("a"), node_here("b")]
    limits = RouterLimits(queue_seconds=20)
    with Fleet(nodes, 2, limits=limits) as fleet:
        results = []
        for outcome in fleet.map((f"{n} + 1" for n in range(40)), return_errors=True):
            results.append(outcome)
            nodes[1].is_lost = len(results) > 10
        unknown = [each for each in results if isinstance(each, OutcomeUnknown)]
        values = [each.value for each in results if isinstance(each, SandboxResult)]
        assert 1 <= len(unknown) <= 2
        assert len(values) + len(unknown) == 40
        assert values == sorted(values)
        nodes[0].is_lost = True
        with pytest.raises(OutcomeUnknown, match="killed"):
            list(fleet.map(["1", "2"], at_once=1))
    with pytest.raises(PolicyError, match="at_once"):
        fleet.map([], at_once=0)


def test_sessions_beyond_those_of_a_node_go_to_another_one_or_are_refused() -> None:
    with Fleet([node_here("a"), node_here("b")], 2) as fleet:
        sessions = [fleet.session() for _ in range(8)]
        for number, each in enumerate(sessions):
            each.execute(f"x = {number}")
        with pytest.raises(BusyError):
            fleet.session()  # instead of ending the session that was idle longest
        with pytest.raises(BusyError):
            sessions[0].fork()
        assert [each.execute("x").value for each in sessions] == [*range(8)]
        assert "cellwright_fleet_sessions 8.0" in fleet.metrics_text()
        assert sessions[0].execute("import os; os.kill(os.getpid(), 9)").session_lost
        with pytest.raises(SessionLost):  # from now on it is not counted
            sessions[0].execute("1")
        assert len(fleet.sessions.items()) == 7
        for each in sessions:
            each.close()
        assert len(fleet.sessions.items()) == 0


def test_a_set_of_packages_stays_on_the_node_that_has_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    good_wheel(tmp_path, {"thing.py": b"answer = 42\n"})
    policy = Policy(name="with-thing", packages=Packages(allow=("thing",)))
    nodes = [
        NodeHere(
            name,
            CellNode(
                NodeSettings(
                    name=name, policy=policy, slots=2, pool=0, sessions=1,
                    find_links=str(tmp_path), index=False,
                )
            ),
        )
        for name in "ab"
    ]  # fmt: skip
    with Fleet(nodes, 2) as fleet:
        asked = [node.asked for node in nodes]
        code = "import thing\nthing.answer"
        assert [fleet.execute(code, packages=["thing"]).value for _ in range(6)] == [42] * 6
        assert sorted(node.asked - before for node, before in zip(nodes, asked, strict=True)) == [
            0,
            6,
        ]
        with pytest.raises(PackageError, match="numpy"):
            fleet.execute(code, packages=["numpy"])


@pytest.mark.parametrize("name", ["slots", "sessions", "nodes_per_host"])
def test_a_count_of_on_ray_must_be_a_whole_number_from_one(name: str) -> None:
    for wrong in (0, -1, 1.5, "1"):
        with pytest.raises(PolicyError, match=f"{name}: must be"):
            Fleet.on_ray(**{name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"timeout": -1}, "timeout"),
        ({"packages": ["a"], "requirements": ["b"]}, "requirements: another name"),
        ({"key": ""}, "key: must be a text that is not empty"),
        ({"key": "k" * 300}, "key: must have at most"),
        ({"packages": ["pandas"]}, "packages"),
        ({"tenant": "x"}, "tenant: unknown: 'x'"),
    ],
)
def test_invalid_arguments_are_refused_with_their_name(given: dict[str, object], why: str) -> None:
    with Fleet([node_here("a")], 2) as fleet, pytest.raises(PolicyError, match=why):
        fleet.execute("1", **given)  # type: ignore[arg-type]


def test_a_fleet_needs_nodes_with_names_of_their_own() -> None:
    with pytest.raises(PolicyError, match="nodes: must be at least one"):
        Fleet([], 2)
    nodes = [node_here("a"), node_here("a")]
    with pytest.raises(PolicyError, match="a name of its own"):
        Fleet(nodes, 2)
    for each in nodes:
        each.close()


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PolicyError, match=r"hint: .* install .*'\.\[fleet\]'"):
        Fleet.on_ray()
