"""`${NAME}` in the configuration of a server, as others write it: from the environment or the vault."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ...policies.errors import PolicyError
from ..tools.vault import Vault

# ${NAME}, ${NAME:-default}, ${env:NAME}, and ours: ${vault:NAME}.
_VARIABLE = re.compile(
    r"\$\{(?P<source>env:|vault:)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}"
)
_LIKE_ONE = re.compile(r"\$\{[^}]*\}?")


class Expanded(NamedTuple):
    """A text, and what of it was put in for a variable."""

    text: str
    values: tuple[str, ...] = ()


def expand(text: str, environment: Mapping[str, str], *, vault: bool = False) -> Expanded:
    """Return `text` with its variables; those of the vault stay, if they may stand there at all.

    Raises PolicyError for one that is not set and has no default, and for what is written otherwise.
    """
    values: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match["source"] == "vault:":
            if not vault:
                raise PolicyError(
                    f"{match[0]}: credentials of the vault go into headers and env only"
                )
            return match[0]
        values.append(_of(match, environment))
        return values[-1]

    _check_form(text)
    return Expanded(_VARIABLE.sub(value, text), tuple(values))


def from_vault(text: str, vault: Vault) -> Expanded:
    """Return `text` with the credentials that it names; raises ToolFailed for one that is missing."""
    values: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match["source"] != "vault:":  # what a variable held may look like one
            return match[0]
        values.append(vault.get(match["name"]))
        return values[-1]

    return Expanded(_VARIABLE.sub(value, text), tuple(values))


def _check_form(text: str) -> None:
    for found in _LIKE_ONE.finditer(text):
        if not _VARIABLE.match(text, found.start()):
            raise PolicyError(
                f"{ascii(found[0])[1:-1]} is no variable",
                "write ${NAME}, ${NAME:-default}, ${env:NAME} or ${vault:NAME}",
            )


def _of(match: re.Match[str], environment: Mapping[str, str]) -> str:
    found = environment.get(match["name"])
    if not found and match["default"] is not None:  # as a shell has it: empty counts as not set
        found = match["default"]
    if found is None:
        raise PolicyError(
            f"{match[0]}: the variable {match['name']} is not set",
            f"set it, or write ${{{match['name']}:-default}}",
        )
    return found
