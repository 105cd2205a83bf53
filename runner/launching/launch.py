"""`Launch`: the steps from a spawned launcher to one that can make cells.

It may begin before the code is imported that uses the cells (`begin_ahead`): the kernel and the
launcher take a third of the time of `cellwright run`, in which its process only waited (measured).
"""

import os
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec

from ...policies.closing import Closing
from ...policies.compiling.gpus import GpuFiles, check_gpu
from ...policies.errors import LauncherLost, LaunchError, PolicyError
from ...policies.languages import PYTHON
from ...policies.plan import CERTIFICATES, FIXED_ADDRESSES, PathRule, Plan
from ...policies.policy import Policy, lies_in, shown_paths
from ..cgroups import CgroupTree, open_tree
from ..cgroups.cgroup_tree import CONTROLLERS
from ..fixed_root import LIKE_TMP
from ..host.plans import plan_for, probe_host
from ..host.runtime import Runtime, find_runtime
from ..host.shown_paths import leads, shows_sockets
from ..messages import Boot
from ..settings import PoolSettings
from ..shared_files import SharedFiles
from .launcher_process import Handover, Launcher
from .spawn import Spawned

if TYPE_CHECKING:
    from ...policies.advice.learning import Lessons
    from ...policies.compiling.host import SystemFile
    from ..confined.egress_process import EgressProcess
    from ..host.interpreters import HostInterpreter

_NO_SOURCES: Mapping[str, str] = MappingProxyType({})
_NO_FILES: Mapping[str, SharedFiles] = MappingProxyType({})


class LaunchArguments(NamedTuple):
    """Settings that the cells of one launcher share: made once and passed on as one object.

    `sources` are the policy's paths as they were resolved. `interpreter` is that of `language`, or its
    path where it is not in the usual places. Cells see the `shared_files`, by their places. `user` is
    whose id cells have on the host where root starts them (host/ids.py). `egress` serves cells whose
    policy allows names of the network. With `lessons`, cells see everything that programs could need,
    and the needs of programs are added to it. `cells_per_network` cells have one network namespace, one
    after the other, if the plan lets them share it, and `cells_per_cgroup` one cgroup.
    `is_for_one_cell`: a launch is to take little time, and no further cell is expected. `variables` and
    `files` are those of credentials: programs have the variables, and see the host's files in the
    places of their keys.
    """

    policy: Policy
    sources: Mapping[str, str] = _NO_SOURCES
    cgroup_root: str | None = None
    language: str = PYTHON
    interpreter: "str | HostInterpreter" = ""
    shared_files: Mapping[str, SharedFiles] = _NO_FILES
    user: int | str | None = None
    egress: "EgressProcess | None" = None
    lessons: "Lessons | None" = None
    cells_per_network: int = 1
    cells_per_cgroup: int = 1
    is_for_one_cell: bool = False
    variables: Mapping[str, str] = _NO_SOURCES
    files: Mapping[str, str] = _NO_SOURCES

    def for_pool(self, spawned: Spawned, settings: PoolSettings) -> Self:
        """Return the arguments for all launchers of a pool, of which the first was `spawned`.

        Paths are resolved once, so that a later launcher does not show another file that took a path's
        place.
        """
        return self._replace(
            sources=spawned.sources_of(self.policy),
            cells_per_network=settings.cells_per_network if settings.size else 1,
            cells_per_cgroup=settings.cells_per_cgroup if settings.size else 1,
            is_for_one_cell=settings.cells_per_launcher == 1,
        )


class Launch(Closing):
    """The launch of one launcher: its cgroups, its plan, and its configuration."""

    def __init__(self, spawned: Spawned, arguments: LaunchArguments) -> None:
        """Work out what to tell the launcher that was `spawned`, which imports meanwhile.

        Raises PolicyError, Unenforceable if this host lacks a layer, LaunchError.
        """
        self.arguments = arguments
        self._interpreter: HostInterpreter | None = None
        self._system_files: tuple[SystemFile, ...] = ()
        self._gpu = GpuFiles()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._spawned = spawned
        if spawned.in_container:
            self._start_container()
        self.launcher = Launcher(spawned)
        self.tree = CgroupTree("not looked for yet")
        try:
            self._prepare()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise LaunchError(f"cannot set up: {error}") from None
            raise

    def _prepare(self) -> None:
        given = self.arguments
        self.tree = open_tree(self.launcher.keeper, given.cgroup_root)
        self.launcher.require_alive()  # a dead launcher gets no scope; report its death instead
        self.plan: Plan = self._compile(self.tree.missing)
        if self._spawned.has_fixed_addresses:
            layers = (*self.plan.layers, FIXED_ADDRESSES)
            self.plan = msgspec.structs.replace(self.plan, layers=layers)
        variables = {**self.plan.environment, **given.variables}
        self.plan = msgspec.structs.replace(self.plan, environment=variables)
        self.boot = self._boot_frame(self._spawned.runtime(self.plan.python_path))

    def _compile(self, missing: dict[str, str]) -> Plan:
        """Return the plan for this host; `missing` says why it lacks controllers."""
        given, policy = self.arguments, self._spawned.policy_for(self.arguments.policy)
        if not isinstance(given.interpreter, str):
            self._interpreter = given.interpreter
        elif given.language != PYTHON and self._interpreter is None:
            runtime = find_runtime(self._spawned.executable)
            self._interpreter = self._spawned.find_interpreter(
                given.language, runtime, given.interpreter
            )
        if policy.filesystem.system_files and self._spawned.shows_programs_of_the_host:
            from ..host.system_files import find_system_files  # strict policies show none

            self._system_files = find_system_files()
        self._gpu = self._find_gpu()
        host = probe_host(missing, self._spawned.kernel, self._system_files, self._gpu)
        plan = plan_for(
            policy, host, learning=given.lessons is not None, interpreter=self._interpreter,
            shows_sockets=shows_sockets(policy, given.sources), groups=self._spawned.groups,
        )  # fmt: skip
        return self._spawned.adapt(plan)

    def _start_container(self) -> None:
        """Start a launcher that must know the files of its cells, though not their caps, beforehand."""
        self.plan = self._compile(dict.fromkeys(CONTROLLERS, ""))
        files, _ = self._shown_files(self._spawned.runtime(self.plan.python_path))
        sources = {**self.arguments.sources, **self._system_sources(), **self._certificates()}
        if self._interpreter:
            sources |= dict(self._interpreter.sources)
        self._spawned.start(self.plan, files, sources)

    def begin(self) -> None:
        """Put the launcher into its cgroup and send it the settings that cells share; raises
        LaunchError."""
        self._admit()
        self.launcher.send_boot(self.boot)

    def begin_beside(self) -> None:
        """Do the same in a thread: the kernel may take 15 ms to move a process (measured, cgroup v1).
        `finish` raises what that raises."""
        self._thread = threading.Thread(target=self._begin_or_fail, daemon=True)
        self._thread.start()

    def _begin_or_fail(self) -> None:
        try:
            self.begin()
        except BaseException as failure:  # noqa: BLE001 - `finish` raises it
            self._failure = failure

    def finish(self) -> Handover:
        """Wait until the launcher can make cells, and return its shared directories and covers.

        Raises LaunchError, and PolicyError if this host cannot do what the policy says.
        """
        if self._thread:
            self._thread.join()
        else:
            self.begin()
        if self._failure:
            raise self._failure
        return self.launcher.await_booted()

    def close(self) -> None:
        """End the launcher, and leave nothing behind."""
        if self._thread:
            self._thread.join()
        self.launcher.close()
        self.tree.close()

    def _admit(self) -> None:
        """Move the keeper before it forks: nursery, launcher and inits begin where it is.

        On cgroup v1 the kernel takes a millisecond for each process and controller (measured).
        """
        try:
            self.tree.admit(self.launcher.keeper, self.boot.host_uid or os.geteuid())
        except ProcessLookupError:
            raise LauncherLost(cell_began=False) from None
        except OSError as error:
            raise LaunchError(f"cannot write {error.filename}: {error.strerror}") from None

    def _shown_files(self, runtime: Runtime) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        files, links = runtime.files, runtime.links
        has_programs = self._spawned.shows_programs_of_the_host
        if self.arguments.policy.processes.subprocesses and has_programs:
            links = (*links, *runtime.names())
        if self.arguments.policy.processes.subprocesses or self._interpreter:
            files = (*files, *runtime.programs)
        if self._interpreter:
            files, links = (*files, *self._interpreter.files), (*links, *self._interpreter.links)
        files = (*files, *self._certificates())
        if own := [path for path in files if lies_in(path, ("/workspace",))]:
            raise LaunchError(
                f"cannot show {own[0]}: /workspace is the cell's own",
                "move the interpreter or its environment to another directory",
            )
        return files, links

    def _boot_frame(self, runtime: Runtime) -> Boot:
        files, links = self._shown_files(runtime)
        shown = (*files, *self.arguments.sources)
        for place in LIKE_TMP if not self.plan.image else ():  # an image has directories there
            if place not in shown and any(lies_in(path, (place,)) for path in shown):
                self.plan = _with_own(self.plan, place)
        elsewhere: dict[str, str] = {}
        if not self._spawned.in_container:  # in a container everything is in its place
            elsewhere = self._spawned.elsewhere(files) | self._certificates()
            if self._interpreter:
                elsewhere |= dict(self._interpreter.sources)
            sources = dict(self.arguments.sources) | self._system_sources()
            elsewhere |= {path: real for path, real in sources.items() if path != real}
        uid = self._spawned.host_id(self.arguments.user)
        places = tuple(self.arguments.shared_files)
        for place in places:
            if any(lies_in(bind.path, (place,)) for bind in self.plan.binds):
                raise PolicyError(
                    f"the policy shows {place}, where cells have files of the sandbox"
                )
        return Boot(
            self.plan,
            files,
            links,
            runtime.hidden,
            uid,
            self.tree.joined_by_write,
            tuple(elsewhere.items()),
            places,
            self.arguments.cells_per_network if self.plan.reuses_network else 1,
            self.arguments.is_for_one_cell,
        )

    def _find_gpu(self) -> GpuFiles:
        policy = self.arguments.policy
        if not policy.devices.gpu or (vendor := check_gpu(policy)) is None:  # as most policies
            return GpuFiles()
        if self._spawned.in_container or not self._spawned.shows_programs_of_the_host:
            raise PolicyError("devices.gpu: cannot be combined with a container or an image")
        from ..host.gpu import find_gpu_files

        libraries = find_runtime(self._spawned.executable).files
        libc = next(each for each in libraries if os.path.basename(each).startswith("libc."))
        folder = os.path.dirname(libc)
        is_shown = lies_in(folder, shown_paths(policy))
        return find_gpu_files(vendor, "" if is_shown else folder)

    def _system_sources(self) -> dict[str, str]:
        """Return the shown files that no field of the policy names, each with its host path."""
        system = {each.path: each.source for each in self._system_files}
        return system | {each.path: each.source for each in self._gpu.libraries}

    def _certificates(self) -> dict[str, str]:
        plan = self.plan
        if not (plan.network and plan.network.certificates):
            return {}
        if plan.image and not self.arguments.files:
            return {}  # the image has its own
        if self.arguments.files:
            return dict(self.arguments.files)
        system = {each.path for each in self._system_files}
        if lies_in(CERTIFICATES, tuple({bind.path for bind in plan.binds} - system)):
            return {}  # the policy shows a file of its own
        return {CERTIFICATES: leads(plan.network.certificates)}


def begin_ahead(spawned: Spawned, arguments: LaunchArguments) -> None:
    """Begin the launch of a launcher that was `spawned`, for the sandbox that will be made with it.

    A sandbox with other `arguments`, except `egress`, ends this launch and starts another launcher.
    """
    spawned.launch = launch = Launch(spawned, arguments)
    launch.begin_beside()


def launch_of(spawned: Spawned, arguments: LaunchArguments) -> Launch:
    """Return the launch that was begun ahead with the same arguments, or else a new one."""
    launch = spawned.take_launch()
    if launch is None:
        return Launch(spawned, arguments)
    if (
        isinstance(launch, Launch)
        and launch.arguments._replace(egress=arguments.egress) == arguments
    ):
        return launch  # a launch does nothing with the way out
    launch.close()
    return Launch(spawned.again(), arguments)


def _with_own(plan: Plan, place: str) -> Plan:
    """Give cells a file system of their own at `place`, otherwise a link to /tmp, because host paths
    are shown beneath it."""
    (temporary,) = (each for each in plan.tmpfs if each.target == "/tmp")  # noqa: S108
    memory = msgspec.structs.replace(temporary, target=place)
    rule = PathRule(path=place, write=True, execute=memory.executable)
    return msgspec.structs.replace(
        plan, tmpfs=(*plan.tmpfs, memory), path_rules=(*plan.path_rules, rule)
    )
