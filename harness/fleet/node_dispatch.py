"""`Dispatch`: sends each call to one node, and repeats only calls that have not begun.

`FleetSession`: a session on one node of a fleet.
"""

import contextlib
import os
import random
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from ...policies import errors
from ...policies.closing import Closing
from ...policies.policy import Limits
from ...runner.concurrency import NEVER
from ...runner.requests.request import OnOutput
from ...runner.requests.result import SandboxResult
from ..sandbox.parameters import CallArguments, TerminalArguments
from ..sandbox.remote.attached_session import AttachedSession
from ..sandbox.remote.call_frames import error_of
from ..sandbox.remote.connections import Requests
from ..sandbox.remote.frames import Executed, Failure, ForkSession, Opened
from ..sandbox.sessions.session import Session
from ..servers.client_quota import OwnedTable
from .cell_node import (
    VERSION,
    Answered,
    FleetNode,
    NodeAnswer,
    NodeAway,
    NodeCall,
    NodeGone,
    NodeReply,
    NodeRequest,
    NotBegun,
    message_of,
    packed_message,
)
from .router import Router, RouterLimits, Wanted

if TYPE_CHECKING:
    from ..sandbox.network.exposed_ports import ExposedPort
    from ..sandbox.programs.terminal import Terminal

_KEYS = 100_000  # keys of callers whose node is remembered
# Pauses before an unreachable node is asked again; after the last one it counts as lost.
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
            raise errors.PolicyError("nodes: must be at least one, each with a name of its own")
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
                    wanted = wanted._replace(node=other)  # another thread has already done it
                    continue
            if not isinstance(answer, NotBegun):
                return self._noted(_reply_of(answer, node), node, wanted)
            # A second call with the key waits for this node, so the first call must not move to another
            # node.
            wanted = self._elsewhere(wanted, node, answer, is_bound=key is not None)

    def ask(self, request: NodeRequest, node: str) -> NodeReply:
        """Send a request that needs no slot to one node; raises NodeLost, and as `run` does."""
        if why := self.router.why_lost(node):
            raise errors.NodeLost(f"the node {node} was lost: {why}", node=node)
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
        """Return the requirements of a call that `node` could not begin; raises an error if it
        cannot move."""
        error = error_of(answer.failure)
        if is_bound or wanted.node or not isinstance(error, errors.BusyError | errors.LauncherLost):
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
                self._ended.wait(pause)  # if the call has begun, the node knows its key
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
            except errors.NodeLost:
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
        raise errors.InternalError(f"a node answered with {type(reply).__name__}")
    return reply


def _new_key() -> str:
    return secrets.token_hex(16)


def _reply_of(answer: NodeAnswer, node: str) -> NodeReply:
    if isinstance(answer, Answered):
        return answer.reply
    raise errors.OutcomeUnknown(
        f"the outcome is unknown: the call ran on the node {node}, which no longer keeps its outcome",
        node=node,
    )


def _unknown(node: str, why: str) -> errors.CellwrightError:
    return errors.OutcomeUnknown(
        f"the outcome is unknown: the call was sent to the node {node}, which was lost: {why}",
        "use another key, or none, to run it again; effects outside its cell may then happen twice",
        node=node,
    )


_R = TypeVar("_R", bound=msgspec.Struct)


class FleetLink(NamedTuple):
    """How a session reaches its fleet: `ask` sends a request to a node on behalf of a tenant, and
    `sessions` counts those of each tenant."""

    ask: Callable[[str, str, Any], NodeReply]
    sessions: "OwnedTable[str, FleetSession]"


class NodeRequests(Requests):
    """Requests to one node of a fleet, on behalf of one tenant."""

    def __init__(self, fleet: FleetLink, node: str, tenant: str, session: str) -> None:
        self._fleet, self._node, self._tenant, self._session = fleet, node, tenant, session

    def ask(
        self, request: msgspec.Struct, kind: type[_R], on_output: OnOutput | None = None,
        cancel: int = NEVER,
    ) -> _R:  # fmt: skip
        """Return the reply; the call goes on if `cancel` is readable.  Raises SessionNodeLost."""
        if on_output is not None:
            raise errors.PolicyError("on_output: not available in a fleet")
        try:
            reply = self._fleet.ask(self._node, self._tenant, request)
        except errors.NodeLost as error:
            raise errors.SessionNodeLost(
                f"the session is lost with its node {self._node}: {error.what}",
                "open another one",
                node=self._node,
            ) from None
        if isinstance(reply, Failure):
            failure = error_of(reply)
            if isinstance(failure, errors.SessionLost):  # such as one that was idle for too long
                self._fleet.sessions.pop(self._session)
            raise failure
        if not isinstance(reply, kind):
            raise errors.InternalError(f"the node answered with {type(reply).__name__}")
        return reply


class FleetSession(AttachedSession):
    """A session whose cell is on the node `node`; made by `Fleet.session`.

    If the node is lost `lost` says so, and every call raises SessionNodeLost.
    """

    def __init__(
        self, fleet: FleetLink, node: str, tenant: str, opened: Opened, limits: Limits
    ) -> None:
        super().__init__(NodeRequests(fleet, node, tenant, opened.session), opened, limits)
        self.node = node
        self.tenant = tenant
        self._fleet = fleet

    @property
    def lost(self) -> str:
        try:
            return super().lost
        except errors.NodeLost as error:
            return error.what

    @property
    def expired(self) -> str:
        try:
            return super().expired
        except errors.NodeLost:
            return ""

    def _execute(self, given: CallArguments) -> SandboxResult:
        if given.on_output is not None:
            raise errors.PolicyError("on_output: not available in a fleet")
        return super()._execute(given)

    def expose(
        self, port: int, *, path: str | os.PathLike[str] | None = None, host_port: int | None = None
    ) -> "ExposedPort":
        raise errors.PolicyError(
            "expose: not available in a fleet", "a port stays on the host of its cell"
        )

    def _terminal(self, given: TerminalArguments) -> "Terminal":
        raise errors.PolicyError("terminal: not available in a fleet", "use run or start_command")

    def branch(
        self, n: int = 1, reseed: bool = False, *, replay: bool = True
    ) -> tuple[Session, ...]:
        raise errors.PolicyError(
            "branch: not available in a fleet", "fork() replays the calls of the session"
        )

    def pause(self) -> str:
        raise errors.PolicyError(
            "pause: not available in a fleet", "the state would stay on the host of its cell"
        )

    def fork(self) -> Session:
        with self._fleet.sessions.room(self.tenant) as put:
            opened = self._requests.ask(ForkSession(self._key), Opened)
            branch = FleetSession(self._fleet, self.node, self.tenant, opened, self._limits)
            return put(opened.session, branch)

    def close(self) -> None:
        """End the session; harmless if it or its node has ended."""
        try:
            super().close()
        except (errors.NodeLost, errors.ClosedError, errors.LaunchError):
            return
        finally:
            self._fleet.sessions.pop(self._key)
