"""Python by its syntax tree: imports, builtins, attributes traced through aliases, dunder walks."""

import ast
import threading
from collections.abc import Iterator

from .findings import Finding, Rules

_WALKS = {
    "__subclasses__": "lists every class there is",
    "__bases__": "climbs to object",
    "__mro__": "climbs to object",
    "__globals__": "reaches another module's names",
    "__builtins__": "reaches builtins by another way",
    "__loader__": "imports by another way",
    "__code__": "rewrites a function",
    "__closure__": "reads another function's names",
    "__getattribute__": "hides what is looked up",
    "f_globals": "reaches a frame's names",
    "f_back": "climbs the stack",
    "gi_frame": "climbs the stack",
    "tb_frame": "climbs the stack",
    "cr_frame": "climbs the stack",
}
# With less, CPython's parser crashes on deep nesting instead of raising (measured: 3.11, at 512 KiB).
_STACK_BYTES = 1024 * 1024
_LOOKUPS = ("getattr", "setattr", "delattr", "hasattr")
_IMPORTERS = ("importlib.import_module", "__import__", "importlib.__import__")


def check_python(code: str, rules: Rules) -> tuple[Finding, ...]:
    """Return what is found in `code`, in the order of the text; a source that does not parse is one
    finding."""
    if 0 < threading.stack_size() < _STACK_BYTES:
        return (Finding("syntax", "stack", f"a thread needs {_STACK_BYTES} bytes of stack", 1, 0),)
    try:
        found = list(_Check(ast.parse(code), rules).run())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, column = getattr(error, "lineno", 1) or 1, getattr(error, "offset", 0) or 0
        return (Finding("syntax", type(error).__name__, str(error), line, column),)
    return tuple(sorted(found, key=lambda finding: (finding.line, finding.column)))


class _Check:
    def __init__(self, tree: ast.AST, rules: Rules) -> None:
        self._nodes = list(ast.walk(tree))
        self._rules = rules
        self._names: dict[str, str] = {}  # what a name stands for, by its dotted origin
        self._imported: set[str] = set()

    def run(self) -> Iterator[Finding]:
        for _ in range(2):  # an alias of an alias may come first in the walk
            for node in self._nodes:
                self._trace(node)
        self._imported = {name.partition(".")[0] for name in self._names.values()}
        inner = {id(node.value) for node in self._nodes if isinstance(node, ast.Attribute)}
        for node in self._nodes:
            yield from self._look(node, is_inner=id(node) in inner)

    # aliases

    def _trace(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                self._names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                self._names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            origin = self._origin(node.value)
            for target in targets:
                if origin and isinstance(target, ast.Name):
                    self._names[target.id] = origin

    def _origin(self, node: ast.AST) -> str:
        """Return the dotted name that an expression stands for, as far as it can be told."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if isinstance(node, ast.Call) and self._origin(node.func) in _IMPORTERS:
            base = _text(node.args[0]) if node.args else None
        else:
            base = self._names.get(node.id, node.id) if isinstance(node, ast.Name) else None
        return ".".join([base, *reversed(attributes)]) if base else ""

    # findings

    def _look(self, node: ast.AST, *, is_inner: bool) -> Iterator[Finding]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from self._import(alias.name, node)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from self._import(node.module, node)
        elif isinstance(node, ast.Attribute):
            yield from self._attribute(node, is_inner=is_inner)
        elif isinstance(node, ast.Name):
            yield from self._name(node)
        elif isinstance(node, ast.Call):
            yield from self._call(node)

    def _is_blocked(self, module: str) -> bool:
        """Tell whether `module` came from an import, and may not."""
        top = module.partition(".")[0]
        return bool(top) and top in self._imported and self._rules.forbids_import(module)

    def _import(self, module: str, node: ast.expr | ast.stmt) -> Iterator[Finding]:
        if self._rules.forbids_import(module):
            top = module if module in self._rules.blocked_imports else module.partition(".")[0]
            yield _at(node, "import", top, "it reaches beyond a computation")

    def _attribute(self, node: ast.Attribute, *, is_inner: bool) -> Iterator[Finding]:
        if node.attr in _WALKS:
            yield _at(node, "dunder", node.attr, _WALKS[node.attr])
        origin = self._origin(node)
        module = origin.rpartition(".")[0]
        known = module.partition(".")[0] in {
            name.partition(".")[0] for name in self._names.values()
        }
        if module and known and not is_inner and self._rules.forbids_import(module):
            yield _at(node, "attribute", origin, "it belongs to a blocked module")
        elif module == "builtins" and node.attr in self._rules.blocked_builtins:
            yield _at(node, "builtin", node.attr, "a blocked builtin by another way")

    def _name(self, node: ast.Name) -> Iterator[Finding]:
        origin = self._names.get(node.id, node.id)
        if node.id == "__builtins__":
            yield _at(node, "dunder", node.id, _WALKS[node.id])
        elif origin in self._rules.blocked_builtins and isinstance(node.ctx, ast.Load):
            yield _at(node, "builtin", origin, "it runs text, opens files or reaches names")
        elif isinstance(node.ctx, ast.Load) and self._is_blocked(origin.rpartition(".")[0]):
            yield _at(node, "attribute", origin, "it belongs to a blocked module")

    def _call(self, node: ast.Call) -> Iterator[Finding]:
        function = self._origin(node.func)
        if function in _IMPORTERS and node.args:
            module = _text(node.args[0])
            if module is None:
                yield _at(node, "dynamic", function, "what it imports is made at run time")
            else:
                yield from self._import(module, node)
        elif function in _LOOKUPS and len(node.args) > 1:
            yield from self._lookup(node, function)

    def _lookup(self, node: ast.Call, function: str) -> Iterator[Finding]:
        """Judge getattr(os, "system") as os.system, and a name made at run time as such."""
        name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if not isinstance(name, str):
            yield _at(node, "dynamic", function, "the name that it looks up is made at run time")
        elif name in _WALKS:
            yield _at(node, "dunder", name, _WALKS[name])
        elif self._is_blocked(self._origin(node.args[0])):
            origin = f"{self._origin(node.args[0])}.{name}"
            yield _at(node, "attribute", origin, "it belongs to a blocked module")


def _text(node: ast.AST) -> str | None:
    """Return the text of a constant, of constants joined by + included."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None or right is None else left + right
    return None


def _at(node: ast.expr | ast.stmt, rule: str, what: str, reason: str) -> Finding:
    return Finding(rule, what, reason, node.lineno, node.col_offset)
