"""`CellNode`: the cells of one node, behind one method that takes and returns bytes."""

import contextlib
import hashlib
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import msgspec

from ...policies.closing import Closing
from ...policies.errors import (
    BusyError,
    CellwrightError,
    InternalError,
    LauncherLost,
    PolicyError,
)
from ...runner.audit.log import AuditLog
from ...runner.concurrency import NEVER
from ...runner.messages import encode
from ...runner.settings import PoolSettings, SessionSettings
from ..sandbox.remote.failures import failure_of
from ..sandbox.remote.frames import Execute, OpenSession
from ..sandbox.sandbox import Sandbox
from ..servers.daemon.limits import ServeLimits
from ..servers.daemon.quotas import QuotaSettings, TenantQuota
from ..servers.daemon.service import Service
from .key_memory import KeptCall, KeyMemory
from .messages import (
    MOST_BYTES,
    VERSION,
    Answered,
    Forgotten,
    NodeCall,
    NodeSettings,
    NotBegun,
    message_of,
)

if TYPE_CHECKING:
    from ..sandbox.packages.store import PackageStore
    from .messages import NodeAnswer

_LIFETIME_SECONDS = 86_400.0
_FORGOTTEN = encode(Forgotten())


class CellNode(Closing):
    """Owns the cells of a node; safe from many threads.

    `make` makes its sandbox, by default of the settings.  Raises what making a `Sandbox` raises.
    """

    def __init__(self, settings: NodeSettings, make: Callable[[], Sandbox] | None = None) -> None:
        self._slots = threading.BoundedSemaphore(settings.slots)
        self._keys = KeyMemory(settings.keys, settings.key_bytes)
        self._closing = contextlib.ExitStack()
        # Refuses a session where the sandbox would end the one that was idle longest.
        quota = QuotaSettings(sessions=settings.sessions)
        self._service = Service(
            settings.policy, make or (lambda: self._made(settings)), (settings.policy.name,),
            ServeLimits(), _LIFETIME_SECONDS, TenantQuota(settings.name, quota), self._sessions,
        )  # fmt: skip
        self._closing.callback(self._service.close)
        self._service.start()

    def _sessions(self) -> int:
        return self._service.sessions()

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
            cgroup_root=settings.cgroup_root or None,
            package_store=_packages_of(settings),
        )

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a message; never raises, so that the engine has no exception to pickle.

        If this fails itself, for lack of memory, say, the outcome of the call is told to be unknown.
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
        known, is_new = self._keys.begin(call.key, hashlib.blake2b(data).digest())
        if is_new:
            return self._first(call)
        if known.digest != hashlib.blake2b(data).digest():
            return encode(NotBegun(failure_of(_another(call.key))))
        return _again(known)

    def _first(self, call: NodeCall) -> bytes:
        try:
            answer = self._answered(call.request)
            data = encode(answer)
        except BaseException:
            self._keys.end(call.key, b"")  # wakes calls that wait for it
            raise
        if len(data) > MOST_BYTES:
            too_long = PolicyError(
                f"the result takes {len(data)} bytes, a fleet carries at most {MOST_BYTES}",
                "collect fewer files, or lower limits.output_bytes",
            )
            data = encode(Answered(failure_of(too_long)))
        if isinstance(answer, NotBegun):
            self._keys.undo(call.key, data)
        else:
            self._keys.end(call.key, data)
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
        if not isinstance(request, Execute):
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
    from ..sandbox.packages.store import PackageStore  # seldom needed

    return PackageStore(find_links=settings.find_links or None, index=settings.index)


class _FullError(Exception):
    pass


class _Router:
    """The requester of all calls: it cannot cancel, and bounds what it sends itself."""

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
        isinstance(request, Execute) and not request.session
    )
    return is_placed and isinstance(error, BusyError)


def _another(key: str) -> PolicyError:
    return PolicyError(
        f"key: {key[:64]!r} was the key of a call with other arguments", "use another key"
    )


def _again(known: KeptCall) -> bytes:
    """Return the outcome of a call that began earlier, and wait for it if it still runs."""
    known.is_over.wait()
    if not known.outcome:
        return _FORGOTTEN
    answer = message_of(known.outcome, Answered | NotBegun)
    if isinstance(answer, NotBegun):
        return known.outcome
    return encode(msgspec.structs.replace(answer, is_repeated=True))
