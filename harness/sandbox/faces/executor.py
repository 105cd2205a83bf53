"""Faces of other libraries over a sandbox: `create_sandbox`, `CodeExecutor`, and its backends: cells
(`ProcessIsolation`) or a container engine (`ContainerIsolation`).
"""

import contextlib
import os
import subprocess
import tempfile
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from shutil import which
from subprocess import PIPE
from typing import IO, Any, NamedTuple

from msgspec.structs import replace

from ....policies.closing import Closing
from ....policies.errors import LaunchError, PolicyError
from ....policies.permission_sets import PermissionSet
from ....policies.policy import MIB, Limits, check_limit
from ....policies.source.check import validate_code
from ....runner.audit.log import AuditLog
from ....runner.requests.result import SandboxResult, SandboxStatus
from ....runner.settings import AuditLevel
from ....runner.watching.guest_channel import Capture
from ..checks import suggests_fields
from ..lending_cache import LendingCache
from ..parameters import takes
from ..sandbox import Sandbox
from .config import ConfigFields, SandboxConfig
from .permissions import policy_of

_ALIVE = 4  # sandboxes of one backend; each has a launcher and a pool
_POOL = 2  # cells that wait in each
_ENGINE_FAILED = 125
_ENGINES = ("podman", "docker")
_COMMANDS = {
    "python": ("python3", "-"), "python3": ("python3", "-"), "bash": ("bash", "-s"), "sh": ("sh", "-s"),
    "javascript": ("node", "-"), "ruby": ("ruby", "-"),
}  # fmt: skip


@suggests_fields
@dataclass(frozen=True, kw_only=True)
class IsolationConfig:
    """Limits of one execution.  `network_disabled=False` is refused: no backend offers a network."""

    timeout_seconds: float = 30.0
    max_memory_mb: float = 256
    network_disabled: bool = True
    env_vars: Mapping[str, str] = field(default_factory=dict)
    trace_id: str | None = None  # the name of the execution in a trail


class IsolationBackend(Closing):
    """Runs code apart from the host; a context manager."""

    keeps_trail = False  # True if the backend records executions itself

    def under(self, permissions: PermissionSet, audit: AuditLog | None) -> "IsolationBackend":
        """Return a backend like this one with `permissions`, which records in `audit` if it keeps a
        trail.

        Raises PolicyError if there are permissions that it cannot enforce.
        """
        if permissions.permissions:
            raise PolicyError(
                "permissions: only ProcessIsolation enforces them",
                "use ProcessIsolation, or give no permissions",
            )
        return self

    def close(self) -> None:
        """Free all that is kept between executions; closing twice is fine."""

    @abstractmethod
    def is_available(self) -> bool:
        """Tell whether this host can run it."""

    @abstractmethod
    def execute(
        self, code: str, language: str = "python", config: IsolationConfig | None = None
    ) -> SandboxResult:
        """Run `code` and return its result."""


class ProcessIsolation(IsolationBackend):
    """Cells: a fresh one for each execution, with every layer required.

    It keeps a sandbox for each pair of limits, the four used last, until `close` or until it is
    garbage-collected.
    """

    keeps_trail = True

    def __init__(
        self, permissions: PermissionSet | None = None, audit: AuditLog | None = None
    ) -> None:
        """Executions have these `permissions`; raises PolicyError for invalid ones."""
        self._permissions = permissions or PermissionSet()
        self._policy = policy_of(self._permissions)
        self._audit = audit
        self._sandboxes = LendingCache[Sandbox](_ALIVE, "the isolation backend")
        self._finalizer = weakref.finalize(self, self._sandboxes.close)

    def under(self, permissions: PermissionSet, audit: AuditLog | None) -> IsolationBackend:
        if permissions.permissions and self._permissions.permissions:
            raise PolicyError(
                "permissions: give them to the executor or to its backend, not to both"
            )
        given = permissions if permissions.permissions else self._permissions
        return ProcessIsolation(given, audit or self._audit)

    def is_available(self) -> bool:
        try:
            Sandbox(pool=0).close()
        except LaunchError:
            return False
        return True

    def execute(
        self, code: str, language: str = "python", config: IsolationConfig | None = None
    ) -> SandboxResult:
        """Run `code` in a cell; raises what Sandbox raises."""
        config = _checked(config)
        limits = replace(
            self._policy.limits, wall_seconds=config.timeout_seconds,
            cpu_seconds=config.timeout_seconds, memory_bytes=int(config.max_memory_mb * MIB),
        )  # fmt: skip
        with self._sandboxes.lend(limits, lambda: self._sandbox(limits)) as sandbox:
            return sandbox.execute(
                code, language, env=dict(config.env_vars), trace_id=config.trace_id
            )

    def _sandbox(self, limits: Limits) -> Sandbox:
        policy = replace(self._policy, limits=limits)
        sandbox = Sandbox(policy=policy, pool=_POOL, audit=self._audit)
        sandbox.leave_open_at_exit()
        return sandbox

    def close(self) -> None:
        self._finalizer()


class ContainerIsolation(IsolationBackend):
    """A container for each execution, by podman or docker, as closed as they can make it.

    It is not a cell: there is no seccomp listener, no result value, and the engine's own filter.
    """

    def __init__(self, image: str = "python:3.11-slim", engine: str | None = None) -> None:
        """Use `image`, which the engine must have, since nothing is pulled; `engine` is its program."""
        if not image or image.startswith("-"):
            raise PolicyError(f"image: must be the name of an image, got {image!r}")
        self.image = image
        self.engine = engine or next(filter(which, _ENGINES), None)

    def is_available(self) -> bool:
        """Tell whether the engine answers and has the image."""
        if self.engine is None:
            return False
        asked = [self.engine, "image", "inspect", self.image]
        try:
            done = subprocess.run(asked, capture_output=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    def execute(
        self, code: str, language: str = "python", config: IsolationConfig | None = None
    ) -> SandboxResult:
        """Run `code` from standard input.

        Raises LaunchError if there is no engine, or if it cannot start a container.
        """
        config = _checked(config)
        if self.engine is None:
            raise LaunchError("no container engine", "install podman, or use ProcessIsolation")
        if language not in _COMMANDS:
            raise PolicyError(f"language: must be one of {', '.join(_COMMANDS)}, got {language!r}")
        name = f"cellwright-{os.urandom(8).hex()}"
        with tempfile.TemporaryDirectory(prefix="cellwright-") as directory:
            made = os.path.join(
                directory, "container"
            )  # the engine writes the container's id there
            arguments = [*_arguments(config, name), f"--cidfile={made}"]
            command = [self.engine, *arguments, self.image, *_COMMANDS[language]]
            ran = _run(command, code, config, [self.engine, "rm", "--force", name])
            if ran.code == _ENGINE_FAILED and not os.path.exists(made):
                raise LaunchError(
                    f"{self.engine} started no container: {_last_line(ran.captures[1].text())}",
                    f"`{self.engine} version` tells whether it answers; or use ProcessIsolation",
                )
        return _result(ran, _COMMANDS[language][0])


def _checked(config: IsolationConfig | None) -> IsolationConfig:
    config = config or IsolationConfig()
    if not config.network_disabled:
        hint = "do the request on the host and pass its result in"
        raise PolicyError("network_disabled: must be True, since no backend offers a network", hint)
    return config


def _arguments(config: IsolationConfig, name: str) -> list[str]:
    memory = f"{config.max_memory_mb:g}m"
    # By name only: every user can read a command line.
    names = [each for name in config.env_vars for each in ("--env", name)]
    return [
        "run", "--rm", "-i", "--pull=never", "--network=none", "--cap-drop=ALL", "--read-only",
        "--security-opt=no-new-privileges", "--user=65534:65534", "--pids-limit=64",
        f"--memory={memory}", f"--memory-swap={memory}", "--cpus=1",
        "--tmpfs=/workspace:rw,noexec,size=64m", "--workdir=/workspace", "--init",
        f"--name={name}", *names,
    ]  # fmt: skip


class _Ran(NamedTuple):
    """How the engine's client ended."""

    code: int
    timed_out: bool
    captures: list[Capture]


def _run(command: list[str], code: str, config: IsolationConfig, remove: list[str]) -> _Ran:
    """Run a container to its end, or to its timeout; it is removed in both cases."""
    environment = {**os.environ, **config.env_vars}
    timed_out = False
    try:
        process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment)
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from None
    with process:
        captures = [_captured("stdout", process.stdout), _captured("stderr", process.stderr)]
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(code.encode())  # type: ignore[union-attr]
                process.stdin.close()  # type: ignore[union-attr]
            process.wait(config.timeout_seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.kill()
            process.wait()  # otherwise it might create the container after its removal
            subprocess.run(remove, capture_output=True, timeout=60, check=False)
        for _, reader in captures:
            reader.join()
    return _Ran(process.returncode, timed_out, [capture for capture, _ in captures])


def _captured(name: str, pipe: IO[bytes] | None) -> tuple[Capture, threading.Thread]:
    """Read a stream to its end, and keep its head and tail as a result does."""
    capture = Capture(name, pipe.fileno() if pipe else -1, SandboxConfig().max_output_bytes, None)
    reader = threading.Thread(target=lambda: all(iter(capture.read, False)), daemon=True)
    reader.start()
    return capture, reader


def _result(ran: _Ran, program: str) -> SandboxResult:
    ended: dict[str, Any] = {
        "status": SandboxStatus.COMPLETED, "reason": "exit", "exit_code": ran.code,
    }  # fmt: skip
    if ran.timed_out:
        ended |= {"status": SandboxStatus.TIMEOUT, "reason": "wall_time"}
    elif ran.code:
        ended |= {"status": SandboxStatus.FAILED, "error": _explained(ran.code, program)}
    stdout, stderr = (capture.text() for capture in ran.captures)
    return SandboxResult(stdout=stdout, stderr=stderr, **ended)


def _explained(code: int, program: str) -> str:
    """Return the meaning of an exit code; 125 to 127 may come from the engine or from the program
    (podman-run(1), docker-run(1))."""
    meanings = {
        _ENGINE_FAILED: "the engine could not start the container, or the program exited with it",
        126: f"{program} of the image, or a command that the program called, cannot be executed",
        127: f"the image lacks {program}, or a command that the program called",
    }
    meaning = meanings.get(code)
    return f"exit code {code}" + (f": {meaning}" if meaning else "")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:500] if lines else "no reason given"


@suggests_fields
@dataclass(frozen=True, kw_only=True)
class ExecutionContext:
    """The language and limits of one execution, and data of the caller."""

    id: str = ""
    language: str = "python"
    timeout: float = 30.0
    max_memory_mb: float = 256
    env_vars: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExecutionResult:
    """The outcome of one execution; `result` has all of it."""

    success: bool
    output: str
    error: str | None
    exit_code: int | None
    execution_time: float
    context: ExecutionContext
    result: SandboxResult

    @property
    def status(self) -> SandboxStatus:
        return self.result.status

    @property
    def stdout(self) -> str:
        return self.result.stdout

    @property
    def stderr(self) -> str:
        return self.result.stderr


class CodeExecutor(Closing):
    """Runs code under `permissions`, in `backend`, with a record in `audit`.

    Only ProcessIsolation enforces permissions; with another backend they must be empty.  A context
    manager: `close`, or garbage collection, frees the cells kept between executions.
    """

    def __init__(
        self,
        permissions: PermissionSet | None = None,
        backend: IsolationBackend | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        """Raise PolicyError if the permissions are invalid, or the backend cannot enforce them."""
        self.backend = (backend or ProcessIsolation()).under(permissions or PermissionSet(), audit)
        self.audit = audit

    def validate_code(self, code: str, language: str = "python") -> dict[str, Any]:
        """Return {"valid": ..., "issues": [{"pattern", "reason", "line"}]}.

        The code is not executed.  This is advice: the kernel is the boundary.
        """
        return validate_code(code, language)

    def execute(self, code: str, context: ExecutionContext | None = None) -> ExecutionResult:
        """Run `code` and return its outcome; raises the backend's exceptions."""
        context = context or ExecutionContext()
        began = time.monotonic()
        result = self.backend.execute(code, context.language, _limits_of(context))
        if not self.backend.keeps_trail:
            self._record(result, context)
        seconds = time.monotonic() - began
        return ExecutionResult(
            success=result.ok, output=result.stdout, error=result.error or result.stderr or None,
            exit_code=result.exit_code, execution_time=seconds, context=context, result=result,
        )  # fmt: skip

    def close(self) -> None:
        self.backend.close()

    def _record(self, result: SandboxResult, context: ExecutionContext) -> None:
        if self.audit:
            level = AuditLevel.INFO if result.ok else AuditLevel.WARNING
            self.audit.record(
                "execution", result.status.value, level=level, target=context.language,
                reason=result.reason, exit_code=result.exit_code, context_id=context.id,
            )  # fmt: skip


def _limits_of(context: ExecutionContext) -> IsolationConfig:
    return IsolationConfig(
        timeout_seconds=context.timeout,
        max_memory_mb=context.max_memory_mb,
        env_vars=context.env_vars,
        trace_id=context.id or None,
    )


@dataclass(frozen=True)
class _CreatedWith(ConfigFields):
    timeout: float = 30.0


@takes(_CreatedWith)
def create_sandbox(given: _CreatedWith) -> Sandbox:
    """Return a sandbox with these fields of SandboxConfig; `timeout` is its `timeout_seconds`."""
    check_limit("timeout", given.timeout)
    own = {each.name: getattr(given, each.name) for each in fields(ConfigFields)}
    return Sandbox(SandboxConfig(timeout_seconds=given.timeout, **own))
