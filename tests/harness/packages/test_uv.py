"""Locks by uv: those that pip makes, from where pip looks, and nothing is built or started."""

import os
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cellwright import PackageError, PackageStore
from cellwright.harness.sandbox.packages import resolution
from cellwright.harness.sandbox.packages.lock import Lock
from cellwright.harness.sandbox.packages.package_sources import (
    PipSettings,
    WheelSource,
    settings_of_pip,
)
from cellwright.harness.sandbox.packages.resolution import can_resolve, find_uv, resolve
from cellwright.harness.sandbox.pythons import this_python
from tests.conftest import OPTIONAL
from tests.harness.packages.wheels import good_wheel
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


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(wheels: Path, tmp_path: Path) -> Iterator[str]:
    """The address of an index that has the wheels of the folder, and source distributions."""
    index_of(wheels, tmp_path / "index")
    serve = partial(Quiet, directory=os.fspath(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/index"
        finally:
            server.shutdown()
            thread.join()


def index_of(wheels: Path, place: Path) -> str:
    """Make an index that has the wheels of a folder, and return its address."""
    for wheel in (*wheels.glob("*.whl"), *wheels.glob("*.tar.gz")):
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
        patch.setattr(resolution, "find_uv", lambda: "")
        return by_uv, resolve(lines, source, this_python())


@pytest.mark.parametrize("resolver", ["uv"], indirect=True)
def test_both_make_the_same_lock(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_uv()
    lines = ["top", "elsewhere", "native", "other==1.*"]
    by_uv, by_pip = lock_of_both(lines, WheelSource(index_url=index), monkeypatch)
    assert by_uv == by_pip
    assert str(by_uv) == "elsewhere 1.0, native 1.0, other 1.0, thing 1.0, top 1.0"
    assert "manylinux" in by_uv.wheels[1].filename


@BOTH
def test_settings_of_pip_hold(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resolver: str
) -> None:
    settings = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("UV_INDEX_URL", "https://127.0.0.1:9/")
    pip_conf(settings, f"[global]\nindex-url = {index}\n")
    assert str(resolve(["thing"], WheelSource(), this_python())) == "thing 1.0"
    (tmp_path / "empty").mkdir()
    empty = WheelSource(index_url=index.replace("/index", "/empty"))
    with pytest.raises(PackageError, match=f"^{resolver}: .*thing"):
        resolve(["thing"], empty, this_python())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(PackageError, match=f"^{resolver}: .*thing"):
        resolve(["thing"], WheelSource(index_url=index), this_python())


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
def test_nothing_is_built(asked: str, wheels: Path, tmp_path: Path, index: str) -> None:
    ran, tree = tmp_path / "ran", tmp_path / "evil-1.0"
    tree.mkdir()
    (tree / "setup.py").write_text(f"open({str(ran)!r}, 'w')\n")
    with tarfile.open(wheels / "evil-1.0.tar.gz", "w:gz") as archive:
        archive.add(tree, "evil-1.0")
    address = {"address": (wheels / "evil-1.0.tar.gz").as_uri(), "repository": f"git+file://{tree}"}
    if asked in address:
        good_wheel(wheels, {}, name="wants", requires=f"evil @ {address[asked]}")
    index_of(wheels, tmp_path / "index")
    with pytest.raises(PackageError) as refused:
        resolve(
            ["evil" if asked == "named" else "wants"], WheelSource(index_url=index), this_python()
        )
    assert not ran.exists()
    if asked == "named":
        assert "build a wheel where you trust it" in refused.value.hint


@BOTH
@pytest.mark.needs("userns")
def test_a_set_is_made_and_used(index: str, tmp_path: Path) -> None:
    store = PackageStore(tmp_path / "store", index_url=index, optional_layers=OPTIONAL)
    with store.open(["thing"]) as opened:
        assert opened.made.lock.wheels[0].name == "thing"


@pytest.mark.parametrize("resolver", ["uv"], indirect=True)
@pytest.mark.parametrize("place", ["folder", "settings", "index"])
def test_wheels_of_this_host_are_not_unpacked_on_it(
    place: str, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv would unpack the whole wheel, to read its metadata."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if place == "folder":
        source = WheelSource(str(wheels), index=False)
    elif place == "settings":
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        source = WheelSource()
    else:
        source = WheelSource(index_url=index_of(wheels, tmp_path / "index"))
    assert not can_resolve(["native"], source)
    assert str(resolve(["native"], source, this_python())) == "native 1.0"
    assert not [*(tmp_path / "cache").rglob("native.py")]


@pytest.mark.parametrize("resolver", ["uv"], indirect=True)
def test_uv_keeps_nothing(index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert can_resolve(["thing"], WheelSource(index_url=index))
    resolve(["thing"], WheelSource(index_url=index), this_python())
    assert not (tmp_path / "home").exists()


def test_what_uv_cannot_follow_is_left_to_pip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    pip_conf(settings, "")
    source = WheelSource()
    assert can_resolve(["thing"], source)
    assert not can_resolve([f"thing --hash=sha256:{'0' * 64}"], source)
    pip_conf(settings, "[install]\nconstraint = /srv/c.txt\n")
    assert not can_resolve(["thing"], source)
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
