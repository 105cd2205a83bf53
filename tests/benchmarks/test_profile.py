"""The profile of a run: its counts, and the names of modules."""

import threading
from pathlib import Path

import pytest

from cellwright.benchmarks import profile, profile_call, profile_command


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("6660,,raw_syscalls:sys_enter,19,100.00,,", 6660),
        ("<not counted>,,raw_syscalls:sys_enter,0,100.00,,", 0),  # it slept
        ("<not supported>,,raw_syscalls:sys_enter,0,100.00,,", None),
        ("event syntax error", None),
    ],
)
def test_what_perf_wrote_is_read(line: str, count: int | None, tmp_path: Path) -> None:
    file = tmp_path / "out"
    assert profile._count_in(file) is None
    file.write_text(f"# started on a day\n\n{line}\n")
    assert profile._count_in(file) == count


def test_modules_have_the_names_of_documents() -> None:
    assert profile._name_of(profile.__file__) == "benchmarks/profile.py"
    assert profile._name_of(threading.__file__).endswith("/threading.py")
    assert profile._name_of("<string>") == "<string>"


def test_calls_of_threads_that_start_later_are_noted() -> None:
    seen: list[str] = []

    def work() -> None:
        pass

    with profile._profiled(lambda frame, event, _: seen.append(frame.f_code.co_name)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert "work" in seen
    seen.clear()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == []


def test_phases_of_a_command_are_differences_of_its_marks() -> None:
    marks = [("Python starts", 10.1, 0.05, 60), ("modules", 10.3, 0.15, 90)]
    run = profile_command.ProfiledCommand(marks=marks, used={"command": 0.15})
    table = profile_command.phases([(10.0, run, 10.5)] * 3)
    rows = [(name, round(wall), cpu and round(cpu), count) for name, wall, cpu, count in table.rows]
    assert rows == [
        ("Python starts", 100, 50, 60),
        ("modules", 200, 100, 30),
        ("Python ends", 200, None, 0),
    ]


def test_a_tool_call_is_split_into_both_sides_and_the_rest() -> None:
    table = profile_call.table(
        [profile_call.CallCosts(wall=100e-6, host=50e-6, guest=20e-6)], [10e-6]
    )
    assert [round(row[1]) for row in table.rows] == [100, 50, 20, 30, 10]
    assert [round(row[2]) for row in table.rows] == [10, 5, 2, 3, 1]
