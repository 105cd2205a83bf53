"""Building blocks for the syntax trees of stubs."""

import ast
from collections.abc import Iterable
from typing import Any

from .types import Property

# Python 3.12 reads this field in source and makes none by itself; 3.11 takes it for no field.
NOT_GENERIC: dict[str, Any] = {"type_params": []}


def name_of(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def subscript(name: str, *inside: ast.expr) -> ast.expr:
    index = inside[0] if len(inside) == 1 else ast.Tuple(list(inside), ast.Load())
    return ast.Subscript(name_of(name), index, ast.Load())


def invoke(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(name_of(name), list(arguments), [])


def import_from(package: str, names: list[str]) -> ast.ImportFrom:
    return ast.ImportFrom(package, [ast.alias(name) for name in names], 0)


def docstring(
    description: str, fields: Iterable[tuple[str, Property]], indent: str = "    "
) -> list[ast.stmt]:
    """Return what is said of a thing and of its fields, by their names, indented as the code around."""
    lines = [said for name, field in fields if (said := _said(name, field))]
    parts = [part for part in (description, "\n".join(lines)) if part]
    if not parts:
        return []
    inside = "\n\n".join(parts).split("\n")
    text = "\n".join(f"{indent}{each}" if each else "" for each in inside).strip()
    return [ast.Expr(ast.Constant(f"{text}\n{indent}" if len(inside) > 1 else text))]


def _said(name: str, field: Property) -> str:
    words = [field.description, f"Default: {field.default}" if field.default else ""]
    text = " ".join(word for word in words if word)
    return f"{name}: {text}" if text else ""


def identifiers_in(node: ast.AST) -> set[str]:
    """Return every name that is read or written in a tree."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
