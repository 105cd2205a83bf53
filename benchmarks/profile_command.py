"""The profile of a cold `cellwright run`: where its time goes, and which processes spend it."""

import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from .measuring import MS, median
from .report import Column, ReportTable, Value
from .settings import Settings

# The first import of a module, of which `sys.meta_path` hears, and the first call of a function end a
# phase.  The command line is the options of `run`.
_RUN = """
import sys, time
marks = []
def mark(phase):
    marks.append((phase, time.perf_counter(), time.process_time(), len(sys.modules)))
mark("Python starts")

PHASES = {
    "msgspec": "modules; the launcher's process is started",
    "cellwright.runner.launching.launch": "modules of the command; its arguments",
    "cellwright.harness.sandbox.local": "modules of a launch; the plan; what the launcher is told",
}

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in PHASES:
            mark(PHASES.pop(name))
        if name == "cellwright.runner.supervisor":
            from cellwright.runner.launching.launch import Launch, Launcher
            mark_first_call(Launch, "finish", "modules that use cells", "waits for the launcher")
            mark_first_call(Launcher, "close", "a cell, the program", "ends the launcher")

def mark_first_call(owner, name, before, after):
    function = getattr(owner, name)
    def marking(self):
        setattr(owner, name, function)
        mark(before)
        if name == "close":
            note_use(self)
        result = function(self)
        mark(after)
        return result
    setattr(owner, name, marking)

used = {}
def note_use(launcher):
    roles = "keeper: Python, its modules", "nursery: the root, inits", "launcher"
    for role, pid in zip(roles, launcher.pids()):
        with open(f"/proc/{pid}/schedstat") as file:
            used[role] = int(file.read().split()[0]) / 1e9
    used["command"] = time.process_time()

sys.meta_path.insert(0, Finder)
from cellwright.harness.cli.main import main
sys.argv = ["cellwright", "run", *sys.argv[1:], "-c", "print(1)"]
assert main() == 0
import msgspec
sys.stderr.buffer.write(msgspec.json.encode({"marks": marks, "used": used}))
"""


class ProfiledCommand(msgspec.Struct, frozen=True):
    """What one command told: (phase, moment, CPU seconds, modules), and CPU seconds by process."""

    marks: list[tuple[str, float, float, int]]
    used: dict[str, float]


def measure(settings: Settings) -> tuple[ReportTable, ReportTable]:
    """Return the phases of a command, and the CPU time of its processes."""
    layers = settings.policy.optional_layers
    optional = [part for layer in layers for part in ("--optional", layer)]
    _profiled(optional)  # compiles the plan
    runs = [_profiled(optional) for _ in range(settings.amount(20, 3))]
    return phases(runs), _processes([run.used for _, run, _ in runs])


def _profiled(optional: Sequence[str]) -> tuple[float, ProfiledCommand, float]:
    """Return when a command was started, what it told, and when it had ended."""
    began = time.perf_counter()
    command = [sys.executable, "-I", "-c", _RUN, *optional]
    done = subprocess.run(command, capture_output=True, check=True)
    ended = time.perf_counter()
    return began, msgspec.json.decode(done.stderr, type=ProfiledCommand), ended


def phases(runs: list[tuple[float, ProfiledCommand, float]]) -> ReportTable:
    names = [name for name, *_ in runs[0][1].marks]
    steps: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for began, run, _ in runs:
        before = (began, 0.0, 0.0)
        for name, *after in run.marks:
            moment, cpu, modules = after
            steps[name].append((moment - before[0], cpu - before[1], modules - before[2]))
            before = (moment, cpu, modules)
    rows: list[tuple[Value, ...]] = [
        (name, *(median(each) * MS for each in columns[:2]), int(median(columns[2])))
        for name in names
        for columns in [list(zip(*steps[name], strict=True))]
    ]
    rows.append(
        ("Python ends", median([end - run.marks[-1][1] for _, run, end in runs]) * MS, None, 0)
    )
    return ReportTable(
        title="A cold `cellwright run -c 'print(1)'`, by phase",
        columns=(Column("phase"), Column("wall ms"), Column("CPU ms"), Column("modules", 0)),
        rows=tuple(rows),
        note=f"Medians of {len(runs)} commands; CPU time of the command's own process.",
    )


def _processes(used: list[dict[str, float]]) -> ReportTable:
    seconds = {role: median([each[role] for each in used]) for role in used[0]}
    total = sum(seconds.values())
    return ReportTable(
        title="The same, by process",
        columns=(Column("process"), Column("CPU ms"), Column("share, %", 0)),
        rows=tuple(
            (role, cpu * MS, cpu / total * 100)
            for role, cpu in sorted(seconds.items(), key=lambda each: -each[1])
        ),
        note="Without the cell's processes.",
    )
