"""Hostile skills as folders: each is refused when it is read, before anything of it is used."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from cellwright.harness.skills import skill as tree_module
from cellwright.harness.skills.skill import SkillTree, read_skill
from cellwright.policies.errors import SkillInvalid

FRONT = "---\nname: bad\ndescription: d\n---\n"
Make = Callable[[Path], object]


class Hostile(NamedTuple):
    make: Make
    refused: str  # a part of the message


def _front(text: str, body: str = "") -> Make:
    return lambda folder: (folder / "SKILL.md").write_text(f"---\n{text}\n---\n{body}")


def _bytes(name: str, content: bytes = b"x") -> Make:
    def make(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return make


def _many(folder: Path) -> None:
    for number in range(501):
        (folder / str(number)).touch()


def _deep(folder: Path) -> None:
    for _ in range(9):
        folder = folder / "d"
        folder.mkdir()
    (folder / "f").touch()


def _empty_directories(folder: Path) -> None:
    for number in range(1001):
        (folder / f"d{number}").mkdir()


def _heavy(folder: Path) -> None:
    for number in range(21):
        os.truncate(os.open(folder / str(number), os.O_CREAT | os.O_WRONLY, 0o644), 1024 * 1024)


def _linked(folder: Path) -> None:
    (folder.parent / "elsewhere").write_text("x")
    os.link(folder.parent / "elsewhere", folder / "notes.md")


def _socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "s"))


def _set_uid(folder: Path) -> None:
    (folder / "run").touch()
    (folder / "run").chmod(0o4755)


def _cases(folder: Path) -> None:
    (folder / "README.md").touch()
    (folder / "readme.md").touch()


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nname: bad\ndescription: d"
HOSTILE = {
    "a link to a file of the host": Hostile(lambda f: (f / "k").symlink_to("/etc/passwd"), "link"),
    "a link to a directory": Hostile(lambda f: (f / "references").symlink_to("/etc"), "link"),
    "a link that leads nowhere": Hostile(lambda f: (f / "k").symlink_to("gone"), "link"),
    "a hard link": Hostile(_linked, "hard link"),
    "a pipe, which would block a reader": Hostile(lambda f: os.mkfifo(f / "p"), "special"),
    "a socket": Hostile(_socket, "special"),
    "a set-uid file": Hostile(_set_uid, "set-uid"),
    "bytecode by its name": Hostile(_bytes("scripts/run.pyc"), "compiled"),
    "bytecode in a cache": Hostile(_bytes("scripts/__pycache__/run.cpython-311"), "compiled"),
    "bytecode under another name": Hostile(_bytes("notes.md", b"\xa7\r\r\n" + b"\0" * 12), "compiled"),
    "an extension module": Hostile(_bytes("scripts/json.so"), "compiled"),
    "too many files": Hostile(_many, "more than 500 files"),
    "too many empty directories": Hostile(_empty_directories, "more than 500 files"),
    "too deep a tree": Hostile(_deep, "deep"),
    "a sparse file of a terabyte": Hostile(lambda f: os.truncate(_made(f / "big"), 1 << 40), "more than"),
    "too many bytes": Hostile(_heavy, "20971520 bytes"),
    "names that differ in case": Hostile(_cases, "in case alone"),
    "a name with a right-to-left override": Hostile(_bytes("run\u202eym.py"), "hidden"),
    "a name with a line end": Hostile(_bytes("a\nb"), "hidden"),
    "a name that is not UTF-8": Hostile(lambda f: os.close(os.open(os.fsencode(f) + b"/\xff", os.O_CREAT)), "hidden"),
    "a name with a full-width letter": Hostile(_bytes("\uff52un.py"), "NFKC"),
    "a name with a backslash": Hostile(_bytes("..\\run.py"), "path"),
    "a name of a half-written file": Hostile(_bytes("scripts/run.py~"), "path"),
    "a name with a blank at its end": Hostile(_bytes("run.py "), "path"),
    "a homograph of another name": Hostile(_front("name: b\u0430d\ndescription: d"), "name"),
    "a name that is a path": Hostile(_front("name: ../bad\ndescription: d"), "name"),
    "the name of another skill": Hostile(_front("name: good\ndescription: d"), "folder"),
    "a bomb of aliases": Hostile(_front(BOMB), "anchors"),
    "a tag that makes an object": Hostile(_front("name: !!python/object/apply:os.system [id]\ndescription: d"), "tags"),
    "the same key twice": Hostile(_front("name: bad\ndescription: d\ndescription: e"), "twice"),
    "deep nesting": Hostile(_front("name: bad\ndescription: d\nmetadata: " + "[" * 900), "deeply"),
    "thousands of fields": Hostile(_front("name: bad\ndescription: d\n" + "\n".join(f"k{n}: v" for n in range(900))), "parts"),
    "a huge front matter": Hostile(_front("name: bad\ndescription: " + "d" * 20_000), "bytes"),
    "a front matter without an end": Hostile(lambda f: (f / "SKILL.md").write_text("---\nname: bad\n"), "closing"),
    "a second document": Hostile(_front("name: bad\ndescription: d\n...\n%YAML 1.1"), "SKILL.md"),
    "hidden tags in the description": Hostile(_front("name: bad\ndescription: d\U000e0041\U000e0042"), "hidden"),
    "a hidden character in a comment": Hostile(
        _front("name: bad\ndescription: d # \u200b"), "hidden"
    ),
    "an escape of a hidden character": Hostile(_front('name: bad\ndescription: "d\\u200b"'), "hidden"),
    "an escape sequence in the licence": Hostile(_front('name: bad\ndescription: d\nlicense: "\\x1b[2J"'), "hidden"),
    "a hidden character in the metadata's keys": Hostile(_front('name: bad\ndescription: d\nmetadata:\n  "a\\u202e": b'), "hidden"),
    "padding before the payload": Hostile(_front("name: bad\ndescription: d", "# Fine\n" + "\n" * 10_000 + "rm -rf ~"), "gap"),
    "padding of blanks": Hostile(_front("name: bad\ndescription: d", "fine" + " " * 5000 + "rm -rf ~"), "gap"),
    "a body beyond what is read": Hostile(_front("name: bad\ndescription: d", "words " * 20_000), "characters"),
    "no text at all": Hostile(_bytes("SKILL.md", b"\xff\xfe" + b"\0" * 100), "UTF-8"),
    "a SKILL.md that is a directory": Hostile(lambda f: ((f / "SKILL.md").unlink(), (f / "SKILL.md").mkdir()), "SKILL.md"),
}  # fmt: skip


def _made(path: Path) -> Path:
    path.touch()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "bad"
    made.mkdir()
    (made / "SKILL.md").write_text(FRONT)
    read_skill(made)  # without what follows it is a skill
    return made


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_refused(folder: Path, case: str) -> None:
    HOSTILE[case].make(folder)
    with pytest.raises(SkillInvalid, match=HOSTILE[case].refused):
        read_skill(folder)


def test_the_folder_itself_may_not_be_a_link(folder: Path) -> None:
    (folder.parent / "other").symlink_to(folder)
    with pytest.raises(SkillInvalid, match="link"):
        read_skill(folder.parent / "other", "bad")


def test_an_endless_directory_is_left_after_its_thousandth_entry(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system of its author, such as one over the network, may list names forever."""
    (folder / "f").touch()
    listed = 0
    scandir = os.scandir

    class Endless:
        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            return self._entries()

        def __exit__(self, *_: object) -> None:
            return

        def _entries(self) -> Iterator[os.DirEntry[str]]:
            nonlocal listed
            with scandir(folder) as entries:
                (entry,) = [each for each in entries if each.name == "f"]
            while True:
                listed += 1
                yield entry

    monkeypatch.setattr(tree_module.os, "scandir", lambda _: Endless())
    with pytest.raises(SkillInvalid, match="more than 500 files"):
        read_skill(folder)
    assert listed == 1001


def test_a_file_that_becomes_a_link_while_it_is_read_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a file and its opening, its author replaces it."""
    (folder / "notes.md").write_text("fine")
    opened = os.open

    def swap(path: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
        if path == "notes.md":
            (folder / "notes.md").unlink()
            (folder / "notes.md").symlink_to("/etc/passwd")
        return opened(path, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(tree_module.os, "open", swap)
    with pytest.raises(SkillInvalid, match="link"):
        read_skill(folder)


@pytest.mark.parametrize(
    "path", ["../x", "/x", "a/../x", "a//x", "", ".", "a/./b", "x\0", "a" * 300]
)
def test_a_path_of_a_made_tree_stays_inside_it(path: str) -> None:
    with pytest.raises(SkillInvalid):
        SkillTree({path: b""})
