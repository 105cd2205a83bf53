"""Sandboxes with a layer taken away, to show what that layer alone stops."""

import contextlib
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pyseccomp
import pytest

from cellwright import Sandbox
from cellwright.policies.policy import Policy
from cellwright.runner.launching import launch
from tests.conftest import OPTIONAL, policy_named

ALLOW_EVERYTHING = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)  # ret SECCOMP_RET_ALLOW


@contextlib.contextmanager
def sandbox_with_plan(
    monkeypatch: pytest.MonkeyPatch, policy: Policy, **changes: Any
) -> Iterator[Sandbox]:
    """A sandbox whose plan was changed after it was compiled, as no policy could."""
    compiled = launch.plan_for
    monkeypatch.setattr(
        launch,
        "plan_for",
        lambda *given, **named: msgspec.structs.replace(compiled(*given, **named), **changes),
    )
    with Sandbox(policy=policy, pool=0) as sandbox:
        yield sandbox


def without_listener(monkeypatch: pytest.MonkeyPatch) -> Policy:
    """Return the default policy for cells without the listener, which the host seems to lack now."""
    deaf = msgspec.structs.replace(policy_named("strict"), optional_layers=(*OPTIONAL, "listener"))
    probe = launch.probe_host
    monkeypatch.setattr(
        launch,
        "probe_host",
        lambda *given: msgspec.structs.replace(probe(*given), listener="switched off"),
    )
    return deaf


def errno_of(attempt: str, before: str = "") -> str:
    """Return a program whose value is the errno of `attempt`, 0 if it succeeds."""
    return f"import os\n{before}\ntry:\n    {attempt}\n    e = 0\nexcept OSError as error:\n    e = error.errno\ne"


def errno_of_call(call: str) -> str:
    """Return a program whose value is the errno of a C library call with bad arguments."""
    return f"import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nc.{call}\nctypes.get_errno()"


def by_number(call: str, arguments: str) -> str:
    """Return the C library call that makes a system call by the number it has on this machine."""
    return f"syscall({pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, call)}, {arguments})"
