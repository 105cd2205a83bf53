"""Archives of a session's files: what tarfile writes is read, and what is hostile is refused at once."""

import gzip
import io
import tarfile
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright import PolicyError, Sandbox, WorkspaceError
from cellwright.harness.sandbox.workspaces.archive import entries, unpack
from tests.conftest import policy_named

END = bytes(1024)
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def header(name: bytes = b"f", size: bytes = b"0", kind: bytes = b"0") -> bytes:
    """Return one header with a checksum that is right, whatever else is not."""
    made = bytearray(512)
    made[: len(name)], made[124 : 124 + len(size)], made[156:157] = name, size, kind
    made[148:156] = b" " * 8
    made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made)


def member(content: bytes, name: bytes = b"f", kind: bytes = b"0") -> bytes:
    return header(name, b"%o" % len(content), kind) + content + bytes(-len(content) % 512)


def record(key: bytes, value: bytes) -> bytes:
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode() + rest


def archived(files: dict[str, bytes], kind: int) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=kind) as archive:
        archive.addfile(tarfile.TarInfo("directory/"))
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return data.getvalue()


NAMES = st.text(st.characters(exclude_characters="\0/", codec="utf-8"), min_size=1, max_size=60)


@given(st.dictionaries(NAMES, st.binary(max_size=1500), max_size=4), st.sampled_from(FORMATS[1:]))
def test_what_tarfile_writes_is_read(files: dict[str, bytes], kind: int) -> None:
    assert unpack(archived(files, kind)) == files


@pytest.mark.parametrize("kind", FORMATS)
def test_long_paths_are_read(kind: int) -> None:
    files = {"d" * 90 + "/" + "e" * 90: b"1", "f": b"2"}
    assert unpack(archived(files, kind)) == files
    if kind != tarfile.USTAR_FORMAT:
        files = {"d" * 255 + "/\u00fc" * 200: b"1"}
        assert unpack(archived(files, kind)) == files


@given(st.integers(0, 2047), st.integers(0, 255), st.sampled_from(FORMATS[1:]))
def test_a_changed_byte_is_refused_or_changes_a_file(place: int, value: int, kind: int) -> None:
    data = bytearray(archived({"n" * 120: b"abc", "m": b""}, kind))
    data[place] = value
    try:
        assert len(unpack(bytes(data))) <= 3
    except PolicyError as error:
        assert len(str(error)) < 300


@given(st.binary(max_size=3000))
def test_bytes_that_are_no_archive_are_refused(data: bytes) -> None:
    if data.strip(b"\0"):
        with pytest.raises(PolicyError, match="not a tar archive"):
            unpack(data)


HOSTILE = {
    "compressed": (gzip.compress(member(b"x") + END), "it is compressed"),
    "empty": (b"", "it is empty"),
    "a size below zero, CVE-2025-8194": (header(size=b"\xff" * 10 + b"\xfc\0") + END, "ends in the middle"),
    "a size that lies": (header(size=b"77777777777") + END, "ends in the middle"),
    "a pax size that lies": (member(record(b"size", b"9" * 4000), kind=b"x") + header(), "ends in the"),
    "a pax size below zero": (member(record(b"size", b"-512"), kind=b"x") + header(), "ends in the middle"),
    "a pax size of too many digits": (member(record(b"size", b"9" * 9000), kind=b"x") + header(), "limit"),
    "a pax record without end, CVE-2024-6232": (member(b"1" * 200_000, kind=b"x"), "not found"),
    "a pax record of no length": (member(b"0 a=b\n", kind=b"x"), "longer than"),
    "a pax record that is too long": (member(b"999 a=b\n", kind=b"x"), "longer than its header"),
    "a sparse file, by GNU": (header(size=b"0", kind=b"S"), "sparse"),
    "a sparse file, by pax": (
        member(record(b"GNU.sparse.realsize", b"9223372036854775807"), kind=b"x") + header(), "sparse",
    ),
    "a million members": (header() * 100_001, "more than 100000 members"),
    "a name that is no text": (header(b"\xff"), "can't decode"),
    "a wrong checksum": (header()[:-1] + b"x", "checksum"),
    "half a header": (header()[:300], "checksum"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "why"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_archive_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(PolicyError, match=f"not a tar archive: .*{why}"):
        unpack(data)


def test_headers_without_end_neither_recurse_nor_grow() -> None:
    chain = member(b"long\0", kind=b"L") * 5000 + member(record(b"path", b"p"), kind=b"x") * 5000
    assert unpack(chain + member(b"1") + END) == {"p": b"1"}


def test_records_that_nobody_uses_are_not_kept() -> None:
    """Each header has a megabyte of them, under another name."""

    class Headers:
        def __len__(self) -> int:
            return 1 << 40

        def __getitem__(self, part: slice) -> bytes:
            number, place = divmod(part.start, 1 << 20)
            return chain(number)[place : place + part.stop - part.start]

    def chain(number: int) -> bytes:
        key, value = b"%06d" % number, b"v" * ((1 << 20) - 512 - 20)
        return member(record(key, value), kind=b"x")

    assert len(chain(1)) == 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="more than 40 members"):
            list(entries(Headers(), 40))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_of_one_name_twice_the_last_counts() -> None:
    assert unpack(member(b"first") + member(b"second") + END) == {"f": b"second"}


def test_nothing_but_regular_files_is_taken() -> None:
    others = b"".join(
        header(kind=kind) for kind in (b"1", b"2", b"3", b"4", b"5", b"6", b"g", b"Z")
    )
    assert unpack(others + header(b"d/") + member(b"1", b"kept") + END) == {"kept": b"1"}


# Through a session


def test_files_that_claim_more_than_there_is_room_for_are_not_kept() -> None:
    """2,000 names of one sparse file would be 128 GB here."""
    claim = "import os\nwith open('f', 'wb') as file: file.truncate(1 << 26)\nfor n in range(2000): os.link('f', f'g{n}')"
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox, sandbox.session() as session:
        assert session.execute(claim).ok
        with pytest.raises(WorkspaceError, match="claim more than the 67108864 bytes"):
            session.snapshot()
        assert session.download("f") == bytes(1 << 26)


def test_as_many_files_as_are_kept_can_be_put_back() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox, sandbox.session() as session:
        session.execute("for n in range(5000): open(f'{n}', 'w').write(str(n))")
        kept = session.snapshot()
        with sandbox.session() as other:
            other.restore(kept)
            assert len(other.files()) == 5000
            assert other.download("4999") == b"4999"
