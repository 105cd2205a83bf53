"""The settings of tests: hostile ones of the host change the outcome of no test."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

NOWHERE = "https://127.0.0.1:9/"
# Programs whose settings are hostile, and quick tests that use them.
USERS = {
    "pip and uv": [
        "tests/harness/packages/test_uv.py",
        "tests/harness/packages/test_hostile_sources.py",
        *("-k", "settings or index or test_uv"),
    ],
    "git": ["tests/harness/test_network_clients.py", "-k", "git"],
    "XDG": ["tests/runner/test_cache.py", "tests/runner/test_living.py"],
    "locale": ["tests/harness/test_help.py", "tests/test_wording.py"],
}
PIP_CONF = f"[global]\nno-index = true\nconstraint = /nowhere\nindex-url = {NOWHERE}\n"
GIT_CONFIG = (
    "[commit]\ngpgSign = true\n[core]\nhooksPath = /nowhere\nautocrlf = true\n"
    "[protocol]\nallow = never\n[init]\ntemplateDir = /nowhere\n[http]\nproxy = 127.0.0.1:9\n"
)


def hostile(home: Path) -> dict[str, str]:
    """Return variables that spoil each of these programs, and write files of settings that do."""
    files = {
        ".config/pip/pip.conf": PIP_CONF, ".pip/pip.conf": PIP_CONF, "xdg/pip/pip.conf": PIP_CONF,
        ".config/uv/uv.toml": "offline = 1", ".npmrc": f"registry={NOWHERE}\noffline=true\n",
        ".gitconfig": GIT_CONFIG, ".config/git/config": GIT_CONFIG,
    }  # fmt: skip
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {
        "HOME": str(home), "XDG_CONFIG_DIRS": str(home / "xdg"), "XDG_CONFIG_HOME": "relative",
        "XDG_DATA_HOME": "/proc", "XDG_STATE_HOME": "/proc", "XDG_CACHE_HOME": os.devnull,
        "XDG_RUNTIME_DIR": str(home),
        "PIP_CONFIG_FILE": str(home / ".pip/pip.conf"), "PIP_NO_INDEX": "1", "PIP_INDEX_URL": NOWHERE,
        "PIP_CONSTRAINT": "/nowhere", "PIP_REQUIRE_HASHES": "1", "PIP_TARGET": "/proc",
        "UV_CONFIG_FILE": str(home / ".config/uv/uv.toml"), "UV_INDEX_URL": NOWHERE, "UV_OFFLINE": "1",
        "UV_CACHE_DIR": "/proc", "UV_PYTHON": "nowhere", "UV_CONSTRAINT": "/nowhere",
        "NPM_CONFIG_USERCONFIG": str(home / ".npmrc"), "npm_config_offline": "true",
        "npm_config_cache": "/proc",
        "GIT_CONFIG_GLOBAL": str(home / ".gitconfig"), "GIT_CONFIG_SYSTEM": str(home / ".gitconfig"),
        "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "commit.gpgSign", "GIT_CONFIG_VALUE_0": "true",
        "GIT_DIR": "/proc/nowhere", "GIT_AUTHOR_DATE": "never", "GIT_OBJECT_DIRECTORY": "/proc",
        "LC_ALL": "POSIX", "LANG": "tr_TR.ISO-8859-9", "LANGUAGE": "de:fr",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.needs("cgroup", "git")
@pytest.mark.parametrize("program", USERS)
def test_settings_of_the_host_reach_no_test(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *USERS[program]]
    covered = tmp_path / "pip.conf"
    covered.write_text(PIP_CONF)
    if os.geteuid() == 0 and Path("/etc/pip.conf").exists() and shutil.which("unshare"):
        cover = 'mount --bind "$0" /etc/pip.conf && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", cover, str(covered), *command]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | hostile(tmp_path), capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_these_settings_would_spoil_the_programs(tmp_path: Path) -> None:
    """Without `choose` pip finds no package and git makes no commit."""
    spoilt = os.environ | hostile(tmp_path)
    pip = [sys.executable, "-m", "pip", "download", "--dest", str(tmp_path), "thing"]
    assert subprocess.run(pip, env=spoilt, capture_output=True, check=False).returncode != 0
    git = ["git", "init", str(tmp_path / "made")]
    assert subprocess.run(git, env=spoilt, capture_output=True, check=False).returncode != 0
