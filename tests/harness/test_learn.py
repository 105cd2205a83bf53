"""A policy that was learned runs its program, and the default one does not."""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import msgspec
import pytest

from cellwright import PolicyError, Sandbox
from cellwright.harness.cli.main import main
from cellwright.harness.cli.running.learn import learn
from cellwright.policies.policy import Policy, Python
from cellwright.policies.profiles.loading import load_policy
from tests.conftest import OPTIONAL, policy_named

PROGRAM = """
import socket, subprocess, threading
print(subprocess.run(["cat", "/etc/debian_version"], capture_output=True, text=True, check=True).stdout)
print(len(open("/usr/share/common-licenses/BSD").read()))
thread = threading.Thread(target=print); thread.start(); thread.join()
server = socket.create_server(("127.0.0.1", 0)); socket.create_connection(server.getsockname())
try: open("/etc/shadow")
except OSError: pass
"done"
"""


def written(directory: Path, code: str) -> Path:
    program = directory / "program.py"
    program.write_text(code)
    return program


@pytest.mark.skipif(not Path("/etc/debian_version").exists(), reason="the program is for Debian")
def test_the_learned_policy_runs_the_program_and_strict_does_not(tmp_path: Path) -> None:
    program = written(tmp_path, PROGRAM)
    text, result = learn(program, policy_named("strict"))
    assert result.value == "done", result.traceback
    learned = tmp_path / "learned.toml"
    learned.write_text(text)
    policy = msgspec.structs.replace(load_policy(str(learned)), optional_layers=OPTIONAL)
    with Sandbox(policy=policy, pool=0) as sandbox:
        again = sandbox.execute(PROGRAM)
        assert again.value == "done", (text, again.traceback)
        assert sandbox.execute("open('/usr/share/common-licenses/GPL-3')").error is not None
        assert "No such file" in str(
            sandbox.execute("import os; os.execv('/usr/bin/ls', ['ls'])").error
        )
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        assert not sandbox.execute(PROGRAM).ok


def test_a_computation_needs_nothing(tmp_path: Path) -> None:
    text, result = learn(written(tmp_path, "sum(range(10))"), policy_named("strict"))
    assert result.value == 45
    assert "filesystem" not in text
    assert "threads = false" in text


def test_what_no_policy_gives_is_refused_while_learning_too(tmp_path: Path) -> None:
    code = "import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nc.unshare(0x10000000), ctypes.get_errno()"
    text, result = learn(written(tmp_path, code), policy_named("strict"))
    assert result.value == [-1, 1]
    assert "# unshare was refused" in text


def test_files_of_the_whole_machine_and_its_terminals_are_not_proposed(tmp_path: Path) -> None:
    """A policy that names them would show those of the host."""
    program = """
import os
for path, flags in (("/proc/kallsyms", 0), ("/proc/1/mem", 2), ("/dev/ptmx", 2), ("/dev/console", 2)):
    try: os.close(os.open(path, flags))
    except OSError: pass
try: os.listdir("/sys/kernel")
except OSError: pass
"""
    text, _ = learn(written(tmp_path, program), policy_named("strict"))
    assert "filesystem" not in text


def test_a_script_needs_the_program_that_reads_it(tmp_path: Path) -> None:
    code = "import subprocess; subprocess.run(['/usr/bin/ldd', '/usr/bin/cat'], capture_output=True).returncode"
    text, _ = learn(written(tmp_path, code), policy_named("strict"))
    assert '"/usr/bin/ldd"' in text
    assert '"/usr/bin/bash"' in text


def test_names_that_are_looked_up_are_proposed_and_reach_nothing(tmp_path: Path) -> None:
    code = """
import socket
for name in ("api.example.org", "learn.invalid"):
    try: socket.create_connection((name, 443))
    except OSError as error: print(error)
"""
    text, result = learn(written(tmp_path, code), policy_named("strict"))
    assert result.stdout.count("\n") == 2
    assert tomllib.loads(text)["processes"] == {"threads": False}
    assert '{ host = "api.example.org" },  # looked up' in text
    assert "learn.invalid" not in text
    assert not tomllib.loads(text).get("network")
    accepted = (
        text.replace("# allow = [", "allow = [").replace("#     {", "    {").replace("# ]", "]")
    )
    policy = msgspec.convert(tomllib.loads(accepted), Policy)
    assert [rule.host for rule in policy.network.allow] == ["api.example.org"]
    policy = msgspec.structs.replace(policy, optional_layers=OPTIONAL)
    with Sandbox(policy=policy, pool=0) as sandbox:
        sockets = "import socket; len([socket.socket(), socket.socket(socket.AF_UNIX)])"
        assert sandbox.execute(sockets).value == 2


def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot read"):
        learn(tmp_path / "nowhere.py", policy_named("strict"))


def test_the_command_writes_the_policy(tmp_path: Path) -> None:
    program = written(tmp_path, "open('/etc/debian_version').read()")
    optional = [each for layer in OPTIONAL for each in ("--optional", layer)]
    command = [sys.executable, "-m", "cellwright", "learn", *optional, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert '"/etc/debian_version"' in done.stdout
    assert "completed" in done.stderr


def test_a_file_beside_a_program_below_tmp_is_in_the_policy() -> None:
    with tempfile.TemporaryDirectory(prefix="cellwright-learn-", dir="/tmp") as name:
        os.chmod(name, 0o755)
        data = Path(name, "data.csv")
        data.write_text("here")
        data.chmod(0o644)
        program = f"open({str(data)!r}).read()"
        text, result = learn(written(Path(name), program), policy_named("strict"))
        assert result.value == "here"
        assert tomllib.loads(text)["filesystem"]["read"] == [str(data)]


@pytest.mark.parametrize(("name", "is_told"), [("data.csv", True), ("nothing.csv", False)])
def test_a_file_that_the_host_has_and_the_cell_lacks_has_a_hint(
    name: str, is_told: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.csv").touch()
    optional = [each for layer in OPTIONAL for each in ("--optional", layer)]
    command = ["learn", *optional, str(written(tmp_path, f"open({name!r})"))]
    assert main(command) == 1
    told = capfd.readouterr().err
    assert ("absolute path outside of /tmp" in told) == is_told


def test_packages_that_the_program_imported_are_in_the_policy(tmp_path: Path) -> None:
    """In a directory that anybody may read, as one below pytest's is not."""
    with tempfile.TemporaryDirectory(prefix="cellwright-learn-", dir="/var/tmp") as name:
        os.chmod(name, 0o755)
        Path(name, "pack").mkdir(mode=0o755)
        Path(name, "pack", "__init__.py").write_text("X = 5")
        program = "import pack\npack.X"
        python = Python(path=(name,))
        policy = msgspec.structs.replace(policy_named("strict"), python=python)
        text, result = learn(written(tmp_path, program), policy)
        assert result.value == 5, result.traceback
        learned = tmp_path / "learned.toml"
        learned.write_text(text)
        policy = msgspec.structs.replace(load_policy(str(learned)), optional_layers=OPTIONAL)
        assert policy.python == python
        assert policy.filesystem.read == ()
        with Sandbox(policy=policy, pool=0) as sandbox:
            assert sandbox.execute(program).value == 5, text
