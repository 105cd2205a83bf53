"""Image layouts and tars as root file systems: what is well formed is unpacked, the rest refused."""

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from cellwright import PolicyError
from cellwright.harness.sandbox.containers.images import rootfs_of
from cellwright.harness.sandbox.images.layer_work import ArchivePart, ImageLimits, write_layer
from cellwright.runner.host.image_ids import one_id

pytestmark = pytest.mark.needs("userns")

Member = tuple[
    str, bytes | str | None, int
]  # a file's content, a link's target, or None: a directory


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def tar(*members: Member, hard: tuple[tuple[str, str], ...] = ()) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content, mode in members:
            made = tarfile.TarInfo(name)
            made.mode = mode
            if content is None:
                made.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                made.type, made.linkname = tarfile.SYMTYPE, content
            else:
                made.size = len(content)
            archive.addfile(made, io.BytesIO(content if isinstance(content, bytes) else b""))
        for name, target in hard:
            made = tarfile.TarInfo(name)
            made.type, made.linkname = tarfile.LNKTYPE, target
            archive.addfile(made)
    return packed.getvalue()


def unpacked(place: Path, *archives: bytes, limits: ImageLimits = ImageLimits()) -> Path:  # noqa: B008
    root = place / "root"
    root.mkdir(exist_ok=True)
    own = one_id(os.geteuid(), os.getegid())
    for number, data in enumerate(archives):
        path = place / f"{number}.tar"
        path.write_bytes(data)
        with open(path, "rb") as file:
            part = ArchivePart(file.fileno(), 0, len(data), "it")
            write_layer(root, part, own, limits, merges=True)
    return root


def layout(place: Path, *layers: bytes, kind: str = "tar+gzip", architecture: str = "") -> Path:
    blobs = place / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data), "mediaType": media_type}

    oci = "application/vnd.oci.image"
    told = [blob(gzip.compress(layer), f"{oci}.layer.v1.{kind}") for layer in layers]
    manifest = json.dumps({"schemaVersion": 2, "layers": told}).encode()
    image = blob(manifest, f"{oci}.manifest.v1+json")
    if architecture:
        image["platform"] = {"architecture": architecture, "os": "linux"}
    (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [image]}))
    (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return place


def test_a_tar_becomes_a_directory_once(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(
        tar(("usr/bin", None, 0o755), ("usr/bin/tool", b"#!", 0o4777), ("bin", "usr/bin", 0o777),
            ("etc/secret", b"x", 0o640), hard=(("usr/bin/same", "usr/bin/tool"),))
    )  # fmt: skip
    root = Path(rootfs_of(str(path)))
    assert rootfs_of(str(path)) == str(root)
    assert (root / "bin").readlink() == Path("usr/bin")
    assert (root / "bin/tool").read_bytes() == (root / "usr/bin/same").read_bytes() == b"#!"
    assert stat.S_IMODE((root / "usr/bin/tool").stat().st_mode) == 0o755  # not set-uid
    assert stat.S_IMODE((root / "etc/secret").stat().st_mode) == 0o640
    assert stat.S_IMODE(root.parent.stat().st_mode) == 0o700


def test_layers_lie_over_each_other(tmp_path: Path) -> None:
    lower = tar(
        ("a/kept", b"1", 0o644),
        ("a/gone", b"2", 0o644),
        ("b/old", b"3", 0o644),
        ("lib", "a", 0o777),
    )
    upper = tar(("a/.wh.gone", b"", 0o644), ("b/.wh..wh..opq", b"", 0o644), ("b/new", b"4", 0o644),
                ("lib/beside", b"5", 0o644))  # fmt: skip
    root = Path(rootfs_of(str(layout(tmp_path / "image", lower, upper))))
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert found == {"a/kept", "a/beside", "b/new"}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("../out", b"x", 0o644)], "a name leads upwards"),
        ([("a/../../out", b"x", 0o644)], "a name leads upwards"),
        ([("link", "/tmp", 0o777), ("link/out", b"x", 0o644)], "'link' cannot be a directory"),
        ([("link", "../..", 0o777), ("link/out", b"x", 0o644)], "'link' cannot be a directory"),
        ([("file", b"x", 0o644), ("file/inner", b"x", 0o644)], "'file' cannot be a directory"),
    ],
)
def test_no_name_leads_out(members: list[Member], message: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=message):
        unpacked(tmp_path, tar(*members))
    assert not (tmp_path / "out").exists()
    assert not Path("/tmp/out").exists()


def test_a_file_replaces_a_link_and_is_not_written_through_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    root = unpacked(tmp_path, tar(("f", str(outside), 0o777), ("f", b"new", 0o644)))
    assert (root / "f").read_bytes() == b"new"
    assert outside.read_text() == "untouched"


def test_a_hard_link_leads_to_a_file_of_the_archive(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("secret")
    for target in ("../outside", str(tmp_path / "outside")):
        with pytest.raises(PolicyError, match="image: it"):
            unpacked(tmp_path, tar(hard=(("f", target),)))


def test_devices_and_pipes_are_left_out(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, kind in (
            ("null", tarfile.CHRTYPE),
            ("sda", tarfile.BLKTYPE),
            ("p", tarfile.FIFOTYPE),
        ):
            made = tarfile.TarInfo(name)
            made.type = kind
            archive.addfile(made)
    assert os.listdir(unpacked(tmp_path, packed.getvalue())) == []


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (ImageLimits(total_bytes=1000), "more bytes than the limit"),
        (ImageLimits(members=2), "more than 2 members"),
        (ImageLimits(seconds=0), "more than 0 seconds"),
    ],
)
def test_work_on_an_archive_is_bounded(limits: ImageLimits, message: str, tmp_path: Path) -> None:
    data = tar(*((str(number), bytes(400), 0o644) for number in range(5)))
    with pytest.raises(PolicyError, match=message):
        unpacked(tmp_path, data, limits=limits)


def test_a_bomb_is_not_expanded(tmp_path: Path) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    with pytest.raises(PolicyError, match="expands to more bytes than the limit"):
        unpacked(tmp_path, bomb, limits=ImageLimits(total_bytes=1 << 20, members=10))


def test_empty_members_of_gzip_are_few(tmp_path: Path) -> None:
    """Each takes the time of many bytes, and none of the limit."""
    content = gzip.compress(tar(("a", b"1", 0o644)))
    many = gzip.compress(b"") * 1001
    with pytest.raises(PolicyError, match="members of its gzip are empty"):
        unpacked(tmp_path, many + content)
    assert (unpacked(tmp_path, many[:-1000] + content) / "a").read_bytes() == b"1"


def test_a_path_has_few_names(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="more than 100 directories"):
        unpacked(tmp_path, tar(("a/" * 101 + "f", b"1", 0o644)))


def test_a_large_file_is_whole_and_so_is_its_other_name(tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 5 + b"end"
    root = unpacked(tmp_path, tar(("a", content, 0o644), hard=(("b", "a"),)))
    assert (root / "a").read_bytes() == (root / "b").read_bytes() == content
    assert (root / "a").stat().st_nlink == 2


def deep_tree(*after: Member) -> bytes:
    """Make a tree of 1,500 levels out of paths of few names, by links to where the last one ended."""
    members: list[Member] = []
    for number in range(20):
        at = f"l{number}/" if number else ""
        members.append((at + "a/" * 75 + "f", b"x", 0o644))
        members.append((f"l{number + 1}", at + "a/" * 74 + "a", 0o777))
    return tar(*members, *after)


def test_a_deep_tree_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="leads upwards"):
        rootfs_of(str(layout(tmp_path / "image", deep_tree(("../out", b"", 0o644)))))
    (store,) = (tmp_path / "state" / "cellwright" / "images").iterdir()
    assert [*(store / "new").iterdir(), *(store / "merged").iterdir()] == []


def test_a_file_takes_the_place_of_a_deep_tree(tmp_path: Path) -> None:
    root = unpacked(tmp_path, deep_tree(), tar(("a", b"1", 0o644)))
    assert (root / "a").read_bytes() == b"1"


def test_a_layer_that_was_changed_is_refused(tmp_path: Path) -> None:
    image = layout(tmp_path / "image", tar(("a", b"1", 0o644)))
    for blob in (image / "blobs/sha256").iterdir():
        if blob.read_bytes()[:2] == b"\x1f\x8b":
            blob.write_bytes(gzip.compress(tar(("a", b"2", 0o644))))
    with pytest.raises(PolicyError, match="has another digest"):
        rootfs_of(str(image))
    assert not list((tmp_path / "state/cellwright/images").glob("*/merged/*"))


def test_a_layout_must_have_one_image_for_this_machine(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="0 images of the index are for linux/"):
        rootfs_of(str(layout(tmp_path / "image", tar(), architecture="s390x")))


def test_a_layer_in_zstd_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="skopeo copy --dest-compress-format gzip"):
        rootfs_of(str(layout(tmp_path / "image", tar(), kind="tar+zstd")))


@pytest.mark.parametrize(
    "index",
    ["", "[]", "{}", '{"manifests": [{"digest": "sha256:../../etc", "size": 1}]}', "[" * 100_000],
)
def test_an_invalid_index_is_refused(index: str, tmp_path: Path) -> None:
    image = layout(tmp_path / "image", tar())
    (image / "index.json").write_text(index)
    with pytest.raises(PolicyError, match="rootfs: "):
        rootfs_of(str(image))


@pytest.mark.parametrize("data", [b"", b"no tar at all" * 100, b"\x1f\x8bbroken"])
def test_what_is_no_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(data)
    with pytest.raises(PolicyError, match="rootfs: "):
        rootfs_of(str(path))
