"""`ResultFile`: a JSON line a row, written at once, so that a batch goes on where it was killed."""

import fcntl
import os
import stat
from collections.abc import Iterator
from typing import Self

import msgspec

from ...policies.closing import Closing
from ...policies.errors import PolicyError
from .rows import BatchRow

_CHUNK = 1024 * 1024
_START = b'{"line":'  # each line begins so
_MOST_KEPT = 20_000  # characters of a stream


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a row ended.

    passed: it was accepted, or a program without cases completed
    outcome: the verdict, or without cases the reason
    seconds: of CPU time; of cases the slowest one
    """

    line: int
    task: str
    digest: str
    passed: bool
    outcome: str
    score: float = 0.0
    seconds: float = 0.0
    wall_seconds: float = 0.0
    memory_bytes: int = 0
    exit_code: int | None = None
    error: str = ""
    stdout: str = ""
    stderr: str = ""
    cases: tuple[str, ...] = ()  # the verdict of each that was judged


class ResultFile(Closing):
    """The results of a batch, which one process at a time adds to."""

    def __init__(self, path: str) -> None:
        """Open the file, or make it; what a killed process wrote of a line is cut off.

        Raises PolicyError if another batch writes to it, or it holds other lines.
        """
        self._path = path
        try:
            # O_NONBLOCK: a pipe without a reader is refused below, not waited for
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            self._file = os.open(path, flags, 0o644)
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                os.close(self._file)
                raise PolicyError(f"--output: {path} is not a regular file")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise PolicyError(f"--output: another batch writes to {path}") from None
        except OSError as error:
            raise PolicyError(f"--output: cannot write {path}: {error.strerror}") from None
        try:
            self.done = {each.line: each for each in self._read()}
        except BaseException:
            os.close(self._file)
            raise

    def _read(self) -> Iterator[RowResult]:
        whole = 0
        with open(os.dup(self._file), "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and line[: len(_START)] == _START[: len(line)]:
                    break  # a killed process wrote it
                whole += len(line)
                try:
                    yield msgspec.json.decode(line, type=RowResult)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise PolicyError(
                        f"--output: line {number} of {self._path} is no result: {error}",
                        "choose a file of its own",
                    ) from None
        os.truncate(self._file, whole)

    def is_done(self, row: BatchRow) -> bool:
        """Tell whether a row has its result; raises PolicyError if that is one of another row."""
        found = self.done.get(row.line)
        if found and found.digest != row.digest:
            raise PolicyError(
                f"--output: {self._path} has the result of another program for line {row.line + 1}",
                "the programs have changed since: choose another file",
            )
        return found is not None

    def add(self, result: RowResult) -> None:
        """Write a result; raises OSError."""
        data = memoryview(msgspec.json.encode(result) + b"\n")
        while data:  # a short write, as on a full disk, raises the next time
            data = data[os.write(self._file, data) :]
        self.done[result.line] = result

    def in_order(self) -> list[RowResult]:
        return [self.done[line] for line in sorted(self.done)]

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self


def shortened(text: str) -> str:
    """Return a stream as a result keeps it: its head and its tail."""
    half = _MOST_KEPT // 2
    return text if len(text) <= _MOST_KEPT else f"{text[:half]}\n...\n{text[-half:]}"
