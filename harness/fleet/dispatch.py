"""`Dispatch`: sends requests to nodes, each call to one, and repeats only what has not begun."""

import contextlib
import random
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...policies.closing import Closing
from ...policies.errors import (
    BusyError,
    CellwrightError,
    InternalError,
    LauncherLost,
    NodeLost,
    OutcomeUnknown,
    PolicyError,
)
from ..sandbox.remote.failures import error_of
from ..sandbox.remote.frames import Executed, Failure, Opened
from .messages import (
    VERSION,
    Answered,
    NodeAnswer,
    NodeCall,
    NodeReply,
    NodeRequest,
    NotBegun,
    message_of,
    packed_message,
)
from .nodes import FleetNode, NodeAway, NodeGone
from .router import Router, RouterLimits, Wanted

_KEYS = 100_000  # keys of callers whose node is remembered
# Seconds before a node that could not be reached is asked again; after the last it counts as lost.
RECONNECT_SECONDS = (0.1, 0.5, 2.0)


class Dispatch(Closing):
    """Requests to nodes, which it closes at the end; safe from many threads.

    `slots`: calls that each node runs at once.  `answer_seconds`: how long a node may take to answer
    before it counts as lost.  `on_retry` is called before a call is sent to another node.
    """

    def __init__(
        self, nodes: Sequence[FleetNode], slots: int, limits: RouterLimits,
        on_retry: Callable[[], None] = lambda: None, chance: random.Random | None = None,
    ) -> None:  # fmt: skip
        self.nodes = {node.name: node for node in nodes}
        if not self.nodes or len(self.nodes) != len(nodes):
            raise PolicyError("nodes: must be at least one, each with a name of its own")
        self.router = Router(dict.fromkeys(self.nodes, slots), limits, chance)
        self.slots = slots * len(nodes)
        self.answer_seconds = 120.0
        self.reconnect_seconds = RECONNECT_SECONDS
        self._ended = threading.Event()
        self._on_retry = on_retry
        self._lock = threading.Lock()
        self._sent: OrderedDict[str, str] = OrderedDict()  # key of a caller -> node

    def run(self, request: NodeRequest, wanted: Wanted, key: str | None = None) -> NodeReply:
        """Run a call on a node with a free slot, and return its reply.

        A call that its node could not begin is sent to another one, except those with a `key` and
        those that want one node.  With a key, a later call goes to the node that had the first.

        Raises what `Router.lease` raises; OutcomeUnknown if the call may have begun on a node that was
        lost, or began and is forgotten; and the error for which it could not begin.
        """
        if key is not None:
            wanted = wanted._replace(node=self._node_of(key))
        data = packed_message(NodeCall(VERSION, key or _new_key(), request))
        while True:
            with self._leased(wanted, key) as node:
                if key is None or (other := self._remember(key, node)) == node:
                    answer = self._exchange(node, data)
                else:
                    wanted = wanted._replace(node=other)  # another thread was first
                    continue
            if not isinstance(answer, NotBegun):
                return self._noted(_reply_of(answer, node), node, wanted)
            # A second call with the key waits for this node, so the first must not run elsewhere.
            wanted = self._elsewhere(wanted, node, answer, is_bound=key is not None)

    def ask(self, request: NodeRequest, node: str) -> NodeReply:
        """Send a request that needs no slot to one node; raises NodeLost, and as `run` does."""
        if why := self.router.why_lost(node):
            raise NodeLost(f"the node {node} was lost: {why}", node=node)
        answer = self._exchange(node, packed_message(NodeCall(VERSION, _new_key(), request)))
        if isinstance(answer, NotBegun):
            raise error_of(answer.failure)
        return _reply_of(answer, node)

    def open(self, request: NodeRequest, wanted: Wanted) -> tuple[str, NodeReply]:
        """Send a request to the node that a call would go to, or to another one if that has no room;
        return the node, too.  Raises as `run` does."""
        data = packed_message(NodeCall(VERSION, _new_key(), request))
        while True:
            with self.router.lease(wanted) as node:
                answer = self._exchange(node, data)
            if not isinstance(answer, NotBegun):
                return node, self._noted(_reply_of(answer, node), node, wanted)
            wanted = self._elsewhere(wanted, node, answer, is_bound=False)

    def close(self) -> None:
        """End every node; calls that wait raise ClosedError."""
        self._ended.set()
        self.router.close()
        for node in self.nodes.values():
            node.close()

    def _elsewhere(self, wanted: Wanted, node: str, answer: NotBegun, *, is_bound: bool) -> Wanted:
        """Return what a call wants that `node` could not begin; raises why, if it cannot move."""
        error = error_of(answer.failure)
        if is_bound or wanted.node or not isinstance(error, BusyError | LauncherLost):
            raise error
        self._on_retry()
        return wanted._replace(avoided=wanted.avoided | {node})

    def _exchange(self, node: str, data: bytes) -> NodeAnswer:
        """Send a message and return the answer; raises OutcomeUnknown if the node is lost meanwhile."""
        why = ""
        for pause in (*self.reconnect_seconds, 0.0):
            try:
                reply = self.nodes[node].ask(data, self.answer_seconds)
            except NodeAway as error:
                why = str(error)
                self._ended.wait(pause)  # the node knows the key, should the call have begun
            except NodeGone as error:
                why = str(error)
                break
            else:
                answer: NodeAnswer = message_of(reply, NodeAnswer)
                return answer
        self.router.lose(node, why)
        raise _unknown(node, why)

    def _noted(self, reply: NodeReply, node: str, wanted: Wanted) -> NodeReply:
        """Remember the packages of a call that ran, and return its reply."""
        if wanted.packages and isinstance(reply, Executed | Opened):
            self.router.note_packages(node, wanted.packages)
        return reply

    @contextlib.contextmanager
    def _leased(self, wanted: Wanted, key: str | None) -> Iterator[str]:
        """Hold a slot; a key whose node is lost meanwhile has an outcome that is unknown."""
        with contextlib.ExitStack() as stack:
            try:
                node = stack.enter_context(self.router.lease(wanted))
            except NodeLost:
                if key is None or wanted.node is None:
                    raise
                raise _unknown(wanted.node, self.router.why_lost(wanted.node)) from None
            yield node

    def _node_of(self, key: str) -> str | None:
        """Return the node that had a call with this key; raises OutcomeUnknown if it is lost."""
        with self._lock:
            node = self._sent.get(key)
        if node and (why := self.router.why_lost(node)):
            raise _unknown(node, why)
        return node

    def _remember(self, key: str, node: str) -> str:
        """Note where a key goes, and return where it has gone."""
        with self._lock:
            known = self._sent.setdefault(key, node)
            self._sent.move_to_end(key)
            while len(self._sent) > _KEYS:
                self._sent.popitem(last=False)
            return known


def reply_as(reply: NodeReply, kind: type[Any]) -> Any:
    """Return the reply of that type; raises the error that it tells, InternalError for another type."""
    if isinstance(reply, Failure):
        raise error_of(reply)
    if not isinstance(reply, kind):
        raise InternalError(f"a node answered with {type(reply).__name__}")
    return reply


def _new_key() -> str:
    return secrets.token_hex(16)


def _reply_of(answer: NodeAnswer, node: str) -> NodeReply:
    if isinstance(answer, Answered):
        return answer.reply
    raise OutcomeUnknown(
        f"the outcome is unknown: the call ran on the node {node}, which no longer keeps its outcome",
        node=node,
    )


def _unknown(node: str, why: str) -> CellwrightError:
    return OutcomeUnknown(
        f"the outcome is unknown: the call was sent to the node {node}, which was lost: {why}",
        "use another key, or none, to run it again; effects outside its cell may then happen twice",
        node=node,
    )
