"""`RuleMeter`: how much of the caps of one network rule is used."""

import time

from .rules import NetworkRule


class _TokenBucket:
    """A token bucket that holds one second's worth of connections, at least one."""

    def __init__(self, a_second: float) -> None:
        self._a_second = a_second
        self._most = max(1.0, a_second)
        self._left = self._most
        self._at = time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._a_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class RuleMeter:
    """Connections and bytes under one rule.  Not safe from several threads."""

    def __init__(self, rule: NetworkRule) -> None:
        self._rule = rule
        self._allowance = _TokenBucket(rule.connections_per_second)
        self._connections = self._sent_bytes = self._received_bytes = 0

    def begin(self) -> str:
        """Count a connection; return why there must not be one more, else ""."""
        rule = self._rule
        if self._connections >= rule.connections:
            return f"{rule}: more than {rule.connections} connections at a time"
        if why := self.exhausted():
            return why
        if not self._allowance.take():
            return f"{rule}: more than {rule.connections_per_second:g} connections a second"
        self._connections += 1
        return ""

    def end(self) -> None:
        self._connections -= 1

    def count(self, sent_bytes: int, received_bytes: int) -> None:
        self._sent_bytes += sent_bytes
        self._received_bytes += received_bytes

    def exhausted(self) -> str:
        """Return which cap on bytes is exceeded, else ""."""
        rule = self._rule
        if rule.sent_bytes is not None and self._sent_bytes > rule.sent_bytes:
            return f"{rule}: more than {rule.sent_bytes} bytes sent"
        if rule.received_bytes is not None and self._received_bytes > rule.received_bytes:
            return f"{rule}: more than {rule.received_bytes} bytes received"
        return ""
