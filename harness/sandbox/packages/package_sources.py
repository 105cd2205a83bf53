"""`WheelSource`: where wheels come from, and the options and variables by which pip looks there.

The settings of pip on this host, as far as they say where packages come from.
"""

import configparser
import contextlib
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ....policies.errors import PackageError
from .lock import Wheel

_SECTIONS = (
    "global",
    "install",
)  # later sections override earlier ones, and variables override both
_PLACES = ("index-url", "extra-index-url", "find-links", "no-index", "cert")
# Other settings that do not change which wheels are found.
_HARMLESS = (
    "break-system-packages", "cache-dir", "default-timeout", "disable-pip-version-check",
    "no-cache-dir", "no-color", "no-deps", "no-input", "progress-bar", "quiet",
    "require-virtualenv", "retries",
    "root-user-action", "timeout", "verbose",
)  # fmt: skip
_TRUE = ("y", "yes", "t", "true", "on", "1")  # as pip reads them


class PipSettings(msgspec.Struct, frozen=True):
    """Where pip looks for packages; `others`: names of other settings that may change the result."""

    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    cert: str = ""
    others: tuple[str, ...] = ()


def settings_of_pip(variables: Mapping[str, str]) -> PipSettings:
    """Return the settings of the files that pip reads (pip.pypa.io, "Configuration") and of its
    variables."""
    found: dict[str, str] = {}
    for path in _files(variables):
        found |= _settings_in(path)
    found |= {
        key.removeprefix("PIP_").lower().replace("_", "-"): value
        for key, value in variables.items()
        if key.startswith("PIP_") and key != "PIP_CONFIG_FILE"
    }
    found = {key: value for key, value in found.items() if value}  # pip ignores an empty one
    return PipSettings(
        index_url=found.get("index-url", ""),
        extra_index_urls=tuple(found.get("extra-index-url", "").split()),
        find_links=tuple(found.get("find-links", "").split()),
        no_index=found.get("no-index", "").lower() in _TRUE,
        cert=found.get("cert", ""),
        others=tuple(sorted(set(found) - {*_PLACES, *_HARMLESS})),
    )


def _files(variables: Mapping[str, str]) -> list[Path]:
    own = variables.get("PIP_CONFIG_FILE", "")
    if own == os.devnull:
        return []
    home = Path(variables.get("HOME") or "~").expanduser()
    shared = (variables.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    config = Path(variables.get("XDG_CONFIG_HOME") or home / ".config")
    return [
        *(Path(each, "pip", "pip.conf") for each in shared), Path("/etc/pip.conf"),
        home / ".pip" / "pip.conf", config / "pip" / "pip.conf",
        Path(sys.prefix, "pip.conf"), *([Path(own)] if own else []),
    ]  # fmt: skip


def _settings_in(path: Path) -> dict[str, str]:
    """Return the settings of one file; an unreadable one is left to pip, which says so."""
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, configparser.Error):
        return {"unreadable": str(path)}
    sections = [dict(parser[name]) for name in _SECTIONS if parser.has_section(name)]
    return {key.replace("_", "-"): value for each in sections for key, value in each.items()}


ONLY_WHEELS = (
    "check the name and the version; only wheels are used: if there is only a source "
    "distribution, build a wheel where you trust it (pip wheel), and name its folder with "
    "find_links"
)
# Variables that would require more, place wheels elsewhere, or start another Python.
_MISLEADING = frozenset(
    f"PIP_{name}"
    for name in (
        "EDITABLE", "GROUP", "NO_BINARY", "PREFIX", "PYTHON", "REQUIREMENT",
        "REQUIREMENTS_FROM_SCRIPT", "REQUIRE_VIRTUALENV", "ROOT", "TARGET", "USER",
    )
)  # fmt: skip


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
            found += ["--no-index", "--retries", "0"]
        elif self.index_url is not None:
            found += ["--index-url", self.index_url]
        return found

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variables for pip: no settings without an index, and one index if it is named."""
        if not self.index:
            found = {key: value for key, value in inherited.items() if not key.startswith("PIP_")}
            return found | {"PIP_CONFIG_FILE": os.devnull}
        found = {key: value for key, value in inherited.items() if key not in _MISLEADING}
        found["PIP_NO_DEPS"] = "0"  # a variable overrides a settings file
        return found | ({} if self.index_url is None else {"PIP_EXTRA_INDEX_URL": self.index_url})

    def address_of(self, wheel: Wheel, settings: PipSettings) -> str:
        """Return where to fetch `wheel`: a folder, if it is there; raises PackageError if there is
        no other place and it is not."""
        folders = [] if self.find_links is None else [self.find_links]
        if self.index:
            folders += [each for each in settings.find_links if "://" not in each]
        for folder in folders:
            path = Path(folder, wheel.filename).absolute()
            if path.is_file():
                return path.as_uri()
        if (not self.index or settings.no_index) and not wheel.url.startswith("file:"):
            told = "" if not self.index else ", and pip's settings say no-index"
            raise PackageError(
                f"{wheel.filename} is not in {' or '.join(folders) or 'a folder of wheels'}{told}",
                "copy it there, or use an index",
            )
        return wheel.url

    def check(self) -> None:
        """Raise PackageError for what would keep a reader of the folder waiting, such as a pipe."""
        if self.find_links is None:
            return
        with os.scandir(self.find_links) as entries:
            for each in entries:
                with contextlib.suppress(FileNotFoundError):  # a dangling link
                    mode = each.stat().st_mode
                    if each.name.endswith(".whl") and not (
                        stat.S_ISREG(mode) or stat.S_ISDIR(mode)
                    ):
                        raise PackageError(
                            f"{os.path.join(self.find_links, each.name)!r} is no regular file",
                            "remove it from the folder of wheels",
                        )
