"""Functions described in JSON Schema: functions of the host by inspection, source text by parsing.

Source text is hostile: it is parsed, and never run.

Docstrings, parsed into the description of a function and of each of its parameters.
"""

import ast
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from ...policies.errors import ToolInvalid
from ...policies.source.python_check import TooDeep, parse
from .annotations import Annotations, Schema
from .spec import key_of

_MAX_CHARACTERS = 20_000
_PARAMETERS = ("args", "arguments", "parameters", "params")
_OTHERS = ("returns", "return", "raises", "yields", "example", "examples", "note", "notes")
_FIELD = re.compile(r":(?:param|parameter|arg|argument)(?: [^:]{0,200})? \*{0,2}(\w+): ?(.*)$")
_OTHER_FIELD = re.compile(r":\w+[^:]{0,200}:")
_ENTRY = re.compile(r"\*{0,2}(\w+) ?(?:\([^)]{0,200}\))? ?: ?(.*)$")


class ParsedDocstring(NamedTuple):
    """`text` is everything before the first section; `parameters` maps names to descriptions."""

    text: str
    parameters: dict[str, str]


def read_docstring(docstring: str | None) -> ParsedDocstring:
    """Parse a docstring in the style of Google, NumPy or reStructuredText."""
    lines = inspect.cleandoc((docstring or "")[:_MAX_CHARACTERS]).split("\n")
    text: list[str] = []
    found: dict[str, list[str]] = {}
    for section, underlined, within in _sections(lines):
        if not section:
            text = within
        elif section == "fields":
            _read_fields(within, found)
        elif section in _PARAMETERS:
            _read_entries(within, found, underlined=underlined)
    parameters = {name: " ".join(filter(None, said)) for name, said in found.items()}
    return ParsedDocstring("\n".join(text).strip(), parameters)


def _sections(lines: list[str]) -> Iterator[tuple[str, bool, list[str]]]:
    """Yield sections as (name, whether it is underlined, lines); the text before them has no name."""
    name, underlined, within = "", False, list[str]()
    for number, line in enumerate(lines):
        below = lines[number + 1].strip() if number + 1 < len(lines) else ""
        heading = line.rstrip().removesuffix(":").lower()
        is_underlined = below[:3] == "---" and not below.strip("-")
        if heading in (*_PARAMETERS, *_OTHERS) and (line.rstrip().endswith(":") or is_underlined):
            yield name, underlined, within
            name, underlined, within = heading, is_underlined, []
        elif _OTHER_FIELD.match(line) and name != "fields":
            yield name, underlined, within
            name, underlined, within = "fields", False, [line]
        else:
            within.append(line)
    yield name, underlined, within


def _read_fields(lines: list[str], found: dict[str, list[str]]) -> None:
    said: list[str] = []
    for line in map(str.strip, lines):
        if match := _FIELD.match(line):
            said = found[match[1]] = [match[2]]
        elif _OTHER_FIELD.match(line):
            said = []
        else:
            said.append(line)


def _read_entries(lines: list[str], found: dict[str, list[str]], *, underlined: bool) -> None:
    """Read the entries of a section: a line that is indented like the first one begins an entry."""
    filled = [line for line in lines if line.strip("- ")]
    first = _indent(filled[0]) if filled else 0
    said: list[str] = []
    for line in filled:
        match = _ENTRY.match(line.strip()) if _indent(line) <= first else None
        if match:  # NumPy: the type follows the name, and the text stands on the next lines
            said = found[match[1]] = [] if underlined else [match[2]]
        elif underlined and _indent(line) <= first:
            said = found[line.strip()] = []
        else:
            said.append(line.strip())


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


_MAX_PARAMETERS = 256
_MAX_DEFAULT_BYTES = 1024
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class FunctionSchema(NamedTuple):
    """The name, description and schemas of a function.

    `output` is None if the function does not annotate its result.  `is_async`: the result has to be
    awaited; `is_async_generator`: its items have to be.  `has_objects`: some arguments or results are
    objects that are not JSON themselves.
    """

    function: str
    description: str
    parameters: Schema
    output: Schema | None
    is_async: bool = False
    has_objects: bool = False
    is_async_generator: bool = False


# source text


def describe_source(source: str, tool: str) -> FunctionSchema:
    """Describe the function of `source` that is called `tool`, or its only public function.

    The source is not run.  Raises ToolInvalid if it does not parse, has no such function, or the
    function has positional-only parameters, `*args`, or more than 256 parameters.
    """
    try:
        tree = parse(source)
    except (TooDeep, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolInvalid(f"source: {type(error).__name__}: {error}", tool=tool) from None
    node = _function_in(tree, tool)
    if node.args.posonlyargs or node.args.vararg or len(_named(node.args)) > _MAX_PARAMETERS:
        raise ToolInvalid(
            f"source: {node.name}() must take at most {_MAX_PARAMETERS} parameters, all by name"
        )
    annotations = Annotations(tree)
    said = read_docstring(ast.get_docstring(node))
    parameters = _parameters_of(node.args, annotations, said)
    output = annotations.schema(node.returns) if node.returns else None
    return FunctionSchema(
        node.name, said.text, _with_definitions(parameters, annotations.definitions),
        _with_definitions(output, annotations.definitions) if output else None,
        isinstance(node, ast.AsyncFunctionDef), annotations.has_objects,
        isinstance(node, ast.AsyncFunctionDef) and _yields(node),
    )  # fmt: skip


def _function_in(tree: ast.Module, tool: str) -> _Function:
    functions = [node for node in tree.body if isinstance(node, _Function)]
    named = [node for node in functions if _is_called(node.name, tool)]
    public = {node.name: node for node in functions if not node.name.startswith("_")}
    if named:
        return named[-1]  # a later definition replaces an earlier one
    if len(public) == 1:
        return next(iter(public.values()))
    raise ToolInvalid(
        f"source: must define a function {tool!r} or one public function, got {len(public)}",
        "give the function the tool's name, or begin the names of all others with an underscore",
        tool=tool,
    )


def _yields(function: _Function) -> bool:
    """Tell whether a function is a generator; a `yield` of a function inside it does not count."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield):
            return True
        if not isinstance(node, _Function | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return False


def _is_called(name: str, tool: str) -> bool:
    try:
        return key_of(name) == key_of(tool)
    except ToolInvalid:
        return False


def _named(arguments: ast.arguments) -> list[tuple[ast.arg, ast.expr | None]]:
    missing: list[ast.expr | None] = [None] * (len(arguments.args) - len(arguments.defaults))
    plain = zip(arguments.args, [*missing, *arguments.defaults], strict=True)
    return [*plain, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]


def _parameters_of(
    arguments: ast.arguments, annotations: Annotations, said: ParsedDocstring
) -> Schema:
    properties: dict[str, Schema] = {}
    required = []
    for parameter, default in _named(arguments):
        schema = annotations.schema(parameter.annotation)
        properties[parameter.arg] = _described(
            _with_default(schema, default) if default else schema,
            said.parameters.get(parameter.arg),
        )
        if default is None:
            required.append(parameter.arg)
    more: Schema | bool = False
    if arguments.kwarg:
        more = annotations.schema(arguments.kwarg.annotation) or True
    return _object(properties, required, more)


def _with_default(schema: Schema, node: ast.expr) -> Schema:
    """Return the schema of a parameter with its default; `x: int = None` also allows null."""
    default = _default_of(node)
    if default == {"default": None} and schema and {"type": "null"} not in schema.get("anyOf", ()):
        schema = {"anyOf": [schema, {"type": "null"}]}
    return schema | default


def _default_of(node: ast.expr) -> Schema:
    """Return {"default": value} if a parameter's default is JSON and short, else {}."""
    try:
        value = ast.literal_eval(node)
        short = len(msgspec.json.encode(value)) <= _MAX_DEFAULT_BYTES
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
        return {}
    return {"default": value} if short and _is_plain(value) else {}


def _is_plain(value: object) -> bool:
    """Tell whether a value is JSON: no bytes, tuples or sets."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


# functions of the host


def describe_function(function: Callable[..., Any], *, filled_in: type) -> FunctionSchema:
    """Describe a function of the host.

    Annotations may be any type that msgspec supports; others allow anything.  A parameter annotated
    `filled_in` is left out.  Raises ToolInvalid if `function` is not a function, or has parameters
    that callers cannot pass by name.
    """
    if not callable(function) or not hasattr(function, "__name__"):
        raise ToolInvalid(f"function: must be a named callable, got {function!r}")
    hints = hints_of(function)
    said = read_docstring(inspect.getdoc(function))
    properties: dict[str, Schema] = {}
    required, definitions = [], dict[str, Schema]()
    more: Schema | bool = False
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, Any)
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise ToolInvalid(
                f"{function.__name__}(): the parameter {name} must be one that callers pass by name"
            )
        if hint is filled_in:
            continue
        schema = _schema_of_hint(hint, definitions)
        if parameter.kind is parameter.VAR_KEYWORD:
            more = schema or True
            continue
        if parameter.default is parameter.empty:
            required.append(name)
        schema |= _default(parameter)
        properties[name] = _described(schema, said.parameters.get(name))
    parameters = _with_definitions(_object(properties, required, more), definitions)
    return FunctionSchema(
        function.__name__, said.text, parameters, _output_of_hint(hints),
        inspect.iscoroutinefunction(function),
    )  # fmt: skip


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the evaluated annotations of a function; {} if one of them cannot be evaluated."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return {}


def _schema_of_hint(hint: Any, definitions: dict[str, Schema]) -> Schema:
    try:
        (schema,), found = msgspec.json.schema_components([hint], ref_template="#/$defs/{name}")
    except (TypeError, NotImplementedError):
        return {}
    definitions |= found
    text = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, str)]
    return _described(dict(schema), text[0] if text else None)


def _output_of_hint(hints: dict[str, Any]) -> Schema | None:
    if "return" not in hints:
        return None
    definitions: dict[str, Schema] = {}
    schema = _schema_of_hint(hints["return"], definitions)
    return _with_definitions(schema, definitions) if schema else None


def _default(parameter: inspect.Parameter) -> Schema:
    if parameter.default is parameter.empty:
        return {}
    try:
        return {"default": msgspec.to_builtins(parameter.default)}
    except (TypeError, ValueError):
        return {}


# schemas


def _object(properties: dict[str, Schema], required: list[str], more: Schema | bool) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": more,
    }


def _described(schema: Schema, text: str | None) -> Schema:
    return {**schema, "description": text} if text and "description" not in schema else schema


def _with_definitions(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    return {**schema, "$defs": definitions} if definitions else schema
