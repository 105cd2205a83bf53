"""Installation of a suite: packages, sources, and what its `prepare` builds; once, as root."""

import hashlib
import os
import subprocess
from pathlib import Path

import msgspec

from .suites import Suite

FOLDER = Path(os.environ.get("CELLWRIGHT_CONFORMANCE", "/var/tmp/cellwright-conformance"))
_DONE = "prepared"


def prepare(suite: Suite) -> Path:
    """Return the folder of the suite, with everything that it needs."""
    folder = FOLDER / suite.name
    wanted = hashlib.sha256(msgspec.json.encode(_steps(suite))).hexdigest()
    done = folder / _DONE
    if done.is_file() and done.read_text() == wanted:
        return folder
    if folder.exists():
        _run(["rm", "-rf", str(folder)], FOLDER, suite)
    folder.mkdir(parents=True, mode=0o755)
    for step in _steps(suite):
        _run(["bash", "-ec", step], folder, suite)
    _run(["chmod", "-R", "a+rX,go-w", str(folder)], folder, suite)
    done.write_text(wanted)
    return folder


def _steps(suite: Suite) -> list[str]:
    quoted = {
        name: " ".join(f"'{each}'" for each in getattr(suite, name))
        for name in ("apt", "pip", "npm")
    }
    steps = []
    if suite.apt:
        steps.append(
            f"apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 {quoted['apt']}"
        )
    if suite.source:
        # apt-get source needs deb-src lines in the host's sources of apt.
        steps.append(
            f"apt-get source -q --download-only '{suite.source}' && dpkg-source --no-check -x *.dsc source && rm -f *.tar.* *.dsc"
        )
    if suite.pip:
        steps.append(f"{suite.python} -m venv venv && venv/bin/pip install -q {quoted['pip']}")
    if suite.npm:
        steps.append(f"npm install --no-audit --no-fund --silent {quoted['npm']}")
    return [*steps, f"export SUITE=$PWD\n{suite.prepare}"] if suite.prepare else steps


def _run(command: list[str], folder: Path, suite: Suite) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    ran = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", check=False, timeout=suite.prepare_seconds,
    )  # fmt: skip
    if ran.returncode:
        raise SystemExit(f"{suite.name}: could not prepare: {command[-1]}\n{ran.stdout[-4000:]}")
