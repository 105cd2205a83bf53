"""The confinement of the egress process: each attempt succeeds before it, and fails after it."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cellwright.policies.compiling.compile import compile_policy
from cellwright.policies.compiling.host import Host
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import Network, Policy
from cellwright.runner.kernel import landlock
from cellwright.runner.messages import EgressBoot, encode
from tests.conftest import ROOT

_PROGRAM = """
import errno, json, os, socket, sys
sys.path.insert(0, ROOT)
from cellwright.runner.egress.main import confine
from cellwright.runner.messages import EgressBoot, decode
def attempt(work):
    try:
        work()
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]
def run():
    if (pid := os.fork()) == 0:
        try: os.execv("/bin/true", ["true"])
        except OSError as error: os._exit(error.errno)
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]): raise OSError(code, "")
def everything():
    return {
        "write": attempt(lambda: open(PLACE + "/new", "w").close()),
        "read": attempt(lambda: open(PLACE + "/secret").close()),
        "run": attempt(run),
        "unix": attempt(lambda: socket.socket(socket.AF_UNIX)),
        "netlink": attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
        "raw": attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)),
        "tcp": attempt(lambda: socket.socket().close()),
        "resolver": attempt(lambda: open("/etc/nsswitch.conf").close()),
        "become root": attempt(lambda: os.setuid(0)),
    }
before = everything()
confine(decode(bytes.fromhex(BOOT), EgressBoot))
print(json.dumps([before, everything(), sorted(os.getresuid())]))
"""


_SEARCHED = """
import fcntl, json, socket, struct, subprocess, sys, threading
sys.path.insert(0, ROOT)
from cellwright.runner.egress.main import confine
from cellwright.runner.messages import EgressBoot, decode
subprocess.run(["mount", "--bind", CONFIGURATION, "/etc/resolv.conf"], check=True)
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
fcntl.ioctl(server, 0x8914, struct.pack("16sh22x", b"lo", 0x41))  # SIOCSIFFLAGS: up
server.bind(("127.0.0.1", 53))
asked = []
def serve():
    while True:
        message, sender = server.recvfrom(512)
        name, at = [], 12
        while length := message[at]:
            name.append(message[at + 1 : at + 1 + length].decode()); at += 1 + length
        asked.append(".".join(name))
        server.sendto(message[:2] + bytes([0x81, 0x83]) + message[4:12] + message[12 : at + 5], sender)
threading.Thread(target=serve, daemon=True).start()
confine(decode(bytes.fromhex(BOOT), EgressBoot))
for name in ("api.example.org", "db"):
    try: socket.getaddrinfo(name, 443, type=socket.SOCK_STREAM)
    except socket.gaierror: pass
print(json.dumps(sorted(set(asked) - {"localhost"})))
"""


@pytest.mark.needs("root")
def test_a_name_is_looked_up_as_it_is_and_in_no_other_domain(tmp_path: Path) -> None:
    """The host's resolver would ask for api.example.org.corp.example next, which nobody allowed."""
    configuration = tmp_path / "resolv.conf"
    configuration.write_text("nameserver 127.0.0.1\nsearch corp.example\noptions attempts:1\n")
    given = f"ROOT, CONFIGURATION, BOOT = {str(ROOT)!r}, {str(configuration)!r}, {_boot(0)!r}\n"
    done = subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, "-I", "-c", given + _SEARCHED],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["api.example.org", "db"]


def _boot(uid: int) -> str:
    host = Host(landlock_abi=landlock.abi(), cgroups={"memory": "", "cpu": "", "pids": ""})
    policy = Policy(network=Network(allow=(NetworkRule(host="api.example.org"),)))
    plan = compile_policy(policy, host)
    assert plan.network
    return encode(EgressBoot(plan.network, uid, plan.landlock_abi, 0.0, "", None)).hex()


@pytest.mark.needs("root", "landlock")
def test_it_can_use_tcp_and_configuration_of_the_resolver_and_nothing_else() -> None:
    uid = 0x7000_0001
    boot = _boot(uid)
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        secret = Path(place, "secret")
        secret.touch()
        secret.chmod(0o666)
        given = f"ROOT, PLACE, BOOT = {str(ROOT)!r}, {place!r}, {boot!r}\n"
        done = subprocess.run(
            [sys.executable, "-I", "-c", given + _PROGRAM],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after, ids = json.loads(done.stdout)
    assert set(before.values()) == {"done"}
    assert after == {
        "write": "EACCES", "read": "EACCES", "run": "EPERM", "unix": "EPERM", "netlink": "EPERM",
        "raw": "EPERM", "tcp": "done", "resolver": "done", "become root": "EPERM",
    }  # fmt: skip
    assert ids == [uid] * 3
