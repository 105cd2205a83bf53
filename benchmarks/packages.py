"""Packages: the time to lock and to build a set, and of calls with it, beside uv, pip and llm-sandbox.

All take wheels from one folder, so no network is measured.  The folder is filled from the index of
pip's settings first; without an index, and with --smoke, it has one small wheel that is written here.
"""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from ..harness.sandbox.packages.package_store import PackageStore
from ..harness.sandbox.sandbox import Sandbox
from ..harness.sandbox.sandbox_arguments import HostSettings
from ..policies.policy import MIB, Policy
from .libraries import LLM_SANDBOX, Library, python_worker
from .lineup import shown_to_peers
from .measuring import (
    MS,
    Contender,
    Times,
    median,
    quartile_columns,
    quartiles,
    seconds_of,
    side_by_side,
)
from .peer_base import AbsentError, Isolation
from .programs import SUM, SampleProgram
from .report import Column, Criterion, Report, ReportTable, Value
from .scratch import scratch_directory
from .settings import Settings

_SECONDS = 600.0
_MEMORY = 512 * MIB
_MOST_RATIO = 1.5  # ratio of a ready call, without the expression's own time, to a ready `1+1`
_STAGES = ("lock", "build cold", "build warm", "first call", "ready call")
_SUM, _COLD = "1+1", "with the package, not preloaded"
_NAMED, _LEARNT = "with the package, preloaded", "with the package, preloaded as learnt"
_REST = "the same without the time of the expression in the cell"
_WORKER = Isolation("", "", "", "", "", "", "", "")  # not shown here


class _Subject(NamedTuple):
    """A package, and a program that imports it and whose value is 3."""

    package: str
    module: str
    expression: str

    @property
    def source(self) -> str:
        return f"import {self.module}\n{self.expression}"

    @property
    def timing(self) -> str:
        """A program whose value is the seconds that the import and the expression took."""
        return (
            f"import time\nbegan = time.perf_counter()\nimport {self.module}\n{self.expression}\n"
            "time.perf_counter() - began"
        )

    @property
    def printing(self) -> str:
        return f"import {self.module}\nprint({self.expression})"


_PANDAS = _Subject("pandas", "pandas", "int(pandas.Series([1, 2]).sum())")
SMALL = _Subject("cellwright-sample", "cellwright_sample", "cellwright_sample.add(1, 2)")


def measure(settings: Settings) -> Report:
    """Return the time of each stage, and quartiles of calls side by side."""
    notes = ["Wheels come from one folder. Locking, building and first calls are of one run each."]
    with scratch_directory() as place:
        wheels = place / "wheels"
        wheels.mkdir()
        subject = SMALL if settings.smoke else _fetched(wheels, notes)
        if subject is SMALL:
            write_wheel(wheels)
        own, times = _cellwright(settings, subject, place)
        rows = [own, _uv(settings, subject, place, notes)]
        # Beside the other peers: llm-sandbox shows no path below /tmp.
        with tempfile.TemporaryDirectory(dir=settings.peers or place) as environment:
            rows.append(_pip(subject, place, Path(environment), notes))
            rows.append(_llm_sandbox(settings, subject, Path(environment), notes))
    return Report(
        name="packages",
        title="Packages",
        tables=(_stages_table(subject, rows), _calls_table(subject, times)),
        verdicts=(_verdict(times),),
        notes=tuple(notes),
        samples={name: tuple(seconds) for name, seconds in times.items()},
    )


# wheels


def _fetched(wheels: Path, notes: list[str]) -> _Subject:
    """Fill the folder from the index of pip's settings; return what is measured then."""
    command = [sys.executable, "-Im", "pip", "download", "-q", "--only-binary", ":all:"]
    done = _run([*command, "-d", str(wheels), _PANDAS.package], {})
    if done.returncode == 0:
        return _PANDAS
    notes.append(
        f"No index of packages is reachable, so a small wheel takes the place of {_PANDAS.package}."
    )
    return SMALL


def write_wheel(wheels: Path) -> None:
    """Write the wheel of `SMALL` into a folder."""
    info = f"{SMALL.module}-1.0.dist-info"
    files = {
        f"{SMALL.module}.py": b"def add(a, b):\n    return a + b\n",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: cellwright-sample\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(wheels / f"{SMALL.module}-1.0-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


# cellwright


def _cellwright(
    settings: Settings, subject: _Subject, place: Path
) -> tuple[tuple[Value, ...], Times]:
    store = PackageStore(
        place / "store", find_links=place / "wheels", index=False,
        optional_layers=settings.policy.optional_layers,
    )  # fmt: skip
    wanted = [subject.package]
    lock = seconds_of(lambda: store.lock(wanted))
    cold = seconds_of(lambda: store.build(store.lock(wanted)))
    made = store.build(store.lock(wanted))
    shutil.rmtree(Path(made.directory).parent)  # the wheels stay unpacked
    warm = seconds_of(lambda: store.build(store.lock(wanted)))
    first = seconds_of(lambda: _first(settings, subject, store))
    times = _calls(settings, subject, store)
    ready = median(times[_NAMED])
    stages = (lock, cold, warm, first, ready)
    return ("cellwright", *(seconds * MS for seconds in stages)), times


def _policy(settings: Settings, subject: _Subject, **packages: object) -> Policy:
    policy = settings.policy
    memory = max(policy.limits.memory_bytes, _MEMORY)
    return replace(
        policy,
        limits=replace(policy.limits, memory_bytes=memory),
        packages=replace(policy.packages, require=(subject.package,), **packages),
    )


def _first(settings: Settings, subject: _Subject, store: PackageStore) -> None:
    policy = _policy(settings, subject)
    with Sandbox(policy=policy, pool=0, audit=False, host=HostSettings(package_store=store)) as box:
        _execute(box, subject.source, 3)


def _calls(settings: Settings, subject: _Subject, store: PackageStore) -> Times:
    """Return the seconds of calls, each in a cell that stood ready, in turn."""
    named = _policy(settings, subject, preload=(subject.module,))
    learning = _policy(settings, subject, learn_preload=True)
    with (
        Sandbox(policy=settings.policy, pool=2, audit=False) as plain,
        Sandbox(
            policy=_policy(settings, subject),
            pool=2,
            audit=False,
            host=HostSettings(package_store=store),
        ) as cold,
        Sandbox(
            policy=named, pool=2, audit=False, host=HostSettings(package_store=store)
        ) as preloaded,
        Sandbox(
            policy=learning, pool=2, audit=False, host=HostSettings(package_store=store)
        ) as learnt,
    ):
        _execute(learnt, subject.source, 3)
        ways = (
            (_SUM, plain, SUM.source, 2, 1),
            (_NAMED, preloaded, subject.source, 3, 1),
            (_LEARNT, learnt, subject.source, 3, 1),
            (_COLD, cold, subject.source, 3, 5),
        )
        contenders = [
            Contender(name, partial(_execute, box, source, value), box.settle, every)
            for name, box, source, value, every in ways
        ]
        rest = Contender(
            _REST, partial(_seconds_beside, preloaded, subject.timing), preloaded.settle
        )
        return side_by_side([*contenders[:2], rest, *contenders[2:]], settings.amount(200, 5))


def _seconds_beside(box: Sandbox, timing: str) -> float:
    """Return the seconds of a call beyond those that its program measured."""
    began = time.perf_counter()
    result = box.execute(timing)
    took = time.perf_counter() - began
    if not isinstance(result.value, float):
        raise RuntimeError(f"the program failed: {result.error}")
    return took - result.value


def _execute(box: Sandbox, source: str, value: int) -> None:
    result = box.execute(source)
    if result.value != value:
        raise RuntimeError(f"the program failed: {result.error}")


# others


def _uv(settings: Settings, subject: _Subject, place: Path, notes: list[str]) -> tuple[Value, ...]:
    beside = settings.peers / "py/bin/uv" if settings.peers else None
    uv = str(beside) if beside and beside.is_file() else shutil.which("uv")
    if uv is None:
        notes.append("uv is absent: it is neither in PATH nor installed by benchmarks/peers-setup.")
        return _nothing("uv")
    given = ["--no-index", "--find-links", str(place / "wheels"), "--only-binary", ":all:"]
    wanted, environment = place / "wanted.txt", place / "uv"
    wanted.write_text(subject.package)
    python = ["--python", sys.executable]
    lock = [uv, "pip", "compile", "-q", *given, *python, str(wanted)]
    make = [[uv, "venv", "-q", "--clear", *python, str(environment)],
            [uv, "pip", "install", "-q", *given, "--compile-bytecode", "--python",
             str(environment), subject.package]]  # fmt: skip
    variables = {"UV_CACHE_DIR": str(place / "uv-cache")}
    return _timed("uv", subject, lock, make, environment, variables, notes)


def _pip(subject: _Subject, place: Path, environment: Path, notes: list[str]) -> tuple[Value, ...]:
    given = ["--no-index", "--find-links", str(place / "wheels"), "--only-binary", ":all:"]
    pip = [sys.executable, "-Im", "pip"]
    lock = [*pip, "install", "-q", "--dry-run", "--ignore-installed", *given, subject.package]
    make = [[sys.executable, "-Im", "venv", "--without-pip", "--clear", str(environment)],
            [*pip, "--python", str(environment / "bin/python"), "install", "-q", *given,
             subject.package]]  # fmt: skip
    return _timed("pip", subject, lock, make, environment, {}, notes)


def _timed(
    name: str, subject: _Subject, lock: list[str], make: list[list[str]], environment: Path,
    variables: dict[str, str], notes: list[str],
) -> tuple[Value, ...]:  # fmt: skip
    """Return the stages of an installer; its first and its ready call are a process each."""
    call = [str(environment / "bin/python"), "-I", "-c", subject.printing]
    try:
        stages = [seconds_of(partial(_must, lock, variables))]
        stages += [seconds_of(partial(_must_all, make, variables)) for _ in range(2)]
        stages.append(seconds_of(partial(_must, call, variables)))
        stages.append(median([seconds_of(partial(_must, call, variables)) for _ in range(3)]))
    except AbsentError as error:
        notes.append(f"{name} is absent: {error}.")
        return _nothing(name)
    return (name, *(seconds * MS for seconds in stages))


def _must_all(commands: list[list[str]], variables: dict[str, str]) -> None:
    for each in commands:
        _must(each, variables)


def _must(command: list[str], variables: dict[str, str]) -> None:
    done = _run(command, variables)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise AbsentError(f"{Path(command[0]).name} failed: {said[0][:200]}")


def _run(command: list[str], variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=_SECONDS, check=False,
    )  # fmt: skip


def _llm_sandbox(
    settings: Settings, subject: _Subject, environment: Path, notes: list[str]
) -> tuple[Value, ...]:
    """Return the calls of llm-sandbox over bubblewrap, with the packages that pip installed.

    It runs programs in an environment of its own, which does not see the packages of the Python that it
    was given (version 0.3.46), so the program adds their directory to `sys.path` itself.
    """
    name = "llm-sandbox, bubblewrap, with the packages of pip"
    python = environment / "bin/python"
    shown = (str(python), *shown_to_peers(), str(environment))
    where = f"{settings.peers}" if settings.peers else "an environment: --peers names one"
    command = python_worker(settings.peers, "llm_sandbox", LLM_SANDBOX, "bubblewrap", *shown)
    peer = Library(name, _WORKER, command, f"it is not in {where}")
    site = (
        environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    )
    found = f"import sys\nsys.path.append({str(site)!r})\n{subject.printing}"
    program = SampleProgram(subject.package, subject.source, found, "3")
    try:
        peer.find(environment)
        first = peer.run(program)
        ready = median([peer.run(program) for _ in range(3)])
    except AbsentError as error:
        notes.append(f"{name}: absent: {error}.")
        return _nothing(name)
    finally:
        peer.close()
    return (name, None, None, None, first * MS, ready * MS)


def _nothing(name: str) -> tuple[Value, ...]:
    return (name, *(None for _ in _STAGES))


# tables


def _stages_table(subject: _Subject, rows: list[tuple[Value, ...]]) -> ReportTable:
    return ReportTable(
        title=f"{subject.package}, from wheels to a value",
        columns=(Column("with"), *(Column(f"{stage} ms", 1) for stage in _STAGES)),
        rows=tuple(rows),
        note=(
            "Build cold: nothing was built or cached; warm: the wheels were unpacked, or cached. "
            "First call: a new sandbox, or process, that imports the package. Ready call: in a cell "
            "that stood ready, with the package preloaded; elsewhere one more process."
        ),
    )


def _calls_table(subject: _Subject, times: Times) -> ReportTable:
    below = median(times[_SUM])
    return ReportTable(
        title=f"Calls in cells that stood ready: `1+1`, and `import {subject.module}` "
        f"and `{subject.expression}`",
        columns=(Column("call"), *quartile_columns("ms"), Column("ratio", 2), Column("runs", 0)),
        rows=tuple(
            (name, *quartiles(seconds, MS), median(seconds) / below, len(seconds))
            for name, seconds in times.items()
        ),
    )


def _verdict(times: Times) -> Criterion:
    below = median(times[_SUM])
    seen, whole = median(times[_REST]) / below, median(times[_NAMED]) / below
    return Criterion(
        "a ready call with a preloaded package, without the time of its expression, takes less than "
        f"{_MOST_RATIO:g} times as long as `1+1`",
        seen < _MOST_RATIO,
        f"{seen:.2f} times; with it {whole:.2f} times",
    )
