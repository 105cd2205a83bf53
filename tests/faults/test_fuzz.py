"""Every party that reads what another wrote, for some thousand cases; `scripts/fuzz` has a million."""

from tests.faults.frames import changed, places
from tests.faults.fuzz import PARTIES, fuzz


def test_each_party_ends_as_it_promises_and_keeps_nothing() -> None:
    came = fuzz(seed=20_261_121, cases=20_000)
    for name in PARTIES:
        assert len(came[name]) >= 2, name  # some of it is taken, and some refused
    assert min(came["supervisor, of guests"].values()) > 10


def test_a_mutation_changes_one_place_of_a_frame() -> None:
    tree = ["Finished", {"a": [1, 2]}, None]
    assert places(tree) == [(), (0,), (1,), (1, "a"), (1, "a", 0), (1, "a", 1), (2,)]
    assert changed(tree, (1, "a", 0), 7) == ["Finished", {"a": [7, 2]}, None]
    assert tree[1] == {"a": [1, 2]}
