"""`Pausing`: pauses the sessions of one sandbox, and resumes them in fresh cells."""

import contextlib
import hashlib
import mmap
import os
import platform
import threading
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ....policies.errors import PauseError
from ....policies.plan import FIXED_ADDRESSES, Plan
from ....runner.cells.held_cell import HeldCell
from ....runner.concurrency import ConcurrencyLimit
from ....runner.launching.generation import Generation
from ....runner.launching.spawn import interpreter
from ....runner.requests.execution import SessionPast
from ....runner.sessions.branches import (
    BranchingProcess,
    CannotBranch,
    files_to_keep,
    memory_to_keep,
    require_keepable,
    restore_session,
)
from ....runner.sessions.session_cell import SessionCell
from ....runner.settings import PauseSettings
from ....runner.supervisor import Supervisor
from ...version import installed_version
from ..parameters import SessionArguments
from .pause_store import PausedStates
from .state_file import (
    END,
    FILES,
    HEADER,
    MEMORY,
    OTHER_LAUNCHER,
    PauseToken,
    StateWriter,
    differing,
    launcher_ended,
)

_PIECE_BYTES = 8 << 20
_IMAGE_BYTES = 256 << 20
_AT_ONCE = 2
_TURN_SECONDS = 30.0


class Pausable(NamedTuple):
    """A session that can be kept: how it was opened, its cell, and the maker of other cells like it."""

    given: SessionArguments
    cell: SessionCell
    supervisor: Supervisor

    @contextlib.contextmanager
    def fresh_cell(self) -> Iterator[HeldCell]:
        """Lend another cell of its launcher."""
        claim = self.cell.claim()
        try:
            with self.supervisor.fresh_cell(claim) as fresh:
                yield fresh
        finally:
            claim.release()


class Surroundings(NamedTuple):
    """The facts that must be equal where a session is resumed; a difference is named by its field."""

    cellwright: str
    policy: str  # a digest of the plan
    kernel: str
    boot: str  # boot id of the host: clocks start again with each boot
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
    image: str  # digest of the image to which its memory is stored as differences


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
    # True if the state needs its launcher, and is useless once the sandbox is closed.
    is_bound: bool


class ReadState(NamedTuple):
    """A state that was read and verified whole."""

    header: PausedSession
    files: list[bytes]
    memory: int

    @property
    def given(self) -> SessionArguments:
        """How to open a session like it."""
        header = self.header
        return SessionArguments(id=header.id, language=header.language, packages=header.packages)


class Pausing:
    """Pauses sessions and resumes them; safe from many threads."""

    def __init__(self, settings: PauseSettings, process: BranchingProcess) -> None:
        self._settings = settings
        self._states = PausedStates(settings)
        self._process = process
        self._lock = threading.Lock()
        # Pausing and resuming take memory meanwhile, up to most_bytes each.
        self._keeping = ConcurrencyLimit(_AT_ONCE, _TURN_SECONDS)
        self._reading = ConcurrencyLimit(_AT_ONCE, _TURN_SECONDS)
        # By digest: images of living launchers, and images that a paused session of this sandbox needs.
        self._known: weakref.WeakValueDictionary[str, _Image] = weakref.WeakValueDictionary()
        self._images: weakref.WeakKeyDictionary[Generation, _Image] = weakref.WeakKeyDictionary()

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
        require_keepable(held)
        image, given, plan = self._image_for(session, held), session.given, held.plan
        header = PausedSession(
            given.id or "", given.language, tuple(given.packages), past, held.origin.id,
            FIXED_ADDRESSES in plan.layers, _surroundings(plan), image.digest,
        )  # fmt: skip
        if header.has_fixed_addresses:
            self._states.keep_image(image.digest, image.file)
        is_bound = not header.has_fixed_addresses
        with self._states.writing(token, is_own=is_own, is_bound=is_bound) as writer:
            writer.add(HEADER, msgspec.msgpack.encode(header))
            for batch in files_to_keep(held):
                writer.add(FILES, batch)
            self._write_memory(held, image, writer)
            writer.add(END)
        return KeptState(str(token), image, is_bound)

    def _write_memory(self, held: HeldCell, image: _Image, writer: StateWriter) -> None:
        memory = memory_to_keep(held, image.file, self._process, writer.left)
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
            if fresh.origin is not held.origin:
                raise CannotBranch("its launcher was replaced")
            file = memory_to_keep(fresh, -1, self._process, _IMAGE_BYTES)
        self._add(held.origin, _Image(file, _digest_of(file)))
        with self._lock:
            return self._images[held.origin]

    def _add(self, origin: Generation, image: _Image) -> _Image:
        with self._lock:
            known = self._known.setdefault(image.digest, image)
            self._images.setdefault(origin, known)
            for gone in [each for each in self._images if not each.is_alive()]:
                del self._images[gone]  # without waiting for the garbage collector
        return known

    @contextlib.contextmanager
    def taken(self, text: object) -> Iterator[ReadState]:
        """Yield the state of a token for a block that restores it; the token is of no use afterwards,
        unless the block raises.  Raises PauseError."""
        token = PauseToken.parse(text)
        with _slot(self._reading), self._states.taking(token) as pieces:
            state = _read(pieces)
            try:
                yield state
            finally:
                os.close(state.memory)

    def restore(self, state: ReadState, cell: SessionCell) -> None:
        """Let a session that was kept go on in a fresh cell, or end the cell and raise PauseDiffers."""
        try:
            with cell.fresh() as held:
                _require_equal(state.header, held)
                image = self._image_of(state.header.image, held.origin)
            restore_session(cell, state.files, image.file, state.memory, self._process)
            cell.continue_from(state.header.past)
        except BaseException as error:
            cell.end("it was closed", "closed")
            if isinstance(error, CannotBranch):
                raise differing((str(error),), is_final=False) from None
            raise

    def give_away(self, kept: KeptState) -> str:
        """Return the token of a state that was this process's own; raises PauseError."""
        if not self._settings.is_private:
            self._states.give_away(PauseToken.parse(kept.token), is_bound=kept.is_bound)
        return kept.token

    def sweep(self) -> None:
        """Remove states that nobody can resume; raises PauseError."""
        self._states.sweep()

    def remove(self, kept: KeptState) -> None:
        """Remove a state of this process, or the file that took its place."""
        self._states.remove(PauseToken.parse(kept.token))

    def discard(self, text: object) -> None:
        """Remove the state of a token unread; raises PauseError."""
        token = PauseToken.parse(text)
        with self._states.taking(token) as pieces:
            next(pieces)  # raises unless the secret opens the state; a matching name is not enough

    def _image_of(self, digest: str, origin: Generation) -> _Image:
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


def _require_equal(header: PausedSession, held: HeldCell) -> None:
    """Raise PauseDiffers unless a session can be resumed in a fresh cell."""
    here = _surroundings(held.plan)
    differs = [
        f"{name}: {there!a} then, {now!a} now"
        for name, there, now in zip(here._fields, header.surroundings, here, strict=True)
        if there != now
    ]
    is_fixed = header.has_fixed_addresses and FIXED_ADDRESSES in held.plan.layers
    if held.origin.id != header.launcher and not is_fixed:
        differs.append(OTHER_LAUNCHER)
    if differs:
        raise differing(tuple(differs))


@contextlib.contextmanager
def _slot(limit: ConcurrencyLimit) -> Iterator[None]:
    limit.acquire()
    try:
        yield
    finally:
        limit.release()


def _read(pieces: Iterator[tuple[bytes, memoryview]]) -> ReadState:
    memory = os.memfd_create("kept", os.MFD_CLOEXEC)
    header, files, order = None, [], b""
    try:
        for kind, data in pieces:
            if (order and (order + kind) not in _NEXT) or (not order and kind != HEADER):
                raise _malformed()
            order = kind
            if kind == HEADER:
                header = _checked(_HEADER.decode(data))
            elif kind == FILES:
                files.append(bytes(data))
            elif kind == MEMORY:
                os.write(memory, data)
        assert header is not None  # noqa: S101 - the order says so
        return ReadState(header, files, memory)
    except BaseException as error:
        os.close(memory)
        if isinstance(error, msgspec.DecodeError):
            raise _malformed() from None
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
