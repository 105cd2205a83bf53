"""Python stubs: syntax trees built from types and written by `ast.unparse`.  No text becomes code.

A stub is a module with one function, which calls the tool by its wire name with its wire arguments.
Its types stand behind TYPE_CHECKING, so that importing the stub does not load them.

Types in Python: annotations, TypedDicts and aliases, as syntax trees.

Building blocks for the syntax trees of stubs.

The fixed part of every tree of stubs: the functions of `tools` other than the tools.

Constant source text; no text of a tool is inserted into it.
"""

import ast
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, NamedTuple

from ...policies.errors import InternalError
from ..text.terminal_text import harmless
from . import stub_types

_CALLED = {"UNSET", "call_tool", "given"}
_TYPING = ("Any", "Literal", "NotRequired", "TypeAlias", "TypedDict")


class NamedProperty(NamedTuple):
    """The Python name of a parameter, and its property."""

    name: str
    field: stub_types.Property


def parameters_of(
    described: stub_types.ToolSignature,
) -> tuple[list[NamedProperty], list[NamedProperty]]:
    """Return the parameters that may be given by position, in the order of the schema, and the others.

    If an optional parameter stands before a required one, only the parameters before both are
    positional.
    """
    taken: set[str] = set()
    named = []
    for field in described.parameters:
        name = stub_types.identifier(field.wire, taken)
        taken.add(name)
        named.append(NamedProperty(name, field))
    first = next((at for at, each in enumerate(named) if not each.field.required), len(named))
    is_mixed = any(each.field.required for each in named[first:])
    return (named[:first], named[first:]) if is_mixed else (named, [])


def module(described: stub_types.ToolSignature, name: str) -> str:
    """Return the source of a tool's stub, whose function is called `name`."""
    return _written(ast.Module(_stub(described, name), []))


def package(
    text: str, names: Iterable[tuple[str, bool]], own: stub_types.ToolSignature | None, name: str
) -> str:
    """Return the source of a package of stubs: a docstring `text`, and its names for type checkers.

    `names` tells of each module whether it holds a function of its name, or is a package itself; `own`
    is the tool that has the name of the package.
    """
    stub = _stub(own, name) if own else []
    imports: list[ast.stmt] = [_export(each, is_tool=is_tool) for each, is_tool in names]
    condition = [ast.If(name_of("TYPE_CHECKING"), imports, [])] if imports else []
    head = stub[:2] if stub else [import_from("typing", ["TYPE_CHECKING"])]
    said = ast.Expr(ast.Constant(f"{text}\n"))
    return _written(ast.Module([said, *head, *condition, *stub[2:]], []))


def interface(names: Iterable[tuple[str, bool]]) -> str:
    """Return the stub of the package `tools`, for type checkers."""
    imports = [_export(each, is_tool=is_tool) for each, is_tool in names]
    return _written(ast.Module([*ast.parse(INTERFACE).body, *imports], []))


def _export(name: str, *, is_tool: bool) -> ast.stmt:
    return ast.ImportFrom(name if is_tool else None, [ast.alias(name, name)], 1)


def _stub(described: stub_types.ToolSignature, name: str) -> list[ast.stmt]:
    function = _function(described, name)
    return [
        import_from("__future__", ["annotations"]),
        import_from("typing", ["TYPE_CHECKING"]),
        import_from("tools", sorted(identifiers_in(function) & _CALLED)),
        *_types(described, function),
        function,
    ]


def signature(described: stub_types.ToolSignature, name: str) -> str:
    """Return the signature of a tool's `def` in Python."""
    function = _function(described, name)
    function.body = [ast.Expr(ast.Constant(...))]
    for default in (*function.args.defaults, *function.args.kw_defaults):
        if isinstance(default, ast.Name):  # hide the internal name that stands for a missing value
            default.id = "..."
    head = _source_of(function).partition("def ")[2]
    return head.rpartition(":\n")[0]


def description(described: stub_types.ToolSignature, name: str) -> str:
    """Return the readable part of a tool's stub: its types and its function, without the call."""
    function = _function(described, name)
    function.body = [*function.body[:1], ast.Expr(ast.Constant(...))]
    if not isinstance(function.body[0], ast.Expr):
        del function.body[0]
    return _written(ast.Module([*definitions(described.definitions), function], []))


def _written(tree: ast.Module) -> str:
    text = _source_of(tree)
    if ast.dump(ast.parse(text)) != ast.dump(tree):
        raise InternalError("a stub does not say what was meant")
    return f"{text}\n"


# the function


def _function(described: stub_types.ToolSignature, name: str) -> ast.FunctionDef:
    positional, others = parameters_of(described)
    arguments = ast.arguments(
        posonlyargs=[], args=[_argument(each) for each in positional], vararg=None,
        kwonlyargs=[_argument(each) for each in others],
        kw_defaults=[None if each.field.required else name_of("UNSET") for each in others],
        kwarg=ast.arg("more", name_of("Any")) if described.more else None,
        defaults=[name_of("UNSET") for each in positional if not each.field.required],
    )  # fmt: skip
    parameters = [*positional, *others]
    said = docstring(described.description, [(each.name, each.field) for each in parameters])
    body = [*said, *_call(described, parameters)]
    returns = annotation(described.result)
    return ast.FunctionDef(name, arguments, body, [], returns, **NOT_GENERIC)


def _argument(parameter: NamedProperty) -> ast.arg:
    return ast.arg(parameter.name, annotation(parameter.field.type))


def _call(described: stub_types.ToolSignature, parameters: list[NamedProperty]) -> list[ast.stmt]:
    keys: list[ast.expr | None] = [ast.Constant(each.field.wire) for each in parameters]
    values: list[ast.expr] = [name_of(each.name) for each in parameters]
    if described.more:
        keys, values = [*keys, None], [*values, name_of("more")]
    given: ast.expr = ast.Dict(keys, values)
    if not all(each.field.required for each in parameters):
        given = invoke("given", given)
    call = invoke("call_tool", ast.Constant(described.name), given)
    if described.result == stub_types.ANY:
        return [ast.Return(call)]
    target = ast.Name("answer", ast.Store())
    typed = ast.AnnAssign(target, annotation(described.result), call, 1)
    return [typed, ast.Return(name_of("answer"))]


def _types(described: stub_types.ToolSignature, function: ast.FunctionDef) -> list[ast.stmt]:
    defined = definitions(described.definitions)
    used = {name for node in (*defined, function) for name in identifiers_in(node)}
    needed = [name for name in _TYPING if name in used]
    imports: list[ast.stmt] = [import_from("typing", needed)] if needed else []
    if not imports and not defined:
        return []
    return [ast.If(name_of("TYPE_CHECKING"), [*imports, *defined], [])]


def _source_of(tree: ast.AST) -> str:
    """Return the source of a tree, with hidden characters as escapes: repr(3), by which texts are
    written, leaves variation selectors as they are."""
    return harmless(ast.unparse(ast.fix_missing_locations(tree)))


def definitions(named: Mapping[str, stub_types.Record | stub_types.Type]) -> list[ast.stmt]:
    """Return the definitions of types, each of which may name the others."""
    statements: list[ast.stmt] = []
    unknown = set(named)
    for name, each in named.items():
        statements += _definition(name, each, unknown, named)
        unknown.discard(name)
    return statements


def _definition(
    name: str, each: stub_types.Record | stub_types.Type, unknown: set[str], names: Iterable[str]
) -> list[ast.stmt]:
    if not isinstance(each, stub_types.Record):
        target = ast.Name(name, ast.Store())
        return [ast.AnnAssign(target, name_of("TypeAlias"), _quoted(each, unknown), 1)]
    taken = {*stub_types.RESERVED, *names}
    if all(_can_be_said(field.wire, taken) for field in each.fields):
        return [_record_as_class(name, each)]
    return _record_as_call(name, each, unknown)


def _quoted(type: stub_types.Type, unknown: set[str]) -> ast.expr:
    """Return a type where names have to be known already; one that is not makes it a text."""
    expression = annotation(type)
    if unknown.isdisjoint(stub_types.names_in(type)):
        return expression
    return ast.Constant(ast.unparse(expression))


def _can_be_said(wire: str, taken: set[str]) -> bool:
    """Tell whether a key may stand in a class: a name there hides the type of that name."""
    return wire not in taken and stub_types.identifier(wire) == wire and not wire.startswith("__")


def _record_as_class(name: str, record: stub_types.Record) -> ast.stmt:
    said = [(field.wire, field) for field in record.fields]
    body = docstring(record.description, said, " " * 8)
    for field in record.fields:
        type = _needed(annotation(field.type), field, record)
        body.append(ast.AnnAssign(ast.Name(field.wire, ast.Store()), type, None, 1))
    bases: list[ast.expr] = [name_of("TypedDict")]
    return ast.ClassDef(name, bases, _total(record), body or [ast.Pass()], [], **NOT_GENERIC)


def _record_as_call(name: str, record: stub_types.Record, unknown: set[str]) -> list[ast.stmt]:
    keys: list[ast.expr | None] = [ast.Constant(field.wire) for field in record.fields]
    values = [_needed(_quoted(field.type, unknown), field, record) for field in record.fields]
    call = invoke("TypedDict", ast.Constant(name), ast.Dict(keys, values))
    call.keywords = _total(record)
    made = ast.Assign([ast.Name(name, ast.Store())], call)
    said = [(repr(field.wire), field) for field in record.fields]
    return [made, *docstring(record.description, said)]


def _total(record: stub_types.Record) -> list[ast.keyword]:
    none_required = record.fields and not any(field.required for field in record.fields)
    return [ast.keyword("total", ast.Constant(value=False))] if none_required else []


def _needed(type: ast.expr, field: stub_types.Property, record: stub_types.Record) -> ast.expr:
    optional = not field.required and not _total(record)
    return subscript("NotRequired", type) if optional else type


def annotation(type: stub_types.Type) -> ast.expr:
    """Return a type as an expression."""
    if isinstance(type, stub_types.Plain):
        if type.word == "none":
            return ast.Constant(None)
        return name_of("Any" if type.word == "any" else type.word)
    if isinstance(type, stub_types.Literals):
        return subscript("Literal", *map(_constant, type.values))
    if isinstance(type, stub_types.ListOf):
        return subscript("list", annotation(type.item))
    if isinstance(type, stub_types.TupleOf):  # JSON has only lists
        members = [*type.items, *([type.rest] if type.rest else [])]
        return subscript("list", annotation(stub_types.either(members)))
    if isinstance(type, stub_types.MapOf):
        return subscript("dict", name_of("str"), annotation(type.value))
    if isinstance(type, stub_types.UnionOf):
        return reduce(_or, map(annotation, type.members))
    return name_of(type.name)


def _constant(value: stub_types.Scalar) -> ast.expr:
    if isinstance(value, int) and value < 0:
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    return ast.Constant(value)


def _or(one: ast.expr, other: ast.expr) -> ast.expr:
    return ast.BinOp(one, ast.BitOr(), other)


# Python 3.12 needs this field for source and does not set it; 3.11 ignores it.
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
    description: str, fields: Iterable[tuple[str, stub_types.Property]], indent: str = "    "
) -> list[ast.stmt]:
    """Return the description of an object and of its fields, by name, indented like the code around."""
    lines = [said for name, field in fields if (said := _said(name, field))]
    parts = [part for part in (description, "\n".join(lines)) if part]
    if not parts:
        return []
    inside = "\n\n".join(parts).split("\n")
    text = "\n".join(f"{indent}{each}" if each else "" for each in inside).strip()
    return [ast.Expr(ast.Constant(f"{text}\n{indent}" if len(inside) > 1 else text))]


def _said(name: str, field: stub_types.Property) -> str:
    words = [field.description, f"Default: {field.default}" if field.default else ""]
    text = " ".join(word for word in words if word)
    return f"{name}: {text}" if text else ""


def identifiers_in(node: ast.AST) -> set[str]:
    """Return every name that is read or written in a tree."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


PLACE = "/tools"  # path as cells see it

INTERFACE = '''\
"""The tools that this program may call.

Each is a function: `from tools.SERVER import TOOL`.  A file that describes it is SERVER/TOOL.py in
this folder; SERVER/__init__.py lists what a server has.  In a coroutine a call is awaited.
"""
from collections.abc import Mapping
from typing import Any, Literal

Detail = Literal["name", "summary", "full"]

UNSET: Any
"""Stands for an argument that is not given."""

class ToolError(Exception):
    """A call of a tool that was refused, or that failed; `kind` says how."""

    kind: str
    def __init__(self, kind: str, message: str) -> None: ...

def call_tool(name: str, args: Mapping[str, Any] | None = None) -> Any:
    """Call a tool by its name."""

def given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not UNSET."""

def search_tools(
    query: str, detail: Detail = "summary", server: str | None = None, limit: int = 5, offset: int = 0
) -> Any:
    """Find tools by name or by what they are for: {"tools": [...], "more": bool, "hint": str}."""

def browse(server: str | None = None, limit: int = 50, offset: int = 0) -> Any:
    """List servers and how many tools each has; or the tools of one, each in a line."""

def describe(name: str, detail: Detail = "full") -> Any:
    """Say how a tool is called: its signature, and in full its types and what they mean."""
'''

MODULE = """\
export const callTool = (name, args = {}) => globalThis.callTool(name, args);
export const searchTools = (query, options = {}) => callTool("tools.search", { query, ...options });
export const browse = (options = {}) => callTool("tools.browse", options);
export const describe = (name, options = {}) =>
  callTool("tools.describe", { name, language: "typescript", ...options });
"""

MODULE_TYPES = """\
/** The tools that this program may call: `import { TOOL } from "/tools/SERVER/index.mjs"`. */
export type Detail = "name" | "summary" | "full";
export declare function callTool(name: string, args?: { [key: string]: any }): any;
/** Find tools by name or by what they are for. */
export declare function searchTools(
  query: string, options?: { detail?: Detail; server?: string; limit?: number; offset?: number }): any;
/** List servers and how many tools each has; or the tools of one, each in a line. */
export declare function browse(options?: { server?: string; limit?: number; offset?: number }): any;
/** Say how a tool is called. */
export declare function describe(name: string, options?: { detail?: Detail }): any;
"""
