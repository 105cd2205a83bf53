"""`SingleCallContainer`: a container for one program, with a kernel of its own.

The runtime holds the boundary: gVisor's kernel, or a virtual machine. There are no layers of a cell;
the host observes the program's start, its streams and its end.
"""

import base64
import binascii
import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping
from typing import BinaryIO, NamedTuple

import msgspec

from ...policies.errors import LaunchError
from ...policies.plan import Plan
from ...policies.policy import Limits
from .. import channel
from ..fixed_root import TEXTS
from ..messages import Finished, SingleCall, decode, encode
from ..requests.result import Reason
from ..watching.guest_channel import Capture, longest_frame
from ..watching.supervision import Observation
from .bundle import Bundle, Mount, single_call_config
from .container import SpawnedContainer
from .inside import BEGUN, CALL, ENDED, FILES, STDERR, STDOUT, WORD
from .oci_runtime import last_output, spawn_runtime

_START_SECONDS = 60.0
_MOST_LINE = 256 * 1024
_MOST_STATUS = 0xFFFF  # largest wait status (wait(2))
_CHUNK = 256 * 1024
_FILES_BESIDE = 16 * 1024  # bytes of headers for each file, with a long name


class SingleRun(NamedTuple):
    """The outcome of a program; `files` is an archive of the files that it left."""

    seen: Observation
    began_at: float
    files: BinaryIO


class _Breach(Exception):  # noqa: N818 - what the other side did
    """The container sent an invalid message."""


class SingleCallContainer:
    """Makes a container for each call."""

    def __init__(self, container: SpawnedContainer, plan: Plan, sources: Mapping[str, str]) -> None:
        """`container` names the runtime, the interpreter and the files that programs see; `sources`
        are the resolved host paths of the shown paths."""
        self._container = container
        self._sources = sources
        self._plan = plan

    def run(
        self, call: SingleCall, limits: Limits, captures: tuple[Capture, Capture], cancel: int,
        files: BinaryIO,
    ) -> SingleRun:  # fmt: skip
        """Run one program; its archive of files is written to `files`.  Raises LaunchError."""
        container, plan = self._container, self._plan
        runtime = container.runtime(plan.python_path)
        layout = container.layout(plan, runtime.files, self._sources)
        stderr = os.memfd_create("runtime-stderr", os.MFD_CLOEXEC)
        bundle: Bundle | None = None
        try:
            bundle = Bundle(layout.links, container.oci.program)
            bundle.add_texts(TEXTS)
            mounts = (*layout.mounts, Mount(CALL, bundle.add("call", encode(call))))
            command = container.command_of(("-I", "-S", "-c", _START), layout)
            bundle.write_config(
                single_call_config(plan, command, mounts, container.ids(), runtime.hidden)
            )
            return self._watch(bundle, stderr, _Watch(limits, captures, files), cancel)
        except OSError as error:
            raise LaunchError(f"cannot start a container: {error.strerror}") from None
        finally:
            os.close(stderr)
            if bundle:
                container.delete(bundle)

    def _watch(self, bundle: Bundle, stderr: int, watch: "_Watch", cancel: int) -> SingleRun:
        oci = self._container.oci
        ours, theirs = os.pipe()
        try:
            command = oci.command(bundle.state, "run", "--bundle", bundle.path, bundle.name)
            pid = spawn_runtime(command, stderr, stdout=theirs)
        finally:
            os.close(theirs)
        try:
            watch.hear(ours, cancel)
        finally:
            os.close(ours)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if not watch.began_at and not watch.cause:
            words = last_output(stderr)
            raise LaunchError(
                f"{oci.name} made no container that runs a program: {words}", oci.repair
            )
        return SingleRun(watch.observation(), watch.began_at, watch.files)


_START = (
    "import sys;sys.path[:0]=['/.cellwright/packages'];"
    "sys.modules['typing_extensions']=sys.modules['_uuid']=None;"
    "from cellwright.runner.oci.inside import main;main(1)"
)


class _Packets:
    """The source of a `Receiver`: the guest's packets as the container passed them on."""

    packet = b""

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        return self.packet[:size]

    def send(self, packet: bytes | bytearray, /) -> int:
        raise NotImplementedError


class _Watch:
    """Reads the messages of a container, which may be hostile, until it ends or must be ended."""

    def __init__(self, limits: Limits, captures: tuple[Capture, Capture], files: BinaryIO) -> None:
        self._limits = limits
        self._captures = dict(zip((STDOUT, STDERR), captures, strict=True))
        self.files = files
        self._files_left = limits.workspace_bytes + _FILES_BESIDE * limits.workspace_inodes
        self._packets = _Packets()
        self._receiver = channel.Receiver(self._packets, longest_frame(limits))
        self._finished: Finished | None = None
        self._status: int | None = None
        self._complaint: str | None = None
        self.cause: Reason | None = None
        self.began_at = 0.0

    def hear(self, source: int, cancel: int) -> None:
        poll = select.poll()
        poll.register(source, select.POLLIN)
        if cancel >= 0:
            poll.register(cancel, select.POLLIN)
        line, end = bytearray(), time.monotonic() + _START_SECONDS
        try:
            while self._status is None and self.cause is None:
                if self.began_at:
                    end = self.began_at + self._limits.wall_seconds
                ready = [each for each, _ in poll.poll(max(0.0, end - time.monotonic()) * 1000)]
                if not ready:
                    self._give_up()
                elif cancel in ready:
                    self.cause = "cancelled"
                elif not self._read(source, line):
                    return
        except (_Breach, channel.ProtocolError, msgspec.DecodeError, ValueError) as error:
            self.cause, self._complaint = "violation", f"broke the protocol: {error}"

    def _give_up(self) -> None:
        if not self.began_at:
            raise LaunchError(f"no container began within {_START_SECONDS:g} s")
        self.cause = "wall_time"

    def _read(self, source: int, line: bytearray) -> bool:
        data = os.read(source, _CHUNK)
        line += data
        *whole, rest = bytes(line).split(b"\n")
        line[:] = rest
        if len(line) > _MOST_LINE:
            raise _Breach("a line that is too long")
        for each in whole:
            if self._status is None and self.cause is None:
                self._take(each.rstrip(b"\r"))
        return bool(data)

    def _take(self, line: bytes) -> None:
        kind = line[:1]
        try:
            data = base64.b64decode(line[1:], validate=True)
        except binascii.Error:
            raise _Breach("a line that is no base64") from None
        if kind == BEGUN and not self.began_at:
            self.began_at = time.monotonic()
        elif not self.began_at:
            raise _Breach("a word before the first")
        elif kind in self._captures:
            self._captures[kind].take(data)
            total = sum(each.total_bytes for each in self._captures.values())
            if total > self._limits.output_total_bytes:
                self.cause = "output"
        elif kind == WORD and data and self._finished is None:
            self._packets.packet = data
            if frame := self._receiver.receive():
                self._finished = decode(frame, Finished)
        elif kind == FILES:
            self._files_left -= len(data)
            if self._files_left < 0:
                raise _Breach("more files than fit into the workspace")
            self.files.write(data)
        elif kind == ENDED:
            self._status = _wait_status(data)
        else:
            raise _Breach(f"a line of the kind {kind!r}")

    def observation(self) -> Observation:
        status = self._status
        if status is None and self.cause is None:
            status = signal.SIGKILL  # the whole container was killed
        return Observation(self.cause, status, self._finished, self._complaint)


def _wait_status(data: bytes) -> int:
    """Return the status of a process that has ended; raises ValueError for anything else."""
    status = int(data[:8])
    if not 0 <= status <= _MOST_STATUS:
        raise _Breach("no wait status")
    os.waitstatus_to_exitcode(status)
    return status
