"""`Router`: which node a call goes to, and the queue of calls that wait for one.  It sends nothing."""

import contextlib
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...policies.errors import BusyError, ClosedError, NodeLost

PackageSet = frozenset[str]


class NodeLoad(NamedTuple):
    """A node as the router sees it: its free slots, and sets of packages that it has launchers for."""

    name: str
    free: int
    packages: Collection[PackageSet] = ()


def chosen(nodes: Sequence[NodeLoad], packages: PackageSet, chance: random.Random) -> str | None:
    """Return the name of a node with a free slot, None if no node has one.

    Nodes that have used this set of packages come first: another one would build it anew, which
    takes seconds.  Of two random ones the one with more free slots is taken, which is nearly as even
    as the best of all, and does not send every caller to the same node (Mitzenmacher, The Power of
    Two Choices in Randomized Load Balancing, 2001).
    """
    free = [node for node in nodes if node.free > 0]
    if packages:
        free = [node for node in free if packages in node.packages] or free
    if not free:
        return None
    return max(chance.sample(free, min(2, len(free))), key=lambda node: node.free).name


_MOST_SETS = 64  # package sets remembered for each node


class RouterLimits(NamedTuple):
    """queue: calls that wait for any node; node_queue: calls that wait for one node, which their
    session or key names; queue_seconds: how long a call waits before it raises BusyError."""

    queue: int = 1024
    node_queue: int = 128
    queue_seconds: float = 30.0


class Wanted(NamedTuple):
    """The requirements of a call for its node; `node`: only this one will do."""

    packages: PackageSet = frozenset()
    node: str | None = None
    avoided: frozenset[str] = frozenset()


class RouterState(NamedTuple):
    """`free`: slots by the name of each node that lives."""

    free: Mapping[str, int]
    lost: tuple[str, ...]
    waiting: int


class _RoutedNode:
    def __init__(self, slots: int) -> None:
        self.free = slots
        self.lost = ""  # why the node is lost; empty while it is not
        self.packages: OrderedDict[PackageSet, None] = OrderedDict()


class _Waiter:
    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.node: str | None = None
        self.error: Exception | None = None
        self.is_served = threading.Event()


class Router:
    """Counts the slots of nodes, by name; safe from many threads.

    A call is sent to a node only when it has a free slot there. So calls wait here, where they can
    still go to another node, and a lost node loses at most as many calls as it has slots.
    """

    def __init__(
        self, slots: Mapping[str, int], limits: RouterLimits, chance: random.Random | None = None
    ) -> None:
        self._limits = limits
        self._chance = chance or random.Random()  # noqa: S311 - balances load
        self._lock = threading.Lock()
        self._nodes = {name: _RoutedNode(count) for name, count in slots.items()}
        self._waiters: deque[_Waiter] = deque()
        self._closed = False

    @contextlib.contextmanager
    def lease(self, wanted: Wanted) -> Iterator[str]:
        """Hold a slot during the block, and yield the name of its node.

        Waits for one, in order.  Raises BusyError if the queue is full or the wait too long, NodeLost
        if the node that is wanted, or every node, is lost, ClosedError after `close`.
        """
        name = self._acquire(wanted)
        try:
            yield name
        finally:
            self._release(name)

    def lose(self, name: str, why: str) -> None:
        """Send no more calls to a node; waiting calls for it raise NodeLost."""
        with self._lock:
            self._nodes[name].lost = self._nodes[name].lost or why
            for waiter in list(self._waiters):
                if error := self._hopeless(waiter.wanted):
                    waiter.error = error
                    self._serve(waiter)
            self._serve_waiters()

    def note_packages(self, name: str, packages: PackageSet) -> None:
        """Remember that a node has used a set of packages: it has a launcher for it."""
        with self._lock:
            sets = self._nodes[name].packages
            sets[packages] = None
            sets.move_to_end(packages)
            while len(sets) > _MOST_SETS:
                sets.popitem(last=False)

    def why_lost(self, name: str) -> str:
        """Return why a node is lost; empty while it lives."""
        with self._lock:
            return self._nodes[name].lost

    def state(self) -> RouterState:
        """Return the free slots of each node, the lost nodes, and how many calls wait."""
        with self._lock:
            return RouterState(
                {name: node.free for name, node in self._nodes.items() if not node.lost},
                tuple(name for name, node in self._nodes.items() if node.lost),
                len(self._waiters),
            )

    def close(self) -> None:
        """Raise ClosedError in calls that wait, and in later ones."""
        with self._lock:
            self._closed = True
            for waiter in list(self._waiters):
                waiter.error = ClosedError("the fleet was closed")
                self._serve(waiter)

    def _acquire(self, wanted: Wanted) -> str:
        with self._lock:
            if self._closed:
                raise ClosedError("the fleet was closed")
            if error := self._hopeless(wanted):
                raise error
            if name := self._taken(wanted):
                return name
            self._check_queues(wanted)
            waiter = _Waiter(wanted)
            self._waiters.append(waiter)
        self._wait(waiter)
        assert waiter.node  # noqa: S101 - `_wait` raises otherwise
        return waiter.node

    def _wait(self, waiter: _Waiter) -> None:
        try:
            waiter.is_served.wait(self._limits.queue_seconds)
        except BaseException:  # for example KeyboardInterrupt
            self._give_up(waiter)
            raise
        with self._lock:
            if not waiter.is_served.is_set():
                self._waiters.remove(waiter)
                raise BusyError(
                    f"no cell was free within {self._limits.queue_seconds:g} s", "try again later"
                )
        if waiter.error:
            raise waiter.error

    def _give_up(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        if waiter.node:
            self._release(waiter.node)

    def _release(self, name: str) -> None:
        with self._lock:
            self._nodes[name].free += 1
            self._serve_waiters()

    def _serve_waiters(self) -> None:
        for waiter in list(self._waiters):
            if not any(node.free > 0 for node in self._nodes.values()):
                return
            if name := self._taken(waiter.wanted):
                waiter.node = name
                self._serve(waiter)

    def _serve(self, waiter: _Waiter) -> None:
        self._waiters.remove(waiter)
        waiter.is_served.set()

    def _taken(self, wanted: Wanted) -> str | None:
        """Take a slot, and return the name of its node; None if there is none now."""
        loads = [
            NodeLoad(name, node.free, node.packages) for name, node in self._nodes.items()
            if not node.lost and name not in wanted.avoided and wanted.node in (None, name)
        ]  # fmt: skip
        name = chosen(loads, wanted.packages, self._chance)
        if name:
            self._nodes[name].free -= 1
        return name

    def _hopeless(self, wanted: Wanted) -> Exception | None:
        """Return the error of a call for which no slot will ever be free."""
        if wanted.node and (why := self._nodes[wanted.node].lost):
            return NodeLost(f"the node {wanted.node} was lost: {why}", node=wanted.node)
        if all(node.lost for node in self._nodes.values()):
            return NodeLost("every node of the fleet was lost", "make another Fleet")
        if all(node.lost or name in wanted.avoided for name, node in self._nodes.items()):
            return BusyError("no node has a free cell", "try again later")
        return None

    def _check_queues(self, wanted: Wanted) -> None:
        same = sum(each.wanted.node == wanted.node for each in self._waiters)
        most = self._limits.node_queue if wanted.node else self._limits.queue
        if same >= most:
            whom = f"the node {wanted.node}" if wanted.node else "the fleet"
            raise BusyError(f"the queue of {whom} is full: {most} calls wait", "try again later")
