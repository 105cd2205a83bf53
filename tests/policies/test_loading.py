"""Policies in TOML: what they extend, and errors in them."""

from pathlib import Path

import pytest

from cellwright import PolicyError
from cellwright.policies.policy import Limits, Policy, Validation, check_policy
from cellwright.policies.profiles.loading import load_policy, policy_of_data, profile_names


def written(directory: Path, text: str, name: str = "p.toml") -> str:
    (directory / name).write_text(text)
    return str(directory / name)


def test_what_extends_says_only_what_differs(tmp_path: Path) -> None:
    text = 'extends = "standard"\nname = "mine"\n[limits]\nwall_seconds = 5.0\n[processes]\nexecute = ["/usr/bin"]\n'
    policy = load_policy(written(tmp_path, text))
    assert (policy.name, policy.limits.wall_seconds) == ("mine", 5.0)
    assert policy.processes.subprocesses
    assert policy.processes.execute == ("/usr/bin",)  # a list takes the place of a list
    assert policy.filesystem.system_files


def test_a_list_that_begins_with_plus_adds_to_the_list_of_the_parent(tmp_path: Path) -> None:
    standard = load_policy("standard").processes.execute
    lists = '[processes]\nexecute = ["+", "/opt/tools"]\n[filesystem]\nread = ["+", "/opt/data"]\n'
    policy = load_policy(written(tmp_path, f'extends = "standard"\n{lists}'))
    assert policy.processes.execute == (*standard, "/opt/tools")
    assert policy.filesystem.read == ("/opt/data",)
    alone = load_policy(written(tmp_path, '[filesystem]\nread = ["+", "/opt/data"]\n'))
    assert alone.filesystem.read == ("/opt/data",)


def test_a_file_beside_it_may_be_extended(tmp_path: Path) -> None:
    written(tmp_path, 'extends = "strict"\n[limits]\nprocesses = 7\n', "base.toml")
    policy = load_policy(written(tmp_path, 'extends = "base.toml"\n[limits]\nopen_files = 99\n'))
    assert (policy.limits.processes, policy.limits.open_files) == (7, 99)


def test_extending_in_a_circle_is_an_error(tmp_path: Path) -> None:
    written(tmp_path, 'extends = "b.toml"', "a.toml")
    path = written(tmp_path, 'extends = "a.toml"', "b.toml")
    with pytest.raises(PolicyError, match="extends: must not lead back"):
        load_policy(path)


WRONG = {
    "unknown key": ("name = 'x'\n\n[limits]\ncpus = 1.0\nmemory = 5\n", 5, "memory"),
    "unknown section": ("name = 'x'\n[filesytem]\nread = []\n", 2, "filesytem"),
    "wrong type": ("[filesystem]\nread = 'x'\n", 2, "read"),
    "out of range": ("[limits]\n# a comment\nwall_seconds = -1.0\n", 3, "wall_seconds"),
    "contradiction": ("[processes]\nexecute = ['/usr/bin']\n", 2, "subprocesses"),
    "no layer": ("name = 'x'\noptional_layers = ['seccomp']\n", 2, "seccomp"),
    "a group of calls that follows from elsewhere": ("[syscalls]\ngroups = ['exec']\n", 2, "exec"),
    "extends a number": ("name = 'x'\nextends = 5\n", 2, "extends"),
    "a bad rule": (
        "[tools]\ncalls = 1\n[[tools.rules]]\ntool = '*'\neffect = 'maybe'\n",
        5,
        "maybe",
    ),
    "a bad second rule": (
        "[[tools.rules]]\ntool = '*'\neffect = 'deny'\n[[tools.rules]]\ntool = 1\neffect = 'deny'\n",
        5,
        "tools.rules[1].tool: must be text",
    ),
    "a bad mode": ("[validation]\nmode = 'maybe'\n", 2, "maybe"),
}


@pytest.mark.parametrize(("text", "line", "key"), WRONG.values(), ids=WRONG)
def test_an_error_names_file_line_and_key(tmp_path: Path, text: str, line: int, key: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PolicyError) as error:
        load_policy(path)
    assert f"{path}, line {line}:" in str(error.value)
    assert key in str(error.value)


@pytest.mark.parametrize(
    ("section", "key"), [("network", "allow"), ("network", "deny"), ("tools", "rules")]
)
def test_a_rule_that_is_text_is_told_how_rules_are_written(section: str, key: str) -> None:
    with pytest.raises(PolicyError, match=rf"write a table .*: \[\[{section}\.{key}\]\]"):
        policy_of_data({section: {key: ["api.example.org"]}})


def test_every_profile_carries_reasons() -> None:
    import cellwright.policies.profiles.loading as loading

    for name in profile_names():
        text = (loading._PROFILES / f"{name}.toml").read_text()
        assert text.startswith(("# For ", "# The default"))
        assert load_policy(name).name == name


def test_an_unknown_field_of_a_rule_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(PolicyError, match=r"did you mean ports\?"):
        policy_of_data({"network": {"allow": [{"host": "api.example.org", "port": 443}]}})
    with pytest.raises(PolicyError, match=r"did you mean effect\?"):
        policy_of_data({"tools": {"rules": [{"tool": "*", "efect": "deny"}]}})


NO_FIELDS = {
    "validation.mode: must be one of off, advise, enforce, got 'enforced'\nhint: did you mean enforce?": {
        "validation": {"mode": "enforced"}
    },
    "network.allow[0].schemes[0]: must be one of http, https, tcp, got 'htps'\nhint: did you mean https?": {
        "network": {"allow": [{"host": "a.example", "schemes": ["htps"]}]}
    },
    'limits.wall_seconds: must be a number, or text such as "90s" or "10m", got \'30\'': {
        "limits": {"wall_seconds": "30"}
    },
    "filesystem.read[0]: must be text, got a whole number": {"filesystem": {"read": [1]}},
    "limit: unknown field\nhint: did you mean limits?": {"limit": {}},
    "limits.cpu: unknown field\nhint: did you mean cpus?": {"limits": {"cpu": 1}},
    "wall_seconds: unknown field\nhint: did you mean limits.wall_seconds?": {"wall_seconds": 1},
    "limits.name: unknown field\nhint: did you mean name outside of every table?": {
        "limits": {"name": "a"}
    },
    "network.deny[0].host: is missing": {"network": {"deny": [{}]}},
    "environment[...]: must be text, got a whole number": {"environment": {"A": 1}},
}


@pytest.mark.parametrize(("message", "data"), NO_FIELDS.items(), ids=NO_FIELDS)
def test_an_error_of_the_data_begins_with_the_field(message: str, data: dict[str, object]) -> None:
    with pytest.raises(PolicyError) as error:
        policy_of_data(data)
    assert str(error.value) == message


def test_an_unknown_mode_of_a_policy_made_in_python_is_told_the_same() -> None:
    with pytest.raises(PolicyError, match=r"^validation\.mode: .*\nhint: did you mean enforce\?"):
        check_policy(Policy(validation=Validation(mode="enforced")))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "number"),
    [("2GB", 2 << 30), ("2G", 2 << 30), ("1.5 GiB", 3 << 29), ("512m", 512 << 20), ("64KB", 65536)],
)
def test_sizes_have_units(written: str, number: int) -> None:
    assert policy_of_data(
        {"limits": {"memory_bytes": "1G", "workspace_bytes": written}}
    ).limits == (Limits(memory_bytes=1 << 30, workspace_bytes=number))


@pytest.mark.parametrize(
    ("written", "number"), [("10m", 600.0), ("90s", 90.0), ("1.5h", 5400.0), ("500ms", 0.5)]
)
def test_durations_have_units(written: str, number: float) -> None:
    assert policy_of_data({"limits": {"wall_seconds": written}}).limits.wall_seconds == number


@pytest.mark.parametrize(("field", "example"), [("memory_bytes", "512M"), ("wall_seconds", "10m")])
def test_an_unknown_unit_is_an_error_at_its_line(field: str, example: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'name = "mine"\n[limits]\n{field} = "2 parsecs"\n')
    with pytest.raises(
        PolicyError, match=rf"mine.toml, line 3: limits.{field}: .*{example}.*2 parsecs"
    ):
        load_policy(str(file))
