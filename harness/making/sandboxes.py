"""Sandboxes for made tools: one for each set of permissions, a few of them alive at a time."""

import contextlib
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from ...policies.errors import PolicyError
from ...policies.loading import load_policy
from ...policies.narrowing import exceeds, narrow
from ...policies.permissions import PermissionLevel
from ...policies.policy import Policy, named_layers
from ...policies.source.findings import Rules, rules_with
from ...runner.audit.log import AuditLog
from ...runner.pool import PoolSettings
from ..sandbox.cache import SandboxCache
from ..sandbox.intake import rules_of
from ..sandbox.permissions import policy_of
from ..sandbox.sandbox import Sandbox
from ..schemas.spec import Grants
from ..tools.broker import Broker

PROFILE = "tool"
ALIVE = 8  # sandboxes: each has a launcher, and cells that wait
_TRAIL_ENTRIES = 1000
POOL = 4  # cells that wait, for each set of permissions


def _rules(grants: Grants, policy: Policy) -> Rules:
    """Return what source checks look for in tools: less, where permissions allow more."""
    return rules_with(
        rules_of(policy.validation, None, None),
        files=any(each.level is not PermissionLevel.NONE for each in grants.files),
        programs=any(each.allow_subprocess for each in grants.processes),
    )


class ToolSandboxes:
    """Lends sandboxes by what they allow; the one that was idle longest makes room for another.

    Whatever permissions say, no sandbox allows what `ceiling` does not; without one they are taken
    at their word.
    """

    def __init__(
        self,
        ceiling: Sandbox | None = None,
        pool: int = POOL,
        optional_layers: Sequence[str] = (),
    ) -> None:
        self._ceiling = ceiling
        self.audit = ceiling.audit if ceiling else AuditLog(max_entries=_TRAIL_ENTRIES)
        self._pool = PoolSettings(size=pool)
        self._optional_layers = named_layers("optional_layers", optional_layers)
        self._sandboxes = SandboxCache(ALIVE, "the tool factory")

    def policy(self, grants: Grants) -> Policy:
        """Return what cells of these permissions may do: the profile `tool`, and what is granted.

        Raises PolicyError for what makes no sense or is more than the ceiling allows.
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
                "give the factory a sandbox that may",
            )
        return narrow(wanted, most)

    @contextlib.contextmanager
    def lend(self, grants: Grants, tools: Broker | None = None) -> Iterator[Sandbox]:
        """Give a sandbox of these permissions for one call, in which `tools` can be called; raises
        what making one raises."""
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
            )  # fmt: skip
        return self._ceiling.sibling(policy, self._pool, tools, rules=rules)

    def policy_in_force(self, grants: Grants) -> Policy:
        """Return the policy of the sandbox that is lent for these permissions."""
        with self.lend(grants) as sandbox:
            return sandbox.policy

    def settle(self) -> None:
        """Wait until the cells that should wait do."""
        self._sandboxes.settle()

    def close(self) -> None:
        """End every call and close every sandbox; closing twice is fine."""
        self._sandboxes.close()
