"""`Pausing`: pauses the sessions of one sandbox, and resumes them in fresh cells."""

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

from ....policies.errors import PauseDiffers, PauseError
from ....policies.plan import FIXED_ADDRESSES, Plan
from ....runner.branching_process import BranchingProcess, CannotBranch
from ....runner.held_cell import HeldCell
from ....runner.session import SessionCell, SessionPast
from ....runner.session_pauses import (
    files_to_keep,
    memory_to_keep,
    require_keepable,
    restore_session,
)
from ....runner.settings import PauseSettings
from ....runner.spawn import interpreter
from ...version import installed_version
from ..parameters import SessionArguments
from .state_file import END, FILES, HEADER, MEMORY, PauseToken, StateWriter
from .store import PausedStates

_PIECE_BYTES = 8 << 20
_IMAGE_BYTES = 256 << 20
_MOST_IMAGES = 8
_LAUNCHER = "its launcher ended or was replaced, and it does not have the addresses of another one"
_HINT = "Sandbox(pausable=True) pauses sessions that can be resumed after a restart"


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

    def forget_calls(self) -> None: ...

    def close(self) -> None: ...


_Session = TypeVar("_Session", bound=Pausable)


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
        self._images: dict[str, _Image] = {}  # by launcher or digest, the last few

    def pause(self, session: Pausable) -> str:
        """Keep the state of a session and end it; return the token.  Raises PauseError, after which
        the session goes on as if nothing had been."""
        token = PauseToken.new()
        with session.cell.resting() as (held, past):
            try:
                self._keep(session, held, past, token)
            except CannotBranch as error:
                raise PauseError(f"pause: the session cannot be paused: {error}") from None
            session.cell.end("it was paused", "paused")
        return str(token)

    def _keep(
        self, session: Pausable, held: HeldCell, past: SessionPast, token: PauseToken
    ) -> None:
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
        with self._states.writing(token) as writer:
            writer.add(HEADER, msgspec.msgpack.encode(header))
            for batch in files_to_keep(held, session.plan):
                writer.add(FILES, batch)
            self._write_memory(session, held, image, writer)
            writer.add(END)

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
        if found := self._images.get(held.launcher_id):
            return found
        with session.fresh_cell() as fresh:
            if not fresh.is_sibling_of(held):
                raise CannotBranch("its launcher was replaced")
            file = memory_to_keep(fresh, -1, self._process, session.plan, _IMAGE_BYTES)
        return self._add(held.launcher_id, _Image(file, _digest_of(file)))

    def _add(self, name: str, image: _Image) -> _Image:
        """Keep an image; another thread may have been first."""
        with self._lock:
            known = self._images.setdefault(name, image)
            self._images.setdefault(image.digest, known)
            for oldest in list(self._images)[:-_MOST_IMAGES]:
                del self._images[oldest]
        return known

    def resume(
        self, text: object, open_new: Callable[[SessionArguments, str], _Session]
    ) -> _Session:
        """Return the session of a token in a fresh cell; the token is of no use afterwards.

        `open_new` opens a session, if none of its id lives; it takes the reason, for the trail.  Raises
        PauseError, PauseDiffers; the token can be used again then.
        """
        token = PauseToken.parse(text)
        with self._states.taking(token) as pieces:
            state = _read(pieces)
            try:
                return self._resume(state, open_new)
            finally:
                os.close(state.memory)

    def discard(self, text: object) -> None:
        """Remove the state of a token unread; raises PauseError."""
        token = PauseToken.parse(text)
        with self._states.taking(token) as pieces:
            next(pieces)  # raises unless the secret is that of the state, not its name alone

    def _resume(
        self, state: _ReadState, open_new: Callable[[SessionArguments, str], _Session]
    ) -> _Session:
        header = state.header
        given = SessionArguments(id=header.id, language=header.language, packages=header.packages)
        session = open_new(given, "a paused session is resumed")
        try:
            with session.cell.fresh() as held:
                _require_equal(header, session.plan, held)
            image = self._image_of(header.image)
            restore_session(
                session.cell, state.files, image.file, state.memory, self._process, session.plan
            )
            session.cell.continue_from(header.past)
            session.forget_calls()
        except BaseException as error:
            session.close()
            if isinstance(error, CannotBranch):
                raise _differs((str(error),)) from None
            raise
        return session

    def _image_of(self, digest: str) -> _Image:
        if found := self._images.get(digest):
            return found
        file = self._states.image(digest)
        if file is None:
            raise _differs((_LAUNCHER,))
        return self._add(digest, _Image(file, digest))

    def close(self) -> None:
        """Close the images; what was paused stays on disk until it expires."""
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
        differs.append(_LAUNCHER)
    if differs:
        raise _differs(tuple(differs))


def _differs(differs: tuple[str, ...]) -> PauseDiffers:
    message = f"token: the paused session cannot be resumed here: {'; '.join(differs)}"
    return PauseDiffers(message, _HINT if _LAUNCHER in differs else "", differs=differs)


def _read(pieces: Iterator[tuple[bytes, memoryview]]) -> _ReadState:
    """Return a state, once all of it is verified; raises PauseError."""
    memory = os.memfd_create("kept", os.MFD_CLOEXEC)
    header, files, order = None, [], b""
    try:
        for kind, data in pieces:
            if (order and (order + kind) not in _NEXT) or (not order and kind != HEADER):
                raise PauseError("token: the state of this paused session is malformed")
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
            raise PauseError("token: the state of this paused session is malformed") from None
        raise


def _checked(header: PausedSession) -> PausedSession:
    """Return a header whose session has no more left of its limits than a fresh one."""
    if header.past.requests < 0 or not header.past.cpu_seconds >= 0:  # nor NaN
        raise PauseError("token: the state of this paused session is malformed")
    return header


_HEADER = msgspec.msgpack.Decoder(PausedSession)
_NEXT = {
    HEADER + FILES, HEADER + MEMORY, FILES + FILES, FILES + MEMORY, MEMORY + MEMORY, MEMORY + END,
}  # fmt: skip
