"""Python stubs: syntax trees built from types and written by `ast.unparse`.  No text becomes code.

A stub is a module with one function, which calls the tool by its wire name with its wire arguments.
Its types stand behind TYPE_CHECKING, so that importing the stub does not load them.
"""

import ast
from collections.abc import Iterable
from typing import NamedTuple

from ...policies.errors import InternalError
from ..text.terminal import harmless
from .interface import INTERFACE
from .names import identifier
from .python_types import annotation, definitions
from .syntax import NOT_GENERIC, docstring, identifiers_in, import_from, invoke, name_of
from .types import ANY, Property, ToolSignature

_CALLED = {"UNSET", "call_tool", "given"}
_TYPING = ("Any", "Literal", "NotRequired", "TypeAlias", "TypedDict")


class NamedProperty(NamedTuple):
    """The Python name of a parameter, and its property."""

    name: str
    field: Property


def parameters_of(described: ToolSignature) -> tuple[list[NamedProperty], list[NamedProperty]]:
    """Return those that may be given by position, in the order of the schema, and the others.

    Where one that may be left out stands before one that may not, only what is before both has a place.
    """
    taken: set[str] = set()
    named = []
    for field in described.parameters:
        name = identifier(field.wire, taken)
        taken.add(name)
        named.append(NamedProperty(name, field))
    first = next((at for at, each in enumerate(named) if not each.field.required), len(named))
    is_mixed = any(each.field.required for each in named[first:])
    return (named[:first], named[first:]) if is_mixed else (named, [])


def module(described: ToolSignature, name: str) -> str:
    """Return the source of a tool's stub, whose function is called `name`."""
    return _written(ast.Module(_stub(described, name), []))


def package(
    text: str, names: Iterable[tuple[str, bool]], own: ToolSignature | None, name: str
) -> str:
    """Return the source of a package of stubs: what is in it, for type checkers, below a `text`.

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


def _stub(described: ToolSignature, name: str) -> list[ast.stmt]:
    function = _function(described, name)
    return [
        import_from("__future__", ["annotations"]),
        import_from("typing", ["TYPE_CHECKING"]),
        import_from("tools", sorted(identifiers_in(function) & _CALLED)),
        *_types(described, function),
        function,
    ]


def signature(described: ToolSignature, name: str) -> str:
    """Return what a `def` of a tool says behind that word, in Python's words."""
    function = _function(described, name)
    function.body = [ast.Expr(ast.Constant(...))]
    for default in (*function.args.defaults, *function.args.kw_defaults):
        if isinstance(default, ast.Name):  # a reader need not know what stands for nothing
            default.id = "..."
    head = _source_of(function).partition("def ")[2]
    return head.rpartition(":\n")[0]


def description(described: ToolSignature, name: str) -> str:
    """Return the readable part of a tool's stub: its types and its function, without the call."""
    function = _function(described, name)
    function.body = [*function.body[:1], ast.Expr(ast.Constant(...))]
    if not isinstance(function.body[0], ast.Expr):
        del function.body[0]
    return _written(ast.Module([*definitions(described.definitions), function], []))


def _written(tree: ast.Module) -> str:
    """Return the source of `tree`, and of nothing else."""
    text = _source_of(tree)
    if ast.dump(ast.parse(text)) != ast.dump(tree):
        raise InternalError("a stub does not say what was meant")
    return f"{text}\n"


# the function


def _function(described: ToolSignature, name: str) -> ast.FunctionDef:
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


def _call(described: ToolSignature, parameters: list[NamedProperty]) -> list[ast.stmt]:
    keys: list[ast.expr | None] = [ast.Constant(each.field.wire) for each in parameters]
    values: list[ast.expr] = [name_of(each.name) for each in parameters]
    if described.more:
        keys, values = [*keys, None], [*values, name_of("more")]
    given: ast.expr = ast.Dict(keys, values)
    if not all(each.field.required for each in parameters):
        given = invoke("given", given)
    call = invoke("call_tool", ast.Constant(described.name), given)
    if described.result == ANY:
        return [ast.Return(call)]
    target = ast.Name("answer", ast.Store())
    typed = ast.AnnAssign(target, annotation(described.result), call, 1)
    return [typed, ast.Return(name_of("answer"))]


def _types(described: ToolSignature, function: ast.FunctionDef) -> list[ast.stmt]:
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
