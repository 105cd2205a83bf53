"""The router and its retries, with nodes in this process: no engine, and no cell."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellwright.harness.fleet.node_dispatch import Dispatch
from cellwright.harness.fleet.router import Router, RouterLimits, Wanted
from cellwright.policies.errors import (
    BusyError,
    CellwrightError,
    ClosedError,
    NodeLost,
    OutcomeUnknown,
)

from .fake_nodes import FATES, FakeNode, program, value_of

_AT_ONCE = RouterLimits(queue_seconds=5.0)
_ANY = Wanted()
_fates = st.lists(st.sampled_from(FATES), max_size=12)


def dispatch(*nodes: FakeNode, slots: int = 2, limits: RouterLimits = _AT_ONCE) -> Dispatch:
    made = Dispatch(nodes, slots, limits, chance=random.Random(1))
    made.reconnect_seconds = (0.0, 0.0)
    return made


def runs_of(*nodes: FakeNode) -> Counter[int]:
    return sum((node.ran for node in nodes), Counter())


@settings(deadline=None, max_examples=300)
@given(
    fates=st.lists(_fates, min_size=1, max_size=4), calls=st.integers(1, 20), keyed=st.booleans()
)
def test_whatever_fails_each_program_has_one_outcome_and_runs_at_most_once(
    fates: list[list[str]], calls: int, keyed: bool
) -> None:
    nodes = [FakeNode(f"n{number}", each) for number, each in enumerate(fates)]
    made = dispatch(*nodes)
    for number in range(calls):
        key = f"k{number}" if keyed else None
        try:
            value = value_of(made.run(program(number), _ANY, key))
        except OutcomeUnknown as error:
            assert made.router.why_lost(error.node)  # only where a node was lost
        except (NodeLost, BusyError):
            assert runs_of(*nodes)[number] == 0  # told that it has not run: it has not
        else:
            assert value == number
            assert runs_of(*nodes)[number] == 1
        assert runs_of(*nodes)[number] <= 1
    state = made.router.state()
    assert set(state.free.values()) <= {2}  # no slot is leaked
    assert len(state.free) + len(state.lost) == len(nodes)


@settings(deadline=None, max_examples=30)
@given(fates=st.lists(_fates, min_size=2, max_size=4))
def test_the_same_holds_with_many_callers_at_once(fates: list[list[str]]) -> None:
    nodes = [FakeNode(f"n{number}", each) for number, each in enumerate(fates)]
    made = dispatch(*nodes)

    def outcome(number: int) -> int | CellwrightError:
        try:
            return value_of(made.run(program(number), _ANY))
        except CellwrightError as error:
            return error

    with ThreadPoolExecutor(16) as threads:
        outcomes = list(threads.map(outcome, range(60)))
    ran = runs_of(*nodes)
    assert max(ran.values(), default=0) <= 1
    for number, each in enumerate(outcomes):
        assert isinstance(each, OutcomeUnknown) or ran[number] == (each == number)
    unknown = sum(isinstance(each, OutcomeUnknown) for each in outcomes)
    assert unknown <= 2 * len(made.router.state().lost)  # at most the slots of what was lost
    assert max(node.most_at_once for node in nodes) <= 2


@settings(deadline=None, max_examples=200)
@given(_fates, st.integers(1, 5))
def test_a_repeated_key_never_runs_a_program_again(fates: list[str], repeats: int) -> None:
    nodes = [FakeNode("a", fates), FakeNode("b", fates)]
    made = dispatch(*nodes)
    values = set()
    for _ in range(repeats):
        try:
            values.add(value_of(made.run(program(7), _ANY, "key")))
        except (BusyError, NodeLost):
            continue
    assert values <= {7}
    assert runs_of(*nodes)[7] <= 1
    if values:
        assert runs_of(*nodes)[7] == 1


def test_a_retry_of_what_began_on_a_lost_node_says_that_its_outcome_is_unknown() -> None:
    lost, other = FakeNode("lost", ["dies_after"]), FakeNode("other")
    made = dispatch(lost, other)
    with pytest.raises(OutcomeUnknown, match="killed") as first:
        made.run(program(1), Wanted(node="lost"), None)
    assert first.value.node == "lost"
    made._sent["key"] = "lost"
    with pytest.raises(OutcomeUnknown, match="was sent to the node lost"):
        made.run(program(1), _ANY, "key")
    assert not other.ran
    assert value_of(made.run(program(2), _ANY, "another")) == 2


def test_a_call_whose_key_waits_for_a_node_that_is_lost_is_unknown_too() -> None:
    go, inside = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        go.wait(60)

    node, other = FakeNode("a", ["dies_after"], before=hold), FakeNode("b")
    made = dispatch(node, other, slots=1)
    with ThreadPoolExecutor(3) as threads, made.router.lease(Wanted(node="b")):
        first = threads.submit(made.run, program(1), _ANY, "key")
        inside.wait(60)
        again = threads.submit(made.run, program(1), _ANY, "key")
        while not made.router.state().waiting:
            threading.Event().wait(0.001)
        go.set()
        for each in (first, again):
            with pytest.raises(OutcomeUnknown):
                each.result(60)
    assert runs_of(node, other) == {1: 1}


def test_a_broken_connection_is_tried_again_with_the_same_key() -> None:
    node = FakeNode("a", ["away_after", "away_before", "ok"])
    assert value_of(dispatch(node).run(program(3), _ANY)) == 3
    assert node.ran == {3: 1}


def test_what_a_full_node_could_not_begin_goes_to_another_one_and_is_counted() -> None:
    retries: list[None] = []
    nodes = [FakeNode("a", ["full"] * 9), FakeNode("b", ["full"] * 9), FakeNode("c")]
    made = Dispatch(nodes, 2, _AT_ONCE, lambda: retries.append(None), random.Random(3))
    for number in range(9):
        assert value_of(made.run(program(number), _ANY)) == number
    assert runs_of(nodes[2]).total() == 9
    assert retries
    with pytest.raises(BusyError):
        dispatch(FakeNode("a", ["full"])).run(program(1), _ANY)


def test_calls_wait_in_the_router_and_beyond_its_queue_they_are_refused() -> None:
    go, waiting = threading.Event(), threading.Barrier(3)

    def hold() -> None:
        waiting.wait(60)
        go.wait(60)

    node = FakeNode("a", before=hold)
    made = dispatch(node, limits=RouterLimits(queue=1, node_queue=1, queue_seconds=5.0))
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(made.run, program(number), _ANY) for number in range(2)]
        waiting.wait(60)  # both are in the node, which has two slots
        node._before = lambda: None
        third = threads.submit(made.run, program(2), _ANY)
        fourth = threads.submit(made.run, program(3), Wanted(node="a"))
        while made.router.state().waiting < 2:
            threading.Event().wait(0.001)
        with pytest.raises(BusyError, match="queue of the fleet is full: 1"):
            made.run(program(4), _ANY)
        with pytest.raises(BusyError, match="queue of the node a is full: 1"):
            made.run(program(4), Wanted(node="a"))
        go.set()
        assert [value_of(each.result()) for each in (*running, third, fourth)] == [0, 1, 2, 3]
    assert node.most_at_once == 2


def test_a_call_that_waits_too_long_is_refused_and_leaves_the_queue() -> None:
    router = Router({"a": 1}, RouterLimits(queue_seconds=0.001))
    with router.lease(_ANY):
        with pytest.raises(BusyError, match="no cell was free"), router.lease(_ANY):
            pass
        assert router.state().waiting == 0
    assert router.state().free == {"a": 1}


@pytest.mark.parametrize("end", ["lose", "close"])
def test_those_that_wait_learn_of_a_lost_node_and_of_the_end(end: str) -> None:
    router = Router({"a": 1, "b": 1}, _AT_ONCE)
    with ThreadPoolExecutor(2) as threads, router.lease(Wanted(node="a")):

        def wait() -> None:
            with router.lease(Wanted(node="a")):
                pass

        waiter = threads.submit(wait)
        while not router.state().waiting:
            threading.Event().wait(0.001)
        if end == "lose":
            router.lose("a", "killed")
        else:
            router.close()
        with pytest.raises(NodeLost if end == "lose" else ClosedError):
            waiter.result(60)


def test_with_every_node_lost_no_call_waits() -> None:
    made = dispatch(FakeNode("a", ["dies_before"]))
    with pytest.raises(OutcomeUnknown):
        made.run(program(1), _ANY)
    with pytest.raises(NodeLost, match="every node"):
        made.run(program(1), _ANY)
