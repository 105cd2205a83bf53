"""`StreamsOfWorker`: the streams of a program in a cell of a worker, whose descriptors come to this
process."""

import contextlib
from types import TracebackType
from typing import Any

import msgspec

from ....policies.errors import CellwrightError
from ....runner.cells.cell_network import CellNetwork
from ....runner.requests.request import Streams
from ..remote import frames
from ..remote.connections import OnDescriptors
from . import worker_frames
from .worker_process import Worker


class StreamsOfWorker:
    """Passes the streams of one execution on; leaving the context notes that it has ended."""

    def __init__(self, worker: Worker, execution_id: str, on_streams: Any) -> None:
        self._worker = worker
        self._id = execution_id
        self._on_streams = on_streams
        self._stderr = ""
        self._has_ended = False

    def __enter__(self) -> OnDescriptors:
        return self._pass_on

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.stderr()
        self._has_ended = True

    def _pass_on(self, opened: msgspec.Struct, descriptors: list[int]) -> None:
        assert isinstance(opened, worker_frames.StreamsOpened)  # noqa: S101 - nothing else comes
        given = dict(zip(opened.names, descriptors, strict=True))
        network = NetworkOfWorker(self._worker, self._id) if opened.has_network else None
        self._on_streams(Streams(**given, stderr=self.stderr, network=network))

    def stderr(self) -> str:
        """Return the standard error so far."""
        if self._has_ended:
            return self._stderr
        with contextlib.suppress(CellwrightError):  # the worker has died
            asked = worker_frames.GetStderr(self._id)
            self._stderr = self._worker.ask(asked, frames.Content).data.decode()
        return self._stderr


class NetworkOfWorker(CellNetwork):
    """The network of a cell of a worker, which asks its launcher for sockets."""

    def __init__(self, worker: Worker, execution_id: str) -> None:
        self._worker = worker
        self._id = execution_id

    def ask_on(self, channel: int) -> None:
        self._worker.send_descriptor(worker_frames.AskForSocket(self._id), channel)

    def copy(self) -> CellNetwork:
        return NetworkOfWorker(self._worker, self._id)

    def close(self) -> None:
        """Do nothing: the worker closes it when the program has ended."""
