"""A server with the chat-completions protocol that answers by a script, and can show every fault of
small servers.

The reply to a conversation is chosen by the number of replies that are in it, so that a client which
was killed and asks again gets the same one.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Reply = str | Callable[["Exchange"], None]


class Exchange(NamedTuple):
    """One request, and the means to answer it."""

    request: dict[str, Any]
    handler: BaseHTTPRequestHandler

    def send(
        self, status: int, body: bytes, kind: str = "application/json", **headers: str
    ) -> None:
        self.handler.send_response(status)
        self.handler.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.handler.send_header(name.replace("_", "-"), value)
        self.handler.end_headers()
        self.handler.wfile.write(body)

    def stream(self, *events: object, end: bool = True) -> None:
        parts = [f"data: {json.dumps(each)}\n\n" for each in events]
        parts += ["data: [DONE]\n\n"] if end else []
        self.send(200, "".join(parts).encode(), "text/event-stream")


def delta(text: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """Return one event of a stream."""
    return {"choices": [{"index": 0, "delta": {"content": text, **more}, "finish_reason": finish}]}


def whole(exchange: Exchange, finish: str, **message: Any) -> None:
    """Answer a client that asks for no stream."""
    reply = {
        "id": "r", "object": "chat.completion", "created": 0, "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    }  # fmt: skip
    exchange.send(200, json.dumps(reply).encode())


def said(text: str) -> Callable[[Exchange], None]:
    """Answer as servers do: the role, the text in parts, the end, the usage."""

    def answer(exchange: Exchange) -> None:
        if not exchange.request.get("stream"):
            whole(exchange, "stop", content=text)
            return
        parts = [delta(text[at : at + 7]) for at in range(0, len(text), 7)]
        usage = {"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 20}}
        exchange.stream(delta(None, role="assistant"), *parts, delta(None, "stop"), usage)

    return answer


def calling(*calls: tuple[str, str]) -> Callable[[Exchange], None]:
    """Answer with tool calls, their arguments in parts."""

    def answer(exchange: Exchange) -> None:
        if not exchange.request.get("stream"):
            made = [
                {
                    "id": f"c{index}",
                    "type": "function",
                    "function": {"name": name, "arguments": text},
                }
                for index, (name, text) in enumerate(calls)
            ]
            whole(exchange, "tool_calls", content=None, tool_calls=made)
            return
        parts = []
        for index, (name, arguments) in enumerate(calls):
            first, rest = arguments[:5], arguments[5:]
            start = {
                "index": index,
                "id": f"c{index}",
                "function": {"name": name, "arguments": first},
            }
            more = {"index": index, "function": {"arguments": rest}}
            parts += [delta(None, tool_calls=[start]), delta(None, tool_calls=[more])]
        exchange.stream(*parts, delta(None, "tool_calls"))

    return answer


def failing(status: int, times: int, then: Reply, **headers: str) -> Callable[[Exchange], None]:
    """Answer with an error some times, and then as usual."""
    left = [times]

    def answer(exchange: Exchange) -> None:
        if left[0] > 0:
            left[0] -= 1
            exchange.send(status, b'{"error": {"message": "no room"}}', **headers)
        else:
            answer_with(then, exchange)

    return answer


def answer_with(reply: Reply, exchange: Exchange) -> None:
    (said(reply) if isinstance(reply, str) else reply)(exchange)


class ModelServer:
    """The server; `requests` are those it got."""

    def __init__(self, script: Sequence[Reply], drafts: Sequence[Reply] = ()) -> None:
        """`script`: the replies of a run, in order; `drafts`: those of a Toolsmith."""
        self.script, self.drafts = script, drafts
        self.requests: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                request = json.loads(data) | {
                    "path": self.path,
                    "auth": self.headers["Authorization"],
                }
                outer.requests.append(request)
                answer_with(outer.reply(request), Exchange(request, self))

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def reply(self, request: dict[str, Any]) -> Reply:
        messages = request["messages"]
        is_draft = "You write one tool" in messages[0]["content"]
        before = sum(each["role"] == "assistant" for each in messages)
        return (self.drafts if is_draft else self.script)[before]


@contextmanager
def serving(
    script: Sequence[Reply], drafts: Sequence[Reply] = (), server: ModelServer | None = None
) -> Iterator[ModelServer]:
    """Serve until the block ends; `server` is one with a script of its own."""
    server = server or ModelServer(script, drafts)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()
