"""`Sandbox` as a user meets it: how executions end, what goes in, what comes out."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cellwright import ClosedError, PolicyError, Sandbox, SandboxStatus, create_sandbox
from cellwright.policies.policy import MIB, Policy
from cellwright.testing import inspect
from tests.conftest import ROOT, policy_named, with_limits
from tests.forked import exit_code_of

COMPLETED, FAILED = SandboxStatus.COMPLETED, SandboxStatus.FAILED
KILLED, TIMEOUT, REJECTED = SandboxStatus.KILLED, SandboxStatus.TIMEOUT, SandboxStatus.REJECTED


def strict_with(**limits: object) -> Policy:
    return with_limits(policy_named("strict"), **limits)


# How an execution ends

ENDS = {
    "runs to its end": ("1 + 1", COMPLETED, "exit"),
    "sys.exit(0)": ("import sys; sys.exit(0)", COMPLETED, "exit"),
    "sys.exit(3)": ("import sys; sys.exit(3)", FAILED, "exit"),
    "os._exit(4)": ("import os; os._exit(4)", FAILED, "exit"),
    "os._exit(0)": ("import os; os._exit(0)", COMPLETED, "exit"),
    "raises": ("raise KeyError('k')", FAILED, "exception"),
    "syntax error": ("def", FAILED, "exception"),
    "SIGSEGV": ("import os; os.kill(os.getpid(), 11)", FAILED, "signal"),
    "SIGKILL by itself": ("import os; os.kill(os.getpid(), 9)", FAILED, "signal"),
    "abort": ("import os; os.abort()", FAILED, "signal"),
    "garbage on the control channel": (
        "import os, time\nos.write(3, b'\\0garbage')\ntime.sleep(60)", KILLED, "violation",
    ),
    "text that is no UTF-8 on the control channel": (
        "import os, time\nos.write(3, b'\\0\\x95\\xa8Finished\\xc0\\xa2\\xff\\xfe\\xc0\\xc0')\ntime.sleep(60)",
        KILLED, "violation",
    ),
    "deep nesting on the control channel": (
        "import os, time\nos.write(3, b'\\0' + b'\\x91' * 60000)\ntime.sleep(60)", KILLED, "violation",
    ),
    "an endless frame on the control channel": (
        "import os\nwhile True: os.write(3, b'\\1' + bytes(60000))", KILLED, "violation",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("code", "status", "reason"), ENDS.values(), ids=ENDS)
def test_every_end_has_its_status_and_reason(
    strict: Sandbox, code: str, status: SandboxStatus, reason: str
) -> None:
    result = strict.execute(code)
    assert (result.status, result.reason) == (status, reason)
    assert result.ok == (status is COMPLETED)


def test_a_program_that_runs_too_long_is_timed_out(strict: Sandbox) -> None:
    result = strict.execute("import time; print('on'); time.sleep(60)", timeout=1.5)
    assert (result.status, result.reason) == (TIMEOUT, "wall_time")
    assert result.stdout == "on\n"
    assert result.exit_code is None
    assert result.signal is None
    assert result.error == "ran longer than 1.5 s"


def test_a_program_that_ignores_signals_is_timed_out_too(strict: Sandbox) -> None:
    ignore = "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
    assert strict.execute(ignore + "time.sleep(60)", timeout=0.2).reason == "wall_time"


def test_cpu_time_is_capped_apart_from_wall_time() -> None:
    with Sandbox(policy=strict_with(cpu_seconds=0.3)) as sandbox:
        result = sandbox.execute("while True: pass")
        asleep = sandbox.execute("import time; time.sleep(0.5)")
    assert (result.status, result.reason) == (TIMEOUT, "cpu_time")
    assert asleep.ok


@pytest.mark.needs("cgroup")
def test_cpu_time_of_threads_and_processes_together_is_capped() -> None:
    """RLIMIT_CPU counts each process alone; the cgroup counts them all."""
    code = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    policy = with_limits(policy_named("standard"), cpu_seconds=0.4)
    with Sandbox(policy=policy) as sandbox:
        result = sandbox.execute(code)
    assert (result.status, result.reason) == (TIMEOUT, "cpu_time")


@pytest.mark.needs("cgroup")
def test_memory_is_capped_and_told_apart_from_other_kills() -> None:
    with Sandbox(policy=strict_with(memory_bytes=64 * MIB)) as sandbox:
        result = sandbox.execute("x = []\nwhile True: x.append(bytearray(b'x' * 1_000_000))")
        after = sandbox.execute("1 + 1")
    assert (result.status, result.reason) == (KILLED, "memory")
    assert result.usage.memory_peak_bytes <= 64 * MIB
    assert after.value == 2


@pytest.mark.needs("cgroup")
def test_memory_of_the_workspace_counts_as_memory_of_the_cell() -> None:
    with Sandbox(policy=strict_with(memory_bytes=32 * MIB)) as sandbox:
        code = "f = open('/workspace/big', 'wb')\nwhile True: f.write(bytes(1_000_000))"
        result = sandbox.execute(code)
    assert (result.status, result.reason) == (KILLED, "memory")


def test_output_without_end_is_stopped() -> None:
    with Sandbox(policy=strict_with(output_total_bytes=1_000_000)) as sandbox:
        result = sandbox.execute("import os\nwhile True: os.write(1, b'x' * 4096)")
    assert (result.status, result.reason) == (KILLED, "output")
    assert result.usage.output_bytes >= 1_000_000
    assert len(result.stdout) < 110_000


def test_both_streams_count_towards_the_total() -> None:
    with Sandbox(policy=strict_with(output_total_bytes=1_000_000)) as sandbox:
        code = "import os\nfor _ in range(150): os.write(1, b'x' * 4096); os.write(2, b'y' * 4096)"
        assert sandbox.execute(code).reason == "output"


def test_a_signal_is_named(strict: Sandbox) -> None:
    result = strict.execute("import os; os.kill(os.getpid(), 11)")
    assert result.signal == signal.SIGSEGV
    assert result.exit_code is None
    assert result.error == "killed by SIGSEGV"


def test_exit_code_is_what_the_kernel_saw_and_not_what_the_guest_says(strict: Sandbox) -> None:
    honest = strict.execute("raise SystemExit(7)")
    assert honest.exit_code == 7
    lie = "import os\nos.write(3, b'\\0' + b'\\x95\\xa8Finished\\xc4\\x011\\xc0\\xc0\\xc0')\nos._exit(9)"
    result = strict.execute(lie)
    assert (result.value, result.exit_code, result.status) == (1, 9, FAILED)


def test_a_program_that_claims_to_have_ended_well_is_killed(strict: Sandbox) -> None:
    """It has lied about nothing but its value: exit(0) was its to call."""
    frame = "b'\\0' + b'\\x96\\xa8Finished\\xc4\\x011\\xc0\\xc0\\xc0\\xc3'"
    result = strict.execute(f"import os, time\nos.write(3, {frame})\ntime.sleep(60)")
    assert (result.value, result.exit_code, result.status) == (1, 0, COMPLETED)
    assert result.execution_time < 30


def test_a_second_frame_is_a_violation(strict: Sandbox) -> None:
    frame = "b'\\0' + b'\\x95\\xa8Finished\\xc4\\x011\\xc0\\xc0\\xc0'"
    result = strict.execute(
        f"import os, time\nos.write(3, {frame}); os.write(3, {frame})\ntime.sleep(60)"
    )
    assert result.reason == "violation"
    assert "after the last one" in (result.error or "")


def test_a_child_that_comes_to_the_programs_end_does_not_speak_for_its_parent(
    standard: Sandbox,
) -> None:
    code = (
        "import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\nprint(bool(pid))\nbool(pid)"
    )
    result = standard.execute(code)
    assert (result.ok, result.value, result.stdout) == (True, True, "False\nTrue\n")


def test_closing_the_control_channel_costs_the_guest_its_value_only(strict: Sandbox) -> None:
    result = strict.execute("import os; os.close(3); print('still here'); 5")
    assert result.ok
    assert result.stdout == "still here\n"
    assert result.value is None


EXITS = {
    "exit()": ("raise SystemExit", 0, None, ""),
    "exit(None)": ("raise SystemExit(None)", 0, None, ""),
    "exit(True)": ("raise SystemExit(True)", 1, "exit code 1", ""),
    "exit(256)": ("raise SystemExit(256)", 0, None, ""),
    "exit(-1)": ("raise SystemExit(-1)", 255, "exit code 255", ""),
    "exit('text')": ("raise SystemExit('no luck')", 1, "no luck", "no luck\n"),
    "exit([1])": ("raise SystemExit([1])", 1, "[1]", "[1]\n"),
    "exit(1.5)": ("raise SystemExit(1.5)", 1, "1.5", "1.5\n"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "exit_code", "error", "stderr"), EXITS.values(), ids=EXITS)
def test_system_exit_means_what_it_means_to_python(
    strict: Sandbox, code: str, exit_code: int, error: str | None, stderr: str
) -> None:
    result = strict.execute(code)
    assert (result.exit_code, result.error, result.stderr) == (exit_code, error, stderr)
    assert result.reason == "exit"


def test_a_system_exit_with_a_hostile_argument_ends_like_any_failure(strict: Sandbox) -> None:
    code = "class Bad:\n    def __str__(self): raise ValueError('no')\nraise SystemExit(Bad())"
    result = strict.execute(code)
    assert result.status is FAILED
    assert result.exit_code == 1


def test_atexit_runs_and_threads_are_waited_for(strict: Sandbox) -> None:
    code = """
import atexit, threading, time
atexit.register(print, "last")
def work():
    time.sleep(0.05)
    print("thread")
threading.Thread(target=work).start()
"""
    assert strict.execute(code).stdout == "thread\nlast\n"


# Values

VALUES = {
    "1 + 1": 2,
    "x = 5": None,
    "x = 5\nx": 5,
    "None": None,
    "print('p')": None,
    "[1, 'a', None, True, 1.5, {'k': []}]": [1, "a", None, True, 1.5, {"k": []}],
    "(1, 2)": [1, 2],
    "'\\u00fc\\U0001f600'": "\u00fc\U0001f600",
    "{1, }": "{1}",
    "b'x'": "b'x'",
    "object": "<class 'object'>",
    "float('nan')": "nan",
    "1j": "1j",
    "'\\ud800'": "'\\ud800'",
    "10 ** 30": 10**30,
    "x = []; x.append(x); x": "[[...]]",
    "{1: 2, None: 3}": {"1": 2, "null": 3},
    "{1: 'a', '1': 'b'}": "{1: 'a', '1': 'b'}",
    "[(({'k': {True: 1, 'true': 2}},))]": "[({'k': {True: 1, 'true': 2}},)]",
    "if True:\n    3": None,
    "def f(): pass": None,
    "1;": 1,
}


@pytest.mark.parametrize(("code", "value"), VALUES.items(), ids=VALUES)
def test_the_value_is_the_last_expression_as_json_or_its_repr(
    strict: Sandbox, code: str, value: object
) -> None:
    result = strict.execute(code)
    assert result.ok, result.stderr
    assert result.value == value


def test_a_value_too_large_is_cut_as_text(strict: Sandbox) -> None:
    limit = strict.policy.limits.value_bytes
    result = strict.execute(f"'x' * {2 * limit}")
    assert result.ok
    assert len(result.value) <= limit
    assert result.truncated == {"value": 2 * limit + 2 - len(result.value)}  # it has quotes


def test_a_value_of_wide_characters_stays_within_the_limit(strict: Sandbox) -> None:
    """Four bytes a character: the limit is in bytes, and the frame must stay acceptable."""
    limit = strict.policy.limits.value_bytes
    result = strict.execute(f"'\\U0001f600' * {2 * limit}")
    assert result.ok, result.error
    assert len(result.value.encode()) <= limit
    assert result.truncated == {"value": 4 * 2 * limit + 2 - len(result.value.encode())}


def test_a_repr_that_raises_is_the_programs_exception(strict: Sandbox) -> None:
    code = "class Bad:\n    def __repr__(self): raise ValueError('no repr')\nBad()"
    result = strict.execute(code)
    assert result.error == "ValueError: no repr"


def test_the_result_is_plain_data(strict: Sandbox) -> None:
    import json

    result = strict.execute("{'a': [1]}", trace_id="trace-7")
    plain = json.loads(json.dumps(result.to_dict()))
    assert (plain["status"], plain["value"], plain["ok"]) == ("completed", {"a": [1]}, True)
    assert plain["trace_id"] == "trace-7"
    assert re.fullmatch("[0-9a-f]{32}", plain["execution_id"])


def test_usage_is_counted(strict: Sandbox) -> None:
    usage = strict.execute("sum(range(3_000_000)); b = bytearray(20_000_000); print('x')").usage
    assert usage.wall_seconds > 0
    assert usage.cpu_user_seconds > 0
    assert usage.memory_peak_bytes > 20_000_000
    assert usage.output_bytes == 2


# Tracebacks


def test_a_traceback_is_that_of_a_file_and_shows_none_of_our_frames(
    strict: Sandbox, tmp_path: Path
) -> None:
    code = "def inner():\n    return 1 / 0  # here\n\ninner()\n"
    result = strict.execute(code)
    assert result.error == "ZeroDivisionError: division by zero"
    assert result.traceback == result.stderr
    assert "    return 1 / 0  # here\n           ~~^~~\n" in result.stderr
    file = tmp_path / "program.py"
    file.write_text(code)
    told = subprocess.run([sys.executable, "-I", file], capture_output=True, text=True, check=False)
    assert result.traceback == told.stderr.replace(str(file), "<cell>")


TRACEBACKS = {
    "syntax error": ("x = 1\nif x\n    pass\n", "if x\n", "SyntaxError: expected ':'"),
    "last expression": ("x = 1\n1 / 0\n", "1 / 0\n", "ZeroDivisionError: division by zero"),
    "in an import": ("import nowhere_at_all\n", "import nowhere", "ModuleNotFoundError"),
    "chained": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e\n",
        "direct cause", "KeyError: 'k'",
    ),
    "recursion": ("def f(): f()\nf()\n", "Previous line repeated", "RecursionError"),
    "group": ("raise ExceptionGroup('many', [ValueError(1)])\n", "ValueError: 1", "Exception"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "shown", "error"), TRACEBACKS.values(), ids=TRACEBACKS)
def test_every_traceback_is_free_of_our_frames(
    strict: Sandbox, code: str, shown: str, error: str
) -> None:
    result = strict.execute(code)
    assert shown in (result.traceback or "")
    assert (result.error or "").startswith(error)
    assert not re.search("interpreter.py|cellwright|_evaluate|_execute", result.traceback or "")


def test_a_tracebacks_frames_are_ours_neither_when_the_guest_prints_them(strict: Sandbox) -> None:
    code = "import traceback\ntry:\n    1 / 0\nexcept Exception:\n    print(traceback.format_exc())"
    assert "cellwright" not in strict.execute(code).stdout


def test_an_uncaught_exception_in_a_thread_shows_its_source_line(strict: Sandbox) -> None:
    code = (
        "import threading\ndef f():\n    1 / 0  # in the thread\nthreading.Thread(target=f).start()"
    )
    result = strict.execute(code)
    assert "1 / 0  # in the thread" in result.stderr
    assert result.ok


def test_an_exception_whose_text_raises_is_still_reported(strict: Sandbox) -> None:
    code = "class Bad(Exception):\n    def __str__(self): raise ValueError\nraise Bad()"
    result = strict.execute(code)
    assert result.reason == "exception"
    assert "Bad" in (result.error or "")


def test_the_error_is_one_line(strict: Sandbox) -> None:
    error = strict.execute("raise ValueError('first\\nsecond' + 'x' * 5000)").error or ""
    assert "\n" not in error
    assert len(error) <= 1000


# What goes in


def test_inputs_are_variables(strict: Sandbox) -> None:
    result = strict.execute("sum(numbers), name", inputs={"numbers": [1, 2, 3], "name": "\u00fc"})
    assert result.value == [6, "\u00fc"]


def test_inputs_cannot_take_the_builtins_away(strict: Sandbox) -> None:
    assert strict.execute("len('abc')", inputs={"__builtins__": {}}).value == 3


@pytest.mark.parametrize("stdin", ["one\ntwo\n", b"one\ntwo\n"], ids=["text", "bytes"])
def test_stdin_is_read(strict: Sandbox, stdin: str | bytes) -> None:
    assert strict.execute("[input(), input()]", stdin=stdin).value == ["one", "two"]


def test_without_stdin_there_is_nothing_to_read(strict: Sandbox) -> None:
    assert strict.execute("import sys; sys.stdin.read()").value == ""
    assert strict.execute("input()").error == "EOFError: EOF when reading a line"
    assert strict.execute("import sys; sys.stdin.read()", stdin=b"").value == ""


def test_bytes_that_are_no_text_pass_through_stdin(strict: Sandbox) -> None:
    every = bytes(range(256))
    code = "import sys; sys.stdin.buffer.read().hex()"
    assert strict.execute(code, stdin=every).value == every.hex()


def test_a_large_stdin_arrives_whole(strict: Sandbox) -> None:
    data = os.urandom(5_000_000)
    code = "import sys, hashlib; hashlib.sha256(sys.stdin.buffer.read()).hexdigest()"
    import hashlib

    assert strict.execute(code, stdin=data).value == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    "code", ["1 + 1", "import os; os.close(0); 2", "import sys; sys.stdin.read(1); 2"]
)
def test_a_large_stdin_that_nobody_reads_does_no_harm(strict: Sandbox, code: str) -> None:
    result = strict.execute(code, stdin=b"x" * 5_000_000)
    assert result.ok
    assert result.value == 2


def test_a_large_stdin_and_a_large_output_at_once_do_not_deadlock(strict: Sandbox) -> None:
    code = "import sys\nfor line in sys.stdin.buffer: sys.stdout.buffer.write(line)"
    result = strict.execute(code, stdin=b"0123456\n" * 500_000)
    assert result.ok
    assert result.usage.output_bytes == 4_000_000


def test_files_are_in_the_workspace(strict: Sandbox) -> None:
    files = {"data.csv": "a,b\n1,2\n", "deep/er/raw.bin": bytes(range(256)), "\u00fc \n'": "odd"}
    code = """
import os
[open("data.csv").read(), open("/workspace/deep/er/raw.bin", "rb").read().hex(),
 sorted(os.listdir(".")), os.getcwd()]
"""
    text, raw, listing, cwd = strict.execute(code, files=files).value
    assert text == files["data.csv"]
    assert raw == bytes(range(256)).hex()
    assert listing == sorted(["data.csv", "deep", "\u00fc \n'"])
    assert cwd == "/workspace"


def test_twenty_megabytes_of_files_arrive_whole(strict: Sandbox) -> None:
    data = os.urandom(20_000_000)
    code = "import hashlib; hashlib.sha256(open('big', 'rb').read()).hexdigest()"
    import hashlib

    assert strict.execute(code, files={"big": data}).value == hashlib.sha256(data).hexdigest()


def test_nothing_of_one_execution_is_there_in_the_next(strict: Sandbox) -> None:
    strict.execute(
        "import builtins, os\nbuiltins.mark = 1\nopen('/workspace/x', 'w').close()\nos.environ['M'] = '1'"
    )
    code = "import builtins, os; [hasattr(builtins, 'mark'), os.listdir('/workspace'), os.listdir('/tmp'), 'M' in os.environ]"
    assert strict.execute(code).value == [False, [], [], False]


def test_env_adds_to_a_clean_environment(strict: Sandbox) -> None:
    os.environ["CELLWRIGHT_TEST_SECRET"] = "hidden"
    try:
        result = strict.execute("import os; dict(os.environ)", env={"WHO": "me", "HOME": "/tmp"})
    finally:
        del os.environ["CELLWRIGHT_TEST_SECRET"]
    assert result.value == {
        "HOME": "/tmp", "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "TMPDIR": "/tmp", "TZ": "UTC",
        "WHO": "me",
    }  # fmt: skip


def test_a_timeout_only_narrows() -> None:
    with Sandbox(policy=strict_with(wall_seconds=0.3)) as sandbox:
        with pytest.raises(PolicyError, match="timeout: 50 s is more than limits.wall_seconds"):
            sandbox.execute("import time; time.sleep(60)", timeout=50)
        result = sandbox.execute("import time; time.sleep(60)", timeout=0.2)
    assert result.reason == "wall_time"
    assert result.error == "ran longer than 0.2 s"


def test_create_sandbox_takes_the_fields_of_a_config() -> None:
    layers = policy_named("strict").optional_layers
    with create_sandbox(timeout=0.3, max_memory_mb=128, optional_layers=layers) as sandbox:
        assert sandbox.execute("1 + 1").value == 2
        assert sandbox.execute("import time; time.sleep(60)").reason == "wall_time"


def test_a_config_shows_allowed_paths_and_no_others(tmp_path: object) -> None:
    import pathlib

    root = pathlib.Path(str(tmp_path))
    (root / "seen.txt").write_text("seen")
    (root / "denied.txt").write_text("denied")
    root.chmod(0o755)
    layers = policy_named("strict").optional_layers
    box = create_sandbox(
        allow_file_read=True, allowed_paths=[f"{root}/*"], denied_paths=[f"{root}/denied*"],
        optional_layers=layers,
    )  # fmt: skip
    with box:
        assert box.execute(f"open('{root}/seen.txt').read()").value == "seen"
        assert box.execute(f"import os; os.listdir('{root}')").value == ["seen.txt"]
        write = box.execute(f"open('{root}/seen.txt', 'a').write('x')")
    assert write.reason == "exception"
    assert (root / "seen.txt").read_text() == "seen"


# What comes out


def test_output_too_long_keeps_its_head_and_tail_and_counts_the_rest(strict: Sandbox) -> None:
    limit = strict.policy.limits.output_bytes
    code = f"import sys\nsys.stdout.write('H' * {limit} + 'm' * 1000 + 'T' * {limit}); 'done'"
    result = strict.execute(code)
    dropped = result.truncated["stdout"]
    assert dropped == limit + 1000
    assert result.stdout == (
        "H" * (limit // 2) + f"\n[... {dropped} bytes dropped ...]\n" + "T" * (limit // 2)
    )
    assert result.usage.output_bytes == 2 * limit + 1000
    assert result.ok
    assert "stderr" not in result.truncated


def test_output_of_exactly_the_limit_is_whole(strict: Sandbox) -> None:
    limit = strict.policy.limits.output_bytes
    result = strict.execute(f"print('x' * {limit}, end='')")
    assert result.stdout == "x" * limit
    assert result.truncated == {}


def test_stdout_and_stderr_are_apart(strict: Sandbox) -> None:
    result = strict.execute("import sys; print('out'); print('err', file=sys.stderr)")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")


def test_undecodable_output_is_replaced(strict: Sandbox) -> None:
    assert strict.execute("import os; os.write(1, b'a\\xff\\0b'); None").stdout == "a\ufffd\0b"


def test_output_written_by_descriptor_after_the_streams_were_closed_arrives(
    strict: Sandbox,
) -> None:
    code = "import os, sys\nos.dup2(1, 20)\nsys.stdout.close()\nos.write(20, b'late')"
    assert strict.execute(code).stdout == "late"


def test_on_output_hears_everything_in_order(strict: Sandbox) -> None:
    heard: list[tuple[str, bytes]] = []
    result = strict.execute(
        "import os\nfor i in range(500): os.write(1 + i % 2, b'%d ' % i)",
        on_output=lambda *chunk: heard.append(chunk),
    )
    for stream, text in (("stdout", result.stdout), ("stderr", result.stderr)):
        assert b"".join(data for name, data in heard if name == stream).decode() == text


def test_on_output_may_raise_and_the_cell_is_gone_then(strict: Sandbox) -> None:
    def refuse(stream: str, data: bytes) -> None:
        raise ConnectionError("the listener hung up")

    with pytest.raises(ConnectionError, match="hung up"):
        strict.execute("import time; print('x'); time.sleep(60)", on_output=refuse)
    assert strict.execute("1 + 1").value == 2


# Many at once


def test_threads_execute_at_once_and_each_gets_its_own_answer(strict: Sandbox) -> None:
    def work(thread: int) -> list[tuple[object, object]]:
        answers: list[tuple[object, object]] = []
        for number in range(20):
            nonce = f"{thread}-{number}-{os.urandom(8).hex()}"
            code = "print(nonce); import sys; print(sys.stdin.read(), file=sys.stderr); nonce"
            result = strict.execute(code, inputs={"nonce": nonce}, stdin=nonce)
            expected = (nonce, f"{nonce}\n", f"{nonce}\n")
            answers.append(((result.value, result.stdout, result.stderr), expected))
        return answers

    with ThreadPoolExecutor(16) as pool:
        pairs = [pair for answers in pool.map(work, range(16)) for pair in answers]
    assert len(pairs) == 320
    assert all(got == expected for got, expected in pairs)


def test_one_cells_end_does_not_touch_another(strict: Sandbox) -> None:
    run = (
        strict.start("input()", stdin=None)
        if False
        else strict.start("import time\nprint('up', flush=True)\ntime.sleep(60)")
    )
    assert next(run.output()) == ("stdout", b"up\n")
    for _ in range(5):
        assert strict.execute("import os; os.abort()").reason == "signal"
    assert run.status is SandboxStatus.RUNNING
    run.cancel()
    assert run.result().reason == "cancelled"


# Closing, forking, dying


def test_closing_ends_what_runs() -> None:
    sandbox = Sandbox(policy=policy_named("strict"))
    run = sandbox.start("import time\nprint('up', flush=True)\ntime.sleep(60)")
    assert next(run.output()) == ("stdout", b"up\n")
    sandbox.close()
    with pytest.raises(ClosedError):
        run.result()


def test_after_closing_nothing_runs_and_closing_again_is_fine() -> None:
    sandbox = Sandbox(policy=policy_named("strict"))
    sandbox.close()
    sandbox.close()
    with pytest.raises(ClosedError):
        sandbox.execute("1 + 1")


def test_a_forked_child_is_refused_and_cannot_end_its_parents_cells() -> None:
    with Sandbox(policy=policy_named("strict")) as sandbox:
        sandbox.execute("1")

        def use() -> None:
            with pytest.raises(ClosedError):
                sandbox.execute("1 + 1")
            sandbox.close()

        assert exit_code_of(use) == 0
        assert sandbox.execute("1 + 1").value == 2


@pytest.mark.parametrize("which", [0, 1, 2], ids=["keeper", "nursery", "launcher"])
def test_a_killed_launcher_is_replaced(which: int) -> None:
    with Sandbox(policy=policy_named("strict")) as sandbox:
        assert sandbox.execute("1 + 1").value == 2
        pids = inspect(sandbox).launcher_pids()
        pidfds = [os.pidfd_open(pid) for pid in pids]
        os.kill(pids[which], signal.SIGKILL)
        for pidfd in pidfds:
            _wait_for_end(pidfd)
        assert sandbox.execute("1 + 1").value == 2
        assert set(pids).isdisjoint(inspect(sandbox).launcher_pids())


def test_a_launcher_that_dies_under_an_execution_is_our_failure_and_said_so() -> None:
    from cellwright import LaunchError

    with Sandbox(policy=policy_named("strict")) as sandbox:
        run = sandbox.start("import time\nprint('up', flush=True)\ntime.sleep(60)")
        assert next(run.output()) == ("stdout", b"up\n")
        os.kill(inspect(sandbox).launcher_pids().nursery, signal.SIGKILL)
        with pytest.raises(LaunchError):
            run.result()
        assert sandbox.execute("1 + 1").value == 2


def test_many_threads_find_the_launcher_dead_and_all_go_on() -> None:
    with Sandbox(policy=policy_named("strict")) as sandbox:
        pids = inspect(sandbox).launcher_pids()
        pidfd = os.pidfd_open(pids[1])
        os.kill(pids[1], signal.SIGKILL)
        _wait_for_end(pidfd)
        with ThreadPoolExecutor(8) as pool:
            values = list(pool.map(lambda n: sandbox.execute(f"{n} + 1").value, range(8)))
    assert values == list(range(1, 9))


def _wait_for_end(pidfd: int) -> None:
    """Wait until the process of `pidfd` has ended; fail after five seconds."""
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = poll.poll(60_000)
    os.close(pidfd)
    assert ended


@pytest.mark.filterwarnings("ignore:a sandbox under the policy .* was never closed")
def test_a_sandbox_that_is_dropped_takes_its_launcher_along() -> None:
    sandbox = Sandbox(policy=policy_named("strict"))
    pidfds = inspect(sandbox).open_pidfds()
    del sandbox
    import gc

    gc.collect()
    for pidfd in pidfds:
        _wait_for_end(pidfd)


def test_a_process_that_reaps_every_child_does_not_disturb_us() -> None:
    """Embedders install SIGCHLD handlers that call waitpid(-1)."""

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    before = signal.signal(signal.SIGCHLD, reap)
    try:
        with Sandbox(policy=policy_named("strict")) as sandbox:
            assert sandbox.execute("1 + 1").value == 2
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_signals_to_the_embedding_process_do_not_disturb_an_execution(strict: Sandbox) -> None:
    hits: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: hits.append(number))
    try:
        heard = threading.Event()

        def poke(stream: str, data: bytes) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            heard.set()

        result = strict.execute(
            "import time\nfor i in range(20): print(i, flush=True); time.sleep(0.005)\n'end'",
            on_output=poke,
        )
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert result.value == "end"
    assert heard.is_set()
    assert hits


FORGOTTEN = """
import gc, sys
from cellwright import CodeExecutor, Sandbox
from tests.conftest import policy_named
def use():
    sandbox = Sandbox(policy=policy_named("standard"), pool=1)
    session = sandbox.session()
    assert session.execute("import os\\nos.fork() or os.execvp('sleep', ['sleep', '60'])").ok
    return sandbox
{}
"""


@pytest.mark.parametrize("way", ["use()\ngc.collect()", "kept = use()"])
def test_a_sandbox_that_was_never_closed_is_named_once(way: str) -> None:
    """By what the user made, and not by the control groups of its cells."""
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", FORGOTTEN.format(way)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    told = [line for line in done.stderr.splitlines() if "ResourceWarning" in line]
    assert len(told) == 1, done.stderr
    assert "a sandbox under the policy 'standard' was never closed" in told[0]
    closed = FORGOTTEN.format("use().close()\nCodeExecutor().execute('1')")
    command[-1] = closed
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "never closed" not in done.stderr
