"""A hostile guest in a session, and bad luck: what one request leaves must not be taken for the next
one's result, and the session, its neighbours and the host go on or say that they do not."""

from collections.abc import Iterator

import pytest

from cellwright import Sandbox, Session
from tests.conftest import policy_named


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("standard"), pool=2) as box:
        yield box


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[Session]:
    with sandbox.session() as opened:
        yield opened


# Who answers


def test_a_child_that_comes_to_the_programs_end_answers_nothing(session: Session) -> None:
    """It would answer this request or the next, and take the one after that away from its parent."""
    forks = (
        "import os\nread, write = os.pipe()\npid = os.fork()\nif not pid: os.read(read, 1)\npid > 0"
    )
    assert session.execute(forks).value is True
    assert session.execute("os.write(write, b'x')\nos.waitpid(pid, 0)[1], 'mine'").value == [
        0,
        "mine",
    ]
    assert [session.execute(f"{number}, pid > 0").value for number in range(5)] == [
        [number, True] for number in range(5)
    ]


def test_a_child_ends_with_the_exit_code_of_its_program(session: Session) -> None:
    forks = "import os, sys\npid = os.fork()\nif not pid: sys.exit(7)\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])"
    assert session.execute(forks).value == 7
