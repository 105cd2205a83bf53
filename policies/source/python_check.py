"""Checks of Python source by its syntax tree: imports, builtins, attributes traced through aliases, and
dunder walks.

Every step is linear in the source, which may be written to make a check slow: each expression is
resolved once, and names are cut at _NAME_CHARACTERS.
"""

import _ast as ast  # without what `ast` adds to it, which takes a millisecond to import
import re
import resource
import sys
import threading
import warnings
from collections.abc import Iterator

from msgspec.structs import replace

from .findings import MAX_FINDINGS, WALKS, Finding, Rules, reason_of_builtin

# Parsing of hostile source without harm to the process that embeds cellwright.
_FILENAME = "<source check>"
# Python warns about odd literals while it parses: on the host's stderr since 3.12, and as an error if
# warnings are errors. One filter for this file name, installed once, prevents it; `catch_warnings` is
# not thread-safe.
_FILTER = ("ignore", None, Warning, re.compile(re.escape(_FILENAME)), 0)

# CPython dies of SIGSEGV if its parser, or a walk over its tree, needs more stack than the thread has.
# Measured on x86-64, 3.11: the parser stops by itself within 1 MiB, not within 512 KiB; a walk needs 81
# bytes a level, and stops at three times the recursion limit.
_PARSER_BYTES = 1024 * 1024
_LEVEL_BYTES = 128
_LEVELS_PER_FRAME = 3
_CHARACTERS_PER_LEVEL = 2
_UNLIMITED_BYTES = (
    2 * 1024 * 1024
)  # stack of a thread if RLIMIT_STACK is unlimited: pthread_create(3)

# CPython's parser keeps every prefix of an imported dotted name, so memory grows with the square of the
# length: 16 GiB for 256 Ki characters. Any character outside ASCII may be part of a name.
_PARTS = 256
_NAME = r"[^\x00-/:-@\[-^`{-\x7f]"  # [\w\x80-\U0010ffff], compiled in a twentieth of the time
_GAP = r"[\s\\]*+"
_DOTTED = re.compile(rf"(?<!{_NAME})(?:{_NAME}++{_GAP}\.{_GAP})++")

# CPython 3.11 counts the depth of all trees in one place, and raises SystemError if two threads build
# trees at the same time (gh-106905).  Other threads of the embedding process may parse too.
_one_at_a_time = threading.RLock()  # reentrant: a finalizer may parse during a parse
_ATTEMPTS = 10


class TooDeep(Exception):  # noqa: N818 - becomes a finding
    """Parsing may need more stack than this thread has, or too much memory."""


def parse(code: str) -> ast.Module:
    """Return the syntax tree of `code`.

    Raises TooDeep if parsing could crash the process, and the exceptions of `ast.parse`: SyntaxError,
    ValueError, RecursionError, MemoryError.  The check uses the stack size that new threads get; a
    thread that was started with a smaller one is not detected.
    """
    if (needed := _needed(code)) > (stack := _stack()):
        raise TooDeep(f"parsing may need {needed} bytes of stack, and a thread has {stack}")
    if any(name[0].count(".") >= _PARTS for name in _DOTTED.finditer(code)):
        raise TooDeep(f"parsing a name of more than {_PARTS} parts needs too much memory")
    if _FILTER not in warnings.filters:
        warnings.filterwarnings("ignore", module=re.escape(_FILENAME))
    return _parsed(code, _ATTEMPTS)


def _parsed(code: str, attempts: int) -> ast.Module:
    try:
        with _one_at_a_time:
            tree: ast.Module = compile(  # type: ignore[assignment]
                code, _FILENAME, "exec", ast.PyCF_ONLY_AST, dont_inherit=True
            )
            return tree
    except SystemError:
        if attempts == 1:
            raise
    return _parsed(code, attempts - 1)


def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes of a tree in the order of `ast.walk`."""
    found = [tree]
    for node in found:
        for name in node._fields:
            value = getattr(node, name, None)
            values = value if isinstance(value, list) else (value,)
            found += [each for each in values if isinstance(each, ast.AST)]
    return found


def _needed(code: str) -> int:
    levels = min(len(code) // _CHARACTERS_PER_LEVEL, sys.getrecursionlimit() * _LEVELS_PER_FRAME)
    return max(_PARSER_BYTES, levels * _LEVEL_BYTES)


def _stack() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    default = _UNLIMITED_BYTES if soft == resource.RLIM_INFINITY else soft
    if size := threading.stack_size():  # this call sets it to the default
        threading.stack_size(size)
    return size or default


_LOOKUPS = ("getattr", "setattr", "delattr", "hasattr")
_GETTERS = ("operator.attrgetter", "operator.methodcaller")
_IMPORTERS = ("importlib.import_module", "__import__", "importlib.__import__")
_AT_RUN_TIME = "looks up a name built at run time"
_WALKS_FROM_HERE = ("__builtins__", "__loader__", "__spec__")  # names of every module
_NAME_CHARACTERS = 200
_Reference = ast.Attribute | ast.Call


def check_python(code: str, rules: Rules) -> tuple[Finding, ...]:
    """Return the findings in `code`, in the order of the text; a source that does not parse has one."""
    try:
        found = list(_Check(parse(code), rules).run())
    except TooDeep as error:
        return (Finding("syntax", "stack", str(error), 1, 0),)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, offset = getattr(error, "lineno", 1) or 1, getattr(error, "offset", 1) or 1
        reason = str(error)[:_NAME_CHARACTERS]
        return (Finding("syntax", type(error).__name__, reason, line, max(offset - 1, 0)),)
    first = sorted(found, key=_place)[:MAX_FINDINGS]
    return tuple(first if code.isascii() else _in_characters(code, first))


def _place(finding: Finding) -> tuple[int, int, bool]:
    """Return the sort key of a finding: its position; an import comes first at the same position."""
    return finding.line, finding.column, finding.rule != "import"


def _in_characters(code: str, found: list[Finding]) -> Iterator[Finding]:
    """Yield `found` with columns in characters: the tree counts the bytes of UTF-8."""
    lines = [line.encode() for line in re.split(r"\r\n|\r|\n", code)]
    for each in found:
        before = lines[each.line - 1][: each.column].decode(errors="ignore")
        yield replace(each, column=len(before))


class _Check:
    def __init__(self, tree: ast.AST, rules: Rules) -> None:
        self._nodes = nodes_of(tree)
        self._rules = rules
        self._names: dict[str, str] = {}  # name -> the dotted origin that it refers to
        self._origins: dict[_Reference, str] = {}
        self._imported: set[str] = set()

    def run(self) -> Iterator[Finding]:
        for _ in range(2):  # an alias of an alias may come first in the walk
            self._origins.clear()
            for node in self._nodes:
                self._trace(node)
        self._origins.clear()
        self._imported = {name.partition(".")[0] for name in self._modules()}
        inner = {node.value for node in self._nodes if isinstance(node, ast.Attribute)}
        for node in self._nodes:
            yield from self._look(node, is_inner=node in inner)

    def _modules(self) -> Iterator[str]:
        """Yield every imported origin, bound to a name or not."""
        yield from self._names.values()
        for node in self._nodes:
            if isinstance(node, ast.Call) and self._origin(node.func) in _IMPORTERS:
                yield self._origin(node)

    # aliases

    def _trace(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                self._bind(alias.asname or top, alias.name if alias.asname else top)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                self._bind(alias.asname or alias.name, f"{_module(node)}.{alias.name}")
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value:
            self._assign(node.target, node.value)

    def _bind(self, name: str, origin: str) -> None:
        if origin:
            self._names[name] = origin[:_NAME_CHARACTERS]

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, self._origin(value))
        elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            for name, each in zip(target.elts, value.elts, strict=False):
                if isinstance(name, ast.Name):
                    self._bind(name.id, self._origin(each))

    def _origin(self, node: ast.expr) -> str:
        """Return the dotted origin of an expression; "" if it is unknown."""
        chain: list[_Reference] = []
        while isinstance(node, _Reference) and node not in self._origins:
            chain.append(node)
            node = node.value if isinstance(node, ast.Attribute) else node.func
        if isinstance(node, _Reference):
            origin = self._origins[node]
        else:
            origin = self._names.get(node.id, node.id) if isinstance(node, ast.Name) else ""
        for each in reversed(chain):
            origin = self._origins[each] = _step(each, origin)[:_NAME_CHARACTERS]
        return origin

    # findings

    def _look(self, node: ast.AST, *, is_inner: bool) -> Iterator[Finding]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from self._import(alias.name, node)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from self._from(_module(node), node)
        elif isinstance(node, ast.Attribute):
            yield from self._attribute(node, is_inner=is_inner)
        elif isinstance(node, ast.Name):
            yield from self._name(node)
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.MatchClass):
            yield from (_walk(node, name) for name in node.kwd_attrs if name in WALKS)

    def _is_imported(self, module: str) -> bool:
        return bool(module) and module.partition(".")[0] in self._imported

    def _is_blocked(self, module: str) -> bool:
        top = module.partition(".")[0]
        return bool(top) and top in self._imported and self._rules.forbids_import(module)

    def _import(self, module: str, node: ast.expr | ast.stmt) -> Iterator[Finding]:
        if self._rules.forbids_import(module):
            named = module if module in self._rules.blocked_imports else module.partition(".")[0]
            yield _at(node, "import", named, self._rules.reason_of_import(module))

    def _from(self, module: str, node: ast.ImportFrom) -> Iterator[Finding]:
        """Check `from os import path` as os, and as os.path if only that is blocked."""
        inside = [f"{module}.{alias.name}" for alias in node.names]
        if self._rules.forbids_import(module) and not all(
            name in self._rules.allowed_imports for name in inside
        ):
            yield from self._import(module, node)
        else:
            for name in inside:
                if name in self._rules.blocked_imports:
                    yield from self._import(name, node)
                elif reached := self._rules.reaches(name):
                    yield _at(node, "import", name, self._rules.reason_of_import(reached))

    def _attribute(self, node: ast.Attribute, *, is_inner: bool) -> Iterator[Finding]:
        if node.attr in WALKS:
            yield _walk(node, node.attr)
        origin = self._origin(node)
        module = origin.rpartition(".")[0]
        if not is_inner and self._is_blocked(module):
            yield self._member(node, origin)
        elif self._is_imported(module) and (reached := self._rules.reaches(origin)):
            yield _at(node, "attribute", origin, self._rules.reason_of_import(reached))
        elif self._is_imported(module) and (like := self._rules.builtin_like(origin)):
            yield _at(node, "builtin", origin, reason_of_builtin(like))
        elif module == "builtins" and node.attr in self._rules.blocked_builtins:
            yield _at(node, "builtin", node.attr, reason_of_builtin(node.attr))

    def _member(self, node: ast.expr, origin: str) -> Finding:
        return _at(node, "attribute", origin, self._rules.reason_of_import(origin))

    def _name(self, node: ast.Name) -> Iterator[Finding]:
        origin = self._names.get(node.id, node.id)
        module = origin.rpartition(".")[0]
        if node.id in _WALKS_FROM_HERE:
            yield _walk(node, node.id)
        elif origin in self._rules.blocked_builtins and isinstance(node.ctx, ast.Load):
            yield _at(node, "builtin", origin, reason_of_builtin(origin))
        elif not isinstance(node.ctx, ast.Load) or not module:
            return
        elif self._is_blocked(module):
            yield self._member(node, origin)
        elif like := self._rules.builtin_like(origin):
            yield _at(node, "builtin", origin, reason_of_builtin(like))

    def _call(self, node: ast.Call) -> Iterator[Finding]:
        function = self._origin(node.func)
        if function in _IMPORTERS and node.args:
            module = _text(node.args[0])
            if module is None:
                yield _at(node, "dynamic", function, "imports a name built at run time")
            else:
                yield from self._import(module, node)
        elif function in _LOOKUPS and len(node.args) > 1:
            yield from self._lookup(node, function)
        elif function in _GETTERS:
            yield from self._getter(node, function)
        elif function == "vars" and not node.args and "locals" in self._rules.blocked_builtins:
            yield _at(node, "builtin", "vars", reason_of_builtin("locals"))

    def _lookup(self, node: ast.Call, function: str) -> Iterator[Finding]:
        """Check getattr(os, "system") as os.system; a name built at run time is a finding."""
        name = _constant(node.args[1])
        if name is None:
            yield _at(node, "dynamic", function, _AT_RUN_TIME)
        elif name in WALKS:
            yield _walk(node, name)
        elif self._is_blocked(module := self._origin(node.args[0])):
            yield self._member(node, f"{module}.{name}")
        elif self._is_imported(module) and (reached := self._rules.reaches(name)):
            reason = self._rules.reason_of_import(reached)
            yield _at(node, "attribute", f"{module}.{name}", reason)

    def _getter(self, node: ast.Call, function: str) -> Iterator[Finding]:
        """Check attrgetter("a.b") by its parts; of methodcaller only the first argument is a name."""
        for argument in node.args[:1] if function.endswith("methodcaller") else node.args:
            name = _constant(argument)
            if name is None:
                yield _at(node, "dynamic", function, _AT_RUN_TIME)
                continue
            for part in name.split("."):
                if part in WALKS:
                    yield _walk(node, part)
                elif reached := self._rules.reaches(part):
                    reason = self._rules.reason_of_import(reached)
                    yield _at(node, "attribute", part, reason)


def _module(node: ast.ImportFrom) -> str:
    return (node.module or "")[:_NAME_CHARACTERS]  # repeated for each name of the import


def _step(node: _Reference, inner: str) -> str:
    """Return the origin of an attribute or a call whose inner expression has the origin `inner`."""
    if isinstance(node, ast.Attribute):
        return f"{inner}.{node.attr}" if inner else ""
    return (_text(node.args[0]) or "") if inner in _IMPORTERS and node.args else ""


def _constant(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _text(node: ast.expr) -> str | None:
    parts: list[str | None] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts.append(_constant(node.right))
        node = node.left
    parts.append(_constant(node))
    known = [part for part in reversed(parts) if part is not None]
    return "".join(known) if len(known) == len(parts) else None


def _walk(node: ast.expr | ast.pattern, name: str) -> Finding:
    return _at(node, "dunder", name, WALKS[name])


def _at(node: ast.expr | ast.stmt | ast.pattern, rule: str, what: str, reason: str) -> Finding:
    return Finding(rule, what[:_NAME_CHARACTERS], reason, node.lineno, node.col_offset)
