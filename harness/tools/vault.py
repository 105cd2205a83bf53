"""`Vault`: credentials that the broker adds to calls and redacts from what comes back.

They never enter a cell, a record or an error message, as far as `Redaction` (text/redaction.py)
recognises them.  A credential that a tool returns in another form reaches the caller.
"""

from collections.abc import Mapping

from ...policies.errors import ToolFailed
from ..sources import SecretSource
from ..text.redaction import SHORTEST


class Vault:
    """Credentials by name; each is text, or a function that returns it."""

    def __init__(self, credentials: Mapping[str, str | SecretSource] = {}) -> None:
        self._sources = dict(credentials)

    def __repr__(self) -> str:
        return f"Vault({', '.join(sorted(self._sources))})"

    def get(self, name: str) -> str:
        """Return a credential; raises ToolFailed, without the credential, if it cannot be read."""
        source = self._sources.get(name)
        if source is None:
            raise ToolFailed(f"credential {name!r} is not in the vault", "Vault({name: ...})")
        try:
            value = source if isinstance(source, str) else source()
        except Exception as error:  # noqa: BLE001 - a source may raise anything
            why = str(error) if isinstance(error, OSError) else type(error).__name__
            raise ToolFailed(f"credential {name!r} cannot be read: {why}") from None
        if len(value) < SHORTEST:
            raise ToolFailed(f"credential {name!r} is shorter than {SHORTEST} characters")
        return value
