"""`OpenProcesses`: commands that go on after the call of a model that started them."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence

from ...policies.errors import CellwrightError
from ..sandbox.processes import BackgroundProcess
from ..sandbox.session import Session
from ..sandbox.terminal import Terminal

_MOST_OPEN = 48  # a session has at most 64 background processes
_MOST_BYTES = 1024 * 1024  # of one answer; what is left is in the next
_TURN_SECONDS = 1.0


class _Open:
    """One process, which one task at a time may ask."""

    def __init__(self, process: BackgroundProcess | Terminal) -> None:
        self.process = process
        self.lock = asyncio.Lock()

    async def collected(self, seconds: float) -> tuple[bytes, int | None]:
        """Return its output of at most `seconds`, and its exit code if it has ended."""
        deadline = time.monotonic() + seconds
        parts: list[bytes] = []
        code = None
        while sum(map(len, parts)) < _MOST_BYTES:
            left = deadline - time.monotonic()
            parts.append(await self._read(max(0.0, left)))
            if not parts[-1]:
                code = await self._exit_code(max(0.0, min(left, _TURN_SECONDS)))
            if code is not None or left <= 0:
                break
        return b"".join(parts), code

    async def _read(self, seconds: float) -> bytes:
        with contextlib.suppress(TimeoutError):  # of a terminal
            return await self.process.aread(timeout=seconds)
        return b""

    async def _exit_code(self, seconds: float) -> int | None:
        with contextlib.suppress(TimeoutError):
            return await self.process.await_end(timeout=seconds)
        return None

    async def end(self) -> None:
        with contextlib.suppress(CellwrightError):  # the session is gone, and the process with it
            await self.process.akill()
        if isinstance(self.process, Terminal):
            await self.process.aclose()


class OpenProcesses:
    """The processes of one session that have not ended, by numbers.

    `write` and `update` raise KeyError for an unknown number, or one whose end was told.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._numbers = itertools.count(1)

    async def start(
        self,
        session: Session,
        argv: Sequence[str],
        cwd: str,
        env: Mapping[str, str],
        *,
        is_terminal: bool,
    ) -> int:
        """Start a command at a terminal, or without input; the oldest of too many ends for it."""
        if len(self._open) >= _MOST_OPEN:
            await self._open.pop(next(iter(self._open))).end()
        process: BackgroundProcess | Terminal
        if is_terminal:
            process = await session.aterminal(argv, cwd=cwd, env=env)
        else:
            process = await session.astart_command(argv, cwd=cwd, env=env)
            await process.aclose_stdin()
        number = next(self._numbers)
        self._open[number] = _Open(process)
        return number

    async def write(self, number: int, text: str) -> None:
        """Type at the terminal of a process."""
        found = self._open[number]
        if not isinstance(found.process, Terminal):
            raise RuntimeError("stdin is not available for this process: start it with tty=true")
        async with found.lock:
            await found.process.awrite(text)

    async def update(self, number: int, seconds: float) -> tuple[bytes, int | None]:
        """Wait for output and the end of a process; return both, None if it has not ended."""
        found = self._open[number]
        async with found.lock:
            output, code = await found.collected(seconds)
        if code is not None and self._open.pop(number, None) is not None:
            await found.end()
        return output, code

    async def end_all(self) -> None:
        """Kill what has not ended."""
        while self._open:
            await self._open.popitem()[1].end()
