"""Facts about coding agents, caches and files that name commands, from known.toml."""

import os
import tomllib
from functools import cache

import msgspec


class KnownAgent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A coding agent: its `state`, which it may write, but for its `settings`; the `hosts` of its API;
    `variables` that it gets as they are on the host, and further `environment`."""

    state: tuple[str, ...]
    settings: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    environment: dict[str, str] = {}


class _Home(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    read: tuple[str, ...]
    programs: tuple[str, ...]


class _Registries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts: tuple[str, ...]


class KnownPrograms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of known.toml, which explains the fields."""

    protected: dict[str, tuple[str, ...]]
    home: _Home
    variables: dict[str, str]
    caches: dict[str, str]
    registries: _Registries
    agents: dict[str, KnownAgent]

    @property
    def protected_names(self) -> tuple[str, ...]:
        """Paths in a project that are read-only for programs of a cell."""
        of_git = ("git_directory", "repositories")
        groups = (names for group, names in self.protected.items() if group not in of_git)
        return tuple(name for names in groups for name in names)


@cache
def known_programs() -> KnownPrograms:
    with open(os.path.join(os.path.dirname(__file__), "known.toml"), "rb") as file:
        return msgspec.convert(tomllib.load(file), KnownPrograms)
