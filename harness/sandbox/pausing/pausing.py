"""`Pausing`: pauses the sessions of one sandbox, and resumes them in fresh cells."""

import contextlib
import hashlib
import mmap
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from ....policies.errors import PauseError
from ....policies.plan import FIXED_ADDRESSES, Plan
from ....runner.branching_process import BranchingProcess, CannotBranch
from ....runner.concurrency import ConcurrencyLimit
from ....runner.held_cell import HeldCell, Origin
from ....runner.session import SessionCell
from ....runner.session_pauses import (
    files_to_keep,
    memory_to_keep,
    require_keepable,
    restore_session,
)
from ....runner.session_turns import SessionPast
from ....runner.settings import PauseSettings
from ....runner.spawn import interpreter
from ...version import installed_version
from ..parameters import SessionArguments
from .differences import OTHER_LAUNCHER, differing, launcher_ended
from .state_file import END, FILES, HEADER, MEMORY, PauseToken, StateWriter
from .store import PausedStates

_PIECE_BYTES = 8 << 20
_IMAGE_BYTES = 256 << 20
_AT_ONCE = 2
_TURN_SECONDS = 30.0


class Pausable(Protocol):
    """A session whose cell this process made."""

    id: str
    packages: tuple[str, ...]

    @property
    def language(self) -> str: ...

    @property
    def cell(self) -> SessionCell: ...

    @property
    def plan(self) -> Plan: ...

    def fresh_cell(self) -> AbstractContextManager[HeldCell]:
        """Lend a cell of the launcher that makes those of such sessions now."""


class Resumable(Protocol):
    """A fresh session, or the cell of one."""

    @property
    def cell(self) -> SessionCell: ...

    @property
    def plan(self) -> Plan: ...

    def close(self) -> None: ...


_Resumed = TypeVar("_Resumed", bound=Resumable)


class Surroundings(NamedTuple):
    """What must be equal where a session is resumed; the names of fields tell what differs."""

    cellwright: str
    policy: str  # a digest of the plan
    kernel: str
    boot: str  # of the host: clocks begin anew with each
    interpreter: str


class PausedSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of a state."""

    id: str
    language: str
    packages: tuple[str, ...]
    past: SessionPast
    launcher: str
    has_fixed_addresses: bool
    surroundings: Surroundings
    image: str  # the digest of what its memory is kept as differences to


class _Image:
    """An image, a file in memory that is closed with the last user of this object."""

    def __init__(self, file: int, digest: str) -> None:
        self.file = file
        self.digest = digest
        self.close = weakref.finalize(self, os.close, file)


class KeptState(NamedTuple):
    """A state in the directory; its launcher's image stays known while this is kept."""

    token: str
    image: _Image
    is_bound: bool  # needs its launcher, so it is of no use once the sandbox is closed


class _ReadState(NamedTuple):
    """A state that was read and verified whole."""

    header: PausedSession
    files: list[bytes]
    memory: int


class Pausing:
    """Pauses sessions and resumes them; safe from many threads."""

    def __init__(self, settings: PauseSettings, process: BranchingProcess) -> None:
        self._settings = settings
        self._states = PausedStates(settings)
        self._process = process
        self._lock = threading.Lock()
        # What is kept or read takes memory meanwhile, up to most_bytes for each.
        self._keeping = ConcurrencyLimit(_AT_ONCE, _TURN_SECONDS)
        self._reading = ConcurrencyLimit(_AT_ONCE, _TURN_SECONDS)
        # By digest: those of launchers that are there, and those that a paused session here needs.
        self._known: weakref.WeakValueDictionary[str, _Image] = weakref.WeakValueDictionary()
        self._images: weakref.WeakKeyDictionary[Origin, _Image] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def kept(self, session: Pausable, *, is_use: bool = True) -> Iterator[KeptState]:
        """Keep the state of a session, and yield its name while no request can run, for a block that
        ends the session; if the block raises, the state is removed.

        Without `is_use`, a session that is idle or frozen stays so, and the state is this process's
        own until `give_away`.  Raises PauseError, BusyError, after which the session goes on as if
        nothing had been.
        """
        token = PauseToken.new()
        with _slot(self._keeping), session.cell.resting(is_use=is_use) as (held, past):
            try:
                is_own = self._settings.is_private or not is_use
                kept = self._keep(session, held, past, token, is_own=is_own)
            except CannotBranch as error:
                raise PauseError(f"pause: the session cannot be paused: {error}") from None
            try:
                yield kept
            except BaseException:
                self._states.remove(token)
                raise

    def _keep(
        self, session: Pausable, held: HeldCell, past: SessionPast, token: PauseToken, *,
        is_own: bool,
    ) -> KeptState:  # fmt: skip
        if session.cell.is_in_use:
            raise CannotBranch("a terminal, an exposed port or a copy of it is in use")
        require_keepable(held, session.plan)
        image = self._image_for(session, held)
        header = PausedSession(
            session.id, session.language, session.packages, past, held.launcher_id,
            FIXED_ADDRESSES in session.plan.layers, _surroundings(session.plan), image.digest,
        )  # fmt: skip
        if header.has_fixed_addresses:
            self._states.keep_image(image.digest, image.file)
        is_bound = not header.has_fixed_addresses
        with self._states.writing(token, is_own=is_own, is_bound=is_bound) as writer:
            writer.add(HEADER, msgspec.msgpack.encode(header))
            for batch in files_to_keep(held, session.plan):
                writer.add(FILES, batch)
            self._write_memory(session, held, image, writer)
            writer.add(END)
        return KeptState(str(token), image, is_bound)

    def _write_memory(
        self, session: Pausable, held: HeldCell, image: _Image, writer: StateWriter
    ) -> None:
        memory = memory_to_keep(held, image.file, self._process, session.plan, writer.left)
        try:
            with mmap.mmap(memory, 0, prot=mmap.PROT_READ) as mapped:
                for at in range(0, len(mapped), _PIECE_BYTES):
                    writer.add(MEMORY, mapped[at : at + _PIECE_BYTES])
        finally:
            os.close(memory)

    def _image_for(self, session: Pausable, held: HeldCell) -> _Image:
        """Return the image of a session's launcher, made of a fresh cell if there is none yet."""
        with self._lock:
            if found := self._images.get(held.origin):
                return found
        with session.fresh_cell() as fresh:
            if not fresh.is_sibling_of(held):
                raise CannotBranch("its launcher was replaced")
            file = memory_to_keep(fresh, -1, self._process, session.plan, _IMAGE_BYTES)
        self._add(held.origin, _Image(file, _digest_of(file)))
        with self._lock:
            return self._images[held.origin]

    def _add(self, origin: Origin, image: _Image) -> _Image:
        """Keep an image while a launcher has no other; another thread may have been first."""
        with self._lock:
            known = self._known.setdefault(image.digest, image)
            self._images.setdefault(origin, known)
            for gone in [each for each in self._images if not each.is_alive()]:
                del self._images[gone]  # without waiting for the garbage collector
        return known

    def resume(
        self, text: object, open_new: Callable[[SessionArguments, str], _Resumed]
    ) -> _Resumed:
        """Return the session of a token in a fresh cell; the token is of no use afterwards.

        `open_new` opens a session, or a cell for it, if none of its id lives; it takes the reason, for
        the trail.  Raises PauseError, PauseDiffers; the token can be used again then.
        """
        token = PauseToken.parse(text)
        with _slot(self._reading), self._states.taking(token) as pieces:
            state = _read(pieces)
            try:
                return self._resume(state, open_new)
            finally:
                os.close(state.memory)

    def give_away(self, kept: KeptState) -> str:
        """Return the token of a state that was this process's own; raises PauseError."""
        if not self._settings.is_private:
            self._states.give_away(PauseToken.parse(kept.token), is_bound=kept.is_bound)
        return kept.token

    def sweep(self) -> None:
        """Remove states that nobody can resume; raises PauseError."""
        self._states.sweep()

    def remove(self, kept: KeptState) -> None:
        """Remove a state that this process has kept, or what was put in its place."""
        self._states.remove(PauseToken.parse(kept.token))

    def discard(self, text: object) -> None:
        """Remove the state of a token unread; raises PauseError."""
        token = PauseToken.parse(text)
        with self._states.taking(token) as pieces:
            next(pieces)  # raises unless the secret is that of the state, not its name alone

    def _resume(
        self, state: _ReadState, open_new: Callable[[SessionArguments, str], _Resumed]
    ) -> _Resumed:
        header = state.header
        given = SessionArguments(id=header.id, language=header.language, packages=header.packages)
        session = open_new(given, "a paused session is resumed")
        try:
            with session.cell.fresh() as held:
                _require_equal(header, session.plan, held)
                image = self._image_of(header.image, held.origin)
            restore_session(
                session.cell, state.files, image.file, state.memory, self._process, session.plan
            )
            session.cell.continue_from(header.past)
        except BaseException as error:
            session.close()
            if isinstance(error, CannotBranch):
                raise differing((str(error),), is_final=False) from None
            raise
        return session

    def _image_of(self, digest: str, origin: Origin) -> _Image:
        if found := self._known.get(digest):
            return found
        file = self._states.image(digest)
        if file is None:
            raise launcher_ended()
        return self._add(origin, _Image(file, digest))

    def settle(self) -> None:
        """Wait until nothing is left of the states that were resumed."""
        self._states.settle()

    def close(self) -> None:
        """Close the images, and remove states that need a launcher; others stay until they expire."""
        with contextlib.suppress(PauseError, OSError):  # the disk fails
            self._states.close()
        with self._lock:
            self._images.clear()


def _digest_of(file: int) -> str:
    with mmap.mmap(file, 0, prot=mmap.PROT_READ) as mapped:
        return hashlib.sha256(mapped).hexdigest()


def _surroundings(plan: Plan) -> Surroundings:
    path = interpreter()
    seen, host = os.stat(path), platform.uname()
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    encoded = msgspec.msgpack.encode(plan)
    return Surroundings(
        installed_version(), hashlib.sha256(encoded).hexdigest(),
        f"{host.machine} {host.release} {host.version}", boot,
        f"{path} {seen.st_ino} {seen.st_size} {seen.st_mtime_ns}",
    )  # fmt: skip


def _require_equal(header: PausedSession, plan: Plan, held: HeldCell) -> None:
    """Raise PauseDiffers unless a session can be resumed in a fresh cell."""
    here = _surroundings(plan)
    differs = [
        f"{name}: {there!a} then, {now!a} now"
        for name, there, now in zip(here._fields, header.surroundings, here, strict=True)
        if there != now
    ]
    is_fixed = header.has_fixed_addresses and FIXED_ADDRESSES in plan.layers
    if held.launcher_id != header.launcher and not is_fixed:
        differs.append(OTHER_LAUNCHER)
    if differs:
        raise differing(tuple(differs))


@contextlib.contextmanager
def _slot(limit: ConcurrencyLimit) -> Iterator[None]:
    """Hold a slot during the block; raises BusyError."""
    limit.acquire()
    try:
        yield
    finally:
        limit.release()


def _read(pieces: Iterator[tuple[bytes, memoryview]]) -> _ReadState:
    """Return a state, once all of it is verified; raises PauseError."""
    memory = os.memfd_create("kept", os.MFD_CLOEXEC)
    header, files, order = None, [], b""
    try:
        for kind, data in pieces:
            if (order and (order + kind) not in _NEXT) or (not order and kind != HEADER):
                raise PauseError(
                    "token: the state of this paused session is malformed", is_final=True
                )
            order = kind
            if kind == HEADER:
                header = _checked(_HEADER.decode(data))
            elif kind == FILES:
                files.append(bytes(data))
            elif kind == MEMORY:
                os.write(memory, data)
        assert header is not None  # noqa: S101 - the order says so
        return _ReadState(header, files, memory)
    except BaseException as error:
        os.close(memory)
        if isinstance(error, msgspec.DecodeError):
            raise PauseError(
                "token: the state of this paused session is malformed", is_final=True
            ) from None
        raise


def _malformed() -> PauseError:
    return PauseError("token: the state of this paused session is malformed", is_final=True)


def _checked(header: PausedSession) -> PausedSession:
    """Return a header whose session has no more left of its limits than a fresh one."""
    if header.past.requests < 0 or not header.past.cpu_seconds >= 0:  # nor NaN
        raise _malformed()
    return header


_HEADER = msgspec.msgpack.Decoder(PausedSession)
_NEXT = {
    HEADER + FILES, HEADER + MEMORY, FILES + FILES, FILES + MEMORY, MEMORY + MEMORY, MEMORY + END,
}  # fmt: skip
