"""`E2bCell`: the cell of one E2B sandbox, with its part of envd, its code contexts and its terminals.

No program of a cell can make a terminal, so this process has the masters of all pseudo-terminals and
answers the calls of the service `process.Process` that are about one; the cell's part answers all
others (envd/cell_services.py).
"""

import asyncio
import base64
import contextlib
import posixpath
import struct
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from starlette.responses import Response, StreamingResponse

from ....policies.closing import Closing
from ....policies.compiling.environment import own_home
from ....policies.errors import CellwrightError, LaunchError, PolicyError
from ...adapters.jupyter.notebook_session import NotebookSession
from ...sandbox.calls.call_request import check_environment
from ...sandbox.network.exposed_ports import ExposedPort
from ...sandbox.programs.terminal import Terminal
from ...sandbox.sandbox import Sandbox
from ...sandbox.sessions.session import Session

ENVD_PORT, CODE_PORT = 49983, 49999  # ports that E2B's clients use
_MODULES = ("cell_services", "server")  # in the order of their imports
_LOADER = """\
import sys, types
package = sys.modules["envd"] = types.ModuleType("envd")
package.__path__ = []
for name, text in {texts!r}.items():
    module = sys.modules[f"envd.{{name}}"] = types.ModuleType(f"envd.{{name}}")
    module.__package__ = "envd"
    setattr(package, name, module)
    exec(compile(text, f"<envd.{{name}}>", "exec"), module.__dict__)
sys.modules["envd.server"].main({port})
"""
_START_SECONDS = 20.0
_MOST_PORTS = 16


class E2bCell(Closing):
    """One session in a sandbox of its own, whose network rules can change.

    `open_sandbox` makes the sandbox; its policy must allow subprocesses and loopback.
    `variables` are the environment of its programs, `archive` the files below its home directory.
    Raises PolicyError, LaunchError, WorkspaceError.
    """

    def __init__(
        self,
        open_sandbox: Callable[[], Sandbox],
        variables: Mapping[str, str],
        archive: bytes = b"",
    ) -> None:
        given = check_environment(variables)
        self._lock = threading.Lock()
        self._ports: dict[int, ExposedPort] = {}
        self.sandbox = open_sandbox()
        self.home = own_home(self.sandbox.policy) or "/workspace"
        try:
            self.notebook = NotebookSession(
                self._open_session, self.sandbox.policy.limits.wall_seconds
            )
            if archive:
                self.session.restore(archive)
            self._start_envd(given)
        except BaseException:
            self.sandbox.close()
            raise

    def _open_session(self) -> Session:
        self.session = self.sandbox.session()
        return self.session

    def _start_envd(self, variables: dict[str, str]) -> None:
        if variables:  # an expression, so that no name stays in the session
            self.session.execute(f"__import__('os').environ.update({variables!r})")
        folder = Path(__file__).with_name("envd")
        texts = {name: (folder / f"{name}.py").read_text() for name in _MODULES}
        program = _LOADER.format(texts=texts, port=ENVD_PORT)
        self._envd = self.session.start_command(
            [*self.sandbox._cell_python, "-I", "-S", "-c", program]
        )
        if b"ready" not in self._envd.read(timeout=_START_SECONDS):
            raise LaunchError("the server of an E2B sandbox did not start in its cell")
        self.address_of(ENVD_PORT)

    def address_of(self, port: int) -> str:
        """Return the path of the Unix socket by which the host reaches a port of the cell."""
        with self._lock:
            if port not in self._ports:
                if len(self._ports) >= _MOST_PORTS:
                    raise PolicyError(f"port {port}: at most {_MOST_PORTS} ports are possible")
                self._ports[port] = self.session.expose(port)
            return str(self._ports[port].address)

    @property
    def lost(self) -> str:
        """The reason why the cell has ended; empty while it lives."""
        return self.session.lost

    def close(self) -> None:
        try:
            self.session.close()
        except CellwrightError:
            pass  # the launcher died, which ends the cell as well
        finally:
            self.sandbox.close()


_SERVICE = "/process.Process/"
_MOST, _CHUNKS, _KEEPALIVE_SECONDS, _END_SECONDS = 8, 64, 30.0, 5.0
_ENVELOPE = struct.Struct(">BI")
_SIGNALS = {"SIGNAL_SIGKILL": 9, "SIGNAL_SIGTERM": 15, 9: 9, 15: 15}
_Cells = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _Size(msgspec.Struct, frozen=True):
    cols: _Cells = 80
    rows: _Cells = 24


class _Pty(msgspec.Struct, frozen=True):
    size: _Size = _Size()


class _Process(msgspec.Struct, frozen=True):
    cmd: str = "/bin/bash"
    args: tuple[str, ...] = ()
    envs: dict[str, str] = {}
    cwd: str | None = None
    pid: int = 0


class _Input(msgspec.Struct, frozen=True):
    pty: str = ""
    stdin: str = ""


class _Call(msgspec.Struct, frozen=True):
    """A request of the service, with the members that are about terminals."""

    process: _Process = _Process()
    pty: _Pty | None = None
    input: _Input = _Input()
    signal: str | int = ""


class _OpenTerminal:
    """A program at a terminal; what it writes goes to each reader, and is dropped without one."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.pid = terminal.pid
        self.readers: list[deque[bytes | None]] = []
        self.changed = asyncio.Condition()
        self.is_ended = False
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        data = b"-"
        while data:
            try:
                data = await self.terminal.aread()
            except (OSError, CellwrightError):
                data = b""
            async with self.changed:
                await self.changed.wait_for(
                    lambda: all(len(each) < _CHUNKS for each in self.readers)
                )
                self.is_ended = not data
                for each in self.readers:
                    each.append(data or None)
                self.changed.notify_all()

    async def next_of(self, reader: "deque[bytes | None]", seconds: float) -> bytes | None:
        """Return the next output of the program, b"" if there is none for so long, None at its end."""
        async with self.changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.changed.wait_for(lambda: reader)
            found = reader.popleft() if reader else b""
            self.changed.notify_all()
        return found

    async def leave(self, reader: "deque[bytes | None]") -> None:
        async with self.changed:
            self.readers.remove(reader)
            self.changed.notify_all()

    def close(self) -> None:
        self._task.cancel()
        self.terminal.close()


class Terminals:
    """The open terminals of one sandbox; called in one event loop."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._all: dict[int, _OpenTerminal] = {}

    async def answer(
        self, path: str, body: bytes, home: str, seconds: float | None
    ) -> Response | None:
        """Answer a call that is about a terminal, and return None for any other."""
        if not path.startswith(_SERVICE):
            return None
        name, is_stream = path.removeprefix(_SERVICE), path.endswith(("/Start", "/Connect"))
        try:
            call = msgspec.json.decode(body[_ENVELOPE.size :] if is_stream else body, type=_Call)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None  # the server in the cell reports the error
        if name == "Start" and call.pty is not None:
            return await self._start(call, home, seconds)
        found = self._all.get(call.process.pid)
        if found is None:
            return None
        if name == "Connect":
            return _streamed(self._followed(found, seconds, is_killed=False))
        return await _do(found, name, call)

    async def _start(self, call: _Call, home: str, seconds: float | None) -> Response:
        process, size = call.process, (call.pty or _Pty()).size
        if len(self._all) >= _MOST:
            return _failed("resource_exhausted", f"at most {_MOST} terminals are possible")
        command = [
            process.cmd,
            *(each for each in process.args if each != "-l"),
        ]  # no profile to read
        directory = home if process.cwd in (None, "~") else posixpath.join(home, process.cwd or "")
        try:
            terminal = await self._session.aterminal(
                command, cwd=directory, env=process.envs, rows=size.rows, columns=size.cols
            )
        except CellwrightError as error:
            return _failed("invalid_argument", f"pty: {error.what}")
        made = _OpenTerminal(terminal)
        self._all[made.pid] = made
        return _streamed(self._followed(made, seconds, is_killed=True))

    async def _followed(
        self, opened: _OpenTerminal, seconds: float | None, *, is_killed: bool
    ) -> AsyncIterator[bytes]:
        """Yield the events of a terminal; after `seconds` fail, with `is_killed` kill its program."""
        deadline = time.monotonic() + seconds if seconds else float("inf")
        reader: deque[bytes | None] = deque([None] if opened.is_ended else [])
        opened.readers.append(reader)
        try:
            yield _event({"start": {"pid": opened.pid}})
            while (left := deadline - time.monotonic()) > 0:
                data = await opened.next_of(reader, min(left, _KEEPALIVE_SECONDS))
                if data is None:
                    yield _event({"end": await self._end(opened)})
                    yield _envelope(2, {})
                    return
                shown = {"data": {"pty": base64.b64encode(data).decode()}}
                yield _event(shown if data else {"keepalive": {}})
            if is_killed:
                await opened.terminal.akill()
            yield _failure("deadline_exceeded", "the terminal took longer than its timeout")
        finally:
            await opened.leave(reader)

    async def _end(self, opened: _OpenTerminal) -> dict[str, Any]:
        self._all.pop(opened.pid, None)
        code = opened.terminal.exit_code
        with contextlib.suppress(CellwrightError, TimeoutError):
            code = await opened.terminal.await_end(_END_SECONDS) if code is None else code
        opened.close()
        end: dict[str, Any] = {"exited": True, "status": f"exit status {code}"}
        return {**end, "exitCode": code, "error": f"exit status {code}"} if code else end

    def close(self) -> None:
        for each in self._all.values():
            each.close()
        self._all.clear()


async def _do(opened: _OpenTerminal, name: str, call: _Call) -> Response | None:
    try:
        if name == "SendInput":
            await opened.terminal.awrite(base64.b64decode(call.input.pty or call.input.stdin))
        elif name == "Update" and call.pty is not None:
            opened.terminal.resize(call.pty.size.rows, call.pty.size.cols)
        elif name == "SendSignal" and call.signal in _SIGNALS:
            await opened.terminal.akill(_SIGNALS[call.signal])
        else:
            return None
    except (CellwrightError, OSError, ValueError) as error:
        return _json({"code": "invalid_argument", "message": str(error)}, 400)
    return _json({})


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _streamed(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="application/connect+json")


def _failed(code: str, message: str) -> Response:
    return Response(_failure(code, message), media_type="application/connect+json")


def _failure(code: str, message: str) -> bytes:
    return _envelope(2, {"error": {"code": code, "message": message}})


def _event(event: dict[str, Any]) -> bytes:
    return _envelope(0, {"event": event})


def _envelope(flags: int, message: dict[str, Any]) -> bytes:
    data = msgspec.json.encode(message)
    return _ENVELOPE.pack(flags, len(data)) + data
