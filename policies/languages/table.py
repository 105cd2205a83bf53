"""`LanguageEntry`: a language as data.  languages.toml has those that come with this package; a file of
the same form adds others, or replaces some."""

import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from ..errors import PolicyError
from ..policy import MIB, Limits
from . import RESERVED_MIB, language_called

_NAME = r"[a-z][a-z0-9_+#-]{0,31}"  # this and the next: compiled when a table is read
_PLACEHOLDERS = frozenset(("build", "source", "sources", "flags", "memory_mib", "processors"))
_PLACEHOLDER = r"\{(\w+)\}"
_Words = Annotated[tuple[str, ...], msgspec.Meta(max_length=200)]
# Of a compiler, in a cell of its own: templates of C++ and the JVM of kotlinc need most of it.
COMPILE_LIMITS = Limits(
    wall_seconds=60.0, cpu_seconds=120.0, cpus=2.0, memory_bytes=2048 * MIB, processes=256,
    output_bytes=64_000, output_total_bytes=16 * MIB, artifact_bytes=256 * MIB,
    workspace_bytes=512 * MIB,
)  # fmt: skip


class LanguageEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A language: how its programs are compiled, if they are, and run.  languages.toml explains the
    fields."""

    name: str = ""  # name of its table
    title: str
    aliases: _Words = ()
    extensions: _Words
    source: str
    package: str
    version: _Words
    compile: _Words = ()
    run: _Words
    shows: _Words = ()
    compile_shows: _Words = ()
    libraries: _Words = ()
    needs: _Words = ()  # further programs without which it does not compile
    limits: dict[str, float] = {}
    reserves_mib: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = RESERVED_MIB
    environment: dict[str, str] = {}
    compile_environment: dict[str, str] = {}

    @property
    def is_compiled(self) -> bool:
        return bool(self.compile)

    @property
    def compile_limits(self) -> Limits:
        """Return the limits of its compiler."""
        return msgspec.structs.replace(COMPILE_LIMITS, **_limits_of(self))

    def programs(self) -> tuple[str, ...]:
        """Return the programs of the host without which it does not work."""
        named = (*self.compile[:1], *self.run[:1], *self.needs)
        return tuple(dict.fromkeys(name for name in named if "{" not in name))


def fill(
    words: tuple[str, ...], values: Mapping[str, str], lists: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Return `words` with `values` in place of their placeholders; a word that is a placeholder of
    `lists` becomes its words."""
    filled: list[str] = []
    for word in words:
        if word[1:-1] in lists and word == f"{{{word[1:-1]}}}":
            filled += lists[word[1:-1]]
        else:
            filled.append(re.sub(_PLACEHOLDER, lambda found: values.get(found[1], found[0]), word))
    return tuple(filled)


class LanguageTable:
    """The languages of languages.toml, and those that a file of the user adds."""

    def __init__(self, entries: Mapping[str, LanguageEntry]) -> None:
        self._entries = dict(entries)
        self._called = {
            alias: name for name, entry in entries.items() for alias in (name, *entry.aliases)
        }

    def called(self, name: str) -> LanguageEntry | None:
        """Return the language with this name or alias, whatever its case; None if it is unknown."""
        found = self._called.get(name.lower())
        return self._entries[found] if found else None

    def of_file(self, name: str) -> LanguageEntry | None:
        """Return the language of a file by the suffix of its name; None if the suffix is unknown."""
        suffix = os.path.splitext(name)[1]
        return next((each for each in self if suffix and suffix in each.extensions), None)

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def __iter__(self) -> Iterator[LanguageEntry]:
        return iter(self._entries.values())

    def with_file(self, path: str | os.PathLike[str]) -> "LanguageTable":
        """Return a table with the languages of a TOML file too; raises PolicyError naming what is
        wrong in it."""
        try:
            data = _content(path)
        except OSError as error:
            raise PolicyError(f"languages: cannot read {path}: {error.strerror}") from None
        return LanguageTable({**self._entries, **_decoded(data, str(path))})


def language_table(more: str | os.PathLike[str] | None = None) -> LanguageTable:
    """Return the languages that come with this package, and those of the file `more`; raises
    PolicyError."""
    return _own_table() if more is None else _own_table().with_file(more)


@functools.cache
def _own_table() -> LanguageTable:
    name = "languages.toml"
    return LanguageTable(_decoded(_content(os.path.join(os.path.dirname(__file__), name)), name))


def _content(path: str | os.PathLike[str]) -> bytes:
    with open(path, "rb") as file:  # without pathlib, which a run does not need
        return file.read()


def _decoded(data: bytes, where: str) -> dict[str, LanguageEntry]:
    import tomllib

    try:
        tables: dict[str, Any] = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"{where}: {error}") from None
    return {name: _entry(name, table, where) for name, table in tables.items()}


def _entry(name: str, table: object, where: str) -> LanguageEntry:
    try:
        entry = msgspec.structs.replace(msgspec.convert(table, LanguageEntry), name=name)
        _check(entry)
    except (msgspec.ValidationError, ValueError) as error:
        raise PolicyError(f"{where}: [{name}]: {error}") from None
    return entry


def _check(entry: LanguageEntry) -> None:
    """Raise ValueError for an entry that no program could be run by."""
    for name in (entry.name, *entry.aliases):
        if not re.fullmatch(_NAME, name):
            raise ValueError(f"{name!r} is no name of a language")
        if language_called(name):
            raise ValueError(f"{name!r} is a language with sessions, which no table replaces")
    if not entry.run or not entry.extensions or "/" in entry.source or not entry.source:
        raise ValueError("run, extensions and source must be given; source is the name of a file")
    if os.path.splitext(entry.source)[1] not in entry.extensions:
        raise ValueError(f"source: {entry.source!r} must have one of the extensions")
    for word in (*entry.compile, *entry.run):
        for unknown in {*re.findall(_PLACEHOLDER, word)} - _PLACEHOLDERS:
            raise ValueError(
                f"{{{unknown}}} is unknown: known are {', '.join(sorted(_PLACEHOLDERS))}"
            )
    if entry.is_compiled and not any("{build}" in word for word in entry.compile):
        raise ValueError("compile: must name {build}, the directory of what it makes")
    for path in (*entry.shows, *entry.compile_shows, *entry.libraries):
        if not os.path.isabs(path) or ".." in path.split("/"):
            raise ValueError(f"{path!r} is not an absolute path")
    _limits_of(entry)


def _limits_of(entry: LanguageEntry) -> dict[str, Any]:
    types = {field.name: field.type for field in msgspec.structs.fields(Limits)}
    for unknown in entry.limits.keys() - types.keys():
        raise ValueError(f"limits: {unknown!r} is no limit")
    return {name: types[name](value) for name, value in entry.limits.items()}
