"""`Session`: calls that build on each other."""

from abc import abstractmethod
from collections.abc import Mapping

from ...policies.errors import PolicyError, WorkspaceError
from ...policies.languages import program_that_does_nothing
from ...runner.performance import NEVER
from ...runner.workspace import KeptWorkspace, WorkspaceFile
from .archive import unpack
from .executing import Executing
from .request import CallArguments


class Session(Executing):
    """One cell that lives across calls: variables, imports, files, threads and the working directory
    stay, and the value of the last expression is `_` in the next call.  Calls from several threads are
    served in order, never mixed.  Made by `Sandbox.session`.

    A call that takes too long is interrupted (KeyboardInterrupt) and the state stays; one that has
    not yielded after a second is interrupted again, and after another one killed, the session with
    it.  `lost` then says why, and any further call raises SessionLost.
    """

    id: str
    diverged: tuple[int, ...] = ()  # of a fork: the calls that went another way in replay

    @property
    @abstractmethod
    def lost(self) -> str:
        """Why it is gone; empty while it lives."""

    def upload(self, path: str, data: str | bytes) -> None:
        """Write a file below /workspace; raises WorkspaceError if there is no room for it."""
        self._write({path: data})

    async def aupload(self, path: str, data: str | bytes) -> None:
        """`upload` for asyncio; cancelling the task ends it."""
        await self._aexecutor().execute(lambda cancel: self._write({path: data}, cancel))

    def _write(self, files: Mapping[str, str | bytes], cancel: int = NEVER) -> None:
        nothing = program_that_does_nothing(self.language)
        result = self.execute(nothing, files=files, cancel=cancel)
        if not result.ok:
            said = result.stderr.strip().splitlines()[-1:] or [str(result.error)]
            raise WorkspaceError(f"cannot write {', '.join(files)}: {said[0]}")

    @abstractmethod
    def download(self, path: str) -> bytes:
        """Return the content of a file below /workspace; raises WorkspaceError if it is none, or says
        that it is larger than the workspace."""

    async def adownload(self, path: str) -> bytes:
        """`download` for asyncio."""
        return await self._aexecutor().call(lambda: self.download(path))

    @abstractmethod
    def files(self) -> tuple[WorkspaceFile, ...]:
        """Return the regular files below /workspace."""

    @abstractmethod
    def snapshot(self) -> bytes:
        """Return the regular files below /workspace as a tar archive, for `restore`.

        Files only: variables and threads are not in it.  One that changes meanwhile may be missing.
        Raises WorkspaceError if files claim more than the workspace holds.
        """

    def restore(self, archive: bytes) -> None:
        """Write the regular files of a tar archive below /workspace, over what is there.

        Raises PolicyError for a name that leads elsewhere or an archive that is none, is compressed or
        holds a sparse file, WorkspaceError if there is no room.
        """
        self._write(unpack(archive))

    @property
    def workspace(self) -> KeptWorkspace | None:
        """What became of its named workspace when that was last kept; None before, or without one."""
        return None

    def save(self) -> KeptWorkspace:
        """Save the files below /workspace in the workspace that was named; closing does it too.

        Files that a thread is writing meanwhile are saved as they are.  Raises WorkspaceError if there
        are too many for its quota, and nothing is saved, PolicyError if no workspace was named.
        """
        raise PolicyError("save: no workspace was named", "sandbox.session(workspace=...)")

    @abstractmethod
    def fork(self) -> "Session":
        """Return another session that has replayed every call of this one, in a cell of its own.

        The two share nothing.  They are alike as far as programs are: time, random numbers, ids and
        addresses differ, threads do what threads do, and every call costs its time again.
        `diverged` of the new session names the calls, counted from 1, that went another way.
        Raises SessionLost if one of them ends it, PolicyError if there is too much to replay.
        """


def own(given: CallArguments) -> CallArguments:
    """Return `given` if a session can have it: its workspace is the one that it was opened with."""
    if given.workspace is not None or given.clean:
        raise PolicyError(
            "workspace: a call of a session has that of the session",
            "sandbox.session(workspace=...)",
        )
    return given
