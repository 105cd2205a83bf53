"""The arguments of `Sandbox`, and what they name: policy, interpreter, packages, launcher, trail."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from ...policies.errors import PolicyError
from ...policies.languages import PYTHON
from ...policies.policy import Policy, check_policy
from ...runner.settings import PauseSettings, PoolSettings, SessionSettings
from ...runner.spawn import Spawned, interpreter
from .checks import check_flag
from .parameters import Parameters

if TYPE_CHECKING:
    from ...policies.permissions import PermissionSet
    from ...runner.audit.log import AuditLog
    from ..privacy.privacy import Privacy
    from ..skills.skills import Skills
    from .config import SandboxConfig
    from .packages.store import OpenSet, PackageStore, Requirements
    from .pythons import HostPython
    from .sandbox_tools import Offered
    from .workspaces.store import Workspaces

    PolicyLike = str | os.PathLike[str] | Mapping[str, Any] | Policy | PermissionSet

Backend = Literal["cells", "oci"]
_BACKENDS = get_args(Backend)
_POLICIES = (
    "the name of a profile, the path of a TOML file, a mapping as TOML has it, a Policy or "
    "a PermissionSet"
)
_OWN_TRAIL_ENTRIES = 1000  # two a call, 2 KiB each; callers that want more pass a trail


class SandboxArguments(Parameters, frozen=True, kw_only=True):
    """The arguments of `Sandbox`, which documents them, and of `Sandbox.create`."""

    config: "SandboxConfig | PolicyLike | None" = None
    policy: "PolicyLike | None" = None
    python: str | os.PathLike[str] | None = None
    runtime: str | os.PathLike[str] | None = None
    backend: Backend = "cells"
    rootfs: str | os.PathLike[str] | None = None
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


def policy_of_arguments(arguments: SandboxArguments) -> Policy:
    """Return the policy of a sandbox; raises PolicyError for an invalid one."""
    config, policy = arguments.config, arguments.policy
    if config is not None and policy is not None:
        raise PolicyError(
            "config: cannot be combined with policy", "give a config or a policy, not both"
        )
    given: object = config if policy is None else policy
    if given is None:
        return check_policy(Policy(name="strict"))
    if isinstance(given, Policy):
        return check_policy(given)
    from ...policies.permissions import PermissionSet
    from .config import SandboxConfig

    if isinstance(config, SandboxConfig):
        return config.policy()
    if isinstance(given, PermissionSet):
        from .permissions import policy_of

        return policy_of(given)
    if isinstance(given, str | os.PathLike | Mapping):
        from ...policies.loading import load_policy, policy_of_data

        if isinstance(given, Mapping):
            return policy_of_data(given)
        return load_policy(given if isinstance(given, str) else os.path.abspath(given))
    where = "policy: must be" if config is None else "config: must be a SandboxConfig,"
    raise PolicyError(
        f"{where} {_POLICIES}, got {type(given).__name__}",
        "Sandbox(config)" if isinstance(given, SandboxConfig) else "",
    )


def python_of(given: SandboxArguments) -> "HostPython | None":
    """Return the Python that the arguments name; None for the one that runs this process."""
    if given.backend not in _BACKENDS:
        raise PolicyError(f"backend: must be one of {', '.join(_BACKENDS)}, got {given.backend!r}")
    if given.rootfs is not None and given.backend != "oci":
        raise PolicyError('rootfs: needs backend="oci"')
    runtime = None if given.backend == "oci" else given.runtime  # there, an OCI runtime
    if given.python is None and runtime is None:
        return None
    from .pythons import find_python  # seldom needed

    return find_python(given.python, runtime)


def with_store_of(python: "HostPython | None", given: SandboxArguments) -> SandboxArguments:
    """Return `given` with a store of packages for `python` if that is of another version than this
    process; raises PolicyError if the given store is for another one."""
    store = given.package_store
    wanted = python.tag if python else sys.implementation.cache_tag
    if store is not None and store.python != wanted:
        raise PolicyError(
            f"package_store: must be for {wanted}, got one for {store.python}",
            "PackageStore(python=...)",
        )
    if store is not None or python is None or python.is_ours:
        return given
    from ...policies.errors import PackageError
    from .packages.store import PackageStore

    with contextlib.suppress(PackageError):  # the extra is not installed: the first use says so
        given = msgspec.structs.replace(given, package_store=PackageStore(python=python.path))
    return given


def packaged(policy: Policy, given: SandboxArguments) -> "tuple[Policy, OpenSet | None]":
    """Return `policy` with the packages that it and the arguments ask for, and the set of these."""
    if given.packages is None and not policy.packages.require:
        return policy, None
    from .packages.required import open_required  # seldom needed

    return open_required(policy, given.packages, given.package_store)


def launcher_of(given: SandboxArguments, python: "HostPython | None") -> Spawned:
    """Return the launcher process of a sandbox."""
    has_fixed_addresses = check_flag("pausable", given.pausable)
    if given.backend == "oci":
        for name in ("pausable", "spawned"):
            if getattr(given, name):
                raise PolicyError(f'{name}: cannot be combined with backend="oci"')
        from .containers.containers import container_of  # seldom needed

        return container_of(given.runtime, given.rootfs, python)
    if not isinstance(given.spawned, Spawned | None):
        raise PolicyError(f"spawned: must be a Spawned, got {given.spawned!r}")
    if given.spawned:
        if has_fixed_addresses and not given.spawned.has_fixed_addresses:
            given.spawned.close()
            raise PolicyError("pausable: the launcher was spawned without has_fixed_addresses")
        return given.spawned
    if python:
        return python.spawn(has_fixed_addresses=has_fixed_addresses)
    return Spawned(interpreter(), has_fixed_addresses=has_fixed_addresses)


def audit_log_of(arguments: SandboxArguments) -> "AuditLog | None":
    """Return the trail to write to: the given one, or one in memory as the configuration says."""
    given = arguments.audit
    if given is False:
        return None
    from ...runner.audit.log import AuditLog
    from .config import SandboxConfig

    config = arguments.config if isinstance(arguments.config, SandboxConfig) else SandboxConfig()
    if given is None and not config.enable_audit:
        return None
    if isinstance(given, AuditLog):
        return given
    if not isinstance(given, bool | None):
        raise PolicyError(
            f"audit: must be an AuditLog, True or False, got {given!r}",
            "AuditLog(path=...) writes to a file; close it yourself",
        )
    return AuditLog(level=config.audit_level, max_entries=_OWN_TRAIL_ENTRIES)
