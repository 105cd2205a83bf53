"""From what the maker of a tool says to a spec that is checked, or to why it cannot be a tool."""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ...policies.errors import ToolInvalid
from ...policies.policy import check_limit, check_names
from ..schemas.bounds import texts_in
from ..schemas.functions import FunctionSchema, describe_source
from ..schemas.spec import Provenance, ToolSpec, ToolTest, grants_of, hash_of
from ..schemas.tool_names import normalised
from ..schemas.validation import compile_schema
from ..text.hidden import first_hidden

_MAX_DESCRIPTION = 10_000
_MAX_TESTS = 100
_MAX_NAMES = 256
_IN_SOURCE = str.maketrans("", "", "\r\f")  # ends of lines and of pages


def draft(
    name: str, description: str, source_code: str, *, input_schema: dict[str, Any] | None,
    permissions: Any, tests: Iterable[Any], timeout: float, calls: Sequence[str], risky: bool,
    tags: Sequence[str], provenance: Provenance,
) -> tuple[ToolSpec, FunctionSchema]:  # fmt: skip
    """Return the spec of a tool that nothing has run of yet, and what its source says.

    Raises ToolInvalid and PolicyError naming what makes no sense.
    """
    name = normalised(name)
    for about in msgspec.structs.astuple(provenance):
        _check_visible("provenance", about)
    _check_text("source", source_code)
    _check_seen("source", source_code.translate(_IN_SOURCE))
    check_limit("timeout.wall_seconds", timeout)
    described = describe_source(source_code, name)
    description = description or described.description
    _check_visible("description", description)
    parameters = described.parameters if input_schema is None else input_schema
    spec = ToolSpec(
        name=name,
        description=description,
        source_code=source_code,
        parameters=_checked_schema(parameters, described),
        output_schema=described.output,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        source_hash=hash_of(source_code),
        function=described.function,
        grants=grants_of(permissions),
        timeout=float(timeout),
        calls=tuple(normalised(each) for each in _names("calls", calls)),
        risky=bool(risky),
        tags=_names("tags", tags),
        tests=tests_of(tests),
        provenance=provenance,
    )
    return spec, described


def tests_of(given: Iterable[Any]) -> tuple[ToolTest, ...]:
    """Return tests: a text asserts; a pair, or a mapping, is an input and what is expected of it."""
    if isinstance(given, str | Mapping):
        given = [given]
    tests = tuple(map(_test, given))
    if len(tests) > _MAX_TESTS:
        raise ToolInvalid(f"tests: more than {_MAX_TESTS}")
    return tests


def _test(given: Any) -> ToolTest:
    if isinstance(given, ToolTest):
        return given
    if isinstance(given, str):
        _check_text("tests", given)
        _check_seen("tests", given.translate(_IN_SOURCE))
        return ToolTest(source=given)
    if isinstance(given, tuple | list) and len(given) == 2:
        given = {"input": given[0], "expected": given[1]}
    try:
        return msgspec.convert(json_of("tests", given), ToolTest)
    except msgspec.ValidationError as error:
        raise ToolInvalid(f"tests: {error}") from None


def json_of(where: str, value: Any) -> Any:
    """Return `value` as JSON would give it back; raises ToolInvalid for what is none."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ToolInvalid(f"{where}: not JSON: {error}") from None


def _checked_schema(parameters: dict[str, Any], described: FunctionSchema) -> dict[str, Any]:
    """Return the schema if it can be one of this function's arguments."""
    validator = compile_schema(parameters)
    if validator.unchecked:
        raise ToolInvalid(f"schema: patterns that would need backtracking: {validator.unchecked}")
    for text in texts_in(parameters):
        _check_visible("schema", text)
    given, taken = parameters.get("properties", {}), described.parameters
    unknown = given.keys() - taken["properties"].keys() if not taken["additionalProperties"] else ()
    missing = [name for name in taken["required"] if name not in given]
    if unknown or missing or parameters.get("type", "object") != "object":
        names = ", ".join(map(ascii, sorted([*unknown, *missing])))
        raise ToolInvalid(f"schema: {described.function}() and it do not agree: {names or 'type'}")
    return parameters


def _check_text(where: str, text: object) -> None:
    if not isinstance(text, str):
        raise ToolInvalid(f"{where}: must be text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ToolInvalid(f"{where}: a lone surrogate at character {error.start}") from None


def _check_visible(where: str, text: object) -> None:
    """Refuse what a person would not see: a model reads it all the same."""
    _check_text(where, text)
    assert isinstance(text, str)  # noqa: S101 - checked above
    if len(text) > _MAX_DESCRIPTION:
        raise ToolInvalid(f"{where}: more than {_MAX_DESCRIPTION} characters")
    _check_seen(where, text)


def _check_seen(where: str, text: str) -> None:
    """Refuse hidden characters (hidden.py)."""
    if character := first_hidden(text):
        raise ToolInvalid(
            f"{where}: holds {character!a}, which nobody sees",
            "remove it; in the source of a tool, write it as an escape",
        )


def _names(where: str, names: Sequence[str]) -> tuple[str, ...]:
    checked = check_names(where, names)
    if len(checked) > _MAX_NAMES:
        raise ToolInvalid(f"{where}: more than {_MAX_NAMES}")
    for name in checked:
        _check_visible(where, name)
    return checked
