"""The Jupyter kernel: a host process that passes programs of a notebook to a cell (extra `jupyter`).

The connection's key and the sockets of the kernel stay on the host, so a program can neither speak for
the kernel nor reach another one.

The kernel specification: the directory by which Jupyter finds the kernel and the command of it.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....policies.errors import CellwrightError, PolicyError
from ....policies.extras import how_to_install
from ....policies.policy import Policy
from ...sandbox.sessions.session import Session
from ...text.terminal_text import violation_lines
from ...version import NAME, installed_version
from .notebook_session import NotebookOutcome, NotebookSession, error_of, safe_bundle

try:
    from ipykernel.kernelapp import IPKernelApp
    from ipykernel.kernelbase import Kernel
except ImportError as error:
    raise PolicyError(
        f"jupyter: {error.name} is not installed", how_to_install("jupyter")
    ) from None

_MOST_HISTORY = 1000


class CellwrightKernel(Kernel):
    """Answers a notebook's requests by a session in a cell."""

    implementation = NAME
    implementation_version = installed_version() or "0"
    banner = f"{NAME}: each program of this notebook runs in an isolated cell"
    language_info = {  # noqa: RUF012 - as the base class has it
        "name": "python",
        "mimetype": "text/x-python",
        "file_extension": ".py",
        "pygments_lexer": "ipython3",
        "codemirror_mode": {"name": "ipython", "version": 3},
    }
    notebook: NotebookSession  # set by `serve`

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)  # type: ignore[no-untyped-call]
        self._history: list[tuple[int, int, str]] = []

    async def do_execute(
        self, code: str, silent: bool, store_history: bool = True,
        user_expressions: Mapping[str, str] | None = None, allow_stdin: bool = False,
        *, cell_meta: Any = None, cell_id: Any = None,
    ) -> dict[str, Any]:  # fmt: skip
        if not code.strip():
            return self._reply(user_expressions={})
        if store_history:
            self._history = [*self._history, (0, self.execution_count, code)][-_MOST_HISTORY:]

        async def tell(stream: str, text: str) -> None:
            if not silent:
                self._send("stream", {"name": stream, "text": text})

        try:
            done = await self.notebook.execute(
                code, self.execution_count, tell, expressions=user_expressions
            )
        except CellwrightError as error:
            return self._failed(*error_of(error), str(error).splitlines(), silent=silent)
        if not silent:
            self._show(done)
        if done.result.ok:
            return self._reply(user_expressions=_expressions(done))
        lines = (done.traceback or str(done.result.error or "")).splitlines()
        hints = [f"hint: {each}" for each in (*done.result.notices, *done.result.hints)]
        return self._failed(*error_of(done.result), [*lines, *hints], silent=silent)

    def _show(self, done: NotebookOutcome) -> None:
        for bundle in filter(None, map(safe_bundle, done.displayed)):
            self._send("display_data", {"data": bundle, "metadata": {}})
        if done.value:
            content = {"data": safe_bundle(done.value), "execution_count": self.execution_count}
            self._send("execute_result", {**content, "metadata": {}})
        if refused := violation_lines(done.result):
            self._send("stream", {"name": "stderr", "text": "\n".join([*refused, ""])})

    def _failed(
        self, name: str, message: str, traceback: list[str], *, silent: bool
    ) -> dict[str, Any]:
        """Report an error; after the loss of its session the notebook goes on in another one."""
        try:
            if self.notebook.reopen():
                traceback = [
                    *traceback,
                    "The cell is gone, and its variables with it; a new one started.",
                ]
        except CellwrightError as error:
            traceback = [*traceback, f"The cell is gone, and no other could be made: {error}"]
        content = {"ename": name, "evalue": message, "traceback": traceback}
        if not silent:
            self._send("error", content)
        return {"status": "error", "execution_count": self.execution_count, **content}

    def _reply(self, **content: Any) -> dict[str, Any]:
        return {"status": "ok", "execution_count": self.execution_count, "payload": [], **content}

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        self.send_response(self.iopub_socket, kind, content)  # type: ignore[no-untyped-call]

    async def do_complete(self, code: str, cursor_pos: int | None) -> dict[str, Any]:
        position = len(code) if cursor_pos is None else cursor_pos
        start, matches = await self.notebook.complete(code, position)
        return {
            "status": "ok", "matches": matches, "cursor_start": start, "cursor_end": position,
            "metadata": {},
        }  # fmt: skip

    async def do_inspect(
        self, code: str, cursor_pos: int | None, detail_level: int = 0, omit_sections: object = ()
    ) -> dict[str, Any]:
        position = len(code) if cursor_pos is None else cursor_pos
        said = await self.notebook.inspect(code, position, with_source=detail_level > 0)
        data = {"text/plain": said} if said else {}
        return {"status": "ok", "found": bool(said), "data": data, "metadata": {}}

    async def do_is_complete(self, code: str) -> dict[str, Any]:
        state, indent = await self.notebook.is_complete(code)
        return {"status": state, "indent": indent} if state == "incomplete" else {"status": state}

    async def do_history(
        self, hist_access_type: str, output: bool, raw: bool, session: int | None = None,
        start: int | None = None, stop: int | None = None, n: int | None = None,
        pattern: str | None = None, unique: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Answer the last `n` programs; only these are kept, in memory."""
        kept = self._history[-n:] if n else self._history
        entries = [(*each[:2], (each[2], None)) if output else each for each in kept]
        return {"status": "ok", "history": entries if hist_access_type == "tail" else []}

    async def interrupt_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Interrupt the program; called in the control thread."""
        self.notebook.interrupt()
        if self.session:
            self.session.send(stream, "interrupt_reply", {"status": "ok"}, parent, ident=ident)

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        self.notebook.interrupt()
        return {"status": "ok", "restart": restart}


def _expressions(done: NotebookOutcome) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, bundle in done.expressions.items():
        if "error" in bundle:
            told[name] = {
                "status": "error", "ename": str(bundle["error"]), "traceback": [],
                "evalue": str(bundle.get("text/plain", "")),
            }  # fmt: skip
        else:
            told[name] = {"status": "ok", "data": {"text/plain": str(bundle.get("text/plain", ""))},
                          "metadata": {}}  # fmt: skip
    return told


def serve(
    connection_file: str, open_session: Callable[[], Session], policy: Policy,
    timeout: float | None = None,
) -> None:  # fmt: skip
    """Serve the kernel of one notebook until its frontend ends it."""
    notebook = NotebookSession(open_session, policy.limits.wall_seconds, timeout)
    try:
        kernel = type("NotebookKernel", (CellwrightKernel,), {"notebook": notebook})
        app = IPKernelApp.instance(kernel_class=kernel)
        app.initialize(["-f", connection_file])
        app.start()
    finally:
        notebook.close()


def install(
    name: str, display_name: str, command: Sequence[str], *, user: bool, prefix: str | None
) -> str:
    """Write the specification of a kernel and return its directory; raises PolicyError.

    `command` gets the path of the connection file as its last argument.  `user`: for this user only;
    `prefix`: below this directory; else for all users.
    """
    try:
        from jupyter_client.kernelspec import KernelSpecManager
    except ImportError as error:
        raise PolicyError(
            f"jupyter: {error.name} is not installed", how_to_install("jupyter")
        ) from None
    specification = {
        "argv": [*command, "{connection_file}"], "display_name": display_name, "language": "python",
        "interrupt_mode": "message", "metadata": {"debugger": False},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "kernel.json").write_text(json.dumps(specification, indent=1))
        try:
            return str(
                KernelSpecManager().install_kernel_spec(directory, name, user=user, prefix=prefix)
            )
        except ValueError as error:
            raise PolicyError(f"--name: {error}") from None
        except OSError as error:
            raise PolicyError(
                f"cannot write {error.filename}: {error.strerror}", "use --user or --prefix DIR"
            ) from None
