"""`BuildCells`: the cells of a build; each has the image so far as its root."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from msgspec.structs import replace

from ....policies.policy import Policy
from ....runner.cells.workspace import Executable
from ....runner.requests.result import SandboxResult
from ....runner.settings import PoolSettings
from ..calls.call_request import CommandResult
from ..containers.image_cells import ImageCells
from ..images.image import ImageConfig, StoredImage
from ..images.image_store import ImageStore
from ..sandbox import Sandbox
from .copy_archive import FileAttributes

_PROGRAMS = Path(__file__).with_name("image_files.py").read_text()
_EXPORT = """\
try:
    export(sys.argv[1:])
except OSError as error:
    sys.exit(str(error))
"""
_OWN = ("workspace", "proc", "sys", "dev", ".cellwright")  # directories of a cell, not of its image
_SCRIPT = "cellwright-heredoc"
_ONE_CELL = PoolSettings(size=0, cells_per_launcher=1)
_PIECE = 1 << 20


class BuildCommand(NamedTuple):
    """A command of RUN; `script` is the content of a here-document that begins with #!."""

    argv: tuple[str, ...]
    user: str
    cwd: str
    environment: Mapping[str, str]
    script: str = ""


class PlaceSurvey(NamedTuple):
    """The destination of a step in an image, as in `Placement`; kind: "directory", "file" or ""."""

    place: str
    kind: str
    existing: dict[str, FileAttributes]
    owner: tuple[int, int]


class BuildCells:
    """Makes cells of images; the sandbox of the last image is kept."""

    def __init__(self, policy: Policy, store: ImageStore) -> None:
        self.policy, self._store = policy, store
        self._opened: Sandbox | None = None
        self._image = ""

    def close(self) -> None:
        if self._opened:
            self._opened.close()
        self._opened = None

    def _sandbox(self, image: StoredImage) -> Sandbox:
        if self._opened is None or image.digest != self._image:
            self.close()
            bare = replace(image, config=ImageConfig())
            self._opened = Sandbox(image=bare, policy=self.policy, pool=_ONE_CELL)
            self._image = image.digest
        return self._opened

    def run(
        self, image: StoredImage, command: BuildCommand
    ) -> tuple[CommandResult, StoredImage | None]:
        """Run a command; return its result, and if it succeeded the image with its changes.

        Raises ValueError if it wrote to a directory that is not the image's.
        """
        argv = command.argv
        with self._sandbox(image).session() as session:
            if command.script:
                session.upload(_SCRIPT, Executable(command.script.encode()))
                argv = (f"/workspace/{_SCRIPT}",)
            done = session.run(
                argv, user=command.user or "0", cwd=command.cwd or "/",
                env=dict(command.environment),
            )  # fmt: skip
            if not done.ok:
                return done, None
            kept = [each.path for each in session.files() if each.path != _SCRIPT]
            if kept:
                raise ValueError(
                    f"it wrote /workspace/{kept[0]}, which belongs to the cell and not to the image"
                )
            return done, session.commit("", config=ImageConfig(), store=self._store)

    def unpack(self, image: StoredImage, archive: int, place: str) -> StoredImage:
        """Unpack an open tar of the host, perhaps compressed, at a place of the image.

        Raises ValueError.
        """
        code = (
            "import os, tarfile\n"
            "os.makedirs(place, exist_ok=True)\n"
            "with tarfile.open('archive') as archive:\n"
            "    archive.extractall(place, numeric_owner=True, filter='tar')\n"
            "os.unlink('archive')"
        )
        with self._sandbox(image).session() as session:
            path = Path(f"/proc/self/fd/{archive}")
            done = session.execute(code, inputs={"place": place}, files={"archive": path})
            if not done.ok:
                raise ValueError(_last_line(done))
            return session.commit("", config=ImageConfig(), store=self._store)

    def survey(
        self, image: StoredImage | None, destination: str, below: Sequence[str], owner: str
    ) -> PlaceSurvey:
        """Find a destination in an image, None for an empty one; raises ValueError."""
        if image is None:
            return _survey_of_nothing(destination, owner)
        done = self._sandbox(image).execute(
            f"{_PROGRAMS}\nsurvey(destination, below, owner)",
            inputs={"destination": destination, "below": list(below), "owner": owner},
        )  # fmt: skip
        if not done.ok or not isinstance(done.value, dict):
            raise ValueError(_last_line(done))
        place, above = done.value["place"].strip("/"), done.value["above"]
        _check_place(place)
        names = place.split("/") if place else []
        existing = {}
        for number, told in enumerate(above[:-1]):
            if told and told[0] != "directory":
                raise ValueError(f"/{'/'.join(names[:number])} is not a directory")
            if told:
                existing["/".join(names[:number])] = FileAttributes(*told[1:])
        kind = above[-1][0] if above[-1] else ""
        if kind == "directory":
            existing[place] = FileAttributes(*above[-1][1:])
        for number, told in done.value["below"].items():
            path = f"{place}/{below[int(number)]}".strip("/")
            if told[0] != "directory":
                raise ValueError(f"/{path} is a {told[0]} in the image, and a directory here")
            existing[path] = FileAttributes(*told[1:])
        return PlaceSurvey(place, kind, existing, (done.value["owner"][0], done.value["owner"][1]))

    def export(self, image: StoredImage, sources: Sequence[str], into: BinaryIO) -> None:
        """Write files of an image as a tar, in the form of `image_files.py`; raises ValueError."""
        sandbox = self._sandbox(image)
        cells = sandbox._cells
        assert isinstance(cells, ImageCells)  # noqa: S101 - it was given an image
        argv = (*cells.python, "-I", "-S", "-c", f"{_PROGRAMS}\n{_EXPORT}", *sources)
        left = self._store.limits.total_bytes
        with sandbox.program(argv, user="0", cwd="/") as program:
            while piece := os.read(program.stdout, _PIECE):
                left -= len(piece)
                if left < 0:
                    raise ValueError("the files are larger than the limit of images")
                into.write(piece)
            done = program.wait()
        if not done.ok or done.exit_code:
            raise ValueError(_last_line(done))
        into.flush()


def _survey_of_nothing(destination: str, owner: str) -> PlaceSurvey:
    user, _, group = owner.partition(":")
    if not all(each.isdigit() for each in (user or "0", group or "0")):
        raise ValueError(f"the image has no /etc/passwd, so {owner!a} must be numbers")
    ids = int(user or 0), int(group or user or 0)
    place = os.path.normpath(destination).strip("/").removeprefix(".")
    _check_place(place)
    return PlaceSurvey(place, "" if place else "directory", {}, ids)


def _check_place(place: str) -> None:
    if place.split("/")[0] in _OWN:
        raise ValueError(
            f"/{place} belongs to cells and not to the image; choose another directory"
        )


def _last_line(done: SandboxResult) -> str:
    lines = (done.stderr.strip() or str(done.error or "")).splitlines()
    return lines[-1] if lines else done.reason


@contextlib.contextmanager
def opened_cells(policy: Policy, store: ImageStore) -> Iterator[BuildCells]:
    cells = BuildCells(policy, store)
    try:
        yield cells
    finally:
        cells.close()
