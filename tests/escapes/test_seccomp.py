"""The system call filter, by calls with bad pointers: what reaches the kernel answers EFAULT, EBADF
or EINVAL; what the filter refuses answers EPERM.  Without the filter each does reach it."""

import errno
import os

import pytest

from cellwright import Sandbox
from tests.conftest import policy_named
from tests.escapes.without import (
    ALLOW_EVERYTHING,
    by_number,
    errno_of,
    errno_of_call,
    sandbox_with_plan,
)

# arguments that can do no harm
ARGUMENTS = {
    "bpf": "0, -1, 0",
    "keyctl": "-1, 0, 0",
    "io_uring_setup": "0, -1",
    "perf_event_open": "-1, 0, -1, -1, 0",
    "userfaultfd": "-1",
    "ptrace": "-1, -1, 0, 0",
    "process_vm_readv": "-1, 0, 0, 0, 0, 0",
    "mount": "-1, -1, -1, 0, 0",
    "fsopen": "-1, 0",
    "unshare": "0",
    "setns": "-1, 0",
    "seccomp": "-1, 0, 0",
    "pidfd_getfd": "-1, -1, 0",
}
if os.uname().machine == "x86_64":
    ARGUMENTS["modify_ldt"] = "0, 0, 0"  # no other machine has it
CALLS = {name: by_number(name, arguments) for name, arguments in ARGUMENTS.items()}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_dangerous_call_does_not_reach_the_kernel(
    strict: Sandbox, standard: Sandbox, call: str
) -> None:
    for sandbox in (strict, standard):
        result = sandbox.execute(errno_of_call(call))
        assert result.value in (errno.EPERM, errno.ENOSYS)
        assert any(each.rule.startswith("seccomp: ") for each in result.violations)


def test_without_the_filter_the_same_calls_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_named("strict")
    with sandbox_with_plan(monkeypatch, policy, guest_filter=ALLOW_EVERYTHING) as sandbox:
        reached = {name: sandbox.execute(errno_of_call(call)).value for name, call in CALLS.items()}
    # Some are refused by another layer (no capability, a sysctl); most answer for their arguments.
    assert sum(value != errno.EPERM for value in reached.values()) >= 8, reached
    assert reached["unshare"] == 0
    assert reached["seccomp"] in (errno.EINVAL, errno.EFAULT)


def test_what_is_newer_than_the_table_does_not_exist(strict: Sandbox) -> None:
    for number in (435, 470, 999):  # clone3, and two unknown numbers
        assert strict.execute(errno_of_call(f"syscall({number}, 0, 0)")).value == errno.ENOSYS


@pytest.mark.parametrize("family", ["AF_VSOCK", "AF_ALG", "AF_PACKET", "AF_KEY", "AF_RDS"])
def test_an_odd_socket_family_is_refused(standard: Sandbox, family: str) -> None:
    attempt = f"socket.socket(getattr(socket, '{family}', 15), socket.SOCK_RAW)"
    assert standard.execute(errno_of(attempt, "import socket")).value == errno.EAFNOSUPPORT


@pytest.mark.parametrize("protocol", [2, 4, 6, 9, 12, 15, 16, 21])
def test_netlink_beyond_interfaces_is_refused(standard: Sandbox, protocol: int) -> None:
    attempt = f"socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, {protocol})"
    assert standard.execute(errno_of(attempt, "import socket")).value == errno.EAFNOSUPPORT


def test_a_computation_has_no_netlink(strict: Sandbox) -> None:
    attempt = "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"
    result = strict.execute(errno_of(attempt, "import socket"))
    assert result.value == errno.EAFNOSUPPORT
    assert "processes.subprocesses = true" in result.violations[0].rule


def test_terminal_injection_is_refused_in_the_low_32_bits(standard: Sandbox) -> None:
    for request in (0x5412, 0x541C, 0x5412 | 1 << 32):  # TIOCSTI, TIOCLINUX (CVE-2019-10063)
        call = f"ioctl(0, ctypes.c_ulong({request}), 0)"
        result = standard.execute(errno_of_call(call))
        assert result.value == errno.EPERM
        assert [each.syscall for each in result.violations] == ["ioctl"]


@pytest.mark.needs("x86_64")
def test_a_foreign_entry_point_is_the_end(standard: Sandbox) -> None:
    """int 0x80, getpid: i386 numbers mean other calls."""
    code = """
import ctypes, mmap, os
page = mmap.mmap(-1, 4096, prot=7)
page.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')
pid = os.fork()
if pid == 0:
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    os._exit(0)
os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
    assert standard.execute(code).value == -31  # SIGSYS


@pytest.mark.needs("x86_64")
def test_x32_numbers_are_refused(standard: Sandbox) -> None:
    result = standard.execute(errno_of_call("syscall(0x40000000 | 39)"))
    assert result.value == errno.ENOSYS or result.signal == 31
