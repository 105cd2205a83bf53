"""`ProjectRun`: a command that works on a project, in a cell of its own."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from ....policies.closing import Closing
from ....policies.errors import LaunchError
from ....policies.policy import Policy
from ....runner.messages import LAYER
from ....runner.requests.result import SandboxResult
from ....runner.settings import PoolSettings
from .project_policy import ProjectPolicy
from .review_directory import ReviewDirectory

if TYPE_CHECKING:
    from ..programs.program import Program
    from .project_changes import ProjectChanges

ONE_CELL = PoolSettings(size=0, cells_per_launcher=1)
_CHUNK = 1 << 16


class ProjectRun:
    """A running command.  Made by `Sandbox.exec`; a context manager, whose end waits for the command
    and then ends what it left running.

    `program`: its streams, which the caller reads; what was not read when the `with` ends is dropped.
    `is_copy`: it works on a copy of the project, because no overlay could be had for its review.
    """

    def __init__(
        self, shown: ProjectPolicy,
        open_sandbox: "Callable[[], tuple[Closing, Callable[..., Program]]]",
        command: Sequence[str], *, cwd: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """`open_sandbox` opens a sandbox of the policy, which is closed with the run, and returns it
        and its method `program`."""
        self.shown = shown
        review = ReviewDirectory(shown.project.root)
        self.is_copy = False
        with contextlib.ExitStack() as opened:
            if shown.policy.filesystem.changes:
                opened.enter_context(review.held())
                review.begin(command, shown.project.chosen)
            try:
                sandbox, start = open_sandbox()
            except LaunchError as error:
                if f"cannot {LAYER}" not in str(error):
                    raise
                review.copy()
                self.is_copy = True
                sandbox, start = open_sandbox()
            opened.enter_context(sandbox)
            directory = directory_of(shown.project.root, cwd)
            command = [program_of(directory, command[0]), *command[1:]] if command else command
            self.program = opened.enter_context(start(command, cwd=directory, **options))
            self._opened = opened.pop_all()

    @property
    def policy(self) -> Policy:
        return self.shown.policy

    @property
    def exit_code(self) -> int | None:
        """Its exit code, once it has ended; None if a signal or a limit ended it. Waits for it."""
        return self.wait().exit_code

    @property
    def changes(self) -> "ProjectChanges":
        """The changes that wait for the project, if it ran with review; it has to be closed."""
        from .project_changes import ProjectChanges

        return ProjectChanges(self.shown.project)

    def wait(self, timeout: float | None = None) -> SandboxResult:
        """Wait for its end and return the result, reading and dropping what it writes.

        Raises TimeoutError after `timeout` seconds.
        """
        reader = threading.Thread(target=self._drop_output, daemon=True)
        reader.start()
        return self.program.wait(timeout)

    def _drop_output(self) -> None:
        descriptor = self.program.master if self.program.master >= 0 else self.program.stdout
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, True)
            while os.read(descriptor, _CHUNK):
                pass

    def close(self) -> None:
        """End the command, and everything that it started."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.program.close_stdin()
            self.wait()
        self.close()


def program_of(directory: str, name: str) -> str:
    """Return a path as that from `directory`; a name without a slash is looked for in PATH."""
    return os.path.join(directory, name) if "/" in name else name


def directory_of(root: str, cwd: str | None) -> str:
    """Return where the command starts: in `cwd`, by default this process's directory, if that lies in
    the project, else in the project itself."""
    directory = os.path.realpath(os.getcwd() if cwd is None else cwd)
    return directory if f"{directory}/".startswith(f"{root}/") else root
