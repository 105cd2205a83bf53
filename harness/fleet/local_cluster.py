"""`LocalCluster`: a Ray cluster on the loopback of this host, for trials, tests and benchmarks."""

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from ...policies.closing import Closing
from ...policies.errors import PolicyError
from ...policies.extras import how_to_install

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes Ray use 127.0.0.1 instead of another address
    "RAY_prestart_worker_first_driver": "0",
    "RAY_raylet_start_wait_time_s": "180",  # on a busy host the default of 10 s is too short
}
_STORE_BYTES = 80 * 1024 * 1024  # nothing of a fleet is kept there; Ray wants 75 MiB or more


class LocalCluster(Closing):
    """`nodes` Ray nodes, which this process is connected to; all ports are on 127.0.0.1, and there is
    no dashboard.

    Raises PolicyError without the extra `fleet`, or if this process is connected to another cluster.
    """

    def __init__(self, nodes: int = 2) -> None:
        if nodes < 1:
            raise PolicyError(f"nodes: must be at least 1, got {nodes}")
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            import ray
            from ray._private import ray_constants
            from ray._private.utils import get_ray_address_file
            from ray.cluster_utils import Cluster
        except ImportError as error:
            raise PolicyError(
                f"Ray cannot be imported: {error}", how_to_install("fleet")
            ) from error
        if ray.is_initialized():
            raise PolicyError("this process is connected to a Ray cluster", "call ray.shutdown()")
        ray_constants.ENABLE_RAY_CLUSTER = False  # Ray may have been imported before
        self._ray = ray
        self.directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: sockets
        # Ray writes the address of the cluster there, and makes only the directory of its node.
        os.makedirs(os.path.dirname(get_ray_address_file(None)), exist_ok=True)
        self._cluster = Cluster()
        self._nodes: list[Any] = []
        try:
            for _ in range(nodes):
                self._add()
            ray.init(self._cluster.address, log_to_driver=False, configure_logging=False)
        except BaseException:
            self.close()
            raise

    def _add(self) -> None:
        self._nodes.append(
            self._cluster.add_node(
                num_cpus=1,
                object_store_memory=_STORE_BYTES,
                node_ip_address="127.0.0.1",
                include_dashboard=False,
                temp_dir=self.directory,
            )
        )

    @property
    def hosts(self) -> tuple[str, ...]:
        """The ids of its nodes; the name of a fleet's node begins with the first 8 characters."""
        return tuple(node.node_id for node in self._nodes)

    def processes(self, host: str) -> list[int]:
        """Return the pids of a node: Ray's processes, its raylet first, with actors and their cells."""
        (node,) = (each for each in self._nodes if each.node_id == host)
        return _with_descendants(node.all_processes["raylet"][0].process.pid)

    def scheduler(self) -> list[int]:
        """Return the pids of what schedules: the control service, and the raylet of each node."""
        control: int = self._nodes[0].all_processes["gcs_server"][0].process.pid
        return [control, *(self.processes(host)[0] for host in self.hosts)]

    def kill(self, host: str) -> None:
        """Kill every process of a node at once, as a loss of power would; not of the first node, which
        has the control service."""
        if host == self.hosts[0]:
            raise PolicyError("the first node has the control service", "kill another one")
        for pid in self.processes(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Disconnect, and end every process of the cluster."""
        self._ray.shutdown()
        self._cluster.shutdown()
        shutil.rmtree(self.directory, ignore_errors=True)


def _with_descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:  # it grows meanwhile
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the task has ended
                found += map(int, task.read_text().split())
    return found
