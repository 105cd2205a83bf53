"""`Sandbox(connect=...)` has the same calls, results and exceptions as a local Sandbox."""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cellwright import (
    ClosedError,
    HostSettings,
    LaunchError,
    PolicyError,
    Sandbox,
    SandboxConfig,
    SandboxResult,
    SandboxStatus,
    SessionLost,
)
from cellwright.harness.runs.durable_runs import RunPaused
from cellwright.harness.sandbox.remote.call_frames import error_of, failure_of
from cellwright.harness.sandbox.remote.frames import Failure
from cellwright.policies import errors
from cellwright.policies.policy import Policy
from cellwright.results import Executable
from cellwright.runner.messages import decode, encode
from tests.conftest import ROOT
from tests.forked import exit_code_of
from tests.harness.servers.daemon.daemons import Daemon, serving

pytestmark = pytest.mark.needs("userns")

PROGRAMS: tuple[tuple[Any, dict[str, Any]], ...] = (
    ("print('hi')\n6 * 7", {}),
    ("2 ** 100, 0.1, None, 'ü\\U0001f600', [1, {'a': ()}]", {}),
    ("import sys; print(x, input(), open('f').read(), file=sys.stderr); x", {"inputs": {"x": {"y": [1.5, 2**70]}}, "stdin": "line", "files": {"f": b"\xff"}}),
    ("import os; os.environ['A']", {"env": {"A": "b"}}),
    ("import sys; sys.argv", {"arguments": ["a b", "ü"]}),
    ("open('a.csv', 'w').write('1'); open('b', 'w').write('2')", {"collect": ["*.csv"]}),
    ("raise ValueError('no')", {}),
    ("import os; os.abort()", {}),
    ("import sys; sys.exit(3)", {}),
    ("while True: pass", {"timeout": 0.2}),
    ("hog = bytearray(1 << 30)", {}),
    ("open('/etc/shadow')", {"trace_id": "mine"}),
    ("print('x' * 300_000)", {}),
    (b"\xef\xbb\xbf1", {}),
    ("", {"trace_id": "refused"}),
    ("\ud800", {}),
    (b"\xff", {}),
    ("x\0", {}),
)  # fmt: skip

# values that differ from call to call
OWN = dict.fromkeys(("execution_time", "usage", "phases", "execution_id", "pool_hit", "trace_id", "traceparent"))  # fmt: skip


def comparable(result: SandboxResult) -> dict[str, Any]:
    plain = {
        name: value for name, value in msgspec.structs.asdict(result).items() if name not in OWN
    }
    violations = [(seen.syscall, seen.arguments, seen.rule) for seen in result.violations]
    return plain | {"violations": violations}


@pytest.mark.needs("cgroup")
@pytest.mark.parametrize(("code", "given"), PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_result_is_that_of_a_sandbox_of_our_own(
    connected: Sandbox, strict: Sandbox, code: Any, given: dict[str, Any]
) -> None:
    ours, theirs = strict.execute(code, **given), connected.execute(code, **given)
    assert comparable(theirs) == comparable(ours)
    assert theirs.trace_id == given.get("trace_id") or not given.get("trace_id")


def test_other_languages_and_unknown_ones(connected: Sandbox, strict: Sandbox) -> None:
    assert connected.execute("echo hello", "bash").stdout == "hello\n"
    assert connected.execute("x", "cobol").error == strict.execute("x", "cobol").error


MISTAKES: tuple[dict[str, Any], ...] = (
    {"stdin": 1}, {"inputs": []}, {"inputs": {"x": object()}}, {"inputs": {"1": 1}}, {"inputs": {"x": float("nan")}},
    {"files": {"../x": b""}}, {"files": {"x": 1}}, {"env": {"=": ""}}, {"timeout": -1}, {"timeout": "1"}, {"trace_id": 1},
    {"collect": "*"}, {"arguments": "a"}, {"nonsense": 1}, {"code": 1},
)  # fmt: skip


@pytest.mark.parametrize("given", MISTAKES, ids=str)
def test_a_mistake_is_the_same_exception(
    connected: Sandbox, strict: Sandbox, given: dict[str, Any]
) -> None:
    given = {"code": "1"} | given
    with pytest.raises((PolicyError, TypeError)) as ours:
        strict.execute(**given)
    with pytest.raises((PolicyError, TypeError)) as theirs:
        connected.execute(**given)
    assert (type(theirs.value), str(theirs.value)) == (type(ours.value), str(ours.value))


def test_output_comes_as_it_is_made(connected: Sandbox) -> None:
    seen: list[tuple[str, bytes]] = []
    result = connected.execute(
        "import sys; print('out', flush=True); print('err', file=sys.stderr)",
        on_output=lambda stream, data: seen.append((stream, data)),
    )
    assert sorted(seen) == [("stderr", b"err\n"), ("stdout", b"out\n")]
    assert (result.stdout, result.stderr) == ("out\n", "err\n")


def test_a_callback_that_raises_ends_the_execution(connected: Sandbox) -> None:
    def refuse(stream: str, data: bytes) -> None:
        raise KeyError(stream)

    with pytest.raises(KeyError):
        connected.execute("while True: print('x' * 1000)", on_output=refuse)
    assert connected.execute("1").ok


def test_a_started_run_is_read_and_cancelled(connected: Sandbox) -> None:
    run = connected.start("import time; print('up', flush=True); time.sleep(300)")
    assert next(run.output()) == ("stdout", b"up\n")
    run.cancel()
    assert run.result().status is SandboxStatus.CANCELLED


def test_cancelling_a_task_ends_its_execution(connected: Sandbox) -> None:
    async def both() -> SandboxResult:
        endless = asyncio.create_task(connected.aexecute("while True: pass"))
        result = await connected.aexecute("1 + 1")
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        return result

    assert asyncio.run(both()).value == 2


def test_many_threads_share_one_sandbox(connected: Sandbox) -> None:
    with ThreadPoolExecutor(8) as pool:
        values = pool.map(lambda number: connected.execute(f"{number} * 2").value, range(40))
        assert list(values) == [number * 2 for number in range(40)]


def test_policy_plan_layers_and_advice_are_the_daemons(daemon: Daemon, strict: Sandbox) -> None:
    with daemon.sandbox("strict") as sandbox:
        assert sandbox.policy == strict.policy
        assert sandbox.layers == strict.layers
        assert sandbox.plan.guest_filter == strict.plan.guest_filter
        assert sandbox.validate_source("import os") == strict.validate_source("import os")
        assert sandbox.validate_source("1") == (True, None)
        assert sandbox.audit is None
        sandbox.settle()
        assert sandbox.execute("1").pool_hit


def test_a_client_chooses_among_the_daemons_policies_and_has_no_other(daemon: Daemon) -> None:
    start = "import subprocess; subprocess.run(['/usr/bin/true']).returncode"
    with daemon.sandbox("standard") as sandbox:
        assert sandbox.execute(start).value == 0
    with Sandbox(connect=daemon.path) as sandbox:  # the first
        assert sandbox.policy.name == "strict"
        assert not sandbox.execute(start).ok
    with pytest.raises(
        PolicyError, match="'trusted-read' is not one of the daemon's: strict, standard"
    ):
        daemon.sandbox("trusted-read")
    with pytest.raises(PolicyError, match="must name a policy of the daemon"):
        Sandbox(connect=daemon.path, policy=Policy())


def test_a_call_may_narrow_and_not_widen(connected: Sandbox) -> None:
    late = connected.execute("while True: pass", timeout=0.1)
    assert (late.status, late.error) == (SandboxStatus.TIMEOUT, "ran longer than 0.1 s")


@pytest.mark.parametrize(
    ("named", "given"),
    [("config", {"config": SandboxConfig()}), ("pool", {"pool": 3}), ("audit", {"audit": False}),
     ("packages", {"packages": ["six"]}), ("python", {"host": HostSettings(python="/usr/bin/python3")}),
     ("cgroup_root", {"host": HostSettings(cgroup_root="/")})],
)  # fmt: skip
def test_what_the_daemon_was_told_cannot_be_told_by_a_client(
    daemon: Daemon, named: str, given: dict[str, Any]
) -> None:
    with pytest.raises(PolicyError, match=f"connect: cannot be combined with {named}"):
        Sandbox(connect=daemon.path, **given)


def test_without_a_daemon_the_error_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no daemon answers at .*\nhint: .*cellwright serve"):
        Sandbox(connect=tmp_path / "none")


def test_a_closed_sandbox_says_so_and_ends_what_runs(daemon: Daemon) -> None:
    sandbox = daemon.sandbox()
    run = sandbox.start("import time; print('up', flush=True); time.sleep(300)")
    next(run.output())
    sandbox.close()
    sandbox.close()
    with pytest.raises(ClosedError, match="was closed while this ran"):
        run.result()
    with pytest.raises(ClosedError, match="the sandbox was closed"):
        sandbox.execute("1")


def test_a_daemon_that_dies_is_told_and_its_successor_serves(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as first:
        sandbox = first.sandbox()
        run = sandbox.start("import time; print('up', flush=True); time.sleep(300)")
        next(run.output())
        session = sandbox.session()
        first.process.kill()
        with pytest.raises(ClosedError, match="closed the connection"):
            run.result()
        with pytest.raises((ClosedError, LaunchError)):  # it may be dying still
            sandbox.execute("1")
        first.wait()
        with pytest.raises(LaunchError, match="no daemon answers"):
            sandbox.execute("1")
        assert "no daemon answers" in session.lost
        session.close()
    with serving(tmp_path / "s"):
        assert sandbox.execute("6 * 7").value == 42
        with pytest.raises(SessionLost, match="unknown to the daemon"):
            session.execute("1")
        assert session.lost
    sandbox.close()


KINDS = [
    kind for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.CellwrightError)
]  # fmt: skip


def _full_error(kind: type[errors.CellwrightError]) -> errors.CellwrightError:
    """Return an error whose every field has another value than its default."""
    result = SandboxResult(
        status=SandboxStatus.FAILED, reason="exception", execution_id="e", value={"n": 1 << 80}
    )
    values = {
        "gaps": (("landlock", "too old"),), "cell_began": True, "cause": "cancelled", "limit": "calls",
        "node": "a", "is_final": True, "differs": ("its kernel",), "result": result, "tool": "t",
        "existing": "u", "times": 3, "result_id": "r", "line": 3, "exited": 1, "output": "o",
    }  # fmt: skip
    error = kind.__new__(kind)
    given = {name: values[name] for name in kind.fields}
    errors.CellwrightError.__init__(error, "one\ntwo", "do this", **given)
    return error


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_exception_of_ours_crosses_the_socket_with_its_fields(
    kind: type[errors.CellwrightError],
) -> None:
    error = _full_error(kind)
    back = error_of(decode(encode(failure_of(error)), Failure))
    assert (type(back), str(back), back.hint) == (kind, str(error), "do this")
    assert vars(back) == vars(error)
    bare = error_of(Failure(kind.__name__, "x"))
    assert all(hasattr(bare, name) for name in kind.fields)


def test_an_exception_of_another_module_arrives_as_the_class_that_it_extends() -> None:
    back = error_of(failure_of(RunPaused("send waits", tool="send")))
    assert (type(back), vars(back)["tool"]) == (errors.ApprovalRequired, "send")


def test_a_field_that_a_class_does_not_declare_is_refused_at_home_and_dropped_from_a_frame() -> (
    None
):
    with pytest.raises(TypeError, match="PolicyError has no field limit"):
        PolicyError("x", limit="calls")
    unknown = Failure("QuotaExceeded", "x", "", (("limit", 7), ("other", "y")))
    assert error_of(unknown).fields == {"limit"}
    assert getattr(error_of(unknown), "limit", None) == ""


def test_a_message_is_no_longer_than_what_it_is_about(connected: Sandbox) -> None:
    with pytest.raises(PolicyError) as told:
        connected.execute("1", env={"\1" * 1_000_000 + "=": ""})
    assert len(str(told.value)) > 1_000_000  # said on this side of the socket
    assert len(str(error_of(failure_of(told.value)))) < 11_000
    with connected.session() as session, pytest.raises(PolicyError, match="length <= 65536"):
        session.download("x" * 100_000)


def test_a_bug_of_ours_is_told_as_one_and_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    back = error_of(failure_of(ZeroDivisionError("oops")))
    assert isinstance(back, errors.InternalError)
    assert "oops" in str(back)
    assert "ZeroDivisionError: oops" in capsys.readouterr().err
    assert isinstance(error_of(failure_of(OSError(24, "x"))), errors.BusyError)


# sessions


def test_a_session_is_found_again_by_another_process(daemon: Daemon) -> None:
    code = f"""
import sys
sys.path[:0] = {[str(ROOT), *sys.path]!r}
from cellwright import Sandbox
sandbox = Sandbox(connect={str(daemon.path)!r})
print(sandbox.session("shared").execute("x = 41; x").value)
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], stdout=-1, timeout=300, check=True)
    assert done.stdout == b"41\n"
    with daemon.sandbox() as sandbox:
        session = sandbox.session("shared")
        assert session.execute("x + 1").value == 42
        again = sandbox.session("shared")
        again.close()
        assert session.lost == "it was closed"
        fresh = sandbox.session("shared")
        assert not fresh.execute("x").ok
        with pytest.raises(SessionLost):  # the name is another's now
            session.execute("1")
        fresh.close()


def test_sessions_of_one_policy_are_not_those_of_another(daemon: Daemon) -> None:
    with (
        daemon.sandbox("strict") as strict,
        daemon.sandbox("standard") as standard,
        strict.session("same") as first,
        standard.session("same") as second,
    ):
        first.execute("x = 1")
        assert not second.execute("x").ok


def test_two_clients_of_one_session_are_served_in_turn(daemon: Daemon) -> None:
    with daemon.sandbox() as one, daemon.sandbox() as two, one.session() as session:
        session.execute("seen = []")
        other = two.session(session.id)
        step = "seen.append({0}); __import__('time').sleep(0.01); seen.append({0})"
        with ThreadPoolExecutor(2) as pool:
            for each in [
                pool.submit((session, other)[number % 2].execute, step.format(number))
                for number in range(6)
            ]:
                assert each.result().ok
        seen = session.execute("seen").value
        assert seen[::2] == seen[1::2]


def test_a_session_that_is_in_the_way_is_ended_and_told_why(tmp_path: Path) -> None:
    with serving(tmp_path / "s", sessions=1) as daemon, daemon.sandbox() as sandbox:
        first = sandbox.session()
        first.execute("1")
        second = sandbox.session()
        assert first.lost == "it was idle longest, and another one was opened"
        with pytest.raises(SessionLost, match="another one was opened"):
            first.execute("1")
        assert second.execute("2").value == 2


def test_a_forked_process_does_not_use_its_parents_connections(connected: Sandbox) -> None:
    connected.execute("1")

    def use() -> None:
        with pytest.raises(ClosedError):
            connected.execute("1")
        connected.close()

    assert exit_code_of(use) == 0
    assert connected.execute("1").ok


def test_the_trail_is_the_daemons(tmp_path: Path) -> None:
    trail = tmp_path / "audit.jsonl"
    with serving(tmp_path / "s", audit=str(trail)) as daemon:
        with daemon.sandbox() as sandbox:
            result = sandbox.execute("1")
            refused = sandbox.execute("")
        assert daemon.end() == 0
    written = trail.read_text()
    assert result.execution_id in written
    assert refused.execution_id in written


def test_a_daemon_starts_no_programs_that_live_and_says_so(connected: Sandbox) -> None:
    with pytest.raises(PolicyError, match="without connect="):
        connected.program(("/usr/bin/cat",))


def test_a_daemon_keeps_no_workspaces_or_network_rules_for_clients_and_says_so(
    connected: Sandbox,
) -> None:
    for attempt in (
        lambda: connected.execute("1", workspace="mine"),
        lambda: connected.session(workspace="mine"),
        lambda: connected.workspaces,
        lambda: connected.network,
    ):
        with pytest.raises(PolicyError, match="not available with connect="):
            attempt()
    script = connected.execute(
        "import os\nos.stat('x').st_mode & 0o7777", files={"x": Executable(b"")}
    )
    assert script.value == 0o700


def test_the_policy_of_a_daemon_is_explained_by_it(daemon: Daemon) -> None:
    def explain(*options: str) -> "subprocess.CompletedProcess[str]":
        command = (sys.executable, "-m", "cellwright", "explain", *options)
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    at = ("--connect", str(daemon.path))
    done = explain(*at, "--policy", "standard")
    assert done.returncode == 0
    assert done.stdout.startswith("policy standard\n")
    for options in (("--optional", "cgroup"), ("--diff", "standard"), ("--system-calls",)):
        assert "cannot be combined with" in explain(*at, *options).stderr
