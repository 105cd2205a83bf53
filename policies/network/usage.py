"""`RuleUse`: what was used of the caps of one network rule."""

import time

from .rule import NetworkRule


class Allowance:
    """A number of events a second, and how many at once."""

    def __init__(self, a_second: float, at_once: float) -> None:
        self._a_second = a_second
        self._at_once = self._left = max(1.0, at_once)
        self._at = time.monotonic()

    def take(self) -> bool:
        """Tell whether one more event may happen now, and count it."""
        now = time.monotonic()
        self._left = min(self._at_once, self._left + (now - self._at) * self._a_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class RuleUse:
    """Connections and bytes under one rule.  Not safe from several threads."""

    def __init__(self, rule: NetworkRule) -> None:
        self._rule = rule
        self._allowance = Allowance(rule.connections_per_second, rule.connections_per_second)
        self._connections = self._sent_bytes = self._received_bytes = 0

    def begin(self) -> str:
        """Count a connection; return why there must not be one more, else ""."""
        rule = self._rule
        if self._connections >= rule.connections:
            return f"{rule}: more than {rule.connections} connections at a time"
        if why := self._exhausted():
            return why
        if not self._allowance.take():
            return f"{rule}: more than {rule.connections_per_second:g} connections a second"
        self._connections += 1
        return ""

    def end(self) -> None:
        self._connections -= 1

    def count(self, sent_bytes: int, received_bytes: int) -> str:
        """Count bytes; return which cap on them is exceeded, else ""."""
        self._sent_bytes += sent_bytes
        self._received_bytes += received_bytes
        return self._exhausted()

    def _exhausted(self) -> str:
        rule = self._rule
        if rule.sent_bytes is not None and self._sent_bytes > rule.sent_bytes:
            return f"{rule}: more than {rule.sent_bytes} bytes sent"
        if rule.received_bytes is not None and self._received_bytes > rule.received_bytes:
            return f"{rule}: more than {rule.received_bytes} bytes received"
        return ""
