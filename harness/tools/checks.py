"""Checks of arguments and results against the schemas of a ToolSpec."""

from collections.abc import Callable
from typing import Any

from ...policies.errors import ToolArgumentsInvalid, ToolInvalid, ToolResultInvalid
from ..schemas.spec import ToolSpec
from ..schemas.validation import compile_schema


def quick_check_of(schema: dict[str, Any] | None) -> Callable[[object], bool]:
    """Return a check that is True only for values that `schema` allows; None allows all.

    About other values, and all of an invalid schema, the functions below decide.
    """
    if schema is None:
        return lambda value: True
    try:
        return compile_schema(schema).is_certainly_valid
    except ToolInvalid:
        return lambda value: False


def check_arguments(spec: ToolSpec, arguments: object) -> None:
    """Raise ToolArgumentsInvalid unless the arguments match the tool's `parameters`."""
    if complaints := compile_schema(spec.parameters).complaints(arguments):
        raise ToolArgumentsInvalid("; ".join(complaints), tool=spec.name)


def check_result(spec: ToolSpec, value: object) -> None:
    """Raise ToolResultInvalid unless the result matches the tool's `output_schema`, if it has one."""
    if spec.output_schema is None:
        return
    if complaints := compile_schema(spec.output_schema).complaints(value):
        raise ToolResultInvalid(f"{spec.name}: {'; '.join(complaints)}", tool=spec.name)
