"""Python stubs: syntax trees made of types, written down by `ast.unparse`.  No text becomes code.

A stub is a module with one function, which calls the tool by its wire name with its wire arguments.
Its types stand behind TYPE_CHECKING: a program that imports it does not wait for them.
"""

import ast
from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

from ...policies.errors import InternalError
from .interface import INTERFACE
from .names import RESERVED, identifier
from .types import (
    ANY,
    Described,
    Either,
    Field,
    ListOf,
    Literals,
    MapOf,
    Plain,
    Record,
    Scalar,
    TupleOf,
    Type,
    either,
    names_in,
)

_TYPING = ("Any", "Literal", "NotRequired", "TypeAlias", "TypedDict")


class Parameter(NamedTuple):
    """A parameter as Python says it, and the field that it stands for."""

    name: str
    field: Field


def parameters_of(described: Described) -> tuple[list[Parameter], list[Parameter]]:
    """Return those that may be given by position, in the order of the schema, and the others.

    Where one that may be left out stands before one that may not, only what is before both has a place.
    """
    taken: set[str] = set()
    named = []
    for field in described.parameters:
        name = identifier(field.wire, taken)
        taken.add(name)
        named.append(Parameter(name, field))
    first = next((at for at, each in enumerate(named) if not each.field.required), len(named))
    is_mixed = any(each.field.required for each in named[first:])
    return (named[:first], named[first:]) if is_mixed else (named, [])


def module(described: Described, name: str) -> str:
    """Return the source of a tool's stub, whose function is called `name`."""
    return _written(ast.Module(_stub(described, name), []))


def package(text: str, names: Iterable[tuple[str, bool]], own: Described | None, name: str) -> str:
    """Return the source of a package of stubs: what is in it, for type checkers, below a `text`.

    `names` tells of each module whether it holds a function of its name, or is a package itself; `own`
    is the tool that has the name of the package.
    """
    stub = _stub(own, name) if own else []
    imports: list[ast.stmt] = [_export(each, is_tool=is_tool) for each, is_tool in names]
    condition = [ast.If(_name("TYPE_CHECKING"), imports, [])] if imports else []
    head = stub[:2] if stub else [_import("typing", ["TYPE_CHECKING"])]
    said = ast.Expr(ast.Constant(f"{text}\n"))
    return _written(ast.Module([said, *head, *condition, *stub[2:]], []))


def interface(names: Iterable[tuple[str, bool]]) -> str:
    """Return what `tools` has, for type checkers."""
    imports = [_export(each, is_tool=is_tool) for each, is_tool in names]
    return _written(ast.Module([*ast.parse(INTERFACE).body, *imports], []))


def _export(name: str, *, is_tool: bool) -> ast.stmt:
    return ast.ImportFrom(name if is_tool else None, [ast.alias(name, name)], 1)


def _stub(described: Described, name: str) -> list[ast.stmt]:
    function = _function(described, name)
    return [
        _import("__future__", ["annotations"]), _import("typing", ["TYPE_CHECKING"]),
        _import("tools", sorted(_called(function))), *_types(described, function), function,
    ]  # fmt: skip


def signature(described: Described, name: str) -> str:
    """Return what a `def` of a tool says behind that word, in Python's words."""
    function = _function(described, name)
    function.body = [ast.Expr(ast.Constant(...))]
    for default in (*function.args.defaults, *function.args.kw_defaults):
        if isinstance(default, ast.Name):  # a reader need not know what stands for nothing
            default.id = "..."
    head = ast.unparse(ast.fix_missing_locations(function)).partition("def ")[2]
    return head.rpartition(":\n")[0]


def description(described: Described, name: str) -> str:
    """Return what a tool's stub says to who reads it: its types and its function, without the call."""
    function = _function(described, name)
    function.body = [*function.body[:1], ast.Expr(ast.Constant(...))]
    if not (isinstance(function.body[0], ast.Expr)):
        del function.body[0]
    return _written(ast.Module([*_definitions(described), function], []))


def _written(tree: ast.Module) -> str:
    """Return the source of `tree`, and of nothing else."""
    text = ast.unparse(ast.fix_missing_locations(tree))
    if ast.dump(ast.parse(text)) != ast.dump(tree):
        raise InternalError("a stub does not say what was meant")
    return f"{text}\n"


# the function


def _function(described: Described, name: str) -> ast.FunctionDef:
    positional, others = parameters_of(described)
    arguments = ast.arguments(
        posonlyargs=[], args=[_argument(each) for each in positional], vararg=None,
        kwonlyargs=[_argument(each) for each in others],
        kw_defaults=[None if each.field.required else _name("UNSET") for each in others],
        kwarg=ast.arg("more", _name("Any")) if described.more else None,
        defaults=[_name("UNSET") for each in positional if not each.field.required],
    )  # fmt: skip
    parameters = [*positional, *others]
    body = [*_docstring(described, parameters), *_call(described, parameters)]
    returns = annotation(described.result)
    return ast.FunctionDef(name, arguments, body, [], returns)


def _argument(parameter: Parameter) -> ast.arg:
    return ast.arg(parameter.name, annotation(parameter.field.type))


def _call(described: Described, parameters: list[Parameter]) -> list[ast.stmt]:
    keys: list[ast.expr | None] = [ast.Constant(each.field.wire) for each in parameters]
    values: list[ast.expr] = [_name(each.name) for each in parameters]
    if described.more:
        keys, values = [*keys, None], [*values, _name("more")]
    given: ast.expr = ast.Dict(keys, values)
    if not all(each.field.required for each in parameters):
        given = _invoke("given", given)
    call = _invoke("call_tool", ast.Constant(described.name), given)
    if described.result == ANY:
        return [ast.Return(call)]
    target = ast.Name("answer", ast.Store())
    typed = ast.AnnAssign(target, annotation(described.result), call, 1)
    return [typed, ast.Return(_name("answer"))]


def _docstring(described: Described, parameters: list[Parameter]) -> list[ast.stmt]:
    said = [_said(each.name, each.field) for each in parameters]
    return _text(described.description, [each for each in said if each])


def _said(name: str, field: Field) -> str:
    words = [field.description, f"Default: {field.default}" if field.default else ""]
    text = " ".join(word for word in words if word)
    return f"{name}: {text}" if text else ""


def _text(description: str, lines: list[str], indent: str = "    ") -> list[ast.stmt]:
    """Return a docstring that is indented as the code around it."""
    parts = [part for part in (description, "\n".join(lines)) if part]
    if not parts:
        return []
    inside = "\n\n".join(parts).split("\n")
    text = "\n".join(f"{indent}{each}" if each else "" for each in inside).strip()
    return [ast.Expr(ast.Constant(f"{text}\n{indent}" if len(inside) > 1 else text))]


# the types


def _types(described: Described, function: ast.FunctionDef) -> list[ast.stmt]:
    definitions = _definitions(described)
    used = {name for node in (*definitions, function) for name in _names(node)}
    needed = [name for name in _TYPING if name in used]
    imports: list[ast.stmt] = [_import("typing", needed)] if needed else []
    if not imports and not definitions:
        return []
    return [ast.If(_name("TYPE_CHECKING"), [*imports, *definitions], [])]


def _definitions(described: Described) -> list[ast.stmt]:
    definitions: list[ast.stmt] = []
    unknown = set(described.definitions)
    for name, each in described.definitions.items():
        definitions += _definition(name, each, unknown, described.definitions)
        unknown.discard(name)
    return definitions


def _definition(
    name: str, each: Record | Type, unknown: set[str], names: Iterable[str]
) -> list[ast.stmt]:
    if not isinstance(each, Record):
        target = ast.Name(name, ast.Store())
        return [ast.AnnAssign(target, _name("TypeAlias"), _quoted(each, unknown), 1)]
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
    said = [_said(field.wire, field) for field in record.fields]
    body: list[ast.stmt] = _text(record.description, [each for each in said if each], " " * 8)
    body += [
        ast.AnnAssign(
            ast.Name(field.wire, ast.Store()),
            _needed(annotation(field.type), field, record),
            None,
            1,
        )
        for field in record.fields
    ]
    return ast.ClassDef(name, [_name("TypedDict")], _total(record), body or [ast.Pass()], [])


def _record_as_call(name: str, record: Record, unknown: set[str]) -> list[ast.stmt]:
    keys: list[ast.expr | None] = [ast.Constant(field.wire) for field in record.fields]
    values = [_needed(_quoted(field.type, unknown), field, record) for field in record.fields]
    call = _invoke("TypedDict", ast.Constant(name), ast.Dict(keys, values))
    call.keywords = _total(record)
    made = ast.Assign([ast.Name(name, ast.Store())], call)
    said = [_said(repr(field.wire), field) for field in record.fields]
    return [made, *_text(record.description, [each for each in said if each])]


def _total(record: Record) -> list[ast.keyword]:
    none_required = record.fields and not any(field.required for field in record.fields)
    return [ast.keyword("total", ast.Constant(value=False))] if none_required else []


def _needed(type: ast.expr, field: Field, record: Record) -> ast.expr:
    optional = not field.required and not _total(record)
    return _of("NotRequired", type) if optional else type


def annotation(type: Type) -> ast.expr:
    """Return a type as an expression."""
    if isinstance(type, Plain):
        words = {"any": "Any", "none": "None"}
        return ast.Constant(None) if type.word == "none" else _name(words.get(type.word, type.word))
    if isinstance(type, Literals):
        values = [_constant(each) for each in type.values]
        return _of("Literal", values[0] if len(values) == 1 else ast.Tuple(values, ast.Load()))
    if isinstance(type, ListOf):
        return _of("list", annotation(type.item))
    if isinstance(type, TupleOf):  # from JSON come lists
        return _of("list", annotation(either([*type.items, *([type.rest] if type.rest else [])])))
    if isinstance(type, MapOf):
        return _of("dict", ast.Tuple([_name("str"), annotation(type.value)], ast.Load()))
    if isinstance(type, Either):
        return reduce(_or, [annotation(each) for each in type.members])
    return _name(type.name)


def _constant(value: Scalar) -> ast.expr:
    if isinstance(value, int) and value < 0:
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    return ast.Constant(value)


def _or(one: ast.expr, other: ast.expr) -> ast.expr:
    return ast.BinOp(one, ast.BitOr(), other)


def _of(name: str, inside: ast.expr) -> ast.expr:
    return ast.Subscript(_name(name), inside, ast.Load())


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _invoke(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(_name(name), list(arguments), [])


def _import(package: str, names: list[str]) -> ast.ImportFrom:
    return ast.ImportFrom(package, [ast.alias(name) for name in names], 0)


def _called(function: ast.FunctionDef) -> set[str]:
    return _names(function) & {"UNSET", "call_tool", "given"}


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
