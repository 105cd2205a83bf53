"""Modules of ours whose functions run in the cell of a Python session.

Their text is executed in the cell, as part of the session's program: it imports nothing of ours, and
the program could change all of it.  So the host believes none of what it tells but its type.
"""

from pathlib import Path
from typing import Any

import msgspec

from ...policies.errors import PolicyError, SessionLost
from ...runner.result import SandboxResult, SandboxStatus

# An expression, so that no name stays in the session: the module is kept where no program looks.
_LOADED = (
    "(__import__('sys').modules.get({name!r}) or (lambda module: (exec({text!r}, module.__dict__), "
    "__import__('sys').modules.setdefault({name!r}, module))[1])"
    "(__import__('types').ModuleType({name!r})))"
)  # fmt: skip


def code_calling(module: Path, function: str, *arguments: object) -> str:
    """Return the code that calls a function of the module in this file, which the cell loads once."""
    loaded = _LOADED.format(name=f"_cellwright_{module.stem}", text=module.read_text())
    return f"{loaded}.{function}(*{arguments!r})"


def value_told(kind: Any, result: SandboxResult, what: str) -> Any:
    """Return what such a function gave, as a `kind`; `what` names the work in error messages.

    Raises SessionLost if it failed, or gave another kind of value; PolicyError if the policy's source
    checks refuse our code.
    """
    if result.status is SandboxStatus.REJECTED:
        raise PolicyError(
            f"{what}: refused by the policy's source checks: {result.error}",
            "use a policy whose validation.mode is not enforce",
        )
    if not result.ok:
        raise SessionLost(f"{what}: {result.error or result.reason}")
    try:
        return msgspec.convert(result.value, kind)
    except msgspec.ValidationError as error:  # a program of the session took the place of ours
        raise SessionLost(f"{what}: the cell told another thing: {error}") from None
