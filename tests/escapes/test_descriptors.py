"""The sweep: nothing that anybody had open crosses into a cell."""

import os

from cellwright import Sandbox
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
    waiting = [
        strict.start("print('up', flush=True)\ninput()", stdin="x" * 200_000) for _ in range(3)
    ]
    for run in waiting:
        next(run.output())
    assert len(strict.execute(LIST).value) == 4
    for run in waiting:
        run.result()


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
