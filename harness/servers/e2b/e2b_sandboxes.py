"""`E2bSandboxes`: the sandboxes of all clients, and how long each lives; `Snapshots`: their
files that clients keep as templates."""

import asyncio
import math
import os
import secrets
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import IO, Any, NamedTuple

import msgspec

from ....policies.compiling.environment import own_home
from ....policies.errors import CellwrightError, PolicyError
from ....policies.policy import MIB, Policy, lies_in
from ....runner.launching.living import list_living, use_of
from ...sandbox.sandbox import Sandbox
from ..client_quota import ClientQuota, OwnedTable
from ..http_access import run_in_thread
from . import control_messages
from .code_interpreter import CodeInterpreter
from .control_messages import E2bNetwork, NewSandbox
from .e2b_cell import E2bCell, Terminals

_MOST, _MOST_OF_ALL = 32, 256
_BYTES, _BYTES_OF_ALL = 1024 * MIB, 4096 * MIB


class E2bSnapshot(NamedTuple):
    """The files below a sandbox's home directory at one time."""

    id: str
    client: str
    sandbox: str
    name: str
    size: int
    archive: IO[bytes]

    def told(self) -> dict[str, Any]:
        """Return what E2B tells of a snapshot."""
        return {"snapshotID": self.id, "names": [self.name] if self.name else []}


class Snapshots:
    """All snapshots of a server, in temporary files; each client has a share of their room."""

    def __init__(self) -> None:
        self._all: dict[str, E2bSnapshot] = {}
        self._number = ClientQuota("snapshots", _MOST, _MOST_OF_ALL, "delete one")
        self._room = ClientQuota("bytes of snapshots", _BYTES, _BYTES_OF_ALL, "delete one")

    def keep(self, client: str, sandbox: str, name: str, archive: bytes) -> E2bSnapshot:
        """Keep an archive; raises QuotaExceeded."""
        self._number.take(client)
        try:
            self._room.take(client, len(archive))
        except BaseException:
            self._number.give_back(client)
            raise
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the snapshot
        file.write(archive)
        made = E2bSnapshot(f"s{secrets.token_hex(10)}", client, sandbox, name, len(archive), file)
        self._all[made.id] = made
        return made

    def of(self, client: str, sandbox: str = "", name: str = "") -> list[E2bSnapshot]:
        """Return a client's snapshots, those of one sandbox or with one name if given."""
        return [
            each for each in self._all.values()
            if each.client == client
            and sandbox in ("", each.sandbox) and name in ("", each.name, each.id)
        ]  # fmt: skip

    def find(self, client: str, template: str) -> E2bSnapshot | None:
        """Return a client's snapshot by its id or name, the newest of a name."""
        return next(reversed(self.of(client, name=template)), None) if template else None

    def archive_of(self, snapshot: E2bSnapshot) -> bytes:
        snapshot.archive.seek(0)
        return snapshot.archive.read()

    def delete(self, snapshot: E2bSnapshot) -> None:
        if self._all.pop(snapshot.id, None):
            self._number.give_back(snapshot.client)
            self._room.give_back(snapshot.client, snapshot.size)
            snapshot.archive.close()

    def close(self) -> None:
        for each in list(self._all.values()):
            self.delete(each)


ENVD_VERSION = "0.6.4"  # the server in the cell has the interface of this version
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
        """Return the data by which a client reaches it."""
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
        """Return the cell's usage at each call between two times (time(2)), this one included."""
        self._metrics.extend(self._used())
        return [each for each in self._metrics if start <= each["timestampUnix"] <= end]

    def _used(self) -> list[dict[str, Any]]:
        """Return the cell's current usage by its cgroup; none if the host does not count it."""
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
    is_free = not any(lies_in(each, (HOME,)) for each in prefixes) and own_home(changed)
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
        quota = ClientQuota("sandboxes", limits.of_one, limits.of_all, "kill one")
        self._all: OwnedTable[str, E2bSandbox] = OwnedTable(
            quota, lambda each: each.cell.lost, lambda id, each: self._end_lost(each)
        )

    async def make(self, client: str, request: NewSandbox) -> E2bSandbox:
        """Return a new sandbox; raises PolicyError, BusyError, LaunchError."""
        if unsupported := request.unsupported():
            raise PolicyError(f"{unsupported}: not supported by cells")
        policy = control_messages.narrowed(self._policy, request.network, request.allow_internet)
        snapshot = self.snapshots.find(client, request.template)
        archive = self.snapshots.archive_of(snapshot) if snapshot else b""
        with self._all.room(client) as put:
            cell = await run_in_thread(
                lambda: E2bCell(lambda: self._open_sandbox(policy), request.env_vars, archive)
            )
            made = E2bSandbox(client, request, cell, policy)
            put(made.id, made)
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
        return [each for _, each in self._all.items()]

    def of(self, client: str) -> list[E2bSandbox]:
        """Return the sandboxes of a client, the newest first."""
        return self._all.of(client)[::-1]

    def find(self, id: str, client: str | None = None) -> E2bSandbox | None:
        """Return a sandbox, with `client` only if it is that client's."""
        self._all.drop_over()
        found = self._all.get(id)
        return found if found and client in (None, found.client) else None

    def with_token(self, token: str) -> E2bSandbox | None:
        """Return the sandbox that a token gives access to; compares in constant time."""
        given = token.encode("utf-8", "replace")
        found = [each for each in self.all() if secrets.compare_digest(each.token.encode(), given)]
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
        await run_in_thread(
            lambda: control_messages.change(cell.sandbox, sandbox.policy.network, asked)
        )

    async def kill(self, sandbox: E2bSandbox) -> None:
        if self._all.pop(sandbox.id) and sandbox.timer:
            sandbox.timer.cancel()
        sandbox.code.is_killed = True
        sandbox.terminals.close()
        await run_in_thread(sandbox.cell.close)

    async def close(self) -> None:
        for each in self.all():
            await self.kill(each)
        self.snapshots.close()

    def _end_lost(self, sandbox: E2bSandbox) -> None:
        if sandbox.timer:
            sandbox.timer.cancel()
        asyncio.get_running_loop().create_task(self._close(sandbox))

    async def _close(self, sandbox: E2bSandbox) -> None:
        try:
            await run_in_thread(sandbox.cell.close)
        except CellwrightError:
            return
