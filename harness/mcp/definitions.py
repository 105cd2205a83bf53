"""A server's definitions of its tools: bounded, with hidden characters removed from descriptions.  A
tool with hidden characters in its name or in a value that its schema asks for is left out.

Definitions are untrusted.  Annotations are hints: `readOnlyHint` never removes the need for approval;
`destructiveHint` adds it unless the server is trusted.

`Pins`: the definitions of every server's tools at its first use.

The first use is trusted.  After that a tool that is new or has changed is not offered until a person
has seen the difference and pinned it again.  The same file lists a server's tools without starting it.
"""

import contextlib
import difflib
import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...policies.errors import RegistryError, ToolInvalid
from ...runner.concurrency import Budget
from ..schemas import bounds
from ..schemas.spec import Provenance, ToolOwner, ToolSpec, ToolState
from ..schemas.validation import COMPILE_STEPS, compile_schema
from ..text.hidden import first_hidden, visible
from ..user_data import locked, replace_file, state_directory
from .server_config import ServerConfig

MAX_DEFINITION_BYTES = 2 * bounds.MAX_SCHEMA_BYTES + 128 * 1024
_TOLD_CHARACTERS = 60
_LONGEST_NAME = 128  # MCP's limit
_PINNED = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")
_COMMENTS = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_EXAMPLES = ("default", "examples")
_SAID = ("description", "title", "$comment")
# FastMCP wraps a value that is no object in an object with this one property, and marks the output
# schema with this key (fastmcp/tools/tool.py, from 2.10 on).
_WRAPS = "x-fastmcp-wrap-result"
_WRAPPED = "result"
_UNWRAPPED = "x-cellwright-unwrapped"  # our mark in the schema of the wrapped value
_READ_CHARACTERS = 64 * 1024  # characters of a text read before it is cut for display


class Definition(msgspec.Struct, frozen=True):
    """A tool as its server defines it: `wire` is the server's own name, `said` the pinned fields."""

    wire: str
    said: dict[str, Any]

    @property
    def digest(self) -> str:
        """Return the hash of name, title, description, schemas and annotations."""
        text = msgspec.json.encode(self.said, order="deterministic")
        return hashlib.sha256(text).hexdigest()


def definition_of(said: object) -> Definition:
    """Return a definition that can be a tool; raises ToolInvalid with the reason otherwise.

    It has a bounded size, a name, and schemas that refer only to themselves; whether the schemas are
    valid is checked when it is first pinned (`check`).
    """
    if not isinstance(said, dict) or not bounds.size_of(said):
        raise ToolInvalid("not an object, or nested too deeply")
    kept = {key: said[key] for key in _PINNED if said.get(key) is not None}
    try:
        size = len(msgspec.json.encode(kept))
    except (TypeError, ValueError, OverflowError) as error:
        raise ToolInvalid(f"not JSON: {error}") from None
    if size > MAX_DEFINITION_BYTES:
        raise ToolInvalid(f"{size} bytes, more than {MAX_DEFINITION_BYTES}")
    _check_parts(kept)
    return Definition(kept["name"], kept)


def _check_parts(said: dict[str, Any]) -> None:
    name = said.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise ToolInvalid(f"name: must be text of 1 to {_LONGEST_NAME} characters")
    if first_hidden(name):
        raise ToolInvalid("name: contains hidden characters")
    for key in ("title", "description"):
        if not isinstance(said.get(key, ""), str):
            raise ToolInvalid(f"{key}: must be text")
    if not isinstance(said.get("annotations", {}), dict):
        raise ToolInvalid("annotations: must be an object")
    for key in ("inputSchema", "outputSchema"):
        if key in said or key == "inputSchema":
            _check_schema(said.get(key), key)


def _check_schema(schema: Any, key: str) -> None:
    try:
        bounds.check_shape(schema)
        bounds.check_words(schema)
    except ToolInvalid as error:
        raise ToolInvalid(f"{key}: {error.what}") from None
    if key == "inputSchema" and schema.get("type", "object") != "object":
        raise ToolInvalid("inputSchema: its type must be object")
    for text in bounds.texts_in(clean_schema(schema)):
        if hidden := first_hidden(text):
            raise ToolInvalid(f"{key}: hidden character {hidden!a} in {text[:_TOLD_CHARACTERS]!a}")


def check(definition: Definition, budget: Budget) -> None:
    """Raise ToolInvalid unless its schemas are valid and compile within the rest of the budget (some
    milliseconds each, once)."""
    for schema in (definition.said["inputSchema"], _output_of(definition) or {}):
        compile_schema(schema, budget.part("compiling the schema", COMPILE_STEPS))


def spec_of(definition: Definition, name: str, config: ServerConfig) -> ToolSpec:
    """Return the spec of the tool called `name`; its `function` is the server's own name."""
    said = definition.said
    output = _output_of(definition)
    return ToolSpec(
        name=name,
        description=shown(said.get("description") or said.get("title") or ""),
        parameters=clean_schema({"type": "object", **said["inputSchema"]}),
        output_schema=clean_schema(output) if output else None,
        source_hash=definition.digest,
        state=ToolState.TRUSTED if config.trusted else ToolState.DRAFT,
        owner=ToolOwner.SERVER,
        server=config.name,
        function=definition.wire,
        timeout=config.timeout,
        risky=_is_risky(definition, config),
        provenance=Provenance(maker=f"mcp:{config.name}"),
    )


def _output_of(definition: Definition) -> dict[str, Any] | None:
    """Return the output schema; for a wrapped result, the schema of the value inside."""
    schema: dict[str, Any] = definition.said.get("outputSchema") or {}
    properties = schema.get("properties")
    if schema.get(_WRAPS) is not True or not isinstance(properties, dict):
        return schema or None
    inside = properties.get(_WRAPPED)
    if len(properties) > 1 or not isinstance(inside, dict):
        return schema
    beside = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
    alone = {**inside, **beside, _UNWRAPPED: True}
    try:
        bounds.check_words(alone)
    except ToolInvalid:  # the schema refers to the surrounding object
        return schema
    return alone


def unwrapped(value: Any, schema: Mapping[str, Any] | None) -> Any:
    """Return the value inside a wrapped result if `schema` (the spec's) describes that, else
    `value`."""
    holds = schema is not None and schema.get(_UNWRAPPED) is True
    if holds and isinstance(value, dict) and value.keys() == {_WRAPPED}:
        return value[_WRAPPED]
    return value


def _is_risky(definition: Definition, config: ServerConfig) -> bool:
    """Tell whether calls need approval: the user's configuration first, then the server's
    annotation."""
    if _matches(definition.wire, config.risky):
        return True
    if config.trusted or _matches(definition.wire, config.approved):
        return False
    return definition.said.get("annotations", {}).get("destructiveHint") is True


def _matches(wire: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(wire, glob) for glob in globs)


def shown(text: str) -> str:
    """Return a server's text for display: without HTML comments and hidden or reordering characters."""
    read = text[:_READ_CHARACTERS]
    return visible(_COMMENTS.sub("", visible(read, len(read))))


def clean_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with clean descriptions and without examples that have hidden characters; its
    constraints on values are unchanged."""
    cleaned: dict[str, Any] = bounds.rewritten(dict(schema), _clean)
    return cleaned


def _clean(part: dict[str, Any]) -> dict[str, Any]:
    return {
        key: shown(value) if key in _SAID and isinstance(value, str) else value
        for key, value in part.items()
        if key not in _EXAMPLES or not any(map(first_hidden, bounds.texts_in(value)))
    }


_MAX_BYTES = 64 * 1024 * 1024
_MAX_OF_ONE = 16 * 1024 * 1024  # bytes of one server's pins as JSON
_MOST_LINES = 400
Definitions = Mapping[str, Definition]


class _Pinned(msgspec.Struct, forbid_unknown_fields=True):
    version: int = 1
    servers: dict[str, list[dict[str, object]]] = {}


class Drift(NamedTuple):
    """How a server's tools differ from their pins, by the server's own names."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = (f"{word}: {', '.join(map(ascii, names))}" for word, names in
                 zip(self._fields, self, strict=True) if names)  # fmt: skip
        return "; ".join(parts)


class Pins:
    """A file of definitions by server and its address; several processes may share it."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path) if path else state_directory() / "servers.json"

    def of(self, config: ServerConfig) -> dict[str, Definition] | None:
        """Return the pins of a server, None if it has none.  Raises RegistryError.

        A pinned definition that later versions of the checks refuse is left out; the server's own is
        then left out too.
        """
        said = self._read().servers.get(_key(config))
        if said is None:
            return None
        pinned: dict[str, Definition] = {}
        for each in said:
            with contextlib.suppress(ToolInvalid):
                definition = definition_of(each)
                pinned[definition.wire] = definition
        return pinned

    def pin(self, config: ServerConfig, definitions: Iterable[Definition]) -> None:
        """Replace a server's pins; raises RegistryError."""
        with self._locked():
            pinned = self._read()
            said = [each.said for each in definitions]
            _check_size(f"the tools of {config.name}", msgspec.json.encode(said), _MAX_OF_ONE)
            pinned.servers[_key(config)] = said
            data = msgspec.json.format(msgspec.json.encode(pinned, order="sorted"), indent=1)
            _check_size(f"{self.path} with the tools of {config.name}", data, _MAX_BYTES)
            self._write(data)

    def forget(self, config: ServerConfig) -> bool:
        """Remove a server's pins; tell whether it had any."""
        with self._locked():
            pinned = self._read()
            known = pinned.servers.pop(_key(config), None)
            self._write(msgspec.json.encode(pinned, order="sorted"))
        return known is not None

    def _read(self) -> _Pinned:
        try:
            with open(self.path, "rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            return _Pinned()
        except OSError as error:
            raise RegistryError(f"cannot read {self.path}: {error.strerror}") from None
        try:
            if len(data) > _MAX_BYTES:
                raise ValueError(f"larger than {_MAX_BYTES} bytes")
            return msgspec.json.decode(data, type=_Pinned)
        except (ValueError, msgspec.DecodeError) as error:
            raise self._unreadable(str(error)) from None

    def _unreadable(self, why: str) -> RegistryError:
        hint = "inspect the file; if you delete it, every server is pinned anew at its next use"
        return RegistryError(f"{self.path} is not a valid file of pins: {why}", hint)

    def _write(self, data: bytes) -> None:
        """Replace the file atomically, or leave it unchanged."""
        try:
            replace_file(self.path, data)
        except OSError as error:
            raise RegistryError(f"cannot write {self.path}: {error.strerror}") from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RegistryError(f"cannot write {self.path}: {error.strerror}") from None
        with locked(self.path.with_name(f"{self.path.name}.lock"), RegistryError):
            yield


def _check_size(what: str, data: bytes, most: int) -> None:
    """Raise RegistryError for a file too large to be read again: no server could be used then."""
    if len(data) > most:
        raise RegistryError(f"{what}: {len(data)} bytes, more than {most}")


def _key(config: ServerConfig) -> str:
    """Return a server's key: a changed command or address makes it another server."""
    where = json.dumps([config.command, *config.args, config.url.partition("?")[0]])
    return f"{config.name} {hashlib.sha256(where.encode()).hexdigest()[:16]}"


def drift_of(pinned: Definitions, now: Definitions) -> Drift:
    """Return how `now` differs from `pinned`."""
    both = pinned.keys() & now.keys()
    return Drift(
        tuple(sorted(now.keys() - pinned.keys())),
        tuple(sorted(wire for wire in both if pinned[wire].digest != now[wire].digest)),
        tuple(sorted(pinned.keys() - now.keys())),
    )


def difference(pinned: Definitions, now: Definitions) -> str:
    """Return a unified diff for a person, in ASCII, which makes hidden characters visible."""
    lines: list[str] = []
    for wire in sorted({*pinned, *now}):
        old, new = _lines(pinned.get(wire)), _lines(now.get(wire))
        names = (f"pinned/{ascii(wire)[1:-1]}", f"now/{ascii(wire)[1:-1]}")
        lines += difflib.unified_diff(old, new, *names, lineterm="")
    if len(lines) > _MOST_LINES:
        lines = [*lines[:_MOST_LINES], f"... and {len(lines) - _MOST_LINES} lines more"]
    return "".join(f"{line}\n" for line in lines)


def _lines(definition: Definition | None) -> list[str]:
    if definition is None:
        return []
    return json.dumps(definition.said, indent=2, sort_keys=True, ensure_ascii=True).split("\n")
