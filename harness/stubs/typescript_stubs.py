"""TypeScript declarations and JavaScript modules, from the same types as Python's stubs.

The text is assembled from three things only: fixed words, ASCII identifiers, and strings and numbers as
JSON. The text in a comment cannot end it.
"""

import json
from collections.abc import Container, Iterable

from . import stub_types

_WORDS = {
    "any": "any", "none": "null", "bool": "boolean", "int": "number", "float": "number",
    "str": "string",
}  # fmt: skip
# Reserved words of JavaScript in addition to Python's; `index` is the file of a folder.
_RESERVED = frozenset({
    "arguments", "case", "catch", "const", "debugger", "default", "delete", "do", "enum", "eval",
    "export", "extends", "false", "function", "implements", "instanceof", "interface", "let", "new",
    "null", "package", "private", "protected", "public", "static", "super", "switch", "this", "throw",
    "true", "typeof", "var", "void", "index",
})  # fmt: skip


def function_name(word: str, taken: Container[str] = ()) -> str:
    """Return a name for a function, and for the file that it stands in: none is a folder's `index`."""
    return stub_types.ascii_identifier(word if word not in _RESERVED else f"{word}_", taken)


def declaration(described: stub_types.ToolSignature, name: str) -> str:
    """Return the `.d.ts` of a tool."""
    parts = [_definition(name, each) for name, each in described.definitions.items()]
    more = "  [key: string]: any;\n" if described.more else ""
    parts.append(f"export interface Arguments {{\n{_fields(described.parameters)}{more}}}\n")
    optional = "" if any(field.required for field in described.parameters) else "?"
    head = f"{name}(args{optional}: Arguments): {written(described.result)}"
    parts.append(f"{comment(described.description)}export declare function {head};\n")
    return "\n".join(parts)


def module(described: stub_types.ToolSignature, name: str) -> str:
    """Return the `.mjs` of a tool; its arguments go as they are, under their wire names."""
    call = f"globalThis.callTool({quoted(described.name)}, args)"
    return f"export const {name} = (args = {{}}) => {call};\n"


def index(names: Iterable[tuple[str, bool]]) -> str:
    """Return a module, and its declaration, that has all of a folder's."""
    return "".join(
        f'export {{ {name} }} from "./{name}.mjs";\n'
        if is_tool
        else f'export * as {name} from "./{name}/index.mjs";\n'
        for name, is_tool in names
    )


def signature(described: stub_types.ToolSignature, name: str) -> str:
    """Return how a tool is called, in one line."""
    fields = [
        f"{_key(field)}{'' if field.required else '?'}: {written(field.type)}"
        for field in described.parameters
    ]
    return f"{name}({{ {', '.join(fields)} }}): {written(described.result)}"


def _definition(name: str, each: stub_types.Record | stub_types.Type) -> str:
    if isinstance(each, stub_types.Record):
        return f"{comment(each.description)}export interface {name} {{\n{_fields(each.fields)}}}\n"
    return f"export type {name} = {written(each)};\n"


def _fields(fields: Iterable[stub_types.Property]) -> str:
    return "".join(map(_field, fields))


def _field(field: stub_types.Property) -> str:
    default = f"Default: {field.default}" if field.default else ""
    said = comment(" ".join(filter(None, (field.description, default))), "  ")
    optional = "" if field.required else "?"
    return f"{said}  {_key(field)}{optional}: {written(field.type)};\n"


def _key(field: stub_types.Property) -> str:
    return (
        field.wire if stub_types.ascii_identifier(field.wire) == field.wire else quoted(field.wire)
    )


def written(type: stub_types.Type) -> str:
    """Return a type in TypeScript's words."""
    if isinstance(type, stub_types.Plain):
        return _WORDS[type.word]
    if isinstance(type, stub_types.Literals):
        return " | ".join(map(quoted, type.values))
    if isinstance(type, stub_types.ListOf):
        return f"Array<{written(type.item)}>"
    if isinstance(type, stub_types.TupleOf):
        items = [f"({written(each)})?" for each in type.items]  # there may be fewer
        rest = [f"...Array<{written(type.rest)}>"] if type.rest else []
        return f"[{', '.join([*items, *rest])}]"
    if isinstance(type, stub_types.MapOf):
        return f"{{ [key: string]: {written(type.value)} }}"
    if isinstance(type, stub_types.UnionOf):
        return " | ".join(map(written, type.members))
    return type.name


def quoted(value: stub_types.Scalar) -> str:
    return json.dumps(value)


def comment(text: str, indent: str = "") -> str:
    """Return a text as a comment of its own lines; nothing in it ends it."""
    if not text:
        return ""
    lines = text.replace("*/", "*\\/").split("\n")
    if len(lines) == 1:
        return f"{indent}/** {lines[0]} */\n"
    inside = "".join(f"{indent} * {line}".rstrip() + "\n" for line in lines)
    return f"{indent}/**\n{inside}{indent} */\n"
