"""`SandboxConfig`: what a short configuration means as a policy."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cellwright import (
    ExecutionContext,
    IsolationConfig,
    PolicyError,
    Sandbox,
    SandboxConfig,
    create_sandbox,
)
from cellwright.harness.sandbox.checks import with_timeout
from cellwright.policies.policy import MIB, Limits, Policy
from tests.conftest import OPTIONAL


def test_the_defaults_deny_everything_and_require_every_layer() -> None:
    policy = SandboxConfig().policy()
    deny_all = Policy()
    assert policy.filesystem == deny_all.filesystem
    assert policy.processes == deny_all.processes
    assert policy.network == deny_all.network
    assert policy.optional_layers == ()
    assert policy.environment == {}


def test_the_defaults_are_those_of_the_documented_face() -> None:
    config = SandboxConfig()
    assert (config.timeout_seconds, config.max_memory_mb, config.max_output_bytes) == (
        30.0, 256, 100_000,
    )  # fmt: skip
    limits = config.policy().limits
    assert (limits.wall_seconds, limits.memory_bytes) == (30.0, 256 * MIB)
    assert limits.output_bytes == 100_000


def test_cpu_time_grows_with_the_processors() -> None:
    limits = SandboxConfig(timeout_seconds=10, max_cpus=2).policy().limits
    assert (limits.wall_seconds, limits.cpu_seconds, limits.cpus) == (10, 20, 2)


def test_subprocesses_bring_the_hosts_programs() -> None:
    processes = SandboxConfig(allow_subprocess=True).policy().processes
    assert processes.subprocesses
    assert processes.execute == ("/usr/bin", "/usr/sbin", "/usr/lib")


def test_paths_are_expanded_and_denied_ones_left_out(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv", "c.txt"):
        (tmp_path / name).touch()
    config = SandboxConfig(
        allow_file_read=True,
        allowed_paths=[f"{tmp_path}/*.csv"],
        denied_paths=[f"{tmp_path}/b*"],
    )
    filesystem = config.policy().filesystem
    assert filesystem.read == (str(tmp_path / "a.csv"),)
    assert filesystem.write == ()


def test_allow_file_write_makes_the_paths_writable(tmp_path: Path) -> None:
    config = SandboxConfig(allow_file_write=True, allowed_paths=[str(tmp_path)])
    assert config.policy().filesystem.write == (str(tmp_path),)


def test_a_link_is_allowed_as_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "link").symlink_to("real")
    config = SandboxConfig(allow_file_read=True, allowed_paths=[f"{tmp_path}/link"])
    assert config.policy().filesystem.read == (str(tmp_path / "real"),)


def test_a_denied_path_cannot_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "link").symlink_to("real")
    config = SandboxConfig(
        allow_file_read=True, allowed_paths=[f"{tmp_path}/link"], denied_paths=[f"{tmp_path}/real"]
    )
    assert config.policy().filesystem.read == ()


def test_what_lies_below_a_denied_directory_is_denied(tmp_path: Path) -> None:
    """Both ways to overlap: a denied directory may also hold what another glob allows."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").touch()
    config = SandboxConfig(
        allow_file_read=True,
        allowed_paths=[f"{tmp_path}/secret/key"],
        denied_paths=[f"{tmp_path}/secret"],
    )
    try:
        read = config.policy().filesystem.read
    except PolicyError:
        return
    assert read == ()


def test_a_denied_path_under_the_allowed_root_directory_is_refused() -> None:
    config = SandboxConfig(allow_file_read=True, allowed_paths=["/"], denied_paths=["/etc"])
    with pytest.raises(PolicyError, match="the cell's own"):
        config.policy()


def test_a_denied_path_inside_an_allowed_one_is_hidden() -> None:
    config = SandboxConfig(
        allow_file_read=True, allowed_paths=["/usr"], denied_paths=["/usr/share", "/usr/bin"]
    )
    filesystem = config.policy().filesystem
    assert (filesystem.read, filesystem.hidden) == (("/usr",), ("/usr/share", "/usr/bin"))


def test_a_link_that_a_wildcard_matches_and_that_leads_out_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "real").touch()
    (tmp_path / "data" / "inside").symlink_to("real")
    (tmp_path / "data" / "outside").symlink_to("/etc/shadow")
    (tmp_path / "data" / "up").symlink_to(tmp_path)
    config = SandboxConfig(allow_file_read=True, allowed_paths=[f"{tmp_path}/data/*"])
    assert config.policy().filesystem.read == (str(tmp_path / "data" / "real"),)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("nowhere/*", "there is no directory "),
        ("data/x*", "nothing in "),
        ("data/l*", "a symbolic link "),
    ],
)
def test_a_pattern_that_matches_nothing_says_why(pattern: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to("/etc/shadow")
    config = SandboxConfig(allow_file_read=True, allowed_paths=[f"{tmp_path}/{pattern}"])
    with pytest.raises(PolicyError, match="matches nothing on this host") as raised:
        config.policy()
    assert raised.value.hint.startswith(hint)


MISTAKES = {
    "network": ({"allow_network": True}, "allow_network"),
    "relative": ({"allow_file_read": True, "allowed_paths": ["data"]}, "absolute"),
    "empty": ({"allow_file_read": True, "allowed_paths": [""]}, "absolute"),
    "NUL": ({"allow_file_read": True, "allowed_paths": ["/a\0b"]}, "absolute"),
    "nothing there": ({"allow_file_read": True, "allowed_paths": ["/nowhere/*"]}, "matches nothing"),
    "a flag that is no flag": ({"allow_subprocess": "yes"}, "allow_subprocess"),
    "a flag of one": ({"allow_file_read": 1}, "allow_file_read"),
    "an unknown layer": ({"optional_layers": ["seccomp"]}, "seccomp"),
    "env with =": ({"environment": {"A=B": "c"}}, "environment"),
    "env with newline": ({"environment": {"A": "b\nc"}}, "environment"),
    "too little memory": ({"max_memory_mb": 1}, "memory"),
    "too few processes": ({"max_processes": 0}, "processes"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "named"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_a_policy_error_that_names_the_field(
    fields: dict[str, object], named: str
) -> None:
    with pytest.raises(PolicyError, match=named):
        SandboxConfig(**fields).policy()  # type: ignore[arg-type]


@pytest.mark.parametrize("paths", ["/usr", b"/usr", [5], [None]], ids=repr)
def test_paths_of_the_wrong_type_are_refused_clearly(paths: object) -> None:
    with pytest.raises((PolicyError, TypeError)):
        SandboxConfig(allow_file_read=True, allowed_paths=paths).policy()  # type: ignore[arg-type]


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="colour"):
        SandboxConfig(colour="red")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="colour"):
        create_sandbox(colour="red")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "given", "meant"),
    [
        (SandboxConfig, "timeout", "timeout_seconds"),
        (SandboxConfig, "memory", "max_memory_mb"),
        (SandboxConfig, "memory_mb", "max_memory_mb"),
        (create_sandbox, "max_memory", "max_memory_mb"),
        (create_sandbox, "timeout_seconds", "timeout"),
        (Sandbox, "polciy", "policy"),
        (IsolationConfig, "timeout", "timeout_seconds"),
        (ExecutionContext, "memory_mb", "max_memory_mb"),
    ],
)
def test_an_unknown_field_names_the_one_that_was_meant(
    make: Callable[..., object], given: str, meant: str
) -> None:
    with pytest.raises(TypeError, match=f"{given}'; did you mean {meant}\\?"):
        make(**{given: 5})


def test_one_package_is_given_as_text_or_in_a_list() -> None:
    one = SandboxConfig(packages="pandas").policy()
    assert (
        one.packages.require
        == ("pandas",)
        == SandboxConfig(packages=["pandas"]).policy().packages.require
    )


def test_a_config_and_a_policy_together_are_refused() -> None:
    with pytest.raises(PolicyError, match="not both"):
        Sandbox(SandboxConfig(), policy="strict")


def test_an_unknown_profile_names_those_that_exist() -> None:
    with pytest.raises(PolicyError, match="standard, strict"):
        Sandbox(policy="lenient")


@pytest.mark.parametrize(("asked", "given"), [(None, 30.0), (5, 5.0), (29.9, 29.9), (30, 30.0)])
def test_a_timeout_only_narrows(asked: float | None, given: float) -> None:
    assert with_timeout(Limits(), asked).wall_seconds == given


@pytest.mark.parametrize("asked", [256.5, 10**9])
def test_more_than_the_policy_allows_is_an_error(asked: float) -> None:
    """It is never cut without a word, and the hint names the field of a configuration too."""
    with pytest.raises(PolicyError, match="^x: .* is more than limits.* of the policy") as raised:
        with_timeout(Limits(), asked, "x")
    assert "timeout_seconds of SandboxConfig" in raised.value.hint


def test_paths_without_a_permission_are_not_shown_and_that_is_told_once() -> None:
    with pytest.warns(UserWarning, match="allow_file_read=True") as told:
        policy = SandboxConfig(allowed_paths=["/usr/*"], denied_paths=["/etc/*"]).policy()
    assert policy.filesystem.read == policy.filesystem.write == ()
    (warning,) = told
    assert warning.filename == __file__


@pytest.mark.needs("userns")
@pytest.mark.parametrize("writable", [False, True])
def test_what_a_wildcard_matched_may_be_gone_when_a_launcher_starts(
    tmp_path: Path, writable: bool
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "kept").touch()
    tmp_path.chmod(0o755)
    config = SandboxConfig(
        allow_file_read=True,
        allow_file_write=writable,
        allowed_paths=[f"{tmp_path}/*"],
        optional_layers=OPTIONAL,
    )
    policy = config.policy()
    (tmp_path / "b").rmdir()
    code = f"import os; [os.listdir({str(tmp_path)!r}), os.listdir({str(tmp_path / 'a')!r})]"
    with Sandbox(policy=policy, pool=0) as box:
        assert box.execute(code).value == [["a"], ["kept"]]
    literal = SandboxConfig(allow_file_read=True, allowed_paths=[str(tmp_path / "a")])
    policy = literal.policy()
    (tmp_path / "a" / "kept").unlink()
    (tmp_path / "a").rmdir()
    with pytest.raises(PolicyError, match="does not exist"):
        Sandbox(policy=policy, pool=0)
