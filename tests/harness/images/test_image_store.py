"""The store of images: what it finds and imports, shares and removes, and what it refuses."""

import glob
import gzip
import hashlib
import json
import os
import select
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cellwright import PolicyError
from cellwright.harness.sandbox.images.image_names import HUB, normalised
from cellwright.harness.sandbox.images.image_store import ImageStore
from cellwright.harness.sandbox.images.layer_work import ArchivePart, ImageLimits, write_layer
from cellwright.runner.host.image_ids import find_image_ids, one_id
from tests.conftest import ROOT
from tests.harness.images.layers import (
    DEVICE,
    DIRECTORY,
    HARD,
    LINK,
    PIPE,
    archive,
    config_of,
    digest,
    layout,
    member,
    saved,
)
from tests.runner.test_image_ids import command_of_user
from tests.runner.test_ordinary_user import PYTHON, readable

__all__ = ["readable"]  # a fixture
pytestmark = pytest.mark.needs("userns")
FILE = archive(member("etc/motd", b"hello"))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def layer_of(store: ImageStore, place: Path, *members: Any) -> Path:
    """Import one layer and return its directory."""
    place.write_bytes(archive(*members))
    return Path(store.find(place).layers[0])


def owner(path: Path) -> tuple[int, int]:
    """Return the owner of a file as the image has it."""
    status, (uid, gid) = path.lstat(), find_image_ids().root
    return status.st_uid - uid, status.st_gid - gid


def test_a_layer_keeps_modes_owners_times_and_links(store: ImageStore, tmp_path: Path) -> None:
    root = layer_of(
        store, tmp_path / "tar",
        member("./", type=DIRECTORY, mode=0o755),
        member("usr", type=DIRECTORY, mode=0o2751, uid=3, gid=4),
        member("usr/su", b"#!", mode=0o4755),
        member("usr/same", type=HARD, linkname="usr/su"),
        member("usr/own", b"1", uid=33, gid=65534, mode=0o600),
        member("usr/far", uid=1_000_000, gid=1 << 40),
        member("lib", type=LINK, linkname="usr/lib", uid=5),
    )  # fmt: skip
    assert stat.S_IMODE((root / "usr/su").stat().st_mode) == 0o4755
    assert stat.S_IMODE((root / "usr").stat().st_mode) == 0o2751
    assert (root / "usr/su").stat().st_ino == (root / "usr/same").stat().st_ino
    assert (root / "usr/su").stat().st_mtime == (root / "usr").stat().st_mtime == 1_000_000
    assert (root / "lib").readlink() == Path("usr/lib")
    if store.ids.kind != "one":
        assert [owner(root / name) for name in ("usr", "usr/own", "usr/far", "lib")] == [
            (3, 4), (33, 65534), (65534, 65534), (5, 0),
        ]  # fmt: skip


def test_other_users_reach_no_file_of_the_store(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir(mode=0o755)
    root = layer_of(store, tmp_path / "tar", member("su", b"#!/bin/sh\n", mode=0o4755))
    place = root.parent
    while place != tmp_path / "images":
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        place = place.parent
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_removed_files_are_those_of_overlayfs(store: ImageStore, tmp_path: Path) -> None:
    root = layer_of(
        store, tmp_path / "tar",
        member(".wh.gone"), member("opaque/.wh..wh..opq"), member("opaque/new", b"1"),
        member(".wh.replaced"), member("replaced/new", b"2"),
        member("kept", b"3"), member(".wh.kept"),
        member("also", type=DIRECTORY), member(".wh.also"),
        member(".wh..wh.plnk"),
    )  # fmt: skip
    gone = (root / "gone").lstat()
    assert stat.S_ISCHR(gone.st_mode)
    assert gone.st_rdev == 0
    for name in ("opaque", "replaced", "also"):
        assert os.getxattr(root / name, "user.overlay.opaque") == b"y"
    assert (root / "kept").read_bytes() == b"3"
    assert sorted(os.listdir(root)) == ["also", "gone", "kept", "opaque", "replaced"]


@pytest.mark.needs("root", "mount")
def test_the_kernel_lays_layers_over_each_other(store: ImageStore, tmp_path: Path) -> None:
    lower = archive(
        member("a/kept", b"1"),
        member("a/gone", b"2"),
        member("b/old", b"3"),
        member("su", mode=0o4755),
    )
    upper = archive(member("a/.wh.gone"), member("b/.wh..wh..opq"), member("b/new", b"4"))
    image = store.find(layout(tmp_path / "image", lower, upper))
    shown = tmp_path / "shown"
    shown.mkdir()
    lowers = ":".join(f"{number}" for number in range(len(image.layers)))
    links = tmp_path / "links"
    links.mkdir()
    for number, layer in enumerate(reversed(image.layers)):
        (links / str(number)).symlink_to(layer)
    command = f"mount -t overlay -o ro,userxattr,lowerdir={lowers} overlay {shown} && find {shown} -type f"
    done = subprocess.run(
        ("unshare", "-m", "sh", "-c", command),
        cwd=links,
        capture_output=True,
        text=True,
        check=True,
    )
    found = {str(Path(each).relative_to(shown)) for each in done.stdout.split()}
    assert found == {"a/kept", "b/new", "su"}


def test_devices_pipes_and_attributes_are_left_out(store: ImageStore, tmp_path: Path) -> None:
    root = layer_of(
        store, tmp_path / "tar",
        member("null", type=DEVICE, devmajor=1, devminor=3),
        member("whiteout", type=DEVICE, devmajor=0, devminor=0),
        member("pipe", type=PIPE),
        member(
            "ping", b"1",
            pax_headers={"SCHILY.xattr.security.capability": "x", "SCHILY.xattr.user.overlay.opaque": "y"},
        ),
    )  # fmt: skip
    assert os.listdir(root) == ["ping"]
    assert os.listxattr(root / "ping") == []


def test_a_name_need_not_be_utf_8(store: ImageStore, tmp_path: Path) -> None:
    root = layer_of(store, tmp_path / "tar", member("n\udcff\udcfe", b"1"), member("\u00e4", b"2"))
    assert sorted(os.listdir(os.fsencode(root))) == [b"n\xff\xfe", b"\xc3\xa4"]


def test_of_a_name_twice_the_last_one_counts(store: ImageStore, tmp_path: Path) -> None:
    root = layer_of(
        store, tmp_path / "tar",
        member("a", b"1"), member("a", b"2"), member("b/c", b"1"), member("b", b"file"),
        member("d", b"file"), member("d", type=DIRECTORY), member("d/e", b"3"),
        member("f", b"4"), member("f", type=HARD, linkname="f"),
    )  # fmt: skip
    found = {path.name: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert found == {"a": b"2", "b": b"file", "e": b"3", "f": b"4"}


HOSTILE: dict[str, tuple[list[Any], str]] = {
    "a name upwards": ([member("a/../../out", b"x")], "leads upwards"),
    "a file below a link out": (
        [member("l", type=LINK, linkname="/tmp"), member("l/out", b"x")], "'l' cannot be a directory: it is a link",
    ),
    "a file below a link inside": (
        [member("d/f"), member("l", type=LINK, linkname="d"), member("l/out", b"x")], "it is a link",
    ),
    "a file below a file": ([member("f", b"x"), member("f/out", b"x")], "'f' cannot be a directory"),
    "a hard link upwards": ([member("f", type=HARD, linkname="../../etc/passwd")], "leads upwards"),
    "a hard link outside": ([member("f", type=HARD, linkname="/etc/passwd")], "leads to no file of the layer"),
    "a hard link through a link": (
        [member("l", type=LINK, linkname="/etc"), member("f", type=HARD, linkname="l/passwd")], "it is a link",
    ),
    "a hard link to a directory": ([member("d/f"), member("h", type=HARD, linkname="d")], "leads to no file"),
    "a hard link to a whiteout": ([member(".wh.w"), member("h", type=HARD, linkname="w")], "leads to no file"),
    "a whiteout of ..": ([member("d/.wh...")], "no name of a file"),
    "a whiteout of .": ([member("d/.wh..")], "no name of a file"),
    "a whiteout of nothing": ([member(".wh.")], "no name of a file"),
    "a deep path": ([member("a/" * 101 + "f")], "more than 100 directories"),
    "a long name": ([member("n" * 300)], "File name too long"),
    "a sparse file": (
        [member("f", pax_headers={"GNU.sparse.realsize": "9223372036854775807"})], "sparse",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("members", "why"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_layer_is_refused(
    members: list[Any], why: str, store: ImageStore, tmp_path: Path
) -> None:
    with pytest.raises(PolicyError, match=why):
        layer_of(store, tmp_path / "tar", *members)
    assert not list((tmp_path / "images").glob("*/new/*"))
    assert not list((tmp_path / "images").glob("*/layers/*"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("limits", "data", "why"),
    [
        (ImageLimits(total_bytes=1000), archive(member("f", bytes(2000))), "more bytes than the limit"),
        (ImageLimits(members=3), archive(*(member(f"{n}") for n in range(4))), "more than 3 members"),
        (ImageLimits(seconds=0), FILE, "more than 0 seconds"),
        (
            ImageLimits(total_bytes=1 << 20, members=10), bytes(64 << 20), "expands to more bytes",
        ),
        (
            ImageLimits(total_bytes=1000), archive(*(member(f"{n}", bytes(400)) for n in range(3))),
            "more bytes than the limit",
        ),
    ],
    ids=["a file", "members", "seconds", "gzip", "files"],
)  # fmt: skip
def test_work_on_a_layer_is_bounded(
    limits: ImageLimits, data: bytes, why: str, tmp_path: Path
) -> None:
    image = layout(tmp_path / "image", data)
    with pytest.raises(PolicyError, match=why):
        ImageStore(tmp_path / "images", limits=limits).find(image)


def test_the_limits_are_those_of_all_layers_together(tmp_path: Path) -> None:
    layers = [archive(member(str(number), bytes(600))) for number in range(2)]
    image = layout(tmp_path / "image", *layers)
    with pytest.raises(PolicyError, match="more bytes than the limit"):
        ImageStore(tmp_path / "images", limits=ImageLimits(total_bytes=1000)).find(image)


def test_a_layout_a_saved_tar_and_a_plain_tar_are_imported(
    store: ImageStore, tmp_path: Path
) -> None:
    settings = {"Env": ["A=b"], "WorkingDir": "/srv", "User": "www", "Cmd": ["sh"],
                "Volumes": {"/data": {}}, "ExposedPorts": {"80/tcp": {}}, "Labels": None}  # fmt: skip
    by_layout = store.find(layout(tmp_path / "image", FILE, **settings))
    tar = tmp_path / "saved.tar"
    tar.write_bytes(saved(FILE, **settings))
    squeezed = tmp_path / "saved.tar.gz"
    squeezed.write_bytes(gzip.compress(tar.read_bytes()))
    plain = tmp_path / "plain.tar"
    plain.write_bytes(FILE)
    images = [store.find(each) for each in (tar, squeezed, plain)]
    assert images[0] == images[1] == by_layout
    assert images[2].layers == by_layout.layers
    assert by_layout.digest == digest(config_of(FILE, **settings))
    config = by_layout.config
    assert (config.env, config.working_dir, config.user, config.cmd) == (
        ("A=b",),
        "/srv",
        "www",
        ("sh",),
    )
    assert (config.volumes, config.exposed_ports, config.labels) == (("/data",), ("80/tcp",), {})


def test_a_directory_is_imported_again_once_it_changed(store: ImageStore, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/motd").write_text("one")
    os.link(tree / "etc/motd", tree / "same")
    (tree / "bin").symlink_to("usr/bin")
    os.mkfifo(tree / "pipe")
    first = store.find(tree)
    root = Path(first.layers[0])
    assert store.find(tree) == first
    assert (root / "etc/motd").stat().st_ino == (root / "same").stat().st_ino
    assert sorted(os.listdir(root)) == ["bin", "etc", "same"]
    assert owner(root / "etc") == (0, 0)
    (tree / "etc/motd").write_text("other")
    again = store.find(tree)
    assert (Path(again.layers[0]) / "same").read_text() == "other"


def test_layers_are_shared_and_an_equal_or_empty_one_is_shown_once(
    store: ImageStore, tmp_path: Path
) -> None:
    other = archive(member("other", b"1"))
    one = store.find(layout(tmp_path / "one", FILE, other))
    two = store.find(layout(tmp_path / "two", FILE, archive(), other, FILE))
    assert two.layers == (one.layers[1], one.layers[0])
    assert store.find(layout(tmp_path / "empty", archive())).layers != ()


def test_names_are_those_of_docker() -> None:
    told = {
        "debian": "debian:latest",
        "library/debian": "debian:latest",
        f"{HUB}/debian:12": "debian:12",
        f"index.{HUB}/library/debian:12": "debian:12",
        f"{HUB}/me/app:1": "me/app:1",
        "localhost:5000/app": "localhost:5000/app:latest",
        "registry.example.org/me/app@sha256:" + "a" * 64: "registry.example.org/me/app@sha256:"
        + "a" * 64,
    }
    assert normalised("debian")[:2] == (HUB, "library/debian")
    assert {name: normalised(name).full for name in told} == told
    for name in (
        "",
        "Debian",
        "a//b",
        "a:",
        "a:b:c",
        "a b",
        "../a",
        "a@sha256:1",
        "a\n",
        "-a",
        "a" * 300,
    ):
        with pytest.raises(PolicyError, match="invalid name"):
            normalised(name)


def test_an_image_is_found_by_name_and_digest_until_it_is_removed(
    store: ImageStore, tmp_path: Path
) -> None:
    path = layout(tmp_path / "image", FILE)
    image = store.import_(path, "debian")
    store.import_(path, "debian:12")
    for reference in ("debian", "library/debian:latest", image.digest, image.digest[7:19], path):
        assert store.find(reference).digest == image.digest
    assert store.list()[0].names == (
        "debian:12",
        "debian:latest",
    )
    store.remove("debian")
    assert store.find("debian:12").digest == image.digest
    with store.hold(image), pytest.raises(PolicyError, match="in use"):
        store.remove("debian:12")
    store.remove("debian:12")
    with pytest.raises(
        PolicyError, match=r"'debian:12' is not in the store\nhint: cellwright image pull"
    ):
        store.find("debian:12")
    assert not Path(image.layers[0]).exists()
    with pytest.raises(PolicyError, match="was removed"), store.hold(image):
        pass


def test_prune_removes_images_without_a_name_and_leftovers(
    store: ImageStore, tmp_path: Path
) -> None:
    named = store.import_(layout(tmp_path / "one", FILE), "one")
    nameless = store.find(layout(tmp_path / "two", FILE, archive(member("two", b"2", mode=0o4755))))
    (Path(named.layers[0]).parents[2] / "new" / "left" / "fs").mkdir(parents=True)
    assert store.prune() == (nameless.digest,)
    assert [each.digest for each in store.list()] == [named.digest]
    assert not list((tmp_path / "images").glob("*/new/*"))
    assert Path(named.layers[0]).exists()
    assert not Path(nameless.layers[1]).exists()


def test_an_image_without_a_layer_is_an_error_and_can_be_removed(
    store: ImageStore, tmp_path: Path
) -> None:
    image = store.import_(layout(tmp_path / "image", FILE), "one")
    shutil.rmtree(Path(image.layers[0]).parent)
    with pytest.raises(PolicyError, match="is missing in the store\nhint: remove the image"):
        store.find("one")
    store.remove("one")
    assert store.list() == ()
    assert store.import_(tmp_path / "image", "one").layers == image.layers


def test_two_imports_at_once_make_one_layer(store: ImageStore, tmp_path: Path) -> None:
    path = layout(tmp_path / "image", FILE)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(store.find(path).digest)) for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(list((tmp_path / "images").glob("*/layers/*"))) == 1


def test_an_image_grows_by_a_layer(store: ImageStore, tmp_path: Path) -> None:
    parent = store.import_(layout(tmp_path / "image", FILE, Env=["A=b"]), "base")
    upper = tmp_path / "upper.tar"
    upper.write_bytes(archive(member("etc/.wh.motd"), member("etc/new", b"1", mode=0o4755)))
    with open(upper, "rb") as file:
        made = store.add(file.fileno(), parent, parent.config, "made:1")
    assert made.names == ("made:1",)
    assert made.layers[0] == parent.layers[0]
    assert made.config == parent.config
    assert os.listdir(Path(made.layers[1]) / "etc") != []


def broken(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return what changes the manifest of a layout, with its digest."""

    def apply(place: Path) -> None:
        index = json.loads((place / "index.json").read_text())
        blobs = place / "blobs/sha256"
        manifest = json.loads((blobs / index["manifests"][0]["digest"][7:]).read_text())
        change(manifest)
        data = json.dumps(manifest).encode()
        (blobs / hashlib.sha256(data).hexdigest()).write_bytes(data)
        index["manifests"][0]["digest"] = digest(data)
        (place / "index.json").write_text(json.dumps(index))

    return apply


def swap_blobs(place: Path) -> None:
    for blob in (place / "blobs/sha256").iterdir():
        if blob.read_bytes()[:2] == b"\x1f\x8b":
            blob.write_bytes(gzip.compress(archive(member("evil", b"1"))))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (swap_blobs, "has another digest"),
        (broken(lambda told: told["layers"].extend(told["layers"] * 9999)), "has 10000 layers, more than 127"),
        (broken(lambda told: told["layers"].extend(told["layers"])), "configuration has 1 layers, it has 2"),
        (broken(lambda told: told["layers"][0].update(mediaType="x/tar+zstd")), "cannot be read"),
        (broken(lambda told: told["layers"][0].update(digest="sha256:../../x")), "must be sha256"),
        (broken(lambda told: told["layers"][0].update(digest="sha256:" + "0" * 64)), "No such file"),
        (broken(lambda told: told.update(layers=3)), "manifest is invalid"),
        (lambda place: (place / "index.json").write_text("[" * 100_000), "index.json is invalid"),
        (lambda place: (place / "index.json").write_bytes(bytes(5 << 20)), "larger than"),
        (lambda place: (place / "index.json").unlink(), "No such file"),
    ],
    ids=["digest", "10,000 layers", "two layers", "zstd", "path", "missing", "type", "deep", "large", "no index"],
)  # fmt: skip
def test_a_hostile_layout_is_refused(
    change: Callable[[Path], object], why: str, store: ImageStore, tmp_path: Path
) -> None:
    path = layout(tmp_path / "image", FILE)
    change(path)
    with pytest.raises(PolicyError, match=why):
        store.find(path)
    assert store.list() == ()


def test_a_configuration_with_another_layer_is_refused(store: ImageStore, tmp_path: Path) -> None:
    path = layout(tmp_path / "image", FILE, config=config_of(archive()))
    with pytest.raises(PolicyError, match="as its configuration says"):
        store.find(path)


def test_zstd_is_refused_by_its_first_bytes_too(store: ImageStore, tmp_path: Path) -> None:
    path = layout(tmp_path / "image", FILE, squeeze=lambda data: b"\x28\xb5\x2f\xfd" + data)
    with pytest.raises(PolicyError, match="zstd.*\nhint: copy the image with layers of gzip"):
        store.find(path)


ON_RAMFS = """
import sys
from pathlib import Path
from cellwright import PolicyError
from cellwright.harness.sandbox.images.image_store import ImageStore
store = ImageStore(Path(sys.argv[1], "images"))
print(len(store.find(sys.argv[2]).layers))
try:
    store.find(sys.argv[3])
except PolicyError as error:
    print(error.what)
"""


@pytest.mark.needs("root", "mount")
def test_without_user_attributes_an_opaque_directory_is_refused(tmp_path: Path) -> None:
    """ramfs has none."""
    place, plain, opaque = tmp_path / "ram", tmp_path / "plain.tar", tmp_path / "opaque.tar"
    place.mkdir()
    plain.write_bytes(archive(member("d/f"), member(".wh.gone")))
    opaque.write_bytes(archive(member("d/.wh..wh..opq")))
    mount = f'mount -t ramfs ram {place} && exec "$0" "$@"'
    command = (
        "unshare",
        "-m",
        "sh",
        "-c",
        mount,
        sys.executable,
        "-c",
        ON_RAMFS,
        place,
        plain,
        opaque,
    )
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT
    )
    count, error = done.stdout.splitlines()
    assert count == "1"
    assert "has no user extended attributes, which this layer needs; set XDG_STATE_HOME" in error


AS_USER = """
import json, os, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from cellwright.harness.sandbox.images.image_store import ImageStore
store = ImageStore(sys.argv[2])
image = store.find(sys.argv[3])
again = store.find(sys.argv[3]) == image
pruned = store.prune()
left = [str(each) for each in Path(sys.argv[2]).glob("*/*/*")]
print(json.dumps([store.ids.kind, again, len(image.layers), list(pruned) == [image.digest], left]))
"""


@pytest.mark.needs("root", "newuidmap", "setpriv", "mount")
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="no Python that every user may read")
@pytest.mark.parametrize("kind", ["subordinate", "one"])
def test_an_ordinary_user_imports_and_removes_what_belongs_to_others(
    kind: str, readable: Path, tmp_path: Path
) -> None:
    """Also where the root of the layer is closed to the user."""
    tar = readable / f"{kind}.tar"
    tar.write_bytes(
        archive(
            member("./", type=DIRECTORY, mode=0o700, uid=33),
            member("d", type=DIRECTORY, mode=0, uid=5, gid=5),
            member("d/e/su", b"1", mode=0o4755, uid=7),
            member(".wh.gone"),
            member("o/.wh..wh..opq"),
        )
    )
    place = readable / "home" / kind
    command = (*command_of_user(tmp_path, kind), "-I", "-c", AS_USER, readable, place, tar)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [kind, True, 1, True, []]


@pytest.mark.needs("root")
def test_the_process_that_unpacks_is_confined(store: ImageStore, tmp_path: Path) -> None:
    """More than a pipe holds is written to it, so it is in the middle of a file when the kernel is asked."""
    data = archive(member("large", bytes(1 << 20)), member("etc/motd", b"hello"))
    root = tmp_path / "root"
    root.mkdir()
    os.chown(root, *store.ids.root)
    read, write = os.pipe()
    part = ArchivePart(read, 0, -1, "it")
    thread = threading.Thread(target=write_layer, args=(root, part, store.ids, ImageLimits()))
    thread.start()
    os.set_blocking(write, False)
    with open(write, "wb", buffering=0):
        feed(write, data[: 1 << 19])
        (process,) = [each for each in children() if (each / "comm").read_text() == "image-layer\n"]
        lines = (process / "status").read_text().splitlines()
        status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        namespaces = [os.readlink(process / "ns" / kind) for kind in ("user", "net", "ipc")]
        shown = os.readlink(process / "root")
        feed(write, data[1 << 19 :])
    thread.join()
    os.close(read)
    assert status["Uid"] == status["Gid"] == [str(store.ids.root[0])] * 4
    assert (status["NoNewPrivs"], status["Seccomp"], status["Groups"]) == (["1"], ["2"], [])
    assert status["CapEff"] == status["CapPrm"] == ["000000000000001b"]  # over its files alone
    own = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("user", "net", "ipc")]
    assert not set(namespaces) & set(own)
    assert shown == str(root)
    assert (root / "etc/motd").read_bytes() == b"hello"


def feed(pipe: int, data: bytes) -> None:
    while data:
        assert select.select([], [pipe], [], 60)[1], "the store does not read the pipe"
        data = data[os.write(pipe, data) :]


def children() -> list[Path]:
    found = [Path(each).read_text().split() for each in glob.glob("/proc/self/task/*/children")]
    return [Path("/proc", pid) for pids in found for pid in pids]


def test_with_one_id_all_files_belong_to_it(tmp_path: Path) -> None:
    ids = one_id(os.geteuid(), os.getegid())
    store = ImageStore(tmp_path / "images", ids=ids)
    root = layer_of(store, tmp_path / "tar", member("f", b"1", uid=33, gid=44), member(".wh.gone"))
    for name in ("f", "gone"):
        assert (root / name).lstat().st_uid == os.geteuid()
    assert stat.S_ISCHR((root / "gone").lstat().st_mode)
