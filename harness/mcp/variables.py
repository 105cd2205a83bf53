"""Variables `${NAME}` in a server's configuration, from the environment or the vault."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ...policies.errors import PolicyError
from ..tools.vault import Vault

# ${NAME}, ${NAME:-default} and ${env:NAME} as other MCP clients have them; ${vault:NAME} is ours.
_VARIABLE = re.compile(
    r"\$\{(?P<source>env:|vault:)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}"
)
_LIKE_ONE = re.compile(r"\$\{[^}]*\}?")


class Expanded(NamedTuple):
    """A text with its variables replaced, and the values that replaced them."""

    text: str
    values: tuple[str, ...] = ()


def expand(text: str, environment: Mapping[str, str], *, vault: bool = False) -> Expanded:
    """Return `text` with its variables replaced, except `${vault:...}`, which `vault` allows.

    Raises PolicyError for a variable that is not set and has no default, and for invalid syntax.
    """
    values: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match["source"] == "vault:":
            if not vault:
                raise PolicyError(
                    f"{match[0]}: credentials of the vault are allowed only in headers and env"
                )
            return match[0]
        values.append(_of(match, environment))
        return values[-1]

    _check_form(text)
    return Expanded(_VARIABLE.sub(value, text), tuple(values))


def from_vault(text: str, vault: Vault) -> Expanded:
    """Return `text` with its vault variables replaced; raises ToolFailed for a missing credential."""
    values: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match["source"] != "vault:":  # the value of a variable may look like a variable
            return match[0]
        values.append(vault.get(match["name"]))
        return values[-1]

    return Expanded(_VARIABLE.sub(value, text), tuple(values))


def _check_form(text: str) -> None:
    for found in _LIKE_ONE.finditer(text):
        if not _VARIABLE.match(text, found.start()):
            raise PolicyError(
                f"{ascii(found[0])[1:-1]} is not a valid variable",
                "use ${NAME}, ${NAME:-default}, ${env:NAME} or ${vault:NAME}",
            )


def _of(match: re.Match[str], environment: Mapping[str, str]) -> str:
    found = environment.get(match["name"])
    if not found and match["default"] is not None:  # as in a shell, empty counts as not set
        found = match["default"]
    if found is None:
        raise PolicyError(
            f"{match[0]}: the variable {match['name']} is not set",
            f"set it, or use ${{{match['name']}:-default}}",
        )
    return found
