"""`E2bCell`: the cell of one E2B sandbox, with its part of envd and its code contexts."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ....policies.closing import Closing
from ....policies.compile import home_below_home
from ....policies.errors import CellwrightError, LaunchError, PolicyError
from ...adapters.jupyter.notebook_session import NotebookSession
from ...sandbox.ports.exposed import ExposedPort
from ...sandbox.request import check_environment
from ...sandbox.sandbox import Sandbox
from ...sandbox.session import Session

ENVD_PORT, CODE_PORT = 49983, 49999  # of E2B's clients
_MODULES = ("calls", "commands", "files", "watchers", "server")  # in the order of their imports
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
        self.home = home_below_home(self.sandbox.policy) or "/workspace"
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
        self._envd = self.session.start_command(["python3", "-I", "-S", "-c", program])
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
            pass  # its launcher died, which ends the cell as well
        finally:
            self.sandbox.close()
