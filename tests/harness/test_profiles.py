"""The shipped profiles, each with what it is for and what it refuses, on the real kernel."""

from collections.abc import Iterator

import pytest

from cellwright import Sandbox
from cellwright.policies.policy import Syscalls
from tests.conftest import policy_named


@pytest.fixture(scope="module", params=["tool", "trusted-read"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named(request.param), pool=0) as box:
        yield box


def test_every_profile_computes(sandbox: Sandbox) -> None:
    assert sandbox.execute("import json; json.dumps({'n': sum(range(10))})").value == '{"n": 45}'


def test_a_tool_starts_no_thread_and_trusted_read_does(sandbox: Sandbox) -> None:
    code = "import threading\nt = threading.Thread(target=print)\nt.start(); t.join(); 1"
    result = sandbox.execute(code)
    assert (result.value == 1) == sandbox.policy.processes.threads, result.error


def test_only_trusted_read_reads_what_the_distribution_ships(sandbox: Sandbox) -> None:
    with Sandbox(policy=sandbox.policy, pool=0) as box:
        listed = box.execute("[__import__('glob').glob('/usr/share/*') != []][0]")
    if sandbox.policy.name == "tool":
        assert listed.reason == "validation"  # and the kernel would not show it either
        assert sandbox.plan.binds == ()
    else:
        assert listed.value is True
        assert "Read-only" in str(sandbox.execute("open('/usr/share/x', 'w')").error)


def test_a_group_of_calls_can_be_added_by_name() -> None:
    code = "import ctypes; ctypes.CDLL(None).inotify_init1(0)"
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        assert sandbox.execute(code).value == -1
    extra = Syscalls(groups=("file_watching",))
    with Sandbox(policy=policy_named("strict", syscalls=extra), pool=0) as sandbox:
        assert sandbox.execute(code).value > 2


def test_neither_starts_a_program(sandbox: Sandbox) -> None:
    result = sandbox.execute("import posix; posix.fork()")
    assert not result.ok
    assert result.reason in ("validation", "exception")


COMMIT = "git init -q && echo x >f && git add f && git commit -qm first && git log --format=%an:%s"
WORK = {
    "a pipe": ("mkdir d && touch d/a d/b && ls d | wc -l", "2\n"),
    "a search": ("mkdir -p d && echo hello >d/x && grep -r hello d", "d/x:hello\n"),
    "Python": ("python3 -c 'import sys; print(sys.argv[1])' $((1 + 1))", "2\n"),
    "a script": ("printf '#!/bin/sh\\necho own\\n' >s && chmod +x s && ./s", "own\n"),
}


@pytest.mark.parametrize(("line", "output"), WORK.values(), ids=WORK)
def test_the_workshop_has_what_developers_use(line: str, output: str, workshop: Sandbox) -> None:
    with workshop.session() as session:
        result = session.run(line, shell=True)
        assert (result.stdout, result.exit_code) == (output, 0), result
    assert workshop.run(line, shell=True).stdout == output


@pytest.mark.needs("git")
def test_git_works_in_the_workshop(workshop: Sandbox) -> None:
    test_the_workshop_has_what_developers_use(COMMIT, "cell:first\n", workshop)


def test_commands_and_programs_of_a_session_share_its_files(workshop: Sandbox) -> None:
    with workshop.session() as session:
        session.run("mkdir src && cd src && printf 'one\\n' >a", shell=True)
        assert session.run(["grep", "-rc", "one", "src"]).stdout == "src/a:1\n"
        assert session.execute("open('src/a').read()").value == "one\n"


@pytest.fixture(scope="module")
def workshop() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("workshop"), pool=0) as box:
        yield box
