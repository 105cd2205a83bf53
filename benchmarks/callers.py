"""Probes: calls of many kinds and languages; each prints a nonce, which shows whose result it is."""

import contextlib
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..harness.sandbox.sandbox import Sandbox
from ..policies.errors import ClosedError
from ..policies.languages import interpreter_of
from ..runner.requests.result import SandboxResult


class Kind(NamedTuple):
    """How a program ends after it has printed its nonce; `share` is the percentage of such programs."""

    name: str
    share: int  # percent
    reasons: tuple[str, ...]  # the reasons that its result may have; empty: there is no result
    given: Mapping[str, Any] = MappingProxyType({})


WELL = Kind("ends well", 71, ("exit",))
OF_A_DAEMON = Kind("ends well, in a daemon's cell", 7, ("exit",))
HANGS_UP = Kind("its client hangs up", 2, ())
KINDS = (
    Kind("runs too long", 10, ("wall_time",), {"timeout": 2.0}),
    Kind("needs too much memory", 5, ("memory", "exception")),
    Kind("crashes", 5, ("signal",)),
    HANGS_UP,
    OF_A_DAEMON,
    WELL,
)
# Language -> how it says a nonce, and how it ends in each way.  A shell under a strict policy has no
# other way to wait than to stop itself.
_SAYING = {
    "python": "print({!r}, flush=True)\n",
    "bash": "echo {}\n",
    "sh": "echo {}\n",
    "javascript": "console.log({!r});\n",
    "ruby": "puts {!r}; STDOUT.flush\n",
}
_OF_A_SHELL = {
    "ends well": ":",
    "runs too long": "kill -STOP $$",
    "needs too much memory": f"x=xxxxxxxx; while :; do x={'$x' * 16}; done",
    "crashes": "kill -ABRT $$",
}
_ENDING = {
    "python": {
        "ends well": "1 + 1",
        "runs too long": "import time; time.sleep(60)",
        "needs too much memory": "x = b'x' * (1 << 30)",
        "crashes": "import os; os.abort()",
    },
    "bash": _OF_A_SHELL,
    "sh": _OF_A_SHELL,
    "javascript": {
        "ends well": "1 + 1",
        "runs too long": "setTimeout(() => {}, 60000)",
        "needs too much memory": "const a = []; for (;;) a.push(new Uint8Array(1 << 24).fill(1))",
        "crashes": "process.abort()",
    },
    "ruby": {
        "ends well": "1 + 1",
        "runs too long": "sleep 60",
        "needs too much memory": "x = 'x' * (1 << 30)",
        "crashes": "Process.kill(:KILL, Process.pid)",
    },
}
_SHARES = {"python": 78, "bash": 8, "sh": 8, "javascript": 3, "ruby": 3}


class Probe(NamedTuple):
    """A call that will be made."""

    kind: Kind
    language: str = "python"

    def program(self, nonce: str) -> str:
        ending = _ENDING[self.language].get(self.kind.name)
        if ending is None:  # only a daemon's clients have no ending
            ending = _ENDING[self.language][WELL.name if self.kind is OF_A_DAEMON else SLEEPS]
        return _SAYING[self.language].format(nonce) + ending


SLEEPS = "runs too long"


def languages() -> dict[str, int]:
    """Return the languages whose interpreter this host has, with their shares."""
    return {
        name: share
        for name, share in _SHARES.items()
        if name == "python" or shutil.which(interpreter_of(name))
    }


def drawn(count: int, chance: random.Random) -> list[Probe]:
    """Return `count` random probes, of kinds and languages by their shares."""
    kinds = chance.choices(KINDS, [kind.share for kind in KINDS], k=count)
    here = languages()
    spoken = chance.choices(list(here), list(here.values()), k=count)
    return [Probe(kind, language) for kind, language in zip(kinds, spoken, strict=True)]


def of_each() -> list[Probe]:
    """Return one probe of every kind in every language."""
    return [Probe(kind, language) for language in languages() for kind in KINDS]


class ProbeResult(NamedTuple):
    """The nonce of a probe, its output, and its result; without a result `did` says what happened."""

    nonce: str
    heard: str
    result: SandboxResult | None
    did: str = "hung up"


class Prober:
    """Makes probes in local cells, and in those of the daemon that listens at `daemon`."""

    def __init__(self, own: Sandbox, daemon: Path) -> None:
        self._own = own
        self._daemon = daemon

    def make(self, call: Probe) -> ProbeResult:
        """Make one probe; raises what `Sandbox.execute` raises."""
        nonce = os.urandom(8).hex()
        code = call.program(nonce)
        if call.kind is HANGS_UP:
            return self._hang_up(call, code, nonce)
        with self._sandbox_for(call) as sandbox:
            result = sandbox.execute(code, call.language, **call.kind.given)
        return ProbeResult(nonce, result.stdout.strip(), result)

    @contextlib.contextmanager
    def _sandbox_for(self, call: Probe) -> Iterator[Sandbox]:
        if call.kind is not OF_A_DAEMON:
            yield self._own
            return
        with Sandbox(connect=self._daemon) as client:
            yield client

    def _hang_up(self, call: Probe, code: str, nonce: str) -> ProbeResult:
        """Disconnect as soon as the program has printed something."""
        with Sandbox(connect=self._daemon) as client:
            run = client.start(code, call.language)
            heard = next(run.output(), ("", b""))[1].strip().decode(errors="replace")
        with contextlib.suppress(ClosedError):
            return ProbeResult(nonce, heard, run.result())
        return ProbeResult(nonce, heard, None)


def complaint_about(call: Probe, answer: ProbeResult) -> str:
    """Return the error in an answer; empty if it is as expected.

    A program that runs out of time may have printed nothing yet: an interpreter starts slowly beside
    64 others.
    """
    reason = answer.result.reason if answer.result else None
    heard = answer.heard == answer.nonce or (reason == "wall_time" and not answer.heard)
    if heard and reason in (call.kind.reasons or (None,)):
        return ""
    wanted = f"wanted {answer.nonce} and {call.kind.reasons}"
    got = said(answer.result) if answer.result else f"heard {answer.heard[:40]!r}"
    return f"{call.kind.name}, {call.language}: {wanted}, {got}"


def said(result: SandboxResult) -> str:
    """Describe a result, for a complaint about it."""
    return f"got {result.stdout.strip()[:40]!r}, {result.reason}, {result.error}"
