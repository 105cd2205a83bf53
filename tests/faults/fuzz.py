"""Hostile bytes for everyone who decodes them, from a seed: `scripts/fuzz`.

Each party is one of those that read what another wrote: the supervisor what guests and what launchers
say, the daemon what clients and clients what the daemon says, each reader a value, a trail or an
archive.  A case is a short conversation: frames that are nearly right, repeated, out of order, in odd
packets, with descriptors beside them.  It ends in what was meant, or in the one exception that the party
promises.  Afterwards nothing may be open that was not before, and memory may not have grown.
"""

import argparse
import array
import contextlib
import faulthandler
import gc
import os
import random
import resource
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from cellwright import PolicyError, Sandbox, WorkspaceError
from cellwright.harness.sandbox.remote import frames
from cellwright.harness.sandbox.remote.call_frames import error_of, given_of, result_of, weight_of
from cellwright.harness.sandbox.workspaces.archive import pack, unpack
from cellwright.policies.errors import InternalError, LaunchError
from cellwright.policies.policy import Limits
from cellwright.runner import channel
from cellwright.runner.audit.record import GENESIS, AuditEntry, line_of, parse
from cellwright.runner.messages import (
    Answer,
    Booted,
    Call,
    Ended,
    Failed,
    Finished,
    InputFile,
    Ready,
    RunProgram,
    SharedFilesMade,
    Start,
    decode,
    decode_json,
    encode,
)  # fmt: skip
from cellwright.runner.requests.result import SandboxResult, SandboxStatus
from cellwright.runner.settings import AuditLevel
from cellwright.runner.watching.guest_channel import GuestChannel
from tests.faults.frames import mutated
from tests.harness.servers.daemon.daemons import serving
from tests.harness.servers.daemon.test_fuzz import VALID as OF_CLIENTS
from tests.harness.servers.daemon.test_fuzz import fuzz as fuzz_daemon
from tests.runner.test_supervision import FakeCell, held_cell_of

_FINISHED = Finished(b"1", None, None, None, ends_well=True)
OF_GUESTS = (
    _FINISHED, Finished(None, "r", "e", "t", pictures=(("image/png", b"x"),), exit_code=3),
    Call(1, "weather.get", b'{"city": "Paris"}', "<cell>:1"), Call(2**60, "x" * 300, b"[" * 300),
)  # fmt: skip
OF_LAUNCHERS = (
    Booted(), SharedFilesMade(), Ready(True), Failed(1, "m"), Ended(256, 1.0, 0.5, 7),
)  # fmt: skip
FOR_GUESTS = (
    RunProgram("c", b"{}", (InputFile("p", b"d"),), {"A": "b"}, 9, tools={"t": ("a",)}), Start(()), Answer(1, b"1"),
)  # fmt: skip
OF_DAEMONS = (
    frames.Welcome(1, 2, 3), frames.OutputChunk("stdout", b"x"), frames.Executed(SandboxResult(status=SandboxStatus.COMPLETED, reason="exited"), b"[1]"),
    frames.Validated(False, "f"), frames.Opened("k", "i", (1,)), frames.LostReason("t"), frames.OpenedBranches((frames.Opened("k", "i"),)), frames.Paused("t"), frames.Files(()), frames.Content(b"c"),
    frames.Done(), frames.Failure("Unenforceable", "m", "h", (("gaps", (("a", "b"),)),)), frames.Failure("LauncherLost", "m"),
)  # fmt: skip
JSON = (
    b'{"a": [1, 2.5, null, true, "t\\u00e9"], "b": {"c": []}}', b"[" * 60 + b"]" * 60, b'"' + b'\\"' * 200, b"1e400", b"-0",
    b'{"a":1,"a":2}', b'["' + b"[" * 100 + b'"]',
)  # fmt: skip
PIECES = (
    b"[", b"]", b"{", b"}", b'"', b"\\", b'\\"', b",", b":", b"\0", b"\xff", b"[" * 200, b'{"a":' * 200, b"\\ud800", b"9" * 400,
    b"NaN", b"\xef\xbb\xbf", b"\r\n",
)  # fmt: skip
_LIMITS = Limits(value_bytes=4096, artifact_bytes=4096)
_MOST_GROWTH = 32 << 20
_MOST_MEMORY = 1 << 30  # additional address space: no reader may ask for more
_HANGS_SECONDS = 120

Party = Callable[[random.Random], str]  # one case; returns what came of it, in a word


# parties


def hears_a_guest(dice: random.Random) -> str:
    """The supervisor, on a control channel: calls of tools, then one last word."""
    ours, theirs = channel.pair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        ours.setblocking(False)
        calls: list[Call] = []
        guest_channel = GuestChannel(ours, b"x", _LIMITS, takes_calls=dice.choice((False, True)))
        _say(dice, theirs, OF_GUESTS)
        try:
            while guest_channel.is_open and channel.has_news(ours.fileno()):
                calls += filter(None, [guest_channel.receive_some()])
        except channel.ProtocolError:
            return "breach"
        return "last word" if guest_channel.finished else "calls" if calls else "nothing"


def hears_a_launcher(dice: random.Random) -> str:
    """The supervisor, on a status channel: an invalid frame is an error of ours."""
    cell = FakeCell()
    held = held_cell_of(cell)
    held.origin.listen = lambda descriptor: None  # type: ignore[method-assign,assignment,return-value]
    try:
        _say(dice, cell._their_status, OF_LAUNCHERS)
        while channel.has_news(cell.status.fileno()):
            held.receive()
    except InternalError:
        return "internal"
    except LaunchError:
        return "failed"
    finally:
        cell.close()
    return "heard"


def hears_a_supervisor(dice: random.Random) -> str:
    """The guest's process, before its program."""
    with contextlib.suppress(msgspec.DecodeError):
        decode(mutated(dice, FOR_GUESTS), RunProgram | Start | Answer)
        return "heard"
    return "refused"


def hears_a_client(dice: random.Random) -> str:
    """The daemon."""
    try:
        request = decode(mutated(dice, OF_CLIENTS), frames.ClientRequest)
        if isinstance(request, frames.Execute):
            assert weight_of(request) >= 0
            given_of(request)
    except (msgspec.DecodeError, PolicyError):
        return "refused"
    return "heard"


def hears_a_daemon(dice: random.Random) -> str:
    """A client."""
    try:
        reply = decode(mutated(dice, OF_DAEMONS), frames.Reply)
        if isinstance(reply, frames.Executed):
            result_of(reply)
    except msgspec.DecodeError:
        return "refused"
    if isinstance(reply, frames.Failure):
        str(error_of(reply))
    return "heard"


def reads_a_value(dice: random.Random) -> str:
    """Whoever reads JSON in a guest's words."""
    with contextlib.suppress(msgspec.DecodeError):
        decode_json(_torn(dice, dice.choice(JSON)))
        return "heard"
    return "refused"


_ENTRY = AuditEntry(
    seq=1, time=1.0, monotonic=1.0, level=AuditLevel.INFO, category="test", action="a",
    details={"list": ["a", "b"], "number": 1},
)  # fmt: skip
_LINE = line_of(_ENTRY, GENESIS, None)[0]


def reads_a_trail(dice: random.Random) -> str:
    """Whoever reads one line of an audit trail."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        parse(_torn(dice, _LINE))
        return "heard"
    return "refused"


_ARCHIVE = pack({"a/b": b"x" * 700, "c": b""})


def reads_an_archive(dice: random.Random) -> str:
    """Whoever restores a session from an archive."""
    with contextlib.suppress(WorkspaceError, PolicyError):
        unpack(_torn(dice, _ARCHIVE))
        return "heard"
    return "refused"


PARTIES: dict[str, tuple[Party, int]] = {  # and how many cases of a hundred are its
    "supervisor, of guests": (hears_a_guest, 25),
    "supervisor, of launchers": (hears_a_launcher, 5),
    "guest's process": (hears_a_supervisor, 10),
    "daemon": (hears_a_client, 20),
    "client": (hears_a_daemon, 15),
    "values": (reads_a_value, 15),
    "trails": (reads_a_trail, 5),
    "archives": (reads_an_archive, 5),
}


def _torn(dice: random.Random, data: bytes) -> bytes:
    """Change up to three places of `data`."""
    torn = bytearray(data)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(torn) + 1)
        match dice.randrange(5):
            case 0:
                torn[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                del torn[at : at + dice.randint(1, 40)]
            case 2:
                torn[at:at] = dice.choice(PIECES)
            case 3:
                torn[at:at] = dice.choice(PIECES) * dice.randint(1, 50)
            case 4:
                torn += torn[at : at + 600]
    return bytes(torn)


def _say(dice: random.Random, sock: socket.socket, valid: tuple[msgspec.Struct, ...]) -> None:
    """Say up to four frames, whole or mutated, the last perhaps again, in packets that may be odd."""
    sock.setblocking(False)  # no reader drains it meanwhile
    said = [
        mutated(dice, valid) if dice.random() < 0.5 else encode(dice.choice(valid))
        for _ in range(dice.randint(1, 3))
    ]
    if dice.random() < 0.2:
        said.append(said[-1])
    with contextlib.suppress(OSError):  # there is no room for more, or the kernel passes no such
        for frame in said:
            for packet in _packets(dice, frame):
                _send(dice, sock, packet)


def _packets(dice: random.Random, frame: bytes) -> list[bytes]:
    match dice.randrange(40):
        case 0:
            return [channel._MORE + frame[:2], channel.LAST + frame[2:]]
        case 1:
            return [channel._MORE + frame[:1], channel._MORE]
        case 2:
            return [bytes([dice.randrange(256)]) + frame[:100]]
        case 3:
            return [channel._MORE + b"x" * 60_000]  # and no end
        case 4:
            return [channel.LAST + frame + bytes(channel.PACKET_BYTES)]
        case _:
            return channel.packets(frame)


def _send(dice: random.Random, sock: socket.socket, packet: bytes) -> None:
    """Send a packet, beside it the descriptors that belong there, none, or very many."""
    count = dice.choice((0, 0, 1, 1, 2, 2, 15, 17, 100, 253))
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sock.fileno()] * count))
    sock.sendmsg([packet], [rights] if count else [])


# oracles


class Held(NamedTuple):
    """What this process has at a moment."""

    descriptors: int
    resident_bytes: int


def held() -> Held:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(len(os.listdir("/proc/self/fd")), pages * resource.getpagesize())


def fuzz(seed: int, cases: int) -> dict[str, Counter[str]]:
    """Run `cases` from `seed` and return what came of them; raises AssertionError where anything is
    left, and whatever a party raises that it did not promise."""
    came: dict[str, Counter[str]] = {name: Counter() for name in PARTIES}
    order = [name for name, (_, share) in PARTIES.items() for _ in range(share)]
    warm = held()
    for number in range(cases):
        if number % 1000 == 0:
            faulthandler.dump_traceback_later(_HANGS_SECONDS, exit=True)
            assert held().descriptors == warm.descriptors, number
        if number == min(20_000, cases // 5):
            warm = held()  # objects that are made only once exist now
        name = order[number % len(order)]
        dice = random.Random(f"{seed}:{number}")
        try:
            came[name][PARTIES[name][0](dice)] += 1
        except BaseException:
            sys.stderr.write(f"case {number} of seed {seed}, {name}\n")
            raise
    faulthandler.cancel_dump_traceback_later()
    now = held()
    assert now.descriptors == warm.descriptors
    assert now.resident_bytes - warm.resident_bytes < _MOST_GROWTH, (warm, now)
    return came


# the command


def _living_cells(seed: int, cases: int) -> Counter[str]:
    """Have programs in cells say it to the supervisor."""
    came: Counter[str] = Counter()
    with Sandbox(pool=2) as box:
        for number in range(cases):
            dice = random.Random(f"{seed}:cell:{number}")
            code = "import os\nfor packet in packets: os.write(3, bytes.fromhex(packet))"
            packets = [piece.hex() for piece in _packets(dice, mutated(dice, OF_GUESTS))]
            result = box.execute(code, inputs={"packets": [each[:100_000] for each in packets]})
            came[f"{result.status.name.lower()} {result.reason}"] += 1
        assert box.execute("6 * 7").value == 42
    return came


def _living_daemon(seed: int, cases: int) -> str:
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as place,
        serving(Path(place) / "s", sessions=2) as daemon,
    ):
        fuzz_daemon(daemon, random.Random(seed), cases // 10)
        before = daemon.resident_mib()
        fuzz_daemon(daemon, random.Random(seed + 1), cases)
        assert daemon.is_well()
        return f"{daemon.resident_mib() - before:.1f} MiB more resident"


def main() -> None:
    options = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--cases", type=int, default=1_000_000)
    options.add_argument(
        "--living", type=int, default=1000, help="cases for cells, ten times as many for a daemon"
    )
    given = options.parse_args()
    began, before = time.monotonic(), held()
    if given.living:
        print("living cells:", dict(_living_cells(given.seed, given.living)))
        print("a living daemon:", _living_daemon(given.seed, given.living * 10))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MOST_MEMORY,) * 2)
    for name, came in fuzz(given.seed, given.cases).items():
        print(f"{name}: {dict(came)}")
    after = held()
    print(
        f"{given.cases} cases of seed {given.seed} in {time.monotonic() - began:.0f} s; {before} -> {after}"
    )


if __name__ == "__main__":
    main()
