"""Programs of the tables: how they are installed and found, and how `cellwright exec` starts them, as
root and as an ordinary user, with a home directory of the test."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.projects.stage import ADDRESS, PEOPLE, TRUST

ROOT = Path(__file__).parents[2]
# In a place that ordinary users can read, and that `cellwright exec` shows.
PROGRAMS = Path(os.environ.get("CELLWRIGHT_PROGRAMS", "/opt/cellwright-programs"))
# The environments of PyPI are last, since each has a python3.
PLACES = (
    PROGRAMS / "bin", PROGRAMS / "node_modules/.bin",
    *map(Path, ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")), *sorted(PROGRAMS.glob("venv-*/bin")),
)  # fmt: skip
# Root's own may lie where nobody else can read.
_INTERPRETER = f"/usr/bin/python3.{sys.version_info.minor}"
_START = "import runpy, sys; sys.path[:0] = {path!r}; sys.argv[0] = 'cellwright'; runpy.run_module('cellwright', run_name='__main__')"
_POLICY = f'extends = "project"\nname = "project"\n[network]\naddresses = ["{ADDRESS}/32"]\n'


class Home(NamedTuple):
    """The home directory of one of PEOPLE, and a file with the policy beside it."""

    person: str
    path: Path
    network: list[str]
    cgroups: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Return all variables that programs get: none names a proxy."""
        path = os.pathsep.join(map(str, PLACES))
        return {
            "HOME": str(self.path), "PATH": path, "LANG": "C.UTF-8", "TERM": "xterm-256color",
            "USER": self.person, "LOGNAME": self.person,
            **({"CELLWRIGHT_CGROUP_ROOT": self.cgroups} if self.cgroups else {}),
        }  # fmt: skip

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command as its person starts it, in the network of programs."""
        if self.person == "root":
            return [*self.network, *command]
        uid = str(PEOPLE[self.person])
        return [
            *self.network, "setpriv", "--reuid", uid, "--regid", uid, "--clear-groups",
            "--inh-caps=-all", "--bounding-set=-all", "--", *command,
        ]  # fmt: skip

    def exec(self, options: Sequence[str], command: Sequence[str]) -> list[str]:
        """Return `cellwright exec` with these options, as its person starts it."""
        path = [str(ROOT), *(each for each in sys.path if each.endswith("site-packages"))]
        interpreter = sys.executable if self.person == "root" else _INTERPRETER
        start = [interpreter, "-I", "-c", _START.format(path=path)]
        policy = ["--policy", str(self.path.parent / "policy.toml")]
        trust = [word for name, value in TRUST.items() for word in ("--env", f"{name}={value}")]
        optional = ["--optional", "cgroup"] if self.person != "root" and not self.cgroups else []
        return self.command([*start, "exec", *optional, *policy, *trust, *options, "--", *command])

    def give(self, *paths: Path) -> None:
        """Make the person the owner of these, and of everything below."""
        owner = f"{PEOPLE[self.person]}:{PEOPLE[self.person]}"
        if self.person != "root":
            subprocess.run(["chown", "-Rh", owner, *map(str, paths)], check=True)

    def project(self, name: str, files: Mapping[str, str]) -> Path:
        """Make a project with files, in a work tree of git."""
        place = self.path / "src" / name
        for file, text in files.items():
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            (place / file).write_text(text)
        self.give(self.path / "src")
        git = ["git", "-C", str(place)]
        for command in ([*git, "init", "-q"], [*git, "add", "."], [*git, "commit", "-qm", "Begin"]):
            subprocess.run(
                self.command(command), env=self.environment, check=True, capture_output=True
            )
        return place


@contextlib.contextmanager
def delegated_cgroups(person: str) -> Iterator[str]:
    """Make cgroups of version 1 that an ordinary user may use, as an administrator does; return the
    value of CELLWRIGHT_CGROUP_ROOT, empty where there is no such hierarchy."""
    name, uid = f"cellwright-tests-{os.getpid()}", PEOPLE[person]
    kinds = ("memory", "cpu", "cpuacct", "pids", "freezer")
    made = [
        place / name for kind in kinds if (place := Path("/sys/fs/cgroup", kind)).is_mount()
    ]  # fmt: skip
    for each in made:
        each.mkdir()
        for path in (each, each / "cgroup.procs", each / "tasks"):
            os.chown(path, uid, uid)
    try:
        yield str(made[0]) if made else ""
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # a process that still ends
                each.rmdir()


def home(person: str, directory: Path, network: list[str], cgroups: str = "") -> Home:
    made = Home(person, directory / person / "home", network, cgroups)
    made.path.mkdir(parents=True)
    (made.path.parent / "policy.toml").write_text(_POLICY)
    (made.path / ".gitconfig").write_text("[user]\nname = Ada\nemail = ada@example.org\n")
    (made.path / ".ssh").mkdir(mode=0o700)
    (made.path / ".ssh/id_ed25519").write_text("a secret\n")
    made.give(made.path)
    return made


def find(command: str) -> str | None:
    return shutil.which(command, path=os.pathsep.join(map(str, PLACES)))


def install(packages: Sequence[str]) -> None:
    """Install packages of Debian, of npm, and of PyPI, `pip:NAME` in an environment of its own."""
    by = {
        kind: [each.partition(":")[2] for each in packages if each.startswith(f"{kind}:")]
        for kind in ("apt", "npm", "pip")
    }
    if by["apt"]:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        command = [
            "apt-get",
            "install",
            "-y",
            "-qq",
            "--no-install-recommends",
            *dict.fromkeys(by["apt"]),
        ]
        subprocess.run(command, check=True, env=environment)
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    if by["npm"]:
        command = [
            "npm",
            "install",
            "--prefix",
            str(PROGRAMS),
            "--no-fund",
            "--no-audit",
            *by["npm"],
        ]
        subprocess.run(command, check=True)
    for name in by["pip"]:
        environment_of = PROGRAMS / f"venv-{name}"
        subprocess.run([_INTERPRETER, "-m", "venv", str(environment_of)], check=True)
        subprocess.run([str(environment_of / "bin/pip"), "install", "-q", name], check=True)
