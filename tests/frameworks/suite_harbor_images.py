"""Harbor's own command on a task with an image: users, files, ports, and egress that changes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cellwright.harness.adapters.evaluation.swe_rex import CellDeployment

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("busybox"), reason="needs root and busybox"
)
ENVIRONMENT = "cellwright.harness.adapters.evaluation.harbor:CellEnvironment"
PROGRAMS = (
    "cat", "chmod", "chown", "cp", "grep", "head", "httpd", "id", "ls", "mkdir", "pwd", "rm", "sh", "sleep",
    "stat", "stty", "tar", "touch", "wc", "wget",
)  # fmt: skip
TASK = {
    "task.toml": """version = "1.0"
[environment]
docker_image = "IMAGE"
memory_mb = 512
network_mode = "no-network"
[agent]
user = "joe"
network_mode = "allowlist"
allowed_hosts = ["files.example.org"]
""",
    "instruction.md": "Pack the report as joe, for a server of root on port 80.",
    "environment/report.txt": "of the task\n",
    "solution/solve.sh": (
        "#!/bin/bash\nset -e\n[ $(id -un) = joe ]\nmkdir -p /home/joe/out\n"
        "cp report.txt /home/joe/out/\ntar -C /home/joe -cf /home/joe/out.tar out\n"
    ),
    "tests/test.sh": (
        "#!/bin/bash\nmkdir /srv && tar -C /srv -xf /home/joe/out.tar\n"
        '[ "$(stat -c %U /srv/out/report.txt)" = joe ] && httpd -p 80 -h /srv/out\n'
        "wget -qO /logs/verifier/got http://127.0.0.1/report.txt\n"
        "grep -q 'of the task' /logs/verifier/got && r=1 || r=0\n"
        "systemctl status 2>/logs/verifier/systemctl\n"
        "echo $r > /logs/verifier/reward.txt\n"
    ),
}  # fmt: skip
AGENT = """
from harbor.agents.base import BaseAgent


class InImage(BaseAgent):
    @staticmethod
    def name():
        return "in image"

    def version(self):
        return "1"

    async def setup(self, environment):
        assert environment.cell.sandbox.network.rules == ()
        done = await environment.exec("id -un; pwd; touch /etc/installed", user="root")
        assert (done.return_code, done.stdout) == (0, "root\\n/work\\n"), done

    async def run(self, instruction, environment, context):
        assert environment.cell.sandbox.network.rules == ("allow files.example.org:443",)
        done = await environment.exec("id -un; ls /etc/installed; touch /etc/no; exit 3", cwd="/etc")
        assert (done.return_code, done.stdout) == (3, "joe\\n/etc/installed\\n"), done
        try:
            await environment.exec("sleep 600", timeout_sec=1)
        except RuntimeError as error:
            assert "timed out after 1 seconds" in str(error)
        else:
            raise AssertionError("it did not time out")
        line = "mkdir ~/out; cp report.txt ~/out; tar -C ~ -cf ~/out.tar out"
        done = await environment.exec(line, env={"HOME": "/home/joe"})
        assert done.return_code == 0, done
        self.logs_dir.joinpath("done").write_text("done")
"""


def copied(root: Path, program: str) -> None:
    """Copy a program of this host, and the libraries that it loads."""
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    for path in (program, *re.findall(r"(/\S+) \(0x", told)):
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(path), place)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system: bash and busybox, and a user joe."""
    root = tmp_path_factory.mktemp("image")
    for name in ("bin", "etc", "tmp", "home/joe", "root", "work"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for name in ("bash", "busybox"):
        found = shutil.which(name)
        assert found
        copied(root, found)
        if not (root / "bin" / name).exists():
            (root / "bin" / name).symlink_to(found)
    for name in PROGRAMS:
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/bash\njoe:x:1000:1000::/home/joe:/bin/bash\n"
    )
    (root / "etc/group").write_text("root:x:0:\njoe:x:1000:\n")
    os.chown(root / "home/joe", 1000, 1000)
    return root


@pytest.fixture(scope="module")
def place(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("harbor")
    for name, text in TASK.items():
        path = made / "tasks" / "report" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            text.replace('docker_image = "IMAGE"', f'docker_image = "{image}"\nworkdir = "/work"')
        )
    (made / "agent_in_image.py").write_text(AGENT)
    return made


def run(place: Path, *words: str, tasks: str = "tasks") -> tuple[str, list[float | None]]:
    """Run Harbor's command; return what it printed, and the reward of each trial."""
    env = {
        "PATH": os.environ["PATH"], "HOME": str(place), "PYTHONPATH": str(place),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "off", "DO_NOT_TRACK": "1",
    }  # fmt: skip
    done = subprocess.run(
        [Path(sys.executable).with_name("harbor"), "run", "-p", tasks, "--env", ENVIRONMENT,
         "--environment-kwarg", "ports=[443]", "-o", "jobs", "-q", "-y", *words],
        cwd=place, env=env, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    results = [
        json.loads(path.read_text()) for path in place.glob(f"jobs/{words[1]}/*/result.json")
    ]
    verified = [each["verifier_result"] for each in results]
    printed = done.stdout + done.stderr + str([each["exception_info"] for each in results])
    return printed, [each and each["rewards"]["reward"] for each in verified]


def test_an_agent_has_its_user_and_its_hosts_in_the_image(place: Path) -> None:
    printed, rewards = run(place, "--job-name", "agent", "-a", "agent_in_image:InImage")
    assert rewards == [1.0], printed
    (trial,) = place.glob("jobs/agent/*/agent/done")
    told = trial.parents[1] / "verifier" / "systemctl"
    assert "systemctl: command not found" in told.read_text()


def test_many_trials_share_an_image(place: Path) -> None:
    printed, rewards = run(place, "--job-name", "many", "-a", "oracle", "-k", "4", "-n", "4")
    assert rewards == [1.0] * 4, printed


def test_a_dockerfile_is_built_once(place: Path, image: Path) -> None:
    task = place / "built" / "report"
    shutil.copytree(place / "tasks" / "report", task)
    text = (task / "task.toml").read_text()
    (task / "task.toml").write_text(re.sub("docker_image = .*\n", "", text))
    shutil.copytree(image, task / "environment" / "root", symlinks=True)
    (task / "environment" / "Dockerfile").write_text(
        "FROM scratch\nCOPY root/ /\nCOPY report.txt /work/\nRUN chown joe /home/joe && chmod 1777 /tmp\n"
    )
    printed, rewards = run(
        place, "--job-name", "built", "-a", "oracle", "-k", "2", "-n", "2", tasks="built"
    )
    assert rewards == [1.0] * 2, printed


async def test_a_deployment_of_swe_rex_has_an_image(image: Path) -> None:
    from swerex.runtime.abstract import (
        BashAction,
        Command,
        CreateBashSessionRequest,
        WriteFileRequest,
    )

    async with CellDeployment(image=str(image)) as deployment:
        runtime = deployment.runtime
        await runtime.create_session(CreateBashSessionRequest())
        await runtime.run_in_session(BashAction(command="cd /etc && x=42 && chown joe group"))
        done = await runtime.run_in_session(
            BashAction(command="echo $x $PWD $(stat -c %U group); id -u")
        )
        assert (done.output.strip(), done.exit_code) == ("42 /etc joe\n0", 0)
        await runtime.write_file(
            WriteFileRequest(path="/opt/tool/run", content="#!/bin/sh\nexit 7\n")
        )
        done = await runtime.execute(
            Command(command="chmod +x /opt/tool/run; /opt/tool/run", shell=True)
        )
        assert done.exit_code == 7
