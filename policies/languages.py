"""The languages that cells run besides Python, each by the interpreter that the host has."""

import json
import os
from typing import NamedTuple


class Language(NamedTuple):
    """`program` is looked for on the host, in `package` of a distribution; it is given `arguments` and
    then the path of the source, whose name ends in `suffix`.

    In a session it is given `arguments` and `conversing`.  `nothing` is a program that does nothing,
    `shares` another language whose interpreter this one has, and `start_up` names the variables by
    which an interpreter that is started with the program's own would run something before it.  `quiet`
    are system calls that it tries by itself and does without: that they are refused is no attempt.
    """

    program: str
    package: str
    suffix: str
    nothing: str
    arguments: tuple[str, ...] = ()
    conversing: tuple[str, ...] = ()
    is_shell: bool = False
    shares: str = ""
    start_up: tuple[str, ...] = ()
    quiet: tuple[str, ...] = ()


PYTHON = "python"
SHEBANG_BYTES = 256  # BINPRM_BUF_SIZE of linux/binfmts.h
TOOL_CLIENT = (
    "/dev/bin/cellwright-call"  # the cell's own, for shells; no policy shows a path in /dev
)
# SHELLOPTS and BASHOPTS switch on what traces and sources; ENV is read by an interactive sh, too.
_SHELLS_START_UP = ("BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS")
_LIBUVS = ("io_uring_setup",)  # since 1.45, for every event loop
_NO_FILES = ("--noprofile", "--norc")
LANGUAGES = {
    "bash": Language(
        "bash", "bash", ".bash", ":", _NO_FILES, ("--noediting", "-i"),
        is_shell=True, start_up=_SHELLS_START_UP,
    ),
    "javascript": Language("node", "nodejs", ".js", ";", quiet=_LIBUVS),
    "ruby": Language(
        "ruby", "ruby", ".rb", "nil",
        ("--disable-gems", "--external-encoding=UTF-8"),  # no locale is shown
    ),
    "sh": Language(
        "sh", "dash", ".sh", ":", (), ("+m", "-i"), is_shell=True, start_up=_SHELLS_START_UP
    ),
    "typescript": Language(
        "node", "nodejs", ".ts", ";", ("--disable-warning=ExperimentalWarning",),
        shares="javascript", quiet=_LIBUVS,
    ),
}  # fmt: skip
# What people call them too.
_ALSO_CALLED = {
    "python3": PYTHON,
    "py": PYTHON,
    "js": "javascript",
    "node": "javascript",
    "rb": "ruby",
    "ts": "typescript",
}


def language_names() -> tuple[str, ...]:
    return (PYTHON, *LANGUAGES)


def interpreted_languages() -> tuple[str, ...]:
    """Return those that have an interpreter of their own, which a sandbox may be told."""
    return tuple(name for name, each in LANGUAGES.items() if not each.shares)


def interpreter_of(language: str) -> str:
    """Return the language whose interpreter runs `language`."""
    return LANGUAGES[language].shares or language


def program_that_does_nothing(language: str) -> str:
    return "pass" if language == PYTHON else LANGUAGES[language].nothing


def as_environment(inputs: bytes) -> dict[str, str]:
    """Return variables, a JSON object, as a shell can have them: text as it is, the rest as JSON."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in json.loads(inputs).items()
    }


def suffixes() -> tuple[str, ...]:
    """Return the ends of file names that tell a language."""
    return (".py", *(each.suffix for each in LANGUAGES.values()))


def language_of_file(name: str) -> str | None:
    """Return the language that a file's name ends in, None if in none."""
    suffix = "." + name.rpartition("/")[2].rpartition(".")[2]
    if suffix == ".py":
        return PYTHON
    return next((key for key, each in LANGUAGES.items() if each.suffix == suffix), None)


def shebang_of(source: bytes) -> list[str]:
    """Return the words of the `#!` line with which a script begins: its interpreter, then arguments.

    Without such a line, or with an empty one, the list is empty.  Only the first 256 bytes count, as
    for execve(2).
    """
    line = source[:SHEBANG_BYTES].partition(b"\n")[0]
    return [os.fsdecode(word) for word in line[2:].split()] if line.startswith(b"#!") else []


def language_of_script(source: bytes) -> str | None:
    """Return the language whose interpreter the `#!` line names; None for another interpreter or if
    there is no such line."""
    words = shebang_of(source)
    if words and words[0].endswith("/env"):
        words = [word for word in words[1:] if not word.startswith("-")]
    name = words[0].rpartition("/")[2] if words else ""
    return language_called(PYTHON if name.startswith("python3") else name)


def language_called(name: str) -> str | None:
    """Return the language that `name` means, None if there is none."""
    name = _ALSO_CALLED.get(name, name)
    return name if name == PYTHON or name in LANGUAGES else None
