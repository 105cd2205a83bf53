"""Every system call that sets up a launcher and a cell, made to fail once: `scripts/inject-faults`.

Each case ends in one of two ways: in an exception of ours, and nothing ran; or in the right result,
from a cell that differs in nothing from one in which no call failed.  And nothing is left of it.
"""

import argparse
import contextlib
import datetime
import errno
import faulthandler
import gc
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cellwright import CellwrightError, Sandbox
from cellwright.policies.errors import LauncherLost
from cellwright.policies.policy import Policy
from cellwright.policies.profiles.loading import load_policy
from tests.conftest import OPTIONAL, soon
from tests.faults.injection import ROLES, Call, injecting, numbers
from tests.faults.posture import PROGRAM, living_in, posture
from tests.runner.test_leftovers import held, nothing_more_than

README = Path(__file__).with_name("README.md")
_PLACE = re.compile(r"(?<=<!-- injected -->\n).*(?=<!-- end of injected -->)", re.DOTALL)
_WHOLE, _WRONG, _UNCALLED = "a whole cell", "WRONG", "not called this time"
# Calls that cannot fail (their pages say so), that end a process, and that say nothing about set-up.
_CANNOT_FAIL = {
    "exit", "exit_group", "rt_sigreturn", "pause", "getpid", "gettid", "getuid", "geteuid", "getgid", "getegid", "getppid",
    "umask", "set_robust_list", "restart_syscall",
}  # fmt: skip
_OPENS = (errno.EMFILE, errno.EACCES, errno.ENOMEM)
_WRITES = (errno.ENOSPC, errno.EIO, errno.EPERM)
_ERRNOS: dict[str, tuple[int, ...]] = {
    "openat": _OPENS, "open_tree": _OPENS, "socket": _OPENS, "socketpair": _OPENS, "pidfd_open": _OPENS, "dup2": (errno.EBUSY, errno.EMFILE),
    "dup3": (errno.EBUSY, errno.EMFILE), "fsopen": (errno.EMFILE, errno.EPERM, errno.ENODEV), "close": (errno.EIO, errno.EINTR),
    "write": _WRITES, "mkdir": _WRITES, "symlink": _WRITES, "read": (errno.EIO,), "clone": (errno.EAGAIN, errno.ENOMEM, errno.EPERM),
    "clone3": (errno.EAGAIN, errno.ENOMEM, errno.EPERM, errno.ENOSYS), "sendmsg": (errno.ETOOMANYREFS, errno.ENOMEM, errno.EPIPE),
    "sendto": (errno.ENOMEM, errno.EPIPE), "recvmsg": (errno.ENOMEM, errno.ECONNRESET), "recvfrom": (errno.ENOMEM, errno.ECONNRESET),
    "poll": (errno.ENOMEM, errno.EINTR), "wait4": (errno.ECHILD,), "fsconfig": (errno.EINVAL, errno.EPERM, errno.ENOMEM),
    "newfstatat": (errno.EACCES, errno.EIO), "lseek": (errno.ESPIPE,), "ioctl": (errno.ENOTTY, errno.EPERM), "getrandom": (errno.ENOSYS,),
}  # fmt: skip
_OTHERS = (errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENOMEM)
_HANGS_SECONDS = 180  # more than the supervisor waits for the end of a cell on a busy machine
_SLOW_SECONDS = 10
_OFTEN = 8


class Fault(NamedTuple):
    call: Call
    errno: int

    def __str__(self) -> str:
        role, name, before = self.call
        return f"{role}: {name} no. {before + 1}, {errno.errorcode[self.errno]}"


class Outcome(NamedTuple):
    """What came of a fault: the exception's words, or "" and what the cell was like."""

    error: str
    posture: dict[str, Any]
    value: Any


def policy() -> Policy:
    optional = tuple({*OPTIONAL, "listener"})
    return msgspec.structs.replace(load_policy("strict"), optional_layers=optional)


def recorded() -> list[Call]:
    """Return the calls from a launcher's first to a cell's last, in order."""
    calls: list[Call] = []
    entered: list[Call] = []

    def answer(call: Call, _: int) -> int:
        if call.role != "guest" or len(entered) < 2:
            calls.append(call)
        if (call.role, call.name) == ("guest", ("sendmsg", "recvfrom")[len(entered) % 2]):
            entered.append(
                call
            )  # it is ready, then waits: from here on the calls are the program's
        return 0

    with injecting([name for name in numbers() if name not in _CANNOT_FAIL], answer):
        run_once()
    return calls


def faults(calls: list[Call]) -> list[Fault]:
    """Return each call with every errno; of what is called very often, each with the next errno."""
    often = Counter((call.role, call.name) for call in calls)
    found = []
    for call in calls:
        every = _ERRNOS.get(call.name, _OTHERS)
        if often[call.role, call.name] > _OFTEN:
            every = every[call.before % len(every) :][:1]
        found += [Fault(call, number) for number in every]
    return found


def run_once() -> Outcome:
    """Make a sandbox, run the program that waits, and look at its cell meanwhile."""
    try:
        with Sandbox(policy=policy(), pool=0) as box:
            run = box.start(PROGRAM)
            output = run.output()
            seen = {}
            with contextlib.suppress(OSError, LauncherLost):
                if next(output, None):  # it may end while we look: then its result says why
                    seen = posture(living_in(box))
            if seen:
                os.kill(living_in(box).guest, signal.SIGUSR1)
            return Outcome("", seen, run.result().value)
    except CellwrightError as error:
        return Outcome(f"{type(error).__name__}: {error.what}", {}, None)


def run_with(fault: Fault) -> tuple[Outcome, bool]:
    """Return what came of it, and whether the call was made at all."""
    met: list[Call] = []

    def answer(call: Call, _: int) -> int:
        if call == fault.call:
            met.append(call)
            return fault.errno
        return 0

    with injecting([fault.call.name], answer):
        return run_once(), bool(met)


def verdict(outcome: Outcome, sound: Outcome) -> str:
    """Say what came of a fault in one line; it begins with `WRONG` if it may not be."""
    if outcome.error:
        return outcome.error
    if outcome.value != sound.value:
        return f"WRONG: the result is {outcome.value!r}"
    different = [name for name in sound.posture if outcome.posture.get(name) != sound.posture[name]]
    return f"WRONG: other than it should be: {different}" if different else _WHOLE


def what_comes_of(fault: Fault, sound: Outcome) -> str:
    """Say what came of a fault; `WRONG: ...` if it may not be, or something is left of it.

    What a nursery does for the cell after this one it may do too late to be met.
    """
    before = held()
    outcome, met = run_with(fault)
    what = verdict(outcome, sound) if met else _UNCALLED
    gc.collect()
    left = not soon(lambda: nothing_more_than(before))
    return f"WRONG: it leaves something: {what}" if left else what


def sound_outcome() -> Outcome:
    """Return what comes of no fault, under the same filter."""
    with injecting(["restart_syscall"], lambda call, pid: 0):
        return run_once()


# the command


def _inject(chosen: list[Fault], sound: Outcome, keep: Path | None) -> dict[Fault, str]:
    came = {}
    for number, fault in enumerate(chosen):
        faulthandler.dump_traceback_later(_HANGS_SECONDS, exit=True)
        began = time.monotonic()
        came[fault] = what = what_comes_of(fault, sound)
        seconds = time.monotonic() - began
        if keep:
            with keep.open("ab") as file:
                file.write(msgspec.json.encode((fault, what)) + b"\n")
        if what.startswith(_WRONG) or seconds > _SLOW_SECONDS or number % 100 == 0:
            line = what.partition("\n")[0]
            print(f"{number}: {fault}: {line} ({seconds:.1f} s)", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return came


def _kept(files: list[Path]) -> dict[Fault, str]:
    lines = [line for file in files for line in file.read_bytes().splitlines()]
    return dict(msgspec.json.decode(line, type=tuple[Fault, str]) for line in lines)


def _kind(what: str) -> str:
    return (
        what if what in (_WHOLE, _UNCALLED) or what.startswith(_WRONG) else what.partition(":")[0]
    )


def _table(came: dict[Fault, str]) -> str:
    """Return a line for each role and call: how often it is called, with what it failed, what came."""
    rows: dict[tuple[str, str], list[Fault]] = {}
    for fault in came:
        rows.setdefault((fault.call.role, fault.call.name), []).append(fault)
    lines = ["| who | call | times | fails with | what came of it |", "|---|---|--:|---|---|"]
    for (role, name), found in sorted(rows.items(), key=_by_role):
        times = len({fault.call.before for fault in found})
        names = ", ".join(dict.fromkeys(errno.errorcode[fault.errno] for fault in found))
        kinds = Counter(_kind(came[fault]) for fault in found)
        what = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        lines.append(f"| {role} | `{name}` | {times} | {names} | {what} |")
    return "\n".join(lines)


def _by_role(row: tuple[tuple[str, str], list[Fault]]) -> tuple[int, str]:
    (role, name), _ = row
    return ROLES.index(role), name


def _record(came: dict[Fault, str]) -> None:
    release, machine = os.uname().release, os.uname().machine
    kinds = Counter(_kind(what) for what in came.values())
    total = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    head = f"Linux {release}, {machine}, {datetime.date.today()}: {len(came)} faults; {total}."
    text = _PLACE.sub(lambda _: f"\n{head}\n\n{_table(came)}\n\n", README.read_text())
    README.write_text(text)


def main() -> int:
    options = argparse.ArgumentParser(prog="scripts/inject-faults", description=__doc__)
    options.add_argument("names", nargs="*", help="only these calls")
    options.add_argument(
        "--part", default="1/1", help="as 1/2: every second of them, from the first"
    )
    options.add_argument("--keep", type=Path, help="a file to add to what came of each, as JSON")
    options.add_argument(
        "--record", type=Path, nargs="+", help="only write the table in README.md, from such files"
    )
    given = options.parse_args()
    if given.record:
        _record(_kept(given.record))
        return 0
    part, parts = map(int, given.part.split("/"))
    chosen = faults(recorded())[part - 1 :: parts]
    chosen = [fault for fault in chosen if not given.names or fault.call.name in given.names]
    sound = sound_outcome()
    assert sound.posture, sound.error
    print(f"{len(chosen)} faults", flush=True)
    came = _inject(chosen, sound, given.keep)
    wrong = sum(what.startswith(_WRONG) for what in came.values())
    print(f"{len(came)} faults, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
