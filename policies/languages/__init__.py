"""Languages that cells run besides Python, with the interpreter of the host."""

import os
from typing import NamedTuple

RESERVED_MIB = 128  # by default


class Language(NamedTuple):
    """A language and how its interpreter is started.  `title` is its name for people.

    The host's `program`, which distributions have in `package`, gets `arguments` and then the path of
    the source, whose name ends in `suffix`; in a session it gets `arguments` and `conversing`.
    `nothing` is a program that does nothing.  `shares` names another language with the same
    interpreter.  `start_up` lists environment variables that would make the interpreter run something
    else before the program.  `quiet` lists system calls that the interpreter tries and does without:
    refusing them is not recorded as a violation.  `reserves_mib` is address space that it maps or
    reserves beside the program's memory: where there is no memory cgroup, RLIMIT_AS counts it.
    """

    title: str
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
    reserves_mib: int = RESERVED_MIB


PYTHON = "python"
BUILDS = "/builds"  # path in cells that run compiled programs
SHEBANG_BYTES = 256  # BINPRM_BUF_SIZE of linux/binfmts.h
OWN_PROGRAMS = "/dev/bin"  # directory of the cell's own programs; no policy shows a path in /dev
TOOL_CLIENT = f"{OWN_PROGRAMS}/cellwright-call"  # for shells
# SHELLOPTS and BASHOPTS switch on tracing and sourcing; an interactive sh also reads ENV.
_SHELLS_START_UP = ("BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS")
# V8 reserves 640 MiB and more for its code, and exits at once if it cannot (measured: node 18 and 20)
_V8_MIB = 1024
_LIBUVS = ("io_uring_setup",)  # since 1.45, for every event loop
_NO_FILES = ("--noprofile", "--norc")
LANGUAGES = {
    "bash": Language(
        "Bash", "bash", "bash", ".bash", ":", _NO_FILES, ("--noediting", "-i"),
        is_shell=True, start_up=_SHELLS_START_UP,
    ),
    "javascript": Language(
        "JavaScript", "node", "nodejs", ".js", ";", quiet=_LIBUVS, reserves_mib=_V8_MIB
    ),
    "ruby": Language(
        "Ruby", "ruby", "ruby", ".rb", "nil",
        ("--disable-gems", "--external-encoding=UTF-8"),  # cells have no locales
    ),
    "sh": Language(
        "POSIX shell", "sh", "dash", ".sh", ":", (), ("+m", "-i"),
        is_shell=True, start_up=_SHELLS_START_UP,
    ),
    "typescript": Language(
        "TypeScript", "node", "nodejs", ".ts", ";", ("--disable-warning=ExperimentalWarning",),
        shares="javascript", quiet=_LIBUVS, reserves_mib=_V8_MIB,
    ),
}  # fmt: skip
SPOKEN = frozenset((PYTHON, *LANGUAGES))  # all others are those of the table (language_table.py)
_ALIASES = {
    "python3": PYTHON,
    "py": PYTHON,
    "js": "javascript",
    "node": "javascript",
    "rb": "ruby",
    "shell": "bash",
    "ts": "typescript",
}


def language_names() -> tuple[str, ...]:
    return (PYTHON, *LANGUAGES)


def interpreted_languages() -> tuple[str, ...]:
    """Return the languages with an interpreter of their own."""
    return tuple(name for name, each in LANGUAGES.items() if not each.shares)


def interpreter_of(language: str) -> str:
    """Return the language whose interpreter runs `language`."""
    return (language in LANGUAGES and LANGUAGES[language].shares) or language


def program_that_does_nothing(language: str) -> str:
    return "pass" if language == PYTHON else LANGUAGES[language].nothing


def as_environment(inputs: bytes) -> dict[str, str]:
    """Return a JSON object as environment variables for a shell: text unchanged, the rest as JSON."""
    import json  # imported here, because most importers of this module do not need it

    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in json.loads(inputs).items()
    }


def language_of_file(name: str) -> str | None:
    """Return the language of a file by the suffix of its name; None if the suffix is unknown."""
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


def aliases_of(language: str) -> tuple[str, ...]:
    """Return the other names of a language with sessions."""
    return tuple(alias for alias, name in _ALIASES.items() if name == language)


def language_called(name: str) -> str | None:
    """Return the language with this name or alias; None if it is unknown."""
    name = _ALIASES.get(name, name)
    return name if name == PYTHON or name in LANGUAGES else None
