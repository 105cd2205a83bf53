"""Modules of a set of packages, and those that a program imports, by its source.

What a program says it imports is a hint from untrusted text: only names of modules that a set has are
ever used.
"""

import re
from collections.abc import Iterator
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path

_MOST_CHARACTERS = 64 * 1024  # of a program that are read
_MOST_NAMES = 200  # of one program
_SUFFIXES = (*SOURCE_SUFFIXES, *BYTECODE_SUFFIXES, *EXTENSION_SUFFIXES)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]{1,200})[ \t]+import\b[ \t(]{0,99}([\w \t,]{0,1000})"
    r"|import[ \t]+([\w. \t,]{1,1000}))",
    re.MULTILINE | re.ASCII,
)


def imports_of(code: str) -> Iterator[str]:
    """Yield the names in the import statements of a program: of modules, and of what may be one."""
    for count, found in enumerate(_IMPORT.finditer(code[:_MOST_CHARACTERS])):
        if count == _MOST_NAMES:
            return
        package, names, modules = found.groups()
        if package:
            yield package
            yield from (f"{package}.{name}" for name in _first_words(names))
        else:
            yield from _first_words(modules)


def _first_words(listed: str) -> Iterator[str]:
    """Yield what is imported by "a as b, c"."""
    for each in listed.split(","):
        if words := each.split():
            yield words[0]


def has_module(directory: str, name: str) -> bool:
    """Tell whether a set in `directory` has the module; a package without code is none."""
    parts = name.split(".")
    if not all(part.isidentifier() and part != "__main__" for part in parts):
        return False
    place = Path(directory, *parts)
    return any(
        place.with_name(f"{place.name}{suffix}").is_file()
        or (place / f"__init__{suffix}").is_file()
        for suffix in _SUFFIXES
    )
