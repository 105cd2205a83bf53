"""`CellBackend`: the sandbox of deepagents, with commands and files in one cell."""

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...policies.closing import Closing
from ..sandbox.sandbox import Sandbox
from .common.cell_sandbox_session import AdapterSession, missing

try:
    from deepagents.backends.protocol import (
        ExecuteResponse,
        FileDownloadResponse,
        FileUploadResponse,
    )
    from deepagents.backends.sandbox import BaseSandbox
except ImportError as error:
    raise missing("deepagents", "deepagents", error) from error

if TYPE_CHECKING:
    from ..sandbox.sandbox_arguments import PolicyLike

_MAX_OUTPUT_BYTES = 1024 * 1024
_ERRORS: tuple[tuple[type[OSError], str], ...] = (
    (FileNotFoundError, "file_not_found"),
    (PermissionError, "permission_denied"),
    (IsADirectoryError, "is_directory"),
    (NotADirectoryError, "invalid_path"),
)


class CellBackend(BaseSandbox, Closing):
    """A session as the backend of an agent: `create_deep_agent(backend=CellBackend())`.

    `sandbox`: one of yours, else one is made of `policy`, default the profile workshop, and `options`,
    arguments of `Sandbox`.  `timeout`: seconds of a command for which the model names none; default
    and at most `limits.wall_seconds`.  `max_output_bytes`: how much of its output is returned.
    """

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        policy: "PolicyLike | None" = None,
        timeout: float | None = None,
        max_output_bytes: int = _MAX_OUTPUT_BYTES,
        **options: Any,
    ) -> None:
        self.cell = AdapterSession(sandbox, policy=policy, **options)
        self._timeout, self._max_output_bytes = timeout, max_output_bytes
        self._id = secrets.token_hex(8)

    @property
    def id(self) -> str:
        return self._id

    def execute(self, command: str, *, timeout: int | None = None) -> Any:
        """Run a line for sh and return its output, of both streams in order, and its exit code.

        Of longer output the beginning is returned; a command that takes too long has exit code 124.
        """
        done = self.cell.run(  # noqa: S604 - a shell of the cell
            command, shell=True, timeout=timeout or self._timeout, is_merged=True,
            max_output_bytes=self._max_output_bytes,
        )  # fmt: skip
        output, _ = done.text
        if done.timed_out:
            output += "\n[the command took too long and was killed]"
        return ExecuteResponse(output=output, exit_code=done.exit_code, truncated=done.is_truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[Any]:
        """Write files; each response has the error of its file, if any."""
        write = self.cell.files.write
        return [
            FileUploadResponse(path=path, error=_tried(write, path, data)[1])
            for path, data in files
        ]

    def download_files(self, paths: list[str]) -> list[Any]:
        """Read files; each response has the content, or the error of its file."""
        found = [(path, *_tried(self.cell.files.read, path)) for path in paths]
        return [
            FileDownloadResponse(path=path, content=content, error=error)
            for path, content, error in found
        ]

    def close(self) -> None:
        """End the session."""
        self.cell.close()


def _tried(work: Callable[..., Any], path: str, *arguments: Any) -> tuple[Any, str | None]:
    """Return what `work` returned for a path, or the error that deepagents has for its failure."""
    if not path.startswith("/"):
        return None, "invalid_path"
    try:
        return work(path, *arguments), None
    except OSError as error:
        known = (name for kind, name in _ERRORS if isinstance(error, kind))
        return None, next(known, error.strerror or str(error))
