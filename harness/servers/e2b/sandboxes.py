"""`E2bSandboxes`: the sandboxes of all clients, and how long each lives."""

import asyncio
import math
import os
import secrets
import sys
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from ....policies.compile import home_below_home
from ....policies.errors import CellwrightError, PolicyError
from ....policies.policy import MIB, Policy, lies_in
from ....runner.living import list_living, use_of
from ...sandbox.sandbox import Sandbox
from ..client_quota import ClientQuota
from ..client_turns import run_in_thread
from . import network
from .cell import E2bCell
from .code_interpreter import CodeInterpreter
from .messages import E2bNetwork, NewSandbox
from .snapshots import E2bSnapshot, Snapshots
from .terminals import Terminals

ENVD_VERSION = "0.6.4"  # the cell's part has the interface of this version
_PAUSED_SECONDS = 24 * 60 * 60
_MOST_METRICS = 1000
HOME = "/home/user"


class E2bLimits(NamedTuple):
    """How many sandboxes live, of one client and of all."""

    of_one: int = 16
    of_all: int = 32


class E2bSandbox:
    """A sandbox of one client, its token, and when it ends."""

    def __init__(self, client: str, request: NewSandbox, cell: E2bCell, policy: Policy) -> None:
        self.id = f"i{secrets.token_hex(10)}"
        self.client, self.request, self.cell, self.policy = client, request, cell, policy
        self.token = secrets.token_urlsafe(24)
        self.code = CodeInterpreter(cell.notebook, cell.home)
        self.terminals = Terminals(cell.session)
        self.started_at = datetime.now(UTC)
        self.ends_at = self.started_at
        self.is_paused = False
        self.timer: asyncio.TimerHandle | None = None
        self._cpu: tuple[datetime, float] = (self.started_at, 0.0)
        self._metrics: deque[dict[str, Any]] = deque(maxlen=_MOST_METRICS)

    def access(self) -> dict[str, Any]:
        """Return what a client needs to reach it."""
        return {
            "templateID": self.request.template, "sandboxID": self.id, "clientID": "cellwright",
            "envdVersion": ENVD_VERSION, "envdAccessToken": self.token,
            "trafficAccessToken": self.token,
        }  # fmt: skip

    def told(self) -> dict[str, Any]:
        """Return what E2B tells of a sandbox."""
        limits = self.policy.limits
        return {
            "templateID": self.request.template, "sandboxID": self.id, "clientID": "cellwright",
            "startedAt": _time(self.started_at), "endAt": _time(self.ends_at),
            "envdVersion": ENVD_VERSION, "envdAccessToken": self.token,
            "cpuCount": math.ceil(limits.cpus), "memoryMB": limits.memory_bytes // MIB,
            "diskSizeMB": limits.workspace_bytes // MIB, "metadata": self.request.metadata,
            "state": "paused" if self.is_paused else "running",
            "allowInternetAccess": bool(self.policy.network.allow),
        }  # fmt: skip

    def metrics(self, start: int, end: int) -> list[dict[str, Any]]:
        """Return what the cell used at each call between two times (time(2)), this one included."""
        self._metrics.extend(self._used())
        return [each for each in self._metrics if start <= each["timestampUnix"] <= end]

    def _used(self) -> list[dict[str, Any]]:
        """Return what the cell uses now, as its cgroup counts it; none where the host does not."""
        own = [
            each for each in list_living()
            if each.record.session == self.cell.session.id and each.record.supervisor.pid == os.getpid()
        ]  # fmt: skip
        if not own:
            return []
        use, now, limits = use_of(own[0]), datetime.now(UTC), self.policy.limits
        (before, seconds), self._cpu = self._cpu, (now, use.cpu_seconds or 0.0)
        passed = max((now - before).total_seconds(), 0.001)
        files = sum(each.size_bytes for each in self.cell.session.files())
        return [{
            "timestamp": _time(now), "timestampUnix": int(now.timestamp()),
            "cpuCount": math.ceil(limits.cpus),
            "cpuUsedPct": round(100 * max(0.0, self._cpu[1] - seconds) / passed, 2),
            "memUsed": use.memory_bytes or 0, "memTotal": limits.memory_bytes, "memCache": 0,
            "diskUsed": files, "diskTotal": limits.workspace_bytes,
        }]  # fmt: skip


def _at_home(policy: Policy) -> Policy:
    """Return the policy with E2B's home directory, unless this host's Python lies there or the policy
    shows paths below /home."""
    at_home = {**policy.environment, "HOME": HOME}
    changed = msgspec.structs.replace(policy, environment=at_home)
    prefixes = (sys.prefix, sys.base_prefix, os.path.realpath(sys.executable))
    is_free = not any(lies_in(each, (HOME,)) for each in prefixes) and home_below_home(changed)
    return changed if is_free else policy


def _time(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")


class E2bSandboxes:
    """All sandboxes of a server; called in its event loop, and works in threads.

    `open_sandbox` makes a `Sandbox` of a policy, which is `policy` or narrower.
    """

    def __init__(
        self, policy: Policy, open_sandbox: Callable[[Policy], Sandbox], limits: E2bLimits
    ) -> None:
        self._policy = _at_home(policy)
        self.snapshots = Snapshots()
        self._open_sandbox = open_sandbox
        self._all: dict[str, E2bSandbox] = {}
        self._quota = ClientQuota("sandboxes", limits.of_one, limits.of_all, "kill one")

    async def make(self, client: str, request: NewSandbox) -> E2bSandbox:
        """Return a new sandbox; raises PolicyError, BusyError, LaunchError."""
        if unsupported := request.unsupported():
            raise PolicyError(f"{unsupported}: not supported by cells")
        policy = network.narrowed(self._policy, request.network, request.allow_internet)
        snapshot = self.snapshots.find(client, request.template)
        archive = self.snapshots.archive_of(snapshot) if snapshot else b""
        self._quota.take(client)
        try:
            cell = await run_in_thread(
                lambda: E2bCell(lambda: self._open_sandbox(policy), request.env_vars, archive)
            )
        except BaseException:
            self._quota.give_back(client)
            raise
        made = E2bSandbox(client, request, cell, policy)
        self._all[made.id] = made
        self.live_for(made, request.timeout)
        return made

    async def keep(self, sandbox: E2bSandbox, name: str) -> E2bSnapshot:
        """Return a new snapshot of a sandbox's files; raises QuotaExceeded, WorkspaceError."""
        archive = await run_in_thread(sandbox.cell.session.snapshot)
        return self.snapshots.keep(sandbox.client, sandbox.id, name, archive)

    async def fork(self, sandbox: E2bSandbox, timeout: int) -> E2bSandbox:
        """Return a new sandbox with another one's files, variables of the environment and network."""
        kept = await self.keep(sandbox, "")
        try:
            request = msgspec.structs.replace(sandbox.request, template=kept.id, timeout=timeout)
            made = await self.make(sandbox.client, request)
        finally:
            self.snapshots.delete(kept)
        made.request = msgspec.structs.replace(request, template=sandbox.request.template)
        return made

    def all(self) -> list[E2bSandbox]:
        """Return the sandboxes of all clients."""
        self._forget_the_lost()
        return list(self._all.values())

    def of(self, client: str) -> list[E2bSandbox]:
        """Return the sandboxes of a client, the newest first."""
        self._forget_the_lost()
        return [each for each in reversed(self._all.values()) if each.client == client]

    def find(self, id: str, client: str | None = None) -> E2bSandbox | None:
        """Return a sandbox, with `client` only if it is that client's."""
        self._forget_the_lost()
        found = self._all.get(id)
        return found if found and client in (None, found.client) else None

    def with_token(self, token: str) -> E2bSandbox | None:
        """Return the sandbox that a token gives access to; compares in constant time."""
        given = token.encode("utf-8", "replace")
        found = [
            each
            for each in self._all.values()
            if secrets.compare_digest(each.token.encode(), given)
        ]
        return found[0] if found else None

    def live_for(self, sandbox: E2bSandbox, seconds: float) -> None:
        """Let a sandbox live for so many seconds from now."""
        if sandbox.timer:
            sandbox.timer.cancel()
        sandbox.ends_at = datetime.now(UTC) + timedelta(seconds=seconds)
        loop = asyncio.get_running_loop()
        sandbox.timer = loop.call_later(seconds, lambda: loop.create_task(self._expire(sandbox)))

    def extend(self, sandbox: E2bSandbox, seconds: float) -> None:
        """Let a sandbox live for so many seconds from now at least."""
        if datetime.now(UTC) + timedelta(seconds=seconds) > sandbox.ends_at:
            self.live_for(sandbox, seconds)

    async def _expire(self, sandbox: E2bSandbox) -> None:
        if sandbox.request.auto_pause and not sandbox.is_paused:
            await self.pause(sandbox)
        else:
            await self.kill(sandbox)

    async def pause(self, sandbox: E2bSandbox) -> None:
        """Freeze a sandbox until it is resumed; its memory stays in use."""
        sandbox.is_paused = True
        await run_in_thread(sandbox.cell.session.freeze)
        self.live_for(sandbox, _PAUSED_SECONDS)

    def resume(self, sandbox: E2bSandbox, seconds: float) -> None:
        """Let a paused sandbox go on: the next call thaws it."""
        sandbox.is_paused = False
        self.live_for(sandbox, seconds)

    async def change_network(self, sandbox: E2bSandbox, asked: E2bNetwork) -> None:
        """Change which hosts a sandbox reaches, within its policy; raises PolicyError."""
        if unsupported := asked.unsupported():
            raise PolicyError(f"{unsupported}: not supported by cells")
        cell = sandbox.cell
        await run_in_thread(lambda: network.change(cell.sandbox, sandbox.policy.network, asked))

    async def kill(self, sandbox: E2bSandbox) -> None:
        self._forget(sandbox)
        sandbox.code.is_killed = True
        sandbox.terminals.close()
        await run_in_thread(sandbox.cell.close)

    async def close(self) -> None:
        for each in list(self._all.values()):
            await self.kill(each)
        self.snapshots.close()

    def _forget(self, sandbox: E2bSandbox) -> None:
        if self._all.pop(sandbox.id, None):
            self._quota.give_back(sandbox.client)
            if sandbox.timer:
                sandbox.timer.cancel()

    def _forget_the_lost(self) -> None:
        for each in [each for each in self._all.values() if each.cell.lost]:
            self._forget(each)
            asyncio.get_running_loop().create_task(self._close(each))

    async def _close(self, sandbox: E2bSandbox) -> None:
        try:
            await run_in_thread(sandbox.cell.close)
        except CellwrightError:
            return
