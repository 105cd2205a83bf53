"""`ToolSandboxes`: the sandboxes of made tools, one for each set of permissions."""

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
from ...runner.settings import PoolSettings
from ..sandbox.cache import LendingCache
from ..sandbox.permissions import policy_of
from ..sandbox.pipeline import rules_of
from ..sandbox.sandbox import Sandbox
from ..schemas.spec import Grants
from ..tools.broker import Broker

PROFILE = "tool"
ALIVE = 8  # sandboxes at a time; each has a launcher and a pool of cells
_TRAIL_ENTRIES = 1000
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
    ) -> None:
        self._ceiling = ceiling
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
