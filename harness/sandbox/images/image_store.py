"""`ImageStore`: images in a directory of the user, each layer unpacked once and shared by all images.

    IDS/layers/DIFF/fs           the files of a layer; DIFF is the sha256 of its uncompressed archive
    IDS/layers/DIFF/layer.json   its size
    IDS/blobs/DIGEST             the DIFF that an archive of this sha256 had
    IDS/images/DIGEST.json       an image: its configuration and layers
    IDS/builds/KEY               the image that a step of a build has made
    IDS/names.json               names of images, and the paths that images were imported from
    IDS/new/                     what is being made; renamed when it is whole

IDS is the name of the map of ids (`ImageIds`): the files of layers belong to ids of the map and have
set-uid bits, so the directory is open to its owner alone.  Imports hold the lock of the store shared,
removals hold it exclusively.  A process that dies leaves at most something below new/, which `prune`
removes; after a power failure files of a new layer can be empty, as nothing waits for the disk.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ....policies.errors import PolicyError
from ....runner.host.image_ids import ImageIds, find_image_ids
from ...user_data import locked, replace_file, state_directory
from .image import ImageConfig, StoredImage, config_of, read_config
from .image_names import normalised
from .image_registry import PullSettings, Registry
from .image_sources import (
    FoundImage,
    LayerBlob,
    image_of_tar,
    machine_here,
    open_file,
    opened_layout,
)
from .layer_store import LayerStore, less
from .layer_work import ArchivePart, ImageLimits, archive_changes, expand
from .plain_trees import opened_tree, stamp_of

_GZIP = b"\x1f\x8b"
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{12,64})", re.ASCII)
_PATH = re.compile(r"\.{0,2}/|\.{1,2}\Z")


class _KeptImage(msgspec.Struct, frozen=True):
    config: str
    diffs: tuple[str, ...]


class _ImportedPath(msgspec.Struct, frozen=True):
    stamp: str
    image: str


class _Names(msgspec.Struct, frozen=True):
    names: dict[str, str] = {}
    paths: dict[str, _ImportedPath] = {}


class ImageStore:
    """The images of one directory; a missing one is made, with access for its owner alone.

    `directory`: default `cellwright/images` in $XDG_STATE_HOME, else in ~/.local/state.  `ids`: the ids
    of files; default those of this user.  Safe from many threads and processes.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None = None, *, ids: ImageIds | None = None,
        limits: ImageLimits = ImageLimits(),  # noqa: B008
    ) -> None:  # fmt: skip
        self.ids = ids or find_image_ids()
        self.limits = limits
        self._layers = LayerStore(Path(directory or state_directory() / "images"), self.ids)
        self._place = self._layers.place

    def find(self, reference: str | os.PathLike[str]) -> StoredImage:
        """Return an image: by its name, its digest (or 12 digits of it), or the path of an OCI layout,
        a tar or a directory, which is imported when it is first used and after a change.

        A text that begins with / or . is a path.  Raises PolicyError for an unknown or malformed image,
        LaunchError.
        """
        if not isinstance(reference, str) or _PATH.match(reference):
            return self._of_path(os.path.abspath(reference))
        return self._image(self._known(reference))

    def import_(self, path: str | os.PathLike[str], name: str = "") -> StoredImage:
        """Import an OCI layout, a tar (of `docker save` or a plain one, also of gzip) or a directory.

        `name`: names the image; names that the archive tells are not taken.  Raises as `find`.
        """
        named = normalised(name).full if name else ""
        path = os.path.abspath(path)
        with self._layers.imports(), self._opened(path) as (found, stamp):
            digest = self._keep(found)
            self._change_names(named, digest, path, stamp)
        return self._image(digest)

    def add(
        self,
        archive: int,
        parent: StoredImage | None,
        config: ImageConfig,
        name: str = "",
        created: str = "",
    ) -> StoredImage:
        """Add an image of `parent` and one layer, the tar in the open file `archive`.

        Raises as `find`.
        """
        named = normalised(name).full if name else ""
        part = ArchivePart(archive, 0, os.fstat(archive).st_size, "the new layer")
        with self._layers.imports():
            diffs = self._kept(parent.digest.removeprefix("sha256:")).diffs if parent else ()
            diffs = (*diffs, self._layers.layer(LayerBlob("", part), self.limits))
            digest = self._describe(config, diffs, created)
            self._change_names(named, digest)
        return self._image(digest)

    def describe(
        self, parent: StoredImage, config: ImageConfig, name: str = "", created: str = ""
    ) -> StoredImage:
        """Add an image with the layers of `parent` and another configuration; raises as `find`."""
        named = normalised(name).full if name else ""
        with self._layers.imports():
            diffs = self._kept(parent.digest.removeprefix("sha256:")).diffs
            digest = self._describe(config, diffs, created)
            self._change_names(named, digest)
        return self._image(digest)

    @property
    def builds(self) -> Path:
        """The directory where builds remember what they have made: key -> digest of an image."""
        return self._layers.made("builds")

    def commit(
        self, changes: int, parent: StoredImage, config: ImageConfig, name: str = ""
    ) -> StoredImage:
        """Add an image of `parent` and what a cell has changed in it: the open upper directory of its
        overlay.  Raises as `find`."""
        with tempfile.TemporaryFile(dir=self._place) as archive:
            archive_changes(changes, archive.fileno(), self.ids, self.limits)
            return self.add(archive.fileno(), parent, config, name)

    def pull(
        self, name: str, settings: PullSettings = PullSettings(),  # noqa: B008
        say: Callable[[str], object] = lambda _: None,
    ) -> StoredImage:  # fmt: skip
        """Import the image that a registry has by this name, now; layers that are here are not sent.

        `say` is called with each step, for people.  Raises as `find`.
        """
        full = normalised(name)
        registry = Registry(full, settings, say)
        with (
            self._layers.imports(),
            self._layers.scratch() as place,
            contextlib.ExitStack() as opened,
        ):
            found = registry.fetch(place, self.limits.total_bytes, self._has_layer, opened)
            say("unpacking")
            digest = self._keep(found)
            self._change_names(full.full, digest)
        return self._image(digest)

    def _has_layer(self, blob: str) -> bool:
        return self._layers.known_diff(blob) is not None

    def merged(self, path: str | os.PathLike[str]) -> str:
        """Return a plain directory with the files of an OCI layout or a tar: its layers are merged,
        once, and all files belong to this user; `LayerWriter` says what is left out.

        Raises as `find`.
        """
        path = os.path.abspath(path)
        with self._layers.imports(), self._opened(path) as (found, _):
            told = [each.digest for each in found.layers]
            name = (
                _digest_of(path)
                if "" in told
                else hashlib.sha256("\n".join(told).encode()).hexdigest()
            )
            place = self._layers.made("merged") / name
            if not place.is_dir():
                self._layers.merge(found, place, self.limits)
        return str(place)

    def list(self) -> tuple[StoredImage, ...]:
        """Return all images, those with names first."""
        found = map(self._image, self._digests())
        return tuple(sorted(found, key=lambda each: (not each.names, each.names, each.digest)))

    @contextlib.contextmanager
    def hold(self, image: StoredImage) -> Iterator[None]:
        """Keep an image from being removed; raises PolicyError if it was removed."""
        try:
            held = os.open(
                self._record(image.digest.removeprefix("sha256:")), os.O_RDONLY | os.O_CLOEXEC
            )
        except FileNotFoundError:
            raise PolicyError(f"image: {image.digest} was removed") from None
        try:
            fcntl.flock(held, fcntl.LOCK_SH)
            if not os.fstat(held).st_nlink:
                raise PolicyError(f"image: {image.digest} was removed")
            yield
        finally:
            os.close(held)

    def remove(self, reference: str) -> None:
        """Remove a name, and the image with its last one; by digest, the image with all names.

        Raises PolicyError if it is unknown, or held.
        """
        digest = self._known(reference)
        with self._layers.removals():
            names = [name for name, image in self._names().names.items() if image == digest]
            name = "" if _DIGEST.fullmatch(reference) else normalised(reference).full
            if len(names) > 1 and name in names:
                self._drop_names(lambda each, _: each == name)
                return
            if not self._drop(digest):
                raise PolicyError(
                    f"image: {reference!a} is in use", "close the sandboxes that use it"
                )
            self._layers.sweep(self._used())

    def prune(self) -> tuple[str, ...]:
        """Remove images without a name that nobody holds, and leftovers of killed imports; return the
        digests."""
        with self._layers.removals():
            named = set(self._names().names.values())
            gone = [each for each in self._digests() if each not in named and self._drop(each)]
            self._layers.sweep(self._used())
            new = self._layers.made("new")
            for each in os.listdir(new):
                self._layers.discard(new / each)
            for kept in self.builds.iterdir():
                if kept.read_text().removeprefix("sha256:") in gone:
                    kept.unlink()
        return tuple(f"sha256:{each}" for each in gone)

    def _known(self, reference: str) -> str:
        """Return the digest of the image with this name or digest; raises PolicyError."""
        names = self._names().names
        if digest := names.get(reference):
            return digest
        if text := _DIGEST.fullmatch(reference):
            found = [each for each in self._digests() if each.startswith(text[1])]
            if len(found) == 1:
                return found[0]
        if digest := names.get(normalised(reference).full):
            return digest
        hint = f"cellwright image pull {reference}, or: cellwright image import PATH {reference}"
        if os.path.exists(reference):
            hint = f"for the path write ./{reference}"
        raise PolicyError(f"image: {reference!a} is not in the store", hint)

    def _of_path(self, path: str) -> StoredImage:
        if known := self._names().paths.get(path):
            with contextlib.suppress(FileNotFoundError):
                is_same = stamp_of(path, self.limits.members) == known.stamp
                if is_same and self._record(known.image).exists():
                    return self._image(known.image)
        return self.import_(path)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[tuple[FoundImage, str]]:
        """Open the image at a path; yield it with the stamp that the path has until it is changed."""
        try:
            stamp = stamp_of(path, self.limits.members)
        except OSError as error:
            raise PolicyError(f"image: {path}: {error.strerror}") from None
        with contextlib.ExitStack() as stack:
            if os.path.exists(os.path.join(path, "oci-layout")):
                yield stack.enter_context(opened_layout(path)), stamp
            elif os.path.isdir(path):
                yield stack.enter_context(opened_tree(path, self.limits)), stamp
            else:
                file = open_file(path)
                stack.callback(os.close, file)
                if os.pread(file, 2, 0) == _GZIP:
                    file = self._expanded(file, path, stack.enter_context(self._layers.scratch()))
                    stack.callback(os.close, file)
                yield image_of_tar(file, path), stamp

    def _expanded(self, file: int, path: str, scratch: Path) -> int:
        plain = os.open(scratch / "tar", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        root = scratch / "root"
        root.mkdir()
        os.chown(root, *self.ids.root)
        part = ArchivePart(file, 0, os.fstat(file).st_size, path)
        try:
            expand(part, plain, root, self.ids, self.limits)
        except BaseException:
            os.close(plain)
            raise
        return plain

    def _keep(self, found: FoundImage) -> str:
        """Unpack what is missing of an image, and write it down; return its digest."""
        config = None if found.config is None else read_config(found.config)
        wanted = None if config is None else config.rootfs.diff_ids
        if wanted is not None and len(wanted) != len(found.layers):
            raise PolicyError(
                f"image: its configuration has {len(wanted)} layers, it has {len(found.layers)}"
            )
        limits = self.limits
        diffs: tuple[str, ...] = ()
        for number, blob in enumerate(found.layers):
            diff = self._layers.layer(blob, limits)
            if wanted is not None and wanted[number] != f"sha256:{diff}":
                raise PolicyError(
                    f"image: the layer {blob.digest or number + 1} has the digest sha256:{diff}, not "
                    f"{ascii(wanted[number])[1:80]} as its configuration says"
                )
            kept = self._layers.kept_layer(diff)
            limits = less(limits, kept.size_bytes, kept.members)
            diffs = (*diffs, diff)
        if found.config is None:
            return self._describe(ImageConfig(), diffs, "")
        return self._write_image(hashlib.sha256(found.config).hexdigest(), found.config, diffs)

    def _used(self) -> set[str]:
        return {diff for each in self._digests() for diff in self._kept(each).diffs}

    def _describe(self, config: ImageConfig, diffs: tuple[str, ...], created: str) -> str:
        data, digest = config_of(config, diffs, machine_here(), created)
        return self._write_image(digest, data, diffs)

    def _write_image(self, digest: str, config: bytes, diffs: tuple[str, ...]) -> str:
        self._layers.made("images")
        if not self._record(digest).exists():  # a held one stays the same file
            kept = _KeptImage(config.decode(), diffs)
            replace_file(self._record(digest), msgspec.json.encode(kept))
        return digest

    def _image(self, digest: str) -> StoredImage:
        kept = self._kept(digest)
        config = read_config(kept.config.encode())
        layers = [(each, self._layers.kept_layer(each)) for each in kept.diffs]
        # overlayfs refuses a directory twice; of two equal layers nothing of the lower one is seen
        shown = [
            diff for number, (diff, layer) in enumerate(layers)
            if layer.members and diff not in kept.diffs[number + 1 :]
        ] or kept.diffs[-1:]  # fmt: skip
        names = [name for name, image in self._names().names.items() if image == digest]
        return StoredImage(
            f"sha256:{digest}", tuple(sorted(names)),
            tuple(str(self._place / "layers" / each / "fs") for each in shown),
            config.settings, sum(layer.size_bytes for _, layer in layers), config.created or "",
        )  # fmt: skip

    def _kept(self, digest: str) -> _KeptImage:
        try:
            return msgspec.json.decode(self._record(digest).read_bytes(), type=_KeptImage)
        except FileNotFoundError:
            raise PolicyError(f"image: sha256:{digest} was removed") from None

    def _record(self, digest: str) -> Path:
        return self._place / "images" / f"{digest}.json"

    def _digests(self) -> tuple[str, ...]:
        with contextlib.suppress(FileNotFoundError):
            names = sorted(os.listdir(self._place / "images"))
            return tuple(each.removesuffix(".json") for each in names)
        return ()

    def _names(self) -> _Names:
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode((self._place / "names.json").read_bytes(), type=_Names)
        return _Names()

    def _change_names(self, name: str, digest: str, path: str = "", stamp: str = "") -> None:
        with locked(self._place / "names.lock", PolicyError):
            kept = self._names()
            if name:
                kept.names[name] = digest
            if path:
                kept.paths[path] = _ImportedPath(stamp, digest)
            replace_file(self._place / "names.json", msgspec.json.encode(kept))

    def _drop_names(self, is_dropped: Callable[[str, str], bool]) -> None:
        with locked(self._place / "names.lock", PolicyError):
            kept = self._names()
            names = {
                name: image for name, image in kept.names.items() if not is_dropped(name, image)
            }
            images = set(self._digests())
            paths = {path: each for path, each in kept.paths.items() if each.image in images}
            replace_file(self._place / "names.json", msgspec.json.encode(_Names(names, paths)))

    def _drop(self, digest: str) -> bool:
        """Remove an image and its names, not its layers; False if somebody holds it."""
        with open(self._record(digest), "rb") as record:
            try:
                fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self._record(digest).unlink()
        self._drop_names(lambda _, image: image == digest)
        return True


def _digest_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
