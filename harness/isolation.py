"""Isolation backends: one interface, our cells behind it, or a container engine."""

import contextlib
import os
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from shutil import which
from subprocess import PIPE
from typing import IO, Any

from ..policies.errors import LaunchError, PolicyError
from ..runner.capture import Capture
from ..runner.result import SandboxResult, SandboxStatus
from .config import SandboxConfig
from .sandbox import Sandbox

_ENGINES = ("podman", "docker")
_COMMANDS = {
    "python": ("python3", "-"), "python3": ("python3", "-"), "bash": ("bash", "-s"), "sh": ("sh", "-s"),
    "javascript": ("node", "-"), "ruby": ("ruby", "-"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class IsolationConfig:
    """Limits of one execution.  `network_disabled=False` is refused: no backend gives a network."""

    timeout_seconds: float = 30.0
    max_memory_mb: float = 256
    network_disabled: bool = True
    env_vars: Mapping[str, str] = field(default_factory=dict)


class IsolationBackend(ABC):
    """Runs code somewhere apart from the host."""

    @abstractmethod
    def is_available(self) -> bool:
        """Tell whether this host can run it."""

    @abstractmethod
    def execute(
        self, code: str, language: str = "python", config: IsolationConfig | None = None
    ) -> SandboxResult:
        """Run `code` and return what came of it."""


class ProcessIsolation(IsolationBackend):
    """Our cells: a fresh one for each execution, every layer required."""

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
        limits = SandboxConfig(
            timeout_seconds=config.timeout_seconds, max_memory_mb=config.max_memory_mb
        )
        with Sandbox(limits, pool=0) as sandbox:
            return sandbox.execute(code, language, env=dict(config.env_vars))


class ContainerIsolation(IsolationBackend):
    """A container for each execution, by podman or docker, as closed as they can make it.

    Not one of our cells: no listener, no result value, and the engine's own filter.
    """

    def __init__(self, image: str = "python:3.11-slim", engine: str | None = None) -> None:
        """Use `image`, which the engine must have: nothing is pulled; `engine` is a program."""
        if not image or image.startswith("-"):
            raise PolicyError(f"image: {image!r} is not the name of one")
        self.image = image
        self.engine = engine or next(filter(which, _ENGINES), None)

    def is_available(self) -> bool:
        """Tell whether there is an engine that answers and has the image."""
        if self.engine is None:
            return False
        asked = [self.engine, "image", "inspect", self.image]
        return subprocess.run(asked, capture_output=True, timeout=30, check=False).returncode == 0

    def execute(
        self, code: str, language: str = "python", config: IsolationConfig | None = None
    ) -> SandboxResult:
        """Run `code` from standard input; raises LaunchError if no engine is there."""
        config = _checked(config)
        if self.engine is None:
            raise LaunchError("no container engine", "install podman, or use ProcessIsolation")
        if language not in _COMMANDS:
            raise PolicyError(f"language: {language!r} is not one of {', '.join(_COMMANDS)}")
        name = f"cellwright-{os.urandom(8).hex()}"
        command = [self.engine, *_arguments(config, name), self.image, *_COMMANDS[language]]
        return _run(command, code, config, [self.engine, "rm", "--force", name])


def _checked(config: IsolationConfig | None) -> IsolationConfig:
    config = config or IsolationConfig()
    if not config.network_disabled:
        hint = "do the request on the host and pass its result in"
        raise PolicyError("network_disabled: no backend gives a network", hint)
    return config


def _arguments(config: IsolationConfig, name: str) -> list[str]:
    """Return what closes a container: no network, no capability, nothing to write but memory."""
    memory = f"{config.max_memory_mb:g}m"
    # By name alone: everybody may read a command line.
    names = [each for name in config.env_vars for each in ("--env", name)]
    return [
        "run", "--rm", "-i", "--pull=never", "--network=none", "--cap-drop=ALL", "--read-only",
        "--security-opt=no-new-privileges", "--user=65534:65534", "--pids-limit=64",
        f"--memory={memory}", f"--memory-swap={memory}", "--cpus=1",
        "--tmpfs=/workspace:rw,noexec,size=64m", "--workdir=/workspace", "--init",
        f"--name={name}", *names,
    ]  # fmt: skip


def _run(
    command: list[str], code: str, config: IsolationConfig, remove: list[str]
) -> SandboxResult:
    """Run a container to its end, or to its timeout; either way it is gone afterwards."""
    environment = {**os.environ, **config.env_vars}
    process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment)
    with process:
        captures = [_captured("stdout", process.stdout), _captured("stderr", process.stderr)]
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(code.encode())  # type: ignore[union-attr]
                process.stdin.close()  # type: ignore[union-attr]
            process.wait(config.timeout_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()  # else it might still ask for the container that is removed now
            subprocess.run(remove, capture_output=True, timeout=60, check=False)
        for _, reader in captures:
            reader.join()
    return _result(process.returncode, [capture for capture, _ in captures])


def _captured(name: str, pipe: IO[bytes] | None) -> tuple[Capture, threading.Thread]:
    """Read a stream to its end, keeping what a result keeps of it."""
    capture = Capture(name, pipe.fileno() if pipe else -1, SandboxConfig().max_output_bytes, None)
    reader = threading.Thread(target=lambda: all(iter(capture.read, False)), daemon=True)
    reader.start()
    return capture, reader


def _result(code: int, captures: list[Capture]) -> SandboxResult:
    ended: dict[str, Any] = {"status": SandboxStatus.COMPLETED, "reason": "exit", "exit_code": code}
    if code < 0:
        ended = {"status": SandboxStatus.TIMEOUT, "reason": "wall_time"}
    elif code:
        ended["status"] = SandboxStatus.FAILED
    return SandboxResult(stdout=captures[0].text(), stderr=captures[1].text(), **ended)
