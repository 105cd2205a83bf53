"""`OwnKernelCalls`: the sandbox of a runtime whose containers have a kernel of their own.

No descriptor can be sent to such a container, so it holds no cells: each call has a container, which
runs one Python program.  There are no sessions, tools or long-lived programs.
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from ....policies.compile import compile_policy
from ....policies.errors import ClosedError, PolicyError
from ....policies.languages import PYTHON
from ....policies.plan import Plan
from ....policies.policy import Policy
from ....runner.capture import Capture, OnOutput
from ....runner.cgroups import CgroupUsage
from ....runner.concurrency import ConcurrencyLimit
from ....runner.execution import WorkspaceChanges, called_off, look_at_files, phases
from ....runner.host.probe import probe_host
from ....runner.messages import RunProgram, SingleCall
from ....runner.oci.container import SpawnedContainer
from ....runner.oci.runtime import default_runtime, find_oci_runtime
from ....runner.oci.single_call import SingleCallContainer
from ....runner.outcome import conclude
from ....runner.request import Request
from ....runner.result import SandboxResult
from ..checks import check_pool
from ..parameters import (
    CallArguments,
    CommandArguments,
    ProgramArguments,
    SessionArguments,
)
from ..pipeline import RequestPipeline, rules_of
from ..sandbox_arguments import SandboxArguments, audit_log_of, policy_of_arguments, python_of
from .containers import container_of
from .unpacking import Unpacking, UnpackLimits

if TYPE_CHECKING:
    from typing import BinaryIO

    from ....runner.audit.log import AuditLog
    from ....runner.supervisors import SupervisorsState
    from ...privacy.privacy import Privacy
    from ..network import SandboxNetwork
    from ..program import Program
    from ..sandbox_skills import SandboxSkills
    from ..session import Session
    from ..workspaces.store import Workspaces

_TAKEN = (
    "config", "policy", "python", "runtime", "backend", "rootfs", "pool", "audit", "user",
    "blocked_imports", "blocked_builtins", "fresh_exec",
)  # fmt: skip
# The kernel of the container is the boundary, in place of the launcher's namespaces.
_OF_CELLS = ("user_ns", "cgroup_ns", "cgroup_sockets")
_HINT = "use a runtime whose containers have the kernel of the host, such as crun"


class OwnKernelCalls:
    """Runs each call in a container of its own; safe from many threads."""

    def __init__(self, given: SandboxArguments, container: SpawnedContainer) -> None:
        """Raises PolicyError for arguments that such containers cannot have, Unenforceable."""
        if others := [name for name in given.changed() if name not in _TAKEN]:
            raise PolicyError(f"{others[0]}: not with {container.oci.name}", _HINT)
        self.policy = policy_of_arguments(given)
        self._container = container
        self._plan = _plan_of(self.policy, container)
        sources = container.sources_of(self.policy)
        self._containers = SingleCallContainer(container, self._plan, sources)
        self._uid = container.host_id(given.user)
        pool = check_pool(given.pool, fresh_exec=given.fresh_exec)
        self._concurrency = ConcurrencyLimit(pool.running, pool.queue_seconds)
        self.audit: AuditLog | None = audit_log_of(given)
        trail = None
        if self.audit:
            from ....runner.audit.execution_trail import ExecutionTrail

            trail = ExecutionTrail(self.audit, self._plan)
        rules = rules_of(self.policy.validation, given.blocked_imports, given.blocked_builtins)
        self._pipeline = RequestPipeline(self.policy, self._plan.layers, rules, trail)
        self._closed = False

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def privacy(self) -> "Privacy | None":
        return None

    def execute(
        self, given: CallArguments, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        if given.workspace is not None or given.clean:
            self._refuse("workspace")
        if given.packages:
            self._refuse("packages")

        def perform(language: str, request: Request) -> SandboxResult:
            if language != PYTHON:
                self._refuse("language")
            return self._perform(request, on_output, cancel)

        return self._pipeline.perform(given, perform)

    def _perform(self, request: Request, on_output: OnOutput | None, cancel: int) -> SandboxResult:
        if self._closed:
            raise ClosedError("the sandbox was closed")
        asked_at = time.monotonic()
        if not self._concurrency.acquire(cancel):
            return called_off(request, asked_at, self._plan.layers)
        try:
            return self._run(request, asked_at, on_output, cancel)
        finally:
            self._concurrency.release()

    def _run(
        self, request: Request, asked_at: float, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        limits = request.limits
        captures = tuple(
            Capture(name, -1, limits.output_bytes, on_output) for name in ("stdout", "stderr")
        )
        call = SingleCall(self._plan, _program_of(request), request.stdin or b"", self._uid)
        leased_at = time.monotonic()
        with open(os.memfd_create("files", os.MFD_CLOEXEC), "w+b") as files:
            stdout, stderr = captures
            ran = self._containers.run(call, limits, (stdout, stderr), cancel, files)
            ended_at = time.monotonic()
            files.flush()
            files.seek(0)
            made = self._files_of(files, request, cancel)
        counted_at = time.monotonic()
        sent_at = ran.began_at or ended_at
        moments = (asked_at, leased_at, sent_at, ended_at, counted_at, time.monotonic())
        return conclude(
            ran.seen, CgroupUsage(), captures, limits,
            layers=self._plan.layers, phases=phases(moments), execution_time=moments[-1] - asked_at,
            execution_id=request.execution_id, trace_id=request.trace_id,
            files=made.files, artifacts=made.artifacts, uncollected=made.uncollected,
        )  # fmt: skip

    def _files_of(self, archive: "BinaryIO", request: Request, cancel: int) -> WorkspaceChanges:
        """Return the files that the program left; those of a broken archive are not brought."""
        limits = request.limits
        with tempfile.TemporaryDirectory(prefix="cellwright-files-") as place:
            most = UnpackLimits(limits.workspace_bytes, limits.workspace_inodes)
            with (
                contextlib.closing(Unpacking(Path(place), most)) as unpacking,
                contextlib.suppress(PolicyError),
            ):
                unpacking.add(archive, "workspace")
            workspace = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return look_at_files(workspace, request, {}, cancel)
            finally:
                os.close(workspace)

    def _refuse(self, what: str) -> NoReturn:
        raise PolicyError(
            f"{what}: each call has a container of {self._container.oci.name}, which runs one Python "
            "program and nothing else",
            _HINT,
        )

    def program(self, _: ProgramArguments, /) -> "Program":
        self._refuse("program")

    def session(self, _: SessionArguments, /) -> "Session":
        self._refuse("session")

    def resume(self, _: str, /) -> "Session":
        self._refuse("resume")

    def discard(self, _: str, /) -> None:
        self._refuse("discard")

    @property
    def workspaces(self) -> "Workspaces":
        self._refuse("workspaces")

    @property
    def network(self) -> "SandboxNetwork":
        self._refuse("network")

    @property
    def skills(self) -> "SandboxSkills":
        self._refuse("skills")

    def with_tokens(self, given: CommandArguments, /) -> CommandArguments:
        return given

    def has_tool(self, _: str, /) -> bool:
        return False

    def private_to(self, _: str, /) -> None:
        return

    def validate_source(self, code: str, /) -> tuple[bool, str | None]:
        findings = self._pipeline.check(code, PYTHON)
        return (False, str(findings[0])) if findings else (True, None)

    def state(self) -> "SupervisorsState":
        from ....runner.supervisors import SupervisorsState

        return SupervisorsState((), 0, 0)

    def settle(self) -> None:
        return

    def close(self) -> None:
        self._closed = True
        self._concurrency.close()
        self._container.close()


def _program_of(request: Request) -> RunProgram:
    return RunProgram(
        request.code, request.inputs, request.files, request.environment,
        request.limits.value_bytes, picture_bytes=request.limits.artifact_bytes,
        plain=request.plain, arguments=request.arguments, filename=request.filename,
    )  # fmt: skip


def _plan_of(policy: Policy, container: SpawnedContainer) -> Plan:
    """Return the plan for programs in containers; raises Unenforceable for layers that it requires and
    such a container cannot have."""
    for field, given in (
        ("network.allow", policy.network.allow), ("http.allow", policy.http.allow),
        ("filesystem.hidden", policy.filesystem.hidden), ("packages.require", policy.packages.require),
        ("privacy.enabled", policy.privacy.enabled),
    ):  # fmt: skip
        if given:
            raise PolicyError(f"{field}: must be empty with {container.oci.name}", _HINT)
    missing = "" if os.geteuid() == 0 else "a runtime without root sets no caps"
    host = probe_host(dict.fromkeys(("memory", "cpu", "pids"), missing), container.kernel)
    host = replace(
        host, listener="the kernel of a container reports nothing to the host", landlock_abi=0
    )
    plan = container.adapt(compile_policy(policy, host))
    return replace(plan, layers=tuple(each for each in plan.layers if each not in _OF_CELLS))


def own_kernel_calls(given: SandboxArguments) -> OwnKernelCalls | None:
    """Return what runs calls where the runtime's containers have a kernel of their own, else None.

    Raises PolicyError, Unenforceable, and LaunchError if the host lacks the runtime.
    """
    if find_oci_runtime(given.runtime or default_runtime()).kernel == "shared":
        return None
    container = container_of(given.runtime, given.rootfs, python_of(given))
    return OwnKernelCalls(given, container)
