"""Summaries of tools for a model, at three levels: the name, the signature, the full description."""

from ..schemas.spec import ToolSpec
from ..search.documents import summary
from ..text.hidden import line
from . import python, typescript
from .tree import described

_LONGEST = 200  # characters of a sentence


def brief(spec: ToolSpec) -> str:
    """Return a tool's name and the first sentence of what it does."""
    sentence = line(summary(spec.description), _LONGEST)
    return f"{spec.name}: {sentence}" if sentence else spec.name


def say(spec: ToolSpec, path: str, detail: str, language: str = "python") -> str:
    """Return what there is to know of a tool, which programs find at `path`."""
    if detail == "name":
        return spec.name
    name = path.rpartition(".")[2]
    if detail == "full":
        text = _full(spec, name, language)
        return f"{_import(path, language)}\n\n{text}"
    return signature(spec, path, language)


def signature(spec: ToolSpec, path: str, language: str = "python") -> str:
    """Return how a tool is called, and the first sentence of what it does, in one line."""
    known, name = described(spec), path.rpartition(".")[2]
    if language == "typescript":
        head, mark = typescript.signature(known, path), "//"
    else:
        head, mark = path.removesuffix(name) + python.signature(known, name), " #"
    sentence = line(summary(spec.description), _LONGEST)
    return f"{head} {mark} {sentence}" if sentence else head


def _full(spec: ToolSpec, name: str, language: str) -> str:
    if language == "typescript":
        return typescript.declaration(described(spec), name)
    return python.description(described(spec), name)


def _import(path: str, language: str) -> str:
    folder, _, name = path.rpartition(".")
    if language == "typescript":
        return f'import {{ {name} }} from "/tools/{path.replace(".", "/")}.mjs";'
    return f"from tools{'.' if folder else ''}{folder} import {name}"
