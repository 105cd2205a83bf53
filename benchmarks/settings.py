"""The settings of a benchmark, and sandboxes as users have them: default policy, trail in a file."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..harness.sandbox.sandbox import Sandbox
from ..harness.sandbox.sandbox_arguments import HostSettings
from ..policies.policy import Policy
from ..runner.audit.log import AuditLog
from ..runner.settings import PauseSettings, PoolSettings, SessionSettings
from .scratch import scratch_directory


class Settings(NamedTuple):
    """How much to measure, and under which policy."""

    policy: Policy = Policy(name="strict")
    runs: int | None = None
    forks: int | None = None  # how old a launcher grows
    minutes: float | None = None  # how long faults go on
    smoke: bool = False  # little of everything: ratios mean something, percentiles do not
    peers: Path | None = None  # where peers that are no packages of the host were installed
    data: Path | None = None  # questions and catalogues of tools, for search
    model: Path | None = None  # a sentence encoder, for search by meaning

    def amount(self, usual: int, smoke: int) -> int:
        """Return how often to measure: as told, or what is usual."""
        return self.runs or (smoke if self.smoke else usual)


@contextlib.contextmanager
def sandbox(
    settings: Settings, pool: int | PoolSettings | None = None, *, audit: bool | Path | AuditLog = True,
    sessions: SessionSettings = SessionSettings(),  # noqa: B008 - a constant
    tools: Sequence[Callable[..., Any]] = (), pauses: PauseSettings = PauseSettings(),  # noqa: B008
    workers: int = 1,
) -> Iterator[Sandbox]:  # fmt: skip
    """Give a sandbox that is settled, and whose trail is removed with it unless `audit` names it."""
    with contextlib.ExitStack() as stack:
        log: AuditLog | bool = audit if isinstance(audit, AuditLog) else False
        if audit and not log:
            directory = stack.enter_context(scratch_directory())
            path = audit if isinstance(audit, Path) else Path(directory, "audit.jsonl")
            log = stack.enter_context(AuditLog(path=path, max_entries=1000))
        ready = PoolSettings() if pool is None else pool
        made = stack.enter_context(
            Sandbox(
                policy=settings.policy,
                pool=ready,
                audit=log,
                sessions=sessions,
                tools=tools or None,  # even without a tool a broker is 120 pages a cell
                host=HostSettings(pauses=pauses),
                workers=workers,
            )
        )
        made.settle()
        yield made
