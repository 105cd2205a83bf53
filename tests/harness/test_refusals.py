"""Hosts that lack something: what is refused, in which words, and what a policy may go without."""

import json
import os
import subprocess
import sys

import msgspec
import pytest

from cellwright import Sandbox, Unenforceable
from cellwright.harness.cli.helping import repairs
from cellwright.policies.compiling.host import ALWAYS
from cellwright.policies.languages import LANGUAGES
from cellwright.policies.policy import MIB, OPTIONAL_LAYERS, Policy
from cellwright.policies.profiles.loading import load_policy
from tests.conftest import CAPS, ROOT

no_cgroup = pytest.mark.needs("userns", "no_cgroup")
no_userns = pytest.mark.needs("no_userns")


def cellwright(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cellwright", *arguments],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def doctor() -> dict[str, dict[str, str]]:
    done = cellwright("doctor", "--json")
    return {finding["layer"]: finding for finding in json.loads(done.stdout)}


def without_caps(name: str, **limits: object) -> Sandbox:
    policy = load_policy(name)
    limits_ = msgspec.structs.replace(policy.limits, **limits)
    return Sandbox(policy=msgspec.structs.replace(policy, limits=limits_, optional_layers=CAPS))


# An ordinary user without a session or a cgroup


@no_cgroup
def test_without_a_cgroup_the_default_policy_refuses_and_names_the_three_caps() -> None:
    with pytest.raises(Unenforceable) as refusal:
        Sandbox()
    assert {layer for layer, _ in refusal.value.gaps} == set(CAPS)
    assert "optional" in refusal.value.hint
    reasons = set(dict(refusal.value.gaps).values())
    assert len(reasons) == 1
    assert "systemd" not in os.listdir("/run") or "enable-linger" in reasons.pop()


@no_cgroup
def test_leave_to_lack_one_cap_is_not_leave_to_lack_the_others() -> None:
    with pytest.raises(Unenforceable) as refusal:
        Sandbox(policy=Policy(optional_layers=("cgroup_cpu",)))
    assert {layer for layer, _ in refusal.value.gaps} == set(CAPS) - {"cgroup_cpu"}


@no_cgroup
def test_the_command_refuses_too_and_runs_when_told_to_go_without() -> None:
    refused = cellwright("run", "-c", "print(1)")
    assert (refused.returncode, refused.stdout) == (70, "")
    for layer in CAPS:
        assert layer in refused.stderr
    ran = cellwright("run", "--optional", "cgroup", "-c", "print(1)")
    assert (ran.returncode, ran.stdout) == (0, "1\n"), ran.stderr


@no_cgroup
def test_with_leave_every_other_layer_is_in_force_and_rlimits_take_over() -> None:
    with without_caps("strict") as sandbox:
        layers = set(sandbox.execute("1").layers)
    assert layers >= {*ALWAYS, "rlimit_as", "rlimit_nproc"}
    assert not layers & set(CAPS)


@no_cgroup
def test_the_rlimits_that_take_over_hold() -> None:
    forks = """
import os, time
n = 0
try:
    while n < 100:
        if os.fork() == 0: time.sleep(30)
        n += 1
except BlockingIOError:
    pass
n
"""
    with without_caps("standard", processes=20, memory_bytes=64 * MIB) as sandbox:
        assert 0 < sandbox.execute(forks).value < 20
        assert sandbox.execute("x = bytearray(1 << 30)").error.startswith("MemoryError")


@no_cgroup
def test_the_doctor_warns_of_each_cap_and_passes_the_rest() -> None:
    findings = doctor()
    amiss = {name for name, each in findings.items() if each["verdict"] != "PASS"}
    # An interpreter may be missing, or too old.
    assert amiss - set(LANGUAGES) == {*CAPS, "verdict"}
    assert "--optional cgroup" in findings["verdict"]["repair"]
    assert cellwright("doctor").returncode == 70
    assert cellwright("doctor", "--optional", "cgroup").returncode == 0
    for layer in CAPS:
        assert findings[layer]["verdict"] == "WARN"
        assert findings[layer]["proof"].startswith("this host lacks it: ")
        assert "no reason" not in findings[layer]["proof"]
        assert "--optional cgroup" in findings[layer]["repair"]


# No user namespaces


@no_userns
@pytest.mark.parametrize("optional", [(), OPTIONAL_LAYERS], ids=["strict", "everything optional"])
def test_without_user_namespaces_no_policy_helps(optional: tuple[str, ...]) -> None:
    with pytest.raises(Unenforceable) as refusal:
        Sandbox(policy=Policy(optional_layers=optional))
    assert "user.max_user_namespaces is 0" in dict(refusal.value.gaps)["user_ns"]


@no_userns
def test_the_command_names_the_switch_and_runs_nothing() -> None:
    refused = cellwright("run", "--optional", "cgroup", "-c", "print(1)")
    assert (refused.returncode, refused.stdout) == (70, "")
    assert "user_ns: switched off: sysctl user.max_user_namespaces is 0" in refused.stderr


@no_userns
def test_the_doctor_fails_with_the_command_that_repairs_it() -> None:
    findings = doctor()
    assert findings["launcher"]["verdict"] == "FAIL"
    assert "sysctl user.max_user_namespaces is 0" in findings["launcher"]["proof"]
    assert "sysctl -w user.max_user_namespaces=" in findings["launcher"]["repair"]
    assert findings["verdict"]["verdict"] == "FAIL"
    of_the_host = {"python", "kernel", "machine", "launcher", "verdict"}
    assert set(findings) == of_the_host  # no layer was tried


def test_the_repair_of_cgroups_names_the_freezer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that idle sessions of the user to whom root gives the directories are frozen."""
    names = ("cpu", "pids", "freezer")
    line = "30 24 0:27 / /sys/fs/cgroup/{0} rw - cgroup cgroup rw,{0}\n"
    monkeypatch.setattr(repairs, "_read", lambda path: "".join(map(line.format, names)))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    places = " ".join(f"/sys/fs/cgroup/{name}/cellwright" for name in names)
    words = repairs.repair_of_layer("cgroup_memory")
    assert f"mkdir {places} && chown -R 1000 {places}; then export" in words
    assert "CELLWRIGHT_CGROUP_ROOT=/sys/fs/cgroup/cpu/cellwright;" in words
