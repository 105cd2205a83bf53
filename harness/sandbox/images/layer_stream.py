"""`LayerStream`: the uncompressed bytes of a layer's archive, read once and forward, with digests.

Both the archive and its gzip are hostile: the uncompressed bytes, the empty members of a gzip and the
seconds are bounded.
"""

import hashlib
import os
import time
import zlib
from collections.abc import Iterator

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_WINDOW = 16 + zlib.MAX_WBITS  # window size that expects a gzip header
_PIECE = 1 << 20
_READ = 64 * 1024  # bytes of a piece; each gzip member copies the rest of its piece
_MOST_EMPTY = 1000  # empty members of a gzip file, which no program writes in numbers


class LayerStream:
    """Implements `ArchiveBytes` for slices that are asked for in their order.

    `most_bytes`: of the uncompressed archive.  Raises ValueError for malformed gzip, and beyond the
    limits.
    """

    def __init__(self, pieces: Iterator[bytes], most_bytes: int, seconds: float) -> None:
        self._most = most_bytes
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._compressed, self._plain = hashlib.sha256(), hashlib.sha256()
        self._pieces = self._expanded(pieces)
        self._piece = b""
        self._at = 0  # in the piece
        self._position = 0  # among all bytes
        self._total = 0

    def __len__(self) -> int:
        """Return the largest size that is allowed; the true one is known at the end."""
        return self._most

    def __getitem__(self, part: slice) -> bytes:
        """Return the bytes from `part.start` to `part.stop`, fewer at the end."""
        for _ in self._read(part.start - self._position):
            pass
        return b"".join(self._read(part.stop - part.start))

    def copy(self, count: int, into: int) -> None:
        """Write the next `count` bytes into an open file."""
        end = self._position + count
        for piece in self._read(count):
            view = memoryview(piece)
            while view:
                view = view[os.write(into, view) :]
        if self._position < end:
            raise ValueError("it ends in the middle of a file")

    def expand(self, into: int) -> tuple[str, str]:
        """Write all bytes into an open file; return the digests."""
        for piece in self._read(self._most + 1):
            view = memoryview(piece)
            while view:
                view = view[os.write(into, view) :]
        return self.finish()

    def finish(self) -> tuple[str, str]:
        """Read to the end; return the sha256 of the archive as it came, and uncompressed."""
        for _ in self._read(self._most + 1):
            pass
        if not self._total:
            raise ValueError("it is empty")
        return self._compressed.hexdigest(), self._plain.hexdigest()

    def _read(self, count: int) -> Iterator[bytes]:
        while count > 0:
            if self._at == len(self._piece):
                self._piece, self._at = next(self._pieces, b""), 0
                if not self._piece:
                    return
                self._check()
            taken = self._piece[self._at : self._at + count]
            self._at += len(taken)
            self._position += len(taken)
            count -= len(taken)
            yield taken

    def _check(self) -> None:
        self._total += len(self._piece)
        if self._total > self._most:
            raise ValueError(f"it expands to more bytes than the limit, {self._most}")
        if time.monotonic() > self._end:
            raise ValueError(f"it takes more than {self._seconds:g} seconds")
        self._plain.update(self._piece)

    def _expanded(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        first = self._next(pieces)
        if first.startswith(_ZSTD):
            raise ValueError("its compression is zstd, which cannot be read")
        if first.startswith(_GZIP):
            yield from self._gunzipped(first, pieces)
            return
        while first:
            yield first
            first = self._next(pieces)

    def _gunzipped(self, data: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Expand gzip, of one or several members (RFC 1952), perhaps with zeros behind them."""
        decoder, empty, made_any, is_new = zlib.decompressobj(_WINDOW), 0, False, True
        while data:
            data = data.lstrip(b"\0") if is_new else data
            if data:
                is_new = False
                made = decoder.decompress(data, _PIECE)
                if made:
                    made_any = True
                    yield made
                data = decoder.unconsumed_tail or decoder.unused_data
            if decoder.eof:
                empty += not made_any
                if empty > _MOST_EMPTY:
                    raise ValueError(f"more than {_MOST_EMPTY} members of its gzip are empty")
                decoder, made_any, is_new = zlib.decompressobj(_WINDOW), False, True
            data = data or self._next(pieces)
        if not is_new:
            raise ValueError("its gzip is cut off")

    def _next(self, pieces: Iterator[bytes]) -> bytes:
        piece = next(pieces, b"")
        self._compressed.update(piece)
        return piece


def pieces_of(file: int, start: int, size: int) -> Iterator[bytes]:
    """Yield `size` bytes of a file from `start` on; of a pipe, size -1, all that come."""
    while size:
        asked = _READ if size < 0 else min(_READ, size)
        piece = os.read(file, asked) if size < 0 else os.pread(file, asked, start)
        if not piece:
            return
        start, size = start + len(piece), size if size < 0 else size - len(piece)
        yield piece
