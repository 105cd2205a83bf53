"""From what was seen to a policy in TOML: tables."""

import tomllib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellwright.policies.advice.learning import Lessons, collapse, policy_text
from cellwright.policies.policy import Policy, check_policy

COLLAPSED = {
    "few files stay files": ({"/a/1", "/a/2", "/b/1"}, ["/a/1", "/a/2", "/b/1"]),
    "many become their directory": ({f"/a/{n}" for n in range(4)}, ["/a"]),
    "what lies below is not named twice": ({f"/a/{n}" for n in range(4)} | {"/a/b/c"}, ["/a"]),
    "nothing": (set(), []),
}


@pytest.mark.parametrize(("paths", "named"), COLLAPSED.values(), ids=COLLAPSED)
def test_paths_are_collapsed(paths: set[str], named: list[str]) -> None:
    assert collapse(paths) == named


def policy_of(lessons: Lessons) -> Policy:
    return check_policy(msgspec.convert(tomllib.loads(policy_text("p", lessons)), Policy))


def test_what_needs_nothing_gets_nothing() -> None:
    policy = policy_of(Lessons())
    assert policy.filesystem.read == policy.filesystem.write == policy.processes.execute == ()
    assert not policy.processes.threads
    assert not policy.processes.subprocesses
    assert not policy.network.loopback


def test_every_lesson_is_in_the_policy() -> None:
    lessons = Lessons(
        read={"/srv/a", "/usr/bin/x"}, written={"/srv/out"}, executed={"/usr/bin/x"},
        mapped={"/usr/lib/y.so"}, groups={"threads": "clone", "exec": "execve", "loopback_sockets": "socket",
                "file_watching": "inotify_init1"},
        impossible={"bpf": "loads programs"},
    )  # fmt: skip
    policy = policy_of(lessons)
    assert policy.filesystem.read == ("/srv/a",)
    assert policy.filesystem.write == ("/srv/out",)
    assert policy.processes.execute == ("/usr/bin/x", "/usr/lib/y.so")
    assert policy.processes.threads
    assert policy.processes.subprocesses
    assert policy.network.loopback
    assert policy.syscalls.groups == ()  # with subprocesses come inotify's calls
    assert "# bpf was refused and stays refused: loads programs" in policy_text("p", lessons)


def test_a_program_that_only_watches_files_may_start_no_other() -> None:
    policy = policy_of(Lessons(groups={"file_watching": "inotify_init1"}))
    assert policy.syscalls.groups == ("file_watching",)
    assert not policy.processes.subprocesses


SOCKETS = {"local_sockets": "socket", "loopback_sockets": "socket"}
SOCKET_SETTINGS = {
    "a resolver's": (Lessons(groups=SOCKETS, hosts={"a.test"}), False, False),
    "a server's": (Lessons(groups=SOCKETS, hosts={"a.test"}, serves=True), False, True),
    "of a program that looked up no host": (Lessons(groups=SOCKETS), False, True),
    "beside programs": (Lessons(groups={**SOCKETS, "exec": "execve"}, hosts={"a"}), True, False),
    "a Unix one": (Lessons(groups={"local_sockets": "socket", "exec": "execve"}), True, False),
}


@pytest.mark.parametrize(
    ("lessons", "subprocesses", "loopback"), SOCKET_SETTINGS.values(), ids=SOCKET_SETTINGS
)
def test_sockets_need_the_fewest_settings(
    lessons: Lessons, subprocesses: bool, loopback: bool
) -> None:
    policy = policy_of(lessons)
    assert policy.processes.subprocesses == subprocesses
    assert policy.network.loopback == loopback


@given(st.sets(st.text(st.characters(exclude_categories=("Cs",)), min_size=1)))
def test_any_name_of_a_file_is_valid_toml(names: set[str]) -> None:
    lessons = Lessons(read={f"/srv/{name.replace('/', '_')}" for name in names})
    read = tomllib.loads(policy_text("p", lessons)).get("filesystem", {}).get("read", [])
    assert all(path.startswith("/srv") for path in read)
