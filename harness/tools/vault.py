"""`Vault`: credentials that the broker adds to calls and redacts from what comes back.

They never enter a cell, a record or an error message, as far as `Redaction` (text/redaction.py)
recognises them.  A credential that a tool returns in another form reaches the caller.
"""

from collections.abc import Mapping

from ...policies.errors import ToolFailed
from ..sources import SecretSource, SecretUnreadable, read_secret
from ..text.redaction import SHORTEST


class Vault:
    """Credentials by name; each is text, or a function that returns it."""

    def __init__(self, credentials: Mapping[str, str | SecretSource] = {}) -> None:
        self._sources = dict(credentials)

    def __repr__(self) -> str:
        return f"Vault({', '.join(sorted(self._sources))})"

    def __len__(self) -> int:
        return len(self._sources)

    def get(self, name: str) -> str:
        """Return a credential; raises ToolFailed, without the credential, if it cannot be read."""
        source = self._sources.get(name)
        if source is None:
            raise ToolFailed(f"credential {name!r} is not in the vault", "Vault({name: ...})")
        try:
            value = read_secret(source)
        except SecretUnreadable as error:
            raise ToolFailed(f"credential {name!r} cannot be read: {error}") from None
        if len(value) < SHORTEST:
            raise ToolFailed(f"credential {name!r} is shorter than {SHORTEST} characters")
        return value
