"""The error for an adapter whose framework is not installed."""

from ...policies.errors import PolicyError
from ...policies.extras import how_to_install


def missing(framework: str, extra: str, error: ImportError) -> PolicyError:
    """Return the error that names what to install."""
    return PolicyError(f"{framework} cannot be imported: {error}", how_to_install(extra))
