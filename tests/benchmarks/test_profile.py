"""The profile of a run: its counts, and the names of modules."""

import threading
from pathlib import Path

import pytest

from cellwright.benchmarks import profile


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
