"""Namespaces: no process, network, System V object or name of the host."""

import ctypes
import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from cellwright import Sandbox
from tests.escapes.without import errno_of

KINDS = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


@pytest.mark.parametrize("kind", KINDS)
def test_every_namespace_is_its_own(standard: Sandbox, kind: str) -> None:
    read = f"import os; os.readlink('/proc/self/ns/{kind}')"
    host = os.readlink(f"/proc/self/ns/{kind}")
    runs = [
        standard.start(
            f"{read}\nprint(os.readlink('/proc/self/ns/{kind}'), flush=True)\ninput()", stdin="x"
        )
        for _ in range(3)
    ]
    seen = [run.result().stdout for run in runs]
    assert all(text.startswith(kind) and text.strip() != host for text in seen)


def test_processes_of_the_host_cannot_be_named(standard: Sandbox) -> None:
    result = standard.execute(errno_of(f"os.kill({os.getpid()}, 0)"))
    assert os.kill(os.getpid(), 0) is None
    assert result.value == errno.ESRCH


def test_the_hosts_loopback_cannot_be_reached(standard: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attempt = f"socket.create_connection(('127.0.0.1', {port}), 2)"
        result = standard.execute(errno_of(attempt, "import socket"))
        socket.create_connection(("127.0.0.1", port), 2).close()
    assert result.value == errno.ECONNREFUSED


def test_an_abstract_socket_of_the_host_cannot_be_reached(standard: Sandbox) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(b"\0cellwright-test")
        server.listen()
        attempt = "socket.socket(socket.AF_UNIX).connect(b'\\0cellwright-test')"
        result = standard.execute(errno_of(attempt, "import socket"))
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(b"\0cellwright-test")
    assert result.value == errno.ECONNREFUSED


def test_system_v_memory_of_the_host_is_unknown(standard: Sandbox) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(0x5BCA0002, 4096, 0o1666)
    assert segment >= 0
    try:
        result = standard.execute("import ctypes; ctypes.CDLL(None).shmget(0x5BCA0002, 4096, 0)")
    finally:
        libc.shmctl(segment, 0, None)
    assert result.value == -1


def test_the_host_name_is_generic(strict: Sandbox) -> None:
    assert strict.execute("import os; os.uname().nodename").value == "cell"


LISTING = """
import os
seen = 0
for _ in range(200):
    try:
        os.listdir("/proc/1/fd")
        seen += 1
    except PermissionError:
        pass
seen
"""


def test_init_shows_nothing_while_others_are_made(standard: Sandbox) -> None:
    """It is of the nursery's memory.  Before, one of 120 attempts succeeded: that memory was dumpable while the
    namespaces of another init were opened."""
    assert os.listdir("/proc/self/fd")
    with standard.session() as session, ThreadPoolExecutor(1) as others:
        listings = others.submit(lambda: [session.execute(LISTING).value for _ in range(10)])
        while not listings.done():
            assert standard.execute("1 + 1").value == 2
    assert listings.result() == [0] * 10


def test_the_cgroups_of_init_tell_nothing_of_the_host(strict: Sandbox) -> None:
    """Init is not in the cell's cgroup; the way from there to its own must not name the host's."""
    lines = strict.execute("open('/proc/1/cgroup').read().splitlines()").value
    assert {line.split(":", 2)[2] for line in lines} <= {"/", "/../launcher"}
