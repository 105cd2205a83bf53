"""A sandbox with workers returns what a sandbox without them returns, and leaves as little."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cellwright import PolicyError, Sandbox, SandboxResult
from cellwright.harness.sandbox.local import LocalCells
from cellwright.harness.sandbox.workers import worker_frames
from cellwright.harness.sandbox.workers.worker_cells import WorkerCells
from cellwright.policies.errors import LauncherLost
from cellwright.runner.audit.log import AuditLog
from cellwright.runner.audit.verification import read, verify
from tests.conftest import policy_named, soon
from tests.runner.test_leftovers import cgroups_of, descendants

PATIENCE = 60
PROGRAMS: tuple[dict[str, object], ...] = (
    {"code": "print('hi'); 6 * 7"},
    {"code": "1 / 0"},
    {"code": "while True: pass", "timeout": 0.3},
    {"code": "import sys; sys.exit(3)"},
    {"code": "import socket; socket.create_connection(('10.0.0.1', 80))"},
    {"code": "open('/etc/shadow')"},
    {"code": "open('made.txt', 'w').write('x'); n + 1", "inputs": {"n": 2**70}},
    {"code": "print(open('in.txt').read())", "files": {"in.txt": "given"}},
    {"code": "open('a.bin', 'wb').write(bytes(300000))", "collect": ["*.bin"]},
    {"code": "print(input())", "stdin": "line\n"},
    {"code": "import sys; print(sys.argv[1:])", "arguments": ["a", "b"], "filename": "p.py"},
    {"code": "print('x' * 200000)"},
    {"code": "```python\n  print(1)\n```"},
    {"code": "echo $A; exit 4", "language": "bash", "env": {"A": "é"}},
    {"code": b"print('bytes')"},
    {"code": "'\ud800'"},
)


def facts(result: SandboxResult) -> tuple[object, ...]:
    """Return the parts of a result that do not differ from one run to the next."""
    return (
        result.status, result.reason, result.value, result.stdout, result.stderr, result.error,
        result.exit_code, result.files, result.artifacts, result.violations, result.layers,
        result.truncated, result.notices, result.hints, result.audited,
    )  # fmt: skip


@pytest.fixture(scope="module")
def two() -> Iterator[Sandbox]:
    with Sandbox(policy=policy_named("standard"), pool=2, workers=2) as sandbox:
        yield sandbox


def workers_of(sandbox: Sandbox) -> WorkerCells:
    cells = sandbox._cells
    assert isinstance(cells, WorkerCells)
    return cells


def pids_of(sandbox: Sandbox) -> list[int]:
    return [each.pid for each in workers_of(sandbox)._workers.all()]


def test_programs_return_what_they_return_without_workers(two: Sandbox) -> None:
    with Sandbox(policy=policy_named("standard"), pool=2) as alone:
        for program in PROGRAMS:
            assert facts(two.execute(**program)) == facts(alone.execute(**program)), program


def test_calls_of_many_threads_use_every_worker(two: Sandbox) -> None:
    with ThreadPoolExecutor(16) as pool:
        values = pool.map(lambda n: two.execute(f"{n} * 2").value, range(64))
        assert list(values) == [n * 2 for n in range(64)]
    assert all(each.used for each in workers_of(two)._workers.all())


MOST_CALLS = 58  # 56 measured: checks, two records, and a round trip
# Two ids are drawn, a fork of this process is looked for twice, and a connection is tried, written to and read.
MOST_SYSTEM_CALLS = {"urandom": 2, "getpid": 2, "poll": 1, "send": 1, "recv": 1}


def test_a_call_takes_few_steps_of_this_process(two: Sandbox) -> None:
    python: list[str] = []
    kernel: Counter[str] = Counter()

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            python.append(frame.f_code.co_name)
        elif event == "c_call" and function.__name__ in {
            *MOST_SYSTEM_CALLS,
            "sendmsg",
            "recvmsg",
            "fstat",
        }:
            kernel[function.__name__] += 1

    for _ in range(4):  # imports, and a connection to each worker
        two.execute("1 + 1")
    python.clear()
    sys.setprofile(note)
    try:
        two.execute("1 + 1")
    finally:
        sys.setprofile(None)
    assert len(python) <= MOST_CALLS, python
    assert kernel <= Counter(MOST_SYSTEM_CALLS), kernel


def test_one_worker_is_this_process() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0, workers=1) as sandbox:
        assert type(sandbox._cells) is LocalCells


def test_a_default_sandbox_imports_nothing_of_workers() -> None:
    program = (
        "import sys; from cellwright import Sandbox\n"
        "with Sandbox(pool=0) as sandbox: sandbox.execute('1')\n"
        "print([name for name in sys.modules if 'worker' in name and 'cellwright' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("number", [0, -1, 1.5, "two", True, 1000])
def test_an_invalid_number_of_workers_is_refused(number: object) -> None:
    with pytest.raises(PolicyError, match="workers"):
        Sandbox(workers=number)  # type: ignore[arg-type]


def test_output_comes_as_the_program_writes_it(two: Sandbox) -> None:
    chunks: list[tuple[str, bytes]] = []
    two.execute(
        "import sys; print('out'); print('err', file=sys.stderr)",
        on_output=lambda stream, data: chunks.append((stream, data)),
    )
    assert sorted(chunks) == [("stderr", b"err\n"), ("stdout", b"out\n")]


def test_a_call_is_cancelled_while_it_runs(two: Sandbox) -> None:
    cancel = os.eventfd(0)
    result = two.execute(
        "print('began', flush=True)\nimport time; time.sleep(60)",
        on_output=lambda *_: os.eventfd_write(cancel, 1),
        cancel=cancel,
    )
    os.close(cancel)
    assert result.reason == "cancelled"


def test_running_calls_are_counted_together() -> None:
    from cellwright import BusyError
    from cellwright.runner.settings import PoolSettings

    pool = PoolSettings(size=1, running=2, queue_seconds=0.05)
    with (
        Sandbox(policy=policy_named("strict"), pool=pool, workers=2) as sandbox,
        ThreadPoolExecutor(2) as threads,
    ):
        cancel, began = os.eventfd(0), threading.Semaphore(0)
        program = "print(flush=True)\nimport time; time.sleep(60)"
        calls = [
            threads.submit(
                sandbox.execute, program, cancel=cancel, on_output=lambda *_: began.release()
            )
            for _ in range(2)
        ]
        for _ in calls:
            assert began.acquire(timeout=PATIENCE)
        with pytest.raises(BusyError):
            sandbox.execute("1")
        os.eventfd_write(cancel, 1)
        assert [each.result().reason for each in calls] == ["cancelled"] * 2
        os.close(cancel)


def test_tools_run_in_the_process_of_the_sandbox() -> None:
    def where(text: str) -> list[object]:
        "Return a text with the process that was called."
        return [text, os.getpid()]

    with Sandbox(
        policy=policy_named("standard"), pool=1, tools=[where], workers=2
    ) as sandbox, ThreadPoolExecutor(4) as threads:  # fmt: skip
        program = "from tools import where\n[where(text=str(n)) for n in range(3)]"
        for result in threads.map(sandbox.execute, [program] * 4):
            assert result.value == [[str(n), os.getpid()] for n in range(3)]
        stubs = sandbox.execute("import os; sorted(os.listdir('/tools'))").value
        assert "where.py" in stubs


def test_one_trail_has_all_calls_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
    with (
        AuditLog(path=path) as log,
        Sandbox(policy=policy_named("strict"), pool=1, audit=log, workers=2) as sandbox,
        ThreadPoolExecutor(4) as threads,
    ):
        results = list(threads.map(sandbox.execute, ["open('/etc/shadow')", "1"] * 8))
    assert verify(path).ok
    entries = list(read(path))
    assert len({each.sandbox_id for each in entries}) == 1
    ended = [each for each in entries if each.action in ("ok", "error")]
    began = [each for each in entries if each.action == "start"]
    ids = sorted(each.execution_id for each in results)
    assert sorted(each.details["execution_id"] for each in ended) == ids
    assert sorted(each.details["execution_id"] for each in began) == ids
    assert all(each.audited for each in results)


def test_a_killed_worker_is_replaced_and_its_calls_raise() -> None:
    with (
        Sandbox(policy=policy_named("strict"), pool=1, workers=2) as sandbox,
        ThreadPoolExecutor(2) as threads,
    ):
        before, began, cancel = pids_of(sandbox), threading.Semaphore(0), os.eventfd(0)
        program = "print(flush=True)\nimport time; time.sleep(600)"
        calls = [
            threads.submit(
                sandbox.execute, program, cancel=cancel, on_output=lambda *_: began.release()
            )
            for _ in range(2)
        ]
        for _ in calls:
            assert began.acquire(timeout=PATIENCE)
        os.kill(before[0], signal.SIGKILL)
        lost = [each for each in as_completed(calls, PATIENCE) if not os.eventfd_write(cancel, 1)]
        assert type(lost[0].exception()) is LauncherLost
        assert lost[1].result().reason == "cancelled"
        os.close(cancel)
        assert sandbox.execute("2").value == 2
        assert soon(lambda: len(pids_of(sandbox)) == 2)
        assert before[0] not in pids_of(sandbox)
        lost = [each.action for each in sandbox.audit.get_entries(category="execution")]
        assert lost.count("lost") == 1


def test_a_worker_that_is_killed_while_it_is_greeted_was_asked_nothing() -> None:
    with (
        Sandbox(policy=policy_named("strict"), pool=0, workers=2) as sandbox,
        ThreadPoolExecutor(1) as threads,
    ):
        worker = workers_of(sandbox)._workers.all()[1]
        connect, connected = worker.requests.pool._connect, threading.Event()

        def noted() -> socket.socket:
            made = connect()
            connected.set()
            return made  # type: ignore[return-value]

        worker.requests.pool._connect = noted
        os.kill(worker.pid, signal.SIGSTOP)
        state = threads.submit(worker.ask, worker_frames.GetState(), worker_frames.CellsState)
        assert connected.wait(PATIENCE)
        os.kill(worker.pid, signal.SIGKILL)
        lost = state.exception(PATIENCE)
        assert isinstance(lost, LauncherLost)
        assert not lost.cell_began


def test_nothing_is_left_after_close() -> None:
    with Sandbox(policy=policy_named("strict"), pool=1, workers=2) as sandbox:
        sandbox.execute("1")
        workers = pids_of(sandbox)
        below = [each for pid in workers for each in [pid, *descendants(pid)]]
        assert len(below) > 4
    assert not [each for each in below if os.path.exists(f"/proc/{each}")]
    assert not [each for pid in workers for each in cgroups_of(pid)]


def test_workers_end_when_the_process_of_the_sandbox_is_killed() -> None:
    program = (
        "import sys; from cellwright import Sandbox\n"
        "sandbox = Sandbox(pool=1, workers=2); sandbox.execute('1')\n"
        "print(*[each.pid for each in sandbox._cells._workers.all()], flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        workers = [int(each) for each in process.stdout.readline().split()]
        below = [each for pid in workers for each in [pid, *descendants(pid)]]
        process.kill()
    assert len(below) > 4
    assert soon(lambda: not [each for each in below if os.path.exists(f"/proc/{each}")])
    assert soon(lambda: not [each for pid in workers for each in cgroups_of(pid)])


def test_a_worker_that_cannot_start_raises_what_the_sandbox_raises() -> None:
    with pytest.raises(PolicyError, match="interpreters"):
        Sandbox(workers=2, host=_settings(interpreters={"bash": "/none"}))
    with pytest.raises(PolicyError, match="cgroup_root"):
        Sandbox(workers=2, host=_settings(cgroup_root=3))


def _settings(**given: object) -> object:
    from cellwright import HostSettings

    return HostSettings(**given)  # type: ignore[arg-type]
