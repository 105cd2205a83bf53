"""Wheels for tests: valid ones, and ones with single bytes or entries changed on purpose."""

import base64
import hashlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from cellwright import PackageStore
from tests.conftest import OPTIONAL

NAME, VERSION = "thing", "1.0"
INFO = f"{NAME}-{VERSION}.dist-info"
FILENAME = f"{NAME}-{VERSION}-py3-none-any.whl"
REGULAR, LINK = 0o100644, 0o120777


class Part(NamedTuple):
    """One entry as it is written: in the directory at the end, and in its own header."""

    name: bytes
    data: bytes
    method: int = zipfile.ZIP_STORED
    flags: int = 0
    mode: int = REGULAR
    local_name: bytes | None = None  # another name in its own header
    size: int | None = None  # another size than the true one, in both
    packed: bytes | None = None  # bytes in the archive
    extra: bytes = b""
    recorded: bool = True
    crc: int | None = None


def parts_of(files: Mapping[str, bytes], name: str = NAME, requires: str = "") -> list[Part]:
    """Return the entries of a wheel with `files`, without its RECORD."""
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSION}\n{needs}".encode()
    info_of = f"{name}-{VERSION}.dist-info"
    wheel = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    info = {f"{info_of}/METADATA": metadata, f"{info_of}/WHEEL": wheel}
    return [Part(name.encode(), data) for name, data in {**files, **info}.items()]


def recorded(parts: list[Part], info: str = INFO) -> bytes:
    """Return the RECORD of `parts`."""
    lines = [
        f"{part.name.decode()},sha256={_digest(part.data)},{len(part.data)}"
        for part in parts if part.recorded and not part.name.endswith(b"/")
    ]  # fmt: skip
    return "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def write_wheel(
    path: Path, parts: list[Part], record: bytes | None = None,
    change: Callable[[bytes], bytes] = bytes, info: str = INFO,
) -> Path:  # fmt: skip
    """Write `parts` and their RECORD as a zip archive; `change` sees the whole at last."""
    record = recorded(parts, info) if record is None else record
    headers, entries, length = [], [], 0
    for part in [*parts, Part(f"{info}/RECORD".encode(), record)]:
        header, entry = _written(part, length)
        headers.append(header)
        entries.append(entry)
        length += len(header)
    whole, directory = b"".join(headers), b"".join(entries)
    end = struct.pack(
        "<4sHHHHIIH", b"PK\5\6", 0, 0, len(parts) + 1, len(parts) + 1, len(directory), len(whole), 0
    )
    path.write_bytes(change(whole + directory + end))
    return path


def _written(part: Part, offset: int) -> tuple[bytes, bytes]:
    packed = part.data if part.packed is None else part.packed
    if part.method == zipfile.ZIP_DEFLATED and part.packed is None:
        deflater = zlib.compressobj(9, wbits=-15)
        packed = deflater.compress(part.data) + deflater.flush()
    size = len(part.data) if part.size is None else part.size
    crc = zlib.crc32(part.data) if part.crc is None else part.crc
    flags = part.flags | (0 if part.name.isascii() else 1 << 11)
    told = struct.pack("<HHHHIII", flags, part.method, 0, 33, crc, len(packed), size)
    local = part.name if part.local_name is None else part.local_name
    header = b"PK\3\4" + struct.pack("<H", 20) + told + struct.pack("<HH", len(local), 0) + local
    entry = (
        b"PK\1\2" + struct.pack("<HH", 3 << 8 | 20, 20) + told
        + struct.pack("<HHHHHII", len(part.name), len(part.extra), 0, 0, 0, part.mode << 16, offset)
        + part.name + part.extra
    )  # fmt: skip
    return header + packed, entry


def good_wheel(
    folder: Path, files: Mapping[str, bytes] | None = None, name: str = NAME, requires: str = ""
) -> Path:
    """Write a wheel with `files`, default one module."""
    files = {f"{name}.py": b"answer = 42\n"} if files is None else files
    info = f"{name}-{VERSION}.dist-info"
    path = folder / FILENAME.replace(NAME, name)
    return write_wheel(path, parts_of(files, name, requires), info=info)


def store_at(directory: Path, wheels: Path, **limits: object) -> PackageStore:
    """Return a store in `directory` that has no index and only the wheels of a folder."""
    return PackageStore(
        directory,
        find_links=wheels,
        index=False,
        optional_layers=OPTIONAL,
        **limits,  # type: ignore[arg-type]
    )
