"""Annotations in source text, converted to JSON Schema.  The source is hostile: it is parsed, and never
run.

Declarations of classes in source text, read off the syntax tree.  The source is hostile and never
run.
"""

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


_MAX_DEPTH = 24
_MAX_PARTS = 2000  # parts of all annotations, because aliases of aliases can double with every line
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
    "Path": {"type": "string"},
    # Types as msgspec names them.
    "bytes": {"type": "string", "contentEncoding": "base64"},
    "bytearray": {"type": "string", "contentEncoding": "base64"},
    "datetime": {"type": "string", "format": "date-time"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "timedelta": {"type": "string", "format": "duration"},
    "Decimal": {"type": "string", "format": "decimal"},
    "UUID": {"type": "string", "format": "uuid"},
}
_MADE = frozenset(
    "set tuple bytes bytearray datetime date time timedelta Decimal UUID".split()  # noqa: SIM905
)  # types that the cell converts from JSON
_LISTS = (
    "list",
    "List",
    "Sequence",
    "MutableSequence",
    "Iterable",
    "Iterator",
    "Generator",
    "AsyncIterable",
    "AsyncIterator",
    "AsyncGenerator",
    "Collection",
    "deque",
)
_SETS = ("set", "frozenset", "Set", "FrozenSet", "AbstractSet", "MutableSet")
_DICTS = ("dict", "Dict", "Mapping", "MutableMapping", "OrderedDict", "defaultdict", "DefaultDict")
_THROUGH = ("Final", "Required", "NotRequired", "ReadOnly", "ClassVar", "Awaitable")
_NO_MEMBER = ast.Constant(value=None)


class Annotations:
    """The annotations of one source, with its classes and aliases resolved.

    `definitions` has the schema of each class that an annotation names.  `has_objects` tells whether an
    annotation names a class, a set or a tuple: the cell converts their values from JSON and back.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self._aliases = dict(map(_alias, filter(_is_alias, tree.body)))
        self._depth = 0
        self._parts = 0
        self.definitions: dict[str, Schema] = {}
        self.has_objects = False

    def schema(self, node: ast.expr | None) -> Schema:
        """Return the schema of an annotation; `{}`, which allows anything, for an unknown one."""
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
            return self._subscript(last_name(node.value), _elements(node.slice), node)
        return self._name(last_name(node))

    def _quoted(self, value: object) -> Schema:
        if value is None:
            return dict(_PLAIN["None"])
        if not isinstance(value, str):
            return {}
        from ...policies.source.python_check import TooDeep, parse

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
        self.has_objects |= plain in _MADE
        return dict(_PLAIN.get(plain, {}))

    def _subscript(self, name: str, inside: list[ast.expr], node: ast.Subscript) -> Schema:
        if name in self._aliases or not inside:
            return {}
        if name == "Literal":
            return _enumeration([literal(each) for each in inside])
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
        said = [literal(each) for each in inside[1:]]
        text = next((each for each in said if isinstance(each, str)), None)
        return self.schema(inside[0]) | ({"description": text} if text else {})

    # classes of the source

    def _class(self, node: ast.ClassDef) -> Schema:
        declaration = declared(node)
        self.has_objects = True
        if declaration.kind == "enumeration":
            return _enumeration(declaration.members)
        if declaration.kind == "tuple":
            return self._tuple([*declaration.fields.values()])
        return self._object(node.name, declaration) if declaration.kind == "object" else {}

    def _object(self, name: str, declaration: Declaration) -> Schema:
        if name not in self.definitions:
            schema = self.definitions[name] = {
                "type": "object"
            }  # before the fields, because a field may have the class itself as its type
            fields = declaration.fields.items()
            schema["properties"] = {field: self.schema(node) for field, node in fields}
            schema["required"] = declaration.required
            schema["additionalProperties"] = False
        return {"$ref": f"#/$defs/{name}"}


_GROUPS = {"list": _LISTS, "set": _SETS, "dict": _DICTS, "tuple": ("tuple", "Tuple")}


def _is_alias(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name | ast.Attribute)
    )


def _alias(node: Any) -> tuple[str, ast.expr]:
    return node.targets[0].id, node.value


def _either(node: ast.expr) -> list[ast.expr]:
    parts: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        parts.append(node.right)
        node = node.left
    return [node, *reversed(parts)]


def _elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _enumeration(values: list[Any]) -> Schema:
    """Return the schema of an enumeration; `{}` if not all values are plain constants."""
    plain = bool(values) and all(
        type(each) in (str, int, bool, float, type(None)) for each in values
    )
    return {"enum": values} if plain else {}


def _only(key: str, schema: Schema) -> Schema:
    return {key: schema} if schema else {}
