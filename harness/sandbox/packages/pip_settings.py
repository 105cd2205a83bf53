"""The settings of pip on this host, as far as they say where packages come from."""

import configparser
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

_SECTIONS = ("global", "install")  # the later counts more, and variables count most
_PLACES = ("index-url", "extra-index-url", "find-links", "no-index", "cert")
# What else does not change which wheels are found.
_HARMLESS = (
    "break-system-packages", "cache-dir", "default-timeout", "disable-pip-version-check",
    "no-cache-dir", "no-color", "no-deps", "no-input", "progress-bar", "quiet",
    "require-virtualenv", "retries",
    "root-user-action", "timeout", "verbose",
)  # fmt: skip
_TRUE = ("y", "yes", "t", "true", "on", "1")  # as pip reads them


class PipSettings(msgspec.Struct, frozen=True):
    """Where pip looks for packages; `others`: names of settings that may change what it finds."""

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
