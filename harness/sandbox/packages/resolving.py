"""Turns requirements into locks, and fetches wheels, with pip on the host.

pip only ever sees wheels here (`--only-binary :all:`), so nothing of a package is executed: building a
source distribution would run its code.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ....policies.errors import PackageError
from .lock import EXTRA, Lock, Wheel, lock_of, wheel_of

_SECONDS = 600
_PIECE = 1 << 20
_MOST_TOLD = 2000  # characters of what pip said


class WheelSource(msgspec.Struct, frozen=True):
    """Where wheels come from.

    find_links: a folder of wheels
    index: use an index too: `index_url`, else the one that pip is configured with
    """

    find_links: str | None = None
    index: bool = True
    index_url: str | None = None

    def options(self) -> list[str]:
        """Return pip's options."""
        found = ["--only-binary", ":all:"]
        if self.find_links is not None:
            found += ["--find-links", os.path.abspath(self.find_links)]
        if not self.index:
            found += ["--no-index"]
        elif self.index_url is not None:
            found += ["--index-url", self.index_url]
        return found


class _Archive(msgspec.Struct):
    hashes: dict[str, str] = {}


class _Download(msgspec.Struct):
    url: str
    archive_info: _Archive = msgspec.field(default_factory=_Archive)


class _Install(msgspec.Struct):
    download_info: _Download


class _Report(msgspec.Struct):
    """pip's installation report, version 1."""

    version: str
    install: list[_Install]


def resolve(lines: Sequence[str], source: WheelSource, python: str) -> Lock:
    """Return the wheels that meet the lines of a requirements file.

    Raises PackageError if there are none, or pip cannot be run.
    """
    with tempfile.TemporaryDirectory(prefix="cellwright-lock-") as folder:
        wanted, report = Path(folder, "wanted.txt"), Path(folder, "report.json")
        wanted.write_text("".join(f"{line}\n" for line in lines))
        _pip(
            ["install", "--dry-run", "--ignore-installed", "--report", str(report), "-r", str(wanted)],
            source, folder,
        )  # fmt: skip
        try:
            found = msgspec.json.decode(report.read_bytes(), type=_Report)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise PackageError(f"pip's report cannot be read: {error}") from None
    downloads = [each.download_info for each in found.install]
    wheels = [wheel_of(each.url, each.archive_info.hashes.get("sha256", "")) for each in downloads]
    return lock_of(python, wheels)


def fetch(wheels: Sequence[Wheel], source: WheelSource, folder: str) -> dict[Wheel, Path]:
    """Download `wheels` into `folder` and return their files, whose digests are those of the lock.

    Raises PackageError.
    """
    wanted = Path(folder, "wanted.txt")
    wanted.write_text("".join(f"{each.url} --hash=sha256:{each.sha256}\n" for each in wheels))
    _pip(["download", "--no-deps", "--dest", folder, "-r", str(wanted)], source, folder)
    found = {}
    for each in wheels:
        path = Path(folder, each.filename)
        try:
            digest = _digest(path)
        except OSError as error:
            raise PackageError(f"{each.filename} was not fetched: {error.strerror}") from None
        if digest != each.sha256:
            raise PackageError(f"{each.filename} is not the wheel that was locked")
        found[each] = path
    return found


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _pip(arguments: Sequence[str], source: WheelSource, folder: str) -> None:
    command = [
        sys.executable, "-Im", "pip", arguments[0], "--quiet", "--no-input", "--no-color",
        "--disable-pip-version-check", *source.options(), *arguments[1:],
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, env=_environment(os.environ), cwd=folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise PackageError(f"pip took longer than {_SECONDS} s") from None
    if done.returncode == 0:
        return
    said = done.stderr.decode("utf-8", "replace")
    if "No module named pip" in said:
        raise PackageError(f"{sys.executable} has no pip", f"install it: {EXTRA}")
    errors = re.findall(r"^(?:ERROR|OSError): (.+)$", said, re.MULTILINE) or [said.strip()]
    raise PackageError(f"pip: {errors[-1][:_MOST_TOLD]}", _hint(said))


def _hint(said: str) -> str:
    if "No matching distribution" in said:
        return (
            "only wheels are used; if there is but a source distribution, build a wheel where you "
            "trust it (pip wheel), and name its folder with find_links"
        )
    return ""


def _environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the variables for pip: those of this process, but for what would misplace wheels."""
    unwanted = (
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_ROOT",
        "PIP_USER",
        "PIP_NO_BINARY",
        "PIP_REQUIRE_VIRTUALENV",
    )
    return {key: value for key, value in variables.items() if key not in unwanted}
