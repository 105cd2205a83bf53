"""`ToolSandboxes`: the sandboxes of made tools, one for each set of permissions."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from ...policies.errors import PolicyError
from ...policies.loading import load_policy
from ...policies.narrowing import exceeds, narrow
from ...policies.permissions import PermissionLevel
from ...policies.policy import Policy, named_layers
from ...policies.source.findings import Rules, rules_with
from ...runner.audit.log import AuditLog
from ...runner.budget import CANCEL
from ...runner.settings import PoolSettings
from ..sandbox.cache import LendingCache
from ..sandbox.permissions import policy_of
from ..sandbox.pipeline import rules_of
from ..sandbox.sandbox import Sandbox
from ..schemas.spec import Grants
from ..tools.broker import Broker

if TYPE_CHECKING:
    from ..sandbox.packages.store import PackageStore

PROFILE = "tool"
ALIVE = 8  # sandboxes at a time; each has a launcher and a pool of cells
_TRAIL_ENTRIES = 1000
_BUILD_SECONDS = 300.0  # to resolve, fetch and build the packages of a tool
POOL = 4  # cells kept ready for each set of permissions


def _rules(grants: Grants, policy: Policy) -> Rules:
    """Return the rules of the source checks; permissions relax them."""
    return rules_with(
        rules_of(policy.validation, None, None),
        files=any(each.level is not PermissionLevel.NONE for each in grants.files),
        programs=any(each.allow_subprocess for each in grants.processes),
        hosts=any(each.allowed_hosts for each in grants.network),
    )


class ToolSandboxes:
    """Lends sandboxes by permissions; the one that was idle longest is closed for a new one.

    No sandbox allows more than `ceiling`; without a ceiling, every permission is granted.
    """

    def __init__(
        self,
        ceiling: Sandbox | None = None,
        pool: int = POOL,
        optional_layers: Sequence[str] = (),
        package_store: "PackageStore | None" = None,
    ) -> None:
        self._ceiling = ceiling
        self._package_store = ceiling.package_store if ceiling else package_store
        self.audit = ceiling.audit if ceiling else AuditLog(max_entries=_TRAIL_ENTRIES)
        self._pool = PoolSettings(size=pool)
        self._optional_layers = named_layers("optional_layers", optional_layers)
        self._sandboxes = LendingCache[Sandbox](ALIVE, "the tool factory")

    def policy(self, grants: Grants) -> Policy:
        """Return the policy of cells with these permissions: the profile `tool` plus the permissions.

        Raises PolicyError for invalid permissions, and for more than the ceiling allows.
        """
        profile = load_policy(PROFILE)
        if self._ceiling is None:
            profile = replace(profile, optional_layers=self._optional_layers)
            return policy_of(grants.permissions, profile)
        most = self._ceiling.policy
        profile = replace(profile, optional_layers=most.optional_layers, python=most.python)
        wanted = policy_of(grants.permissions, profile)
        usual = exceeds(profile, most)
        if beyond := [line for line in exceeds(wanted, most) if line not in usual]:
            raise PolicyError(
                f"permissions: more than the sandbox allows: {'; '.join(beyond)}",
                "ask for less, or give the factory a sandbox that allows it",
            )
        return narrow(wanted, most)

    @property
    def packages(self) -> tuple[str, ...] | None:
        """The packages that tools may require, by name; None if every one.

        Raises PackageError if there are some, and the extra `packages` is not installed.
        """
        if self._ceiling is None:
            return None
        most = self._ceiling.policy.packages
        if not most.allow and not most.require:
            return ()
        from ..sandbox.packages.lock import name_of, require_extra  # seldom needed

        require_extra()
        return tuple(sorted({name_of(each) for each in (*most.allow, *most.require)}))

    def check_requirements(self, requirements: Sequence[str]) -> None:
        """Raise PolicyError for a package that the policy of the sandbox does not name.

        A model chooses the requirements: an index would learn whatever it writes as a name, so an empty
        list of allowed packages allows none here.
        """
        if not requirements or (allowed := self.packages) is None:
            return
        from ..sandbox.packages.lock import name_of  # seldom needed

        if unknown := [each for each in requirements if name_of(each) not in allowed]:
            raise PolicyError(
                f"requirements: not among the packages that tools may have: {', '.join(unknown)}",
                f"use {', '.join(allowed)}, or the standard library" if allowed
                else "use the standard library; packages.allow of the policy names packages",
            )  # fmt: skip

    def build_packages(self, grants: Grants, requirements: Sequence[str]) -> tuple[str, ...]:
        """Fetch and build the set of `requirements` if it is missing; return its exact versions.

        Raises PackageError.
        """
        from ..sandbox.packages.deadline import Deadline
        from ..sandbox.packages.store import PackageStore

        store = (self._package_store or PackageStore()).limited_to(self.policy(grants))
        deadline = Deadline(_BUILD_SECONDS, CANCEL.get())
        opened = store.open(requirements, deadline=deadline)
        pins = tuple(f"{each.name}=={each.version}" for each in opened.made.lock.wheels)
        opened.close()
        opened = store.open(pins, deadline=deadline)  # the same set by the list that calls name
        opened.close()
        return pins

    @contextlib.contextmanager
    def lend(self, grants: Grants, tools: Broker | None = None) -> Iterator[Sandbox]:
        """Lend a sandbox with these permissions for one call; its programs can call `tools`.

        Raises what making a Sandbox raises.
        """
        key = msgspec.json.encode((grants, tools is not None))
        with self._sandboxes.lend(key, lambda: self._make(grants, tools)) as sandbox:
            yield sandbox

    def _make(self, grants: Grants, tools: Broker | None) -> Sandbox:
        policy = self.policy(grants)
        rules = _rules(grants, policy)
        if self._ceiling is None:
            return Sandbox(
                policy=policy, pool=self._pool, audit=self.audit, tools=tools,
                blocked_imports=rules.blocked_imports, blocked_builtins=rules.blocked_builtins,
                package_store=self._package_store,
            )  # fmt: skip
        return self._ceiling.sibling(policy, self._pool, tools, rules=rules)

    def policy_in_force(self, grants: Grants) -> Policy:
        """Return the policy of the sandbox for these permissions."""
        with self.lend(grants) as sandbox:
            return sandbox.policy

    def settle(self) -> None:
        """Wait until all pools are full."""
        self._sandboxes.settle()

    def close(self) -> None:
        """End every call and close every sandbox; closing twice is fine."""
        self._sandboxes.close()
