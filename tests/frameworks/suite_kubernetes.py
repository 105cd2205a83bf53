"""The example of a pod: valid by the schemas of Kubernetes, and as restricted as its page says."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cellwright import Sandbox
from cellwright.harness.cli.commands import complete_parser

POD = Path(__file__).parents[2] / "harness" / "fleet" / "pod.yaml"
VERSION = "1.33"  # the first in which user namespaces of pods are on by default
DOCUMENTS = list(yaml.safe_load_all(POD.read_text()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: each["kind"])
def test_each_document_is_valid(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "containers", 0, "securityContext", "procMount"), 5),
        (("spec", "containers", 0, "securityContext", "seccomp"), {}),
        (("spec", "hostUsers"), "no"),
        (("spec", "containers"), {}),
    ],
)
def test_a_wrong_document_is_noticed(path: tuple[Any, ...], value: object) -> None:
    wrong: Any = copy.deepcopy(DOCUMENTS[0])
    place = wrong
    for each in path[:-1]:
        place = place[each]
    place[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_no_container_has_more_than_its_page_says() -> None:
    pod = DOCUMENTS[0]["spec"]
    assert pod["hostUsers"] is False
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all("hostPath" not in volume for volume in pod["volumes"])
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert "privileged" not in context
        assert container["resources"]["limits"]["memory"]
    cells, agent = (each["securityContext"] for each in pod["containers"])
    assert set(cells) - set(agent) == {"procMount", "appArmorProfile"}
    assert agent["seccompProfile"] == {"type": "RuntimeDefault"}


def test_its_commands_are_those_of_cellwright() -> None:
    cells = DOCUMENTS[0]["spec"]["containers"][0]
    line = cells["args"][0].split("exec cellwright ")[1].split()
    options = complete_parser().parse_args(line)
    assert options.optional == ["cgroup"]
    probe = cells["readinessProbe"]["exec"]["command"]
    asked = complete_parser().parse_args(probe[1:])
    assert str(asked.socket) == str(options.socket)


def test_its_commands_serve_cells_in_a_volume_that_every_user_may_write(tmp_path: Path) -> None:
    """Here without a container: the line that starts the daemon, and its probe."""
    cells = DOCUMENTS[0]["spec"]["containers"][0]
    volume = tmp_path / "v"
    volume.mkdir()
    volume.chmod(0o777)
    line, *probe = (
        each.replace("/run/cells", str(volume))
        for each in (cells["args"][0], *cells["readinessProbe"]["exec"]["command"])
    )
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    failed = subprocess.run(probe, env=env, capture_output=True, check=False)
    assert failed.returncode != 0
    with subprocess.Popen([*cells["command"], line], env=env, stderr=subprocess.PIPE) as daemon:
        try:
            assert daemon.stderr
            assert b"serving" in daemon.stderr.readline()
            done = subprocess.run(probe, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            with Sandbox(connect=volume / "own" / "cellwright.sock") as sandbox:
                assert sandbox.execute("6 * 7").value == 42
        finally:
            daemon.terminate()
