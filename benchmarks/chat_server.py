"""A model's server for benchmarks: it replies at once, with one step of a long count after the other.

`python -m cellwright.benchmarks.chat_server STEPS` prints its URL.  GET tells how many seconds after
the last reply each request came, and the tokens of the longest conversation.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STEP = "x = globals().get('x', 0) + 1\nx"
_BYTES_OF_A_TOKEN = 3


class ChatServer(ThreadingHTTPServer):
    """Counts the replies, of which the last one ends the task."""

    daemon_threads = True

    def __init__(self, steps: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.left = steps
        self.between: list[float] = []  # seconds
        self.tokens = 0
        self.replied = 0.0

    def reply(self, messages: list[dict[str, str]]) -> str:
        """Return the next program; note the time and the length of the conversation."""
        if self.replied:
            self.between.append(time.perf_counter() - self.replied)
        size = sum(len(each["content"].encode()) // _BYTES_OF_A_TOKEN + 4 for each in messages)
        self.tokens = max(self.tokens, size)
        self.left -= 1
        code = f"{STEP}  # {self.left}" if self.left > 0 else "final_answer(x)"
        return f"```python\n{code}\n```"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body waits for the client's delayed ACK, 40 ms
    server: ChatServer

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = self.server.reply(request["messages"])
        middle = len(text) // 2
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": {"content": part}}]} for part in (text[:middle], text[middle:])
        ]
        events += [
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        ]
        lines = [f"data: {json.dumps(each)}\n\n" for each in events]
        self._send("".join([*lines, "data: [DONE]\n\n"]).encode(), "text/event-stream")
        self.server.replied = time.perf_counter()

    def do_GET(self) -> None:
        told = {"between": self.server.between, "tokens": self.server.tokens}
        self._send(json.dumps(told).encode(), "application/json")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    with ChatServer(int(sys.argv[1])) as server:
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever(0.05)
