"""Wheels that another reader opens, and that would write outside, hide a file or fill the disk."""

import io
import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from cellwright.harness.sandbox.packages.unpack import unpack
from tests.harness.packages.wheels import (
    FILENAME,
    INFO,
    LINK,
    NAME,
    REGULAR,
    VERSION,
    Part,
    good_wheel,
    parts_of,
    recorded,
    write_wheel,
)  # fmt: skip

LIMITS = (16 << 20, 1000)
PLAIN = parts_of({"thing.py": b"answer = 42\n"})


def opened(
    wheel: Path, tmp_path: Path, name: str = NAME, version: str = VERSION
) -> dict[str, object]:
    target = tmp_path / "target"
    target.mkdir()
    return unpack(str(wheel), str(target), name, version, LIMITS)


def refusal_of(wheel: Path, tmp_path: Path, **named: str) -> str:
    told = opened(wheel, tmp_path, **named)
    assert "refused" in told, f"it was opened: {sorted((tmp_path / 'target').rglob('*'))}"
    return str(told["refused"])


def plus(*parts: Part) -> list[Part]:
    return [*PLAIN, *parts]


def zeros(size: int) -> Part:
    return Part(b"zeros.bin", bytes(size), method=zipfile.ZIP_DEFLATED)


def test_a_good_wheel_is_opened_and_compiled(tmp_path: Path) -> None:
    wheel = good_wheel(tmp_path, {"thing/__init__.py": b"answer = 42\n", "thing/data.txt": b"x"})
    assert opened(wheel, tmp_path) == {"left_out": []}
    target = tmp_path / "target"
    files = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    bytecode = next(path for path in files if path.endswith(".pyc"))
    assert files == {
        "thing/__init__.py", "thing/data.txt", bytecode,
        *(f"{INFO}/{each}" for each in ("METADATA", "WHEEL", "RECORD")),
    }  # fmt: skip
    assert (target / bytecode).read_bytes()[4:8] == b"\1\0\0\0"  # by hash, unchecked: PEP 552


NAMES = {
    "an absolute path": b"/etc/passwd",
    "a path that leads up": b"../outside.py",
    "a path that leads up inside": b"thing/../../outside.py",
    "a dot": b"thing/./file.py",
    "a double slash": b"thing//file.py",
    "a backslash": b"thing\\..\\outside.py",
    "a drive": b"C:outside.py",
    "a NUL": b"thing.py\0.txt",
    "a line feed": b"thing\n.py",
    "a bidirectional mark": "thing\u202e.py".encode(),
    "a very long name": b"a" * 1025,
    "many levels": b"/".join([b"a"] * 41),
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_that_is_no_plain_path_is_refused(name: bytes, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / FILENAME, plus(Part(name, b"x")))
    assert zipfile.ZipFile(wheel).testzip() is None  # another reader takes it
    assert refusal_of(wheel, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {FILENAME, "target"}


CLASHES = {
    "one name twice": (b"same.py", b"same.py"),
    "names that differ in case": (b"Same.py", b"same.py"),
    "names that differ in composition": ("s\u00e9.py".encode(), "se\u0301.py".encode()),
    "a file and a directory": (b"same", b"same/inner.py"),
    "a file and a directory that differ in case": (b"Same", b"same/inner.py"),
}


@pytest.mark.parametrize("names", CLASHES.values(), ids=CLASHES)
def test_names_that_are_one_file_somewhere_are_refused(
    names: tuple[bytes, bytes], tmp_path: Path
) -> None:
    parts = plus(*(Part(name, name) for name in names))
    wheel = write_wheel(tmp_path / FILENAME, parts)
    assert len(zipfile.ZipFile(wheel).infolist()) == len(parts) + 1
    assert "same" in refusal_of(wheel, tmp_path).casefold()


def _comment(whole: bytes) -> bytes:
    """A second end of the directory in a comment: some readers look from the front, some from the end."""
    return whole[:-2] + struct.pack("<H", 22) + whole[-22:-2] + b"\0\0"


def _first_byte_of(whole: bytes, content: bytes, new: bytes) -> bytes:
    place = whole.index(content)
    return whole[:place] + new + whole[place + len(new) :]


STRUCTURES = {
    "a link": plus(Part(b"link", b"/etc/passwd", mode=LINK)),
    "a device": plus(Part(b"device", b"", mode=0o020666)),
    "another name in the header": plus(Part(b"thing2.py", b"x", local_name=b"other2.py")),
    "an encrypted entry": plus(Part(b"secret.py", b"x", flags=1)),
    "an unknown method": plus(Part(b"thing2.py", b"x", method=12)),
    "a second name for unicode readers": plus(
        Part(b"thing2.py", b"x", extra=struct.pack("<HHBI", 0x7075, 5 + 4, 1, 0) + b"o.py")
    ),
    "a size that is too small": plus(
        Part(b"thing2.py", b"xyz", method=zipfile.ZIP_DEFLATED, size=1)
    ),
    "a wrong checksum": plus(Part(b"thing2.py", b"x", crc=1)),
    "two streams in one entry": plus(
        Part(
            b"thing2.py",
            b"x",
            method=zipfile.ZIP_DEFLATED,
            packed=zlib.compress(b"x", wbits=-15) * 2,
        )
    ),
    "data that does not inflate": plus(
        Part(b"thing2.py", b"x", method=zipfile.ZIP_DEFLATED, packed=b"\xff\xff\xff")
    ),
    "a zip64 field without need": plus(Part(b"t2.py", b"x", extra=struct.pack("<HHQ", 1, 8, 1))),
    "a field that is cut off": plus(Part(b"t2.py", b"x", extra=struct.pack("<HH", 9, 99))),
    "more than the limit": plus(Part(b"large.bin", bytes(LIMITS[0] + 1))),
    "more files than the limit": plus(*(Part(b"%d" % each, b"") for each in range(LIMITS[1]))),
}


@pytest.mark.parametrize("parts", STRUCTURES.values(), ids=STRUCTURES)
def test_an_entry_that_is_no_plain_file_is_refused(parts: list[Part], tmp_path: Path) -> None:
    assert refusal_of(write_wheel(tmp_path / FILENAME, parts), tmp_path)


def test_files_that_compress_very_well_are_opened(tmp_path: Path) -> None:
    """A limit of bytes says how much a wheel may unpack to, however small it is."""
    assert opened(write_wheel(tmp_path / FILENAME, plus(zeros(LIMITS[0] // 2))), tmp_path) == {
        "left_out": []
    }


def test_the_same_without_the_change_is_opened(tmp_path: Path) -> None:
    parts = plus(
        Part(b"thing2.py", b"x" * 999, method=zipfile.ZIP_DEFLATED),
        Part(b"empty/", b"", mode=0o040755),
    )
    assert opened(write_wheel(tmp_path / FILENAME, parts), tmp_path) == {"left_out": []}


ARCHIVES = {
    "bytes before it": lambda whole: b"#!/bin/sh\n" + whole,
    "bytes after it": lambda whole: whole + b"more",
    "an end in a comment": _comment,
    "bytes between entries": lambda whole: whole.replace(b"PK\1\2", b"gap!PK\1\2", 1),
    "half of it": lambda whole: whole[: len(whole) // 2],
    "no end": lambda whole: whole[:-22],
    "nothing": lambda whole: b"",
    "an end that tells fewer entries": lambda whole: (
        whole[:-14] + struct.pack("<HH", len(PLAIN), len(PLAIN)) + whole[-10:]
    ),
    "an end that tells another disk": lambda whole: whole[:-18] + b"\1\0" + whole[-16:],
    "a zip64 end that is missing": lambda whole: whole[:-14] + b"\xff\xff\xff\xff" + whole[-10:],
    "a changed byte of a file": lambda whole: _first_byte_of(whole, b"answer", b"A"),
}


@pytest.mark.parametrize("change", ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_that_could_be_read_otherwise_is_refused(change: object, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / FILENAME, PLAIN, change=change)  # type: ignore[arg-type]
    assert refusal_of(wheel, tmp_path)


def test_bytes_between_two_entries_are_refused(tmp_path: Path) -> None:
    """They could be an entry for a reader that does not look into the directory."""

    def moved(whole: bytes) -> bytes:
        at, entry = whole.rindex(b"PK\3\4"), whole.rindex(b"PK\1\2")  # both of RECORD
        (start,) = struct.unpack("<I", whole[-6:-2])
        whole = whole[:-6] + struct.pack("<I", start + 4) + whole[-2:]
        whole = whole[: entry + 42] + struct.pack("<I", at + 4) + whole[entry + 46 :]
        return whole[:at] + b"gap!" + whole[at:]

    wheel = write_wheel(tmp_path / FILENAME, PLAIN, change=moved)
    assert zipfile.ZipFile(wheel).testzip() is None  # another reader takes it
    assert "does not begin where the entry before it ends" in refusal_of(wheel, tmp_path)


def test_overlapping_entries_are_refused(tmp_path: Path) -> None:
    """Two entries that share their bytes: how a small archive unpacks to petabytes."""

    def overlap(whole: bytes) -> bytes:
        # the entry of RECORD, which now begins where the first entry does
        start = whole.rindex(b"PK\1\2")
        return whole[: start + 42] + struct.pack("<I", 0) + whole[start + 46 :]

    wheel = write_wheel(tmp_path / FILENAME, PLAIN, change=overlap)
    assert refusal_of(wheel, tmp_path)


def test_a_bomb_of_which_the_size_is_a_lie_ends_early(tmp_path: Path) -> None:
    bomb = Part(b"bomb.bin", bytes(64 << 20), method=zipfile.ZIP_DEFLATED, size=1000, crc=0)
    wheel = write_wheel(tmp_path / FILENAME, plus(bomb))
    assert "more than its size" in refusal_of(wheel, tmp_path)
    assert sum(path.stat().st_size for path in (tmp_path / "target").rglob("*")) < 4 << 20


RECORDS = {
    "a file that is not listed": (
        plus(Part(b"hidden.py", b"x", recorded=False)),
        None,
        "does not list",
    ),
    "a listed file that is missing": (PLAIN, recorded(plus(Part(b"gone.py", b""))), "missing"),
    "a file listed twice": (PLAIN, recorded(PLAIN) + recorded(PLAIN), "twice"),
    "another digest": (PLAIN, recorded(PLAIN).replace(b"sha256=", b"sha256=A", 1), "not the file"),
    "a weak digest": (PLAIN, recorded(PLAIN).replace(b"sha256=", b"md5=", 1), "no sha256"),
    "no digest": (PLAIN, recorded(PLAIN).replace(b"sha256=", b"", 1), "no sha256"),
    "another size": (PLAIN, recorded(PLAIN).replace(b",12\n", b",13\n", 1), "not the file"),
    "no table": (PLAIN, b'"', "not a table"),
    "an empty one": (PLAIN, b"", "does not list"),
}


@pytest.mark.parametrize(("parts", "record", "why"), RECORDS.values(), ids=RECORDS)
def test_a_record_that_does_not_cover_the_wheel_is_refused(
    parts: list[Part], record: bytes | None, why: str, tmp_path: Path
) -> None:
    wheel = write_wheel(tmp_path / FILENAME, parts, record)
    assert zipfile.ZipFile(wheel).testzip() is None
    assert why in refusal_of(wheel, tmp_path)


def test_metadata_must_be_that_of_the_file_name(tmp_path: Path) -> None:
    wheel = good_wheel(tmp_path)
    assert "says that it is thing 1.0, not other 1.0" in refusal_of(wheel, tmp_path, name="other")


def test_another_version_than_that_of_the_file_name_is_refused(tmp_path: Path) -> None:
    assert "not thing 2.0" in refusal_of(good_wheel(tmp_path), tmp_path, version="2.0")


def test_two_info_directories_are_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / FILENAME, plus(Part(b"other-1.0.dist-info/METADATA", b"")))
    assert "2 .dist-info" in refusal_of(wheel, tmp_path)


def test_a_line_of_metadata_ends_where_other_readers_end_it(tmp_path: Path) -> None:
    deceiving = b"Summary: x\x0bName: thing\nName: other\n"
    parts = [
        part._replace(data=part.data.replace(b"Name: thing\n", deceiving))
        if b"METADATA" in part.name
        else part
        for part in PLAIN
    ]
    assert "says that it is other" in refusal_of(write_wheel(tmp_path / FILENAME, parts), tmp_path)


def test_an_unknown_wheel_version_is_refused(tmp_path: Path) -> None:
    parts = [
        part._replace(data=part.data.replace(b"Wheel-Version: 1.0", b"Wheel-Version: 2.0"))
        for part in PLAIN
    ]
    assert "wheel version '2.0'" in refusal_of(write_wheel(tmp_path / FILENAME, parts), tmp_path)


LEFT_OUT = (
    "thing.pth", "sitecustomize.py", "usercustomize/__init__.py", "thing/__pycache__/b.cpython-311.pyc",
    "sitecustomize.abi3.so",
    "thing/sourceless.pyc", "thing-1.0.data/scripts/run", "thing-1.0.data/headers/thing.h", "thing-1.0.data/data/share/x",
)  # fmt: skip


def test_what_would_start_by_itself_is_left_out(tmp_path: Path) -> None:
    files = {
        **dict.fromkeys(LEFT_OUT, b"import os\n"),
        "thing-1.0.data/purelib/inner/a.py": b"a = 1\n",
    }
    told = opened(good_wheel(tmp_path, files), tmp_path)
    assert told == {"left_out": list(LEFT_OUT)}
    assert (tmp_path / "target/inner/a.py").is_file()
    found = {path.name for path in (tmp_path / "target").rglob("*")}
    assert not found & {
        "thing.pth",
        "sitecustomize.py",
        "usercustomize",
        "b.cpython-311.pyc",
        "run",
    }


def test_data_of_another_package_is_refused(tmp_path: Path) -> None:
    wheel = good_wheel(tmp_path, {"other-2.0.data/purelib/a.py": b""})
    assert "another package" in refusal_of(wheel, tmp_path)


def test_data_that_takes_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    wheel = good_wheel(tmp_path, {"a.py": b"1", "thing-1.0.data/purelib/a.py": b"2"})
    assert "one place" in refusal_of(wheel, tmp_path)


def test_a_module_that_does_not_compile_stays_source(tmp_path: Path) -> None:
    wheel = good_wheel(tmp_path, {"old.py": b"print 1\n", "nul.py": b"\0", "deep.py": b"(" * 5000})
    assert opened(wheel, tmp_path) == {"left_out": []}
    assert not list((tmp_path / "target").rglob("*.pyc"))


def test_wheels_that_python_itself_writes_are_opened(tmp_path: Path) -> None:
    """With a descriptor after each entry, as a stream is written, and with zip64 fields."""
    for stream in (False, True):
        whole = io.BytesIO()
        with zipfile.ZipFile(
            Unseekable(whole) if stream else whole, "w", zipfile.ZIP_DEFLATED
        ) as archive:
            for part in [*PLAIN, Part(f"{INFO}/RECORD".encode(), recorded(PLAIN))]:
                info = zipfile.ZipInfo(part.name.decode())
                info.external_attr = REGULAR << 16
                with archive.open(info, "w", force_zip64=True) as file:
                    file.write(part.data)
        wheel = tmp_path / f"{stream}.whl"
        wheel.write_bytes(whole.getvalue())
        place = tmp_path / str(stream)
        place.mkdir()
        assert opened(wheel, place) == {"left_out": []}


class Unseekable(io.RawIOBase):
    """A stream: a writer cannot go back and put sizes into headers."""

    def __init__(self, whole: io.BytesIO) -> None:
        self._whole = whole

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        return self._whole.write(data)
