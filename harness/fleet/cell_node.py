"""`CellNode`: the cells of one node, behind one method that takes and returns bytes.

Messages between a fleet and its nodes are frozen structs as msgpack, and never a pickle.  They carry
the frames of a daemon (harness/sandbox/remote/frames.py).  Both sides limit the size of a message
before they decode it, and refuse fields and types that are not declared here.
"""

import contextlib
import hashlib
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from ...policies.closing import Closing
from ...policies.errors import (
    BusyError,
    CellwrightError,
    InternalError,
    LauncherLost,
    PolicyError,
)
from ...policies.policy import Policy
from ...runner.audit.log import AuditLog
from ...runner.concurrency import NEVER
from ...runner.messages import decode, encode
from ...runner.settings import PoolSettings, SessionSettings
from ..sandbox.remote import frames
from ..sandbox.remote.call_frames import failure_of
from ..sandbox.remote.frames import Execute, OpenSession
from ..sandbox.sandbox import Sandbox
from ..sandbox.sandbox_arguments import HostSettings
from ..servers.daemon.quotas import QuotaSettings, ServeLimits, TenantQuota
from ..servers.daemon.service import OpenedSessions, Service
from ..servers.served_requests import KeptAnswer, KeptAnswers, KeptLimits

if TYPE_CHECKING:
    from ..sandbox.packages.package_store import PackageStore

VERSION = 1
MOST_BYTES = 65 * 1024 * 1024  # bytes of a message; a daemon's frames have the same limit
MOST_KEY = 256  # characters
_Key = Annotated[str, Meta(min_length=1, max_length=MOST_KEY)]

# Terminals and ports are missing, because descriptors cannot leave their host.
NodeRequest = (
    frames.Execute | frames.CompileProgram | frames.JudgeProgram
    | frames.Describe | frames.AwaitSettled | frames.OpenSession | frames.CheckSession
    | frames.ListSessionFiles | frames.Download | frames.TakeSnapshot | frames.ForkSession
    | frames.ExtendSession | frames.CloseSession
)  # fmt: skip
NodeReply = (
    frames.Executed | frames.Compiled | frames.Judged
    | frames.Description | frames.Opened | frames.LostReason | frames.Files
    | frames.Content | frames.Done | frames.Failure
)  # fmt: skip


class _FleetFrame(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True
):
    pass


class NodeCall(_FleetFrame, frozen=True):
    """One request to a node; two calls with one key are the same call, which the node runs once."""

    version: int
    key: _Key
    request: NodeRequest


class Answered(_FleetFrame, frozen=True):
    """The call ended; `is_repeated`: an earlier call with the same key had this answer."""

    reply: NodeReply
    is_repeated: bool = False


class NotBegun(_FleetFrame, frozen=True):
    """Nothing of the call has run, so that it can be tried elsewhere."""

    failure: frames.Failure


class Forgotten(_FleetFrame, frozen=True):
    """The call began earlier, and its outcome is no longer kept."""


NodeAnswer = Answered | NotBegun | Forgotten


class NodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of a node.

    slots: calls that it runs at once
    pool: cells that wait ready
    sessions: sessions that live at once
    audit: the path of the trail, empty for none; `{node}` in it becomes the name of the node
    cgroup_root: a directory in which to make cgroups, empty for one that is found
    find_links, index: a folder of wheels, empty for none; whether the index of packages is asked, too
    keys, key_bytes: how many outcomes are kept by key, and their bytes
    """

    name: str
    policy: Policy
    slots: Annotated[int, Meta(ge=1, le=4096)]
    pool: int
    sessions: int
    audit: str = ""
    cgroup_root: str = ""
    find_links: str = ""
    index: bool = True
    keys: int = 10_000
    key_bytes: int = 64 * 1024 * 1024


def packed_message(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message; raises PolicyError if it is longer than a node reads."""
    try:
        data = encode(message)
    except (UnicodeEncodeError, TypeError, OverflowError) as error:
        raise PolicyError(f"fleet: an argument cannot be sent: {error}") from None
    if len(data) > MOST_BYTES:
        raise PolicyError(f"fleet: the arguments take {len(data)} bytes, at most {MOST_BYTES}")
    return data


def message_of(data: object, kind: Any) -> Any:
    """Return the message in `data`; raises InternalError for anything but bytes of that kind."""
    if not isinstance(data, bytes):
        raise InternalError(f"a message of a fleet must be bytes, got {type(data).__name__}")
    if len(data) > MOST_BYTES:
        raise InternalError(f"a message of a fleet has {len(data)} bytes, at most {MOST_BYTES}")
    try:
        return decode(data, kind)
    except msgspec.DecodeError as error:
        raise InternalError(f"invalid message in a fleet: {error}") from None


class NodeGone(Exception):  # noqa: N818 - what happened
    """The node has ended, or does not answer: the message says why. Its last call may have run."""


class NodeAway(Exception):  # noqa: N818
    """The node could not be reached for a moment: the same call, with its key, can be sent again."""


class FleetNode(Protocol):
    """A `CellNode` somewhere else."""

    @property
    def name(self) -> str: ...

    def ask(self, data: bytes, timeout: float) -> bytes:
        """Send a message and return the answer to it; `timeout` in seconds.

        Raises NodeGone or NodeAway.
        """

    def close(self) -> None:
        """End the cells of the node, and the node itself."""


_LIFETIME_SECONDS = 86_400.0
_KEYS_PER_OUTCOME = 10  # keys kept without an outcome for each key with one
_RUNS = (Execute, frames.CompileProgram, frames.JudgeProgram)  # requests that take a slot
_FORGOTTEN = encode(Forgotten())


class CellNode(Closing):
    """Owns the cells of a node; safe from many threads.

    `make` makes its sandbox, by default of the settings.  Raises what making a `Sandbox` raises.
    """

    def __init__(self, settings: NodeSettings, make: Callable[[], Sandbox] | None = None) -> None:
        self._slots = threading.BoundedSemaphore(settings.slots)
        self._keys: KeptAnswers[bytes] = KeptAnswers(
            len, KeptLimits(settings.keys, settings.key_bytes),
            most_forgotten=settings.keys * _KEYS_PER_OUTCOME,
        )  # fmt: skip
        self._closing = contextlib.ExitStack()
        # Refuse a new session instead of ending the longest idle one.
        quota = QuotaSettings(sessions=settings.sessions)
        self._service = Service(
            settings.policy, make or (lambda: self._made(settings)), (settings.policy.name,),
            ServeLimits(), _LIFETIME_SECONDS, OpenedSessions(TenantQuota(settings.name, quota)),
        )  # fmt: skip
        self._closing.callback(self._service.close)
        self._service.start()

    def _made(self, settings: NodeSettings) -> Sandbox:
        audit: AuditLog | bool = False
        if settings.audit:
            path = settings.audit.replace("{node}", settings.name)
            audit = self._closing.enter_context(AuditLog(0, path=path))
            self._closing.callback(self._service.close)  # before its trail
        return Sandbox(
            policy=settings.policy,
            pool=PoolSettings(
                size=settings.pool, low_water=min(1, settings.pool), running=settings.slots
            ),
            sessions=SessionSettings(alive=settings.sessions),
            audit=audit,
            host=HostSettings(
                cgroup_root=settings.cgroup_root or None, package_store=_packages_of(settings)
            ),
        )

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a message; never raises, so that the engine has no exception to pickle.

        If this fails itself, for example for lack of memory, the call's outcome is reported as unknown.
        """
        try:
            return self._answer(data)
        except Exception as error:  # noqa: BLE001 - the engine must not see it
            traceback.print_exception(error)
            return _FORGOTTEN

    def _answer(self, data: bytes) -> bytes:
        try:
            call = message_of(data, NodeCall)
            if call.version != VERSION:
                raise PolicyError(
                    f"fleet: this node speaks version {VERSION}, got {call.version}",
                    "install the same version of cellwright on every host",
                )
        except CellwrightError as error:
            return encode(NotBegun(failure_of(error)))
        digest = hashlib.blake2b(data).digest()
        known, is_new = self._keys.begin(call.key, digest)
        if is_new:
            return self._first(call)
        if known.digest != digest:
            return encode(NotBegun(failure_of(_another(call.key))))
        return _again(known)

    def _first(self, call: NodeCall) -> bytes:
        try:
            answer = self._answered(call.request)
            data = encode(answer)
        except BaseException:
            self._keys.end(call.key, None)  # wakes calls that wait for it
            raise
        if len(data) > MOST_BYTES:
            too_long = PolicyError(
                f"the result takes {len(data)} bytes, a fleet carries at most {MOST_BYTES}",
                "collect fewer files, or lower limits.output_bytes",
            )
            data = encode(Answered(failure_of(too_long)))
        self._keys.end(call.key, data, is_kept=not isinstance(answer, NotBegun))
        return data

    def _answered(self, request: msgspec.Struct) -> "NodeAnswer":
        try:
            with self._slot(request):
                return Answered(self._service.answer(request, _Router()))  # type: ignore[arg-type]
        except _FullError:
            return NotBegun(failure_of(BusyError("every cell of this node is in use")))
        except Exception as error:  # noqa: BLE001 - each becomes a frame
            failure = failure_of(error)
            return NotBegun(failure) if _never_began(request, error) else Answered(failure)

    @contextlib.contextmanager
    def _slot(self, request: msgspec.Struct) -> Iterator[None]:
        if not isinstance(request, _RUNS):
            yield
            return
        if not self._slots.acquire(blocking=False):
            raise _FullError
        try:
            yield
        finally:
            self._slots.release()

    def close(self) -> None:
        self._closing.close()


def _packages_of(settings: NodeSettings) -> "PackageStore | None":
    """Return the store that the settings describe; None for that of the host's user."""
    if settings.index and not settings.find_links:
        return None
    from ..sandbox.packages.package_store import PackageStore  # seldom needed

    return PackageStore(find_links=settings.find_links or None, index=settings.index)


class _FullError(Exception):
    pass


class _Router:
    """The requester of all calls: it cannot cancel, and bounds its own requests."""

    def fileno(self) -> int:
        return NEVER

    def weigh(self, extra: int) -> None:
        return

    def on_output(self, stream: str, data: bytes) -> None:
        raise InternalError("a call of a fleet has no stream of output")

    def terminal_quota(self) -> AbstractContextManager[None]:
        return nullcontext()

    def lend(self, frame: msgspec.Struct, terminal: int) -> None:
        raise InternalError("a node of a fleet lends no terminals")

    def is_gone(self) -> bool:
        return False


def _never_began(request: msgspec.Struct, error: Exception) -> bool:
    """Tell whether nothing of a call has run that raised `error`, so that another node may try.

    A ClosedError does not tell that: programs that run when a sandbox is closed raise it, too.
    """
    if isinstance(error, LauncherLost):
        return not error.cell_began
    is_placed = isinstance(request, OpenSession) or (
        isinstance(request, _RUNS) and not getattr(request, "session", "")
    )
    return is_placed and isinstance(error, BusyError)


def _another(key: str) -> PolicyError:
    return PolicyError(
        f"key: {key[:64]!r} was the key of a call with other arguments", "use another key"
    )


def _again(known: KeptAnswer[bytes]) -> bytes:
    """Return the outcome of a call that began earlier, and wait for it if it still runs."""
    outcome = known.answer.result()
    if outcome is None:
        return _FORGOTTEN
    answer = message_of(outcome, Answered | NotBegun)
    if isinstance(answer, NotBegun):
        return outcome
    return encode(msgspec.structs.replace(answer, is_repeated=True))
