"""Answers on disk: read back, and never read from where others could write."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cellwright.runner.host.answer_cache import cached
from tests.conftest import ROOT


class Answer(msgspec.Struct):
    number: int
    text: str = ""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cellwright"


def counting() -> tuple[list[int], Callable[[], Answer]]:
    calls: list[int] = []

    def compute() -> Answer:
        calls.append(1)
        return Answer(len(calls))

    return calls, compute


def only_file(home: Path) -> Path:
    (file,) = home.iterdir()
    return file


def test_the_second_question_is_answered_from_disk(home: Path) -> None:
    calls, compute = counting()
    assert cached("key", Answer, compute) == cached("key", Answer, compute) == Answer(1)
    assert len(calls) == 1
    assert cached("other", Answer, compute) == Answer(2)


def test_directory_and_files_are_the_users_own(home: Path) -> None:
    cached("key", Answer, counting()[1])
    assert home.stat().st_mode & 0o777 == 0o700
    assert not only_file(home).stat().st_mode & 0o022


def spoil_by_mode(file: Path) -> None:
    file.chmod(0o622)


def spoil_by_group(file: Path) -> None:
    file.chmod(0o660)


def spoil_by_directory(file: Path) -> None:
    file.parent.chmod(0o777)


def spoil_by_link(file: Path) -> None:
    other = file.parent.parent / "other"
    file.rename(other)
    file.symlink_to(other)


def spoil_by_directory_link(file: Path) -> None:
    other = file.parent.parent / "elsewhere"
    file.parent.rename(other)
    file.parent.symlink_to(other)


def spoil_by_garbage(file: Path) -> None:
    file.write_bytes(b"garbage")


def spoil_by_nothing(file: Path) -> None:
    file.write_bytes(b"")


def spoil_by_type(file: Path) -> None:
    file.write_bytes(msgspec.msgpack.encode({"number": "text"}))


def spoil_by_nesting(file: Path) -> None:
    file.write_bytes(b"\x91" * 100_000)


def spoil_by_no_text(file: Path) -> None:
    file.write_bytes(b"\x82\xa6number\x01\xa4text\xa2\xff\xfe")


SPOILT = [spoil_by_mode, spoil_by_group, spoil_by_directory, spoil_by_link, spoil_by_directory_link,
          spoil_by_garbage, spoil_by_nothing, spoil_by_type, spoil_by_nesting, spoil_by_no_text]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_file_that_cannot_be_trusted_is_not_read(
    home: Path, spoil: Callable[[Path], None]
) -> None:
    _, compute = counting()
    cached("key", Answer, compute)
    spoil(only_file(home))
    assert cached("key", Answer, compute) == Answer(2)


@pytest.mark.needs("root")
def test_a_file_of_another_user_is_not_read(home: Path) -> None:
    _, compute = counting()
    cached("key", Answer, compute)
    os.chown(only_file(home), 54322, 54322)
    assert cached("key", Answer, compute) == Answer(2)


@pytest.mark.parametrize("where", ["relative/path", "/proc/nowhere", "/dev/null/x", ""])
def test_without_a_place_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", where)
    monkeypatch.delenv("HOME", raising=False)
    calls, compute = counting()
    cached("key", Answer, compute)
    cached("key", Answer, compute)
    assert len(calls) == 2


def test_an_exception_is_not_kept(home: Path) -> None:
    def fail() -> Answer:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached("key", Answer, fail)
    assert cached("key", Answer, counting()[1]) == Answer(1)


def test_no_temporary_file_stays(home: Path) -> None:
    for number in range(5):
        cached(f"key {number}", Answer, counting()[1])
    assert len(list(home.iterdir())) == 5


def test_the_oldest_go_when_there_are_many(home: Path) -> None:
    cached("key", Answer, counting()[1])
    stale = home / f"{'0' * 64}.123.456"  # left by who was killed while writing
    other = home / "hosts"
    other.mkdir()
    for file in (stale, *(home / f"{number:064x}" for number in range(300))):
        file.write_bytes(b"")
        os.utime(file, (1, 1) if file != stale else (0, 0))
    cached("another", Answer, counting()[1])
    assert not stale.exists()
    assert other.is_dir()
    assert len(list(home.iterdir())) == 128 + 1
    calls, compute = counting()
    assert cached("key", Answer, compute) == cached("another", Answer, compute) == Answer(1)
    assert not calls


@pytest.mark.needs("root")
@pytest.mark.parametrize(("options", "flags"), [("size=4k,nr_inodes=3", 0), ("size=64k", 1)])
def test_a_disk_that_is_full_or_read_only_costs_time_and_nothing_stays(
    tmp_path: Path, options: str, flags: int
) -> None:
    """In a mount namespace of its own: the directory is there, and takes no file, or none whole."""
    script = f"""
import ctypes, os, sys
sys.path[:0] = {[str(ROOT), *sys.path]!r}
from pathlib import Path
from cellwright.runner.host.answer_cache import cached
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x20000) == 0 and libc.mount(None, b"/", None, 0x44000, None) == 0
place = {str(tmp_path)!r}.encode()
def mount(flags): assert libc.mount(b"tmpfs", place, b"tmpfs", flags, {options!r}.encode()) == 0
mount(0)
home = Path(os.fsdecode(place), "cellwright")
home.mkdir(mode=0o700)
{flags} and mount(32 | {flags})  # MS_REMOUNT
os.environ["XDG_CACHE_HOME"] = os.fsdecode(place)
calls = []
for _ in range(2):
    assert cached("key", str, lambda: calls.append(1) or "x" * 20_000) == "x" * 20_000
print(len(calls), os.listdir(home))
"""
    command = [sys.executable, "-I", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stderr, done.stdout) == ("", "2 []\n")


def test_a_plan_is_compiled_anew_once_any_module_of_the_compiler_has_changed() -> None:
    """Before, one that was taken out of another was not looked at: plans outlived their compiler."""
    code = (
        "import sys; import cellwright.policies.compiling.compile; from cellwright.runner.host import plans\n"
        "identity = plans._compiler_identity().decode()\n"
        "used = {name: module for name, module in sys.modules.items()\n"
        "        if name.startswith('cellwright.policies.') and '.source' not in name}  # advice\n"
        "print(len(used) > 5, [name for name, each in used.items() if each.__file__ not in identity])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"
