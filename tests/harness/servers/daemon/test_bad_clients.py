"""Clients that stall, lie, flood and die: only their own connections end."""

import array
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cellwright import BusyError, Sandbox, SandboxStatus, SessionLost
from cellwright.harness.sandbox.remote import frames
from cellwright.harness.sandbox.remote.frames import (
    VERSION,
    Cancel,
    Executed,
    Failure,
    Hello,
    OutputChunk,
)
from cellwright.runner import channel
from cellwright.runner.messages import encode
from tests.conftest import soon
from tests.harness.servers.daemon.daemons import Daemon, RawClient, program, serving

pytestmark = pytest.mark.needs("userns")
ENDLESS = "while True: pass"
TALKING = "while True: print('x' * 1000)"
HALF = channel._MORE + b"half"


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with little patience, and room for one request of each process."""
    path = Path(tmp_path_factory.mktemp("tight"), "s")
    with serving(
        path, hello_seconds=0.3, frame_seconds=0.3, reader_seconds=0.3, running_per_client=1
    ) as daemon:
        yield daemon


@contextlib.contextmanager
def unchanged(daemon: Daemon) -> Iterator[None]:
    """Check that afterwards the daemon serves others, and has no more descriptors than before."""
    assert daemon.is_well()
    settled(daemon)
    before = daemon.descriptors()
    yield
    assert daemon.is_well()
    settled(daemon)
    assert soon(lambda: daemon.descriptors() <= before), daemon.descriptors() - before


def settled(daemon: Daemon) -> None:
    with daemon.sandbox() as sandbox:
        sandbox.settle()


def is_free(daemon: Daemon) -> bool:
    """Tell whether nothing of this process runs there, where one request may."""
    try:
        with daemon.sandbox() as sandbox:
            return sandbox.execute("1").ok
    except BusyError:
        return False


# FI-40: nothing, half a frame, a byte at a time


def test_a_client_that_says_nothing_is_hung_up_on(tight: Daemon) -> None:
    with unchanged(tight), RawClient(tight.path, greets=False) as client:
        (failure,) = client.hear_all()
        assert "took too long" in failure.message


@pytest.mark.parametrize("greets", [False, True], ids=["the first", "a later one"])
def test_a_client_that_says_half_a_frame_is_hung_up_on(tight: Daemon, greets: bool) -> None:
    with unchanged(tight), RawClient(tight.path, greets=greets) as client:
        client.socket.send(HALF)
        (failure,) = client.hear_all()
        assert "took too long" in failure.message


def test_bytes_that_trickle_win_no_time(tight: Daemon) -> None:
    with unchanged(tight), RawClient(tight.path) as client:
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 500 and not select.select([client.socket], [], [], 0.02)[0]:
                client.socket.send(channel._MORE + b"x")
                sent += 1
        assert 2 < sent < 500
        assert "took too long" in client.hear_all()[0].message


def test_a_frame_that_is_too_long_is_refused_before_it_is_whole(tmp_path: Path) -> None:
    with serving(tmp_path / "s", request_bytes=200_000) as daemon, unchanged(daemon):
        with daemon.sandbox() as sandbox:
            assert sandbox.execute("x" * 100_000 + "=1").ok
        with RawClient(daemon.path) as client:
            for _ in range(4):
                client.socket.send(channel._MORE + bytes(60_000))
            (failure,) = client.hear_all()
            assert "a frame of more than 200000 bytes" in failure.message


def test_a_client_holds_so_many_bytes_and_the_next_one_others(tmp_path: Path) -> None:
    with serving(tmp_path / "s", held_bytes_per_client=150_000) as daemon, unchanged(daemon):
        halves = [RawClient(daemon.path) for _ in range(4)]
        for client in halves:
            client.socket.send(channel._MORE + bytes(60_000))
        refused = [client for client in halves if select.select([client.socket], [], [], 1)[0]]
        assert len(refused) == 2
        assert "bytes of requests: at most 150000" in refused[0].hear().message
        assert daemon.is_well()  # another process
        for client in halves:
            client.close()


def test_what_decoding_makes_of_a_request_counts_too(tmp_path: Path) -> None:
    """A list takes two bytes of JSON and thirty times as much in memory."""
    with (
        serving(tmp_path / "s", held_bytes_per_client=8 << 20) as daemon,
        unchanged(daemon),
        daemon.sandbox() as sandbox,
    ):
        assert sandbox.execute("1", inputs={"x": [[]] * 10_000}).ok
        with pytest.raises(BusyError, match="bytes of requests"):
            sandbox.execute("1", inputs={"x": [[]] * 500_000})
        assert sandbox.execute("1").ok


# FI-41: ends at each stage


def half_closed(client: RawClient) -> None:
    client.socket.shutdown(socket.SHUT_WR)
    (reply,) = [reply for reply in client.hear_all() if not isinstance(reply, OutputChunk)]
    assert reply.result.status is SandboxStatus.CANCELLED


def deaf(client: RawClient) -> None:
    client.socket.shutdown(socket.SHUT_RD)


@pytest.mark.parametrize(
    "end", [RawClient.close, half_closed, deaf], ids=["gone", "half closed", "deaf"]
)
@pytest.mark.parametrize("code", [ENDLESS, TALKING], ids=["silent", "talking"])
def test_a_program_ends_with_the_client_that_asked_for_it(
    tight: Daemon, end: Callable[[RawClient], None], code: str
) -> None:
    if end is deaf and code is ENDLESS:
        pytest.skip("a silent program sends a client that does not read nothing to be noticed by")
    with unchanged(tight):
        client = RawClient(tight.path)
        client.say(program(code, stream=True))
        if code is TALKING:
            assert isinstance(client.hear(), OutputChunk)
        assert soon(lambda: not is_free(tight))
        end(client)
        assert soon(lambda: is_free(tight))
        client.close()


def test_a_killed_process_takes_its_program_along_and_not_its_session(tight: Daemon) -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from cellwright import Sandbox
sandbox = Sandbox(connect={str(tight.path)!r})
session = sandbox.session("survivor")
session.execute("x = 1")
print("ready", flush=True)
session.execute("import time; time.sleep(300)")
"""
    with tight.sandbox() as sandbox:
        sandbox.session().close()  # the first one starts a thread, which has descriptors of its own
    with unchanged(tight):
        victim = subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE)
        said = victim.stdout.readline() if victim.stdout else b""
        victim.kill()
        victim.communicate()
        assert said == b"ready\n"
        with tight.sandbox() as sandbox, sandbox.session("survivor") as session:
            assert session.execute("x").value == 1


@pytest.mark.parametrize(
    "words",
    [(), (Hello(VERSION),), (Hello(VERSION), HALF), (Hello(VERSION), program(ENDLESS)),
     (Hello(VERSION), program(TALKING, stream=True)), (Hello(VERSION), frames.AwaitSettled())],
    ids=["connected", "greeted", "half a frame", "asked", "hearing", "waiting"],
)  # fmt: skip
def test_a_client_may_be_gone_at_any_stage(
    daemon: Daemon, words: tuple[msgspec.Struct | bytes, ...]
) -> None:
    with unchanged(daemon):
        for _ in range(8):
            with RawClient(daemon.path, greets=False) as client:
                for word in words:
                    if isinstance(word, bytes):
                        client.socket.send(word)
                    else:
                        client.say(word)
                if words[1:]:
                    client.hear()


# FI-42, FI-47: readers that are slow, programs that talk much


def test_a_reader_that_stops_loses_its_run_and_others_do_not_notice(tight: Daemon) -> None:
    with unchanged(tight), RawClient(tight.path) as client:
        client.say(program(TALKING, stream=True))
        assert isinstance(client.hear(), OutputChunk)
        assert tight.is_well()  # another process, while this one's output is stuck
        assert soon(lambda: is_free(tight))
        heard = client.hear_all()
        assert all(isinstance(reply, OutputChunk) for reply in heard)  # and then hung up on


@pytest.mark.slow  # 0.3 s are not much on an emulated host
def test_an_unread_large_result_is_dropped(tight: Daemon) -> None:
    big = "open('f', 'wb').write(bytes(8 << 20)); print('x' * 90_000)"
    with unchanged(tight):
        with RawClient(tight.path) as client:
            client.say(program(big, collect=["f"]))
            assert select.select([client.socket], [], [], 30)[0]
            assert soon(lambda: is_free(tight))
        with tight.sandbox() as sandbox:
            assert len(sandbox.execute(big, collect=["f"]).artifacts[0].data) == 8 << 20


def test_a_reader_that_is_only_slow_gets_everything(daemon: Daemon) -> None:
    seen = bytearray()
    code = "import os\nfor n in range(200): os.write(1 + n % 2, b'%03d' % n + b'x' * 9997)"

    def slowly(stream: str, data: bytes) -> None:
        select.select([], [], [], 0.002)
        seen.extend(data)

    with daemon.sandbox() as sandbox:
        assert sandbox.execute(code, on_output=slowly).ok
    assert len(seen) == 2_000_000


def test_a_flood_of_small_writes_is_one_clients_affair(daemon: Daemon) -> None:
    flood = "import os\nfor n in range(30_000): os.write(1 + n % 2, b'x')"
    seen = {"stdout": 0, "stderr": 0}

    def count(stream: str, data: bytes) -> None:
        seen[stream] += len(data)

    with daemon.sandbox() as sandbox, daemon.sandbox() as other:
        run = threading.Thread(target=sandbox.execute, args=(flood,), kwargs={"on_output": count})
        run.start()
        for number in range(20):
            assert other.execute(f"{number}").value == number
        run.join()
    assert seen == {"stdout": 15_000, "stderr": 15_000}


# FI-43, FI-25: many connections


def test_a_process_has_so_many_connections_and_others_theirs(tmp_path: Path) -> None:
    limits = {"connections": 40, "connections_per_client": 30}
    with serving(tmp_path / "s", **limits) as daemon, unchanged(daemon):
        idle = [RawClient(daemon.path) for _ in range(30)]
        with RawClient(daemon.path, greets=False) as refused:
            assert "connections: at most 30 for each client" in refused.hear().message
        with pytest.raises(BusyError, match="connections: at most 30"):
            daemon.sandbox()
        assert daemon.is_well()
        for client in idle:
            client.close()
        assert soon(lambda: is_free(daemon))


def test_all_together_have_so_many_connections(tmp_path: Path) -> None:
    with serving(tmp_path / "s", connections=5) as daemon, unchanged(daemon):
        idle = [RawClient(daemon.path) for _ in range(5)]
        with pytest.raises(BusyError, match="connections: at most 5 for all"):
            daemon.sandbox()
        idle.pop().close()
        assert soon(daemon.is_well)
        for client in idle:
            client.close()


def test_a_storm_of_connections_is_weathered(daemon: Daemon) -> None:
    def storm() -> None:
        for _ in range(1500):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:  # fmt: skip
                sock.connect(os.fspath(daemon.path))

    with unchanged(daemon):
        storms = [threading.Thread(target=storm) for _ in range(3)]
        for each in storms:
            each.start()
        assert daemon.is_well()
        for each in storms:
            each.join()


def test_a_daemon_without_a_descriptor_left_goes_on_when_it_has_one(tmp_path: Path) -> None:
    few = {"descriptors": 110, "connections_per_client": 1000}
    with serving(tmp_path / "s", **few) as daemon, unchanged(daemon):
        crowd = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(120)]
        for sock in crowd:
            sock.connect(os.fspath(daemon.path))
        assert soon(lambda: daemon.descriptors() == 110)
        for sock in crowd:
            sock.close()


# FI-44: cancelling


def test_a_cancel_ends_what_runs_and_is_harmless_twice_and_otherwise(daemon: Daemon) -> None:
    with unchanged(daemon), RawClient(daemon.path) as client:
        client.say(Cancel())
        client.say(program("print('up', flush=True)\n" + ENDLESS, stream=True))
        assert isinstance(client.hear(), OutputChunk)
        client.say(Cancel())
        client.say(Cancel())
        assert client.hear().result.status is SandboxStatus.CANCELLED
        client.say(Cancel())
        client.say(program("6 * 7"))
        assert client.hear().value == b"42"


def test_a_cancel_ends_no_program_of_another_client(daemon: Daemon) -> None:
    with RawClient(daemon.path) as one, RawClient(daemon.path) as other:
        one.say(program("import time; print('up', flush=True); time.sleep(0.3); 1", stream=True))
        assert isinstance(one.hear(), OutputChunk)
        other.say(Cancel())
        assert one.hear().value == b"1"


def test_a_session_cannot_be_used_without_its_key(daemon: Daemon) -> None:
    with daemon.sandbox() as sandbox, sandbox.session() as session:
        with RawClient(daemon.path) as client:
            for key in ("", session.id, "0" * 32):
                client.say(frames.ListSessionFiles(key))
                failure = client.hear()
                assert (failure.kind, "unknown to the daemon" in failure.message) == (
                    "SessionLost",
                    True,
                )
        assert session.execute("1").ok


# FI-45: sessions


def test_a_session_that_a_program_ended_is_lost_for_every_client(daemon: Daemon) -> None:
    with daemon.sandbox() as one, daemon.sandbox() as two:
        first, second = one.session("doomed"), two.session("doomed")
        ended = first.execute("import os; os._exit(3)")
        assert ended.session_lost
        for each in (first, second):
            with pytest.raises(SessionLost, match="request 1 ended it"):
                each.execute("1")
            assert "request 1 ended it" in each.lost
        with two.session("doomed") as fresh:
            assert fresh.execute("1").ok


def test_a_request_beside_one_that_runs_cancels_it_and_is_served_next(daemon: Daemon) -> None:
    """One at a time: whatever is said meanwhile ends what runs."""
    with RawClient(daemon.path) as client:
        client.say(program("print('up', flush=True)\n" + ENDLESS, stream=True))
        assert isinstance(client.hear(), OutputChunk)
        client.say(program("6 * 7"))
        assert client.hear().result.status is SandboxStatus.CANCELLED
        assert client.hear().value == b"42"


def test_so_many_requests_of_a_process_are_at_work_and_the_next_is_refused(tight: Daemon) -> None:
    with unchanged(tight), RawClient(tight.path) as one, RawClient(tight.path) as two:
        one.say(program(ENDLESS))
        assert soon(lambda: not is_free(tight))
        two.say(program("1"))
        assert "requests at work: at most 1 for each client" in two.hear().message
        one.say(Cancel())
        assert isinstance(one.hear(), Executed)
        assert soon(lambda: is_free(tight))
        two.say(program("1"))
        assert isinstance(two.hear(), Executed)  # the connection was kept


# FI-48: descriptors beside the bytes


def test_descriptors_that_come_with_a_message_are_closed(daemon: Daemon) -> None:
    def send(frame: msgspec.Struct, descriptor: int) -> None:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor] * 50))
        client.socket.sendmsg([channel.packets(encode(frame))[0]], [rights])

    with unchanged(daemon), RawClient(daemon.path, greets=False) as client:
        reader, writer = os.pipe()
        for frame in (Hello(VERSION), program("6 * 7"), Cancel(), program("1")):
            send(frame, writer)
            if not isinstance(frame, Cancel):
                client.hear()
        os.close(writer)
        assert select.select([reader], [], [], 10)[0]  # nobody has the other end any more
        assert os.read(reader, 1) == b""
        os.close(reader)


# FI-34: others


def test_what_is_out_of_order_is_refused(daemon: Daemon) -> None:
    wrong: tuple[tuple[msgspec.Struct, ...], ...] = (
        (frames.Describe(),),
        (Hello(VERSION), Hello(VERSION)),
        (Hello(VERSION), frames.Done()),
        (Hello(VERSION), Failure("PolicyError", "x")),
    )
    with unchanged(daemon):
        for words in wrong:
            with RawClient(daemon.path, greets=False) as client:
                for word in words:
                    client.say(word)
                refusal = client.hear_all()[-1]
                assert "invalid frame" in refusal.message
        with RawClient(daemon.path, greets=False) as client:
            client.say(Hello(VERSION + 1))
            assert f"version {VERSION} of the protocol" in client.hear_all()[-1].message


@pytest.mark.needs("root")
def test_another_user_is_refused_whatever_the_sockets_mode(tmp_path: Path) -> None:
    ask = """
import socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect("s")
print(sock.recv(4096).decode("latin-1"))
"""
    with serving(tmp_path / "s") as daemon:
        assert os.stat(daemon.path).st_mode & 0o777 == 0o600
        daemon.path.chmod(0o666)
        tmp_path.chmod(0o711)
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-c", ask], cwd=tmp_path, user=65534, group=65534,
            extra_groups=[], stdout=-1, timeout=30, check=True,
        )  # fmt: skip
        assert b"this daemon serves user 0, not 65534" in done.stdout


@pytest.mark.needs("root")
def test_a_client_tells_nothing_to_what_another_user_listens_at(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    listen = """
import socket
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.bind("s")
sock.listen()
print("ready", flush=True)
other, _ = sock.accept()
print(other.recv(100))
"""
    with subprocess.Popen(
        ["/usr/bin/python3", "-I", "-c", listen], cwd=tmp_path, user=65534, group=65534,
        extra_groups=[], stdout=-1,
    ) as impostor:  # fmt: skip
        assert impostor.stdout
        assert impostor.stdout.readline() == b"ready\n"
        with pytest.raises(
            Exception,
            match="belongs to user 65534, which would see your programs\nhint: start one of your own",
        ):
            Sandbox(connect=tmp_path / "s")
        assert impostor.stdout.readline() == b"b''\n"
