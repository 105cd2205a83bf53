"""The choice of a node: by free slots, and by set of packages."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.harness.fleet.router import NodeLoad, Router, RouterLimits, Wanted, chosen

PANDAS, NUMPY = frozenset({"pandas==2.*"}), frozenset({"numpy"})
_sets = st.sampled_from([frozenset[str](), PANDAS, NUMPY])
_loads = st.lists(
    st.builds(
        lambda free, packages: (free, packages),
        st.integers(-2, 9),
        st.frozensets(st.sampled_from([PANDAS, NUMPY])),
    ),
    max_size=6,
)


@given(_loads, _sets, st.randoms(use_true_random=False))
def test_a_node_is_chosen_if_one_is_free_and_first_one_with_the_packages(
    given: list[tuple[int, frozenset[frozenset[str]]]],
    packages: frozenset[str],
    chance: random.Random,
) -> None:
    nodes = {str(number): NodeLoad(str(number), *each) for number, each in enumerate(given)}
    name = chosen(list(nodes.values()), packages, chance)
    free = [node for node in nodes.values() if node.free > 0]
    if name is None:
        assert not free
        return
    assert nodes[name].free > 0
    if packages and any(packages in node.packages for node in free):
        assert packages in nodes[name].packages
    if len(free) > 1 and not packages:  # the worse of two is never taken
        worst = min(node.free for node in free)
        assert nodes[name].free > worst or sum(node.free == worst for node in free) > 1


def test_two_choices_keep_nodes_even_where_one_would_not() -> None:
    """The best of two beats one choice by far, with 1,000 calls on 50 nodes that never end."""

    def longest(choices: int) -> int:
        chance, free = random.Random(5), dict.fromkeys(map(str, range(50)), 1000)
        for _ in range(1000):
            names = chance.sample(sorted(free), choices)
            name = chosen([NodeLoad(each, free[each]) for each in names], frozenset(), chance)
            assert name
            free[name] -= 1
        return 1000 - min(free.values())

    assert longest(50) <= 24 < longest(1)


def test_calls_with_packages_go_back_to_the_node_that_has_them_while_it_has_room() -> None:
    router = Router({"a": 2, "b": 2, "c": 2}, RouterLimits(), random.Random(2))
    with router.lease(Wanted(PANDAS)) as first:
        router.note_packages(first, PANDAS)
    seen: Counter[str] = Counter()
    for _ in range(20):
        with router.lease(Wanted(PANDAS)) as name:
            seen[name] += 1
    assert seen == {first: 20}
    with (
        router.lease(Wanted(PANDAS)),
        router.lease(Wanted(PANDAS)),
        router.lease(Wanted(PANDAS)) as third,
    ):
        assert third != first


def test_a_node_that_is_wanted_is_the_only_choice() -> None:
    router = Router({"a": 1, "b": 8}, RouterLimits(queue_seconds=0.001))
    with router.lease(Wanted(node="a")) as name:
        assert name == "a"
        with pytest.raises(Exception, match="no cell was free"), router.lease(Wanted(node="a")):
            pass
