"""`Copies`: the layers of COPY, ADD and WORKDIR: files of the context, a stage or a here-document."""

import bz2
import contextlib
import lzma
import os
import posixpath
import tempfile
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from ....policies.errors import PolicyError
from ..images.image import ImageConfig, StoredImage
from ..images.image_store import ImageStore
from ..images.tree_archive import TreeLimits
from .build_cells import BuildCells
from .build_context import BuildContext, ContextSource
from .copy_archive import CopyArchive, Placement

_TAR_MARK = slice(257, 262)
_BLOCK, _READ = 512, 1 << 20  # bzip2 gives nothing before a block of up to 900,000 bytes is there
_MOST_MEMORY = 256 << 20


class CopyStep(NamedTuple):
    """One COPY, ADD or WORKDIR with its variables replaced.

    sources: of the context or of `image`; texts: name -> content of here-documents
    destination: absolute; with / at its end it is a directory
    owner, mode: "" for root and for the files' own
    unpacks: tars of the context are unpacked
    """

    sources: tuple[str, ...]
    destination: str
    owner: str = ""
    mode: str = ""
    texts: Mapping[str, str] = {}
    image: StoredImage | None = None
    unpacks: bool = False


class Copies:
    """Makes the layers of COPY, ADD and WORKDIR; raises ValueError, PolicyError, OSError."""

    def __init__(
        self, context: BuildContext, cells: BuildCells, store: ImageStore, latest: int | None
    ) -> None:
        self._context, self._cells, self._store, self._latest = context, cells, store, latest

    def key(self, step: CopyStep) -> list[object]:
        """Return what decides about the layer: the step, and the content of its sources."""
        _mode(step)
        if step.image:
            content = [posixpath.basename(posixpath.dirname(each)) for each in step.image.layers]
        else:
            archive = CopyArchive(self._limits)
            self._write(step, self._found(step), archive, -1)
            content = [archive.digest]
        told = (step.sources, step.destination, step.owner, step.mode, step.unpacks)
        return [*told, content, self._latest]

    def make(self, base: StoredImage | None, step: CopyStep) -> StoredImage:
        """Return `base` with the files of a step in one more layer."""
        sources = self._found(step)
        if step.unpacks and (tars := [each for each in sources if self._is_tar(each)]):
            return self._unpacked(base, step, tars, sources)
        with tempfile.TemporaryFile(dir=self._store.builds.parent) as exported:
            if step.image:
                self._cells.export(step.image, step.sources, exported)
            return self._added(base, step, sources, exported.fileno())

    @property
    def _limits(self) -> TreeLimits:
        return TreeLimits(*self._store.limits)

    def _added(
        self, base: StoredImage | None, step: CopyStep, sources: list[ContextSource], exported: int
    ) -> StoredImage:
        first = CopyArchive(self._limits)
        count = self._write(step, sources, first, exported)
        survey = self._cells.survey(base, step.destination, first.directories, step.owner)
        if survey.kind == "file" and (first.directories or step.destination.endswith("/")):
            raise ValueError(f"/{survey.place} is a file in the image, and a directory here")
        is_directory = survey.kind == "directory" or step.destination.endswith("/")
        if count > 1 and not is_directory:
            raise ValueError("of several sources the destination must end with /")
        placement = Placement(
            survey.place, is_directory, survey.existing, survey.owner, _mode(step), self._latest
        )
        if not step.sources and not step.texts and survey.kind == "directory" and base:
            return base
        with tempfile.TemporaryFile(dir=self._store.builds.parent) as out:
            archive = CopyArchive(self._limits, out.fileno(), placement)
            self._write(step, sources, archive, exported)
            if archive.end() != first.digest:
                raise ValueError("a source has changed while it was copied; build again")
            return self._store.add(out.fileno(), base, ImageConfig())

    def _found(self, step: CopyStep) -> list[ContextSource]:
        if step.image:
            return []
        return [each for source in step.sources for each in self._context.sources(source)]

    def _write(
        self, step: CopyStep, sources: list[ContextSource], archive: CopyArchive, exported: int
    ) -> int:
        """Write the sources, and return how many there are."""
        for each in sources:
            self._context.add(each, archive)
        for name, text in step.texts.items():
            archive.add_text(name, text)
        if step.image:
            archive.add_members(exported)
        return archive.sources

    def _is_tar(self, source: ContextSource) -> bool:
        if source.is_directory:
            return False
        with self._context.opened(source) as file:
            return _plain_start(os.pread(file, _READ, 0))[_TAR_MARK] == b"ustar"

    def _unpacked(
        self, base: StoredImage | None, step: CopyStep, tars: list[ContextSource],
        sources: list[ContextSource],
    ) -> StoredImage:  # fmt: skip
        if len(sources) != 1 or step.texts:
            raise PolicyError("ADD: a tar must be the only source", "write an ADD for each")
        if step.owner or step.mode:
            raise ValueError("ADD: --chown and --chmod cannot be combined with a tar")
        survey = self._cells.survey(base, step.destination, (), "")
        if base is None:  # a cell needs a root
            nothing = CopyStep((), "/")
            base = self._added(None, nothing, [], -1)
        with self._context.opened(tars[0]) as file:
            return self._cells.unpack(base, file, f"/{survey.place}")


def _plain_start(data: bytes) -> bytes:
    """Return the first bytes of a file that may be compressed."""
    with contextlib.suppress(zlib.error, lzma.LZMAError, OSError, EOFError):
        if data.startswith(b"\x1f\x8b"):
            return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(data, _BLOCK)
        if data.startswith(b"BZh"):
            return bz2.BZ2Decompressor().decompress(data, _BLOCK)
        if data.startswith(b"\xfd7zXZ\0"):
            return lzma.LZMADecompressor(memlimit=_MOST_MEMORY).decompress(data, _BLOCK)
    return data


def _mode(step: CopyStep) -> int | None:
    """Return the octal mode of --chmod; raises ValueError."""
    if not step.mode:
        return None
    if not set(step.mode) <= set("01234567") or int(step.mode, 8) > 0o7777:
        raise ValueError(f"--chmod: must be an octal mode such as 755, got {step.mode[:80]!a}")
    return int(step.mode, 8)
