"""`cellwright exec --learn`: a policy of what one run needed, which a later run takes by --policy."""

import tomllib
from pathlib import Path

import pytest

from tests.harness.projects.test_exec import home, project, ran, shell

__all__ = ["home", "project"]
pytestmark = pytest.mark.needs("userns")
HOSTS = ("used.example.org", "unused.example.org", "refused.example.org")


def connects(host: str, port: int = 443) -> str:
    return f"(exec 3<>/dev/tcp/{host}/{port}) && echo {host}"


def test_a_policy_has_what_the_run_used_and_comments_on_what_it_was_refused(
    home: Path, project: Path
) -> None:
    (home / "data").mkdir()
    line = (
        f"{connects('used.example.org')}; {connects('deep.wide.example.org', 8443)}; "
        f"{connects('refused.example.org')}; cat /etc/shadow"
    )
    allowed = ("used.example.org", "unused.example.org", "*.wide.example.org:8443")
    options = [word for host in allowed for word in ("--allow", host)]
    learned = home / "learned.toml"
    done = ran(
        *options,
        "--read",
        "~/data",
        "--env",
        "TOKEN=secret",
        "--learn",
        str(learned),
        "--shell",
        line,
    )
    assert done.returncode == 1
    assert f"cellwright: {learned} has what the command needed".encode() in done.stderr
    text = learned.read_text()
    policy = tomllib.loads(text)
    assert policy == {
        "extends": "project",
        "name": "project",
        "filesystem": {"read": [str(home / "data")]},
        "network": {
            "allow": [
                {"host": "deep.wide.example.org", "ports": [8443]},
                {"host": "used.example.org", "ports": [443]},
            ]
        },
    }
    assert '# [[network.allow]]\n# host = "refused.example.org"\n' in text
    assert '# [filesystem] read: "/etc/shadow"\n' in text
    assert "# Its variables are given by options of exec: --env TOKEN\n" in text
    assert "secret" not in text
    again = "; ".join(f"getent hosts {host} > /dev/null && echo {host}" for host in HOSTS)
    assert shell(f"{again}; true", "--policy", str(learned)) == "used.example.org\n"


def test_a_policy_is_written_to_a_new_file_only(home: Path, project: Path) -> None:
    before = (home / ".gitconfig").read_bytes()
    done = ran("--learn", str(home / ".gitconfig"), "--", "touch", "made")
    assert done.returncode == 2
    assert b"exists" in done.stderr
    assert not (project / "made").exists()
    planted = f"ln -s {home}/.gitconfig learned.toml"
    assert ran("--learn", "learned.toml", "--shell", planted).returncode == 2
    assert (home / ".gitconfig").read_bytes() == before
