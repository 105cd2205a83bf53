"""Nodes on Ray: one actor for each, and methods that take and return bytes.

Calls go from this process to the actor's directly; Ray's scheduler only places the actors.  Ray
pickles the class of the actor, by its name, and nothing else: it passes bytes as they are, and no
method of the actor raises.

`LocalCluster`: a Ray cluster on the loopback of this host, for trials, tests and benchmarks.
"""

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...policies.closing import Closing
from ...policies.errors import CellwrightError, LaunchError, PolicyError
from ...policies.extras import how_to_install
from ...runner.messages import encode
from ..sandbox.remote.call_frames import error_of, failure_of
from ..sandbox.remote.frames import Done, Failure
from .cell_node import CellNode, NodeAway, NodeGone, NodeSettings, message_of

try:
    import ray
    import ray.exceptions
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise PolicyError(f"Ray cannot be imported: {error}", how_to_install("fleet")) from error

# An actor's threads for requests that run no program, in addition to its slots.
_CONTROL_THREADS = 8
_START_SECONDS = 120.0
_CLOSE_SECONDS = 30.0
_IN_SEQUENCE = {"max_restarts": 0, "max_task_retries": 0}  # Ray itself repeats nothing


class NodeActor:
    """The process of a node."""

    def __init__(self) -> None:
        self._node: CellNode | None = None

    def start(self, settings: bytes) -> bytes:
        """Make the cells, and return Done or Failure: an exception would be pickled."""
        try:
            self._node = CellNode(message_of(settings, NodeSettings))
        except Exception as error:  # noqa: BLE001 - becomes a frame
            return encode(failure_of(error))
        return encode(Done())

    def ask(self, data: bytes) -> bytes:
        assert self._node  # noqa: S101 - `start` came first
        return self._node.answer(data)

    def close(self) -> bytes:
        if self._node:
            self._node.close()
        return b""


class RayNode:
    """The node whose actor is `actor`."""

    def __init__(self, name: str, actor: Any) -> None:
        self._name = name
        self._actor = actor

    @property
    def name(self) -> str:
        return self._name

    def ask(self, data: bytes, timeout: float) -> bytes:
        try:
            answer: bytes = ray.get(self._actor.ask.remote(data), timeout=timeout)
        except ray.exceptions.ActorUnavailableError as error:
            raise NodeAway(_first_line(error)) from None
        except ray.exceptions.GetTimeoutError:
            raise NodeGone(f"no answer within {timeout:g} s") from None
        except ray.exceptions.RayError as error:
            raise NodeGone(_first_line(error)) from None
        return answer

    def start(self, settings: NodeSettings) -> None:
        """Make the cells; raises what making a Sandbox raises, LaunchError if the actor dies."""
        data = encode(msgspec.structs.replace(settings, name=self._name))
        try:
            told = ray.get(self._actor.start.remote(data), timeout=_START_SECONDS)
        except ray.exceptions.RayError as error:
            raise LaunchError(
                f"the node {self._name} did not start: {_first_line(error)}"
            ) from None
        reply = message_of(told, Done | Failure)
        if isinstance(reply, Failure):
            raise error_of(reply)

    def close(self) -> None:
        """End the cells, then the actor, which cannot be used again."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._actor.close.remote(), timeout=_CLOSE_SECONDS)
        with contextlib.suppress(Exception):  # for example, the cluster has ended
            ray.kill(self._actor, no_restart=True)


def start_nodes(settings: NodeSettings, nodes_per_host: int, resource: str | None) -> list[RayNode]:
    """Return a node on each host of the cluster that is alive, started; raises what `RayNode.start`
    raises, and PolicyError if there is no such host."""
    if not ray.is_initialized():
        raise PolicyError("fleet: not connected to a cluster", "call ray.init(...) first")
    hosts = [
        each["NodeID"] for each in ray.nodes()
        if each["Alive"] and (resource is None or resource in each["Resources"])
    ]  # fmt: skip
    if not hosts or nodes_per_host < 1:
        raise PolicyError(
            f"fleet: no node of the cluster is alive and has the resource {resource!r}"
        )
    nodes = [
        RayNode(f"{host[:8]}-{secrets.token_hex(4)}", _actor_on(host, settings.slots))
        for host in hosts
        for _ in range(nodes_per_host)
    ]
    _start_all(nodes, settings)
    return nodes


def _actor_on(host: str, slots: int) -> Any:
    return (
        ray.remote(NodeActor)
        .options(
            num_cpus=0,
            max_concurrency=slots + _CONTROL_THREADS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(host, soft=False),
            **_IN_SEQUENCE,
        )
        .remote()
    )


def _start_all(nodes: Sequence[RayNode], settings: NodeSettings) -> None:
    try:
        for node in nodes:
            node.start(settings)
    except CellwrightError:
        for node in nodes:
            node.close()
        raise


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes Ray use 127.0.0.1 instead of another address
    "RAY_prestart_worker_first_driver": "0",
    "RAY_raylet_start_wait_time_s": "180",  # on a busy host the default of 10 s is too short
}
_STORE_BYTES = 80 * 1024 * 1024  # a fleet stores nothing there, but Ray needs at least 75 MiB


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
        self.directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, for paths of sockets
        # Ray writes the cluster's address there, but makes only its node's directory.
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
        """Return the pids of the scheduler: the control service, and the raylet of each node."""
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
    for each in found:  # the list grows meanwhile
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the task has ended
                found += map(int, task.read_text().split())
    return found
