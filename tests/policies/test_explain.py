"""A plan in words."""

from cellwright.policies.compile import compile_policy
from cellwright.policies.explain import explain
from cellwright.policies.host import Host
from cellwright.policies.policy import OPTIONAL_LAYERS, Filesystem, Policy

FULL = Host(landlock_abi=7, cgroups={"memory": "", "cpu": "", "pids": ""})


def test_every_layer_in_force_has_a_line_and_none_is_left_unexplained() -> None:
    plan = compile_policy(Policy(), FULL)
    lines = explain(plan)
    for layer in plan.layers:
        (line,) = (line for line in lines if line.startswith(f"layer {layer}: "))
        assert line != f"layer {layer}: {layer}"


def test_what_is_missing_is_said() -> None:
    lines = explain(compile_policy(Policy(optional_layers=OPTIONAL_LAYERS), Host(listener="no")))
    assert {line for line in lines if line.startswith("MISSING")} == {
        f"MISSING {layer}" for layer in OPTIONAL_LAYERS
    }


def test_host_paths_are_named_with_their_rights() -> None:
    policy = Policy(filesystem=Filesystem(read=("/data",), write=("/out",)))
    lines = explain(compile_policy(policy, FULL))
    assert "show /data, read-only" in lines
    assert "show /out, read-write" in lines
