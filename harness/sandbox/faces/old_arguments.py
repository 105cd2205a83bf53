"""Keywords of `Sandbox` from versions before 0.3, each read with a DeprecationWarning as its
replacement. Nothing is added here."""

import warnings
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ....policies.argument_checks import check_names
from ....policies.errors import PolicyError
from ....policies.policy import Policy
from ....runner.settings import PoolSettings
from ..checks import check_flag
from ..sandbox_arguments import HostSettings, SandboxArguments

_OF_HOST = (
    "python", "backend", "runtime", "rootfs", "cgroup_root", "user", "interpreters", "spawned",
    "language", "package_store", "pausable", "pauses",
)  # fmt: skip
_INSTEAD = {
    **{name: f"host=HostSettings({name}=...)" for name in _OF_HOST},
    "requirements": "packages=...",
    "fresh_exec": "pool=PoolSettings(cells_per_launcher=1)",
    "blocked_imports": "blocked_imports below [validation] of the policy",
    "blocked_builtins": "blocked_builtins below [validation] of the policy",
}
_FROM_CALLER = 4  # stack frames


class OldArguments(SandboxArguments, frozen=True, kw_only=True):
    """Arguments with lists for source checks, instead of the policy's."""

    blocked_imports: Sequence[str] | None = None
    blocked_builtins: Sequence[str] | None = None

    def revised(self, policy: Policy) -> Policy:
        lists = {
            name: check_names(name, given) for name in ("blocked_imports", "blocked_builtins")
            if (given := getattr(self, name)) is not None
        }  # fmt: skip
        return replace(policy, validation=replace(policy.validation, **lists))


def read(config: Any, given: dict[str, Any]) -> SandboxArguments:
    """Return the arguments that `given` stands for.

    Raises TypeError for unknown ones, PolicyError for an argument that is given by both names.
    """
    arguments: dict[str, Any] = {}
    old: dict[str, Any] = {}
    for name, value in given.items():
        (old if name in _INSTEAD else arguments)[name] = value
    for name in old:
        warnings.warn(
            f"Sandbox({name}=...) is deprecated: give {_INSTEAD[name]}",
            DeprecationWarning, stacklevel=_FROM_CALLER,
        )  # fmt: skip
    host = {name: old.pop(name) for name in _OF_HOST if name in old}
    if host:
        given_host = arguments.get("host", HostSettings())
        if isinstance(given_host, HostSettings):  # else its check says what it must be
            arguments["host"] = _with_host(given_host, host)
    if requirements := old.pop("requirements", None):
        if arguments.get("packages"):
            raise PolicyError("requirements: another name for packages, give one of the two")
        arguments["packages"] = requirements
    if check_flag("fresh_exec", old.pop("fresh_exec", False)):
        pool = arguments.get("pool", PoolSettings())
        settings = PoolSettings(size=pool) if isinstance(pool, int) else pool
        if isinstance(settings, PoolSettings):  # else its check says what it must be
            arguments["pool"] = settings._replace(cells_per_launcher=1)
    return OldArguments(config, **arguments, **old)


def _with_host(host: HostSettings, old: dict[str, Any]) -> HostSettings:
    for name in old:
        if getattr(host, name) != getattr(HostSettings(), name):
            raise PolicyError(f"{name}: is given twice, also in host=HostSettings({name}=...)")
    return replace(host, **old)
