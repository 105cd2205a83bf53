"""The parameters of `Sandbox`, apart from the cells that it makes of them."""

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from ...policies.languages import PYTHON
from ...runner.settings import PauseSettings, PoolSettings, SessionSettings
from ...runner.spawn import Spawned
from .parameters import Parameters

if TYPE_CHECKING:
    from ...policies.permissions import PermissionSet
    from ...policies.policy import Policy
    from ...runner.audit.log import AuditLog
    from ..privacy.privacy import Privacy
    from ..skills.skills import Skills
    from .config import SandboxConfig
    from .packages.store import PackageStore, Requirements
    from .sandbox_tools import Offered
    from .workspaces.store import Workspaces

    PolicyLike = str | os.PathLike[str] | Mapping[str, Any] | Policy | PermissionSet


class SandboxArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `Sandbox`, which documents them, and of `Sandbox.create`."""

    config: "SandboxConfig | PolicyLike | None" = None
    policy: "PolicyLike | None" = None
    python: str | os.PathLike[str] | None = None
    runtime: str | None = None
    cgroup_root: str | os.PathLike[str] | None = None
    spawned: Spawned | None = None
    pool: int | PoolSettings = PoolSettings()
    fresh_exec: bool = False
    language: str = PYTHON
    sessions: SessionSettings = SessionSettings()
    interpreters: Mapping[str, str | os.PathLike[str]] = MappingProxyType({})
    workspaces: "Workspaces | str | os.PathLike[str] | None" = None
    audit: "AuditLog | bool | None" = None
    tools: "Offered | None" = None
    skills: "Skills | None" = None
    blocked_imports: Sequence[str] | None = None
    blocked_builtins: Sequence[str] | None = None
    user: int | str | None = None
    privacy: "Privacy | None" = None
    packages: "Requirements | None" = None
    package_store: "PackageStore | None" = None
    pausable: bool = False
    pauses: PauseSettings = PauseSettings()
    connect: str | os.PathLike[str] | None = None

    def changed(self) -> dict[str, Any]:
        """Return the arguments that differ from their defaults."""
        default = type(self)()
        return {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if value != getattr(default, name)
        }
