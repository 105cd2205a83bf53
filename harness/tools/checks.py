"""Checks of arguments and results against the schemas of a ToolSpec."""

from ...policies.errors import ToolArgumentsInvalid, ToolResultInvalid
from ..schemas.spec import ToolSpec
from ..schemas.validation import compile_schema


def check_arguments(spec: ToolSpec, arguments: object) -> None:
    """Raise ToolArgumentsInvalid unless the arguments match the tool's `parameters`."""
    validator = compile_schema(spec.parameters)
    if validator.is_certainly_valid(arguments):
        return
    if complaints := validator.complaints(arguments):
        raise ToolArgumentsInvalid("; ".join(complaints), tool=spec.name)


def check_result(spec: ToolSpec, value: object) -> None:
    """Raise ToolResultInvalid unless the result matches the tool's `output_schema`, if it has one."""
    if spec.output_schema is None:
        return
    validator = compile_schema(spec.output_schema)
    if validator.is_certainly_valid(value):
        return
    if complaints := validator.complaints(value):
        raise ToolResultInvalid(f"{spec.name}: {'; '.join(complaints)}", tool=spec.name)
