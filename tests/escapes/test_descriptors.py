"""The sweep: nothing that anybody had open crosses into a cell."""

import errno
import os
import socket

import msgspec
import pytest

from cellwright import Sandbox
from cellwright.runner import channel
from cellwright.runner.kernel import notifications
from cellwright.runner.listening import interfaces
from tests.conftest import policy_named

LIST = "import os\n{n: os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in os.listdir('/proc/self/fd') if os.path.lexists(f'/proc/self/fd/{n}')}"


def test_a_cell_has_its_four_descriptors_and_no_others(strict: Sandbox) -> None:
    assert strict.execute(LIST).value == {"0": "pipe", "1": "pipe", "2": "pipe", "3": "socket"}


def test_a_descriptor_that_a_child_would_inherit_does_not_cross() -> None:
    """Without the sweep it would: a plain child has it."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        probe = f"import os, sys; sys.exit(not os.path.exists('/proc/self/fd/{write}'))"
        pid = os.posix_spawn("/usr/bin/python3", ["python3", "-I", "-S", "-c", probe], {})
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with Sandbox(policy=policy_named("strict")) as sandbox:
            assert (
                sandbox.execute(f"import os; os.path.exists('/proc/self/fd/{write}')").value
                is False
            )
    finally:
        os.close(read)
        os.close(write)


def test_cells_that_live_at_once_do_not_hold_each_others(strict: Sandbox) -> None:
    code = "import time\nprint('up', flush=True)\ntime.sleep(60)"
    waiting = [strict.start(code) for _ in range(3)]
    for run in waiting:
        next(run.output())
    assert len(strict.execute(LIST).value) == 4
    for run in waiting:
        run.cancel()
        assert run.result().reason == "cancelled"


@pytest.mark.parametrize("open_files", [25, 28, 31, 34])
def test_a_cell_has_its_own_descriptors_however_many_live_beside_it(open_files: int) -> None:
    """The number that the status channel goes to may be that of a stream, the control channel, or a
    cgroup among the launcher's: the guest then spoke where only the launcher is believed."""
    limits = msgspec.structs.replace(policy_named("strict").limits, open_files=open_files)
    code = LIST.replace("\n", "\nkinds = ") + "\nos.write(1, str(kinds).encode())"
    code += "\nimport time\ntime.sleep(60)"
    with Sandbox(policy=policy_named("strict", limits=limits), pool=0) as sandbox:
        running, said = [], []
        for _ in range(10):
            running.append(sandbox.start(code, timeout=10))
            said.append(next(running[-1].output(), None))
        for run in running:
            run.cancel()
            run.result()
    assert set(said) == {("stdout", b"{'0': 'pipe', '1': 'pipe', '2': 'pipe', '3': 'socket'}")}


def test_the_control_channel_takes_no_descriptors(strict: Sandbox, standard: Sandbox) -> None:
    """What a guest passes along is dropped by the kernel: we never ask for it."""
    strict.settle()
    standard.settle()
    before = len(os.listdir("/proc/self/fd"))
    code = (
        "import array, os, socket\n"
        "s = socket.socket(fileno=3)\n"
        "fds = array.array('i', [0] * 50)\n"
        "s.sendmsg([b'\\x01x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])\n"
        "s.detach()"
    )
    standard.execute(code)
    standard.settle()
    assert len(os.listdir("/proc/self/fd")) == before


_NAME_IN_HOST = """
import os, socket
control = socket.socket(fileno=os.dup(3))
try: control.bind(b"\\0cellwright-test"); seen = 0
except OSError as error: seen = error.errno
seen
"""


def test_the_control_channel_takes_no_name_in_the_network_namespace_of_the_host(
    standard: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert standard.execute(_NAME_IN_HOST).value == errno.EINVAL
    monkeypatch.setattr(channel, "name_for_good", lambda _: None)
    with Sandbox(policy=policy_named("standard"), pool=0) as without:
        assert without.execute(_NAME_IN_HOST).value == 0


_INTERFACES = """
import fcntl, struct
def ask(request, words):
    try: return fcntl.ioctl(3, request, words.ljust(40, bytes(1)))[:16].rstrip(bytes(1)).decode()
    except OSError as error: return error.errno
names = {ask(0x8910, struct.pack("=16si", b"", number)) for number in range(1, 9)}
[sorted(map(str, names)), [ask(request, b"eth0") for request in (0x8912, 0x8913, 0x8915, 0x8919, 0x891B, 0x8921, 0x8927, 0x8933, 0x8946)]]
"""


def test_the_control_channel_tells_no_interface_of_the_host(
    workshop: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel answers SIOCGIF* for the namespace in which a socket was made."""
    unknown = errno.ENODEV
    names, answers = workshop.execute(_INTERFACES).value
    assert names == [str(unknown), "lo"]
    assert answers == ["(", *[unknown] * 8]  # a list of one, which is lo: 40 bytes
    monkeypatch.setattr(interfaces, "answer_request", notifications.let_go_on)
    names, _ = workshop.execute(_INTERFACES).value
    assert set(names) >= {name for number, name in socket.if_nameindex() if number < 9}
