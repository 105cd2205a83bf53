"""Images: the root file system that a directory, an OCI image layout or a tar stands for.

Layouts and tars are unpacked once, into a directory of this user's data that has the digest of their
content for a name.
"""

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar

import msgspec

from ....policies.errors import PolicyError
from ....runner.kernel import files
from ....runner.nesting import refuse_deep_json, refuse_large_json
from ...state import make_private_directory, state_directory
from .unpacking import Unpacking

_MOST_JSON = 4 << 20
_MOST_LAYERS = 128
_MOST_INDEXES = 3  # one in another
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}  # as images call them
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_TAR = re.compile(r".*\.(tar|diff\.tar)([.+]gzip)?")
_CHUNK = 1 << 20
_T = TypeVar("_T")
_VERSION = "1"  # of how images are unpacked


class _ImagePlatform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""


class _ImageBlob(msgspec.Struct, frozen=True, rename="camel"):
    """A blob (image-spec, "descriptor.md")."""

    digest: str
    size: Annotated[int, msgspec.Meta(ge=0)]
    media_type: str = ""
    platform: _ImagePlatform | None = None


class _ImageIndex(msgspec.Struct, frozen=True):
    manifests: Annotated[tuple[_ImageBlob, ...], msgspec.Meta(max_length=1000)]


class _ImageManifest(msgspec.Struct, frozen=True):
    layers: Annotated[tuple[_ImageBlob, ...], msgspec.Meta(max_length=_MOST_LAYERS)]


def rootfs_of(given: str) -> str:
    """Return the directory of the root file system that the path `given` stands for.

    Raises PolicyError if it is none, or is malformed.
    """
    if os.path.isdir(given):
        if not os.path.exists(os.path.join(given, "oci-layout")):
            return given
        return _unpacked_layout(Path(given))
    try:
        with open(given, "rb") as file:
            name = _digest_of(file)
            return _kept(name, lambda unpacking: unpacking.add(file, given))
    except OSError as error:
        raise PolicyError(f"rootfs: {given}: {error.strerror}") from None


def _unpacked_layout(layout: Path) -> str:
    layers = _layers(layout)
    name = hashlib.sha256("\n".join(layer.digest for layer in layers).encode()).hexdigest()

    def fill(unpacking: Unpacking) -> None:
        for layer in layers:
            if not _TAR.fullmatch(layer.media_type):
                raise PolicyError(
                    f"rootfs: a layer is {layer.media_type[:100]!r}, which cannot be read",
                    "copy the image with layers of gzip: skopeo copy --dest-compress-format gzip",
                )
            with open(_blob(layout, layer), "rb") as file:
                if _digest_of(file) != layer.digest.removeprefix("sha256:"):
                    raise PolicyError(f"rootfs: the layer {layer.digest} has another digest")
                unpacking.add(file, layer.digest)

    return _kept(name, fill)


def _layers(layout: Path) -> tuple[_ImageBlob, ...]:
    """Return the layers of the layout's image for this machine, lowest first."""
    index = _decoded(_small(layout / "index.json"), _ImageIndex, "index.json")
    for _ in range(_MOST_INDEXES):
        chosen = _chosen(index.manifests)
        data = _small(_blob(layout, chosen))
        if hashlib.sha256(data).hexdigest() != chosen.digest.removeprefix("sha256:"):
            raise PolicyError(f"rootfs: the manifest {chosen.digest} has another digest")
        if chosen.media_type not in _INDEXES:
            return _decoded(data, _ImageManifest, "the manifest").layers
        index = _decoded(data, _ImageIndex, "the index")
    raise PolicyError("rootfs: an index leads to an index, and so on")


def _chosen(manifests: tuple[_ImageBlob, ...]) -> _ImageBlob:
    wanted = _MACHINES.get(os.uname().machine, os.uname().machine)
    fitting = [
        each for each in manifests
        if each.platform is None or (each.platform.architecture, each.platform.os) == (wanted, "linux")
    ]  # fmt: skip
    if len(fitting) != 1:
        raise PolicyError(
            f"rootfs: {len(fitting)} images of the layout are for linux/{wanted}, must be one",
            "copy one image into a layout of its own: skopeo copy",
        )
    return fitting[0]


def _blob(layout: Path, descriptor: _ImageBlob) -> Path:
    digest = _DIGEST.fullmatch(descriptor.digest)
    if digest is None:
        raise PolicyError(f"rootfs: a digest must be sha256, got {descriptor.digest[:100]!r}")
    return layout / "blobs" / "sha256" / digest[1]


def _small(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_JSON + 1)
    except OSError as error:
        raise PolicyError(f"rootfs: {path}: {error.strerror}") from None
    if len(data) > _MOST_JSON:
        raise PolicyError(f"rootfs: {path} is larger than {_MOST_JSON} bytes")
    return data


def _decoded(data: bytes, kind: type[_T], what: str) -> _T:
    try:
        refuse_deep_json(data)
        refuse_large_json(data)
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"rootfs: {what} is invalid: {str(error)[:200]}") from None


def _digest_of(file: BinaryIO) -> str:
    found = hashlib.sha256()
    while data := file.read(_CHUNK):
        found.update(data)
    file.seek(0)
    return found.hexdigest()


def _remove(made: Path) -> None:
    """Remove what was unpacked, unless it has become an image."""
    above = os.open(made.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            files.remove_tree(above, made.name)
    finally:
        os.close(above)


def _kept(name: str, fill: Callable[[Unpacking], None]) -> str:
    """Return the directory of an image that was unpacked, now or earlier."""
    images = state_directory() / "images"
    make_private_directory(images, PolicyError)
    place = images / f"{name}-{_VERSION}"
    if place.is_dir():
        return str(place)
    made = Path(tempfile.mkdtemp(prefix="new-", dir=images))
    try:
        made.chmod(0o755)
        with contextlib.closing(Unpacking(made)) as unpacking:
            fill(unpacking)
        with contextlib.suppress(OSError):  # another process was faster
            made.rename(place)
    finally:
        _remove(made)
    if not place.is_dir():
        raise PolicyError(f"rootfs: cannot write {place}")
    return str(place)
