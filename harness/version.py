"""Which version of cellwright this is; importing its source of truth takes time, so only when asked."""

NAME = "cellwright"


def installed_version() -> str:
    """Return the version that pip installed, which is that of pyproject.toml; "" in a bare checkout."""
    import importlib.metadata

    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return ""
