"""A plan in words."""

import msgspec

from cellwright.policies.advice.explanation import explain
from cellwright.policies.compiling.compile import compile_policy
from cellwright.policies.compiling.host import Host
from cellwright.policies.network.rule import NetworkDenial, NetworkRule
from cellwright.policies.policy import (
    OPTIONAL_LAYERS,
    Filesystem,
    Http,
    Limits,
    Packages,
    Policy,
)
from cellwright.policies.privacy_rules import PrivacyRules
from cellwright.policies.tool_rules import ToolRule, Tools

FULL = Host(landlock_abi=7, cgroups={"memory": "", "cpu": "", "pids": ""})


def test_every_layer_in_force_has_a_line_and_none_is_left_unexplained() -> None:
    plan = compile_policy(Policy(), FULL)
    lines = explain(plan, Policy())
    for layer in plan.layers:
        (line,) = (line for line in lines if line.startswith(f"layer {layer}: "))
        assert line != f"layer {layer}: {layer}"


def test_what_is_missing_is_said() -> None:
    lines = explain(
        compile_policy(Policy(optional_layers=OPTIONAL_LAYERS), Host(listener="no")), Policy()
    )
    assert {line for line in lines if line.startswith("MISSING")} == {
        f"MISSING {layer}" for layer in OPTIONAL_LAYERS
    }


def test_host_paths_are_named_with_their_rights() -> None:
    policy = Policy(filesystem=Filesystem(read=("/data",), write=("/out",)))
    lines = explain(compile_policy(policy, FULL), policy)
    assert "show /data, read-only" in lines
    assert "show /out, read-write" in lines


def test_rules_that_hold_outside_the_cell_are_said() -> None:
    policy = Policy(
        http=Http(
            allow=(NetworkRule(host="api.example.org", methods=("GET",), paths=("/v1/*",)),),
            deny=(NetworkDenial(host="*.internal.example.org"),),
        ),
        tools=Tools(rules=(ToolRule("mail.*", "approve"),), calls=7),
        packages=Packages(require=("six==1.17.0",), allow=("six",)),
        privacy=PrivacyRules(enabled=True, kinds=("email",), restore=("mail.send:to",)),
    )
    lines = explain(compile_policy(policy, FULL), policy)
    assert {
        "tool http.request: allow api.example.org:443 (methods GET, paths /v1/*)",
        "tool http.request: deny *.internal.example.org",
        "tools: approve mail.*",
        "tools: deny every other",
        "tools: 7 calls of one execution, 1,000 a second",
        "packages: install six==1.17.0",
        "packages: no others than six",
        "privacy: tokens in place of email",
        "privacy: values in place of tokens in mail.send:to",
        "check the source before it runs: advise",
    } <= set(lines)


def test_what_the_supervisor_ends_a_program_for_is_said() -> None:
    """All limits but those that the plan itself has: a field that is added has to be told here too."""
    limits = Limits(
        wall_seconds=1.5, cpu_seconds=2.5, output_bytes=1001, output_total_bytes=1002,
        value_bytes=1003, artifact_bytes=1004, violations=1005,
    )  # fmt: skip
    text = "\n".join(explain(compile_policy(Policy(limits=limits), FULL), Policy(limits=limits)))
    for number in ("1.5 s", "2.5 s", "1,001", "1,002", "1,003", "1,004", "1,005"):
        assert number in text
    others = {
        "cpus",
        "memory_bytes",
        "processes",
        "workspace_bytes",
        "workspace_inodes",
        "open_files",
        "stack_bytes",
    }
    told = {
        "wall_seconds",
        "cpu_seconds",
        "output_bytes",
        "output_total_bytes",
        "value_bytes",
        "artifact_bytes",
        "violations",
    }
    assert {each.name for each in msgspec.structs.fields(Limits)} == others | told


def test_the_repr_of_a_plan_has_no_bytes() -> None:
    plan = compile_policy(Policy(), FULL)
    assert "\\x" not in repr(plan)
    assert f"guest_filter=<{len(plan.guest_filter):,} bytes>" in repr(plan)
    assert f"layers=<{len(plan.layers)}>" in repr(plan)
    assert len(repr(plan)) < 600
