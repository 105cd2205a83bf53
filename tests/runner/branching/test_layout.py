"""Layouts of memory: parsed, bounded and compared, without any process."""

import re
import tracemalloc
from itertools import pairwise

import pytest

from cellwright.runner.branching.layout import (
    MOST_BYTES,
    MOST_MAPPINGS,
    Change,
    Mapping,
    NotCopyable,
    changes,
    parse,
)

LIBRARY = b"/usr/lib/libc.so.6"
BASE = b"""\
10000-12000 rw-p 00000000 00:00 0                          [heap]
20000-24000 r-xp 00001000 fe:00 77                         /usr/lib/libc.so.6
30000-38000 rw-p 00000000 00:00 0
7fff0000-7fff8000 rw-p 00000000 00:00 0                    [stack]
7fffa000-7fffb000 r-xp 00000000 00:00 0                    [vdso]
"""  # fmt: skip


def described(source: bytes, target: bytes = BASE) -> list[tuple[str, int, int]]:
    return [each[:3] for each in changes(parse(source), parse(target))]


def test_a_line_of_the_kernel_is_read_whole() -> None:
    assert parse(BASE)[1] == Mapping(0x20000, 0x24000, "r-xp", 0x1000, "fe:00", 77, LIBRARY)
    assert parse(b"1000-2000 r--p 00000000 00:2a 5    /workspace/a\\012b c\n")[0].name == (
        b"/workspace/a\nb c"
    )


def test_a_name_is_one_line_whatever_is_in_it() -> None:
    """The kernel escapes a newline in a name, and nothing else that ends a line elsewhere."""
    name = b"/workspace/x\r40000-50000 rwxp 00000000 00:00 0\x0b\x0c\x1c\xc2\x85y"
    (found,) = parse(b"1000-2000 r--p 00000000 00:2a 5    " + name + b"\n")
    assert found.name == name


def test_equal_layouts_need_no_change() -> None:
    assert described(BASE) == []


def test_one_mapping_cut_in_two_is_the_same_layout() -> None:
    cut = BASE.replace(
        b"30000-38000 rw-p 00000000 00:00 0\n",
        b"30000-34000 rw-p 00000000 00:00 0\n34000-38000 rw-p 00000000 00:00 0\n",
    )
    assert described(cut) == described(BASE, cut) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (b"30000-38000 rw-p", b"30000-3a000 rw-p", [("memory", 0x38000, 0x3A000)]),
        (b"30000-38000 rw-p", b"32000-38000 rw-p", [("unmap", 0x30000, 0x32000)]),
        (b"30000-38000 rw-p", b"30000-38000 r--p", [("protect", 0x30000, 0x38000)]),
        (b"fe:00 77", b"fe:00 78", [("file", 0x20000, 0x24000)]),
        (b"00001000 fe:00 77", b"00002000 fe:00 77", [("file", 0x20000, 0x24000)]),
    ],
)
def test_each_difference_becomes_one_change(
    before: bytes, after: bytes, expected: list[tuple[str, int, int]]
) -> None:
    assert described(BASE.replace(before, after)) == expected


def test_a_piece_of_a_file_keeps_its_offset() -> None:
    larger = BASE.replace(b"20000-24000 r-xp 00001000", b"1e000-24000 r-xp 0000f000")
    larger = larger.replace(b"0000f000", b"00000000")
    (change,) = changes(
        parse(larger),
        parse(BASE.replace(b"20000-24000 r-xp 00001000", b"20000-24000 r-xp 00002000")),
    )
    assert (change.kind, change.start, change.offset) == ("file", 0x1E000, 0)


def test_a_smaller_stack_is_no_difference() -> None:
    assert described(BASE.replace(b"7fff0000", b"7fff4000")) == []


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (b"7fffa000-7fffb000", b"7fffc000-7fffd000", "moved [vdso]"),
        (b"7fff0000", b"7ffe0000", "stack cannot be grown"),
        (b"30000-38000 rw-p 00000000 00:00 0", b"30000-38000 rw-s 00000000 00:01 9 /dev/zero (deleted)", "shares memory"),
        (b"30000-38000 rw-p 00000000 00:00 0", b"30000-38000 rw-p 00000000 00:2a 9 /tmp/x (deleted)", "no name"),
        (b"30000-38000 rw-p 00000000 00:00 0", b"30000-38000 rw-p 00000000 00:2a 9 anon_inode:x", "no name"),
    ],
)  # fmt: skip
def test_what_a_copy_cannot_have_is_refused_by_name(before: bytes, after: bytes, why: str) -> None:
    with pytest.raises(NotCopyable, match=re.escape(why)):
        described(BASE.replace(before, after))


def test_the_number_of_mappings_is_bounded() -> None:
    lines = [
        b"%x-%x rw-p 00000000 00:00 0\n" % (n << 13, (n << 13) + 4096)
        for n in range(1, MOST_MAPPINGS + 2)
    ]
    assert len(parse(b"".join(lines[:-1]))) == MOST_MAPPINGS
    with pytest.raises(NotCopyable, match="mappings"):
        parse(b"".join(lines))


def test_the_mapped_bytes_are_bounded() -> None:
    with pytest.raises(NotCopyable, match="GiB"):
        parse(b"10000-%x ---p 00000000 00:00 0\n" % (0x10000 + MOST_BYTES + 4096))


def test_long_names_are_not_kept_from_one_session_to_the_next() -> None:
    tracemalloc.start()
    try:
        for n in range(4):
            parse(
                b"".join(
                    b"%x000-%x000 r--p 0 00:2a 5 /%d%s\n" % (m, m + 1, n, b"x" * 4000)
                    for m in range(1, 201)
                )
            )
        assert tracemalloc.get_traced_memory()[0] < 200 * 4000
    finally:
        tracemalloc.stop()


def test_changes_never_overlap_and_are_in_order() -> None:
    other = BASE.replace(b"30000-38000 rw-p", b"2c000-34000 r--p")
    found: list[Change] = changes(parse(other), parse(BASE))
    assert [each.kind for each in found] == ["memory", "protect", "unmap"]
    assert all(one.end <= two.start for one, two in pairwise(found))
