"""JSON Schema of annotations in source text.  The source is hostile: it is read, never run."""

import ast
from typing import Any

import msgspec

_MAX_DEPTH = 24
_MAX_PARTS = 2000  # of all annotations: an alias of two aliases of two ... doubles with every line
_MAX_DEFAULT_BYTES = 1024
Schema = dict[str, Any]
_PLAIN: dict[str, Schema] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "complex": {},
    "str": {"type": "string"},
    "bool": {"type": "boolean"},
    "None": {"type": "null"},
    "list": {"type": "array"},
    "tuple": {"type": "array"},
    "set": {"type": "array", "uniqueItems": True},
    "dict": {"type": "object"},
    "LiteralString": {"type": "string"},
}
_LISTS = (
    "list",
    "List",
    "Sequence",
    "MutableSequence",
    "Iterable",
    "Iterator",
    "Collection",
    "deque",
)
_SETS = ("set", "frozenset", "Set", "FrozenSet", "AbstractSet", "MutableSet")
_DICTS = ("dict", "Dict", "Mapping", "MutableMapping", "OrderedDict", "defaultdict", "DefaultDict")
_THROUGH = ("Final", "Required", "NotRequired", "ReadOnly", "ClassVar", "Awaitable")
_ENUMS = ("Enum", "IntEnum", "StrEnum")
_NO_MEMBER = ast.Constant(value=None)


class Annotations:
    """The annotations of one source: what its classes and aliases stand for.

    `definitions` are the schemas of those classes that were met; `has_objects` tells whether one of
    them, or a set or a tuple, was: values of these are made from JSON and back again in the cell.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self._aliases = dict(map(_alias, filter(_is_alias, tree.body)))
        self._depth = 0
        self._parts = 0
        self.definitions: dict[str, Schema] = {}
        self.has_objects = False

    def schema(self, node: ast.expr | None) -> Schema:
        """Return the schema of an annotation; what is not understood may be anything."""
        self._parts += 1
        if node is None or self._depth >= _MAX_DEPTH or self._parts > _MAX_PARTS:
            return {}
        self._depth += 1
        try:
            return self._schema(node)
        finally:
            self._depth -= 1

    def _schema(self, node: ast.expr) -> Schema:
        if isinstance(node, ast.Constant):
            return self._quoted(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return self._any_of(_either(node))
        if isinstance(node, ast.Subscript):
            return self._subscript(_last_name(node.value), _elements(node.slice), node)
        return self._name(_last_name(node))

    def _quoted(self, value: object) -> Schema:
        if value is None:
            return dict(_PLAIN["None"])
        if not isinstance(value, str):
            return {}
        from ...policies.source.parsing import TooDeep, parse

        try:
            body = parse(value).body
        except (TooDeep, SyntaxError, ValueError, RecursionError, MemoryError):
            return {}
        first = body[0] if len(body) == 1 else None
        return self.schema(first.value) if isinstance(first, ast.Expr) else {}

    def _name(self, name: str) -> Schema:
        if name in self._classes:
            return self._class(self._classes[name])
        if name in self._aliases:
            return self.schema(self._aliases[name])
        plain = next((kind for kind, names in _GROUPS.items() if name in names), name)
        self.has_objects |= plain in ("set", "tuple")
        return dict(_PLAIN.get(plain, {}))

    def _subscript(self, name: str, inside: list[ast.expr], node: ast.Subscript) -> Schema:
        if name in self._aliases or not inside:
            return {}
        if name == "Literal":
            return _enumeration([_literal(each) for each in inside])
        if name == "Optional":
            return self._any_of([inside[0], _NO_MEMBER])
        if name == "Union":
            return self._any_of(inside)
        if name == "Annotated":
            return self._annotated(inside)
        if name in _THROUGH:
            return self.schema(inside[0])
        if name in _DICTS:
            return {"type": "object"} | _only("additionalProperties", self.schema(inside[-1]))
        if name in ("tuple", "Tuple"):
            return self._tuple(inside)
        base = self._name(name)
        return (
            base | _only("items", self.schema(inside[0])) if base.get("type") == "array" else base
        )

    def _tuple(self, inside: list[ast.expr]) -> Schema:
        self.has_objects = True
        if len(inside) == 2 and isinstance(inside[1], ast.Constant) and inside[1].value is ...:
            return {"type": "array"} | _only("items", self.schema(inside[0]))
        parts = [self.schema(each) for each in inside]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _any_of(self, nodes: list[ast.expr]) -> Schema:
        found: list[Schema] = []
        for node in nodes:
            if (schema := self.schema(node)) not in found:
                found.append(schema)
        if {} in found or not found:
            return {}
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _annotated(self, inside: list[ast.expr]) -> Schema:
        said = [_literal(each) for each in inside[1:]]
        text = next((each for each in said if isinstance(each, str)), None)
        return self.schema(inside[0]) | ({"description": text} if text else {})

    # classes of the source

    def _class(self, node: ast.ClassDef) -> Schema:
        bases = {_last_name(base) for base in node.bases}
        self.has_objects = True
        if not bases.isdisjoint(_ENUMS):
            return _enumeration(_members(node))
        if "NamedTuple" in bases:
            return self._tuple([each.annotation for each in _fields(node).values()])
        if "TypedDict" in bases or "dataclass" in map(_decorator, node.decorator_list):
            return self._object(node, is_typed_dict="TypedDict" in bases)
        return {}

    def _object(self, node: ast.ClassDef, *, is_typed_dict: bool) -> Schema:
        if node.name not in self.definitions:
            schema = self.definitions[node.name] = {"type": "object"}  # it may hold itself
            fields = _fields(node)
            schema["properties"] = {
                name: self.schema(each.annotation) for name, each in fields.items()
            }
            needed = _is_required_key if is_typed_dict else _has_no_default
            total = not any(_is_not_total(each) for each in node.keywords)
            schema["required"] = [name for name, each in fields.items() if needed(each, total)]
            schema["additionalProperties"] = False
        return {"$ref": f"#/$defs/{node.name}"}


_GROUPS = {"list": _LISTS, "set": _SETS, "dict": _DICTS, "tuple": ("tuple", "Tuple")}


def with_default(schema: Schema, node: ast.expr) -> Schema:
    """Return the schema of a parameter with its default; `x: int = None` takes null too."""
    default = default_of(node)
    if default == {"default": None} and schema and {"type": "null"} not in schema.get("anyOf", ()):
        schema = {"anyOf": [schema, {"type": "null"}]}
    return schema | default


def default_of(node: ast.expr) -> Schema:
    """Return {"default": value} if the value of a parameter is a small one of JSON, else nothing."""
    try:
        value = ast.literal_eval(node)
        short = len(msgspec.json.encode(value)) <= _MAX_DEFAULT_BYTES
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
        return {}
    return {"default": value} if short and _is_plain(value) else {}


def _is_plain(value: object) -> bool:
    """Tell whether a value is one of JSON: no bytes, no tuples, no sets."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def _is_alias(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name | ast.Attribute)
    )


def _alias(node: Any) -> tuple[str, ast.expr]:
    return node.targets[0].id, node.value


def _either(node: ast.expr) -> list[ast.expr]:
    """Return the parts of `a | b | c`."""
    parts: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        parts.append(node.right)
        node = node.left
    return [node, *reversed(parts)]


def _elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _last_name(node: ast.expr) -> str:
    """Return `Optional` of `Optional` and of `typing.Optional`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _decorator(node: ast.expr) -> str:
    return _last_name(node.func if isinstance(node, ast.Call) else node)


def _fields(node: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    return {
        each.target.id: each
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def _members(node: ast.ClassDef) -> list[Any]:
    return [_literal(each.value) for each in node.body if isinstance(each, ast.Assign)]


def _has_no_default(node: ast.AnnAssign, _: bool) -> bool:
    return node.value is None


def _is_required_key(node: ast.AnnAssign, total: bool) -> bool:
    kind = _last_name(node.annotation.value) if isinstance(node.annotation, ast.Subscript) else ""
    return kind == "Required" or (total and kind != "NotRequired")


def _is_not_total(node: ast.keyword) -> bool:
    return (
        node.arg == "total" and isinstance(node.value, ast.Constant) and node.value.value is False
    )


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        return -value if type(value) in (int, float) else None
    return node.value if isinstance(node, ast.Constant) else None


def _enumeration(values: list[Any]) -> Schema:
    """Return the schema of some values; where not all of them could be read, of anything."""
    plain = bool(values) and all(
        type(each) in (str, int, bool, float, type(None)) for each in values
    )
    return {"enum": values} if plain else {}


def _only(key: str, schema: Schema) -> Schema:
    return {key: schema} if schema else {}
