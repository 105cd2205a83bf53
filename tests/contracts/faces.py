"""The faces through which callers have sessions: a sandbox's own, a daemon's, a fleet's, a web server's.

Each opens sessions with the methods of `Session`; those of the web server are requests over HTTP.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from cellwright import Fleet, HostSettings, PauseSettings, Sandbox, SessionLost, SessionSettings
from cellwright.policies import errors
from tests.conftest import policy_named
from tests.harness.fleet.test_cell_node import node_here
from tests.harness.servers.daemon.configured import configured
from tests.harness.servers.web.web_servers import Web, web_server

_DAEMON = """
policies = ["{policy}"]
[pauses]
directory = "paused"
[sessions]
alive = {alive}
idle_seconds = {idle_seconds}
"""


class Face(NamedTuple):
    """`open` opens a session, as `Sandbox.session` does; `sandbox` offers the rest."""

    open: Callable[..., Any]
    sandbox: Any


class WebSession:
    """A session over HTTP, with the methods and exceptions of `Session`."""

    def __init__(self, web: Web, id: str) -> None:
        self._web = web
        self._path = f"/v1/sessions/{id}"
        self.id = id

    def _ask(self, method: str, below: str = "", **given: Any) -> Any:
        return _good(self._web.ask(method, self._path + below, **given))

    def execute(
        self, code: str, timeout: float | None = None, language: str = "",
        files: Mapping[str, str] | None = None,
    ) -> Any:  # fmt: skip
        body = {"code": code, "timeout": timeout, "language": language, "files": files}
        given = {name: each for name, each in body.items() if each}
        return SimpleNamespace(**self._ask("POST", "/executions", json=given).json())

    def upload(self, path: str, data: bytes) -> None:
        self._ask("PUT", f"/files/{path.replace('/', '%2F')}", content=data)

    def download(self, path: str) -> bytes:
        return bytes(self._ask("GET", f"/files/{path.replace('/', '%2F')}").content)

    def files(self) -> Any:
        found = self._ask("GET", "/files").json()["files"]
        return tuple(SimpleNamespace(**each) for each in found)

    def close(self) -> None:
        with contextlib.suppress(SessionLost):  # closing twice is fine
            self._ask("DELETE")

    def __enter__(self) -> "WebSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _good(answer: Any) -> Any:
    """Return an answer, or raise the exception that a problem stands for."""
    if answer.is_success:
        return answer
    problem = answer.json()
    kinds = {each.title: each for each in vars(errors).values() if _is_error(each)}
    kinds |= {"not_found": SessionLost, "invalid": errors.PolicyError, "busy": errors.BusyError}
    raise kinds.get(problem["title"], errors.CellwrightError)(problem["detail"])


def _is_error(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, errors.CellwrightError)


@contextlib.contextmanager
def _local(place: Path, policy: str, sessions: SessionSettings) -> Iterator[Face]:
    host = HostSettings(pauses=PauseSettings(place / "paused"))
    with Sandbox(policy=policy_named(policy), pool=1, host=host, sessions=sessions) as box:
        yield Face(box.session, box)


@contextlib.contextmanager
def _daemon(place: Path, policy: str, sessions: SessionSettings) -> Iterator[Face]:
    alive, idle_seconds = sessions.alive, sessions.idle_seconds
    text = _DAEMON.format(policy=policy, alive=alive, idle_seconds=idle_seconds)
    with configured(place, text) as daemon, daemon.sandbox(policy) as box:
        yield Face(box.session, box)


@contextlib.contextmanager
def _fleet(place: Path, policy: str, sessions: SessionSettings) -> Iterator[Face]:
    with Fleet([node_here("a", policy=policy)], 2) as fleet:
        yield Face(fleet.session, fleet)


@contextlib.contextmanager
def _web(place: Path, policy: str, sessions: SessionSettings) -> Iterator[Face]:
    with web_server(policy) as web:

        def opened(**given: Any) -> WebSession:
            answer = _good(web.ask("POST", "/v1/sessions", json=given)).json()
            return WebSession(web, answer["session"])

        yield Face(opened, web)


FACES = {"local": _local, "daemon": _daemon, "fleet": _fleet, "web": _web}
