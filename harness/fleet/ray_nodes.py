"""Nodes on Ray: one actor for each, and methods that take and return bytes.

Calls go from this process to the actor's directly; Ray's scheduler only places the actors.  Ray
pickles the class of the actor, by its name, and nothing else: it passes bytes as they are, and no
method of the actor raises.
"""

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from ...policies.errors import CellwrightError, LaunchError, PolicyError
from ...policies.extras import how_to_install
from ...runner.messages import encode
from ..sandbox.remote.failures import error_of, failure_of
from ..sandbox.remote.frames import Done, Failure
from .cell_node import CellNode
from .messages import NodeSettings, message_of
from .nodes import NodeAway, NodeGone

try:
    import ray
    import ray.exceptions
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise PolicyError(f"Ray cannot be imported: {error}", how_to_install("fleet")) from error

_CONTROL_THREADS = 8  # of an actor, beside those of its slots: requests that run no program
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
        with contextlib.suppress(Exception):  # such as a cluster that has ended
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
