"""Images outside the store: OCI image layouts, the tars of `docker save`, plain tars and directories.

They are hostile: JSON is bounded before it is decoded, digests are checked, and a name in the JSON is
only looked up among the members of a tar.
"""

import contextlib
import hashlib
import os
import posixpath
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple, Protocol, TypeVar

import msgspec

from ....policies.errors import PolicyError
from ....runner.channel import refuse_deep_json, refuse_large_json
from ..workspaces.archive import entries
from .image import MOST_LAYERS
from .layer_work import ArchivePart

_MOST_JSON = 4 << 20
_MOST_INDEXES = 3  # nested indexes
_MOST_FILES = 10_000  # members of the tar of an image
_LONGEST = 4096  # characters of the names of a member
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}  # names of machines in images
_TAR = re.compile(r".*\.(tar|diff\.tar)([.+]gzip)?")
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_T = TypeVar("_T")


class _ImagePlatform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""


class ImageBlob(msgspec.Struct, frozen=True, rename="camel"):
    """A blob (image-spec, "descriptor.md")."""

    digest: str
    size: Annotated[int, msgspec.Meta(ge=0)]
    media_type: str = ""
    platform: _ImagePlatform | None = None

    @property
    def hexadecimal(self) -> str:
        """The digest without its kind; raises PolicyError if it is not a sha256."""
        if not (found := _DIGEST.fullmatch(self.digest)):
            raise PolicyError(f"image: a digest must be sha256, got {ascii(self.digest)[:100]}")
        return found[1]


class ImageIndex(msgspec.Struct, frozen=True):
    """A list of images, one for each machine (image-spec, "image-index.md")."""

    manifests: Annotated[tuple[ImageBlob, ...], msgspec.Meta(max_length=1000)]


class ImageManifest(msgspec.Struct, frozen=True):
    """The parts of one image (image-spec, "manifest.md")."""

    layers: tuple[ImageBlob, ...]
    config: ImageBlob | None = None


class _SavedImage(msgspec.Struct, frozen=True, rename="pascal"):
    """An image in the manifest.json of `docker save`."""

    config: str
    layers: tuple[str, ...]


class LayerBlob(NamedTuple):
    """A layer of an image to import; `digest` is that of its archive, "" if nothing says it."""

    digest: str
    part: ArchivePart


class FoundImage(NamedTuple):
    """An image to import: its configuration, None for a plain tree, and its layers, lowest first."""

    config: bytes | None
    layers: tuple[LayerBlob, ...]


def decoded(data: bytes, kind: type[_T], what: str) -> _T:
    """Decode JSON of an image; raises PolicyError."""
    try:
        refuse_deep_json(data)
        refuse_large_json(data)
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"image: {what} is invalid: {str(error)[:200]}") from None


def chosen(manifests: tuple[ImageBlob, ...], machine: str = "") -> ImageBlob:
    """Return the image for a machine, such as amd64, default this one; raises PolicyError."""
    wanted = machine or machine_here()
    fitting = [
        each for each in manifests
        if each.platform is None or (each.platform.architecture, each.platform.os) == (wanted, "linux")
    ]  # fmt: skip
    if len(fitting) != 1:
        raise PolicyError(
            f"image: {len(fitting)} images of the index are for linux/{wanted}, must be one",
            "copy one image into a layout of its own: skopeo copy",
        )
    return fitting[0]


def machine_here() -> str:
    return _MACHINES.get(os.uname().machine, os.uname().machine)


def checked(data: bytes, blob: ImageBlob, what: str) -> bytes:
    """Return `data`; raises PolicyError if it is not that of the digest."""
    if hashlib.sha256(data).hexdigest() != blob.hexadecimal:
        raise PolicyError(f"image: {what} {blob.digest} has another digest")
    return data


def check_layers(layers: tuple[ImageBlob, ...]) -> None:
    """Raise PolicyError for layers that are too many, or of a kind that cannot be read."""
    if len(layers) > MOST_LAYERS:
        raise PolicyError(
            f"image: it has {len(layers)} layers, more than {MOST_LAYERS}",
            "merge layers when it is built: docker build --squash, buildah build --layers=false",
        )
    for each in layers:
        if not _TAR.fullmatch(each.media_type):
            raise PolicyError(
                f"image: a layer is {ascii(each.media_type)[:100]}, which cannot be read",
                "copy the image with layers of gzip: skopeo copy --dest-compress-format gzip",
            )


class _LayoutFiles(Protocol):
    """The files of a layout."""

    def part(self, name: str) -> ArchivePart: ...


def _small(files: _LayoutFiles, name: str) -> bytes:
    part = files.part(name)
    if part.size > _MOST_JSON:
        raise PolicyError(f"image: {name} is larger than {_MOST_JSON} bytes")
    return os.pread(part.file, part.size, part.start)


class _Folder:
    """The files of a directory."""

    def __init__(self, path: str, opened: contextlib.ExitStack) -> None:
        self._path, self._opened = path, opened

    def part(self, name: str) -> ArchivePart:
        file = open_file(os.path.join(self._path, name))
        self._opened.callback(os.close, file)
        return ArchivePart(file, 0, os.fstat(file).st_size, name)


class _TarFiles:
    """The regular files of a tar, and links to them, as old versions of `docker save` wrote."""

    def __init__(self, file: int, members: Mapping[str, tuple[int, int] | str]) -> None:
        self._file, self._members = file, members

    def part(self, name: str) -> ArchivePart:
        found = self._members.get(posixpath.normpath(name))
        if isinstance(found, str):
            found = self._members.get(found)
        if found is None or isinstance(found, str):
            raise PolicyError(f"image: {ascii(name)[:200]} is missing in the tar")
        return ArchivePart(self._file, *found, ascii(name)[1:200])


def open_file(path: str) -> int:
    """Open a regular file; raises PolicyError."""
    try:
        file = os.open(path, _READ)
    except OSError as error:
        raise PolicyError(f"image: {path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise PolicyError(f"image: {path}: not a regular file")
    return file


@contextlib.contextmanager
def opened_layout(path: str) -> Iterator[FoundImage]:
    """Open the image of an OCI layout, a directory."""
    with contextlib.ExitStack() as stack:
        yield _of_layout(_Folder(path, stack))


def image_of_tar(file: int, path: str) -> FoundImage:
    """Return the image of an uncompressed tar: a saved image, a layout, or a plain tree."""
    data = FileBytes(file)
    members: dict[str, tuple[int, int] | str] = {}
    try:
        for each in entries(data, _MOST_FILES, "surrogateescape"):
            if len(each.name) + len(each.target) > _LONGEST:
                raise ValueError
            name = posixpath.normpath(each.name)
            if each.is_regular:
                members[name] = each.start, each.size
            elif each.target:
                members[name] = posixpath.normpath(f"{posixpath.dirname(name)}/{each.target}")
    except ValueError:  # a plain tree, or malformed, as the layer process will say
        members = {}
    if "manifest.json" in members and "etc" not in members:
        return _of_saved(_TarFiles(file, members))
    if "oci-layout" in members:
        return _of_layout(_TarFiles(file, members))
    return FoundImage(None, (LayerBlob("", ArchivePart(file, 0, len(data), path)),))


class FileBytes:
    """The bytes of an open file, read as they are asked for."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._size = os.fstat(file).st_size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        return os.pread(self._file, part.stop - part.start, part.start)


def _of_layout(files: _LayoutFiles) -> FoundImage:
    index = decoded(_small(files, "index.json"), ImageIndex, "index.json")
    for _ in range(_MOST_INDEXES):
        chosen_blob = chosen(index.manifests)
        data = checked(_small(files, _path(chosen_blob)), chosen_blob, "the manifest")
        if chosen_blob.media_type not in INDEXES:
            break
        index = decoded(data, ImageIndex, "the index")
    else:
        raise PolicyError("image: an index leads to an index, and so on")
    manifest = decoded(data, ImageManifest, "the manifest")
    check_layers(manifest.layers)
    config = None
    if blob := manifest.config:
        config = checked(_small(files, _path(blob)), blob, "the configuration")
    layers = (LayerBlob(each.hexadecimal, files.part(_path(each))) for each in manifest.layers)
    return FoundImage(config, tuple(layers))


def _path(blob: ImageBlob) -> str:
    return f"blobs/sha256/{blob.hexadecimal}"


def _of_saved(files: _LayoutFiles) -> FoundImage:
    images = decoded(_small(files, "manifest.json"), tuple[_SavedImage, ...], "manifest.json")
    if len(images) != 1:
        raise PolicyError(
            f"image: the tar has {len(images)} images, must be one", "save one: docker save NAME"
        )
    image = images[0]
    tars = tuple(ImageBlob("", 0, "layer.tar") for _ in image.layers)
    check_layers(tars)
    layers = tuple(LayerBlob("", files.part(each)) for each in image.layers)
    return FoundImage(_small(files, image.config), layers)
