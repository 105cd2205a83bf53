"""The changes of a cell in its image, the upper directory of an overlay, as the archive of a layer."""

import io
import os
import socket
import stat
import tarfile
from pathlib import Path

import pytest

from cellwright import PolicyError
from cellwright.harness.sandbox.images.image_store import ImageStore
from cellwright.harness.sandbox.images.layer_work import ImageLimits, archive_changes
from tests.harness.images.layers import archive, layout, member

pytestmark = pytest.mark.needs("root", "userns")
LIMITS = ImageLimits()


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    """An upper directory; what a test makes in it belongs to root, and then to root of the image."""
    made = tmp_path / "upper"
    made.mkdir(mode=0o755)
    return made


def written(upper: Path, store: ImageStore, limits: ImageLimits = LIMITS) -> bytes:
    uid, gid = store.ids.root
    for path in upper.rglob("*"):
        status = path.lstat()
        if status.st_uid < uid:  # not another name of a file that has its owner
            os.lchown(path, uid + status.st_uid, gid + status.st_gid)
            if not path.is_symlink():
                path.chmod(stat.S_IMODE(status.st_mode))
    os.chown(upper, *store.ids.root)
    directory = os.open(upper, os.O_RDONLY | os.O_DIRECTORY)
    out = os.memfd_create("archive")
    try:
        archive_changes(directory, out, store.ids, limits)
        return os.pread(out, 1 << 26, 0)
    finally:
        os.close(directory)
        os.close(out)


def told(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as made:
        return {each.name: each for each in made.getmembers()}


def test_changes_are_written_as_a_layer(store: ImageStore, upper: Path) -> None:
    os.mknod(upper / "gone", stat.S_IFCHR, 0)
    (upper / "opaque").mkdir()
    os.setxattr(upper / "opaque", "user.overlay.opaque", b"y")
    (upper / "opaque/new").write_bytes(b"1")
    (upper / "su").write_bytes(b"#!")
    (upper / "su").chmod(0o4755)
    os.link(upper / "su", upper / "same")
    (upper / "link").symlink_to("/etc/passwd")
    (upper / os.fsdecode(b"n\xff")).write_bytes(b"2")
    os.chown(upper / "link", 33, 44, follow_symlinks=False)
    found = told(written(upper, store))
    assert sorted(found) == sorted(
        [
            ".",
            ".wh.gone",
            "link",
            "n\udcff",
            "opaque",
            "opaque/.wh..wh..opq",
            "opaque/new",
            "same",
            "su",
        ]
    )
    assert (found["link"].type, found["link"].linkname) == (tarfile.SYMTYPE, "/etc/passwd")
    assert (found["link"].uid, found["link"].gid) == (33, 44)
    assert (found["su"].type, found["su"].linkname) == (tarfile.LNKTYPE, "same")
    assert (found["same"].mode, found["same"].uid) == (0o4755, 0)


def test_what_a_layer_cannot_have_is_left_out(store: ImageStore, upper: Path) -> None:
    """A guest that names a file as a whiteout removes nothing by it."""
    os.mknod(upper / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mkfifo(upper / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(upper / "socket"))
    (upper / ".wh.passwd").write_bytes(b"1")
    (upper / ".wh...").write_bytes(b"1")
    (upper / ".wh..wh..opq").mkdir()
    (upper / "kept").write_bytes(b"1")
    assert sorted(told(written(upper, store))) == [".", "kept"]


def test_content_that_lies_elsewhere_is_refused(store: ImageStore, upper: Path) -> None:
    (upper / "f").write_bytes(b"1")
    os.setxattr(upper / "f", "user.overlay.redirect", b"/etc/shadow")
    with pytest.raises(PolicyError, match="lies elsewhere"):
        written(upper, store)


@pytest.mark.parametrize(
    ("limits", "size", "why"),
    [
        (LIMITS._replace(total_bytes=1000), 400, "more than 1000 bytes"),
        (LIMITS, 1 << 42, "more than 17179869184 bytes"),  # sparse files
        (LIMITS._replace(members=3), 400, "more than 3 files"),
        (LIMITS._replace(seconds=0), 400, "more than 0 seconds"),
    ],
)
def test_work_on_changes_is_bounded(
    limits: ImageLimits, size: int, why: str, store: ImageStore, upper: Path
) -> None:
    for number in range(3):
        (upper / str(number)).touch()
        os.truncate(upper / str(number), size)
    with pytest.raises(PolicyError, match=why):
        written(upper, store, limits)


def test_a_deep_tree_is_refused(store: ImageStore, upper: Path) -> None:
    (upper / "/".join("d" * 102)).mkdir(parents=True)
    with pytest.raises(PolicyError, match="more than 100 levels"):
        written(upper, store)


def test_changes_become_a_layer_above_the_image(
    store: ImageStore, upper: Path, tmp_path: Path
) -> None:
    parent = store.import_(
        layout(tmp_path / "image", archive(member("etc/motd", b"old"), member("etc/gone", b"1"))),
        "base",
    )
    (upper / "etc").mkdir()
    (upper / "etc/motd").write_bytes(b"new")
    os.mknod(upper / "etc/gone", stat.S_IFCHR, 0)
    data = written(upper, store)
    again = written_layer(store, data, tmp_path / "tar")
    assert (again / "etc/motd").read_bytes() == b"new"
    assert stat.S_ISCHR((again / "etc/gone").lstat().st_mode)
    changes = os.open(upper, os.O_RDONLY | os.O_DIRECTORY)
    try:
        made = store.commit(changes, parent, parent.config, "made:1")
    finally:
        os.close(changes)
    assert made.layers == (*parent.layers, str(again))


def written_layer(store: ImageStore, data: bytes, place: Path) -> Path:
    place.write_bytes(data)
    return Path(store.find(place).layers[0])
