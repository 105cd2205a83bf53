"""The rows and refusals of commands about GPUs, and the script that tries a real one."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import made_up_gpu
from tests.conftest import ROOT

pytestmark = [pytest.mark.needs("root", "cgroup", "landlock", "gcc")]
DOCTOR = "from cellwright.harness.cli.helping import doctor\nanswer = doctor._gpu()\n"


def test_doctor_has_the_gpu_compute_or_says_why_it_does_not() -> None:
    assert made_up_gpu.run(DOCTOR) == ["gpu", "PASS", "made-up GPU computes in a cell", ""]
    none = made_up_gpu.run(DOCTOR, nodes={})
    assert none[1:3] == ["PASS", "this host has no NVIDIA GPU; cellwright works without one"]
    half = made_up_gpu.run(DOCTOR, nodes={"nvidia0": "zero", "nvidiactl": "null"})
    assert half[1:] == [
        "WARN",
        "devices.gpu: this host has no /dev/nvidia-uvm",
        "nvidia-modprobe -u -c 0, or nvidia-smi once",
    ]


def test_doctor_tells_what_was_refused_if_the_driver_does_not_start() -> None:
    """Here it finds its names of threads refused, as CUDA did before the listener answered for them."""
    program = f"""
from cellwright.runner.listening import machine_files
machine_files._COMM = machine_files.re.compile("never")
{DOCTOR}"""
    _, verdict, said, _ = made_up_gpu.run(program)
    assert verdict == "FAIL"
    assert "cuInit returns 304" in said


@pytest.mark.parametrize(
    "words", [("run", "--gpu", "-c", "1"), ("explain", "--gpu"), ("exec", "--gpu", "--", "true")]
)
def test_a_command_says_in_one_sentence_that_there_is_no_gpu(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    program = f"""
import subprocess, sys
done = subprocess.run([sys.executable, "-m", "cellwright", *{words!r}], capture_output=True, text=True, cwd={str(tmp_path)!r})
answer = [done.returncode, done.stderr]
"""
    status, said = made_up_gpu.run(program, nodes={})
    assert status != 0
    assert "this host has no NVIDIA GPU" in said
    assert "Traceback" not in said


def test_the_script_for_a_real_gpu_runs_with_one_that_is_made_up_and_refuses_without() -> None:
    script, result = [sys.executable, "scripts/gpu"], ROOT / "benchmarks/results/gpu.md"
    before = result.exists() and result.read_bytes()
    done = subprocess.run(
        [*script, "--made-up"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, "FAILED" in done.stdout) == (0, False), done.stdout + done.stderr
    assert "memory new to the next cell is zero" in done.stdout
    assert (result.exists() and result.read_bytes()) == before
    program = """
import subprocess, sys
done = subprocess.run([sys.executable, "scripts/gpu"], capture_output=True, text=True)
answer = [done.returncode, done.stdout, done.stderr]
"""
    status, out, said = made_up_gpu.run(program, nodes={})
    assert (status, out) == (1, "")
    assert (
        said
        == "scripts/gpu: devices.gpu: this host has no NVIDIA GPU, or its kernel does not drive it\n"
    )
