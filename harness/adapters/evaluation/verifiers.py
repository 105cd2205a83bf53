"""`VerifiersCellRuntime` and `CellEnv`: a runtime of verifiers, and an environment of rollouts in it.

Programs of verifiers' harnesses run in the cell.  The host installs their packages, from wheels only,
and shows them; and it lets them reach the endpoints of their rollout, at the address that these have.
"""

import asyncio
import contextlib
import functools
import hashlib
import os
import posixpath
import select
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from ....policies.errors import CellwrightError, LaunchError, PolicyError
from ....policies.profiles.loading import load_policy
from ....runner.cells.cell_network import answered
from ...sandbox.calls.background import in_thread
from ..common.cell_sandbox_session import AdapterSession, missing
from .transfers import LASTING, lasting

try:
    import verifiers.v1 as vf
    from verifiers.v1.configs.env import BaseConfig, EnvConfig
    from verifiers.v1.errors import SandboxError
    from verifiers.v1.runtimes import (
        ProgramResult,
        Runtime,
        SubprocessConfig,
        SubprocessRuntimeInfo,
        register,
    )
    from verifiers.v1.utils.artifacts import ARTIFACTS_DIR
    from verifiers.v1.utils.paths import CACHE_DIR
except ImportError as error:
    raise missing("verifiers", "verifiers", error) from error

_PLACE = Path(CACHE_DIR, "cellwright")
_PYTHON = "/usr/bin/python3"  # cells see it
_LOCAL = ("127.0.0.1", "localhost")
_ASK_SECONDS, _CHUNK = 10, 64 * 1024


class CellConfig(BaseConfig):
    """The settings of a cell: `policy`, a profile or a file; `workdir`, where programs begin."""

    type: Literal["cellwright"] = "cellwright"
    policy: str = "workshop"
    workdir: str = "/workspace"


class VerifiersCellRuntime(Runtime):
    """A session in a cell as the runtime of rollouts."""

    def __init__(self, config: CellConfig | None = None, name: str | None = None) -> None:
        super().__init__(name)
        self.config = config or CellConfig()
        self.info = SubprocessRuntimeInfo(id=self.name)  # a closed union: it has no kind of ours
        self._cell: AdapterSession | None = None
        self._servers: dict[int, asyncio.Server] = {}

    async def start(self) -> None:
        environments = _PLACE / "uv" / "environments-v2"
        environments.mkdir(parents=True, exist_ok=True)
        policy = load_policy(self.config.policy)
        shown = (*policy.processes.execute, str(environments))
        processes = msgspec.structs.replace(policy.processes, execute=shown)
        policy = msgspec.structs.replace(policy, processes=processes)
        policy = lasting(policy, ARTIFACTS_DIR, self.config.workdir)
        self._cell = AdapterSession(policy=policy, pool=0, sessions=LASTING)
        await self._do(lambda: self.cell.files.make_directory(self.config.workdir))

    @property
    def cell(self) -> AdapterSession:
        if self._cell is None:
            raise SandboxError("the runtime was not started")
        return self._cell

    async def _do(self, work: Any) -> Any:
        try:
            return await in_thread(work)
        except CellwrightError as error:
            raise SandboxError(str(error)) from error

    async def run(self, argv: list[str], env: dict[str, str]) -> Any:
        """Run a command; of more than 10 MiB of output the beginning is returned."""
        try:
            done = await self.cell.arun(argv, env=self.process_env(env), cwd=self.config.workdir)
        except CellwrightError as error:
            raise SandboxError(str(error)) from error
        stdout, stderr = done.text
        return ProgramResult(exit_code=done.exit_code, stdout=stdout, stderr=stderr)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        line = ["sh", "-c", 'exec "$@" >"$0" 2>&1 </dev/null', log, *argv]
        start = self.cell.session.start_command
        given, cwd = self.process_env(env), self.config.workdir
        await self._do(lambda: start(line, env=given, cwd=cwd))

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        files, path = self.cell.files, posixpath.join(self.config.workdir, path)
        try:
            if max_bytes is None:
                return bytes(await self._do(lambda: files.read(path)))
            return bytes((await self._do(lambda: files.read_start(path, max_bytes)))[0])
        except OSError as error:
            raise SandboxError(f"read {path!r}: {error}") from error

    async def write(self, path: str, data: bytes) -> None:
        place = posixpath.join(self.config.workdir, path)
        await self._do(lambda: self.cell.files.write(place, data))

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        """Install what a script needs on the host, without running anything of it, and return what
        runs the script in the cell."""
        data = script.encode() if isinstance(script, str) else script
        name = f"{hashlib.sha256(data).hexdigest()}.py"
        async with self._uv_script_locks.setdefault(name, asyncio.Lock()):
            if name not in self._uv_interpreters:
                self._uv_interpreters[name] = await _installed(name, data)
                await self.write(f"{self.scripts_dir}/{name}", data)
        interpreter = self._uv_interpreters[name]
        argv = [interpreter, f"{self.scripts_dir}/{name}"]
        if not activate:
            return argv
        place = Path(interpreter).parent
        return ["env", f"VIRTUAL_ENV={place.parent}", f"PATH={place}:/usr/bin:/bin", *argv]

    async def prepare_execution(self, routes: list[str] | None) -> None:
        """Let programs of the cell reach the endpoints of their rollout, which are on the host."""
        for route in routes or ():
            address = urlsplit(route)
            if address.hostname in _LOCAL and address.port and address.port not in self._servers:
                listener = await self._do(functools.partial(self._listener, address.port))
                forward = functools.partial(_forward, address.port)
                self._servers[address.port] = await asyncio.start_server(forward, sock=listener)

    def _listener(self, port: int) -> socket.socket:
        """Return a socket that listens on a port of the cell's own loopback."""
        network = getattr(self.cell.session, "cell").network()  # noqa: B009 - not of every session
        if network is None:
            raise PolicyError("policy: verifiers needs network.loopback in the cell")
        with contextlib.closing(network), contextlib.closing(network.ask()) as answer:
            if not select.select([answer], (), (), _ASK_SECONDS)[0]:
                raise LaunchError("the launcher made no socket in the cell")
            made: socket.socket = answered(answer)
        try:
            mapped = "::ffff:" if made.family == socket.AF_INET6 else ""
            made.bind((f"{mapped}127.0.0.1", port))
            made.listen()
        except OSError as error:
            made.close()
            raise LaunchError(f"port {port} of the cell: {error}") from None
        return made

    async def teardown(self) -> None:
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        await asyncio.to_thread(self.cleanup)

    def cleanup(self) -> None:
        cell, self._cell = self._cell, None
        if cell is not None:
            cell.close()


@contextlib.asynccontextmanager
async def provision(config: CellConfig | None = None) -> AsyncIterator[VerifiersCellRuntime]:
    """Provide a runtime for `agent.run(task, runtime=...)`; it ends with the block."""
    runtime = VerifiersCellRuntime(config)
    register(runtime)
    try:
        await runtime.start()
        yield runtime
    finally:
        await runtime.stop()


class CellEnvConfig(EnvConfig):
    """The one agent, and the cell of its rollouts."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=SubprocessConfig())  # `cell` takes its place
    cell: CellConfig = CellConfig()


class CellEnv(vf.Env[CellEnvConfig]):
    """One agent, each rollout of which has a cell of its own: `vf-eval TASKSET --env.id MODULE`, of a
    module that exports this class."""

    async def run(self, task: Any, agents: Any) -> None:
        if task.data.image is not None:
            raise PolicyError(
                f"task {task.data.idx}: needs the image {task.data.image!r}, and cellwright runs tasks "
                "without images only",
                "use verifiers' own environment with docker",
            )
        config = self.config.cell
        if task.data.workdir is not None:
            config = config.model_copy(update={"workdir": task.data.workdir})
        async with provision(config) as runtime:
            await agents.agent.run(task, runtime=runtime)


async def _installed(name: str, data: bytes) -> str:
    """Make the environment of a script, or find it; return its interpreter."""
    scripts = _PLACE / "scripts"
    scripts.mkdir(parents=True, exist_ok=True)
    await asyncio.to_thread((scripts / name).write_bytes, data)
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise SandboxError("uv was not found: pip install uv")
    script = ["--script", str(scripts / name), "--no-config"]
    await _uv(uv, "sync", "--quiet", "--no-build", "--python", _PYTHON, *script)
    return (await _uv(uv, "python", "find", *script)).splitlines()[-1]


async def _uv(*command: str) -> str:
    trusts_what_the_host_trusts = {"UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}
    env = {**trusts_what_the_host_trusts, **os.environ, "UV_CACHE_DIR": str(_PLACE / "uv")}
    process = await asyncio.create_subprocess_exec(
        *command, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode != 0:
        raise SandboxError(f"cannot install a script: {stderr.decode(errors='replace')[-2000:]}")
    return stdout.decode().strip()


async def _forward(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry one connection of the cell to a port of the host's loopback, and back."""
    with contextlib.closing(writer):
        try:
            back, there = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return
        with contextlib.closing(there):
            await asyncio.gather(_pump(reader, there), _pump(back, writer))


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await source.read(_CHUNK):
            sink.write(chunk)
            await sink.drain()
        sink.write_eof()
