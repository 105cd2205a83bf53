"""Types in Python: annotations, TypedDicts and aliases, as syntax trees."""

import ast
from collections.abc import Iterable, Mapping
from functools import reduce

from .names import RESERVED, identifier
from .syntax import NOT_GENERIC, docstring, invoke, name_of, subscript
from .types import (
    ListOf,
    Literals,
    MapOf,
    Plain,
    Property,
    Record,
    Scalar,
    TupleOf,
    Type,
    UnionOf,
    either,
    names_in,
)


def definitions(named: Mapping[str, Record | Type]) -> list[ast.stmt]:
    """Return what defines types of those names: each may name the others."""
    statements: list[ast.stmt] = []
    unknown = set(named)
    for name, each in named.items():
        statements += _definition(name, each, unknown, named)
        unknown.discard(name)
    return statements


def _definition(
    name: str, each: Record | Type, unknown: set[str], names: Iterable[str]
) -> list[ast.stmt]:
    if not isinstance(each, Record):
        target = ast.Name(name, ast.Store())
        return [ast.AnnAssign(target, name_of("TypeAlias"), _quoted(each, unknown), 1)]
    taken = {*RESERVED, *names}
    if all(_can_be_said(field.wire, taken) for field in each.fields):
        return [_record_as_class(name, each)]
    return _record_as_call(name, each, unknown)


def _quoted(type: Type, unknown: set[str]) -> ast.expr:
    """Return a type where names have to be known already; one that is not makes it a text."""
    expression = annotation(type)
    if unknown.isdisjoint(names_in(type)):
        return expression
    return ast.Constant(ast.unparse(expression))


def _can_be_said(wire: str, taken: set[str]) -> bool:
    """Tell whether a key may stand in a class: a name there hides the type of that name."""
    return wire not in taken and identifier(wire) == wire and not wire.startswith("__")


def _record_as_class(name: str, record: Record) -> ast.stmt:
    said = [(field.wire, field) for field in record.fields]
    body = docstring(record.description, said, " " * 8)
    for field in record.fields:
        type = _needed(annotation(field.type), field, record)
        body.append(ast.AnnAssign(ast.Name(field.wire, ast.Store()), type, None, 1))
    bases: list[ast.expr] = [name_of("TypedDict")]
    return ast.ClassDef(name, bases, _total(record), body or [ast.Pass()], [], **NOT_GENERIC)


def _record_as_call(name: str, record: Record, unknown: set[str]) -> list[ast.stmt]:
    keys: list[ast.expr | None] = [ast.Constant(field.wire) for field in record.fields]
    values = [_needed(_quoted(field.type, unknown), field, record) for field in record.fields]
    call = invoke("TypedDict", ast.Constant(name), ast.Dict(keys, values))
    call.keywords = _total(record)
    made = ast.Assign([ast.Name(name, ast.Store())], call)
    said = [(repr(field.wire), field) for field in record.fields]
    return [made, *docstring(record.description, said)]


def _total(record: Record) -> list[ast.keyword]:
    none_required = record.fields and not any(field.required for field in record.fields)
    return [ast.keyword("total", ast.Constant(value=False))] if none_required else []


def _needed(type: ast.expr, field: Property, record: Record) -> ast.expr:
    optional = not field.required and not _total(record)
    return subscript("NotRequired", type) if optional else type


def annotation(type: Type) -> ast.expr:
    """Return a type as an expression."""
    if isinstance(type, Plain):
        if type.word == "none":
            return ast.Constant(None)
        return name_of("Any" if type.word == "any" else type.word)
    if isinstance(type, Literals):
        return subscript("Literal", *map(_constant, type.values))
    if isinstance(type, ListOf):
        return subscript("list", annotation(type.item))
    if isinstance(type, TupleOf):  # from JSON come lists
        members = [*type.items, *([type.rest] if type.rest else [])]
        return subscript("list", annotation(either(members)))
    if isinstance(type, MapOf):
        return subscript("dict", name_of("str"), annotation(type.value))
    if isinstance(type, UnionOf):
        return reduce(_or, map(annotation, type.members))
    return name_of(type.name)


def _constant(value: Scalar) -> ast.expr:
    if isinstance(value, int) and value < 0:
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    return ast.Constant(value)


def _or(one: ast.expr, other: ast.expr) -> ast.expr:
    return ast.BinOp(one, ast.BitOr(), other)
