"""The arguments of `Sandbox`, and the objects that they name: policy, interpreter, packages,
launcher, trail.

An argument that describes one sandbox is a field of `SandboxArguments`, one that describes the host a
field of `HostSettings`; the signature of `Sandbox` is made of the fields.
"""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import msgspec

from ...policies.errors import PolicyError
from ...policies.languages import PYTHON
from ...policies.policy import Policy, check_policy
from ...runner.launching.spawn import Spawned, interpreter
from ...runner.settings import PauseSettings, PoolSettings, SessionSettings
from .checks import check_flag, check_host_path
from .parameters import CommandArguments, CompileArguments, ProgramArguments, SessionArguments

if TYPE_CHECKING:
    from ...policies.network.credential import CellCredential
    from ...policies.permission_sets import PermissionSet
    from ...runner.audit.log import AuditLog
    from ...runner.requests.request import Request
    from ...runner.requests.result import SandboxResult
    from ..privacy.privacy import Privacy
    from ..skills.skills import Skills
    from .calls.monty_evaluator import MontyEvaluator
    from .calls.private import PrivateCalls
    from .calls.sandbox_tools import Offered, SandboxTools
    from .faces.config import SandboxConfig
    from .images.image import StoredImage
    from .languages.compiled import Build
    from .network.cell_credentials import CellCredentials
    from .network.network_control import SandboxNetwork
    from .packages.package_store import OpenSet, PackageStore, Requirements
    from .programs.program import Program
    from .pythons import HostPython
    from .sandbox_skills import SandboxSkills
    from .sessions.session import Session
    from .workspaces.workspace_store import Workspaces

    PolicyLike = str | os.PathLike[str] | Mapping[str, Any] | Policy | PermissionSet
else:
    PackageStore = Any  # annotations of a struct are evaluated by `inspect.signature`

Backend = Literal["cells", "oci"]
_BACKENDS = get_args(Backend)
_POLICIES = (
    "the name of a profile, the path of a TOML file, a mapping as TOML has it, a Policy or "
    "a PermissionSet"
)
_OWN_TRAIL_ENTRIES = 1000  # two a call, 2 KiB each; callers that want more pass a trail


class HostSettings(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The parts of the host that a sandbox uses: pass them as `Sandbox(host=HostSettings(...))`.

    `python`: another interpreter of the host: a version, such as "3.12", or a path.
    `backend`: "cells", or "oci": the launcher runs in a container of an OCI runtime, cells in it.
    `runtime`: with `backend="oci"` the runtime or its path; default the first of crun, runc and youki
    that this host's cgroups permit.
    `rootfs`: with `backend="oci"`, the root of a file system whose files programs see in place of the
    host's.
    `cgroup_root`: a directory in which to make cgroups; by default $CELLWRIGHT_CGROUP_ROOT, else one
    that is found.
    `user`: the uid of cells on the host if root starts them: a number, or a name that stands for the
    same uid in every process; by default each process has another uid.
    `interpreters`: paths of interpreters that are not in the usual places, such as
    {"javascript": "/opt/node/bin/node"}.
    `languages`: a file of further languages that programs are compiled or run in, in the form of
    policies/languages/languages.toml.
    `spawned`: a launcher process that was started ahead.
    `language`: start the launcher of this language now; others are started when first needed.
    `package_store`: where sets of packages are kept, and where wheels come from.
    `pausable`: paused sessions can be resumed after a restart; cells have no random addresses then.
    `pauses`: where paused sessions are kept, how long and how many, and whether they are encrypted.
    """

    python: str | os.PathLike[str] | None = None
    backend: Backend = "cells"
    runtime: str | os.PathLike[str] | None = None
    rootfs: str | os.PathLike[str] | None = None
    cgroup_root: str | os.PathLike[str] | None = None
    user: int | str | None = None
    interpreters: Mapping[str, str | os.PathLike[str]] = MappingProxyType({})
    languages: str | os.PathLike[str] | None = None
    spawned: Spawned | None = None
    language: str = PYTHON
    package_store: PackageStore | None = None
    pausable: bool = False
    pauses: PauseSettings = PauseSettings()

    def beside(self, python: str | None) -> "HostSettings":
        """Return the settings of a further sandbox, which has a launcher of its own."""
        host = msgspec.structs.replace(self, spawned=None, language=PYTHON, pausable=False)
        if python is None:
            return host
        runtime = self.runtime if self.backend == "oci" else None  # else it names a Python, too
        return msgspec.structs.replace(host, python=python, runtime=runtime)


class _First(msgspec.Struct, frozen=True):
    """The one argument that needs no name."""

    config: "SandboxConfig | PolicyLike | None" = None


class SandboxArguments(_First, frozen=True, kw_only=True):
    """The arguments of `Sandbox`, which documents them, and of `Sandbox.create`."""

    policy: "PolicyLike | None" = None
    image: "str | os.PathLike[str] | StoredImage | None" = None
    packages: "Requirements | None" = None
    gpu: bool | str | Sequence[str] = False
    tools: "Offered | None" = None
    skills: "Skills | None" = None
    workspaces: "Workspaces | str | os.PathLike[str] | None" = None
    audit: "AuditLog | bool | None" = None
    privacy: "Privacy | None" = None
    credentials: "Sequence[str | CellCredential]" = ()
    pool: int | PoolSettings = PoolSettings()
    sessions: SessionSettings = SessionSettings()
    host: HostSettings = HostSettings()
    connect: str | os.PathLike[str] | None = None
    workers: int | Literal["auto"] = 1

    def __post_init__(self) -> None:
        if not isinstance(self.host, HostSettings):
            raise PolicyError(f"host: must be HostSettings, got {self.host!r}")

    def changed(self) -> dict[str, Any]:
        """Return the arguments that differ from their defaults, also those of the host."""
        return {**_changed(self), **_changed(self.host)}

    def revised(self, policy: Policy) -> Policy:
        """Return the policy with what arguments say instead of it; raises PolicyError."""
        if not self.gpu:
            return policy
        from ...policies.compiling.gpus import with_gpu  # few sandboxes have a GPU

        return with_gpu(policy, self.gpu)


def _changed(given: msgspec.Struct) -> dict[str, Any]:
    default = type(given)()
    return {
        name: getattr(given, name) for name in given.__struct_fields__
        if name != "host" and getattr(given, name) != getattr(default, name)
    }  # fmt: skip


def policy_of_arguments(arguments: SandboxArguments) -> Policy:
    """Return the policy of a sandbox; raises PolicyError for an invalid one."""
    return arguments.revised(_policy_of(arguments))


def _policy_of(arguments: SandboxArguments) -> Policy:
    config, policy = arguments.config, arguments.policy
    if config is not None and policy is not None:
        raise PolicyError(
            "config: cannot be combined with policy", "give a config or a policy, not both"
        )
    given: object = config if policy is None else policy
    if given is None and arguments.image is not None:
        given = "workshop"  # a strict policy executes no program of an image
    if given is None:
        return check_policy(Policy(name="strict"))
    if isinstance(given, Policy):
        return check_policy(given)
    from ...policies.permission_sets import PermissionSet
    from .faces.config import SandboxConfig

    if isinstance(config, SandboxConfig):
        return config.policy()
    if isinstance(given, PermissionSet):
        from .faces.permissions import policy_of

        return policy_of(given)
    if isinstance(given, str | os.PathLike | Mapping):
        from ...policies.profiles.loading import load_policy, policy_of_data

        if isinstance(given, Mapping):
            return policy_of_data(given)
        return load_policy(given if isinstance(given, str) else os.path.abspath(given))
    where = "policy: must be" if config is None else "config: must be a SandboxConfig,"
    raise PolicyError(
        f"{where} {_POLICIES}, got {type(given).__name__}",
        "Sandbox(config)" if isinstance(given, SandboxConfig) else "",
    )


def credentials_of(given: SandboxArguments, policy: Policy) -> "CellCredentials | None":
    """Return what cells and the egress process get of the credentials; raises PolicyError."""
    if not given.credentials:
        return None
    from ...policies.network.credential import credential_of
    from .network.cell_credentials import CellCredentials  # seldom needed

    given_ones = [
        credential_of(each) if isinstance(each, str) else each for each in given.credentials
    ]
    return CellCredentials(given_ones, policy)


def python_of(given: HostSettings) -> "HostPython | None":
    """Return the Python that the arguments name; None for the one that runs this process."""
    if given.backend not in _BACKENDS:
        raise PolicyError(f"backend: must be one of {', '.join(_BACKENDS)}, got {given.backend!r}")
    if given.rootfs is not None and given.backend != "oci":
        raise PolicyError('rootfs: needs backend="oci"')
    runtime = None if given.backend == "oci" else given.runtime  # else an OCI runtime
    if given.python is None and runtime is None:
        return None
    from .pythons import find_python  # seldom needed

    return find_python(given.python, runtime)


def cgroup_root_of(given: HostSettings) -> str | None:
    """Return the directory in which to make cgroups, None to find one; raises PolicyError."""
    root = given.cgroup_root
    return None if root is None else check_host_path("cgroup_root", root)


def with_store_of(python: "HostPython | None", given: HostSettings) -> HostSettings:
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
    from .packages.package_store import PackageStore

    with contextlib.suppress(PackageError):  # the extra is not installed; the first use reports it
        given = msgspec.structs.replace(given, package_store=PackageStore(python=python.path))
    return given


def packaged(policy: Policy, given: SandboxArguments) -> "tuple[Policy, OpenSet | None]":
    """Return `policy` with the packages that it and the arguments ask for, and the set of these."""
    if given.packages is None and not policy.packages.require:
        return policy, None
    from .packages.required import open_required  # seldom needed

    return open_required(policy, given.packages, given.host.package_store)


def launcher_of(given: HostSettings, python: "HostPython | None") -> Spawned:
    """Return the launcher process of a sandbox."""
    has_fixed_addresses = check_flag("pausable", given.pausable)
    if given.backend == "oci":
        for name in ("pausable", "spawned"):
            if getattr(given, name):
                raise PolicyError(f'{name}: cannot be combined with backend="oci"')
        from .containers.images import container_of  # seldom needed

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
    from .faces.config import SandboxConfig

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


def checked_workspaces(
    given: "Workspaces | str | os.PathLike[str] | None",
) -> "Workspaces | str | os.PathLike[str] | None":
    if not isinstance(given, str | os.PathLike | None):
        from .workspaces.workspace_store import Workspaces

        if not isinstance(given, Workspaces):
            raise PolicyError(f"workspaces: must be Workspaces or their directory, got {given!r}")
    return given


def evaluator_of(policy: Policy) -> "MontyEvaluator | None":
    if not policy.evaluator.monty:
        return None
    from .calls.monty_evaluator import MontyEvaluator  # needs an extra

    return MontyEvaluator(policy)


def private_calls_of(given: SandboxArguments, policy: Policy) -> "PrivateCalls | None":
    if given.privacy is None and not policy.privacy.enabled:
        return None
    from .calls.private import private_calls  # seldom needed

    return private_calls(given.privacy, policy)


def sandbox_skills(given: "Skills | None", policy: Policy) -> "SandboxSkills | None":
    if given is None:
        return None
    from .sandbox_skills import SandboxSkills  # seldom needed

    return SandboxSkills(given, policy)


def sandbox_tools(
    tools: "Offered | None",
    policy: Policy,
    audit: "AuditLog | None",
    private: "PrivateCalls | None",
) -> "SandboxTools | None":
    if tools is None and not policy.http.allow:
        return None
    from .calls.sandbox_tools import SandboxTools, broker_of

    return SandboxTools(broker_of(tools, policy, audit), policy.tools, audit, private)


class FewerCalls:
    """The methods that cells do not have which another process or kernel keeps: each is refused."""

    privacy: "Privacy | None" = None

    def refuse(self, what: str) -> NoReturn:
        """Raise the PolicyError for a method or property."""
        raise NotImplementedError

    @property
    def workspaces(self) -> "Workspaces":
        self.refuse("workspaces")

    @property
    def network(self) -> "SandboxNetwork":
        self.refuse("network")

    @property
    def skills(self) -> "SandboxSkills":
        self.refuse("skills")

    def perform(self, request: "Request", *_: object) -> "SandboxResult":
        self.refuse("perform")

    def compile(self, given: CompileArguments) -> "Build":
        self.refuse("compile")

    def program(self, given: ProgramArguments) -> "Program":
        self.refuse("program")

    def session(self, given: SessionArguments) -> "Session":
        self.refuse("session")

    def resume(self, token: str) -> "Session":
        self.refuse("resume")

    def discard(self, token: str) -> None:
        self.refuse("discard")

    def with_tokens(self, given: CommandArguments) -> CommandArguments:
        return given

    def has_tool(self, name: str) -> bool:
        return False  # a daemon does not say, and records no runs

    def private_to(self, client: str) -> None:
        """Do nothing: these cells have no personal data."""
