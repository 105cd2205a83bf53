"""`Session`: one cell for several calls, which see the state that earlier calls left."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar, Unpack

from ....policies.closing import Closing
from ....policies.errors import PolicyError, WorkspaceError
from ....policies.languages import program_that_does_nothing
from ....policies.policy import Limits
from ....runner.cells.workspace import KeptWorkspace, WorkspaceFile
from ....runner.concurrency import NEVER
from ..calls.executing import Executing, close_unused, in_asyncio
from ..parameters import (
    CallArguments,
    CommandArguments,
    FileContent,
    TerminalArguments,
    TerminalOptions,
)
from ..workspaces.archive import unpack

if TYPE_CHECKING:
    from ...skills.skill_store import KeptSkill, SkillStore
    from ..images.image import ImageConfig, StoredImage
    from ..images.image_store import ImageStore
    from ..network.exposed_ports import ExposedPort
    from ..programs.background_processes import BackgroundProcess, ProcessesOfCell
    from ..programs.terminal import Terminal


ForkedBy = Literal["", "memory", "replay"]
_T = TypeVar("_T")


def close_all(made: Iterable[Closing]) -> None:
    """Close sessions that nothing will use."""
    for each in made:
        each.close()


class Session(Executing):
    """One cell that lives across calls: variables, imports, files, threads and the working directory
    stay, and the value of the last expression is `_` in the next call.  Calls from several threads are
    served one after the other.  Made by `Sandbox.session`.

    A call that takes too long is interrupted (KeyboardInterrupt) and the state stays.  If it still runs
    a second later it is interrupted again; after another second the cell is killed, and with it the
    session.  `lost` then says why, and any further call raises SessionLost.
    """

    id: str
    diverged: tuple[int, ...] = ()  # for a fork: the calls whose replay had another outcome
    # How the session was made: "branch" copied another session's memory, "replay" repeated its calls.
    forked_by: ForkedBy = ""
    not_copied: str = ""  # why the memory was not copied, if a branch was made by replay
    _limits: Limits

    def __repr__(self) -> str:
        return f"<Session {self.id!a}: {self.language}>"

    @property
    @abstractmethod
    def lost(self) -> str:
        """Why the session has ended; empty while it lives."""

    @property
    @abstractmethod
    def expired(self) -> str:
        """The setting that has ended the session, `idle_seconds` or `lifetime_seconds`; else empty."""

    @property
    def paused(self) -> bool:
        """Whether an idle session is on disk, without a cell; it comes back with its next request
        (SessionSettings.pause_seconds, SessionSettings.memory_bytes)."""
        return False

    async def _in_thread(
        self, work: Callable[[], _T], discard: Callable[[_T], None] | None = None
    ) -> _T:
        return await self._aexecutor().call(work, discard)

    def check_language(self, language: str) -> None:
        """Raise PolicyError unless `language` is that of this session."""
        if language != self.language:
            raise PolicyError(f"language: this session runs {self.language} only, got {language}")

    def upload(self, path: str, data: FileContent) -> None:
        """Write a file below /workspace; raises WorkspaceError if there is no room for it."""
        self._write({path: data})

    async def aupload(self, path: str, data: FileContent) -> None:
        """`upload` for asyncio; cancelling the task ends it."""
        await self._aexecutor().execute(lambda cancel: self._write({path: data}, cancel))

    def _write(self, files: Mapping[str, FileContent], cancel: int = NEVER) -> None:
        nothing = program_that_does_nothing(self.language)
        result = self.execute(nothing, files=files, cancel=cancel)
        if not result.ok:
            said = result.stderr.strip().splitlines()[-1:] or [str(result.error)]
            raise WorkspaceError(f"cannot write {', '.join(files)}: {said[0]}")

    @abstractmethod
    def download(self, path: str) -> bytes:
        """Return the content of a file below /workspace.

        Raises WorkspaceError if it is not a regular file, or claims to be larger than the workspace.
        """

    adownload = in_asyncio(download)

    @abstractmethod
    def files(self) -> tuple[WorkspaceFile, ...]:
        """Return the regular files below /workspace."""

    @abstractmethod
    def snapshot(self) -> bytes:
        """Return the regular files below /workspace as a tar archive, for `restore`.

        Variables and threads are not in it.  A file that changes meanwhile may be missing.
        Raises WorkspaceError if files claim more than the workspace holds.
        """

    def restore(self, archive: bytes) -> None:
        """Write the regular files of a tar archive below /workspace, replacing files of the same name.

        Raises PolicyError for a name that leads elsewhere, and for an archive that is malformed,
        compressed or has a sparse file; WorkspaceError if there is no room.
        """
        self._write(unpack(archive))

    def start_command(
        self,
        command: Sequence[str] | str,
        *,
        shell: bool = False,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        trace_id: str | None = None,
    ) -> "BackgroundProcess":
        """Start a command in the background and return it; it lives on between the calls of a Python
        session, and ends with the session.

        The arguments are those of `run`.  Its standard input is a pipe, its output is kept in the cell.
        The policy must allow subprocesses and threads.  Raises PolicyError if not, SessionLost if 64
        such processes run.
        """
        given = CommandArguments(
            command=command, shell=shell, cwd=cwd, user=user, env=env, trace_id=trace_id
        )
        return self._processes().start(self._with_tokens(given))

    astart_command = in_asyncio(start_command)

    def processes(self) -> "tuple[BackgroundProcess, ...]":
        """Return the commands of `start_command`: the running ones, and the last ones that ended."""
        return self._processes().all()

    def terminal(
        self, command: Sequence[str] | None = None, **options: Unpack[TerminalOptions]
    ) -> "Terminal":
        """Start a command, by default a shell, at a terminal of the cell's own, and return its master.

        `cwd`, `user`, `env`: as of `run`; TERM is xterm by default.  The command goes on between calls
        and ends with the session, which is in use until the terminal is closed.  Its output is passed
        on unchanged, escape sequences too: do not write it to the terminal of a person.

        Raises PolicyError if the policy allows no terminals; LaunchError if none could be opened.
        """
        return self._terminal(TerminalArguments.of("terminal", command=command, **options))

    aterminal = in_asyncio(terminal, close_unused)

    @abstractmethod
    def _terminal(self, given: TerminalArguments) -> "Terminal":
        """Start a command at a terminal of the cell."""

    def _processes(self) -> "ProcessesOfCell":
        from ..programs.background_processes import ProcessesOfCell  # seldom needed

        return ProcessesOfCell(lambda call: self._execute(self._for_commands(call)), self._limits)

    @property
    def workspace(self) -> KeptWorkspace | None:
        """The outcome of the last save of its named workspace; None before that, or without one."""
        return None

    def save(self) -> KeptWorkspace:
        """Save the files below /workspace in its named workspace; closing does that too.

        Files that a thread writes meanwhile are saved as they are.  Raises WorkspaceError, and saves
        nothing, if they exceed the quota; PolicyError if no workspace was named.
        """
        raise PolicyError(
            "save: this session has no named workspace",
            "open it with sandbox.session(workspace=...)",
        )

    @abstractmethod
    def expose(
        self, port: int, *, path: str | os.PathLike[str] | None = None, host_port: int | None = None
    ) -> "ExposedPort":
        """Let the host reach a server in this session that listens on TCP port `port` of its loopback.

        The host's end is a Unix socket: at `path`, else in a new directory that is this user's alone.
        With `host_port` it is that port of the host's 127.0.0.1, 0 for any that is free; every user of
        the host can connect to it.  It is closed with the session.

        Raises PolicyError for invalid arguments, an address in use, or a policy without
        `network.loopback`; SessionLost; BusyError if a daemon exposes too many ports for its clients.
        """

    @abstractmethod
    def extend(self, seconds: float) -> None:
        """Let the session live for at least `seconds` from now, even if it is idle or old.

        Raises SessionLost; PolicyError if it is a daemon's, and `seconds` more than a session of that
        daemon may live.
        """

    def freeze(self) -> bool:
        """Freeze the session now, as after `freeze_seconds` without a call; the next call thaws it.

        Return whether it stands still: not while something uses it, such as an open terminal or a
        connection to an exposed port, and not where the host has no freezer.
        """
        raise PolicyError("freeze: not available with connect=", "a daemon freezes idle sessions")

    def save_skill(
        self, name: str, description: str, *,
        files: Sequence[str] | Mapping[str, str | bytes] | None = None, body: str = "",
        tests: str = "", task: str = "", model: str = "", allowed_tools: Sequence[str] = (),
        store: "SkillStore | None" = None, trust: bool = False, allow_similar: bool = False,
        maker: str = "",
    ) -> "KeptSkill":  # fmt: skip
        """Keep what this session did as a skill, once it has worked in a fresh cell without the tools
        and the network of this session.

        `files`: globs of files below /workspace, or path in the skill -> content; default the programs
        of the calls so far that succeeded, as one script. `body`: the instructions; default a list of
        the files. `tests`: a program that asserts; it finds the skill below /skills. `task`, `model`:
        its provenance; `maker` too, and no maker adds versions to the skills of another one or of a
        person. `store`: default the store of the sandbox's skills, or the user's. `trust`: use it from
        now on without the decision of a person. Raises SkillInvalid, with the result, if it cannot be a
        skill or fails; SkillError, SessionLost.
        """
        raise PolicyError(
            "save_skill: not available with connect=", "make a Sandbox without connect="
        )

    asave_skill = in_asyncio(save_skill)

    @abstractmethod
    def branch(
        self, n: int = 1, reseed: bool = False, *, replay: bool = True
    ) -> "tuple[Session, ...]":
        """Return `n` sessions that go on from the state of this one, each in a cell of its own.

        Memory, files, open files and the working directory are copied, nothing is executed again,
        and nothing is shared from then on.  Where that is not possible, as with threads, sockets or a
        language other than Python, `branch` replays the calls instead, as `fork` does: `forked_by` of
        the new sessions says which it was, and `not_copied` why.  `reseed`: seed `random` and the
        generators of numpy and torch anew in each; else all draw the same numbers.  `replay=False`:
        raise PolicyError where the memory cannot be copied, and execute nothing.

        Either all `n` (1 to 8) are made or none, and this session goes on in any case.  Raises
        SessionLost, BusyError if a call of this session does not end, and what `fork` raises.
        """

    abranch = in_asyncio(branch, close_all)

    @abstractmethod
    def pause(self) -> str:
        """Keep the state of this session on disk, end it, and return a token for `Sandbox.resume`.

        Memory, files, open files and the working directory are kept; the cell goes away, and with it
        all memory and processes.  A session that cannot be branched by memory, as with threads, sockets
        or a language other than Python, cannot be paused; nor one with a named workspace.  Calls from
        before are not kept: neither `fork` nor `save_skill` can replay them.

        Raises PauseError, and the session goes on as if nothing had been; SessionLost; BusyError if a
        call does not end; PolicyError if it is a daemon's that keeps no paused sessions.
        """

    apause = in_asyncio(pause)

    def commit(
        self, name: str = "", *, config: "ImageConfig | None" = None,
        store: "ImageStore | None" = None,
    ) -> "StoredImage":  # fmt: skip
        """Keep what this session has changed in its image as a new image of the store.

        `name`: of the new image. `config`: how its programs are started, as of the old one by default.
        `store`: where the image is, by default the user's.
        The session goes on; its processes stand still meanwhile where its cgroup can be frozen.  What
        lies in /workspace and other file systems of the cell's own is not part of the image.

        Raises PolicyError for a session without an image, or one whose changes exceed the limits of
        images; SessionLost; BusyError if a call does not end.
        """
        raise PolicyError(
            "commit: needs a session of this process with an image", "Sandbox(image=...)"
        )

    acommit = in_asyncio(commit)

    @abstractmethod
    def fork(self) -> "Session":
        """Return another session, which has replayed every call of this one in a cell of its own.

        The two share nothing.  Time, random numbers, ids, addresses and the interleaving of threads
        differ, and every call takes its time again.  `diverged` of the new session has the numbers,
        counted from 1, of the calls whose outcome differed.
        Raises SessionLost if a call ends the new session, PolicyError if there is too much to replay.
        """


def own(given: CallArguments) -> CallArguments:
    """Return `given`; raises PolicyError if it names a workspace or packages, which only opening a
    session may."""
    if given.workspace is not None or given.clean:
        raise PolicyError(
            "workspace: a session has one workspace for all its calls",
            "sandbox.session(workspace=...)",
        )
    if given.packages:
        raise PolicyError(
            "packages: a session has the same packages for all its calls",
            "sandbox.session(packages=...)",
        )
    return given
