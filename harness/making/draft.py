"""Drafts of tools: the arguments of `create_tool` become a checked ToolSpec, or an error."""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ...policies.argument_checks import check_names
from ...policies.errors import ToolInvalid
from ...policies.policy import check_limit
from ..schemas.bounds import texts_in
from ..schemas.functions import FunctionSchema, describe_source
from ..schemas.spec import Provenance, ToolSpec, ToolTest, grants_of, hash_of, normalised
from ..schemas.validation import compile_schema
from ..text.hidden import first_hidden

_MAX_DESCRIPTION = 10_000
_MAX_TESTS = 100
_MAX_NAMES = 256
_IN_SOURCE = str.maketrans("", "", "\r\f")  # control characters that source may hold


def draft(
    name: str, description: str, source_code: str, *, input_schema: dict[str, Any] | None,
    permissions: Any, tests: Iterable[Any], timeout: float, calls: Sequence[str],
    requirements: Sequence[str], risky: bool, tags: Sequence[str], provenance: Provenance,
) -> tuple[ToolSpec, FunctionSchema]:  # fmt: skip
    """Return the spec of a tool and the description of its function, without executing its source.

    Raises ToolInvalid or PolicyError, which name the invalid argument.
    """
    name = normalised(name)
    for about in (provenance.maker, provenance.task, provenance.model, provenance.parent):
        _check_visible("provenance", about)
    _check_text("source", source_code)
    _check_hidden("source", source_code.translate(_IN_SOURCE))
    check_limit("timeout", timeout, limit="wall_seconds")
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
        requirements=_requirements(requirements),
        risky=bool(risky),
        tags=_names("tags", tags),
        tests=tests_of(tests),
        provenance=provenance,
    )
    return spec, described


def tests_of(given: Iterable[Any]) -> tuple[ToolTest, ...]:
    """Return tests: text is source that asserts, a pair or mapping is input and expected result."""
    if isinstance(given, str | Mapping):
        given = [given]
    tests = tuple(map(_test, given))
    if len(tests) > _MAX_TESTS:
        raise ToolInvalid(f"tests: must be at most {_MAX_TESTS}, got {len(tests)}")
    return tests


def _test(given: Any) -> ToolTest:
    if isinstance(given, ToolTest):
        return given
    if isinstance(given, str):
        _check_text("tests", given)
        _check_hidden("tests", given.translate(_IN_SOURCE))
        return ToolTest(source=given)
    if isinstance(given, tuple | list) and len(given) == 2:
        given = {"input": given[0], "expected": given[1]}
    try:
        return msgspec.convert(json_of("tests", given), ToolTest)
    except msgspec.ValidationError as error:
        raise ToolInvalid(f"tests: {error}") from None


def json_of(where: str, value: Any) -> Any:
    """Return `value` as JSON decodes it again; raises ToolInvalid if it cannot be encoded."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ToolInvalid(f"{where}: cannot be encoded as JSON: {error}") from None


def _requirements(given: Sequence[str]) -> tuple[str, ...]:
    if not (names := _names("requirements", given)):
        return ()
    from ..sandbox.packages.lock import check_requirements, require_extra  # seldom needed

    require_extra()
    return check_requirements("requirements", names)


def _checked_schema(parameters: dict[str, Any], described: FunctionSchema) -> dict[str, Any]:
    """Return the schema if it describes arguments that this function takes."""
    validator = compile_schema(parameters)
    if validator.unchecked:
        raise ToolInvalid(f"schema: patterns must be valid, got {validator.unchecked}")
    for text in texts_in(parameters):
        _check_visible("schema", text)
    given, taken = parameters.get("properties", {}), described.parameters
    unknown = given.keys() - taken["properties"].keys() if not taken["additionalProperties"] else ()
    missing = [name for name in taken["required"] if name not in given]
    if unknown or missing or parameters.get("type", "object") != "object":
        names = ", ".join(map(ascii, sorted([*unknown, *missing])))
        raise ToolInvalid(
            f"schema: does not match the parameters of {described.function}(): {names or 'type'}"
        )
    return parameters


def _check_text(where: str, text: object) -> None:
    if not isinstance(text, str):
        raise ToolInvalid(f"{where}: must be text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ToolInvalid(f"{where}: has a lone surrogate at character {error.start}") from None


def _check_visible(where: str, text: object) -> None:
    """Refuse long text, and hidden characters, which a model reads and a person does not see."""
    _check_text(where, text)
    assert isinstance(text, str)  # noqa: S101 - checked above
    if len(text) > _MAX_DESCRIPTION:
        raise ToolInvalid(
            f"{where}: must have at most {_MAX_DESCRIPTION} characters, got {len(text)}"
        )
    _check_hidden(where, text)


def _check_hidden(where: str, text: str) -> None:
    """Refuse hidden characters (text/hidden.py)."""
    if character := first_hidden(text):
        raise ToolInvalid(
            f"{where}: has a hidden character, {character!a}",
            "remove it; in the source of a tool, write it as an escape",
        )


def _names(where: str, names: Sequence[str]) -> tuple[str, ...]:
    checked = check_names(where, names)
    if len(checked) > _MAX_NAMES:
        raise ToolInvalid(f"{where}: must be at most {_MAX_NAMES} names, got {len(checked)}")
    for name in checked:
        _check_visible(where, name)
    return checked
