"""A web server outside of cells: HTTP/1.1 and HTTP/2 over TLS, WebSockets, events, large bodies, an index
of packages; by Hypercorn."""

import asyncio
import hashlib
import io
import socket
import threading
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hypercorn.asyncio import serve
from hypercorn.config import Config

from tests.network import NAME, certificate

LARGE = bytes(range(256)) * (8 << 12)  # 8 MiB
_Send = Callable[[dict[str, Any]], Awaitable[None]]
_Receive = Callable[[], Awaitable[dict[str, Any]]]


class WebServer:
    """Serves NAME on a port of the host's loopback, in a thread, until it is closed."""

    def __init__(self, directory: Path) -> None:
        self.trusted, _ = certificate(directory, NAME)
        self.trusted.chmod(0o644)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.url = f"https://{NAME}:{self.port}"
        self._config = Config()
        self._config.bind = [f"fd://{listener.detach()}"]
        self._config.certfile = str(self.trusted)
        self._config.keyfile = str(directory / "key.pem")
        self._config.accesslog = self._config.errorlog = None
        self._config.keep_alive_timeout = self._config.ssl_handshake_timeout = (
            300  # by default it closes what asks nothing for 5 s
        )
        self._config.websocket_max_message_size = len(LARGE)
        self._loop = asyncio.new_event_loop()
        self._is_closed = asyncio.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_until_complete(
            serve(Application(), self._config, shutdown_trigger=self._is_closed.wait)
        )
        self._loop.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._is_closed.set)
        self._thread.join()


class Application:
    """The ASGI application (asgi.readthedocs.io)."""

    def __init__(self) -> None:
        self._heard = asyncio.Semaphore(0)  # events that a client has got

    async def __call__(self, scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "websocket":
            await _echo(receive, send)
        elif scope["path"] == "/events":
            await self._events(send)
        else:
            body = await self._answer(scope, receive)
            await _begin(send, "text/html", 404 if body is None else 200)
            await send({"type": "http.response.body", "body": body or b""})

    async def _answer(self, scope: dict[str, Any], receive: _Receive) -> bytes | None:
        body = await _body(receive)
        if scope["path"] == "/heard":
            self._heard.release()
        wheel = "thing-1.0-py3-none-any.whl"
        answers = {
            "/hello": f"hello by HTTP/{scope['http_version']}".encode(),
            "/digest": hashlib.sha256(body).hexdigest().encode(),
            "/large": LARGE,
            "/heard": b"",
            "/simple/thing/": f'<a href="/{wheel}">{wheel}</a>'.encode(),
            f"/{wheel}": _wheel(),
        }
        return answers.get(scope["path"])

    async def _events(self, send: _Send) -> None:
        """Send each event only after the client has told, by another request, that it got the last."""
        await _begin(send, "text/event-stream")
        for number in range(3):
            event = f"data: {number}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.wait_for(self._heard.acquire(), 30)
        await send({"type": "http.response.body", "body": b""})


async def _begin(send: _Send, kind: str, status: int = 200) -> None:
    headers = [(b"content-type", kind.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _body(receive: _Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _live(receive: _Receive, send: _Send) -> None:
    for phase in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{phase}.complete"})


async def _echo(receive: _Receive, send: _Send) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "bytes": message["bytes"]})


def _wheel() -> bytes:
    """Return a package `thing` with the attribute `answer`."""
    about, metadata = "thing-1.0.dist-info", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n"
    files = {
        "thing.py": "answer = 42\n",
        f"{about}/METADATA": metadata,
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()
