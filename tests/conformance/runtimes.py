"""Runtimes and tools of `runtimes.toml` in a cell of the profile `workshop`, and outside, as a table.

Each says its version, compiles and runs a real program, and prints the processors and the memory
that it believes in.  The cell has one processor, so that a runtime that sees the host's stands out.
"""

import glob
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

import msgspec

from cellwright import Sandbox
from cellwright.policies.policy import Policy
from cellwright.runner.requests.result import SandboxResult
from tests.conftest import policy_named

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
INSTALLED = Path(os.environ.get("CELLWRIGHT_RUNTIMES", ROOT / ".runtimes"))
_ELSEWHERE = ("~/.pyenv/versions/*/bin", "~/.rustup/toolchains/*/bin")
_SHIMS = ("/.pyenv/shims", "/.cargo/bin")  # they start a program in one of the places above
_WORDS = "the cat sat on the mat\\nthe dog ran\\n"
_SECONDS = 120
_MARK = "<!-- runtimes -->"
_HEAD = "| program | version | started | real program | processors, MiB | remark |"


class Runtime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `runtimes.toml`."""

    name: str
    package: str  # apt:, pip: or npm: and its name
    command: str  # in PATH or, with a slash, a glob below the folder of what was installed
    version: str
    run: str
    expected: str  # the last line that it prints
    limits: str = ""  # prints processors and MiB, "-" for either
    needs: tuple[str, ...] = ()  # other programs
    debug: bool = False  # `processes.debug`
    remark: str = ""


class Row(NamedTuple):
    version: str
    started: bool
    outside: bool
    inside: bool
    limits: str
    remark: str


def runtimes() -> tuple[Runtime, ...]:
    entries = tomllib.loads((HERE / "runtimes.toml").read_text())["runtime"]
    return tuple(msgspec.convert(each, Runtime) for each in entries)


def untried() -> dict[str, str]:
    """Return the reason by name of what no registry here brings."""
    untried: dict[str, str] = tomllib.loads((HERE / "runtimes.toml").read_text())["untried"]
    return untried


def find(command: str) -> str | None:
    if "/" in command:
        return min(glob.glob(str(INSTALLED / command)), default=None)
    places = [each for each in os.get_exec_path() if not each.endswith(_SHIMS)]
    places += [place for each in _ELSEWHERE for place in glob.glob(os.path.expanduser(each))]
    return shutil.which(command, path=os.pathsep.join(places))


def is_installed(runtime: Runtime) -> bool:
    return all(map(find, (runtime.command, *runtime.needs)))


def policy_for(runtime: Runtime) -> Policy:
    """Return `workshop` with one processor, and with the folders of programs that lie elsewhere."""
    workshop = policy_named("workshop")
    found = [path for each in (runtime.command, *runtime.needs) if (path := find(each))]
    folders = {
        str(Path(path).parent.parent) for each in found for path in (each, os.path.realpath(each))
    }
    shown = tuple(
        sorted(each for each in folders if each != "/" and not each.startswith(("/usr", "/etc")))
    )
    return msgspec.structs.replace(
        workshop,
        limits=msgspec.structs.replace(workshop.limits, cpus=1.0),
        processes=msgspec.structs.replace(
            workshop.processes,
            execute=(*workshop.processes.execute, *shown),
            debug=runtime.debug,
        ),
        # Beside a folder in which processes of the host could have sockets, a cell has none otherwise.
        syscalls=msgspec.structs.replace(workshop.syscalls, groups=("unix_sockets",) * bool(shown)),
    )


def script_of(runtime: Runtime, command: str) -> str:
    found = [str(find(each)) for each in (runtime.command, *runtime.needs)]
    path = os.pathsep.join(dict.fromkeys(os.path.dirname(each) for each in found))
    return f"export PATH={path}:$PATH:/usr/sbin IT={found[0]}\nprintf '{_WORDS}' >words.txt\n{command}\n"


def try_inside(runtime: Runtime) -> Row:
    """Run a runtime in a cell, and outside of it only to judge a failure."""
    with (
        Sandbox(policy=policy_for(runtime), pool=0) as box,
        box.session(language="bash") as session,
    ):
        said = session.execute(script_of(runtime, f"{runtime.version} 2>&1"), timeout=_SECONDS)
        result = session.execute(script_of(runtime, runtime.run), timeout=_SECONDS)
        inside = _last(result.stdout) == runtime.expected
        seen = session.execute(script_of(runtime, runtime.limits)) if runtime.limits else None
    first = next((line for line in said.stdout.splitlines() if line.strip()), "")
    version = first.partition(" [/")[0][:60]  # .NET adds the path where it lies
    outside = inside or _works_outside(runtime)
    return Row(
        version, bool(version) and said.exit_code == 0, outside, inside,
        _last(seen.stdout) if seen else "", runtime.remark or ("" if inside else _why(result)),
    )  # fmt: skip


def _works_outside(runtime: Runtime) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["/bin/bash", "-c", script_of(runtime, runtime.run)], cwd=folder, timeout=_SECONDS,
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    return _last(done.stdout) == runtime.expected


def _why(result: SandboxResult) -> str:
    refused = ", ".join(
        f"{each.syscall} {' '.join(each.arguments)}" for each in result.violations[:4]
    )
    return f"{_last(result.stderr) or _last(result.stdout)}; {refused}"


def _last(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()


def line_of(name: str, row: Row) -> str:
    ran = "yes" if row.inside else "fails outside too" if not row.outside else "NO"
    cells = (name, row.version, "yes" if row.started else "NO", ran, row.limits, row.remark)
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"


def write(rows: dict[str, Row]) -> None:
    """Write the table: new rows, and for other runtimes the rows that it has."""
    path = HERE / "RUNTIMES.md"
    head, _, tail = path.read_text().partition(_MARK)
    lines = {
        line.split(" | ")[0].removeprefix("| "): line
        for line in tail.splitlines()
        if line.count(" | ") > 4
    }
    lines |= {name: line_of(name, row) for name, row in rows.items()}
    names = [each.name for each in runtimes()]
    missing = untried() | {
        each.name: f"not installed: {each.package}" for each in runtimes() if each.name not in lines
    }
    table = [
        _HEAD,
        "|---|---|---|---|---|---|",
        *(lines[name] for name in names if name not in missing),
    ]
    rest = [
        "| not tried | reason |",
        "|---|---|",
        *(f"| {name} | {why} |" for name, why in missing.items()),
    ]
    path.write_text("\n".join([f"{head}{_MARK}\n", *table, "", *rest, ""]))


def install(names: list[str]) -> None:
    """Install what is missing: Debian's packages as root, those of PyPI and npm below INSTALLED."""
    wanted = [each for each in runtimes() if not is_installed(each) and each.name in names]
    packages = [package for each in wanted for package in each.package.split()]
    by = {
        kind: [each[4:] for each in packages if each.startswith(f"{kind}:")]
        for kind in ("apt", "pip", "npm")
    }
    if by["apt"]:
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *by["apt"]]
        subprocess.run(command, check=True, env=environment)
    if by["pip"]:
        subprocess.run([sys.executable, "-m", "venv", INSTALLED / "venv"], check=True)
        subprocess.run([INSTALLED / "venv/bin/pip", "install", "-q", *by["pip"]], check=True)
    if by["npm"]:
        command = ["npm", "install", "--prefix", str(INSTALLED), "--silent", "--ignore-scripts"]
        subprocess.run([*command, *by["npm"]], check=True)


def main(arguments: list[str]) -> int:
    known = {each.name: each for each in runtimes()}
    names = [each for each in arguments if each != "install"] or list(known)
    if "install" in arguments:
        install(names)
    rows: dict[str, Row] = {}
    for name in names:
        if is_installed(known[name]):
            rows[name] = try_inside(known[name])
            print(name, *rows[name], sep=" | ", flush=True)
            write(rows)
    return int(any(row.outside and not row.inside for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
