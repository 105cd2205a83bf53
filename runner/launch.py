"""`Launch`: what happens once a launcher was spawned, until it can make cells.

It may begin before the code is imported that uses the cells (`begin_ahead`): the kernel and the
launcher take a third of the time of `cellwright run`, in which its process only waited (measured).
"""

import os
import threading
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..policies.errors import LauncherLost, LaunchError, PolicyError
from ..policies.languages import PYTHON
from ..policies.plan import CERTIFICATES, FIXED_ADDRESSES, PathRule, Plan
from ..policies.policy import Policy, lies_in
from .cgroups import CgroupTree, NoCgroups, open_tree
from .cgroups.tree import CONTROLLERS
from .host.paths import lead_elsewhere, leads, shows_sockets
from .host.plans import plan_for
from .host.probe import probe_host
from .host.runtime import Runtime, find_runtime
from .launching import Handover, Launcher
from .messages import Boot
from .spawn import Spawned

if TYPE_CHECKING:
    from ..policies.host import SystemFile
    from .host.interpreters import HostInterpreter

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - of the cell's own


class LaunchArguments(NamedTuple):
    """What the cells of one launcher share.

    `is_learning`: everything is shown that programs could need.  `interpreter` is the path of that of
    `language`, where it is not in the usual places.  Cells see shared files at `places`.  `sources` are
    the policy's paths as they were resolved.  `user` is whose id cells have on the host where root
    starts them (host/ids.py).  `cells_per_network` cells have one network namespace, one after the
    other, if the plan lets them share it.  `is_for_one_cell`: a launch is to take little time, and no
    further cell is expected.
    """

    policy: Policy
    sources: dict[str, str]
    cgroup_root: str | None = None
    is_learning: bool = False
    language: str = PYTHON
    interpreter: str = ""
    places: tuple[str, ...] = ()
    user: int | str | None = None
    cells_per_network: int = 1
    is_for_one_cell: bool = False


class Launch:
    """The launch of one launcher: its cgroups, its plan, and what it is told."""

    def __init__(self, spawned: Spawned, arguments: LaunchArguments) -> None:
        """Work out what to tell the launcher that was `spawned`, which imports meanwhile.

        Raises PolicyError, Unenforceable if this host lacks a layer, LaunchError.
        """
        self.arguments = arguments
        self._interpreter: HostInterpreter | None = None
        self._system_files: tuple[SystemFile, ...] = ()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._spawned = spawned
        if spawned.in_container:
            self._start_container()
        self.launcher = Launcher(spawned)
        self.tree: CgroupTree = NoCgroups("not looked for yet")
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
        self.launcher.require_alive()  # for the dead no scope can be had: that is not the cause
        self.plan: Plan = self._compile(self.tree.missing)
        if self._spawned.has_fixed_addresses:
            layers = (*self.plan.layers, FIXED_ADDRESSES)
            self.plan = msgspec.structs.replace(self.plan, layers=layers)
        self.boot = self._boot_frame(self._spawned.runtime(self.plan.python_path))

    def _compile(self, missing: dict[str, str]) -> Plan:
        """Return the plan for this host; `missing` says why it lacks controllers."""
        given = self.arguments
        if given.language != PYTHON and self._interpreter is None:
            # Most run Python, and need no subprocess.
            from .host.interpreters import find_interpreter

            runtime = find_runtime(self._spawned.executable)
            self._interpreter = find_interpreter(given.language, runtime, given.interpreter)
        if given.policy.filesystem.system_files and self._spawned.shows_programs_of_the_host:
            from .host.system_files import find_system_files  # strict policies show none

            self._system_files = find_system_files()
        host = probe_host(missing, self._spawned.kernel, self._system_files)
        plan = plan_for(
            given.policy, host, learning=given.is_learning, interpreter=self._interpreter,
            shows_sockets=shows_sockets(given.policy, given.sources),
        )  # fmt: skip
        return self._spawned.adapt(plan)

    def _start_container(self) -> None:
        """Start a launcher that must know before what its cells will see, though not their caps."""
        self.plan = self._compile(dict.fromkeys(CONTROLLERS, ""))
        files, _ = self._shown_files(self._spawned.runtime(self.plan.python_path))
        sources = {**self.arguments.sources, **self._system_sources(), **self._certificates()}
        self._spawned.start(self.plan, files, sources)

    def begin(self) -> None:
        """Put the launcher into its cgroup, and send it what cells share; raises LaunchError."""
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
        """Wait until the launcher can make cells, and return what it hands over.

        Raises LaunchError, and PolicyError if what the policy says cannot be on this host.
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
        """Return what cells see beside what the policy shows: files, and links."""
        files, links = runtime.files, runtime.links
        if self.arguments.policy.processes.subprocesses:
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
        if any(lies_in(path, (_SHARED_MEMORY,)) for path in (*files, *self.arguments.sources)):
            self.plan = _with_shared_memory(self.plan)
        elsewhere: dict[str, str] = {}
        if not self._spawned.in_container:  # there, all is in its place
            elsewhere = lead_elsewhere(files) | self._certificates()
            sources = dict(self.arguments.sources) | self._system_sources()
            elsewhere |= {path: real for path, real in sources.items() if path != real}
        uid = self._spawned.host_id(self.arguments.user)
        for place in self.arguments.places:
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
            self.arguments.places,
            self.arguments.cells_per_network if self.plan.reuses_network else 1,
            self.arguments.is_for_one_cell,
        )

    def _system_sources(self) -> dict[str, str]:
        """Return the places that the shown system files lead to."""
        return {each.path: each.source for each in self._system_files}

    def _certificates(self) -> dict[str, str]:
        """Return where cells are shown the host's certificate authorities, and what is shown there."""
        plan = self.plan
        if not (plan.network and plan.network.certificates):
            return {}
        system = {each.path for each in self._system_files}
        if lies_in(CERTIFICATES, tuple({bind.path for bind in plan.binds} - system)):
            return {}  # the policy shows its own
        return {CERTIFICATES: leads(plan.network.certificates)}


def begin_ahead(spawned: Spawned, arguments: LaunchArguments) -> None:
    """Begin the launch of a launcher that was `spawned`, for the sandbox that will be made with it.

    A sandbox with other `arguments` ends this launch and starts another launcher.
    """
    spawned.launch = launch = Launch(spawned, arguments)
    launch.begin_beside()


def launch_of(spawned: Spawned, arguments: LaunchArguments) -> Launch:
    """Return the launch that was begun ahead with the same arguments, or else a new one."""
    launch = spawned.take_launch()
    if launch is None:
        return Launch(spawned, arguments)
    if isinstance(launch, Launch) and launch.arguments == arguments:
        return launch
    launch.close()
    return Launch(spawned.again(), arguments)


def _with_shared_memory(plan: Plan) -> Plan:
    """Give cells a /dev/shm of their own in place of a link to /tmp, beneath which host paths are shown
    (shm_overview(7))."""
    (temporary,) = (each for each in plan.tmpfs if each.target == "/tmp")  # noqa: S108
    memory = msgspec.structs.replace(temporary, target=_SHARED_MEMORY)
    rule = PathRule(path=_SHARED_MEMORY, write=True, execute=memory.executable)
    return msgspec.structs.replace(
        plan, tmpfs=(*plan.tmpfs, memory), path_rules=(*plan.path_rules, rule)
    )
