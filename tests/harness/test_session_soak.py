"""Many sessions and calls at once: every answer is its own request's, and nothing is left of any."""

import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from cellwright import (
    BusyError,
    CellwrightError,
    Sandbox,
    SandboxResult,
    Session,
    SessionLost,
    SessionSettings,
)
from cellwright.testing import inspect
from tests.conftest import policy_named, soon
from tests.runner.test_leftovers import held, nothing_left_of, nothing_more_than

SESSIONS, THREADS, REQUESTS = 20, 8, 240

# Each says what it was given in every way, and leaves it: in a variable, in the environment, in a file.
PROGRAMS = {
    "python": "import os, sys\nprint(given, os.environ['NONCE'], sys.stdin.read(), open('in').read())\n"
    "open(f'made-{given}', 'w').write(given)\nos.environ['LEFT'] = given\nkept = given",
    "javascript": "var fs = require('fs'); console.log(given, process.env.NONCE, fs.readFileSync(0, 'utf8'),"
    " fs.readFileSync('in', 'utf8')); fs.writeFileSync('made-' + given, given); process.env.LEFT = given;"
    " var kept = given",
    "ruby": "puts [given, ENV['NONCE'], STDIN.read, File.read('in')].join(' ')\n"
    "File.write('made-' + given, given)\nENV['LEFT'] = given\nkept = given",
    "bash": "read -r line; read -r file < in; echo \"$given $NONCE $line $file\"; printf %s \"$given\" > \"made-$given\"\n"
    'export LEFT=$given; kept=$given',
    "sh": "read -r line; read -r file < in; echo \"$given $NONCE $line $file\"; printf %s \"$given\" > \"made-$given\"\n"
    'LEFT=$given; export LEFT; kept=$given',
}  # fmt: skip
INTERPRETERS = {"javascript": "node", "ruby": "ruby", "bash": "bash", "sh": "sh"}
LANGUAGES = [each for each in PROGRAMS if shutil.which(INTERPRETERS.get(each, "python3"))]
# What the request before left, in that order: in a variable, in the environment, in files.
KEPT = {
    "python": "print(kept, os.environ['LEFT'], *os.listdir('.'))",
    "javascript": "console.log(kept, process.env.LEFT, ...fs.readdirSync('.'))",
    "ruby": "puts [kept, ENV['LEFT'], *Dir.children('.')].join(' ')",
    "bash": 'echo "$kept $LEFT" *',
    "sh": 'echo "$kept $LEFT" *',
}
_NONCE = re.compile(r"nonce[0-9a-f]{16}")


class Speaker:
    """A session, or a sandbox for single calls, and what was last said to it."""

    def __init__(
        self, execute: Callable[..., SandboxResult], language: str, *, stays: bool
    ) -> None:
        self._execute = execute
        self._language = language
        self._lock = threading.Lock()
        self._stays = stays
        self.kept: str | None = None

    def ask(self) -> None:
        with self._lock:
            nonce = "nonce" + os.urandom(8).hex()
            result = self._execute(
                PROGRAMS[self._language], self._language, stdin=nonce + "\n",
                inputs={"given": nonce}, env={"NONCE": nonce}, files={"in": nonce + "\n"},
                collect=["made-*"],
            )  # fmt: skip
            assert result.ok, (self._language, result)
            assert result.stdout.split() == [nonce] * 4
            assert [file.path for file in result.files] == [f"made-{nonce}"]
            said = set(_NONCE.findall(str(result.to_dict() | {"artifacts": ()})))
            assert said == {nonce}
            assert {each.data for each in result.artifacts} >= {nonce.encode()}
            if self._stays:
                self._check_what_was_kept(nonce)

    def _check_what_was_kept(self, nonce: str) -> None:
        held = self._execute(KEPT[self._language], self._language).stdout.split()
        assert held[:2] == [nonce, nonce]
        made = {name for name in held[2:] if name != "in"}
        assert f"made-{nonce}" in made
        assert self.kept is None or f"made-{self.kept}" in made
        self.kept = nonce


@pytest.mark.slow
def test_every_answer_holds_its_own_nonce_and_no_other() -> None:
    ours, settings = held(), SessionSettings(alive=SESSIONS)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=settings) as sandbox:
        for language in LANGUAGES:
            # makes the objects that are made only once
            Speaker(sandbox.execute, language, stays=False).ask()
        with sandbox.session() as session:
            session.execute("1")
        with nothing_left_of(sandbox):
            sessions = [_opened(sandbox, number) for number in range(SESSIONS)]
            speakers = [Speaker(each.execute, language, stays=True) for each, language in sessions]
            speakers += [Speaker(sandbox.execute, each, stays=False) for each in LANGUAGES * 2]
            with ThreadPoolExecutor(THREADS) as threads:
                list(threads.map(lambda n: speakers[n * 7 % len(speakers)].ask(), range(REQUESTS)))
            for session, _ in sessions:
                session.close()
    assert soon(lambda: nothing_more_than(ours))


def _opened(sandbox: Sandbox, number: int) -> tuple[Session, str]:
    language = LANGUAGES[number % len(LANGUAGES)]
    return sandbox.session(language=language), language


# Come and go


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)


@pytest.mark.slow
@pytest.mark.needs("real_cpu")
def test_a_thousand_sessions_leave_nothing() -> None:
    def serve(number: int) -> None:
        with sandbox.session(f"of {number % 10}" if number % 3 else None) as session:
            session.execute(f"x = {number}\nopen('f', 'w').write('x' * 1000)")
            assert session.execute("x").value == number
            if number % 5 == 0:
                session.execute("import os\nos._exit(0)")

    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        for number in range(100):
            serve(number)
        memory = _resident_mib()
        with nothing_left_of(sandbox):
            for number in range(1000):
                serve(number)
        assert _resident_mib() - memory < 8
        assert inspect(sandbox).open_sessions() <= 1


@pytest.mark.slow
@pytest.mark.needs("real_cpu")
def test_eviction_under_many_threads_mixes_nothing_up() -> None:
    """Sessions go from under their users all the time: each answer is right, or there is none."""
    answered, turned_away = [], []

    def work(thread: int) -> None:
        for number in range(25):
            nonce = f"nonce{thread}.{number}"
            try:
                session = sandbox.session(f"shared {number % 3}" if number % 2 else None)
                result = session.execute(f"x = {nonce!r}\nx", files={"f": nonce})
                assert result.value == nonce or result.session_lost, result
                assert nonce.encode() == session.download("f") or number % 2
                answered.append(nonce)
            except (SessionLost, BusyError) as error:
                turned_away.append(error)

    settings = SessionSettings(alive=4, idle_seconds=0.01, evict=True)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=settings) as sandbox:
        with sandbox.session() as session:
            session.execute("1")
        with nothing_left_of(sandbox):
            with ThreadPoolExecutor(64) as threads:
                list(threads.map(work, range(64)))
            turned_away.clear()  # their tracebacks hold frames
            assert len(answered) > 100
        with sandbox.session() as session:
            assert session.execute("6 * 7").value == 42


@pytest.mark.slow
def test_forks_are_made_while_their_parent_runs() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox, sandbox.session() as session:
        session.execute("log = []")
        with ThreadPoolExecutor(4) as threads:
            calls = [
                threads.submit(session.execute, f"log.append({n})\nlen(log)") for n in range(30)
            ]
            branches = [session.fork() for _ in range(4)]
            assert all(call.result().ok for call in calls)
        log = session.execute("log").value
        for branch in branches:
            with branch:
                assert branch.diverged == ()
                begun = branch.execute("log").value
                assert begun == log[: len(begun)]


def test_a_request_that_waits_is_served_and_not_evicted() -> None:
    settings = SessionSettings(alive=1)
    with Sandbox(policy=policy_named("strict"), pool=0, sessions=settings) as sandbox:
        session = sandbox.session()
        running = session.start("print('up', flush=True)\nimport time\ntime.sleep(60)")
        next(running.output())
        waiting = session.start("6 * 7")
        assert soon(lambda: len(session.cell._concurrency._queue) == 1)
        session.cell.clock.settings = settings._replace(idle_seconds=0.0)  # its time is over
        assert not session.cell.try_to_evict("it was idle")
        with pytest.raises(BusyError, match="1 sessions are alive"):
            sandbox.session()
        running.cancel()
        assert running.result().reason == "cancelled"
        assert waiting.result().value == 42


def test_a_sandbox_that_closes_under_its_sessions_leaves_nothing() -> None:
    def use(sandbox: Sandbox) -> None:
        try:
            while True:
                with sandbox.session() as session:
                    session.execute("1")
        except CellwrightError:
            pass

    before = held()
    for _ in range(5):
        sandbox = Sandbox(policy=policy_named("strict"), pool=2)
        threads = [threading.Thread(target=use, args=[sandbox]) for _ in range(4)]
        for thread in threads:
            thread.start()
        with sandbox.session() as session:
            session.execute("1")
        sandbox.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert soon(lambda: nothing_more_than(before))


def test_a_second_thread_that_closes_a_launcher_waits_for_its_end_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would remove cgroups in which processes still die."""
    from cellwright.runner.launching import launcher_process as launching

    waits, goes_on = threading.Event(), threading.Event()
    before = launching.channel.has_news

    def slowly(descriptor: int, seconds: float = 0.0) -> bool:
        waits.set()
        assert goes_on.wait(60)
        return before(descriptor, seconds)

    ended: list[str] = []
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        launcher = inspect(sandbox).supervisor.generation.launcher
        monkeypatch.setattr(launching.channel, "has_news", slowly)
        threads = [
            threading.Thread(target=lambda: (launcher.close(), ended.append("closed")))
            for _ in range(2)
        ]
        threads[0].start()
        assert waits.wait(60)
        threads[1].start()
        threads[1].join(0.2)
        assert ended == []
        goes_on.set()
        for thread in threads:
            thread.join(60)
        assert ended == ["closed", "closed"]
        monkeypatch.undo()
