"""Frames that are nearly right: one field, one byte or one packet changed.  The same cases each time."""

import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cellwright import PolicyError
from cellwright.harness.daemon import frames
from cellwright.harness.daemon.arguments import code_of, given_of, weight_of
from cellwright.harness.daemon.frames import VERSION, Hello, Reply, Request
from cellwright.runner import channel
from cellwright.runner.messages import decode, encode
from tests.conftest import soon
from tests.harness.daemon.daemons import Daemon, RawClient, program, serving

SEED = 20_261_121
VALID: tuple[msgspec.Struct, ...] = (
    Hello(VERSION), frames.Cancel(), frames.Describe(), frames.Validate(b"import os"), frames.Settle(),
    frames.Open("fuzz", frames.SessionGiven()), frames.Look("k"), frames.ListFiles("k"),
    frames.Download("k", "p"), frames.Snapshot("k"), frames.Fork("k"), frames.Close("k"),
    program("1"), program("print(x)", stream=True, stdin="a", inputs={"x": 1}, files={"f": b"x"}, env={"A": "b"}, timeout=0.2, trace_id="t", collect=["*"]),
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, -(2**63), 1.5, float("nan"), float("inf"), "", "x", "\0", "../../etc/shadow", "x" * 5000, b"",
    b"\xff" * 100, b"\xed\xa0\x80", b"[" * 10_000, b'{"x": NaN}', b'{"x":' * 2000, [], [[]] * 50, {}, {"a": {}}, {"": ""},
    {1: 2}, ["Hello", 1], ["Cancel"], ["InputFile", "f", b""], [["InputFile", "/etc/x", b""]], [["InputFile", "a", b""], ["InputFile", "a/b", b""]],
    ["Given", b"", b"{}", [], {}, 0.1, "", []], msgspec.msgpack.Ext(5, b"x"),
)  # fmt: skip
RAW = (
    b"\xdd\xff\xff\xff\xff", b"\x9f" + b"\xc1" * 15, b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\x92\xa5Hello" + b"\xdd\x7f\xff\xff\xff", b"\xc1", b"\x81" * 3000,
)  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every value in a frame, that of the frame first."""
    found = [path]
    if isinstance(tree, list):
        for number, each in enumerate(tree):
            found += places(each, (*path, number))
    elif isinstance(tree, dict):
        for key, each in tree.items():
            found += places(each, (*path, key))
    return found


def value_at(tree: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def changed(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = list(tree) if isinstance(tree, list) else dict(tree)
    copy[path[0]] = changed(tree[path[0]], path[1:], value)
    return copy


def mutated(dice: random.Random) -> bytes:
    """Return a frame in which one thing is not as it was."""
    frame = encode(dice.choice(VALID))
    kind = dice.randrange(10)
    if kind < 4:
        tree = msgspec.msgpack.decode(frame)
        return msgspec.msgpack.encode(changed(tree, dice.choice(places(tree)), dice.choice(ODD)))
    if kind > 7:  # the type is right: further in
        tree = msgspec.msgpack.decode(frame)
        path = dice.choice(places(tree)[2:] or [(0,)])
        alike = [each for each in ODD if type(each) is type(value_at(tree, path))]
        return msgspec.msgpack.encode(changed(tree, path, dice.choice(alike or ODD)))
    if kind == 4:
        tree = msgspec.msgpack.decode(frame)
        return msgspec.msgpack.encode([*tree, dice.choice(ODD)])
    if kind == 5:
        return dice.choice(RAW)
    if kind == 6:
        return frame[: dice.randrange(len(frame))] or b"\0"
    at = dice.randrange(len(frame))
    return frame[:at] + bytes([dice.randrange(256)]) + frame[at + 1 :]


def test_a_frame_that_is_nearly_right_is_one_or_is_refused() -> None:
    dice, refused = random.Random(SEED), 0
    for _ in range(20_000):
        try:
            request = decode(mutated(dice), Request)
        except msgspec.DecodeError:
            refused += 1
            continue
        if isinstance(request, frames.Execute):
            assert weight_of(request) >= 0
            with contextlib.suppress(PolicyError):
                code_of(request)
                given_of(request.given)
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
        fuzz(daemon, random.Random(1), 300)  # what is made once is made now
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
        if not goes_on(client, mutated(dice), dice.randrange(12)):
            client.close()
            client = RawClient(daemon.path)
    client.close()


def goes_on(client: RawClient, frame: bytes, how: int) -> bool:
    """Say a frame and hear the reply; False once the connection has come to its end."""
    packets = channel.packets(frame)
    if how == 1 and len(frame) > 2:  # in two packets
        packets = [channel._MORE + frame[:2], channel._LAST + frame[2:]]
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
        if not isinstance(reply, frames.Output):
            assert not isinstance(reply, frames.Failure) or reply.kind != "InternalError", reply
            return True
    return False
