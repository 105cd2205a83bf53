"""Arguments in words, read from a thread that is this very test."""

import ctypes
import os
import socket
import struct
import threading

import pytest

from cellwright.runner.kernel.notifications import Notification
from cellwright.runner.listening.evidence import describe, flag_names, open_attempt, quoted, who
from cellwright.runner.listening.waiting_call import TEXT_BYTES, bytes_at, text_at

ME = threading.get_native_id()
KEPT: list[object] = []


def at(data: bytes) -> int:
    """Put `data` into memory and return where."""
    KEPT.append(buffer := ctypes.create_string_buffer(data, len(data)))
    return ctypes.addressof(buffer)


def told(call: str, *arguments: int) -> tuple[str, ...]:
    six = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    return describe(call, Notification(1, ME, 0, six))


INET = (
    struct.pack("=H", socket.AF_INET) + (443).to_bytes(2, "big") + bytes([10, 0, 0, 1]) + bytes(8)
)
INET6 = (
    struct.pack("=H", socket.AF_INET6)
    + (53).to_bytes(2, "big")
    + bytes(4)
    + bytes(15)
    + b"\1"
    + bytes(4)
)
UNIX = struct.pack("=H", socket.AF_UNIX) + b"\0abstract\n"
WORDS = {
    "inet": (("connect", 3, at(INET), len(INET)), ("3", "10.0.0.1:443")),
    "inet6": (("connect", 3, at(INET6), len(INET6)), ("3", "[::1]:53")),
    "unix": (("bind", 3, at(UNIX), len(UNIX)), ("3", "unix '\\x00abstract\\n'")),
    "short address": (("connect", 3, at(b"\2"), 1), ("3", hex(at(b"\2")))),
    "lying length": (("connect", 3, 16, 2**32 - 1), ("3", "0x10")),
    "unknown call": (("syscall_9", 1, 2, 7, 3), ("0x1", "0x2")),
    "unknown family": (("socket", 9999, 3 | 0o2000000, 0), ("family 9999", "SOCK_RAW", "0")),
    "negative": (("kill", 2**64 - 1, 9), ("-1", "SIGKILL")),
    "signal": (("kill", 1, 12345), ("1", "12345")),
    "namespaces": (("unshare", 0x10020000), ("CLONE_NEWNS|CLONE_NEWUSER",)),
    "path": (("chroot", at(b"/a b\0")), ("'/a b'",)),
    "nothing there": (("chroot", 0), ("''",)),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WORDS.values(), ids=WORDS)
def test_arguments_are_put_into_words(call: tuple[str | int, ...], words: tuple[str, ...]) -> None:
    name, *arguments = call
    if name == "connect" and words[1].startswith("0x") and words[1] != "0x10":
        words = (words[0], hex(int(arguments[1])))
    assert told(str(name), *map(int, arguments)) == words


def test_a_long_text_is_cut_and_says_so() -> None:
    data = text_at(ME, at(b"a" * 5000 + b"\0"))
    assert len(data) == TEXT_BYTES
    assert quoted(data).endswith("'...")


def test_memory_that_cannot_be_read_is_empty() -> None:
    for address in (0, 1, 2**63, 2**64 - 1, 0x10):
        assert bytes_at(ME, address, 8) == b""
    assert bytes_at(2**22 - 1, at(b"x"), 1) == b""


def test_open_in_its_four_forms() -> None:
    name = at(b"/etc/x\0")
    how = at(struct.pack("=QQQ", os.O_RDWR, 0, 0))
    forms = {
        "open": (name, os.O_RDWR),
        "openat": (2**64 - 100, name, os.O_RDWR),
        "openat2": (2**64 - 100, name, how),
        "creat": (name, 0o644),
    }
    for call, arguments in forms.items():
        attempt = open_attempt(call, Notification(1, ME, 0, (*arguments, 0, 0, 0)))
        assert attempt.path == "/etc/x"
        assert attempt.flags & (os.O_RDWR | os.O_WRONLY)


def test_only_a_name_that_climbs_is_looked_up() -> None:
    below = open_attempt("open", Notification(1, ME, 0, (at(b"x/y\0"), 0, 0)))
    assert below.path == "/workspace/"
    above = open_attempt("open", Notification(1, ME, 0, (at(b"../x\0"), 0, 0)))
    assert above.path == f"{os.getcwd()}/../x"


def test_flags_have_names() -> None:
    assert flag_names(os.O_RDONLY) == "O_RDONLY"
    assert flag_names(os.O_WRONLY | os.O_CREAT | os.O_EXCL) == "O_WRONLY|O_CREAT|O_EXCL"
    assert flag_names(os.O_TMPFILE | os.O_RDWR) == "O_RDWR|O_DIRECTORY|O_TMPFILE"


def test_a_process_that_is_gone_has_no_name() -> None:
    assert who(2**22 - 1) == "?"
    assert who(ME).endswith(f"({ME})") or who(ME).endswith(")")
