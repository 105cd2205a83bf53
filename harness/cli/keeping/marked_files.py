"""Files of tools (`--tools FILE`): Python that runs on the host and marks functions with `@tool`."""

import runpy

from ....policies.errors import PolicyError
from ...tools.registry import ToolRegistry
from ...tools.tool import is_marked


def register_marked(registry: ToolRegistry, file: str) -> None:
    """Run `file` and register the functions that it marks; raises PolicyError if there are none, or
    if the file fails."""
    try:
        names = runpy.run_path(file, run_name="cellwright_tools")
    except Exception as error:
        raise PolicyError(f"--tools {file}: {type(error).__name__}: {error}") from error
    marked = [each for each in names.values() if is_marked(each)]
    if not marked:
        hint = "write @tool above a function"
        raise PolicyError(f"--tools {file}: no function is marked @tool", hint)
    for function in marked:
        registry.register(function)
