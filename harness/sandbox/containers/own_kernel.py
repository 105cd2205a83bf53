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

from ....policies.compiling.compile import compile_policy
from ....policies.errors import ClosedError, PolicyError
from ....policies.languages import PYTHON
from ....policies.plan import Plan
from ....policies.policy import Policy
from ....runner.cgroups import CgroupUsage
from ....runner.concurrency import ConcurrencyLimit
from ....runner.host.image_ids import one_id
from ....runner.host.plans import probe_host
from ....runner.messages import RunProgram, SingleCall
from ....runner.oci.container import SpawnedContainer
from ....runner.oci.oci_runtime import default_runtime, find_oci_runtime
from ....runner.oci.single_call import SingleCallContainer
from ....runner.requests.execution import WorkspaceChanges, called_off, look_at_files, phases
from ....runner.requests.outcome import conclude
from ....runner.requests.request import Request
from ....runner.requests.result import SandboxResult
from ....runner.watching.guest_channel import Capture
from ..calls.admission import Admission, rules_of
from ..checks import check_pool
from ..images.layer_work import ArchivePart, ImageLimits, write_layer
from ..parameters import CallArguments
from ..sandbox_arguments import (
    FewerCalls,
    SandboxArguments,
    audit_log_of,
    policy_of_arguments,
    python_of,
)
from .images import container_of

if TYPE_CHECKING:
    from typing import BinaryIO

    from ....runner.audit.log import AuditLog
    from ....runner.supervisor import SupervisorsState

_TAKEN = (
    "config", "policy", "python", "runtime", "backend", "rootfs", "pool", "audit", "user",
    "blocked_imports", "blocked_builtins",
)  # fmt: skip
# The kernel of the container is the boundary, in place of the launcher's namespaces.
_OF_CELLS = ("user_ns", "cgroup_ns", "cgroup_sockets")
_HINT = "use a runtime whose containers have the kernel of the host, such as crun"


class OwnKernelCalls(FewerCalls):
    """Runs each call in a container of its own; safe from many threads."""

    judge: None = None  # the sandbox itself judges, in cells of siblings

    def __init__(self, given: SandboxArguments, container: SpawnedContainer) -> None:
        """Raises PolicyError for arguments that such containers cannot have, Unenforceable."""
        if others := [name for name in given.changed() if name not in _TAKEN]:
            raise PolicyError(f"{others[0]}: not with {container.oci.name}", _HINT)
        self.policy = policy_of_arguments(given)
        self._container = container
        self._plan = _plan_of(self.policy, container)
        sources = container.sources_of(self.policy)
        self._containers = SingleCallContainer(container, self._plan, sources)
        self._uid = container.host_id(given.host.user)
        pool = check_pool(given.pool)
        self._concurrency = ConcurrencyLimit(pool.running, pool.queue_seconds)
        self.audit: AuditLog | None = audit_log_of(given)
        trail = None
        if self.audit:
            from ....runner.audit.execution_trail import ExecutionTrail

            trail = ExecutionTrail(self.audit, self._plan)
        rules = rules_of(self.policy.validation)
        self._admission = Admission(self.policy, self._plan.layers, rules, trail)
        self._closed = False

    @property
    def plan(self) -> Plan:
        return self._plan

    def execute(self, given: CallArguments) -> SandboxResult:
        if given.workspace is not None or given.clean:
            self.refuse("workspace")
        if given.packages:
            self.refuse("packages")
        call = self._admission.admit(given)
        if isinstance(call, SandboxResult):  # the call was rejected
            return call
        with call:
            if call.language != PYTHON:
                self.refuse("language")
            result = self.perform(call.request)
        return call.end(result)

    def perform(self, request: Request, *_: object) -> SandboxResult:
        if self._closed:
            raise ClosedError("the sandbox was closed")
        asked_at = time.monotonic()
        if not self._concurrency.acquire(request.cancel):
            return called_off(request, asked_at, self._plan.layers)
        try:
            return self._run(request, asked_at)
        finally:
            self._concurrency.release()

    def _run(self, request: Request, asked_at: float) -> SandboxResult:
        limits = request.limits
        captures = tuple(
            Capture(name, -1, limits.output_bytes, request.on_output)
            for name in ("stdout", "stderr")
        )
        call = SingleCall(self._plan, _program_of(request), request.stdin or b"", self._uid)
        leased_at = time.monotonic()
        with open(os.memfd_create("files", os.MFD_CLOEXEC), "w+b") as files:
            stdout, stderr = captures
            ran = self._containers.run(call, limits, (stdout, stderr), request.cancel, files)
            ended_at = time.monotonic()
            files.flush()
            files.seek(0)
            made = self._files_of(files, request)
        counted_at = time.monotonic()
        sent_at = ran.began_at or ended_at
        moments = (asked_at, leased_at, sent_at, ended_at, counted_at, time.monotonic())
        return conclude(
            ran.seen, CgroupUsage(), captures, limits,
            layers=self._plan.layers, phases=phases(moments), execution_time=moments[-1] - asked_at,
            execution_id=request.execution_id, trace_id=request.trace_id,
            files=made.files, artifacts=made.artifacts, uncollected=made.uncollected,
        )  # fmt: skip

    def _files_of(self, archive: "BinaryIO", request: Request) -> WorkspaceChanges:
        limits = request.limits
        with tempfile.TemporaryDirectory(prefix="cellwright-files-") as place:
            most = ImageLimits(limits.workspace_bytes, limits.workspace_inodes)
            size = os.fstat(archive.fileno()).st_size
            part = ArchivePart(archive.fileno(), 0, size, "workspace")
            own = one_id(os.geteuid(), os.getegid())
            with contextlib.suppress(PolicyError):
                write_layer(Path(place), part, own, most, merges=True)
            workspace = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                return look_at_files(workspace, request, {})
            finally:
                os.close(workspace)

    def refuse(self, what: str) -> NoReturn:
        raise PolicyError(
            f"{what}: each call has a container of {self._container.oci.name}, which runs one Python "
            "program and nothing else",
            _HINT,
        )

    def validate_source(self, code: str, /) -> tuple[bool, str | None]:
        findings = self._admission.check(code, PYTHON)
        return (False, str(findings[0])) if findings else (True, None)

    def state(self) -> "SupervisorsState":
        from ....runner.supervisor import SupervisorsState

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
        ("privacy.enabled", policy.privacy.enabled), ("devices.gpu", policy.devices.gpu),
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
    """Return the executor of calls if the runtime's containers have a kernel of their own, else None.

    Raises PolicyError, Unenforceable, and LaunchError if the host lacks the runtime.
    """
    host = given.host
    if find_oci_runtime(host.runtime or default_runtime()).kernel == "shared":
        return None
    container = container_of(host.runtime, host.rootfs, python_of(host))
    return OwnKernelCalls(given, container)
