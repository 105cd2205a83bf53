"""`cellwright exec --settings`: each field of srt's settings is honoured, or named with the reason."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cellwright import PolicyError
from cellwright.harness.sandbox.projects.agents.srt_settings import SrtSettings, srt_fields
from tests.harness.projects.test_exec import home, project, ran

__all__ = ["home", "project"]
pytestmark = pytest.mark.needs("userns")
_MISSING = object()
# A value of each field that asks for something.
VALUES: dict[str, Any] = {
    "network.allowedDomains": ["a.example.org", "*.b.example.org:8443", "localhost:11434"],
    "network.deniedDomains": ["c.example.org", "*:22", "169.254.169.254"],
    "network.deniedDomainReasons": {"c.example.org": "not this one"},
    "network.strictAllowlist": True,
    "network.deniedResolvedAddresses": ["10.0.0.0/8"],
    "network.allowUnixSockets": ["/run/a.sock"],
    "network.allowAllUnixSockets": True,
    "network.allowLocalBinding": True,
    "network.allowMachLookup": ["*"],
    "network.httpProxyPort": 8080,
    "network.socksProxyPort": 1080,
    "network.mitmProxy": {"socketPath": "/run/m.sock", "domains": ["a.example.org"]},
    "network.parentProxy": {"http": "http://proxy.example.org:3128"},
    "network.filterRequest": "f",
    "network.allowPlaintextHeaderSet": True,
    "network.stripResponseHeaders": ["set-cookie"],
    "network.refuseOpaqueTunnels": True,
    "network.requireHostMatch": True,
    "network.ambiguousRequestTarget": "refuse",
    "network.tlsTerminate": {"maxTunnels": 2},
    "filesystem.disabled": True,
    "filesystem.denyRead": ["~/.ssh", "**/*.pem"],
    "filesystem.allowRead": ["."],
    "filesystem.allowWrite": [".", "/tmp"],
    "filesystem.denyWrite": ["a.txt"],
    "filesystem.allowGitConfig": True,
    "credentials.files": [{"path": "key", "mode": "deny"}],
    "credentials.envVars": [{"name": "TOKEN", "mode": "deny"}],
    "credentials.allowPlaintextInject": True,
    "credentials.awsPairs": [{"accessKeyIdVar": "A", "secretAccessKeyVar": "B"}],
    "credentials.sigv4": {"streaming": "deny"},
    "git.safeDirectories": ["/srv/other"],
    "ignoreViolations": {"*": ["/etc"]},
    "enableWeakerNestedSandbox": True,
    "allowNestedUserNamespaces": True,
    "enableWeakerNetworkIsolation": True,
    "allowAppleEvents": True,
    "ripgrep": {"command": "rg"},
    "mandatoryDenySearchDepth": 2,
    "allowPty": True,
    "seccomp": {"applyPath": "/opt/apply-seccomp"},
    "bwrapPath": "/usr/bin/bwrap",
    "socatPath": "/usr/bin/socat",
    "javaAgentJarPath": "/opt/agent.jar",
    "windows": {"sandboxUser": "srt"},
}


def settings(place: Path, **fields: Any) -> Path:
    """Write a settings file with the fields that srt requires, and others, such as network__mitmProxy."""
    data: dict[str, Any] = {
        "network": {"allowedDomains": [], "deniedDomains": []},
        "filesystem": {"denyRead": [], "allowWrite": ["."], "denyWrite": []},
    }
    for name, value in fields.items():
        section, dot, field = name.replace("__", ".").partition(".")
        target = data.setdefault(section, {}) if dot else data
        target[field or section] = value
        if value is _MISSING:
            del target[field or section]
    file = place / "settings.json"
    file.write_text(json.dumps(data))
    return file


def done(line: str, file: Path, *options: str) -> subprocess.CompletedProcess[bytes]:
    return ran("--settings", str(file), *options, "--shell", line)


def out(line: str, file: Path, *options: str) -> str:
    found = done(line, file, *options)
    assert found.returncode == 0, found
    return found.stdout.decode()


def test_the_table_has_every_field_and_a_value_for_each() -> None:
    assert VALUES.keys() == srt_fields().keys()
    assert {how for how, _ in srt_fields().values()} == {"honoured", "always", "ignored", "refused"}


@pytest.mark.parametrize("field", VALUES)
def test_a_field_is_honoured_or_named_with_the_reason(field: str, project: Path) -> None:
    how, why = srt_fields()[field]
    file = settings(project, **{field: VALUES[field]})
    if how == "refused":
        with pytest.raises(PolicyError) as refused:
            SrtSettings(str(file))
        assert str(refused.value).startswith(f"--settings: {file}: {field}: not supported: {why}")
        return
    notices = SrtSettings(str(file)).notices
    assert notices == ([f"{file}: {field} is ignored: {why}"] if how == "ignored" else [])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"filesystem__denyRaed": []}, "unknown field 'filesystem.denyRaed'"),
        ({"sandbox": {}}, "unknown field 'sandbox'"),
        ({"filesystem__denyRead": _MISSING}, "missing required field `denyRead`"),
        ({"network": 3}, "Expected `object`, got `int` - at `$.network`"),
        ({"filesystem__denyRead": [{"path": "a", "literal": False}]}, "literal"),
        ({"filesystem__denyWrite": ["src/*.py"]}, "must be a path here, not a pattern"),
        ({"network__allowedDomains": ["localhost"]}, "localhost must have a port"),
        ({"network__allowedDomains": ["10.0.0.1"]}, "must be a name"),
        ({"network__allowedDomains": ["a.example.org:x"]}, "HOST:PORT"),
        ({"network__deniedResolvedAddresses": ["8.8.8.0/24"]}, "public addresses"),
        ({"credentials__files": [{"path": "k", "mode": "mask"}]}, "mode mask is not supported"),
        ({"credentials__envVars": [{"name": "K", "mode": "mask"}]}, "mode mask is not supported"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_honoured_is_an_error(
    fields: dict[str, Any], why: str, project: Path
) -> None:
    found = done("touch made", settings(project, **fields))
    assert found.returncode == 2
    assert why in found.stderr.decode()
    assert not (project / "made").exists()


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{} trailing", '{"network": {}'])
def test_a_broken_file_is_an_error_and_no_other_settings_take_its_place(
    home: Path, project: Path, content: str | None
) -> None:
    if content is not None:
        (home / ".srt-settings.json").write_text(content)
    found = ran("--settings", "--", "touch", "made")  # the default of the option's value
    assert found.returncode == 2
    assert b".srt-settings.json: " in found.stderr
    assert not (project / "made").exists()


def test_files_are_as_the_settings_say(home: Path, project: Path) -> None:
    for name in ("secrets/key", "src/a.py", "deep/er/x.pem", "pkg/web/.vscode/tasks.json"):
        file = project / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("content\n")
    (home / "data").mkdir()
    (home / "data/table").write_text("rows\n")
    (home / "out").mkdir()
    file = settings(
        home,
        filesystem__denyRead=["~", "secrets", "**/*.pem"], filesystem__allowRead=[".", "~/data"],
        filesystem__allowWrite=[".", "~/out", "/tmp"], filesystem__denyWrite=["src/**"],
    )  # fmt: skip
    assert out(
        "cat secrets/key deep/er/x.pem 2>&1; cat ~/data/table; cat ~/.gitconfig 2>&1; "
        "touch later.pem; cat later.pem; echo x > made; echo x > ~/out/made; echo x > /tmp/made; "
        "echo x >> src/a.py; echo x > src/new; echo x > ~/data/new; echo x > pkg/web/.vscode/new; "
        "echo x >> .git/config; true",
        file,
    ).splitlines() == [
        "cat: secrets/key: No such file or directory",
        "cat: deep/er/x.pem: Permission denied",
        "rows",
        f"cat: {home}/.gitconfig: No such file or directory",
    ]
    assert (project / "made").exists()
    assert (home / "out/made").exists()
    assert (project / "src/a.py").read_text() == "content\n"
    assert not (project / "src/new").exists()
    assert not (home / "data/new").exists()
    assert not (project / "pkg/web/.vscode/new").exists()
    assert (project / ".git/config").read_text().count("x\n") == 0
    loose = settings(
        home, filesystem__allowGitConfig=True, mandatoryDenySearchDepth=1,
        filesystem__allowWrite=["."], filesystem__denyWrite=[],
    )  # fmt: skip
    out(
        "git config user.name Bo; echo x > pkg/web/.vscode/new; echo x > src/new; ls secrets", loose
    )
    assert "Bo" in (project / ".git/config").read_text()
    assert (project / "pkg/web/.vscode/new").exists()


def test_a_project_is_read_only_but_for_what_the_settings_name(home: Path, project: Path) -> None:
    (project / "src").mkdir()
    file = settings(home, filesystem__allowWrite=["src"])
    line = "echo x > src/made; echo x > made || echo refused; git status --short"
    assert out(line, file) == "refused\n?? a.txt\n?? src/\n"
    found = ran("--settings", str(file), "--explain", "--", "ls")
    assert found.stdout.decode().splitlines()[0] == f"project    {project} (read)"
    hidden = settings(home, filesystem__denyRead=["~"], filesystem__allowWrite=[])
    assert b"denyRead hides the project" in done("true", hidden).stderr


def test_hosts_and_sockets_are_as_the_settings_say(home: Path, project: Path) -> None:
    file = settings(
        home,
        network__allowedDomains=["a.example.org", "*.b.example.org:8443", "c.example.org"],
        network__deniedDomains=["c.example.org", "x.b.example.org"],
    )  # fmt: skip
    names = "a.example.org y.b.example.org b.example.org c.example.org x.b.example.org"
    line = f"for each in {names}; do getent hosts $each > /dev/null && echo $each; done; true"
    assert out(line, file) == "a.example.org\ny.b.example.org\n"
    code = "python3 -c 'import socket; socket.socket(socket.AF_UNIX)'"
    assert b"PermissionError" in done(code, file).stderr
    assert out(f"{code}; echo made", settings(home, network__allowAllUnixSockets=True)) == "made\n"


def test_variables_and_git_are_as_the_settings_say(
    home: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "a secret")
    line = (
        'echo "$TOKEN"; git config get --all safe.directory || git config --get-all safe.directory'
    )
    file = settings(home, git__safeDirectories=["/srv/a", "/srv/b"])
    assert out(line, file, "--env", "TOKEN") == "a secret\n/srv/a\n/srv/b\n"
    (project / "key").write_text("a secret")
    file = settings(
        home, credentials__envVars=[{"name": "TOKEN", "mode": "deny"}],
        credentials__files=[{"path": "key", "mode": "deny"}],
    )  # fmt: skip
    assert out('echo "$TOKEN"; cat key || echo hidden', file, "--env", "TOKEN") == "\nhidden\n"
