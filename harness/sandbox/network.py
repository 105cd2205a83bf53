"""`SandboxNetwork`: the network rules of a sandbox, which its owner may change while cells live."""

import threading
from collections.abc import Callable

import msgspec

from ...policies.network.changes import ChangingRules
from ...policies.network.rule import NetworkDenial, NetworkRule
from ...policies.network.rules import encode_rules
from ...policies.policy import Network
from ...runner.egress_process import EgressProcess

OnChange = Callable[[NetworkRule | NetworkDenial, bool], None]


class PendingName(msgspec.Struct, frozen=True):
    """A name that programs asked for and that no rule allows or denies.

    `port` is None if it was only looked up, as is usual; `count` is how often it was refused.  Programs
    choose the names: show them to a person as untrusted text.
    """

    name: str
    port: int | None
    count: int
    reason: str


class SandboxNetwork:
    """The network rules of a running sandbox: those of its policy, and later ones.

    Each change holds for all cells at once.  Safe from many threads.
    """

    def __init__(self, network: Network, egress: EgressProcess, on_change: OnChange) -> None:
        """`on_change` records a change; its flag says that the change has already been made."""
        self._rules = ChangingRules(network.allow, network.deny, network.addresses)
        self._egress = egress
        self._on_change = on_change
        self._lock = threading.Lock()

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules in force, a line each."""
        return tuple(map(str, (*self._rules.allow, *self._rules.deny)))

    def allow(self, rule: NetworkRule | str) -> None:
        """Allow connections by a rule, or to a host over TLS on port 443.

        An earlier `deny` of the same host and ports is taken back; denials of the policy always hold.
        `lifetime_seconds` of the rule counts from now, and its caps count anew.

        Raises PolicyError for an invalid rule, one that denials forbid, and a port that no rule of the
        policy names, because cells do not listen on it; ClosedError; AuditError if the change cannot be
        recorded: nothing is allowed then.
        """
        if isinstance(rule, str):
            rule = NetworkRule(host=rule)
        with self._lock:
            changed = self._rules.with_allowed(rule, self._egress.age_seconds)
            self._egress.require_open()  # a rule that is recorded holds
            self._on_change(rule, False)
            self._follow(changed)

    def deny(self, rule: NetworkDenial | str) -> None:
        """Deny connections by a rule, or to a host on every port, and end those that are open.

        When this returns, they have ended.  A host of an earlier `allow` is denied too.  Raises
        PolicyError for an invalid rule, ClosedError.
        """
        if isinstance(rule, str):
            rule = NetworkDenial(host=rule)
        with self._lock:
            self._follow(self._rules.with_denied(rule))
            self._on_change(rule, True)

    def pending(self) -> tuple[PendingName, ...]:
        """Return names that programs asked for and no rule allows or denies, the latest last.

        At most 256, those refused last.  Raises ClosedError, and LaunchError if the egress process does
        not answer.
        """
        return tuple(
            PendingName(each.name, each.port or None, each.count, each.reason)
            for each in self._egress.pending()
        )

    def _follow(self, changed: ChangingRules) -> None:
        self._egress.replace_rules(encode_rules(changed.allow, changed.deny, changed.addresses))
        self._rules = changed
