"""Build systems of `build_systems.toml` below `cellwright exec --allow-registries`, and below srt, as a
table.

Each builds and starts a small project whose dependency comes from a registry on loopback that is
reached by its public name; no variable names a proxy.  As root.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from datetime import date
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.projects.programs import Home, delegated_cgroups, find, home, install
from tests.projects.registries import SITES, WORDS, c_archive, host
from tests.projects.stage import TRUST, enter, stage

HERE = Path(__file__).parent
_SECONDS = 240
_MARK = "<!-- build systems -->"
_SIDES = ("outside", "user", "root", "srt")
_SRT = "npm:@anthropic-ai/sandbox-runtime", "apt:bubblewrap", "apt:socat", "apt:ripgrep"


class BuildSystem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `build_systems.toml`."""

    name: str
    needs: tuple[str, ...]
    version: str
    run: str
    files: dict[str, str]
    packages: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    remark: str = ""


class Outcome(NamedTuple):
    passed: bool
    output: str


def build_systems() -> dict[str, BuildSystem]:
    entries = tomllib.loads((HERE / "build_systems.toml").read_text())["system"]
    return {each["name"]: msgspec.convert(each, BuildSystem) for each in entries}


def untried() -> dict[str, str]:
    """Return the reason by name of each that no registry here brings."""
    found: dict[str, str] = tomllib.loads((HERE / "build_systems.toml").read_text())["untried"]
    return found


def is_installed(system: BuildSystem) -> bool:
    return all(map(find, system.needs))


def build(system: BuildSystem, side: str, place: Home) -> Outcome:
    """Build a fresh project on one side: outside, in a cell of a person, or below srt."""
    digest = hashlib.sha256(c_archive()).hexdigest()
    files = {
        name: text.replace("{sha256}", digest).replace("{gems}", host("rubygems"))
        for name, text in system.files.items()
    }
    project = place.project(f"{system.name}-{side}", files)
    environment = {**place.environment, **system.environment}
    line = ["sh", "-c", system.run]
    if side in ("user", "root"):
        variables = [word for name in system.environment for word in ("--env", name)]
        command = place.exec(["-v", "--allow-registries", *variables], line)
    else:
        environment |= {
            **TRUST,
            "CLAUDE_CODE_TMPDIR": str(_made(place.path / "tmp", place)),
        }  # TMPDIR of srt
        command = place.command(
            ["srt", "--settings", str(_settings(place, project)), "-c", system.run]
            if side == "srt"
            else line
        )
    try:
        done = subprocess.run(
            command, cwd=project, env=environment, timeout=_SECONDS, capture_output=True, text=True,
            errors="replace", check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return Outcome(False, f"{late.stdout!r} {late.stderr!r}\nnot finished after {_SECONDS} s")
    output = done.stdout + done.stderr
    return Outcome(done.returncode == 0 and _last(done.stdout).endswith(WORDS), output)


def _settings(place: Home, project: Path) -> Path:
    """Write the settings of srt that allow the same: these hosts, and writing to the project; caches
    of package managers lie in the home directory, so that has to be writable, too."""
    path = place.path.parent / "srt.json"
    path.write_text(json.dumps({
        "network": {"allowedDomains": list(SITES), "deniedDomains": []},
        "filesystem": {"denyRead": [], "allowWrite": [str(project), str(place.path), "/tmp"], "denyWrite": []},
    }))  # fmt: skip
    return path


def _made(path: Path, place: Home) -> Path:
    path.mkdir(exist_ok=True)
    place.give(path)
    return path


def _last(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()


def _version(system: BuildSystem, place: Home) -> str:
    done = subprocess.run(
        place.command(["sh", "-c", system.version]), env=place.environment, cwd=place.path, timeout=_SECONDS,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.search(r"\d+(\.\d+)+", done.stdout)
    return found[0] if found else ""


def try_all(systems: list[BuildSystem], sides: tuple[str, ...]) -> dict[str, list[str]]:
    """Build each on each side; return the rows of the table by name."""
    rows = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        directory.chmod(0o755)
        with stage(SITES, directory) as network, delegated_cgroups("user") as cgroups:
            homes = {
                side: home(side, directory, network, cgroups if side == "user" else "")
                for side in sides
            }
            for system in systems:
                found = {side: build(system, side, homes[side]) for side in sides}
                for side, outcome in found.items():
                    print(
                        f"{system.name} {side}: {'built' if outcome.passed else outcome.output}",
                        flush=True,
                    )
                words = ["yes" if found[side].passed else "NO" for side in sides]
                rows[system.name] = [_version(system, homes[sides[0]]), *words, system.remark]
    return rows


def write(rows: dict[str, list[str]]) -> None:
    path = HERE / "BUILD_SYSTEMS.md"
    head = path.read_text().partition(_MARK)[0]
    missing = untried() | {
        name: f"not installed: {' '.join(each.packages)}"
        for name, each in build_systems().items()
        if name not in rows
    }
    table = [
        f"{date.today().isoformat()}, Linux {os.uname().release}:", "",
        f"| build system | version | outside | cellwright, user | cellwright, root | {srt_version()} | remark |",
        "|---|---|---|---|---|---|---|",
        *(f"| {name} | {' | '.join(row)} |" for name, row in rows.items()),
        "", "| not tried | reason |", "|---|---|", *(f"| {name} | {why} |" for name, why in missing.items()),
    ]  # fmt: skip
    path.write_text("\n".join([f"{head}{_MARK}\n", *table, ""]))


def srt_version() -> str:
    found = subprocess.run(
        [find("srt") or "srt", "--version"], capture_output=True, text=True, check=False
    )
    return f"srt {found.stdout.strip()}"


def main(arguments: list[str]) -> int:
    enter("tests.projects.build_systems")
    known = build_systems()
    names = [each for each in arguments if each in known] or list(known)
    sides = tuple(each for each in arguments if each in _SIDES) or _SIDES
    if "install" in arguments:
        install(
            [
                package
                for each in known.values()
                if not is_installed(each)
                for package in each.packages
            ]
        )
    rows = try_all([known[name] for name in names if is_installed(known[name])], sides)
    if len(names) == len(known) and sides == _SIDES:
        write(rows)
    return int(any("NO" in row[2:4] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
