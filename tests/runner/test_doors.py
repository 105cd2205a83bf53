"""Calls that come through doors: whatever is said there is a call, a breach or nothing, and bounded."""

import contextlib
import errno
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellwright import Sandbox
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.tool import Tool
from cellwright.runner.kernel.notifications import Notification
from cellwright.runner.listening.waiting_call import hand_over
from cellwright.runner.messages import Answer, Call
from cellwright.runner.watching import open_calls as doors_module
from cellwright.runner.watching.open_calls import _AT_ONCE, DOOR, Calls, Doors
from tests.conftest import open_descriptors, policy_named, soon

MOST = 5000
OPENING = Notification(1, 1, 1, ())


class Loop:
    """A poll loop around doors, and the guest's ends of those that opened."""

    def __init__(self, answer: Callable[[Call], Answer]) -> None:
        self.handlers: dict[int, tuple[int, Callable[[int], None]]] = {}
        self.breaches: list[str] = []
        self.theirs: list[socket.socket] = []
        self.refused: list[int] = []
        self.calls = Calls(lambda call, tell: tell(answer(call)), self._keep)
        self.watch(self.calls.ready, select.POLLIN, self._on_answers)
        self.doors = Doors(-1, MOST, self.calls, self, partial(hand_over, -1))

    def watch(self, descriptor: int, events: int, handler: Callable[[int], None]) -> None:
        self.handlers[descriptor] = events, handler

    def unwatch(self, descriptor: int) -> None:
        del self.handlers[descriptor]

    def complain(self, complaint: str) -> None:
        self.breaches.append(complaint)

    def open(self) -> socket.socket | None:
        before = len(self.theirs)
        self.doors.open_door(OPENING, 0)
        return self.theirs[-1] if len(self.theirs) > before else None

    def turn(self) -> None:
        """Handle what there is to be handled now."""
        poll = select.poll()
        for descriptor, (events, _) in self.handlers.items():
            poll.register(descriptor, events)
        for descriptor, event in poll.poll(0):
            if descriptor in self.handlers:
                self.handlers[descriptor][1](event)

    def until(self, condition: Callable[[], bool]) -> bool:
        return soon(lambda: self.turn() or condition())  # type: ignore[func-returns-value]

    def close(self) -> None:
        self.doors.close()
        self.calls.close()
        for each in self.theirs:
            each.close()

    def _keep(self, answer: Answer) -> bool:
        return self.doors.answer(answer)

    def _on_answers(self, _: int) -> None:
        os.eventfd_read(self.calls.ready)
        self.doors.send_kept()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Loop]]:
    """Make loops whose kernel gives descriptors to this process."""
    made: list[Loop] = []

    def answer_with(_: int, __: Notification, descriptor: int, ___: int) -> bool:
        made[-1].theirs.append(socket.socket(fileno=os.dup(descriptor)))
        return True

    def loop(answer: Callable[[Call], Answer] = lambda call: Answer(call.number, b"1")) -> Loop:
        made.append(Loop(answer))
        return made[-1]

    monkeypatch.setattr(doors_module.notifications, "answer_with", answer_with)
    monkeypatch.setattr(
        doors_module.notifications, "refuse", lambda _, __, number: made[-1].refused.append(number)
    )
    yield loop
    for each in made:
        each.close()


WHOLE = st.builds(
    lambda *texts: b"".join(text + b"\0" for text in texts),
    *(st.binary(max_size=40).map(lambda data: data.replace(b"\0", b"")) for _ in range(3)),
)
SAID = st.one_of(
    WHOLE,
    st.tuples(WHOLE, st.binary(min_size=1, max_size=5)).map(b"".join),
    st.binary(max_size=100),
    st.integers(MOST // 2, MOST * 2).map(lambda size: b"x" * size),
)


@settings(max_examples=300)
@given(said=st.lists(SAID, min_size=1, max_size=6), cuts=st.lists(st.integers(1, 200), max_size=8))
def test_whatever_is_said_is_a_call_a_breach_or_nothing(said: list[bytes], cuts: list[int]) -> None:
    heard: list[Call] = []
    said_all = threading.Event()  # data sent after an answer is not read

    def answer(call: Call) -> Answer:
        said_all.wait(60)
        heard.append(call)
        return Answer(call.number, b'{"n":1}')

    before = len(os.listdir("/proc/self/fd"))
    loop = Loop(answer)
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(loop):
        patch.setattr(
            doors_module.notifications,
            "answer_with",
            lambda _, __, descriptor, ___: (
                loop.theirs.append(socket.socket(fileno=os.dup(descriptor))) or True
            ),
        )
        for data in said:
            theirs = loop.open()
            assert theirs
            for piece in pieces(data, cuts):
                if not loop.breaches:  # then the cell is killed
                    say(theirs, piece)
                    loop.turn()
            theirs.shutdown(socket.SHUT_WR)
        said_all.set()
        whole = [data for data in said if data.count(b"\0") == 3 and data.endswith(b"\0")]
        if not loop.breaches:
            assert loop.until(lambda: not loop.doors._open)
            assert sorted(
                (call.site.encode(), call.name.encode(), call.arguments) for call in heard
            ) == sorted((again(s), again(n), a) for s, n, a, _ in (d.split(b"\0") for d in whole))
            for data, theirs in zip(said, loop.theirs, strict=True):
                assert theirs.recv(100) == (b'\n{"n":1}\n' if data in whole else b"")
        assert bool(loop.breaches) == any(
            data.count(b"\0") > 3
            or len(data) > MOST
            or (data.count(b"\0") == 3 and data not in whole)
            for data in said
        )
        assert sum(len(door.heard) for door in loop.doors._open.values()) <= MOST
    assert len(os.listdir("/proc/self/fd")) <= before


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    for cut in cuts:
        if data:
            yield data[:cut]
            data = data[cut:]
    if data:
        yield data


def say(theirs: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        theirs.sendall(data)


def again(data: bytes) -> bytes:
    return data.decode(errors="replace").encode()


def test_unfinished_calls_are_bounded_together(make: Callable[..., Loop]) -> None:
    loop = make()
    for _ in range(3):
        theirs = loop.open()
        assert theirs
        theirs.sendall(b"x" * (MOST // 3))
        loop.turn()
    assert not loop.breaches
    loop.theirs[0].sendall(b"xxx")
    loop.turn()
    assert "together" in loop.breaches[0]


def test_a_long_answer_goes_out_as_it_is_taken(make: Callable[..., Loop]) -> None:
    value = b'"' + b"x" * 3_000_000 + b'"'
    loop = make(lambda call: Answer(call.number, value))
    theirs = loop.open()
    assert theirs
    theirs.sendall(b"\0long\0{}\0")
    assert loop.until(lambda: any(events & select.POLLOUT for events, _ in loop.handlers.values()))
    theirs.setblocking(False)
    taken = bytearray()

    def take() -> bool:
        try:
            while piece := theirs.recv(100_000):
                taken.extend(piece)
        except BlockingIOError:
            return False
        return True

    assert loop.until(take)
    assert bytes(taken) == b"\n" + value + b"\n"
    assert not loop.doors._open


def test_a_short_answer_does_not_wait_for_the_poll_loop(make: Callable[..., Loop]) -> None:
    loop = make(lambda call: Answer(call.number, b"17"))
    theirs = loop.open()
    assert theirs
    theirs.settimeout(60)
    theirs.sendall(b"\0x\0{}\0")
    loop.turn()  # the call begins
    assert theirs.recv(100) == b"\n17\n"
    assert loop.until(lambda: not loop.doors._open)
    assert theirs.recv(100) == b""


def test_a_failure_is_its_kind_and_its_words(make: Callable[..., Loop]) -> None:
    loop = make(lambda call: Answer(call.number, None, "denied", "no\nand \udc80 no"))
    theirs = loop.open()
    assert theirs
    theirs.sendall(b"\0x\0{}\0")
    assert loop.until(lambda: not loop.doors._open)
    assert theirs.recv(100) == b"denied\nno\nand ? no\n"


def test_a_closed_door_counts_until_its_call_is_answered(make: Callable[..., Loop]) -> None:
    """Or many that are killed in a call would have more calls open than there may be."""
    release = threading.Event()

    def slow(call: Call) -> Answer:
        release.wait(60)
        return Answer(call.number, b"1")

    loop = make(slow)
    for _ in range(_AT_ONCE):
        theirs = loop.open()
        assert theirs
        theirs.sendall(b"\0slow\0{}\0")
        theirs.close()
        loop.turn()
        loop.turn()
    assert loop.open() is None
    assert loop.until(lambda: len(loop.handlers) == 1)  # nothing is waited for but answers
    release.set()
    assert loop.until(lambda: len(loop.theirs) == _AT_ONCE + 1)
    assert not loop.breaches


def test_a_closed_door_without_a_call_frees_its_place(make: Callable[..., Loop]) -> None:
    loop = make()
    for _ in range(_AT_ONCE):
        assert loop.open()
    assert loop.open() is None
    loop.theirs[0].close()
    loop.turn()
    assert len(loop.theirs) == _AT_ONCE + 1
    assert not loop.breaches


def test_the_dead_do_not_wait(make: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make()
    alive: set[int] = set()
    monkeypatch.setattr(
        doors_module.notifications, "is_waiting", lambda _, notification: notification.id in alive
    )
    for _ in range(_AT_ONCE):
        loop.open()
    for number in range(2000):
        loop.doors.open_door(Notification(number, 1, 1, ()), 0)
        assert len(loop.doors._waiting) <= 256
    assert not loop.refused
    alive.update(range(3000))
    for number in range(2000, 2300):
        loop.doors.open_door(Notification(number, 1, 1, ()), 0)
    assert set(loop.refused) == {errno.EAGAIN}
    loop.doors.close()
    assert loop.refused.count(errno.ENXIO) == 256


# In a cell


ASK = f"""
import os
def door(): return os.open({DOOR!r}, os.O_RDWR | os.O_CLOEXEC)
def say(descriptor, data):
    while data: data = data[os.write(descriptor, data):]
def hear(descriptor):
    heard = b""
    while piece := os.read(descriptor, 65536): heard += piece
    return heard.decode()
"""


def tool(name: str, function: Any) -> Tool:
    return Tool(ToolSpec(name=name, owner=ToolOwner.DEVELOPER), function)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    tools = [tool("echo", lambda given, _: given)]
    with Sandbox(policy=policy_named("strict"), tools=tools, pool=0) as box:
        yield box


def test_the_kernel_opens_a_door_that_is_no_file(sandbox: Sandbox) -> None:
    result = sandbox.execute(
        f"{ASK}\none, other = door(), door()\n"
        "say(one, b'\\0echo\\0{\"n\": 1}\\0')\nsay(other, b'\\0nobody\\0{}\\0')\n"
        f"[hear(one), hear(other), os.get_inheritable(one), os.path.exists({DOOR!r})]"
    )
    assert result.value == ['\n{"n":1}\n', "not_found\nthere is no tool 'nobody'\n", False, False]
    assert result.violations == ()


def test_without_tools_there_is_no_door() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as box:
        result = box.execute(f"{ASK}\ndoor()")
    assert "FileNotFoundError" in str(result.error)
    assert [each.rule for each in result.violations] == ["mount_ns: not shown"]


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        ("say(door(), b'\\0echo\\0{}\\0more')", "more than one call"),
        ("d = door(); say(d, b'\\0echo\\0{}\\0'); say(d, b'\\0')", "more than one call"),
        ("say(door(), b'x' * (64 << 20))", "bytes together"),
        ("for d in [door() for _ in range(30)]: say(d, b'x' * (1 << 20))", "bytes together"),
    ],
)
def test_what_no_honest_guest_says_ends_the_cell(sandbox: Sandbox, attack: str, words: str) -> None:
    release = threading.Event()
    tools = [tool("echo", lambda *_: release.wait(60))]
    with Sandbox(policy=policy_named("strict"), tools=tools, pool=0) as box:
        result = box.execute(f"{ASK}\n{attack}\nwhile True: os.getpid()")
        release.set()
    assert result.reason == "violation"
    assert words in str(result.error)
    assert sandbox.execute("6 * 7").value == 42


def test_a_door_takes_no_name_in_the_network_namespace_of_the_host() -> None:
    """It is a socket of it, whatever the cell is in."""
    tool = Tool(ToolSpec(name="echo", owner=ToolOwner.DEVELOPER), lambda *_: None)
    with Sandbox(policy=policy_named("standard"), tools=[tool], pool=0) as box:
        result = box.execute(
            "import os, socket\ndoor = socket.socket(fileno=os.open('/dev/tools', os.O_RDWR))\n"
            "try: door.bind(b'\\0cellwright-test'); seen = 0\n"
            "except OSError as error: seen = error.errno\nseen"
        )
    assert result.value == errno.EINVAL


def test_doors_that_are_opened_for_nothing_are_bounded(
    make: Callable[..., Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may shut its end down, and keep it."""
    monkeypatch.setattr(doors_module, "_MOST_UNUSED", 5)
    refused: list[int] = []
    monkeypatch.setattr(
        doors_module.notifications, "refuse", lambda *given: refused.append(given[2])
    )
    loop = make()
    for _ in range(5):
        door = loop.open()
        assert door
        door.shutdown(socket.SHUT_WR)
        loop.turn()
    assert loop.open() is None
    assert refused == [errno.EAGAIN]


def test_opening_a_door_at_the_descriptor_limit_fails_with_emfile(sandbox: Sandbox) -> None:
    before = open_descriptors()
    result = sandbox.execute(
        f"{ASK}\nimport resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))\n"
        "held = []\ntry:\n    while True: held.append(door())\n"
        "except OSError as error: said = error.strerror\nsaid"
    )
    assert result.value == "Too many open files"
    assert open_descriptors() <= before


def test_doors_that_a_request_left_open_are_shut_with_it(sandbox: Sandbox) -> None:
    sandbox.session().close()  # the first one starts what watches over all
    before = open_descriptors()
    with sandbox.session() as session:
        session.execute("1")
        opened = open_descriptors()
        assert session.execute(f"{ASK}\nheld = [door() for _ in range(20)]\nlen(held)").value == 20
        # The thread that gave the last door closes our end of it when it runs next.
        assert soon(lambda: open_descriptors() <= opened)
        assert session.execute("[hear(each) for each in held] == [''] * 20").value is True
        assert session.execute("d = door(); say(d, b'\\0echo\\0{}\\0'); hear(d)").value == "\n{}\n"
    assert open_descriptors() <= before


def test_a_door_opened_between_two_requests_belongs_to_the_next(sandbox: Sandbox) -> None:
    """Its open(2) takes as long: a call belongs to the request in which it is made."""
    with sandbox.session() as session:
        session.execute(
            f"""{ASK}
import threading
heard = []
def call():
    while not heard:
        try:  # the request may end in the middle of it
            with open(door(), "r+b", buffering=0) as opened:
                say(opened.fileno(), b'\\0echo\\0{{}}\\0')
                heard.extend(filter(None, [hear(opened.fileno())]))
        except OSError:
            pass
thread = threading.Thread(target=call)
thread.start()"""
        )
        assert soon(lambda: session.execute("heard").value == ["\n{}\n"])
        assert session.execute("thread.join()").ok
