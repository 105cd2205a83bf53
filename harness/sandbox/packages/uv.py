"""Locks by uv, which resolves requirements many times as fast as pip (extra `uv`).

It looks where pip would look, by pip's settings and not its own; settings that it cannot follow are
left to pip.  So are wheels in folders of this host, each of which it would unpack: pip reads only their
metadata.  It builds nothing (`--no-build`), takes no address that metadata names, and finds no program
to start: its PATH is empty.  Only the Python that the lock is for is started, which says what wheels
fit it.  What it keeps is removed with the folder of the lock.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ....policies.errors import PackageError
from ..pythons import HostPython
from .deadline import Deadline
from .lock import Lock, read_pylock
from .pip_settings import PipSettings, settings_of_pip
from .sources import ONLY_WHEELS, WheelSource
from .tool_process import MEMORY_BYTES, run_tool

_MOST_FILE = 256 << 20  # bytes of a file that it writes, such as metadata
_MOST_TOLD = 2000  # characters of what it said
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
    raise PackageError(f"uv: {reasons[-1][:_MOST_TOLD]}", _hint(said))


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


def _hint(said: str) -> str:
    is_missing = any(
        each in said for each in ("not found", "no usable wheels", "no wheels", "no version of")
    )
    return ONLY_WHEELS if is_missing else ""
