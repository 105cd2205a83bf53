"""A server with E2B's interface, as a user starts it, for the tests of this folder."""

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"


class E2bServer(NamedTuple):
    """Where it serves, and what its clients need in their environment."""

    url: str
    pid: int

    @property
    def variables(self) -> dict[str, str]:
        return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": KEY}


@contextlib.contextmanager
def serving(*options: str) -> Iterator[E2bServer]:
    command = [sys.executable, "-m", "cellwright", "e2b", "--http", "127.0.0.1:0", *options]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "E2B_API_KEY": KEY}
    )
    try:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"E2B_API_URL=(\S+)", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        yield E2bServer(found[1], process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=30)


class Client:
    """Sends requests as any program could."""

    def __init__(self, url: str, key: str = KEY) -> None:
        self._url, self._key = url, key

    def ask(
        self, method: str, path: str, body: object = None, data: bytes | None = None,
        **headers: str,
    ) -> tuple[int, Any]:  # fmt: skip
        if body is not None:
            data = json.dumps(body).encode()
        given = {"X-API-Key": self._key, "Content-Type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(f"{self._url}{path}", data, given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, _decoded(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _decoded(error.read())

    def make(self, **request: object) -> dict[str, str]:
        status, made = self.ask("POST", "/v2/sandboxes", {"templateID": "base", **request})
        assert status == 201, made
        return dict(made)

    def reach(
        self,
        made: dict[str, str],
        method: str,
        path: str,
        port: int = 49983,
        token: str = "",
        **given: Any,
    ) -> tuple[int, Any]:
        return self.ask(
            method, path, E2b_Sandbox_Id=made["sandboxID"], E2b_Sandbox_Port=str(port),
            X_Access_Token=token or made["envdAccessToken"], **given,
        )  # fmt: skip


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
