"""Launches that begin before the sandbox is made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cellwright.benchmarks.census import stat_of
from cellwright.harness.sandbox.inspection import inspect
from cellwright.harness.sandbox.sandbox import Sandbox
from cellwright.harness.sandbox.sandbox_arguments import HostSettings
from cellwright.policies.errors import LaunchError
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import Limits, Network, Policy
from cellwright.runner.cgroups.detect import open_tree
from cellwright.runner.host.shown_paths import sources_of
from cellwright.runner.launching import spawn
from cellwright.runner.launching.launch import Launch, LaunchArguments, begin_ahead
from cellwright.runner.launching.spawn import Spawned, interpreter
from cellwright.runner.settings import PoolSettings
from tests.conftest import ROOT

_POLICY = Policy(name="strict")
_OTHER = Policy(name="strict", limits=Limits(processes=5))
_REACHES = Policy(name="strict", network=Network(allow=(NetworkRule(host="a.example.org"),)))


def _arguments(policy: Policy) -> LaunchArguments:
    return LaunchArguments(policy, sources_of(policy))


@pytest.mark.parametrize("policy", [_POLICY, _REACHES])
def test_a_sandbox_takes_the_launch_that_was_begun_for_it(policy: Policy) -> None:
    spawned = Spawned(interpreter())
    begin_ahead(spawned, _arguments(policy))
    with Sandbox(policy=policy, pool=0, host=HostSettings(spawned=spawned)) as sandbox:
        assert sandbox.execute("1 + 1").value == 2
        assert inspect(sandbox).generation.launcher.keeper == spawned.keeper
    assert spawned.launch is None


def test_a_sandbox_with_other_arguments_ends_a_launch_and_starts_its_own() -> None:
    spawned = Spawned(interpreter())
    begin_ahead(spawned, _arguments(_POLICY))
    with Sandbox(policy=_OTHER, pool=0, host=HostSettings(spawned=spawned)) as sandbox:
        assert sandbox.plan.processes == 5
        assert sandbox.execute("1 + 1").value == 2
        assert not Path(f"/proc/{spawned.keeper}").exists()


def test_a_launch_that_no_sandbox_takes_leaves_nothing(tmp_path: Path) -> None:
    spawned = Spawned(interpreter())
    begin_ahead(spawned, _arguments(_POLICY))
    assert isinstance(spawned.launch, Launch)
    places = spawned.launch.tree.places
    spawned.close()
    assert not Path(f"/proc/{spawned.keeper}").exists()
    assert not [place for place in places.values() if os.path.exists(place)]


def test_a_launcher_that_dies_during_a_launch_is_reported_to_the_sandbox() -> None:
    spawned = Spawned(interpreter())
    begin_ahead(spawned, _arguments(_POLICY))
    os.kill(spawned.keeper, 9)
    with pytest.raises(LaunchError):
        Sandbox(policy=_POLICY, pool=0, host=HostSettings(spawned=spawned))


def test_a_launch_for_one_cell_rehearses_nothing() -> None:
    faults = {}
    for cells in (1, 10):
        with Sandbox(pool=PoolSettings(size=0, cells_per_launcher=cells)) as sandbox:
            launcher = stat_of(inspect(sandbox).launcher_pids().launcher)
            assert launcher
            faults[cells] = launcher.children_faults  # faults of children that it has waited for
            assert [sandbox.execute("1 + 1").value for _ in range(2)] == [2, 2]
    assert faults[1] < 30
    assert faults[10] > 200


def test_a_launcher_imports_no_module_that_it_does_not_use() -> None:
    code = spawn._BOOTSTRAP.format("cellwright.runner.launcher.main", "main")
    paths = repr(spawn.import_paths(()))
    code = code.replace("os.read(3,65536).decode().split('\\0')", paths)
    code = code.replace("main(len(paths))", "print(*sys.modules)")
    done = subprocess.run(
        [interpreter(), "-I", "-S", "-c", code], capture_output=True, text=True, check=True, env={}
    )
    imported = set(done.stdout.split())
    assert "cellwright.runner.launcher.main" in imported
    # Python 3.14 writes tracebacks in colours, and loads dataclasses and inspect for that.
    command = [interpreter(), "-I", "-S", "-c", "import sys, traceback; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={})
    imported -= set(done.stdout.split())
    assert not imported & {
        "ast", "ctypes", "importlib.util", "inspect", "msgspec.inspect", "msgspec._json_schema", "platform", "random",
        "selectors", "signal", "socket", "subprocess",
    }  # fmt: skip
    assert len(imported) <= 100


@pytest.mark.needs("cgroup")
def test_a_command_that_fails_before_it_makes_a_sandbox_removes_its_cgroups(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cellwright", "run", "--audit", str(tmp_path / "no" / "file")]
    with subprocess.Popen([*command, "-c", "1"], stderr=subprocess.PIPE, cwd=ROOT) as process:
        _, said = process.communicate()
    assert process.returncode, said
    tree = open_tree(os.getpid())
    try:
        beside = [Path(place).parent for place in tree.places.values()]
    finally:
        tree.close()
    assert beside
    assert not [left for each in beside for left in each.glob(f"cellwright-{process.pid}-*")]
