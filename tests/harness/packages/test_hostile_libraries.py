"""Shared libraries of packages are read on the host, and may be hostile: what they cost is bounded."""

import struct
from pathlib import Path

import pytest

from cellwright.policies.errors import LaunchError
from cellwright.runner.host.interpreters import _wanted, needs_of

HEADER_BYTES, SEGMENT_BYTES = 64, 56
LOAD, DYNAMIC = 1, 2
NEEDED, STRTAB, STRSZ, RUNPATH = 1, 5, 10, 29


def library(
    names: list[bytes], *, directories: bytes = b"", strings_at: int | None = None,
    segments_at: int = HEADER_BYTES, dynamic_at: int | None = None, count: int = 2,
) -> bytes:  # fmt: skip
    """Return a library that needs `names`; the other arguments replace true numbers."""
    strings, entries = b"\0", []
    for tag, text in [*((NEEDED, name) for name in names), (RUNPATH, directories)]:
        entries.append((tag, len(strings)))
        strings += text + b"\0"
    begin = HEADER_BYTES + 2 * SEGMENT_BYTES
    length = 16 * (len(entries) + 2)
    where = begin + length if strings_at is None else strings_at
    table = b"".join(
        struct.pack("<QQ", *entry) for entry in [*entries, (STRTAB, where), (STRSZ, len(strings))]
    )
    whole = begin + length + len(strings)
    header = struct.pack(
        "<16s16xQ14xHH4x", b"\x7fELF\2\1\1".ljust(16, b"\0"), segments_at, SEGMENT_BYTES, count
    ).ljust(HEADER_BYTES, b"\0")
    segments = struct.pack("<IIQQQQQQ", LOAD, 4, 0, 0, 0, whole, whole, 0) + struct.pack(
        "<IIQQQQQQ", DYNAMIC, 4, begin if dynamic_at is None else dynamic_at, begin, 0, length,
        length, 8,
    )  # fmt: skip
    return header + segments + table + strings


def test_a_true_library_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(library([b"libz.so.1", b"libm.so.6"], directories=b"$ORIGIN/../x:/y"))
    assert needs_of(path) == (("libz.so.1", "libm.so.6"), (str(tmp_path.parent / "x"), "/y"))


@pytest.mark.parametrize(
    "data",
    [
        library([b"a"], strings_at=2**64 - 1), library([b"a"], segments_at=2**64 - 1),
        library([b"a"], dynamic_at=2**63), library([b"a"], count=0xFFFF),
        library([b"a"], segments_at=2**63 - 1), library([b"a"], dynamic_at=1 << 40),
        library([b"\xff"]), library([b"a"])[:100], b"\x7fELF", b"",
    ],
)  # fmt: skip
def test_a_malformed_library_needs_nothing(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(data)
    assert needs_of(path) == ((), ())


def test_names_that_the_loader_could_read_otherwise_are_not_wanted(tmp_path: Path) -> None:
    strange = [b"/etc/passwd", b"../x.so", b"a:b.so", b"a b.so", b"$ORIGIN", b"\xc3\xa9.so", b""]
    (tmp_path / "a.so").write_bytes(library([*strange, b"libz.so.1"]))
    assert _wanted(str(tmp_path)) == {"libz.so.1": ""}


def test_a_run_path_leads_nowhere_but_to_the_lib_of_an_environment(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "secret.so").write_bytes(library([]))
    (tmp_path / "lib" / "mine.so").write_bytes(library([]))
    (tmp_path / "lib" / "out.so").symlink_to(tmp_path / "secret.so")
    names = [b"mine.so", b"out.so", b"secret.so"]
    (site / "a.so").write_bytes(library(names, directories=b"$ORIGIN/../..:$ORIGIN/../../.."))
    found = _wanted(str(site))
    assert found == {"mine.so": str(tmp_path / "lib" / "mine.so"), "out.so": "", "secret.so": ""}


def test_libraries_that_need_too_many_others_are_refused(tmp_path: Path) -> None:
    for library_number in range(3):
        names = [f"lib{library_number}-{number}.so".encode() for number in range(200)]
        (tmp_path / f"{library_number}.so").write_bytes(library(names))
    with pytest.raises(LaunchError, match="need more than 400 others"):
        _wanted(str(tmp_path))
