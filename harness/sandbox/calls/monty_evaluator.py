"""`MontyEvaluator`: answers pure expressions by Monty, an interpreter of its own, without a cell.

Monty (extra `monty`) runs in worker processes of this user, with an empty environment, and outside
every layer of a cell: its interpreter alone confines the expression.  So only a policy with
`evaluator.monty = true` uses it.  It has little time and memory; whatever it does not answer at once,
also every error, is executed in a cell.
"""

import contextlib
import os
import shlex
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from ....policies.errors import PolicyError
from ....policies.extras import how_to_install
from ....policies.policy import MIB, Policy
from ....policies.source.pure import is_plain_value, is_pure
from ....runner.requests.request import Request
from ....runner.requests.result import Phases, SandboxResult, SandboxStatus, Usage

if TYPE_CHECKING:
    from pydantic_monty import Monty

NAME = "monty"
_FEED_SECONDS, _MEMORY_BYTES = 0.05, 32 * MIB
_WORKER_SECONDS = 1.0  # after so long a silent worker is killed
_WORKERS, _CALLS_PER_WORKER = 4, 1000
_WAIT_SECONDS = 0.01  # longest wait for a worker, because a cell is quicker


class MontyEvaluator:
    """Evaluates pure expressions under one policy.  Safe from many threads.

    Raises PolicyError if Monty is not installed.
    """

    def __init__(self, policy: Policy) -> None:
        try:
            import pydantic_monty
        except ImportError:
            raise PolicyError(
                "evaluator.monty: Monty is not installed", how_to_install("monty")
            ) from None
        self._made = pydantic_monty.Monty
        self._errors = (pydantic_monty.MontyError, TimeoutError, OSError, RuntimeError, ValueError)
        limits = policy.limits
        self._is_worthwhile = min(limits.wall_seconds, limits.cpu_seconds) > 2 * _FEED_SECONDS
        self._most_bytes = limits.value_bytes
        self._limits: Any = {
            "max_feed_duration_secs": _FEED_SECONDS,
            "max_memory": min(_MEMORY_BYTES, limits.memory_bytes),
            "max_recursion_depth": 100,
            "max_suspensions": 1,
        }
        self._lock = threading.Lock()
        self._starter = _silent(_program())
        self._pool: Monty | None = None
        self._is_closed = False

    def evaluate(self, request: Request) -> SandboxResult | None:
        """Return the result of a pure expression; None if a cell has to execute the program."""
        if request.files or request.collect or not self._is_worthwhile:
            return None
        began = time.monotonic()
        inputs = msgspec.json.decode(request.inputs) if request.inputs else {}
        if not is_pure(request.code, inputs):
            return None
        try:
            with self._workers().checkout(limits=self._limits) as session:
                value = session.feed_run(request.code, inputs=inputs)
        except self._errors:
            return None  # no effects: a cell evaluates it again and reports the error
        if not is_plain_value(value) or len(msgspec.json.encode(value)) > self._most_bytes:
            return None
        took = time.monotonic() - began
        return SandboxResult(
            status=SandboxStatus.COMPLETED, reason="exit", value=value, exit_code=0, evaluator=NAME,
            execution_time=took, usage=Usage(wall_seconds=took), phases=Phases(run=took),
            execution_id=request.execution_id, trace_id=request.trace_id,
        )  # fmt: skip

    def close(self) -> None:
        """End the workers."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            with contextlib.suppress(*self._errors):
                pool.__exit__(None, None, None)
        os.close(self._starter)

    def _workers(self) -> "Monty":
        with self._lock:
            if self._is_closed:
                raise RuntimeError("closed")
            if self._pool is None:
                pool = self._made(
                    binary_path=f"/proc/{os.getpid()}/fd/{self._starter}",
                    min_processes=1, max_processes=_WORKERS, checkout_timeout=_WAIT_SECONDS,
                    request_timeout=_WORKER_SECONDS, max_checkouts_per_worker=_CALLS_PER_WORKER,
                )  # fmt: skip
                self._pool = pool.__enter__()
            return self._pool


def _program() -> str:
    from pydantic_monty._binary import find_monty_binary

    return find_monty_binary()


def _silent(program: str) -> int:
    """Return a descriptor of a script that starts a worker without standard error. Otherwise the
    worker would report each expression that needs too much memory on the standard error of this
    process."""
    script = os.memfd_create("cellwright-monty", os.MFD_CLOEXEC)
    os.write(script, f'#!/bin/sh\nexec env -i {shlex.quote(program)} "$@" 2>/dev/null\n'.encode())
    return script
