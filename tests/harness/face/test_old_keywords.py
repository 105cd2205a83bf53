"""Keywords of `Sandbox` from versions before 0.3 go on, with a warning that names what replaces each."""

import asyncio
from typing import Any

import msgspec
import pytest

from cellwright import HostSettings, PauseSettings, PolicyError, PoolSettings, Sandbox
from cellwright.harness.sandbox.faces.old_arguments import _INSTEAD
from cellwright.harness.sandbox.sandbox import _arguments_of
from tests.conftest import policy_named

PAUSES = PauseSettings(keep_seconds=5)
HOST = {
    "python": "3.12", "backend": "oci", "runtime": "crun", "rootfs": "/srv/root", "cgroup_root": "/c",
    "user": "me", "interpreters": {"javascript": "/opt/node"}, "spawned": 5, "language": "sh",
    "package_store": 6, "pausable": True, "pauses": PAUSES,
}  # fmt: skip
LISTS = {"blocked_imports": ["json"], "blocked_builtins": ["eval"]}


def test_every_old_keyword_is_tried_here() -> None:
    assert HOST.keys() <= set(HostSettings.__struct_fields__)
    assert {*HOST, *LISTS, "requirements", "fresh_exec"} == _INSTEAD.keys()


@pytest.mark.parametrize("name", HOST)
def test_a_keyword_of_the_host_is_read_as_its_setting(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"host=HostSettings\({name}=\.\.\.\)"):
        given = _arguments_of(**{name: HOST[name]})
    assert given.host == HostSettings(**{name: HOST[name]})  # type: ignore[arg-type]
    assert given.changed() == {name: HOST[name]}


def test_a_warning_points_at_the_line_of_the_caller() -> None:
    own: Any = {"policy": policy_named("strict"), "pool": 0, "user": None}
    for make in (lambda: Sandbox(**own), lambda: asyncio.run(Sandbox.create(**own))):
        with pytest.warns(DeprecationWarning, match="user") as seen:
            sandbox = make()
        sandbox.close()
        assert [each.filename for each in seen] == [__file__]


def test_old_keywords_do_what_they_did() -> None:
    old: Any = {"fresh_exec": True, **LISTS}
    with pytest.warns(DeprecationWarning, match=r"^Sandbox\(\w+=\.\.\.\) is deprecated"):
        sandbox = Sandbox(policy=policy_named("strict"), pool=0, **old)
    with sandbox:
        assert sandbox._given.pool == PoolSettings(size=0, cells_per_launcher=1)
        assert sandbox.validate_source("import json") == (False, "Blocked import: json")
        assert sandbox.validate_source("import os; exec('1')") == (True, None)
        assert sandbox.execute("6 * 7").value == 42


def test_requirements_are_packages() -> None:
    with pytest.warns(DeprecationWarning, match="give packages="):
        assert _arguments_of(requirements=["six"]).packages == ["six"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"python": "3.12", "host": HostSettings(python="3.13")}, "python: is given twice"),
        ({"requirements": ["six"], "packages": ["six"]}, "requirements: another name for packages"),
        ({"fresh_exec": "no"}, "fresh_exec: must be True or False, got 'no'"),
        ({"blocked_imports": "os"}, "blocked_imports: must be a list"),
        ({"connect": "/run/x", "blocked_imports": ["os"]}, "connect: cannot be combined with blocked_imports"),
        ({"connect": "/run/x", "python": "3.12"}, "connect: cannot be combined with python"),
        ({"python": "3.12", "host": 5}, "host: must be HostSettings, got 5"),
    ],
)  # fmt: skip
def test_an_old_keyword_is_checked_as_before(given: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        Sandbox(**given)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        HostSettings().python = "3.12"  # type: ignore[misc]
    assert msgspec.structs.replace(HostSettings(), python="3.12") == HostSettings(python="3.12")
