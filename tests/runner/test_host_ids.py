"""The id of root's cells: never root's, always one that is mapped here."""

import pytest

from cellwright import LaunchError
from cellwright.runner.host.ids import choose_id

WHOLE = "         0          0 4294967295\n"
SOME = "0 100000 65536\n"


@pytest.mark.parametrize(
    ("maps", "chosen"),
    [
        ((WHOLE, WHOLE), 0x70000000 + 4097),
        ((SOME, SOME), 65535 - 2 - 1),
        ((SOME, "0 100000 1000\n"), 996),
        (("0 1000 1\n1 100000 500\n",) * 2, 497),
        (("0 1000 2\n",) * 2, 1),
    ],
    ids=["the host", "a container", "fewer groups", "two ranges", "two ids"],
)
def test_the_id_of_cells_is_one_that_the_maps_have(maps: tuple[str, str], chosen: int) -> None:
    assert choose_id(4097, maps) == chosen


def test_cells_never_have_roots_id() -> None:
    with pytest.raises(LaunchError):
        choose_id(4097, ("0 1000 1\n", "0 1000 1\n"))
