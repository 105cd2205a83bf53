"""Pure expressions: Python that an evaluator without a cell answers exactly as CPython does.

`is_pure` takes a source only if it is one expression of a small language: numbers, ASCII text, lists,
tuples and dicts, operators, comprehensions, and calls of a few builtins and methods of text.  It has no
effects, so that it can be executed again.  Left out is whatever another interpreter may answer
otherwise: text beyond ASCII (versions of Unicode), formats, hashes, identity, rounding to digits, and
of floats everything that IEEE 754 does not fix to the last bit.
"""

import ast
from collections.abc import Mapping

MOST_CHARACTERS = 2000
_DEEPEST = 20  # levels of an input
_MOST_LEVELS = 50  # nested levels of an expression
_LARGEST = 2**53
_BUILTINS = frozenset((
    "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "len", "list", "max",
    "min", "range", "reversed", "round", "sorted", "str", "sum", "tuple", "zip",
))  # fmt: skip
# Functions that return an iterator. An evaluator may return a list instead, so the result must be
# consumed at once.
_ITERATORS = frozenset(("enumerate", "range", "reversed", "zip"))
_CONSUMERS = frozenset((
    "all", "any", "dict", "enumerate", "list", "max", "min", "reversed", "sorted", "sum", "tuple",
    "zip",
))  # fmt: skip
_METHODS = frozenset((
    "count", "endswith", "find", "get", "join", "lower", "lstrip", "replace", "rstrip", "split",
    "startswith", "strip", "upper",
))  # fmt: skip
# With positions (`find(text, start)`) an evaluator may differ at the ends of a text.
_WITHOUT_POSITIONS = frozenset(("count", "endswith", "find", "startswith"))
# digits by which powers and shifts can lengthen numbers, over a whole expression
_MOST_BITS = 20_000
# CPython 3.12 sums floats more exactly than 3.11; powers and remainders are the C library's.
_WITHOUT_FLOATS = (ast.Pow, ast.Mod, ast.FloorDiv)
_BUILTINS_WITHOUT_FLOATS = frozenset(("sum", "divmod"))
_OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.LShift, ast.RShift,
    ast.BitOr, ast.BitXor, ast.BitAnd, ast.UAdd, ast.USub, ast.Not, ast.Invert, ast.And, ast.Or,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Load, ast.Store,
)  # fmt: skip
_PLAIN = (
    ast.Expression, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.List, ast.Tuple,
    ast.Slice, ast.ListComp, ast.DictComp, ast.GeneratorExp, *_OPERATORS,
)  # fmt: skip


def is_pure(code: str, inputs: Mapping[str, object]) -> bool:
    """Tell whether `code` is a pure expression of `inputs` and of names that it binds itself."""
    if len(code) > MOST_CHARACTERS or code[:1].isspace() or not _is_plain_text(code):
        return False
    try:
        tree = ast.parse(code, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    reader = _ExpressionReader(inputs)
    return _is_shallow(tree) and all(map(reader.takes, ast.walk(tree))) and reader.is_decided()


def _is_shallow(tree: ast.AST) -> bool:
    """Tell whether an expression is nested so little that no interpreter runs out of stack."""
    level: list[ast.AST] = [tree]
    for _ in range(_MOST_LEVELS):
        level = [below for node in level for below in ast.iter_child_nodes(node)]
        if not level:
            return True
    return False


class _ExpressionReader:
    def __init__(self, inputs: Mapping[str, object]) -> None:
        self._inputs = inputs
        self._has_floats = self._has_text = self._has_powers = self._has_remainders = False
        self._used: set[str] = set()
        self._bound: set[str] = set()
        self._called: set[str] = set()
        self._bits = 1
        # Nodes whose parents were already checked (ast.walk goes from parents to children): iterators
        # and functions of calls.
        self._used_up: set[int] = set()
        self._callees: set[int] = set()

    def takes(self, node: ast.AST) -> bool:
        """Tell whether a node belongs to the language, and record its needs."""
        match node:
            case ast.Constant(value=value):
                return self._takes_value(value)
            case ast.Name(id=name, ctx=ast.Store()):
                self._bound.add(name)
            case ast.Name(id=name):
                if id(node) not in self._callees:
                    self._used.add(name)
            case ast.Call():
                return self._takes_call(node)
            case ast.Attribute():
                return id(node) in self._callees  # the call has checked its name
            case ast.Subscript(ctx=ctx):
                return isinstance(ctx, ast.Load)
            case ast.Dict(keys=keys):
                return None not in keys
            case ast.comprehension():
                self._used_up.add(id(node.iter))
                return not node.is_async
            case ast.GeneratorExp():
                return id(node) in self._used_up
            case ast.keyword():
                return True  # part of a call that was already checked
            case ast.BinOp(op=ast.Div()):
                self._has_floats = True
            case ast.BinOp(op=ast.Pow() | ast.LShift(), right=right) if not self._takes_size(right):
                return False
            case ast.BinOp(op=op) if isinstance(op, _WITHOUT_FLOATS):
                self._has_remainders |= isinstance(op, ast.Mod)
                self._has_powers = True
        return isinstance(node, (*_PLAIN, ast.Name))

    def is_decided(self) -> bool:
        """Tell whether all names are known, and none of the operations could go another way."""
        calls = self._called & _BUILTINS
        free = self._used - self._bound
        if not free <= self._inputs.keys() or (self._bound | self._inputs.keys()) & _BUILTINS:
            return False
        if self._bound & self._inputs.keys():
            return False
        if not all(self._takes_value(self._inputs[name]) for name in free):
            return False
        self._has_floats |= bool(calls & {"float"})
        self._has_text |= bool(calls & {"str"})
        if self._has_remainders and self._has_text:  # `%` formats text
            return False
        return not self._has_floats or not (self._has_powers or calls & _BUILTINS_WITHOUT_FLOATS)

    def _takes_size(self, right: ast.expr) -> bool:
        """Tell whether a power or shift has a constant for its size, and all together are small.

        A negative power makes a float of whole numbers; a large one takes long, in one step that no
        evaluator interrupts.
        """
        match right:
            case ast.Constant(value=int(size)) if 0 <= size <= _MOST_BITS:
                self._bits *= max(1, size)
                return self._bits <= _MOST_BITS
        return False

    def _takes_call(self, node: ast.Call) -> bool:
        self._callees.add(id(node.func))
        match node.func:
            case ast.Name(id=name) if name in _BUILTINS:
                self._called.add(name)
                if name in _CONSUMERS and (len(node.args) == 1 or name == "zip"):
                    self._used_up.update(map(id, node.args))
                if name in _ITERATORS and id(node) not in self._used_up:
                    return False
                names = {each.arg for each in node.keywords}
                if name == "round":
                    return len(node.args) == 1 and not names
                return not names or (name == "sorted" and names == {"reverse"})
            case ast.Attribute(attr=attr, value=value):
                is_text = isinstance(value, ast.Constant | ast.Name | ast.Call | ast.Subscript)
                if attr in _WITHOUT_POSITIONS and len(node.args) != 1:
                    return False
                return attr in _METHODS and is_text and not node.keywords
        return False

    def _takes_value(self, value: object, level: int = 0) -> bool:
        match value:
            case None | bool():
                return True
            case int():
                return abs(value) <= _LARGEST
            case float():
                self._has_floats = True
                return value - value == 0  # False for infinities and NaN
            case str():
                self._has_text = True
                return _is_plain_text(value)
            case list() if level < _DEEPEST:
                return all(self._takes_value(each, level + 1) for each in value)
            case dict() if level < _DEEPEST:
                inside = (*value.keys(), *value.values())
                return all(self._takes_value(each, level + 1) for each in inside)
        return False


def _is_plain_text(text: str) -> bool:
    """Tell whether text is printable ASCII, with tabs and line feeds."""
    return text.isascii() and text.replace("\n", "").replace("\t", "").isprintable()


def is_plain_value(value: object, level: int = 0) -> bool:
    """Tell whether a value is one that JSON holds exactly, and a cell returns the same."""
    if isinstance(value, bool) or value is None:
        return True
    if type(value) is int:
        return abs(value) <= _LARGEST
    if type(value) is float:
        return value - value == 0
    if type(value) is str:
        return _is_plain_text(value)
    if level >= _DEEPEST:
        return False
    if type(value) is list:
        return all(is_plain_value(each, level + 1) for each in value)
    if type(value) is dict:
        return all(
            type(key) is str and _is_plain_text(key) and is_plain_value(each, level + 1)
            for key, each in value.items()
        )
    return False
