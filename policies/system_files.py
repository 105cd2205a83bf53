"""Paths of the host's programs beside /usr/bin, read from system_files.toml."""

from pathlib import Path

import msgspec


class SystemPath(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A path, perhaps with wildcards, and the reason why programs need it."""

    path: str
    reason: str
    execute: bool = False


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: tuple[SystemPath, ...]


def system_paths() -> tuple[SystemPath, ...]:
    """Return the paths of system_files.toml; equal on every host."""
    import tomllib  # most policies need no list

    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return msgspec.convert(data, _Document).file
