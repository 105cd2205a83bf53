"""`CellSandboxBackend`: the backend of `ray.experimental.sandbox`, with a cell in place of gVisor."""

import secrets
import shlex
import time
from typing import Any

from ...policies.errors import CellwrightError, ClosedError, PolicyError, SessionLost
from ...policies.extras import how_to_install
from ..adapters.common.cell_sandbox_session import AdapterSession

try:
    from ray.experimental.sandbox.backend.base import (
        BaseSandboxBackend,
        ExecResult,
        SandboxStatus,
    )
    from ray.experimental.sandbox.config import SandboxConfig, parse_memory_bytes
    from ray.experimental.sandbox.exceptions import (
        SandboxCreationError,
        SandboxError,
        SandboxExecError,
        SandboxNotFoundError,
        SandboxTimeoutError,
    )
    from ray.experimental.sandbox.runtime import SandboxRuntime
except ImportError as error:
    raise PolicyError(
        f"the sandbox of Ray cannot be imported: {error}", how_to_install("fleet")
    ) from error

IMAGE = "cellwright"  # and `cellwright:NAME` for the profile of that name
_DEFAULT_PROFILE = "workshop"
_WORKSPACE = "/workspace"


class _NoImages:
    """Takes the place of Ray's manager of images: a cell needs none."""

    def pull_image(self, image: str, timeout_seconds: float = 0.0) -> str:
        _profile_of(image)
        return ""


class _CellOfRay:
    def __init__(self, config: SandboxConfig, cell: AdapterSession) -> None:
        self.config = config
        self.cell = cell
        self.cwd: str = config.workdir or _WORKSPACE


class CellSandboxBackend(BaseSandboxBackend):
    """A session of cellwright for each sandbox, on the node of the process that makes it.

    The image is `cellwright`, or `cellwright:NAME` for a profile other than workshop. `options`:
    arguments of `Sandbox`, except `policy`. Options that a cell cannot satisfy, such as a network,
    capabilities, a writable root or another user, raise SandboxCreationError or SandboxExecError.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(image_manager=_NoImages())
        self._options = options
        self._cells: dict[str, _CellOfRay] = {}

    def create_sandbox(self, config: SandboxConfig) -> str:
        _check(config)
        try:
            cell = AdapterSession(policy=_policy_of(config), **self._options)
            made = _CellOfRay(config, cell)
            _ = cell.session
            if config.workdir:
                cell.files.make_directory(config.workdir)
        except (CellwrightError, OSError) as error:
            raise SandboxCreationError(str(error)) from error
        name = f"cell-{secrets.token_hex(8)}"
        self._cells[name] = made
        return name

    def delete_sandbox(self, sandbox_id: str) -> None:
        if made := self._cells.pop(sandbox_id, None):
            made.cell.close()

    def exec_command(
        self,
        sandbox_id: str,
        command: str | list[str],
        timeout: float | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        shell: str | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command; raises SandboxTimeoutError, as Ray's own backend does."""
        made = self._made(sandbox_id)
        if user is not None:
            raise SandboxExecError(f"user: a cell has one user, got {user!r}")
        argv = [shell or made.config.shell, "-c", command] if isinstance(command, str) else command
        began = time.monotonic()
        try:
            done = made.cell.run(
                argv, cwd=cwd or made.cwd, env={**made.config.env, **(env or {})}, timeout=timeout
            )
        except CellwrightError as error:
            raise _error_of(error, shlex.join(argv)[:200]) from error
        if done.timed_out:
            raise SandboxTimeoutError(
                f"the command took longer than {timeout or 'the policy allows'}"
            )
        stdout, stderr = done.text
        return ExecResult(done.exit_code, stdout, stderr, time.monotonic() - began)

    def write_file(
        self, sandbox_id: str, path: str, content: str | bytes, append: bool = False
    ) -> None:
        made = self._made(sandbox_id)
        data = content.encode() if isinstance(content, str) else content
        try:
            place = _below(made.cwd, path)
            if append and made.cell.files.exists(place):
                data = made.cell.files.read(place) + data
            made.cell.files.write(place, data)
        except (CellwrightError, OSError) as error:
            raise _error_of(error, path) from error

    def read_file(self, sandbox_id: str, path: str) -> bytes:
        made = self._made(sandbox_id)
        try:
            return made.cell.files.read(_below(made.cwd, path))
        except (CellwrightError, OSError) as error:
            raise _error_of(error, path) from error

    def get_status(self, sandbox_id: str) -> SandboxStatus:
        made = self._cells.get(sandbox_id)
        is_open = made is not None and made.cell.is_open
        return SandboxStatus.RUNNING if is_open else SandboxStatus.TERMINATED

    def _made(self, sandbox_id: str) -> _CellOfRay:
        if made := self._cells.get(sandbox_id):
            return made
        raise SandboxNotFoundError(f"no sandbox has the id {sandbox_id!r}")


class CellSandboxRuntime(SandboxRuntime):
    """Ray's runtime of the node of this process, with cells: `create`, `exec`, `read_file`, ... and the
    time to live of a sandbox.  `options`: as of `CellSandboxBackend`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._backend = CellSandboxBackend(**options)
        self._image_manager = self._backend.image_manager


def _check(config: SandboxConfig) -> None:
    refused = {
        f"network={config.network!r}: cells have none": config.network != "none",
        "capabilities: cells have none": bool(config.capabilities),
        "readonly=False: only /workspace and /tmp are writable": not config.readonly,
        "_oci_spec_transform_fn: cells have no OCI spec": config._oci_spec_transform_fn is not None,
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise SandboxCreationError(what)


def _profile_of(image: str) -> str:
    name, _, profile = image.partition(":")
    if name != IMAGE:
        raise SandboxCreationError(
            f"image: must be {IMAGE!r} or '{IMAGE}:PROFILE', got {image!r}: cells have no images"
        )
    return profile or _DEFAULT_PROFILE


def _policy_of(config: SandboxConfig) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    if config.cpu and config.cpu > 0:
        limits["cpus"] = float(config.cpu)
    if memory := parse_memory_bytes(config.memory):
        limits["memory_bytes"] = memory
    return {"name": "ray", "extends": _profile_of(config.image), "limits": limits}


def _below(cwd: str, path: str) -> str:
    return path if path.startswith("/") else f"{cwd}/{path}"


def _error_of(error: Exception, what: str) -> SandboxError:
    if isinstance(error, SessionLost | ClosedError):
        return SandboxNotFoundError(f"the sandbox has ended: {error}")
    if isinstance(error, OSError):
        return SandboxError(f"{what}: {error.strerror}")
    return SandboxExecError(f"{what}: {error}")
