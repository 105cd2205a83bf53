"""`SpawnedImage`: a launcher whose cells have an image as their root.

Programs of an image find its files at their usual places, so the interpreter of the launcher and of
cells lies elsewhere: below /.cellwright.  The process that is spawned makes that place in a mount
namespace of its own (launcher/image_stage.py) and starts the interpreter there.
"""

import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from ...policies.compiling.environment import TRUSTING
from ...policies.errors import LaunchError, PolicyError
from ...policies.languages import LANGUAGES
from ...policies.plan import ImagePlan, PathRule, Plan
from ...policies.policy import Policy, lies_in
from ..fixed_root import IMAGE_PREFIX
from ..host.image_ids import ImageIds
from ..host.interpreters import HostInterpreter, with_packages
from ..host.runtime import Runtime, find_runtime
from ..host.shown_paths import leads, sources_of
from ..kernel import file_calls as files
from ..messages import ImageStage, encode
from .spawn import Spawned, import_paths, launcher_command

if TYPE_CHECKING:
    from collections.abc import Sequence

_STAGE = "cellwright.runner.launcher.image_stage"
_PROGRAMS = ("usr/local/bin", "usr/bin", "bin")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_IMAGE = "image_root"  # name of the layer


class ImageRoot(NamedTuple):
    """The files of an image, and how cells get them.

    `layers` are directories, the uppermost first, whose owners are those of `ids`; `environment` is
    that of the image.  What cells change takes at most `changes_bytes` of memory and `changes_inodes`
    files, 0 for the limits of /workspace.
    """

    layers: tuple[str, ...]
    ids: ImageIds
    environment: dict[str, str]


class SpawnedImage(Spawned):
    """A launcher for cells with an image as their root."""

    shows_programs_of_the_host = False

    def __init__(
        self, executable: str, image: ImageRoot, packages: "Sequence[str]" = (), *,
        has_fixed_addresses: bool = False,
    ) -> None:  # fmt: skip
        """Start it; raises LaunchError as `Spawned` does."""
        self._image = image
        self.groups = ("one_id",) if image.ids.kind == "one" else ("ids",)
        runtime = find_runtime(executable)
        places = dict.fromkeys(
            IMAGE_PREFIX + os.path.dirname(path) for path in runtime.files if _is_library(path)
        )
        loader = IMAGE_PREFIX + leads(runtime.loader)
        command = launcher_command(IMAGE_PREFIX + executable)
        # How the interpreter is started: the image may have another loader and other libraries.
        self.interpreter = (loader, "--library-path", ":".join(places), command[0])
        stage = ImageStage(
            (*self.interpreter, *command[1:]),
            image.ids.kind, image.ids.uids, image.ids.gids,
        )  # fmt: skip
        super().__init__(
            executable, _STAGE, packages, has_fixed_addresses=has_fixed_addresses,
            then=(b"\0" + encode(stage), "\0".join(import_paths(tuple(packages))).encode()),
        )  # fmt: skip

    def again(self) -> "SpawnedImage":
        return SpawnedImage(
            self.executable, self._image, self._packages,
            has_fixed_addresses=self.has_fixed_addresses,
        )  # fmt: skip

    def sources_of(self, policy: Policy) -> dict[str, str]:
        """Return the resolved host paths of what `policy` shows beside the image."""
        return sources_of(self.policy_for(policy))

    def host_id(self, user: int | str | None) -> int:
        """Return the id outside of root inside, if root starts the launcher."""
        if user is not None:
            raise PolicyError(
                "user: cannot be combined with an image", "its files have the ids of its own range"
            )
        return self._image.ids.root[0] if os.geteuid() == 0 else 0

    def policy_for(self, policy: Policy) -> Policy:
        """Return `policy` for programs that are the image's."""
        if not (policy.processes.subprocesses and policy.processes.execute_own):
            raise PolicyError(
                "image: needs processes.subprocesses and processes.execute_own: its programs are files "
                "of the cell",
                'use the profile "workshop", or one that extends it',
            )
        for name in ("changes", "protected"):
            if getattr(policy.filesystem, name):
                raise PolicyError(f"filesystem.{name}: cannot be combined with an image")
        variables = {
            "HOME": "/root",
            "PATH": _PATH,
            **self._image.environment,
            **policy.environment,
        }
        return replace(
            policy,
            environment=variables,
            processes=replace(policy.processes, execute=()),
            filesystem=replace(policy.filesystem, system_files=False),
        )

    def find_interpreter(self, language: str, runtime: Runtime, path: str) -> HostInterpreter:
        """Return the interpreter of `language` in the image; raises LaunchError if it has none."""
        name = LANGUAGES[language].program
        for place in (path.lstrip("/"),) if path else (f"{each}/{name}" for each in _PROGRAMS):
            for layer in self._image.layers:
                if (mode := _mode_in(layer, place)) is None:
                    continue
                if stat.S_ISCHR(mode):  # a whiteout
                    break
                return HostInterpreter(
                    language, f"/{place}", (f"/{place}",), (), (),
                    reserves_mib=LANGUAGES[language].reserves_mib,
                )  # fmt: skip
        raise LaunchError(f"{language}: the image has no {path or name}")

    def runtime(self, python_path: tuple[str, ...]) -> Runtime:
        """Return the interpreter's files at their places in cells."""
        found = with_packages(find_runtime(self.executable), python_path)
        needed = [path for path in found.files if _is_library(path) or os.path.isdir(path)]
        links = [
            (IMAGE_PREFIX + link, target if target[0] != "/" else IMAGE_PREFIX + target)
            for link, target in found.links
            if not lies_in(link, ("/tmp",))  # noqa: S108 - the cell's own
        ]
        return Runtime(
            IMAGE_PREFIX + found.executable,
            tuple(IMAGE_PREFIX + path for path in needed if not lies_in(path, python_path)),
            tuple(links),
            tuple(IMAGE_PREFIX + path for path in found.hidden),
            (IMAGE_PREFIX + found.executable,),
        )

    def elsewhere(self, files: "Sequence[str]") -> dict[str, str]:
        ours = [path for path in files if lies_in(path, (IMAGE_PREFIX,))]
        found = super().elsewhere([path for path in files if path not in ours])
        for path in ours:
            real = IMAGE_PREFIX + leads(path.removeprefix(IMAGE_PREFIX))
            if real != path:
                found[path] = real
        return found

    def adapt(self, plan: Plan) -> Plan:
        """Return `plan` for cells whose root is the image, which they may change."""
        kept = tuple(each for each in plan.tmpfs if each.target != "/tmp")  # noqa: S108 - in the cell
        (workspace,) = (each for each in kept if each.target == "/workspace")
        own = tuple(replace(each, also="", is_home=False) for each in kept)
        rules = [PathRule(path="/", write=True, execute=True)]
        rules += [each for each in plan.path_rules if lies_in(each.path, ("/dev",))]
        ids = self._image.ids
        image = ImagePlan(
            layers=self._image.layers, interpreter=self.interpreter,
            kind=ids.kind, uids=ids.uids, gids=ids.gids,
            changes_bytes=workspace.size_bytes, changes_inodes=workspace.inodes,
        )  # fmt: skip
        variables = {
            name: value for name, value in plan.environment.items() if name not in TRUSTING
        }
        return replace(
            plan, tmpfs=own, path_rules=tuple(rules), image=image, environment=variables,
            layers=(*plan.layers, _IMAGE),
        )  # fmt: skip


def _mode_in(layer: str, place: str) -> int | None:
    """Return the mode of a file in a layer, which is hostile: no link leads out of it."""
    root = os.open(layer, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = files.open_inside(
            root, os.fsencode(place), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        )
        try:
            return os.fstat(found).st_mode
        finally:
            os.close(found)
    except OSError:
        return None
    finally:
        os.close(root)


def _is_library(path: str) -> bool:
    name = os.path.basename(path)
    return ".so" in name and not name.endswith(".cache")
