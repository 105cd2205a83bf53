"""`SandboxEgress`: the way of a sandbox's cells to the hosts that its policy names."""

import contextlib
import os
from typing import TYPE_CHECKING

from ...policies.policy import Policy
from ...runner.egress_process import EgressProcess
from ...runner.host.ids import id_for
from ...runner.living import new_socket_path
from ...runner.spawn import interpreter
from .network import OnChange, SandboxNetwork

if TYPE_CHECKING:
    from .network_control import NetworkControl


class SandboxEgress:
    """The egress process, the rules that it follows, and the socket by which a person changes them."""

    def __init__(self, policy: Policy, user: int | str | None, on_change: OnChange) -> None:
        """`user` is that of the cells; `on_change` records a change of the rules."""
        uid = 0 if os.geteuid() else id_for(user)
        self.process = EgressProcess(interpreter(), uid, new_socket_path())
        self.rules = SandboxNetwork(policy.network, self.process, on_change)
        self._name = policy.name
        self._control: NetworkControl | None = None

    def listen(self) -> None:
        """Let `cellwright network` change the rules, if the host has a place for the socket."""
        from .network_control import NetworkControl

        if self.process.control:
            with contextlib.suppress(OSError):
                self._control = NetworkControl(self.process.control, self._name, self.rules)

    def close(self) -> None:
        """End every connection."""
        if self._control:
            self._control.close()
        self.process.close()
