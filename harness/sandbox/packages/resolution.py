"""Locks of requirements, by pip or uv on the host, and wheels, which pip fetches.

Building a source distribution would run its code.  `--only-binary :all:` does not prevent that for one
that is named by its address, in the metadata of a wheel too, so the process of pip cannot start others:
every build needs one.

`run_tool`: runs pip or uv on the host, until a deadline, and returns its error messages.

Locks by uv, which resolves requirements many times as fast as pip (extra `uv`).

It looks where pip would look, by pip's settings and not its own; settings that it cannot follow are
left to pip. So are wheels in folders of this host, because uv would unpack each of them; pip reads only
their metadata. It builds nothing (`--no-build`), takes no address that metadata names, and finds no
program to start: its PATH is empty. Only the lock's own Python is started, to report which wheels fit
it. Its cache is removed with the folder of the lock.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ....policies.errors import PackageError
from ....policies.extras import how_to_install
from ....policies.policy import Packages
from ....runner.launching.living import directory_prefix
from ..pythons import HostPython, this_python
from .lock import Lock, Wheel, lock_of, normalised, read_pylock, wheel_of
from .package_sources import ONLY_WHEELS, PipSettings, WheelSource, settings_of_pip
from .store_directory import NO_DEADLINE, Deadline

_PIECE = 1 << 20
_MOST_TOLD = 2000  # characters of what pip said
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)  # the name of a checked requirement
_MOST_REPORT = 256 << 20  # bytes; it has the metadata of every wheel
# pip prints an error as one line, or as a block with the reason in the line that begins with an arrow.
_ERRORS = re.compile(r"^(?:ERROR: |OSError: |╰─> )(?!Exception:$)(.+)$", re.MULTILINE)
# Runs pip in a process that cannot start another one, and has no network if the first argument is "0".
MEMORY_BYTES = 1 << 30  # memory of a tool that reads metadata of other authors
MOST_BYTES = Packages().max_bytes
_COPIES = 4  # pip writes a wheel into its cache, a folder of its own and ours
_CONFINED_PIP = """
import resource, runpy, sys

starts = {
    "subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system",
}
connects = {"socket.connect", "socket.getaddrinfo", "socket.sendmsg", "socket.sendto"}
refused = starts if sys.argv.pop(1) == "1" else starts | connects

def refuse(event, arguments):
    if event in refused:
        raise PermissionError(1, f"pip may use only wheels, and is refused {event}")

for limit in resource.RLIMIT_AS, resource.RLIMIT_FSIZE:
    most, hard = int(sys.argv.pop(1)), resource.getrlimit(limit)[1]
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(limit, (most, most))
sys.path += filter(None, [sys.argv.pop(1)])  # of a Python that may have no pip
sys.addaudithook(refuse)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


class _Archive(msgspec.Struct):
    hashes: dict[str, str] = {}


class _Download(msgspec.Struct):
    url: str
    archive_info: _Archive = msgspec.field(default_factory=_Archive)


class _Install(msgspec.Struct):
    download_info: _Download
    is_direct: bool = False
    requested: bool = False


class _Report(msgspec.Struct):
    """pip's installation report, version 1."""

    version: str
    install: list[_Install]


def resolve(
    lines: Sequence[str], source: WheelSource, python: HostPython, deadline: Deadline = NO_DEADLINE
) -> Lock:
    """Return the wheels that meet the lines of a requirements file: by uv if it is installed, else by
    pip, which finds the same.

    Raises PackageError if there are none, neither can be run, or it takes until after the deadline.
    """
    with tempfile.TemporaryDirectory(prefix=directory_prefix()) as folder:  # for `cellwright gc`
        wanted, report = Path(folder, "wanted.txt"), Path(folder, "report.json")
        wanted.write_text("".join(f"{line}\n" for line in lines))
        source.check()
        if (uv := find_uv()) and can_resolve(lines, source):
            return lock_by_uv(uv, wanted, source, python, deadline)
        _pip(
            ["install", "--dry-run", "--ignore-installed", "--report", str(report), "-r", str(wanted)],
            source, folder, deadline, python,
        )  # fmt: skip
        try:
            if report.stat().st_size > _MOST_REPORT:
                raise PackageError(f"pip's report is longer than {_MOST_REPORT} bytes")
            found = msgspec.json.decode(report.read_bytes(), type=_Report)
        except (OSError, ValueError) as error:
            raise PackageError(f"pip's report cannot be read: {error}") from None
    if direct := [each.download_info.url for each in found.install if each.is_direct]:
        raise PackageError(
            f"a package requires an address: {direct[0]}", "packages may require only names"
        )
    names = {normalised(each[0]) for each in map(_NAME.match, lines) if each}
    wheels = []
    for each in found.install:
        hashes = each.download_info.archive_info.hashes
        wheels.append(wheel := wheel_of(each.download_info.url, hashes.get("sha256", "")))
        if each.requested and wheel.name not in names:
            raise PackageError(
                f"pip's settings require {wheel.name} as well",
                "remove `requirement` from the settings of pip (pip config debug)",
            )
    return lock_of(python.tag, wheels)


def fetch(
    wheels: Sequence[Wheel],
    source: WheelSource,
    folder: str,
    deadline: Deadline = NO_DEADLINE,
    python: HostPython | None = None,
    most_bytes: int = MOST_BYTES,
) -> dict[Wheel, Path]:
    """Download `wheels` into `folder` and return their files, whose digests are those of the lock.

    Raises PackageError, also for more than the `most_bytes` that they may have unpacked.
    """
    wanted = Path(folder, "wanted.txt")
    source.check()
    settings = settings_of_pip(os.environ)
    wanted.write_text(
        "".join(
            f"{source.address_of(each, settings)} --hash=sha256:{each.sha256}\n" for each in wheels
        )
    )
    command = ["download", "--no-deps", "--dest", folder, "-r", str(wanted)]
    _pip(command, source, folder, deadline, python or this_python(), most_bytes)
    found = {}
    for each in wheels:
        path = Path(folder, each.filename)
        try:
            digest = _digest(path)
        except OSError as error:
            raise PackageError(f"{each.filename} was not fetched: {error.strerror}") from None
        if digest != each.sha256:
            raise PackageError(f"{each.filename} is not the wheel that was locked")
        path.chmod(0o444)  # the user of a cell reads it
        found[each] = path
    return found


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _pip(
    arguments: Sequence[str], source: WheelSource, folder: str, deadline: Deadline,
    python: HostPython, most_bytes: int = MOST_BYTES,
) -> None:  # fmt: skip
    """Run pip in `python`, so that it chooses wheels for that version: its own pip, else ours."""
    executable, ours = sys.executable, ""
    if not python.is_ours and (spec := importlib.util.find_spec("pip")) and spec.origin:
        executable, ours = python.path, os.path.dirname(os.path.dirname(spec.origin))
    command = [
        executable, "-Ic", _CONFINED_PIP, str(int(source.index)), str(MEMORY_BYTES), str(_MOST_WHEEL),
        ours, arguments[0], "--quiet", "--no-input", "--no-color",
        "--disable-pip-version-check", *source.options(), *arguments[1:],
    ]  # fmt: skip
    most = _COPIES * most_bytes + MEMORY_BYTES
    code, said = run_tool("pip", command, source.variables(os.environ), folder, deadline, most)
    if code == 0:
        return
    if "No module named pip" in said:
        raise PackageError(f"{executable} has no pip", how_to_install("packages"))
    errors = _ERRORS.findall(said)
    errors = errors or said.strip().splitlines()[-1:] or ["failed without a word"]
    raise PackageError(f"pip: {errors[-1][:_MOST_TOLD]}", _hint(said))


def _hint(said: str) -> str:
    if "No matching distribution" in said:
        return ONLY_WHEELS
    return ""


_MOST_WHEEL = 4 << 30  # bytes of a file that pip writes, such as a wheel
_LOOK_SECONDS = 1.0
_SECONDS = 3600  # torch and what it needs are 2.9 GB: at this pace 0.8 MB a second
_MOST_READ = 1 << 20  # bytes read of its output


def run_tool(
    name: str, command: Sequence[str], variables: Mapping[str, str], folder: str, deadline: Deadline,
    most_written: int = _COPIES * MOST_BYTES,
) -> tuple[int, str]:  # fmt: skip
    """Run a command in `folder` and return its exit code and the end of its standard error.

    It is killed at the deadline, if that is cancelled, or once it has written `most_written` bytes;
    raises PackageError for each.
    """
    with tempfile.TemporaryFile() as stderr:
        with subprocess.Popen(
            command, env=variables, cwd=folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=stderr,
        ) as process:  # fmt: skip
            try:
                _wait(name, process.pid, deadline, most_written)
                code = process.wait()
            finally:
                process.kill()
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _MOST_READ))
        return code, stderr.read(_MOST_READ).decode("utf-8", "replace")


def _wait(name: str, pid: int, deadline: Deadline, most_written: int) -> None:
    until = time.monotonic() + deadline.left(_SECONDS)
    readable: list[int] = []
    ended = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        if deadline.cancel >= 0:
            poll.register(deadline.cancel, select.POLLIN)
        while not readable and (left := until - time.monotonic()) > 0:
            readable = [each for each, _ in poll.poll(min(left, _LOOK_SECONDS) * 1000)]
            if _written(pid) > most_written:
                raise PackageError(
                    f"{name} was ended: it had written more than {most_written} bytes",
                    "raise packages.max_bytes of the policy, if the packages are as large",
                )
    finally:
        os.close(ended)
    if ended in readable:
        return
    if readable:
        raise PackageError("cancelled while the set of packages was built")
    deadline.left()
    raise PackageError(
        f"{name} took longer than {_SECONDS} s",
        "fetch the wheels beforehand (pip download), and name their folder with find_links",
    )


def _written(pid: int) -> int:
    """Return the bytes that a process has written, wherever (proc_pid_io(5)): the folder of pip's own
    files, its cache and ours may be three disks."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/io") as counts:
        return next(int(line.split()[1]) for line in counts if line.startswith("wchar:"))
    return 0  # it has ended, or the kernel does not count


_MOST_FILE = 256 << 20  # bytes of a file that uv writes, such as metadata
_BY_HTTP = ("https://", "http://")
_REASONS = re.compile(r"^ *(?:error|cause): (.+)$", re.MULTILINE)
_LIMITED = """
import os, resource, sys

limits = (resource.RLIMIT_AS, int(sys.argv[1])), (resource.RLIMIT_FSIZE, int(sys.argv[2]))
for limit, most in limits:
    hard = resource.getrlimit(limit)[1]
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(limit, (most, most))
os.execve(sys.argv[3], sys.argv[3:], os.environ)
"""
_OPTIONS = (
    "pip", "compile", "--quiet", "--no-config", "--no-build", "--no-python-downloads", "--no-progress",
    "--color", "never", "--keyring-provider", "disabled", "--format", "pylock.toml", "--no-header",
    "--index-strategy", "unsafe-best-match",  # as pip does: all indexes are equal
)  # fmt: skip
_PASSED_ON = (
    "HOME", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy",
    "https_proxy", "all_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "NETRC",
)  # fmt: skip


def find_uv() -> str:
    """Return the path of uv; empty if it is not installed."""
    if importlib.util.find_spec("uv") is None:
        return ""
    from uv import find_uv_bin

    try:
        return str(find_uv_bin())
    except FileNotFoundError:
        return ""


def can_resolve(lines: Sequence[str], source: WheelSource) -> bool:
    """Tell whether uv finds what pip would find: not with hashes, settings that only pip knows, or
    wheels in folders."""
    if (
        any("--hash=" in line for line in lines)
        or not source.index
        or source.find_links is not None
    ):
        return False
    settings = settings_of_pip(os.environ)
    indexes = [source.index_url] if source.index_url else [
        settings.index_url, *settings.extra_index_urls
    ]  # fmt: skip
    places = [each for each in (*indexes, *settings.find_links) if each]
    return not settings.others and all(each.startswith(_BY_HTTP) for each in places)


def lock_by_uv(
    uv: str, wanted: Path, source: WheelSource, python: HostPython, deadline: Deadline
) -> Lock:
    """Return the wheels that meet a file of requirements; raises PackageError.

    A pylock.toml is written beside the file.
    """
    settings = settings_of_pip(os.environ)
    lock = wanted.with_name("pylock.toml")
    command = [
        sys.executable, "-Ic", _LIMITED, str(MEMORY_BYTES), str(_MOST_FILE), uv, *_OPTIONS,
        *_places(source, settings), "--cache-dir", str(wanted.with_name("cache")),
        "--python", python.path, "--output-file", str(lock), str(wanted),
    ]  # fmt: skip
    variables = _variables(os.environ, settings)
    code, said = run_tool("uv", command, variables, str(wanted.parent), deadline)
    if code == 0:
        return read_pylock(lock, python)
    reasons = _REASONS.findall(said) or said.strip().splitlines()[-1:] or ["failed without a word"]
    raise PackageError(f"uv: {reasons[-1][:_MOST_TOLD]}", _uv_hint(said))


def _places(source: WheelSource, settings: PipSettings) -> list[str]:
    found = [word for each in settings.find_links for word in ("--find-links", each)]
    if settings.no_index:
        return [*found, "--no-index"]
    if source.index_url is not None:
        return [*found, "--default-index", source.index_url]
    if settings.index_url:
        found += ["--default-index", settings.index_url]
    return found + [word for each in settings.extra_index_urls for word in ("--index", each)]


def _variables(inherited: Mapping[str, str], settings: PipSettings) -> dict[str, str]:
    found = {name: inherited[name] for name in _PASSED_ON if name in inherited} | {"PATH": ""}
    return found | ({"SSL_CERT_FILE": settings.cert} if settings.cert else {})


def _uv_hint(said: str) -> str:
    is_missing = any(
        each in said for each in ("not found", "no usable wheels", "no wheels", "no version of")
    )
    return ONLY_WHEELS if is_missing else ""
