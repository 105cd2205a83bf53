"""The languages that cells run besides Python, each by the interpreter that the host has."""

from typing import NamedTuple


class Language(NamedTuple):
    """`program` is looked for on the host, in `package` of a distribution; it is given `arguments` and
    then the path of the source, whose name ends in `suffix`."""

    program: str
    package: str
    suffix: str
    arguments: tuple[str, ...] = ()


PYTHON = "python"
LANGUAGES = {
    "bash": Language("bash", "bash", ".bash", ("--noprofile", "--norc")),
    "javascript": Language("node", "nodejs", ".js"),
    "ruby": Language("ruby", "ruby", ".rb", ("--disable-gems",)),
    "sh": Language("sh", "dash", ".sh"),
}
# What people call them too.
_ALSO_CALLED = {
    "python3": PYTHON,
    "py": PYTHON,
    "js": "javascript",
    "node": "javascript",
    "rb": "ruby",
}


def language_names() -> tuple[str, ...]:
    return (PYTHON, *LANGUAGES)


def language_of_file(name: str) -> str:
    """Return the language that a file's name ends in, Python if in none."""
    suffix = "." + name.rpartition(".")[2]
    return next((key for key, each in LANGUAGES.items() if each.suffix == suffix), PYTHON)


def language_called(name: str) -> str | None:
    """Return the language that `name` means, None if there is none."""
    name = _ALSO_CALLED.get(name, name)
    return name if name == PYTHON or name in LANGUAGES else None
