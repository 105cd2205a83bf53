"""Harbor's own command on small tasks, with its oracle and a scripted agent; and hostile downloads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harbor.models.task.config import NetworkMode, NetworkPolicy

from cellwright.errors import WorkspaceError
from cellwright.harness.adapters.common.cell_sandbox_session import AdapterSession
from cellwright.harness.adapters.evaluation import transfers
from cellwright.harness.adapters.evaluation.harbor import CellEnvironment, CellOptions

ENVIRONMENT = "cellwright.harness.adapters.evaluation.harbor:CellEnvironment"
CONFIGURATION = """version = "1.0"
[environment]
workdir = "/app"
memory_mb = 512
cpus = 1
network_mode = "no-network"
"""
COUNT = {
    "task.toml": CONFIGURATION,
    "instruction.md": "Write the number of words in words.txt to answer.txt.",
    "environment/words.txt": "one two three\n",
    "solution/solve.sh": "#!/bin/bash\nwc -w < words.txt > answer.txt\n",
    "tests/test.sh": (
        "#!/bin/bash\ncat /etc/shadow\n"
        'if [ "$(tr -d " " < /app/answer.txt)" = 3 ]; then echo 1; else echo 0; fi'
        " > /logs/verifier/reward.txt\n"
    ),
}
GREET = COUNT | {
    "instruction.md": "Write hello to greeting.txt.",
    "environment/words.txt": "",
    "solution/solve.sh": "#!/bin/bash\necho bye > greeting.txt\n",
    "tests/test.sh": (
        "#!/bin/bash\ngrep -q hello /app/greeting.txt && r=1 || r=0\n"
        'echo "{\\"reward\\": $r}" > /logs/verifier/reward.json\n'
    ),
}
AGENT = """
from harbor.agents.base import BaseAgent


class Scripted(BaseAgent):
    @staticmethod
    def name():
        return "scripted"

    def version(self):
        return "1"

    async def setup(self, environment):
        pass

    async def run(self, instruction, environment, context):
        line = "pwd; cat /etc/shadow; wc -w < words.txt > answer.txt; echo hello > greeting.txt; exit 3"
        done = await environment.exec(line, env={"A": "1"}, user="root")
        assert (done.return_code, done.stdout) == (3, "/app\\n"), done
        assert "/etc/shadow: No such file" in done.stderr
        assert await environment.is_dir("/logs/agent")
        assert not await environment.is_file("/app")
        try:
            await environment.exec("sleep 600", timeout_sec=1)
        except RuntimeError as error:
            assert "timed out after 1 seconds" in str(error)
        else:
            raise AssertionError("it did not time out")
        try:
            await environment.exec("id", user="nobody")
        except RuntimeError as error:
            assert "a cell has one user" in str(error)
        self.logs_dir.joinpath("done").write_text("done")
"""


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("harbor")
    written(made / "tasks" / "count", COUNT)
    written(made / "tasks" / "greet", GREET)
    written(made / "imaged" / "one", COUNT | {"environment/docker-compose.yaml": "services: {}\n"})
    (made / "scripted_agent.py").write_text(AGENT)
    return made


def run(place: Path, tasks: str, agent: str) -> tuple[str, dict[str, dict[str, float] | None]]:
    """Run Harbor's command; return what it printed, and the rewards of each task."""
    job = f"{tasks}-{agent.partition(':')[0]}"
    env = {
        "PATH": os.environ["PATH"], "HOME": str(place), "PYTHONPATH": str(place),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "off", "DO_NOT_TRACK": "1",
    }  # fmt: skip
    done = subprocess.run(
        [Path(sys.executable).with_name("harbor"), "run", "-p", tasks, "-a", agent,
         "--env", ENVIRONMENT, "-o", "jobs", "--job-name", job, "-q", "-y"],
        cwd=place, env=env, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    rewards = {}
    for path in (place / "jobs" / job).glob("*/result.json"):
        told = json.loads(path.read_text())
        verified = told["verifier_result"]
        rewards[told["task_name"].rpartition("/")[2]] = verified and verified["rewards"]
    return done.stdout + done.stderr, rewards


def test_the_command_runs_tasks_with_its_oracle(place: Path) -> None:
    """The second task's solution is wrong, so that both rewards occur."""
    printed, rewards = run(place, "tasks", "oracle")
    assert rewards == {"count": {"reward": 1.0}, "greet": {"reward": 0}}, printed


def test_the_command_runs_tasks_with_a_scripted_agent(place: Path) -> None:
    printed, rewards = run(place, "tasks", "scripted_agent:Scripted")
    assert rewards == {"count": {"reward": 1.0}, "greet": {"reward": 1}}, printed
    jobs = place / "jobs" / "tasks-scripted_agent"
    assert len([*jobs.glob("*/agent/done")]) == 2, printed
    (words,) = jobs.glob("count__*/verifier/test-stdout.txt")
    assert "/etc/shadow: No such file" in words.read_text()


def test_a_task_with_several_containers_is_refused(place: Path) -> None:
    printed, rewards = run(place, "imaged", "oracle")
    assert rewards == {}
    assert "the task needs several containers" in printed


class Trial(CellEnvironment):
    """An environment without a task."""

    def __init__(self) -> None:
        self.options = CellOptions()


@pytest.mark.parametrize(
    ("mode", "hosts", "rules"),
    [
        (NetworkMode.NO_NETWORK, (), []),
        (NetworkMode.PUBLIC, (), ["*"]),
        (NetworkMode.ALLOWLIST, ("a.example.org", "*.b.example.org"), ["a.example.org", "*.b.example.org"]),
    ],
)  # fmt: skip
def test_the_network_of_a_task_becomes_rules(
    mode: NetworkMode, hosts: tuple[str, ...], rules: list[str]
) -> None:
    assert [
        each.host
        for each in Trial()._rules(NetworkPolicy(network_mode=mode, allowed_hosts=[*hosts]))
    ] == rules


def test_folders_go_in_and_out_with_their_executable_files(tmp_path: Path) -> None:
    source = written(tmp_path / "in", {"a/run.sh": "#!/bin/sh\necho ran\n", "b": "text"})
    (source / "a" / "run.sh").chmod(0o755)
    with AdapterSession(pool=0) as cell:
        transfers.upload(cell, source, "/workspace/new/folder")
        assert cell.run(["/workspace/new/folder/a/run.sh"]).stdout == b"ran\n"
        transfers.upload(cell, source / "b", "/workspace/other/name")
        assert cell.files.read("/workspace/other/name") == b"text"
        cell.run("ln -s /etc/passwd new/folder/link; mkfifo new/folder/fifo", shell=True)
        transfers.download(cell, "/workspace/new", tmp_path / "out")
        found = {str(each.relative_to(tmp_path / "out")) for each in (tmp_path / "out").rglob("*")}
        assert found == {"folder", "folder/a", "folder/a/run.sh", "folder/b"}
        with pytest.raises(OSError, match="cannot read /workspace/missing"):
            transfers.download(cell, "/workspace/missing", tmp_path / "out")


@pytest.mark.parametrize("name", ["../escaped", "/tmp/cellwright-escaped", "a/../../escaped"])
def test_an_archive_of_a_cell_writes_nothing_elsewhere(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cell's own tar can be any program: here it names a file beside the folder."""
    lie = "import io, sys, tarfile\nt = tarfile.open(fileobj=sys.stdout.buffer, mode='w')\n"
    lie += f"i = tarfile.TarInfo({name!r})\ni.size = 1\nt.addfile(i, io.BytesIO(b'x'))\nt.close()"
    with AdapterSession(pool=0) as cell:
        run_in_cell = cell.run
        monkeypatch.setattr(cell, "run", lambda *_, **__: run_in_cell(["python3", "-c", lie]))
        with pytest.raises(WorkspaceError, match="leads out of"):
            transfers.download(cell, "/workspace", tmp_path / "out" / "deep")
    assert not (tmp_path / "escaped").exists()
    assert not (tmp_path / "out" / "escaped").exists()
    assert not Path("/tmp/cellwright-escaped").exists()


def test_a_folder_that_is_too_large_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "MOST_BYTES", 100_000)
    with AdapterSession(pool=0) as cell:
        cell.run(["sh", "-c", "head -c 200000 /dev/zero > zeros"])
        with pytest.raises(WorkspaceError, match="more than 100000 bytes"):
            transfers.download(cell, "/workspace", tmp_path)
