"""Framing: any frame survives any split, and nothing oversized is ever put together."""

import array
import contextlib
import os
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellwright.runner import channel
from cellwright.runner.channel import PACKET_BYTES, ProtocolError, Receiver

LIMIT = 400_000


def sizes_at_the_edges() -> list[int]:
    whole = PACKET_BYTES - 1
    return [1, 2, whole - 1, whole, whole + 1, 2 * whole, 2 * whole + 1, LIMIT]


def send(ours: socket.socket, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a frame that is too long is not read to its end
        channel.send(ours, frame)


def exchange(frame: bytes, limit: int = LIMIT) -> bytes:
    ours, theirs = channel.pair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        sender = threading.Thread(target=send, args=(ours, frame))
        sender.start()
        got = Receiver(theirs, limit).receive_whole()
        sender.join(60)
    return got


@pytest.mark.parametrize("size", sizes_at_the_edges())
def test_a_frame_arrives_as_it_was_sent(size: int) -> None:
    frame = os.urandom(size)
    assert exchange(frame) == frame


@given(st.binary(min_size=1, max_size=200_000))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_frame_is_cut_into_packets_that_join_again(frame: bytes) -> None:
    packets = channel.packets(frame)
    assert all(len(packet) <= PACKET_BYTES for packet in packets)
    assert [packet[:1] for packet in packets] == [b"\x01"] * (len(packets) - 1) + [b"\x00"]
    assert b"".join(packet[1:] for packet in packets) == frame


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_frame_may_be_cut_anywhere(pieces: list[bytes]) -> None:
    ours, theirs = channel.pair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        for piece in pieces[:-1]:
            ours.send(b"\x01" + piece)
        ours.send(b"\x00" + pieces[-1])
        assert Receiver(theirs, LIMIT).receive_whole() == b"".join(pieces)


def test_frames_follow_each_other() -> None:
    ours, theirs = channel.pair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        receiver = Receiver(theirs, LIMIT)
        for frame in (b"one", b"two", b"x" * 100_000, b"four"):
            channel.send(ours, frame)
            assert receiver.receive_whole() == frame


def test_the_end_of_the_stream_is_an_empty_frame() -> None:
    ours, theirs = channel.pair()
    ours.close()
    with contextlib.closing(theirs):
        assert Receiver(theirs, LIMIT).receive_whole() == b""


def test_a_stream_that_ends_inside_a_frame_delivers_nothing_of_it() -> None:
    ours, theirs = channel.pair()
    ours.send(b"\x01half")
    ours.close()
    with contextlib.closing(theirs):
        assert Receiver(theirs, LIMIT).receive_whole() == b""


BAD = {
    "no mark": [b"\x02abc"],
    "text": [b"hello"],
    "an empty frame": [b"\x00"],
    "an empty frame in pieces": [b"\x01", b"\x00"],
    "one byte too many": [b"\x01" + bytes(60_000), b"\x00" + bytes(40_001)],
    "too many pieces": [b"\x01" + bytes(60_000)] * 2,
}


@pytest.mark.parametrize("packets", BAD.values(), ids=BAD)
def test_what_no_honest_peer_sends_is_refused(packets: list[bytes]) -> None:
    ours, theirs = channel.pair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        for packet in packets:
            ours.send(packet)
        with pytest.raises(ProtocolError):
            Receiver(theirs, 100_000).receive_whole()


def test_a_frame_of_exactly_the_limit_passes() -> None:
    frame = os.urandom(100_000)
    assert exchange(frame, limit=100_000) == frame
    with pytest.raises(ProtocolError, match="more than 99999 bytes"):
        exchange(frame[:65_000] + frame, limit=99_999)


def test_a_packet_longer_than_any_of_ours_is_refused() -> None:
    ours, theirs = channel.pair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        ours.send(b"\x00" + bytes(PACKET_BYTES))
        with pytest.raises(ProtocolError, match="too long"):
            Receiver(theirs, LIMIT).receive_whole()


def test_an_endless_row_of_empty_pieces_does_not_hold_a_whole_receiver_for_ever() -> None:
    """Pieces of no bytes never reach the limit of size: each must be refused or counted."""
    ours, theirs = channel.pair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        receiver = Receiver(theirs, LIMIT)
        ours.send(b"\x01")
        with pytest.raises(ProtocolError):
            receiver.receive()


def test_descriptors_cross_with_the_frame_and_close_on_exec() -> None:
    ours, theirs = channel.pair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        read, write = os.pipe()
        channel.send(ours, b"take these", (read, write))
        frame, received = channel.receive_with_descriptors(theirs)
        assert frame == b"take these"
        assert len(received) == 2
        assert not any(os.get_inheritable(descriptor) for descriptor in received)
        os.write(received[1], b"x")
        assert os.read(read, 1) == b"x"
        for descriptor in (read, write, *received):
            os.close(descriptor)


def test_a_receiver_of_plain_frames_keeps_no_descriptor() -> None:
    ours, theirs = channel.pair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        before = sorted(os.listdir("/proc/self/fd"))
        channel.send(ours, b"x", (0, 1, 2))
        assert Receiver(theirs, LIMIT).receive_whole() == b"x"
        assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("packet", "count"), [(b"\x01x", 2), (b"\x00" + bytes(PACKET_BYTES + 9), 2), (b"\x00x", 40)]
)
def test_descriptors_of_a_refused_frame_are_closed(packet: bytes, count: int) -> None:
    ours, theirs = channel.pair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        before = sorted(os.listdir("/proc/self/fd"))
        rights = array.array("i", [0] * count)
        ours.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        with pytest.raises(ProtocolError):
            channel.receive_with_descriptors(theirs)
        assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_closed_status_channel_reads_as_an_empty_frame() -> None:
    ours, theirs = channel.pair()
    ours.close()
    with contextlib.closing(theirs):
        assert channel.receive_with_descriptors(theirs) == (b"", [])
