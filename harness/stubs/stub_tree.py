"""Trees of stubs: a folder for each server or other name prefix, and a file for each tool.

A tree is a mapping of paths to texts; this module writes no files.  Names that become the same word get
different ones, which are equal in every tree of the same tools.

Folders of stubs in cells, kept equal to the tools that the broker offers.

Summaries of tools for a model, at three levels: the name, the signature, the full description.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from ...policies.languages import LANGUAGES, interpreter_of
from ...runner.shared_files import SharedFiles
from ..schemas.spec import ToolSpec
from ..search.documents import summary
from ..text.hidden import line
from . import python_stubs, typescript_stubs
from .python_stubs import MODULE, MODULE_TYPES
from .reader import describe
from .stub_types import ToolSignature, identifier

_KEPT = 4096  # cached texts, so that a change of one tool does not read the whole catalogue again
_LISTED = 100  # characters about a tool in an index


class Entry(NamedTuple):
    """A tool and where it stands: the words that lead to it."""

    spec: ToolSpec
    path: tuple[str, ...]


class Folder(NamedTuple):
    """The content of a folder: words, and which of them are tools; `own` is the tool of the folder's
    name."""

    path: tuple[str, ...]
    names: tuple[tuple[str, bool], ...]
    own: ToolSpec | None
    tools: tuple[Entry, ...]


class _Place:
    """One part of names: a tool, further parts, or both."""

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
            files[f"{path}/__init__.py"] = python_stubs.package(
                _index(each), each.names, own, each.path[-1]
            )
        else:
            files["__init__.pyi"] = python_stubs.interface(each.names)
    return files


def typescript_tree(specs: Iterable[ToolSpec]) -> dict[str, str]:
    """Return the same for Node: modules, and declarations that tell their types."""
    files = {"index.mjs": MODULE, "index.d.mts": MODULE_TYPES}
    for each in walk(specs, typescript_stubs.function_name):
        path = "/".join(each.path)
        if isinstance(each, Entry):
            files |= _javascript(path, each.spec, each.path[-1])
        elif each.path:
            files[f"{path}/index.mjs"] = files[f"{path}/index.d.mts"] = typescript_stubs.index(
                each.names
            )
            files |= _javascript(path, each.own, each.path[-1]) if each.own else {}
    return files


def described(spec: ToolSpec) -> ToolSignature:
    """Return the signature of a tool, cached."""
    return _described(_key(spec))


def paths(specs: Iterable[ToolSpec], language: str = "python") -> dict[str, str]:
    """Return the names by which programs find tools below `tools`."""
    word = typescript_stubs.function_name if language == "typescript" else identifier
    return {
        entry.spec.name: ".".join(entry.path)
        for each in walk(specs, word) if isinstance(each, Folder) for entry in each.tools
    }  # fmt: skip


def walk(
    specs: Iterable[ToolSpec], word: Callable[[str, set[str]], str] = identifier
) -> Iterator[Entry | Folder]:
    """Yield every tool, and every folder after its content."""
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
    """Return the index of a folder: its tools, one a line."""
    said = [f"{each.path[-1]}: {_short(each.spec)}".rstrip(": ") for each in folder.tools]
    count = "1 tool" if len(said) == 1 else f"{len(said)} tools"
    return "\n".join([f"{'.'.join(folder.path)}: {count}.", "", *said])


def _short(spec: ToolSpec) -> str:
    return line(summary(spec.description), _LISTED)


def _javascript(path: str, spec: ToolSpec, name: str) -> dict[str, str]:
    known = described(spec)
    return {
        f"{path}.mjs": typescript_stubs.module(known, name),
        f"{path}.d.mts": typescript_stubs.declaration(known, name),
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
    return python_stubs.module(_described(key), name)


_NODE = interpreter_of("javascript")


class StubFolders:
    """The stub folders of one sandbox: TypeScript for Node's languages, Python for all others.  Safe
    from many threads."""

    def __init__(self, may_call: Callable[[str], bool]) -> None:
        self._may_call = may_call
        self._lock = threading.Lock()
        self._files: dict[bool, SharedFiles] = {}
        self._laid: dict[bool, list[ToolSpec]] = {}

    def shared_files(self, language: str) -> SharedFiles:
        """Return the folder that cells of `language` see."""
        with self._lock:
            return self._files.setdefault(_is_node(language), SharedFiles())

    def follow(self, language: str, specs: list[ToolSpec]) -> None:
        """Write the stubs of the callable tools in `specs`, if the tools have changed.

        Nothing is written before a program of the language runs.
        """
        if self._laid.get(_is_node(language)) == specs:  # quick: the same objects are equal
            return

        tree = typescript_tree if _is_node(language) else python_tree
        shared_files = self.shared_files(language)
        with self._lock:
            shared_files.replace(tree(spec for spec in specs if self._may_call(spec.name)))
            self._laid[_is_node(language)] = specs


def _is_node(language: str) -> bool:
    return language in LANGUAGES and interpreter_of(language) == _NODE


_LONGEST = 200  # characters of a sentence


def brief(spec: ToolSpec) -> str:
    """Return a tool's name and the first sentence of its description."""
    sentence = line(summary(spec.description), _LONGEST)
    return f"{spec.name}: {sentence}" if sentence else spec.name


def say(spec: ToolSpec, path: str, detail: str, language: str = "python") -> str:
    """Return the full description of a tool, which programs find at `path`."""
    if detail == "name":
        return spec.name
    name = path.rpartition(".")[2]
    if detail == "full":
        text = _full(spec, name, language)
        return f"{_import(path, language)}\n\n{text}"
    return signature(spec, path, language)


def signature(spec: ToolSpec, path: str, language: str = "python") -> str:
    """Return a tool's signature and the first sentence of its description in one line."""
    known, name = described(spec), path.rpartition(".")[2]
    if language == "typescript":
        head, mark = typescript_stubs.signature(known, path), "//"
    else:
        head, mark = path.removesuffix(name) + python_stubs.signature(known, name), " #"
    sentence = line(summary(spec.description), _LONGEST)
    return f"{head} {mark} {sentence}" if sentence else head


def _full(spec: ToolSpec, name: str, language: str) -> str:
    if language == "typescript":
        return typescript_stubs.declaration(described(spec), name)
    return python_stubs.description(described(spec), name)


def _import(path: str, language: str) -> str:
    folder, _, name = path.rpartition(".")
    if language == "typescript":
        return f'import {{ {name} }} from "/tools/{path.replace(".", "/")}.mjs";'
    return f"from tools{'.' if folder else ''}{folder} import {name}"
