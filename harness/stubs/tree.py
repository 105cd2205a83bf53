"""Trees of stubs: a folder for each server or other name prefix, and a file for each tool.

A tree is a mapping of paths to texts; this module writes no files.  Names that become the same word get
different ones, which are equal in every tree of the same tools.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from ..schemas.spec import ToolSpec
from ..search.documents import summary
from ..text.hidden import line
from . import python, typescript
from .interface import MODULE, MODULE_TYPES
from .names import identifier
from .reader import describe
from .types import ToolSignature

_KEPT = 4096  # texts, so that a catalogue of which one tool changes need not be read anew
_LISTED = 100  # characters of what an index says of a tool


class Entry(NamedTuple):
    """A tool and where it stands: the words that lead to it."""

    spec: ToolSpec
    path: tuple[str, ...]


class Folder(NamedTuple):
    """What stands in a folder: words, and which of them are tools; `own` is the tool of its name."""

    path: tuple[str, ...]
    names: tuple[tuple[str, bool], ...]
    own: ToolSpec | None
    tools: tuple[Entry, ...]


class _Place:
    """A step of names: a tool, what goes on from here, or both."""

    def __init__(self) -> None:
        self.tool: ToolSpec | None = None
        self.inside: dict[str, _Place] = {}


def python_tree(specs: Iterable[ToolSpec]) -> dict[str, str]:
    """Return the files of the package `tools`: browsed as files, and loaded when imported."""
    files: dict[str, str] = {}
    for each in walk(specs):
        path = "/".join(each.path)
        if isinstance(each, Entry):
            files[f"{path}.py"] = _python(_key(each.spec), each.path[-1])
        elif each.path:
            own = described(each.own) if each.own else None
            files[f"{path}/__init__.py"] = python.package(
                _index(each), each.names, own, each.path[-1]
            )
        else:
            files["__init__.pyi"] = python.interface(each.names)
    return files


def typescript_tree(specs: Iterable[ToolSpec]) -> dict[str, str]:
    """Return the same for Node: modules, and declarations that tell their types."""
    files = {"index.mjs": MODULE, "index.d.mts": MODULE_TYPES}
    for each in walk(specs, typescript.function_name):
        path = "/".join(each.path)
        if isinstance(each, Entry):
            files |= _javascript(path, each.spec, each.path[-1])
        elif each.path:
            files[f"{path}/index.mjs"] = files[f"{path}/index.d.mts"] = typescript.index(each.names)
            files |= _javascript(path, each.own, each.path[-1]) if each.own else {}
    return files


def described(spec: ToolSpec) -> ToolSignature:
    """Return the signature of a tool, cached."""
    return _described(_key(spec))


def paths(specs: Iterable[ToolSpec], language: str = "python") -> dict[str, str]:
    """Return the names by which programs find tools below `tools`."""
    word = typescript.function_name if language == "typescript" else identifier
    return {
        entry.spec.name: ".".join(entry.path)
        for each in walk(specs, word) if isinstance(each, Folder) for entry in each.tools
    }  # fmt: skip


def walk(
    specs: Iterable[ToolSpec], word: Callable[[str, set[str]], str] = identifier
) -> Iterator[Entry | Folder]:
    """Yield every tool, and every folder behind what is in it."""
    top = _Place()
    for spec in specs:
        place = top
        for step in spec.name.split("."):
            place = place.inside.setdefault(step, _Place())
        place.tool = spec
    yield from _walk(top, (), word)


def _walk(
    place: _Place, path: tuple[str, ...], word: Callable[[str, set[str]], str]
) -> Iterator[Entry | Folder]:
    taken: set[str] = set()
    names, tools = [], []
    for step, inside in sorted(place.inside.items()):
        here = (*path, word(step, taken))
        taken.add(here[-1])
        names.append((here[-1], not inside.inside))
        if inside.tool:
            tools.append(Entry(inside.tool, here))
        yield from _walk(inside, here, word) if inside.inside else tools[-1:]
    yield Folder(path, tuple(names), place.tool, tuple(tools))


def _index(folder: Folder) -> str:
    """Return what the index of a folder says: its tools, each in a line."""
    said = [f"{each.path[-1]}: {_short(each.spec)}".rstrip(": ") for each in folder.tools]
    count = "1 tool" if len(said) == 1 else f"{len(said)} tools"
    return "\n".join([f"{'.'.join(folder.path)}: {count}.", "", *said])


def _short(spec: ToolSpec) -> str:
    return line(summary(spec.description), _LISTED)


def _javascript(path: str, spec: ToolSpec, name: str) -> dict[str, str]:
    known = described(spec)
    return {
        f"{path}.mjs": typescript.module(known, name),
        f"{path}.d.mts": typescript.declaration(known, name),
    }


def _key(spec: ToolSpec) -> str:
    """Return all of a tool that its stub says, as JSON; without schemas that cannot be JSON."""
    said = spec.name, spec.description, spec.credentials, spec.parameters, spec.output_schema
    try:
        key = json.dumps(said, skipkeys=True)
        json.loads(key)
    except (TypeError, ValueError, RecursionError):
        return json.dumps((*said[:2], {}, {"additionalProperties": True}, None))
    return key


@lru_cache(_KEPT)
def _described(key: str) -> ToolSignature:
    name, description, credentials, parameters, output_schema = json.loads(key)
    return describe(
        ToolSpec(
            name=name, description=description, parameters=parameters,
            output_schema=output_schema, credentials=credentials,
        )
    )  # fmt: skip


@lru_cache(_KEPT)
def _python(key: str, name: str) -> str:
    return python.module(_described(key), name)
