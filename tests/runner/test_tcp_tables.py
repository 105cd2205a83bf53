"""The kernel's table of TCP sockets: a cell has its own, so that reading it takes microseconds."""

import subprocess
from pathlib import Path

import pytest

from cellwright import Sandbox
from cellwright.policies.policy import Network, Policy
from cellwright.testing import inspect
from tests.conftest import OPTIONAL

_SIZE = "/proc/sys/net/ipv4/tcp_ehash_entries"  # negative: of the host's table, which is shared
_CHILD = Path("/proc/sys/net/ipv4/tcp_child_ehash_entries")


@pytest.mark.needs("root")
@pytest.mark.skipif(not _CHILD.exists(), reason="the kernel is older than 6.1")
@pytest.mark.parametrize("loopback", [True, False])
def test_a_cell_with_tcp_has_a_small_table_of_its_own(loopback: bool) -> None:
    network = Network(loopback=loopback)
    policy = Policy(name="tcp", network=network, optional_layers=OPTIONAL)
    with Sandbox(policy=policy, pool=0) as box, box.session() as session:
        session.execute("1")
        place = f"/proc/{inspect(box).cell_pids()[0]}/ns/net"
        read = subprocess.run(
            ["nsenter", f"--net={place}", "cat", _SIZE], capture_output=True, text=True, check=True
        )
    assert (int(read.stdout) == 2048) is loopback
    assert (int(read.stdout) < 0) is not loopback
