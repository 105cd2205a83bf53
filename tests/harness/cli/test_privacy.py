"""`cellwright privacy`, and `cellwright run --privacy`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

TEXT = "Dear Ann,\nwrite to ann@example.org or +1 202-555-0143\n"


def cellwright(*arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cellwright", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_scan_says_where_and_which_kind_and_not_the_value(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    done = cellwright("privacy", "scan", str(file))
    assert done.returncode == 1
    assert [line.split()[:4] for line in done.stdout.splitlines()] == [
        ["2", "10", "15", "email"], ["2", "29", "15", "phone"],
    ]  # fmt: skip
    assert "ann@" not in done.stdout + done.stderr
    assert "email 1, phone 1" in done.stderr
    shown = cellwright("privacy", "scan", "--show", "--json", "--kind", "email", "-", input=TEXT)
    assert [row["value"] for row in json.loads(shown.stdout)] == ["ann@example.org"]
    assert cellwright("privacy", "scan", "-", input="nothing\n").returncode == 0


def test_redact_prints_tokens(tmp_path: Path) -> None:
    done = cellwright("privacy", "redact", "-", input=TEXT)
    assert done.stdout.startswith("Dear Ann,\nwrite to pii_email_")
    assert "@" not in done.stdout


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "cannot read" in cellwright("privacy", "scan", str(tmp_path / "no")).stderr
    (tmp_path / "bin").write_bytes(b"\xff\xff")
    assert "must be UTF-8" in cellwright("privacy", "scan", str(tmp_path / "bin")).stderr


@pytest.mark.needs("userns")
def test_run_with_privacy_prints_tokens_only(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(TEXT)
    code = "print(open('a.csv').read())\nprint('bob@' + 'example.org')\nraise ValueError('eve@' + 'example.org')"
    for form in ([], ["--json"], ["--json-lines"]):
        done = cellwright("run", "--privacy", *form, "--file", str(file), "-c", code)
        assert done.returncode == 1
        assert "@example" not in done.stdout + done.stderr, form  # a traceback quotes the source
        assert done.stdout.count("pii_email_") >= 2
