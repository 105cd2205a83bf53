"""`LadderLauncher`: cgroups, and a launcher that forks up to each stage instead of forking cells."""

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from ..policies.errors import LaunchError
from ..policies.policy import OPTIONAL_LAYERS, Policy
from ..runner import channel
from ..runner.cgroups import CgroupTree, open_tree
from ..runner.cgroups.cgroup_tree import Caps, Cgroup
from ..runner.host.ids import id_for
from ..runner.host.plans import plan_for, probe_host
from ..runner.host.runtime import find_runtime
from ..runner.launching.launcher_process import Launcher
from ..runner.launching.spawn import Spawned, interpreter
from ..runner.messages import Boot, Failed, decode
from .ladder_messages import Order, TimesByStage

_PATIENCE = 600.0
_ANSWER_BYTES = 64 * 1024 * 1024


class LadderLauncher:
    """A launcher whose module is `stages.py`; raises LaunchError where that cannot be had."""

    def __init__(self, launcher: Launcher, tree: CgroupTree, policy: Policy) -> None:
        # What the host lacks is a stage that is absent, not a refusal.
        policy = msgspec.structs.replace(policy, optional_layers=OPTIONAL_LAYERS)
        self._plan = plan_for(policy, probe_host(tree.missing))
        self._launcher = launcher
        self._tree = tree
        runtime = find_runtime(interpreter())
        uid = os.geteuid() or id_for(None)
        tree.admit(launcher.keeper, uid)
        launcher.send_boot(
            Boot(
                self._plan, runtime.files, runtime.links, runtime.hidden, uid, tree.joined_by_write
            )
        )
        launcher.await_booted()

    def measure(self, rounds: int) -> TimesByStage:
        """Return what every stage cost in so many rounds."""
        cgroup = self.cgroup("cell-0")
        order = msgspec.json.encode(Order(rounds, cgroup.into_cgroup))
        try:
            channel.send(self._launcher._sock, order, cgroup.descriptors)
            return msgspec.json.decode(self._answer(), type=TimesByStage)
        finally:
            cgroup.close_descriptors()
            cgroup.kill()
            cgroup.remove()

    def _answer(self) -> bytes:
        sock = self._launcher._sock
        if not select.select([sock], [], [], _PATIENCE)[0]:
            raise LaunchError(f"the ladder was not measured within {_PATIENCE:g} s")
        frame = channel.Receiver(sock, _ANSWER_BYTES).receive_whole()
        if not frame:
            raise LaunchError("the ladder failed: its launcher ended", 'run "cellwright doctor"')
        if not frame.startswith(b"{"):
            raise LaunchError(f"the ladder failed: {decode(frame, Failed).message}")
        return frame

    def cgroup(self, name: str) -> Cgroup:
        """Make the cgroup of a cell."""
        plan = self._plan
        return self._tree.create(
            name, Caps(plan.memory_bytes, plan.cpus, plan.processes, plan.socket_bytes)
        )

    def absent(self) -> dict[str, str]:
        """Return the stages that this host or user has not, and why."""
        missing = {why for why in self._tree.missing.values() if why}
        absent = {"cgroup": "; ".join(sorted(missing))} if missing else {}
        if not self._plan.landlock_abi:
            absent["landlock"] = "the kernel has none"
        if not self._plan.refusals:
            absent["listener"] = "the kernel has none"
        return absent


@contextmanager
def ladder_launcher(policy: Policy) -> Iterator[LadderLauncher]:
    """Start the launcher of the ladder, and leave nothing of it behind."""
    launcher = Launcher(Spawned(interpreter(), "cellwright.benchmarks.stages"))
    tree = open_tree(launcher.keeper)
    try:
        yield LadderLauncher(launcher, tree, policy)
    finally:
        launcher.close()
        tree.close()
