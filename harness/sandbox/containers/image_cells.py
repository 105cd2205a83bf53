"""`ImageCells`: the cells of a sandbox whose programs have an image as their root."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from ....policies.errors import PolicyError
from ....runner.host.image_ids import find_image_ids
from ....runner.launching.image_launcher import ImageRoot, SpawnedImage
from ....runner.launching.spawn import Spawned, interpreter
from ....runner.supervisor import SupervisorSettings
from ..calls.session_commands import argv_of
from ..checks import check_flag
from ..images.image import StoredImage
from ..images.image_store import ImageStore
from ..local import LocalCells
from ..parameters import CommandArguments, ProgramArguments
from ..sandbox_arguments import HostSettings, SandboxArguments

if TYPE_CHECKING:
    from ..languages.compiled import TableLanguages
    from ..programs.program import Program
    from ..pythons import HostPython

_AS_USER = Path(__file__).with_name("as_user.py")


class ImageCells(LocalCells):
    """The cells that this process makes of an image."""

    def __init__(self, given: SandboxArguments) -> None:
        """Raises PolicyError for an unknown or malformed image, and for arguments that exclude one."""
        host = given.host
        for name in ("spawned", "runtime", "rootfs"):
            if getattr(host, name) is not None:
                raise PolicyError(f"{name}: cannot be combined with an image")
        if given.credentials:
            raise PolicyError(
                "credentials: cannot be combined with an image",
                "its programs trust the authorities of the image, not that of the way out",
            )
        if given.sessions.pauses or check_flag("pausable", host.pausable):
            _refuse_pauses()
        self._held = ExitStack()
        self._image = self.image = self._found(given.image)
        try:
            super().__init__(given)
        except BaseException:
            self._held.close()
            raise
        self._admission.placed = self._placed

    def _found(self, wanted: "str | os.PathLike[str] | StoredImage | None") -> StoredImage:
        """Return the image, which cannot be removed while these cells are there, unless the caller
        found it itself."""
        if isinstance(wanted, StoredImage):
            return wanted
        store = ImageStore()
        found = store.find(wanted or "")
        self._held.enter_context(store.hold(found))
        return found

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._held.close()

    def _launcher(self, host: HostSettings, python: "HostPython | None") -> Spawned:
        config = self._image.config
        root = ImageRoot(
            tuple(map(os.path.realpath, reversed(self._image.layers))), find_image_ids(),
            dict(each.split("=", 1) for each in config.env if "=" in each),
        )  # fmt: skip
        packages = [each for each in python.packages if each] if python else ()
        spawned = SpawnedImage(python.path if python else interpreter(), root, packages)
        self.python: tuple[str, ...] = spawned.interpreter
        return spawned

    def program(self, given: ProgramArguments) -> "Program":
        config = self._image.config
        argv = given.argv or (*config.entrypoint, *config.cmd)
        user, directory = self._place(given.user, given.cwd)
        return super().program(replace(given, argv=(*user, *argv), user=None, cwd=directory))

    def _placed(self, given: CommandArguments) -> CommandArguments:
        """Return a command with the user and the directory that it, or else the image, asks for."""
        argv = argv_of(replace(given, user=None))
        user, directory = self._place(given.user, given.cwd)
        return replace(given, command=(*user, *argv), shell=False, user=None, cwd=directory)

    def _place(self, user: str | None, cwd: str | None) -> tuple[tuple[str, ...], str]:
        """Return what becomes the user, to be put before a command, and the directory."""
        if not isinstance(user, str | None) or "\0" in (user or ""):
            raise PolicyError(f"user: must be a name or number of the image, got {user!r}")
        config = self._image.config
        user = user or config.user
        becomes = (
            ()
            if user in ("", "root", "0")
            else (*self.python, "-I", "-S", "-c", _AS_USER.read_text(), user)
        )
        return becomes, cwd or config.working_dir or "/"

    def _made_languages(self, settings: SupervisorSettings, executable: str) -> "TableLanguages":
        raise PolicyError(
            "language: needs programs of the host, which an image replaces",
            "run the image's compiler or interpreter: sandbox.run([...])",
        )


def _refuse_pauses() -> NoReturn:
    raise PolicyError(
        "sessions.pause_seconds, sessions.memory_bytes, pausable: cannot be combined with an image",
        "a paused session does not keep what it has changed in the image: commit the session",
    )
