"""The parts of a stub: of a schema it holds only names, texts and numbers."""

import ast

_NODES = (
    ast.Module, ast.ImportFrom, ast.alias, ast.If, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Pass,
    ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Expr, ast.Constant, ast.Name, ast.Load,
    ast.Store, ast.Subscript, ast.Tuple, ast.BinOp, ast.BitOr, ast.UnaryOp, ast.USub, ast.Dict,
    ast.Call, ast.keyword,
)  # fmt: skip
_CALLED = {"call_tool", "given", "TypedDict"}
_IMPORTED = {"__future__", "typing", "tools"}


def complaints(source: str) -> list[str]:
    """Return what in a stub should not be there."""
    tree = ast.parse(source)
    found = [type(node).__name__ for node in ast.walk(tree) if not isinstance(node, _NODES)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not (
            isinstance(node.func, ast.Name) and node.func.id in _CALLED
        ):
            found.append(ast.unparse(node))
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module not in _IMPORTED:
            found.append(ast.unparse(node))
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            found.append("a decorator")
    return found + _at_import(tree)


def _at_import(tree: ast.Module) -> list[str]:
    """Return what happens when a stub is imported, beside imports and the definition of a function."""
    quiet = (ast.ImportFrom, ast.FunctionDef)
    return [
        ast.unparse(each) for each in tree.body
        if not isinstance(each, quiet)
        and not (isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING")
        and not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    ]  # fmt: skip
