"""Locks by uv: those that pip makes, from where pip looks, and nothing is built or started."""

import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cellwright import PackageError, PackageStore
from cellwright.harness.sandbox.packages import resolving
from cellwright.harness.sandbox.packages.lock import Lock
from cellwright.harness.sandbox.packages.pip_settings import PipSettings, settings_of_pip
from cellwright.harness.sandbox.packages.resolving import resolve
from cellwright.harness.sandbox.packages.sources import WheelSource
from cellwright.harness.sandbox.packages.uv import can_resolve, find_uv
from cellwright.harness.sandbox.pythons import this_python
from tests.harness.packages.wheels import good_wheel, store_at
from tests.host_settings import pip_conf

BOTH = pytest.mark.parametrize("resolver", ["uv", "pip"], indirect=True)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder of wheels: versions, requirements with markers and extras, and platforms."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name in ("thing", "other", "extra", "never"):
        good_wheel(folder, {f"{name}.py": b""}, name=name)
    good_wheel(folder, {}, name="top", requires="thing[more]>=0.5; python_version >= '3'")
    good_wheel(folder, {}, name="elsewhere", requires="never; sys_platform == 'win32'")
    plain = good_wheel(folder, {"native.py": b"plain = 1"}, name="native")
    fitting = folder / f"native-1.0-{tag}-none-manylinux_2_17_x86_64.whl"
    fitting.write_bytes(plain.read_bytes())
    (folder / f"native-1.0-{tag}-none-macosx_11_0_arm64.whl").write_bytes(plain.read_bytes())
    return folder


def index_of(wheels: Path, place: Path) -> str:
    """Return the address of an index that has the wheels of a folder."""
    for wheel in wheels.glob("*.whl"):
        folder = place / wheel.name.partition("-")[0]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        with (folder / "index.html").open("a") as file:
            file.write(f"<a href='{wheel.name}'>{wheel.name}</a>\n")
    return place.as_uri()


def lock_of_both(
    lines: list[str], source: WheelSource, monkeypatch: pytest.MonkeyPatch
) -> tuple[Lock, Lock]:
    by_uv = resolve(lines, source, this_python())
    with monkeypatch.context() as patch:
        patch.setattr(resolving, "find_uv", lambda: "")
        return by_uv, resolve(lines, source, this_python())


@pytest.mark.parametrize("resolver", ["uv"], indirect=True)
def test_both_make_the_same_lock(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_uv()
    lines = ["top", "elsewhere", "native", "other==1.*"]
    folder = WheelSource(str(wheels), index=False)
    by_uv, by_pip = lock_of_both(lines, folder, monkeypatch)
    assert by_uv == by_pip
    assert str(by_uv) == "elsewhere 1.0, native 1.0, other 1.0, thing 1.0, top 1.0"
    assert "manylinux" in by_uv.wheels[1].filename
    index = WheelSource(index_url=index_of(wheels, tmp_path / "index"))
    by_uv, by_pip = lock_of_both(lines, index, monkeypatch)
    assert by_uv == by_pip


@BOTH
def test_settings_of_pip_hold(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resolver: str
) -> None:
    settings = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("UV_INDEX_URL", "https://127.0.0.1:9/")
    pip_conf(settings, f"[global]\nindex-url = {index_of(wheels, tmp_path / 'index')}\n")
    assert str(resolve(["thing"], WheelSource(), this_python())) == "thing 1.0"
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(PackageError, match=f"^{resolver}: .*thing"):
        resolve(["thing"], WheelSource(index_url=empty.as_uri()), this_python())


@BOTH
def test_without_an_index_only_the_folder_is_asked(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "more"
    elsewhere.mkdir()
    good_wheel(elsewhere, {}, name="hidden")
    monkeypatch.setenv("PIP_FIND_LINKS", str(elsewhere))
    monkeypatch.setenv("UV_FIND_LINKS", str(elsewhere))
    with pytest.raises(PackageError, match="hidden"):
        resolve(["hidden"], WheelSource(str(wheels), index=False), this_python())


@BOTH
@pytest.mark.parametrize("asked", ["named", "address", "repository"])
def test_nothing_is_built(asked: str, wheels: Path, tmp_path: Path) -> None:
    ran, tree = tmp_path / "ran", tmp_path / "evil-1.0"
    tree.mkdir()
    (tree / "setup.py").write_text(f"open({str(ran)!r}, 'w')\n")
    with tarfile.open(wheels / "evil-1.0.tar.gz", "w:gz") as archive:
        archive.add(tree, "evil-1.0")
    address = {"address": (wheels / "evil-1.0.tar.gz").as_uri(), "repository": f"git+file://{tree}"}
    if asked in address:
        good_wheel(wheels, {}, name="wants", requires=f"evil @ {address[asked]}")
    with pytest.raises(PackageError) as refused:
        resolve(
            ["evil" if asked == "named" else "wants"], WheelSource(str(wheels), index=False),
            this_python(),
        )  # fmt: skip
    assert not ran.exists()
    if asked == "named":
        assert "build a wheel where you trust it" in refused.value.hint


@BOTH
@pytest.mark.needs("userns")
def test_a_set_is_made_and_used(wheels: Path, tmp_path: Path) -> None:
    store: PackageStore = store_at(tmp_path / "store", wheels)
    with store.open(["thing"]) as opened:
        assert opened.made.lock.wheels[0].name == "thing"


def test_what_uv_cannot_follow_is_left_to_pip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    source, alone = WheelSource(), WheelSource("/srv", index=False)
    assert not can_resolve([f"thing --hash=sha256:{'0' * 64}"], alone)
    pip_conf(settings, "[install]\nconstraint = /srv/c.txt\n")
    assert not can_resolve(["thing"], source)
    assert can_resolve(["thing"], alone)
    settings.write_text("[global\n")
    assert not can_resolve(["thing"], source)
    pip_conf(settings, "[list]\nconstraint = 1\n[global]\ntimeout = 5\nconstraint =\n")
    assert can_resolve(["thing"], source)


def test_settings_of_pip_are_read_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "pip.conf"
    pip_conf(
        path,
        "[install]\nno-index = yes\nindex_url = https://b/\n"
        "[global]\nindex-url = https://a/\nextra-index-url = https://c/\n   https://d/\n",
    )
    nowhere = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path)}
    found = settings_of_pip(
        {**nowhere, "PIP_CONFIG_FILE": str(path), "PIP_CERT": "/c", "PIP_PRE": "1"}
    )
    assert (found.index_url, found.extra_index_urls) == ("https://b/", ("https://c/", "https://d/"))
    assert (found.no_index, found.cert, found.others) == (True, "/c", ("pre",))
    assert settings_of_pip({"PIP_CONFIG_FILE": "/dev/null"}) == PipSettings()


def test_without_the_extra_there_is_no_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    absent: Callable[[str], None] = lambda name: None  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", absent)
    assert find_uv() == ""
