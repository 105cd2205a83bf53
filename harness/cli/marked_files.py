"""Files of tools: a developer's Python, run on the host, whose functions marked `@tool` are offered."""

import runpy

from ...policies.errors import PolicyError
from ..tools.decorator import is_marked
from ..tools.registry import ToolRegistry


def register_marked(registry: ToolRegistry, file: str) -> None:
    """Run `file` and register its functions that are marked as tools; raises PolicyError for a file
    that fails or marks none."""
    try:
        names = runpy.run_path(file, run_name="cellwright_tools")
    except Exception as error:
        raise PolicyError(f"--tools {file}: {type(error).__name__}: {error}") from error
    marked = [each for each in names.values() if is_marked(each)]
    if not marked:
        raise PolicyError(f"--tools {file}: no function in it is marked @tool")
    for function in marked:
        registry.register(function)
