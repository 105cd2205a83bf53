"""`CellDeployment` and `SweRexCellRuntime`: SWE-ReX with a cell in place of a container; its server.

The host parses no command and no output of a program: the cell's own bash checks the syntax of
commands, and a command ends where a text appears that the program could not know.
"""

import argparse
import asyncio
import contextlib
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from ....policies.errors import CellwrightError
from ...sandbox.calls.background import in_thread
from ...sandbox.programs.terminal import Terminal
from ...sandbox.sandbox import Sandbox
from ..common.cell_sandbox_session import AdapterSession, missing
from .transfers import LASTING, upload

try:
    from swerex import exceptions, server
    from swerex.deployment.abstract import AbstractDeployment
    from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
    from swerex.runtime import abstract as rex
    from swerex.utils.log import get_logger
except ImportError as error:
    raise missing("swerex", "swe-rex", error) from error

_MOST_CHARACTERS = 10 * 1024 * 1024  # a command with more output is an error
_BACK = 4096  # characters that are searched again when output arrives: the longest expected text
_CONTROL = re.compile(r"\x1b[@-_][0-?]*[ -/]*[@-~]")
_END = re.compile(r"([0-9a-f]{16}):[0-9]+:\1")  # the end of an earlier command, which was stopped
_INTERRUPT, _STOP, _KILL = "\x03", "\x1a", "kill -9 %1; wait -f %1\n"
_KILL_SECONDS = 2.0


class _Shell:
    """One bash at a terminal of the cell."""

    def __init__(self, cell: AdapterSession, terminal: Terminal) -> None:
        self._cell, self._terminal = cell, terminal
        self._prompt = f"PS1-{secrets.token_hex(8)}-"
        self._seen = ""
        self._lock = asyncio.Lock()

    async def start(self, request: Any) -> str:
        """Source the files of the request; return their output."""
        lines = ["stty -echo -onlcr", *(f"source {path}" for path in request.startup_source)]
        # in two parts, because the terminal may still echo it
        half = len(self._prompt) // 2
        lines += [f"PS1='{self._prompt[:half]}''{self._prompt[half:]}' PS2='' PS0=''"]
        await self._type("; ".join(lines))
        output, _ = await self._until([re.escape(self._prompt)], request.startup_timeout)
        return output.partition(lines[-1])[2] if lines[-1] in output else output

    async def run(self, action: Any) -> Any:
        async with self._lock:
            if isinstance(action, rex.BashInterruptAction):
                return await self._interrupt(action)
            if action.is_interactive_command or action.is_interactive_quit:
                return await self._interact(action)
            done = await self._command(action)
        if action.check == "raise" and done.exit_code != 0:
            words = f"Command {action.command!r} failed with exit code {done.exit_code}. "
            words = f"{words}Here is the output:\n{done.output!r}"
            raise exceptions.NonZeroExitCodeError(
                f"{action.error_msg}: {words}" if action.error_msg else words
            )
        return done

    async def _command(self, action: Any) -> Any:
        path = f"/tmp/.cellwright-{secrets.token_hex(8)}"  # noqa: S108 - of the cell
        await in_thread(lambda: self._cell.files.write(path, action.command.encode()))
        checked = await self._cell.arun(["bash", "-n", path])
        if checked.exit_code != 0:
            stdout, stderr = checked.text
            raise exceptions.BashIncorrectSyntaxError(
                f"bash: a command of invalid syntax: {stderr}",
                extra_info={"bash_stdout": stdout, "bash_stderr": stderr},
            )
        end = secrets.token_hex(8)
        await self._type(f'eval "$(cat {path})"; printf "%s:%d:%s" {end} $? {end}; rm -f {path}')
        expected = [f"{end}:(?P<code>[0-9]+):{end}", *action.expect]
        output, found = await self._until(expected, action.timeout, action.command)
        if found.re.pattern != expected[0]:
            code, matched = None, found.re.pattern
        else:
            notices, _ = await self._until(
                [re.escape(self._prompt)], action.timeout, action.command
            )
            output += notices  # about jobs that have ended
            code, matched = int(found["code"]), self._prompt
        return rex.BashObservation(
            output=output, exit_code=None if action.check == "ignore" else code,
            expect_string=matched,
        )  # fmt: skip

    async def _interact(self, action: Any) -> Any:
        """Type a line for a program, and wait for one of the expected texts or the prompt."""
        await self._drop_prompts()
        await self._type(action.command)
        expected = [*action.expect, re.escape(self._prompt)]
        output, found = await self._until(expected, action.timeout, action.command)
        if action.is_interactive_quit:  # undo changes of the program to the terminal
            await self._type("stty -echo -onlcr")
            await self._until([re.escape(self._prompt)], action.timeout, action.command)
        else:
            output = output.lstrip().removeprefix(action.command).strip()
        return rex.BashObservation(output=output, exit_code=0, expect_string=found.re.pattern)

    async def _interrupt(self, action: Any) -> Any:
        """Interrupt the program; if it goes on, stop and kill it."""
        expected = [*action.expect, re.escape(self._prompt)]
        tries = [(_INTERRUPT, action.timeout)] * action.n_retry
        tries += [(_STOP, max(action.timeout, _KILL_SECONDS)), (_KILL, _KILL_SECONDS)]
        output = ""
        for keys, timeout in tries:
            await self._terminal.awrite(keys)
            try:
                some, found = await self._until(expected, timeout, "an interrupt")
            except exceptions.CommandTimeoutError:
                continue
            output += some
            if keys != _STOP:
                return rex.BashObservation(
                    output=output.strip(), exit_code=0, expect_string=found.re.pattern
                )
        raise exceptions.CommandTimeoutError("the program cannot be interrupted")

    async def _type(self, line: str) -> None:
        await self._terminal.awrite(f"{line}\n")

    async def _drop_prompts(self) -> None:
        """Drop the prompts that interrupts left."""
        with contextlib.suppress(TimeoutError):
            while data := await self._terminal.aread(timeout=0):
                self._seen += data.decode(errors="backslashreplace")
        self._seen = self._seen.replace(self._prompt, "")

    async def _until(
        self, expected: Sequence[str], timeout: float | None, command: str = "bash"
    ) -> tuple[str, re.Match[str]]:
        """Read up to the first of the `expected` texts; return what came before it, and the match."""
        patterns = [re.compile(each) for each in expected]
        deadline = None if timeout is None else time.monotonic() + timeout
        searched = 0
        while True:
            start = max(0, searched - _BACK)
            matches = (each.search(self._seen, start) for each in patterns)
            found = min(
                (each for each in matches if each), key=lambda each: each.start(), default=None
            )
            if found is not None:
                before, self._seen = self._seen[: found.start()], self._seen[found.end() :]
                return self._plain(before), found
            searched = len(self._seen)
            if searched > _MOST_CHARACTERS:
                self._seen = ""
                raise exceptions.NoExitCodeError(
                    f"more than {_MOST_CHARACTERS} characters of output"
                )
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                data = await self._terminal.aread(timeout=left)
            except TimeoutError:
                raise exceptions.CommandTimeoutError(
                    f"timeout after {timeout} seconds while running command {command!r}"
                ) from None
            if not data:
                raise exceptions.NoExitCodeError("the shell has ended")
            self._seen += data.decode(errors="backslashreplace")

    def _plain(self, text: str) -> str:
        """Return output without escape sequences, and without what an earlier command left."""
        text = _CONTROL.sub("", text).replace("\r\n", "\n")
        return _END.sub("", text.replace(self._prompt, ""))

    async def close(self) -> None:
        await self._terminal.aclose()


class SweRexCellRuntime(rex.AbstractRuntime):
    """A session of a sandbox as the runtime of SWE-ReX.

    `sandbox`: one of yours, else one is made of `policy`, default the profile workshop, and `options`,
    arguments of `Sandbox`.
    """

    def __init__(self, sandbox: Sandbox | None = None, **options: Any) -> None:
        if sandbox is None:
            options = {"sessions": LASTING, **options}
        self.cell = AdapterSession(sandbox, **options)
        self.logger = get_logger("rex-runtime")
        self._shells: dict[str, _Shell] = {}

    async def is_alive(self, *, timeout: float | None = None) -> Any:
        try:
            await in_thread(lambda: self.cell.session)
        except CellwrightError as error:
            return rex.IsAliveResponse(is_alive=False, message=str(error))
        is_open = self.cell.is_open
        return rex.IsAliveResponse(
            is_alive=is_open, message="" if is_open else "the cell has ended"
        )

    async def create_session(self, request: Any) -> Any:
        if request.session in self._shells:
            raise exceptions.SessionExistsError(f"session {request.session} already exists")
        session = await in_thread(lambda: self.cell.session)
        command = ["bash", "--noprofile", "--norc", "--noediting", "-i"]
        terminal = await session.aterminal(command, env={"TERM": "dumb", "PS1": ""})
        self._shells[request.session] = shell = _Shell(self.cell, terminal)
        return rex.CreateBashSessionResponse(output=await shell.start(request))

    def _shell(self, name: str) -> _Shell:
        if name not in self._shells:
            raise exceptions.SessionDoesNotExistError(f"session {name!r} does not exist")
        return self._shells[name]

    async def run_in_session(self, action: Any) -> Any:
        return await self._shell(action.session).run(action)

    async def close_session(self, request: Any) -> Any:
        await self._shell(request.session).close()
        del self._shells[request.session]
        return rex.CloseBashSessionResponse()

    async def execute(self, command: Any) -> Any:
        """Run a command; the variables of `env` are added to those of the cell."""
        given = command.command
        if isinstance(given, str) and not command.shell:
            given = [given]
        elif not isinstance(given, str) and command.shell:
            given = " ".join(given[:1])  # as subprocess.run has it: the rest goes to the shell
        done = await self.cell.arun(
            given, shell=command.shell, timeout=command.timeout, env=command.env, cwd=command.cwd,
            is_merged=command.merge_output_streams,
        )  # fmt: skip
        if done.timed_out:
            raise exceptions.CommandTimeoutError(
                f"Timeout ({command.timeout}s) exceeded while running command"
            )
        stdout, stderr = (
            each.decode(errors="backslashreplace") for each in (done.stdout, done.stderr)
        )
        if command.check and done.exit_code != 0:
            words = f"Command {command.command!r} failed with exit code {done.exit_code}. "
            words = f"{words}Stdout:\n{stdout!r}\nStderr:\n{stderr!r}"
            raise exceptions.NonZeroExitCodeError(
                f"{command.error_msg}: {words}" if command.error_msg else words
            )
        return rex.CommandResponse(stdout=stdout, stderr=stderr, exit_code=done.exit_code)

    async def read_file(self, request: Any) -> Any:
        content = await in_thread(lambda: self.cell.files.read(request.path))
        text = content.decode(request.encoding or "utf-8", request.errors or "strict")
        return rex.ReadFileResponse(content=text)

    async def write_file(self, request: Any) -> Any:
        await in_thread(lambda: self.cell.files.write(request.path, request.content.encode()))
        return rex.WriteFileResponse()

    async def upload(self, request: Any) -> Any:
        await in_thread(lambda: upload(self.cell, request.source_path, request.target_path))
        return rex.UploadResponse()

    async def close(self) -> Any:
        for shell in self._shells.values():
            await shell.close()
        self._shells.clear()
        await self.cell.aclose()
        return rex.CloseResponse()


class CellDeployment(AbstractDeployment):
    """A deployment whose runtime is a cell; the arguments are those of `SweRexCellRuntime`."""

    def __init__(self, sandbox: Sandbox | None = None, **options: Any) -> None:
        self.logger = get_logger("rex-deploy")
        self._given, self._options = sandbox, options
        self._runtime: SweRexCellRuntime | None = None
        self._hooks = CombinedDeploymentHook()

    def add_hook(self, hook: DeploymentHook) -> None:
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> Any:
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        """Make the runtime, and a cell, so that an error of the host comes here."""
        self._hooks.on_custom_step("Starting cell")
        self._runtime = runtime = SweRexCellRuntime(self._given, **self._options)
        await in_thread(lambda: runtime.cell.session)

    async def stop(self) -> None:
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            await runtime.close()

    @property
    def runtime(self) -> SweRexCellRuntime:
        if self._runtime is None:
            raise exceptions.DeploymentNotStartedError
        return self._runtime

    def __del__(self) -> None:
        """Do nothing: a sandbox that is forgotten closes itself."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def app_of(runtime: SweRexCellRuntime, token: str = "") -> Any:
    """Return the application of SWE-ReX's server with this runtime, for which a client needs `token`.

    There is one in a process.  Its route `/upload` writes to the host, so one for the cell replaces it.
    """
    server.runtime, server.AUTH_TOKEN = runtime, token
    routes = server.app.router.routes
    routes[:] = [each for each in routes if getattr(each, "path", "") != "/upload"]

    async def receive(
        file: server.UploadFile = server.File(...),  # noqa: B008 - FastAPI asks for it so
        target_path: str = server.Form(...),
        unzip: bool = server.Form(False),
    ) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            received = Path(folder, "received")
            received.write_bytes(await file.read())
            to = f"/tmp/.cellwright-{secrets.token_hex(8)}.zip" if unzip else target_path  # noqa: S108
            await in_thread(lambda: upload(runtime.cell, received, to))
        if unzip:
            line = f"__import__('zipfile').ZipFile({to!r}).extractall({target_path!r})"
            done = await in_thread(lambda: runtime.cell.execute(line))
            await in_thread(lambda: runtime.cell.files.remove(to))
            if not done.ok:
                raise OSError(f"cannot unpack to {target_path}: {str(done.error)[-500:]}")
        return rex.UploadResponse()

    server.app.post("/upload")(receive)
    return server.app


def main() -> None:
    """Serve SWE-ReX's interface: `python -m cellwright.harness.adapters.evaluation.swe_rex`, with
    `--policy`, default workshop, `--image`, and the options of `swerex-remote`."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--policy", default="workshop")
    parser.add_argument("--image")
    parser.add_argument("--host", default="127.0.0.1")
    given, rest = parser.parse_known_args()
    runtime = SweRexCellRuntime(
        policy=given.policy, **({"image": given.image} if given.image else {})
    )
    try:
        _ = (
            runtime.cell.session
        )  # before a client asks whether it is there, which has little patience
        app_of(runtime)
        sys.argv[1:] = ["--host", given.host, *rest]
        server.main()
    finally:
        runtime.cell.close()


if __name__ == "__main__":
    main()
