"""Declarations of classes in source text, read off the syntax tree.  The source is hostile and never
run."""

import ast
from typing import Any, Literal, NamedTuple

Kind = Literal["enumeration", "tuple", "object", "other"]
_ENUMS = ("Enum", "IntEnum", "StrEnum")


class Declaration(NamedTuple):
    """The kind of a class and its parts: `members` are the values of an enumeration, `fields` the
    annotations of the other kinds, `required` the fields of an object without a default."""

    kind: Kind
    members: list[Any]
    fields: dict[str, ast.expr]
    required: list[str]


def declared(node: ast.ClassDef) -> Declaration:
    """Return the declaration of a class: enumeration, named tuple, object (dataclass or TypedDict) or
    other."""
    bases = {last_name(base) for base in node.bases}
    fields = _fields(node)
    is_typed_dict = "TypedDict" in bases
    needed = _is_required_key if is_typed_dict else _has_no_default
    total = not any(_is_not_total(each) for each in node.keywords)
    return Declaration(
        _kind(node, bases),
        _members(node),
        {name: each.annotation for name, each in fields.items()},
        [name for name, each in fields.items() if needed(each, total)],
    )


def _kind(node: ast.ClassDef, bases: set[str]) -> Kind:
    if not bases.isdisjoint(_ENUMS):
        return "enumeration"
    if "NamedTuple" in bases:
        return "tuple"
    is_dataclass = "dataclass" in map(_decorator, node.decorator_list)
    return "object" if is_dataclass or "TypedDict" in bases else "other"


def last_name(node: ast.expr) -> str:
    """Return `Optional` of `Optional` and of `typing.Optional`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def literal(node: ast.expr) -> Any:
    """Return the value of a constant or a negative number; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = literal(node.operand)
        return -value if type(value) in (int, float) else None
    return node.value if isinstance(node, ast.Constant) else None


def _decorator(node: ast.expr) -> str:
    return last_name(node.func if isinstance(node, ast.Call) else node)


def _fields(node: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    return {
        each.target.id: each
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def _members(node: ast.ClassDef) -> list[Any]:
    return [literal(each.value) for each in node.body if isinstance(each, ast.Assign)]


def _has_no_default(node: ast.AnnAssign, _: bool) -> bool:
    return node.value is None


def _is_required_key(node: ast.AnnAssign, total: bool) -> bool:
    kind = last_name(node.annotation.value) if isinstance(node.annotation, ast.Subscript) else ""
    return kind == "Required" or (total and kind != "NotRequired")


def _is_not_total(node: ast.keyword) -> bool:
    return (
        node.arg == "total" and isinstance(node.value, ast.Constant) and node.value.value is False
    )
