"""Names of what this user keeps, for the completion of a shell."""

import re
from collections.abc import Iterable

from ...policies.errors import CellwrightError

_PLAIN = re.compile(r"[\w.@-]{1,200}", re.ASCII)  # a shell must not read anything else into a name


def names_of(kind: str) -> list[str]:
    """Return the names of `kind`, one of completion.NAMES; none if the store cannot be read."""
    try:
        return sorted({name for name in _NAMES[kind]() if _PLAIN.fullmatch(name)})
    except (CellwrightError, OSError, ImportError):
        return []


def _workspaces() -> Iterable[str]:
    from ..sandbox.workspaces.store import Workspaces

    return Workspaces().list()


def _sets() -> Iterable[str]:
    from ..sandbox.packages.store import PackageStore

    return [each.id[:12] for each in PackageStore().list()]


def _skills() -> Iterable[str]:
    from ..skills.skills import Skills

    return [each.name for each in Skills().found()]


def _tools() -> Iterable[str]:
    from ..tools.registry import ToolRegistry
    from .tools import default_registry

    with ToolRegistry(default_registry()) as registry:
        return [each.name for each in registry.list_tools()]


_NAMES = {"sets": _sets, "skills": _skills, "tools": _tools, "workspaces": _workspaces}
