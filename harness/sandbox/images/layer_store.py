"""`LayerStore`: the layers of a store of images, and its locks; `image_store.py` describes files."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ....policies.errors import PolicyError
from ....runner.host.image_ids import ImageIds
from ...user_data import make_private_directory, replace_file
from .image_sources import FoundImage, LayerBlob
from .layer_work import ImageLimits, empty, write_layer


class KeptLayer(msgspec.Struct, frozen=True):
    """The size of a layer."""

    size_bytes: int
    members: int


class LayerStore:
    """The layers below one directory, whose files belong to `ids`; `top` is above it.

    Methods that make layers need `imports`, those that remove them `removals`.
    """

    def __init__(self, top: Path, ids: ImageIds) -> None:
        self._top = top
        self.place = top / ids.name
        self.ids = ids

    def layer(self, blob: LayerBlob, limits: ImageLimits) -> str:
        """Return the diff digest of a layer, which is unpacked if it is missing."""
        if blob.digest and (known := self.known_diff(blob.digest)):
            return known
        with self._made_root() as root:
            written = write_layer(root, blob.part, self.ids, limits)
            _check_blob(blob, written.blob)
            kept = KeptLayer(written.size_bytes, written.members)
            (root.parent / "layer.json").write_bytes(msgspec.json.encode(kept))
            with contextlib.suppress(OSError):  # another process has made it
                root.parent.rename(self.made("layers") / written.diff)
        replace_file(self.made("blobs") / written.blob, written.diff.encode())
        return written.diff

    def merge(self, found: FoundImage, place: Path, limits: ImageLimits) -> None:
        with self._made_root() as root:
            for blob in found.layers:
                written = write_layer(root, blob.part, self.ids, limits, merges=True)
                _check_blob(blob, written.blob)
                limits = less(limits, written.size_bytes, written.members)
            with contextlib.suppress(OSError):  # another process has made it
                root.rename(place)

    @contextlib.contextmanager
    def _made_root(self) -> Iterator[Path]:
        """Make a directory for the files of a layer, and remove what is left of it."""
        made = Path(tempfile.mkdtemp(prefix="layer-", dir=self.made("new")))
        root = made / "fs"
        try:
            root.mkdir()
            os.chmod(root, 0o755)  # noqa: S103 - as a root is; nobody reaches it from outside
            os.chown(root, *self.ids.root)
            yield root
        finally:
            if made.exists():
                self.discard(made)

    def kept_layer(self, diff: str) -> KeptLayer:
        try:
            data = (self.place / "layers" / diff / "layer.json").read_bytes()
        except FileNotFoundError:
            raise PolicyError(
                f"image: its layer {diff} is missing in the store",
                "remove the image, and import or pull it again",
            ) from None
        return msgspec.json.decode(data, type=KeptLayer)

    def known_diff(self, blob: str) -> str | None:
        """Return the layer that an archive with this digest was unpacked to, if it is here."""
        with contextlib.suppress(FileNotFoundError):
            diff = (self.place / "blobs" / blob).read_text()
            if (self.place / "layers" / diff).is_dir():
                return diff
        return None

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make a directory below the store, and remove it at the end."""
        new = self.made("new")
        made = Path(tempfile.mkdtemp(prefix="scratch-", dir=new))
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)

    def sweep(self, used: set[str]) -> None:
        """Remove the layers that are not `used`."""
        layers, blobs = self.made("layers"), self.made("blobs")
        for diff in set(os.listdir(layers)) - used:
            gone = self.made("new") / f"gone-{os.urandom(8).hex()}"
            (layers / diff).rename(gone)
            self.discard(gone)
        for blob in os.listdir(blobs):
            if self.known_diff(blob) is None:
                (blobs / blob).unlink()

    def discard(self, made: Path) -> None:
        """Remove a directory of new/, whose files belong to the ids of images."""
        if (made / "fs").is_dir():
            empty(made / "fs", self.ids)
            os.rmdir(made / "fs")  # rmtree would open it, and it can belong to another id
        shutil.rmtree(made, ignore_errors=True)

    def made(self, name: str) -> Path:
        make_private_directory(self._top, PolicyError)
        for each in (self.place, self.place / name):
            make_private_directory(each, PolicyError)
        os.chmod(self._top, 0o700)  # files with set-uid bits lie below
        return self.place / name

    @contextlib.contextmanager
    def imports(self) -> Iterator[None]:
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def removals(self) -> Iterator[None]:
        with self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        path = self.made("images").parent / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, kind)
            yield
        except BlockingIOError:
            raise PolicyError(
                "image: an image is being imported or removed", "try again when that has ended"
            ) from None
        finally:
            os.close(descriptor)


def _check_blob(blob: LayerBlob, found: str) -> None:
    if blob.digest and found != blob.digest:
        raise PolicyError(f"image: the layer sha256:{blob.digest} has another digest")


def less(limits: ImageLimits, size_bytes: int, members: int) -> ImageLimits:
    return ImageLimits(limits.total_bytes - size_bytes, limits.members - members, limits.seconds)
