"""Opens one wheel, strictly, inside a cell.

This module is a part of the program of that cell (`store_directory.py` sends its text after that of
`zip_archive.py`), so it imports no other module of cellwright. RECORD must have the digest of every
file.
"""

import base64
import csv
import hashlib
import importlib.util
import io
import marshal
import os
import re
import struct
from collections.abc import Iterator
from typing import Any

from .zip_archive import Archive, ArchiveEntry, ArchiveLimits, WheelRefused, check_names

MOST_TOLD = 100
DIGESTS = ("sha256", "sha384", "sha512")  # PEP 427: sha256 or better
NOT_RECORDED = ("RECORD", "RECORD.jws", "RECORD.p7s")  # PEP 427
PLACED = ("purelib", "platlib")  # in NAME.data; a cell has no use for scripts, headers and data
# .pth files are left out: -S skips site, so that no code of a package starts by itself.
LEFT_OUT = re.compile(
    r"[^/]*\.pth|(sitecustomize|usercustomize)([./].*)?|(.*/)?__pycache__/.*|.*\.py[co]"
)


def unpack(
    wheel: str, target: str, name: str, version: str, limits: tuple[int, int]
) -> dict[str, Any]:
    """Write the files of `wheel` below `target`, byte-compiled; `name` and `version` are those that its
    file name has.

    Returns {"left_out": [names]}, or {"refused": reason}.
    """
    try:
        with open(wheel, "rb") as file:
            left_out = write(Archive(file, ArchiveLimits(*limits)), target, name, version)
            return {"left_out": left_out[:MOST_TOLD]}
    except WheelRefused as refused:
        return {"refused": str(refused)}


def write(archive: Archive, target: str, name: str, version: str) -> list[str]:
    """Write the files of a wheel and return the names of those that were left out.

    Raises WheelRefused unless its metadata is that of `name` and `version`, and RECORD lists all.
    """
    info = _info_directory(archive)
    _check_metadata(archive, info, name, version)
    recorded = _recorded(archive, info)
    left_out: list[str] = []
    placed: dict[str, str] = {}
    for entry in archive.entries.values():
        path = _place(entry.name, info)
        if path is None or LEFT_OUT.fullmatch(path):
            left_out.append(entry.name)
        elif placed.setdefault(path, entry.name) != entry.name:
            raise WheelRefused(f"{placed[path]!r} and {entry.name!r} have one place")
    check_names(list(placed))
    for path, origin in placed.items():
        _write(archive, archive.entries[origin], os.path.join(target, path), recorded.get(origin))
    for entry in map(archive.entries.__getitem__, left_out):
        _check_digest(archive.pieces(entry), entry.name, recorded.get(entry.name))
    for path in placed:
        if path.endswith(".py"):
            _compile(target, path)
    return left_out


def _info_directory(archive: Archive) -> str:
    tops = {name.partition("/")[0] for name in archive.entries}
    found = [top for top in tops if top.endswith(".dist-info")]
    if len(found) != 1:
        raise WheelRefused(f"has {len(found)} .dist-info directories, not one")
    return found[0]


def _check_metadata(archive: Archive, info: str, name: str, version: str) -> None:
    wheel = _fields(archive, f"{info}/WHEEL")
    if wheel.get("wheel-version", "").partition(".")[0] != "1":  # PEP 427
        raise WheelRefused(f"is of wheel version {wheel.get('wheel-version')!r}; 1.x is known")
    metadata = _fields(archive, f"{info}/METADATA")
    told = _plain(metadata.get("name", "")), metadata.get("version", "")
    if told != (_plain(name), version):
        raise WheelRefused(f"says that it is {told[0]} {told[1]}, not {_plain(name)} {version}")


def _fields(archive: Archive, name: str) -> dict[str, str]:
    """Return the first lines of a file of fields, down to the first empty line."""
    text = archive.read(name, 4 << 20).decode("utf-8", "replace")
    head = re.split(r"\r?\n\r?\n", text, maxsplit=1)[0]
    fields = (
        line.partition(":") for line in re.split(r"\r\n|\r|\n", head) if line[:1] not in (" ", "\t")
    )
    return {key.strip().lower(): value.strip() for key, _, value in reversed(list(fields))}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()  # PEP 503


def _recorded(archive: Archive, info: str) -> dict[str, tuple[str, str]]:
    """Return the digest and size that RECORD has for each file, which must be all there are."""
    text = archive.read(f"{info}/RECORD", 64 << 20).decode("utf-8", "replace")
    found: dict[str, tuple[str, str]] = {}
    try:
        for path, digest, size in csv.reader(io.StringIO(text), strict=True):
            if path in found:
                raise WheelRefused(f"RECORD lists {path!r} twice")
            found[path] = digest, size
    except (csv.Error, ValueError):
        raise WheelRefused("RECORD is not a table of paths, digests and sizes") from None
    exempt = {f"{info}/{each}" for each in NOT_RECORDED}
    names = archive.entries.keys()
    if missing := sorted(names - found.keys() - exempt):
        raise WheelRefused(f"RECORD does not list {missing[0]!r}")
    if absent := sorted(found.keys() - names - exempt):
        raise WheelRefused(f"RECORD lists {absent[0]!r}, which is missing")
    return {path: told for path, told in found.items() if path not in exempt}


def _place(name: str, info: str) -> str | None:
    """Return where an entry goes; None if it has no use in a cell."""
    top, _, rest = name.partition("/")
    if not top.endswith(".data"):
        return name
    if top != info.removesuffix(".dist-info") + ".data":
        raise WheelRefused(f"{name!r} is data of another package")
    kind, _, path = rest.partition("/")
    return path if kind in PLACED and path else None


def _write(
    archive: Archive, entry: ArchiveEntry, path: str, recorded: tuple[str, str] | None
) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "xb") as file:

        def written() -> Iterator[bytes]:
            for piece in archive.pieces(entry):
                file.write(piece)
                yield piece

        _check_digest(written(), entry.name, recorded)


def _check_digest(pieces: Iterator[bytes], name: str, recorded: tuple[str, str] | None) -> None:
    """Read `pieces` to the end; raises WheelRefused unless they match the `recorded` digest, if
    there is one."""
    told, size = recorded or ("sha256=", "")
    kind, _, expected = told.partition("=")
    if kind not in DIGESTS:
        raise WheelRefused(f"RECORD has no sha256 of {name!r}")
    digest, length = hashlib.new(kind), 0
    for piece in pieces:
        digest.update(piece)
        length += len(piece)
    found = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    if recorded and (found, str(length)) != (expected, size or str(length)):
        raise WheelRefused(f"{name!r} is not the file that RECORD lists")


def _compile(target: str, path: str) -> None:
    """Write the bytecode of a module, which the interpreter will not compare with the source (PEP 552).

    Files that do not compile, such as templates or code for another Python, stay source.
    """
    source = os.path.join(target, path)
    with open(source, "rb") as file:
        text = file.read()
    try:
        code = compile(text, path, "exec", dont_inherit=True)
        content = marshal.dumps(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    cached = importlib.util.cache_from_source(source)
    os.makedirs(os.path.dirname(cached), exist_ok=True)
    with open(cached, "xb") as file:
        file.write(
            importlib.util.MAGIC_NUMBER + struct.pack("<I", 1)
        )  # bytecode that Python checks only by hash, and an unchecked kind
        file.write(importlib.util.source_hash(text) + content)
