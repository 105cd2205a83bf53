"""Frames that are nearly right: one field, one byte or one packet changed.  The same cases each time."""

import contextlib
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from cellwright import PolicyError
from cellwright.harness.sandbox.remote import frames
from cellwright.harness.sandbox.remote.call_frames import given_of, weight_of
from cellwright.harness.sandbox.remote.frames import VERSION, ClientRequest, Hello, Reply
from cellwright.runner import channel
from cellwright.runner.messages import decode, encode
from tests.conftest import soon
from tests.faults.frames import changed, mutated, places
from tests.harness.servers.daemon.daemons import Daemon, RawClient, program, serving

SEED = 20_261_121
VALID: tuple[msgspec.Struct, ...] = (
    Hello(VERSION), frames.Cancel(), frames.Describe(), frames.Validate(b"import os"), frames.AwaitSettled(),
    frames.OpenSession("fuzz"), frames.CheckSession("k"), frames.ListSessionFiles("k"),
    frames.Download("k", "p"), frames.TakeSnapshot("k"), frames.ForkSession("k"), frames.BranchSession("k", 2, True, False), frames.PauseSession("k"),
    frames.ResumeSession("t"), frames.DiscardPaused("t"), frames.CloseSession("k"),
    frames.ExtendSession("k", 1.0), frames.ExposePort("k", 8000), frames.ExposePort("k", 8000, None, 0), frames.ClosePort("k"),
    frames.OpenTerminal("k", ("sh",), "/tmp", {"A": "b"}), frames.OpenSession("fuzz", packages=("six",)),
    program("1"), program("print(x)", stream=True, stdin="a", inputs={"x": 1}, files={"f": b"x"}, env={"A": "b"}, timeout=0.2, trace_id="t", collect=["*"]),
)  # fmt: skip


def test_a_frame_that_is_nearly_right_is_one_or_is_refused() -> None:
    dice, refused = random.Random(SEED), 0
    for _ in range(20_000):
        try:
            request = decode(mutated(dice, VALID), ClientRequest)
        except msgspec.DecodeError:
            refused += 1
            continue
        if isinstance(request, frames.Execute):
            assert weight_of(request) >= 0
            with contextlib.suppress(PolicyError):
                given_of(request)
    assert 10_000 < refused < 20_000


def test_the_mutations_reach_every_field() -> None:
    tree = msgspec.msgpack.decode(encode(VALID[-1]))
    assert len(places(tree)) > 15
    assert changed(tree, (4, 1), b"x")[4][1] == b"x"


@pytest.mark.slow
@pytest.mark.needs("userns")
def test_a_daemon_survives_six_thousand_of_them_and_grows_by_nothing(tmp_path: Path) -> None:
    with serving(tmp_path / "s", sessions=2) as daemon:
        assert daemon.is_well()
        fuzz(daemon, random.Random(1), 300)  # makes the objects that are made only once
        settle(daemon)
        before = kinds(daemon)
        descriptors, memory = daemon.descriptors(), daemon.resident_mib()
        fuzz(daemon, random.Random(SEED), 6000)
        assert daemon.is_well()
        settle(daemon)
        assert soon(lambda: daemon.descriptors() <= descriptors), kinds(daemon) - before
        assert daemon.resident_mib() < memory + 40
        assert daemon.end() == 0
    assert b"Traceback" not in daemon.said, daemon.said.decode()


def kinds(daemon: Daemon) -> Counter[str]:
    """Return what is open in the daemon, but what is closed while we look."""
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[str(link.readlink()).partition(":")[0]] += 1
    return found


def settle(daemon: Daemon) -> None:
    """End what sessions there are, by taking their places."""
    with daemon.sandbox() as sandbox:
        for session in [sandbox.session() for _ in range(2)]:
            session.close()
        sandbox.settle()


def fuzz(daemon: Daemon, dice: random.Random, cases: int) -> None:
    client = RawClient(daemon.path)
    for _ in range(cases):
        if dice.random() < 0.05:
            client.close()
            client = RawClient(daemon.path, greets=dice.random() < 0.5)
        if not goes_on(client, mutated(dice, VALID), dice.randrange(12)):
            client.close()
            client = RawClient(daemon.path)
    client.close()


def goes_on(client: RawClient, frame: bytes, how: int) -> bool:
    """Say a frame and hear the reply; False once the connection has come to its end."""
    packets = channel.packets(frame)
    if how == 1 and len(frame) > 2:  # in two packets
        packets = [channel._MORE + frame[:2], channel.LAST + frame[2:]]
    elif how == 2:  # never whole
        packets = [channel._MORE + frame[:1], channel._MORE]
    elif how == 3:
        packets = [bytes([dice % 256]) + frame[:100] for dice in (len(frame) + 2,)]
    try:
        for packet in packets:
            client.socket.send(packet)
        if frame == encode(frames.Cancel()) and how not in (2, 3):
            return True  # the only one that has no reply
        return heard(client)
    except ConnectionError:
        return False


def heard(client: RawClient) -> bool:
    receiver = channel.Receiver(client.socket, 1 << 24)
    while frame := receiver.receive_whole():
        reply = decode(frame, Reply)  # whatever it is, it makes sense
        if not isinstance(reply, frames.OutputChunk):
            assert not isinstance(reply, frames.Failure) or reply.kind != "InternalError", reply
            return True
    return False
