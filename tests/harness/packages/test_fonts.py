"""matplotlib's list of fonts is part of a set, so that no cell looks for fonts of the host.

The wheel here looks for its list as matplotlib does; scripts/prove-packages plots with the real one.
"""

from pathlib import Path

import pytest

from cellwright import HostSettings, Policy, Sandbox
from cellwright.policies.policy import Packages
from tests.conftest import OPTIONAL
from tests.harness.packages.wheels import good_wheel, store_at

pytestmark = pytest.mark.needs("userns")
MANAGER = """
import os
path = os.path.join(os.environ["MPLCONFIGDIR"], "fontlist-v1.2.0.json")
try:
    found = open(path).read()
except FileNotFoundError:
    try:
        os.listdir("/usr/share/fonts")
    except OSError:
        pass
    with open(path, "w") as file:
        file.write({content})
    found = "searched"
"""
LISTS = "import os\n[name for name in os.listdir('/tmp') if name.endswith('.json')]"
LOOK = "import matplotlib.font_manager as m\nm.found"


def sandbox_with(tmp_path: Path, manager: str, *preload: str) -> Sandbox:
    (tmp_path / "wheels").mkdir(exist_ok=True)
    files = {"matplotlib/__init__.py": b"", "matplotlib/font_manager.py": manager.encode()}
    good_wheel(tmp_path / "wheels", files, name="matplotlib")
    policy = Policy(packages=Packages(preload=preload), optional_layers=OPTIONAL)
    store = store_at(tmp_path / "store", tmp_path / "wheels")
    return Sandbox(
        policy=policy, packages=["matplotlib"], pool=0, host=HostSettings(package_store=store)
    )


@pytest.mark.parametrize("preload", [(), ("matplotlib.font_manager",)], ids=["in cells", "ahead"])
def test_no_cell_looks_for_fonts(preload: tuple[str, ...], tmp_path: Path) -> None:
    with sandbox_with(tmp_path, MANAGER.format(content="'the list'"), *preload) as box:
        for _ in range(2):
            result = box.execute(LOOK)
            assert (result.value, result.violations, result.files) == ("the list", (), ()), result


def test_a_program_cannot_change_the_list_of_its_set(tmp_path: Path) -> None:
    path = "/tmp/fontlist-v1.2.0.json"
    with sandbox_with(tmp_path, MANAGER.format(content="'the list'")) as box:
        for attempt in (f"open({path!r}, 'a')", f"import os; os.remove({path!r})"):
            assert "Error: [Errno" in str(box.execute(attempt).error)
        assert box.execute(LOOK).value == "the list"


@pytest.mark.parametrize(
    "manager",
    ["raise ImportError", MANAGER.format(content="'x' * (5 << 20)"), "import os; os._exit(3)"],
    ids=["not imported", "too large", "exits"],
)
def test_a_set_without_a_usable_list_is_built_all_the_same(manager: str, tmp_path: Path) -> None:
    with sandbox_with(tmp_path, manager) as box:
        assert box.execute("import matplotlib").ok
        assert box.execute(LISTS).value == []


def test_only_a_list_of_fonts_is_shown(tmp_path: Path) -> None:
    """A wheel may bring a directory of that name."""
    (tmp_path / "wheels").mkdir()
    files = {"__fonts__/cell.json": b"", "__fonts__/fontlist-v1.json": b"of the wheel", "a.py": b""}
    good_wheel(tmp_path / "wheels", files)
    store = store_at(tmp_path / "store", tmp_path / "wheels")
    policy = Policy(optional_layers=OPTIONAL)
    with Sandbox(
        policy=policy, packages=["thing"], pool=0, host=HostSettings(package_store=store)
    ) as box:
        assert box.execute(LISTS).value == ["fontlist-v1.json"]
