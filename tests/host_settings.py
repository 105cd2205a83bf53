"""The settings of pip, uv, npm, git, XDG and the locale that tests have: the same on every host.

`choose` replaces those of the host in this process's environment, which what a test starts inherits.
A test that fetches from an index passes on `of_the_host()`: only the host knows the way there.
pip reads /etc/pip.conf and the one of its own environment whatever variables say, unless
PIP_CONFIG_FILE is /dev/null.  So a test of files of settings calls `pip_conf`.
"""

import configparser
import os
import sys
from pathlib import Path

_PREFIXES = ("PIP_", "UV_", "NPM_CONFIG_", "GIT_", "XDG_", "LC_")
_OTHERS = ("HOME", "LANG", "LANGUAGE")
_CHOSEN = {
    "LANG": "C.UTF-8", "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "UV_NO_CONFIG": "1", "NPM_CONFIG_GLOBALCONFIG": os.devnull, "GIT_CONFIG_NOSYSTEM": "1",
}  # fmt: skip
_GIT = """
[user]
    name = test
    email = test@example.org
[init]
    defaultBranch = main
[safe]
    directory = *
"""
_OUR_PIP_CONF = (Path("/etc/pip.conf"), Path(sys.prefix, "pip.conf"))
_host: dict[str, str] = {}


def choose(home: Path) -> None:
    """Make `home` the home of this process, with all settings that are ours."""
    found = {key: value for key, value in os.environ.items() if _is_setting(key)}
    _host.update(found)
    for key in found:
        del os.environ[key]
    (home / ".gitconfig").write_text(_GIT)
    os.environ |= _CHOSEN | {"HOME": str(home), "XDG_CONFIG_DIRS": str(home / "nowhere")}
    host_home = Path(found.get("HOME") or "/")
    # These hold programs and systemd's socket, not settings.
    for key, place in (
        ("PYENV_ROOT", host_home / ".pyenv"),
        ("PYRIGHT_PYTHON_CACHE_DIR", host_home / ".cache" / "pyright-python"),
        ("XDG_RUNTIME_DIR", Path("/run/user", str(os.geteuid()))),
    ):
        if place.is_dir() or key.startswith("PYRIGHT"):
            os.environ.setdefault(key, str(place))


def of_the_host() -> dict[str, str]:
    """Return the variables of this process with the settings that it was started with."""
    return {key: value for key, value in os.environ.items() if not _is_setting(key)} | _host


def pip_conf(path: Path, text: str) -> None:
    """Write a file of settings for PIP_CONFIG_FILE; what files of the host set is empty in it, which
    pip ignores."""
    parser = configparser.RawConfigParser()
    parser.read(_OUR_PIP_CONF)
    for section in parser.sections():
        for key in parser[section]:
            parser[section][key] = ""
    parser.read_string(text)
    with path.open("w") as file:
        parser.write(file)


def _is_setting(key: str) -> bool:
    return key in _OTHERS or key.upper().startswith(_PREFIXES)
