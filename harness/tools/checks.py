"""Checks of arguments and results against the schemas of a ToolSpec."""

from ...policies.errors import ToolArgumentsInvalid, ToolResultInvalid
from ..schemas.spec import ToolSpec
from ..schemas.validation import compile_schema


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
