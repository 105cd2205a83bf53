"""The id of root's cells: never root's, always one that is mapped here."""

import subprocess
import sys

import pytest

from cellwright import HostSettings, LaunchError, PolicyError, Sandbox
from cellwright.runner.host.ids import choose_id, id_for
from tests.conftest import ROOT

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


@pytest.mark.needs("root")
def test_a_name_has_the_same_id_in_every_process() -> None:
    code = "from cellwright.runner.host.ids import id_for; print(id_for(sys.argv[1]), id_for(None))"
    said = [
        subprocess.run(
            (sys.executable, "-c", f"import sys; {code}", name), cwd=ROOT, capture_output=True,
            text=True, check=True,
        ).stdout.split()
        for name in ("a", "a", "b")
    ]  # fmt: skip
    assert said[0][0] == said[1][0] == str(id_for("a"))
    assert said[0][0] != said[2][0]
    assert said[0][1] != said[1][1]


@pytest.mark.parametrize("user", [0, -1, True, "", 1.5, b"a"])
def test_a_user_that_makes_no_sense_is_refused(user: object) -> None:
    with pytest.raises(PolicyError, match="user: must be a number above 0 or a name"):
        Sandbox(pool=0, host=HostSettings(user=user))  # type: ignore[arg-type]
