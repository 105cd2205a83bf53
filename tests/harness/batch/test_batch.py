"""Batches: rows in their forms, results that survive a kill, and summaries."""

import gzip
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from cellwright import PolicyError
from cellwright.harness.batch.reports import junit_of, page_of, pass_at, summary_lines
from cellwright.harness.batch.result_file import ResultFile, RowResult
from cellwright.harness.batch.rows import rows_of, with_completions
from tests.conftest import SHARED, soon

ADD = {"prompt": "def add(a, b):\n", "canonical_solution": "    return a + b\n"}
HUMAN = {
    "task_id": "Human/0",
    **ADD,
    "test": "def check(add):\n    assert add(1, 2) == 3\n",
    "entry_point": "add",
}
MBPP = {"task_id": 7, "text": "Add.", "code": "def add(a, b): return a + b", "test_list": ["assert add(1, 2) == 3"]}  # fmt: skip


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def batch(*arguments: object, **given: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-Im", "cellwright", "batch", *map(str, arguments), *optional()]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd="/", **given
    )


def optional() -> list[str]:
    layers = os.environ.get("CELLWRIGHT_TEST_OPTIONAL", "")
    return [word for layer in layers.split(",") if layer for word in ("--optional", layer)]


def results_of(path: Path) -> list[dict[str, Any]]:
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda each: each["line"])


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["alone", "workers"])
def test_rows_in_every_form_are_run_or_judged(tmp_path: Path, workers: tuple[str, ...]) -> None:
    rows = [
        {"id": "plain", "code": "print(input())", "stdin": "hi"},
        {"code": "print(1)", "expected": "1"},
        {"program": "print(int(input()) * 2)", "cases": [{"input": "2", "output": "4"}, {"input": "3", "expected": "7"}]},
        HUMAN,
        {**HUMAN, "task_id": "Human/1", "completion": "    return a - b\n"},
        MBPP,
        {"code": "echo shell", "language": "bash"},
        {"code": "1", "timeout": 1e9},
    ]  # fmt: skip
    source = written(tmp_path / "rows.jsonl", rows)
    output, junit, page = (tmp_path / name for name in ("out.jsonl", "out.xml", "out.html"))
    done = batch(source, "--output", output, "--junit", junit, "--html", page, *workers)
    assert done.returncode == 1, done.stderr
    results = results_of(output)
    assert [(each["task"], each["passed"], each["outcome"]) for each in results] == [
        ("plain", True, "exit"),
        ("2", True, "accepted"),
        ("3", False, "wrong answer"),
        ("Human/0", True, "exit"),
        ("Human/1", False, "exception"),
        ("7", True, "exit"),
        ("7", True, "exit"),
        ("8", False, "invalid"),
    ]
    assert results[0]["stdout"] == "hi\n"
    assert results[2]["cases"] == ["accepted", "wrong answer"]
    assert done.stdout.splitlines()[0] == "5 of 8 passed"
    suite = ET.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("8", "3")
    assert "<script" not in page.read_text()


def test_a_completion_that_ends_before_its_tests_has_not_passed(tmp_path: Path) -> None:
    cheat = "    pass\nimport os\nos._exit(0)\n"
    rows = [{**HUMAN, "completion": cheat}, {**MBPP, "completion": cheat.lstrip()}, HUMAN]
    output = tmp_path / "out"
    batch(written(tmp_path / "rows.jsonl", rows), "--output", output)
    assert [each["passed"] for each in results_of(output)] == [False, False, True]


def test_a_batch_that_was_killed_goes_on_without_losing_or_doubling_a_row(tmp_path: Path) -> None:
    rows = [{"code": f"import time; time.sleep(0.05); print({n})"} for n in range(40)]
    source, output = written(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl"
    command = [sys.executable, "-Im", "cellwright", "batch", str(source), "--output", str(output)]
    for number in (5, 15):
        first = subprocess.Popen(
            [*command, *optional()], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert soon(
            lambda number=number: output.exists() and output.read_bytes().count(b"\n") >= number
        )
        first.send_signal(signal.SIGKILL)
        first.wait()
    with output.open("ab") as file:  # as a kill in the middle of a write leaves it
        file.write(b'{"line":39,"task":"4')
    done = batch(source, "--output", output)
    assert done.returncode == 0, done.stderr
    results = results_of(output)
    assert [each["line"] for each in results] == list(range(40))
    assert [each["stdout"] for each in results] == [f"{n}\n" for n in range(40)]


def test_results_of_other_programs_are_not_gone_on_with(tmp_path: Path) -> None:
    source, output = written(tmp_path / "rows.jsonl", [{"code": "1"}]), tmp_path / "out.jsonl"
    assert batch(source, "--output", output).returncode == 0
    written(source, [{"code": "2"}])
    done = batch(source, "--output", output)
    assert (done.returncode, "another program for line 1" in done.stderr) == (2, True)
    output.write_text("[1]\n")
    done = batch(source, "--output", output)
    assert (done.returncode, "is no result" in done.stderr) == (2, True)


def test_two_batches_do_not_write_to_one_file(tmp_path: Path) -> None:
    with ResultFile(str(tmp_path / "out")), pytest.raises(PolicyError, match="another batch"):
        ResultFile(str(tmp_path / "out"))


@pytest.mark.parametrize("content", ["a file of mine", '{"id": 1, "code": "1"}', "{"])
def test_a_file_that_is_no_result_stays_as_it_is(tmp_path: Path, content: str) -> None:
    """One without a newline at its end is no line of a killed batch, unless it begins as one."""
    path = tmp_path / "mine"
    path.write_text(content)
    if content == "{":
        ResultFile(str(path)).close()
        assert path.read_text() == ""
        return
    with pytest.raises(PolicyError, match="is no result"):
        ResultFile(str(path))
    assert path.read_text() == content


def test_results_are_written_to_a_regular_file(tmp_path: Path) -> None:
    """A pipe would be waited for without end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/null", "/dev/full"):
        with pytest.raises(PolicyError, match="is not a regular file"):
            ResultFile(str(path))


def test_samples_of_a_task_that_changed_are_other_rows(tmp_path: Path) -> None:
    samples = written(
        tmp_path / "samples", [{"task_id": "Human/0", "completion": "    return 3\n"}]
    )
    digests = set()
    for test in (HUMAN["test"], "def check(add):\n    assert add(5, 5) == 10\n"):
        tasks = written(tmp_path / "tasks", [{**HUMAN, "test": test}])
        (row,) = with_completions(str(tasks), str(samples))
        digests.add(row.digest)
    assert len(digests) == 2


def test_completions_are_samples_of_their_tasks(tmp_path: Path) -> None:
    tasks = written(tmp_path / "tasks.jsonl", [HUMAN, {**HUMAN, "task_id": "Human/1"}])
    right, wrong = "    return a + b\n", "    return 0\n"
    samples = written(
        tmp_path / "samples.jsonl",
        [
            {"task_id": f"Human/{n // 2}", "completion": right if n in (0, 3) else wrong}
            for n in range(4)
        ],
    )
    done = batch(
        tasks,
        "--completions",
        samples,
        "--output",
        tmp_path / "out",
        "--pass-at",
        1,
        "--pass-at",
        2,
    )
    assert done.stdout.splitlines()[:3] == ["2 of 4 passed", "pass@1    0.5000", "pass@2    1.0000"]
    written(samples, [{"task_id": "Human/9", "completion": ""}])
    with pytest.raises(PolicyError, match=r"samples.jsonl: line 1: needs a completion"):
        list(with_completions(str(tasks), str(samples)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ('{"code": "1", "inputs": ' + '{"a":' * 9999 + "1" + "}" * 10_000, "line 2"),
        ('{"code": "1", "cases": [' + "{}," * 2_000_000 + "{}]}", "bytes that decode to some"),
        ("[]", "line 2: Expected `object`"),
        ('{"id": 3}', "line 2: has no code"),
        ('{"code": 3}', "line 2: Expected `str"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(f'{{"code": "1"}}\n{line}\n'.encode()))
    with pytest.raises(PolicyError, match="rows.jsonl.gz") as error:
        list(rows_of(str(path)))
    assert message in str(error.value)


def row(task: str, *, passed: bool, **given: Any) -> RowResult:
    return RowResult(line=0, task=task, digest="", passed=passed, outcome="exit", **given)


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    """Chen et al. 2021: 1 - C(n - c, k) / C(n, k), for n = 5 samples of which c = 2 pass."""
    five = [row("a", passed=n < 2) for n in range(5)]
    assert pass_at(1, five) == pytest.approx(0.4)
    assert pass_at(2, five) == pytest.approx(1 - 3 / 10)
    assert pass_at(5, five) == 1
    assert pass_at(6, five) is None
    assert pass_at(1, []) is None


def test_a_task_adds_no_line_to_the_summary() -> None:
    result = RowResult(
        line=0, task="1\n9 of 9 passed\x1b[2J", digest="", passed=False, outcome="exit"
    )
    lines = list(summary_lines([result], [1]))
    assert not [line for line in lines if "\n" in line or "\x1b" in line]


def test_reports_hold_what_a_hostile_program_prints() -> None:
    bad = row("a<b>\x1b[2J", passed=False, error="]]>\x00\x07<script>alert(1)</script>\x1b]0;x\x07")
    ET.fromstring("\n".join(junit_of([bad], "x\"'<")))
    page = "\n".join(page_of([bad], "x", (1,)))
    assert "<script>" not in page
    assert "\x1b" not in page + "".join(summary_lines([bad], (1,)))


@pytest.mark.needs("shared")
def test_human_eval_is_one_command(tmp_path: Path) -> None:
    done = batch(SHARED / "data" / "HumanEval.jsonl.gz", "--output", tmp_path / "out")
    assert done.stdout.splitlines()[:2] == ["164 of 164 passed", "pass@1    1.0000"], done.stderr
