"""The command line, as a shell sees it."""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from cellwright import HostSettings, Sandbox, SandboxConfig, Unenforceable, Workspaces
from cellwright.harness.cli.helping import doctor
from cellwright.runner.egress import addresses
from cellwright.runner.egress.addresses import loopback_name
from cellwright.runner.fixed_root import TEXTS
from cellwright.runner.oci import oci_runtime as runtime
from tests.conftest import OPTIONAL, ROOT

OPTIONS = [part for layer in OPTIONAL for part in ("--optional", layer)]


def cellwright(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command; on an emulated host the doctor takes a minute."""
    command = [sys.executable, "-m", "cellwright", *arguments]
    return subprocess.run(
        command, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=300, check=False
    )


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return cellwright("run", *OPTIONS, *arguments, stdin=stdin)


def test_a_program_prints_and_nothing_else_is_said() -> None:
    done = run("-c", "print('hi')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hi\n", "")


def test_a_failure_is_one_line_beside_the_programs_own_words() -> None:
    done = run("-c", "import sys; sys.exit(3)")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("cellwright: failed (exit) · exit code 3")


def test_what_follows_two_dashes_are_arguments_of_the_program(tmp_path: Path) -> None:
    program = tmp_path / "x.py"
    program.write_text("import sys; print(sys.argv[1:])")
    for source in ((str(program),), ("-c", program.read_text())):
        done = run(*source, "--", "a b", "--json", "--", "-c")
        assert (done.returncode, done.stdout) == (0, "['a b', '--json', '--', '-c']\n")
    done = run("-c", "1", "--", "\udc80")
    assert (done.returncode, done.stderr) == (2, "cellwright: arguments: holds a lone surrogate\n")
    assert run("--", "a").returncode == 2


def test_variables_are_given_or_taken_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "of the caller")
    monkeypatch.delenv("MISSING", raising=False)
    code = "import os; print(os.environ['HERE'], os.environ['A'], 'PWD' in os.environ)"
    done = run("--env", "HERE", "--env", "A=b=c", "-c", code)
    assert (done.returncode, done.stdout) == (0, "of the caller b=c False\n")
    done = run("--env", "MISSING", "-c", code)
    assert done.returncode == 2
    assert done.stderr == (
        "cellwright: --env: MISSING is not set here\nhint: give its value: --env MISSING=VALUE\n"
    )


def test_a_shell_that_may_not_fork_is_told_which_policy_lets_it() -> None:
    code = "echo $(ls /) | wc -c"
    done = run("--language", "bash", "-c", code)
    assert done.returncode == 1
    assert "(seccomp: needs processes.subprocesses = true)" in done.stderr
    *_, hint = done.stderr.splitlines()
    assert hint.startswith("hint: a shell without subprocesses")
    assert "--policy standard" in hint
    done = run("--policy", "standard", "--language", "bash", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("option", ["--packages", "--venv"])
def test_packages_of_programs_that_cannot_use_them_are_refused(option: str) -> None:
    done = run("--language", "bash", option, "given", "-c", "true")
    assert done.returncode == 2
    assert f"{option}: a program in bash has no use for packages" in done.stderr


def test_a_missing_module_has_a_hint_after_the_result() -> None:
    done = run("-c", "import numpy_of_nobody")
    *_, ended, hint = done.stderr.splitlines()
    assert ended.startswith("cellwright: failed (exception)")
    assert hint.startswith("hint: the cell has the standard library, and no numpy_of_nobody")


@pytest.mark.needs("node")
@pytest.mark.parametrize("policy", ["strict", "standard"])
def test_a_fetch_says_why_it_failed(policy: str) -> None:
    code = "(async () => await fetch('http://192.0.2.1/'))()"  # TEST-NET-1, RFC 5737
    done = run("--policy", policy, "--language", "javascript", "-c", code)
    assert "  [cause]: Error: connect E" in done.stderr
    assert "failed (exception) · TypeError: fetch failed: Error: connect E" in done.stderr
    assert "hint: a cell has no network" in done.stderr


def test_a_umask_that_leaves_others_nothing_does_not_shut_the_cell_out() -> None:
    command = [
        sys.executable,
        "-m",
        "cellwright",
        "run",
        *OPTIONS,
        "-c",
        "open('/dev/null').close()",
    ]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False,
        umask=0o077,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_version_is_that_of_pyproject() -> None:
    """-P: as installed, whatever an older build left in the checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    command = [sys.executable, "-P", "-m", "cellwright", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"cellwright {project['version']}\n"


def test_json_is_one_object_on_stdout() -> None:
    result = json.loads(run("--json", "-c", "print('x')\n6 * 7").stdout)
    assert (result["status"], result["value"], result["stdout"], result["ok"]) == (
        "completed",
        42,
        "x\n",
        True,
    )


def test_json_lines_are_output_as_it_comes_and_then_the_result() -> None:
    code = "import os\nprint('\u00fc')\nos.write(2, b'\\xff')\n6 * 7"
    lines = run("--json-lines", "-c", code).stdout.splitlines()
    *events, result = map(json.loads, lines)
    assert {"stream": "stdout", "text": "\u00fc\n"} in events
    assert {"stream": "stderr", "base64": "/w=="} in events
    assert (result["value"], result["stdout"]) == (42, "\u00fc\n")


def test_what_a_program_made_is_written_beside_the_caller_and_told(tmp_path: Path) -> None:
    code = "class P:\n def _repr_png_(self): return b'png'\nopen('a.csv', 'w').write('1')\nP()"
    command = [
        sys.executable,
        "-m",
        "cellwright",
        "run",
        *OPTIONS,
        "--collect",
        "*.csv",
        "-c",
        code,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for number in ("", "-2"):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        told = [f"cellwright-output/picture-1{number}.png", f"cellwright-output/a{number}.csv"]
        assert done.stderr.splitlines() == [f"cellwright: wrote {path}" for path in told]
        assert [(tmp_path / path).read_bytes() for path in told] == [b"png", b"1"]


def test_json_writes_files_only_where_it_is_told_to(tmp_path: Path) -> None:
    made = ["-c", "open('a.csv', 'w').write('1')", "--collect", "*.csv"]
    assert json.loads(run("--json", *made).stdout)["artifacts"][0]["data"] == "MQ=="
    output = ["--output", str(tmp_path / "new"), "--overwrite"]
    for _ in range(2):
        json.loads(run("--json", *made, *output).stdout)
    assert os.listdir(tmp_path / "new") == ["a.csv"]
    assert not (ROOT / "cellwright-output").exists()


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        (["result.csv"], "result.csv (3 bytes); --collect result.csv copies files to --output"),
        (["a b"], "a b (3 bytes); --collect 'a b' copies files to --output"),
        (list("abcde"), "a (3 bytes), b (3 bytes), c (3 bytes) and 2 more; --collect GLOB copies"),
        ([".cache/x", "__pycache__/y.pyc"], ""),
    ],
)
def test_files_that_nothing_keeps_are_named(paths: list[str], told: str, tmp_path: Path) -> None:
    code = (
        "import os\n"
        f"for path in {paths}:\n"
        "    os.makedirs(os.path.dirname(path) or '.', exist_ok=True)\n"
        "    with open(path, 'w') as file: file.write('a,b')"
    )
    done = run("-c", code)
    assert done.returncode == 0
    assert done.stderr.startswith(f"cellwright: not kept: {told}" if told else "")
    assert bool(done.stderr) is bool(told)
    out = ["--output", str(tmp_path / "out")]
    for kept in (["--collect", "**", *out], ["--json"]):
        assert "not kept" not in run(*kept, "-c", code).stderr


def test_a_glob_without_a_new_file_is_told(tmp_path: Path) -> None:
    given = tmp_path / "a.csv"
    given.write_text("1")
    arguments = ["--file", str(given), "--collect", "*.csv", "--output", str(tmp_path / "out")]
    done = run(*arguments, "-c", "print(open('a.csv').read())")
    assert (done.returncode, done.stdout) == (1, "1\n")  # a script must not go on without it
    assert done.stderr == "cellwright: not collected: no new or changed file matches *.csv\n"
    assert run(*arguments, "-c", "open('a.csv', 'w').write('2') and None").returncode == 0
    assert (tmp_path / "out" / "a.csv").read_text() == "2"


def test_inputs_become_variables(tmp_path: Path) -> None:
    file = tmp_path / "inputs.json"
    file.write_text('{"name": "ann", "rows": [1, 2]}')
    code = ["-c", "[name, rows, n]"]
    done = run("--inputs", str(file), "--input", "n=null", "--input", 'name="bob=b"', *code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['bob=b', [1, 2], None]\n", "")
    done = run("--inputs", "-", "-c", "n + 1", stdin='{"n": 1}')
    assert (done.returncode, done.stdout) == (0, "2\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--input", "name=ann"], "--input name: not JSON"),
        (["--input", "name=ann"], "hint: quote text: --input 'name=\"...\"'"),
        (["--input", "name"], "--input: must be NAME=JSON, got 'name'"),
        (["--input", "a b=1"], "inputs: 'a b' is not a Python identifier"),
        (["--inputs", "-"], "--inputs: must be a JSON object, got list"),
        (["--inputs", "/dev/null"], "--inputs: not JSON"),
        (["--inputs", "/nowhere.json"], "cannot read /nowhere.json: No such file"),
        (["--inputs", "-", "--stdin", "-"], "--stdin and --inputs: only one of them can be -"),
    ],
)
def test_invalid_inputs_are_wrong_usage(arguments: list[str], said: str) -> None:
    done = run(*arguments, "-c", "1", stdin="[]")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_what_was_not_collected_is_told(tmp_path: Path) -> None:
    small = tmp_path / "small.toml"
    small.write_text(
        f"extends = 'strict'\noptional_layers = {list(OPTIONAL)!r}\n[limits]\nartifact_bytes = 10"
    )
    made = ["-c", "open('a.csv', 'w').write('x' * 11) and None", "--collect", "*.csv"]
    done = run("--policy", str(small), *made)
    assert done.returncode == 1
    words = "cellwright: not collected: a.csv, 11 bytes: limits.artifact_bytes is 10, of which 10 are left"
    assert done.stderr.splitlines() == [words]
    told = json.loads(run("--policy", str(small), "--json", *made).stdout)["uncollected"]
    assert [(each["path"], each["size_bytes"]) for each in told] == [("a.csv", 11)]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--timeout", "40s", "--timeout: 40 s is more than limits.wall_seconds of the policy, 30 s"),
        ("--memory", "512", "--memory: 512 MiB is more than limits.memory_bytes of the policy, 256 MiB"),
        ("--timeout", "0", "--timeout: must be from 0.001 to 2^53, got 0"),
        ("--memory", "1", "--memory: must be from 8 to 8589934592, got 1"),
    ],
)  # fmt: skip
def test_an_option_can_neither_raise_nor_void_a_limit(option: str, value: str, words: str) -> None:
    done = run("--policy", "strict", option, value, "-c", "1")
    assert done.returncode == 2
    assert words in done.stderr


_LIMITS = "import resource; print(resource.getrlimit(resource.RLIMIT_CPU)[0])"


@pytest.mark.needs("cgroup")
def test_options_raise_the_limits_of_a_policy_that_nobody_named() -> None:
    hog = "len(b'x' * (400 << 20))"
    assert "memory" in run("-c", hog).stderr
    assert run("--memory", "1GB", "-c", hog).stdout == f"{400 << 20}\n"
    lines = run("--memory", "1GB", "--timeout", "10m", "-c", _LIMITS).stdout
    assert lines == "601\n"  # the CPU limit too would end the program first


def test_a_workspace_is_kept_from_one_command_to_the_next(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cellwright", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip

    named = ["run", *OPTIONS, "--workspace", "mine"]
    assert call(*named, "-c", "open('d\x1b\\n9 x', 'w').write('data')").returncode == 0
    (row,) = json.loads(call("workspace", "list", "--json").stdout)
    assert isinstance(row.pop("used"), float)
    assert row == {"name": "mine", "files": 1, "size_bytes": 4, "pending": False}
    assert call("workspace", "show", "mine").stdout == f"{4:>12}  d\\x1b\\n9 x\n"
    assert call("workspace", "get", "mine", "d\x1b\n9 x").stdout == "data"
    (tmp_path / "host").write_text("from the host")
    assert call("workspace", "put", "mine", f"{tmp_path}/host:h").returncode == 0
    assert call(*named, "-c", "print(open('h').read())").stdout == "from the host\n"
    got = str(tmp_path / "got")
    assert [call("workspace", "get", "mine", "h", "--output", got).returncode for _ in "ab"] == [
        0,
        2,
    ]
    assert call("workspace", "remove", "mine", "h").returncode == 0
    done = call(*named, "--clean", "-c", "import os\nprint(os.listdir())")
    assert done.stdout == "['d\\x1b\\n9 x']\n"
    gone = call("workspace", "show", "mine")
    assert (gone.returncode, "workspace 'mine' not found" in gone.stderr) == (2, True)
    many = call(*named, "-c", "for n in range(4097): open(str(n), 'w').close()")
    assert (many.returncode, "not saved: " in many.stderr) == (1, True)


def test_a_program_and_its_files_come_from_the_host(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print(open('renamed').read(), input())")
    (tmp_path / "data").write_text("data")
    done = run(
        "--file",
        f"{tmp_path}/data:renamed",
        "--stdin",
        "-",
        f"{tmp_path}/program.py",
        stdin="line\n",
    )
    assert done.stdout == "data line\n", done.stderr


def test_a_deadline_is_told() -> None:
    done = run("--timeout", "0.2", "-c", "while True: pass")
    assert done.returncode == 1
    assert "timeout (wall_time) · ran longer than 0.2 s" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["run"], 2),
        (["run", "-c", "1", "--timeout", "nan"], 2),
        (["run", "-c", "1", "--memory", "-1"], 2),
        (["run", "/nowhere.py"], 2),
        (["run", "-c", "1", "--policy", "lenient"], 2),
        (["run", "-c", "1", "--optional", "seccomp"], 2),
        (["run", "-c", "1", "--language", "cobol"], 2),
        (["nonsense"], 2),
        (["audit"], 2),
    ],
)
def test_wrong_usage_is_said_without_a_traceback(arguments: list[str], status: int) -> None:
    if arguments[:1] == ["run"]:
        arguments = ["run", *OPTIONS, *arguments[1:]]
    done = cellwright(*arguments)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_explain_names_what_is_in_force() -> None:
    done = cellwright("explain", *OPTIONS)
    assert done.returncode == 0
    assert done.stdout.startswith("policy strict\n")
    assert "layer seccomp: " in done.stdout


def test_explain_has_the_addresses_and_caps_of_network_rules(tmp_path: Path) -> None:
    policy = tmp_path / "p.toml"
    policy.write_text(
        'extends = "strict"\nname = "p"\n[[network.allow]]\nhost = "db.example.org"\nports = [5432]\n'
        'schemes = ["tcp"]\naddresses = ["10.1.0.0/16"]\nconnections = 5\nsent_bytes = 1000\n'
    )
    done = cellwright("explain", *OPTIONS, "--policy", str(policy))
    caps = "schemes tcp, addresses 10.1.0.0/16, connections 5, sent_bytes 1000"
    assert f"network: allow db.example.org:5432 ({caps}), through" in done.stdout


@pytest.mark.needs("root")
def test_explain_names_paths_that_are_closed_to_the_id_of_cells() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="cellwright-cli-") as name:
        for directory, mode in (("open", 0o755), ("closed", 0o700), ("sticky", 0o1777)):
            Path(name, directory).mkdir()
            Path(name, directory).chmod(mode)
        policy = Path(name, "policy.toml")
        policy.write_text(
            f'name = "p"\n[filesystem]\nread = ["{name}/open", "{name}/closed"]\n'
            f'write = ["{name}/sticky"]\n'
        )
        lines = cellwright("explain", *OPTIONS, "--policy", str(policy)).stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("CLOSED")]
    assert line.startswith(f"CLOSED {name}/closed: programs cannot read it")


def test_explain_lists_the_system_calls_that_confine_a_cell_by_layer() -> None:
    done = cellwright("explain", "--system-calls", "--json", *OPTIONS)
    assert done.returncode == 0, done.stderr
    calls = json.loads(done.stdout)
    assert next(iter(calls)) == "descriptor sweep"
    assert "unshare: new user namespace" in calls["user_ns"]
    assert calls["capabilities"][-1] == "chdir: /workspace"
    assert any(each.startswith("seccomp: a filter of ") for each in calls["seccomp"])
    plain = cellwright("explain", "--system-calls", *OPTIONS).stdout
    assert plain.startswith("descriptor sweep\n  dup3: descriptor 0\n")


def test_doctor_looks_for_no_name_that_a_cell_has_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian's /etc/hosts names ip6-localhost, and so does a cell's, for its own loopback."""
    own = {name for line in TEXTS["/etc/hosts"].splitlines() for name in line.split()[1:]}
    known = [*own]
    monkeypatch.setattr(addresses.socket, "gethostname", lambda: "cell")

    def resolve(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if name not in known:
            raise OSError
        return [(0, 0, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", resolve)
    assert loopback_name() is None
    known.append("localhost.localdomain")
    assert loopback_name() == ("localhost.localdomain", "127.0.0.1")


def test_doctor_proves_every_layer_that_is_in_force() -> None:
    done = cellwright("doctor", "--json", *OPTIONS)
    findings = {each["layer"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 0, findings
    assert {each["verdict"] for each in findings.values()} <= {"PASS", "WARN"}
    for layer in ("launcher", "mount_ns", "pid_ns", "net_ns", "capabilities", "seccomp"):
        assert findings[layer]["verdict"] == "PASS"
    assert findings["egress"]["verdict"] == ("PASS" if loopback_name() else "WARN")
    for each in findings.values():
        assert each["verdict"] == "PASS" or each["repair"]


def test_doctor_prints_a_repair_once(capsys: pytest.CaptureFixture[str]) -> None:
    lacking = [doctor.Check(name, "WARN", "gone", "mount it") for name in ("one", "other")]
    doctor.report([*lacking, doctor.Check("last", "PASS", "there")], as_json=False)
    printed = capsys.readouterr().out
    assert printed.count("mount it") == 1
    assert "repair: that of one" in printed


def test_doctor_says_that_cells_do_not_use_an_upstream_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@proxy.example.org:3128")
    check = doctor._egress()
    assert (check.verdict, "HTTPS_PROXY names an upstream proxy" in check.proof) == ("WARN", True)
    assert "secret" not in check.proof


def test_doctor_fails_where_a_refused_name_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = doctor._programs()
    programs["names"] = programs["names"].replace('"denied.invalid"', "name")
    monkeypatch.setattr(doctor, "_programs", lambda: programs)
    check = doctor._egress()
    assert (check.verdict, bool(check.repair)) == ("FAIL", True)


@pytest.mark.needs("root")
def test_doctor_says_how_to_repair_a_loopback_interface_that_is_down() -> None:
    code = (
        "from cellwright.harness.cli.helping import doctor; from types import SimpleNamespace as N; "
        "doctor.loopback_name = lambda: N(name='here', address='127.0.1.1'); "
        "print(*doctor._egress()[:4], sep='|')"
    )
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "egress|FAIL|the loopback interface is down|ip link set lo up\n"


def test_doctor_tries_no_name_where_only_localhost_is_this_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "loopback_name", lambda: None)
    check = doctor._egress()
    assert (check.verdict, bool(check.repair)) == ("WARN", True)


@pytest.mark.needs("runc", "userns")
def test_doctor_runs_a_program_in_a_container_of_each_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "crun"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo crun version 9.9\necho no hybrids >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setattr(runtime, "_PLACES", f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin")
    found = {check.layer: check for check in doctor._oci_runtimes()}
    assert (found["oci crun"].verdict, found["oci crun"].repair) == (
        "WARN", "--runtime runc, which works",
    )  # fmt: skip
    assert "crun 9.9.0 runs no program: crun failed at create" in found["oci crun"].proof
    assert found["oci crun"].proof.endswith("no hybrids")
    assert "containers have the kernel of this host" in found["oci runc"].proof


def test_doctor_ends_with_a_verdict_that_is_what_run_does(tmp_path: Path) -> None:
    """A host without a usable cgroup, as a directory that is none makes this one."""
    environment = os.environ | {"CELLWRIGHT_CGROUP_ROOT": str(tmp_path)}

    def told(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "cellwright", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    status, out, _ = told("doctor")
    assert (status, told("run", "-c", "1")[0]) == (70, 70)
    *_, verdict, repair = out.splitlines()
    assert verdict.startswith(
        "FAIL  verdict        no program runs on this host under the policy strict: "
    )
    assert "--optional cgroup" in repair
    status, out, _ = told("doctor", "--optional", "cgroup")
    assert (status, told("run", "--optional", "cgroup", "-c", "1")[0]) == (0, 0)
    assert (
        out.splitlines()[-1]
        == "PASS  verdict        programs run on this host under the policy strict"
    )


def test_a_refusal_names_the_flag_and_the_field_that_go_on_without(tmp_path: Path) -> None:
    with pytest.raises(Unenforceable) as refusal:
        Sandbox(host=HostSettings(cgroup_root=str(tmp_path)))
    hint = refusal.value.hint
    assert "--optional cgroup" in hint
    assert 'optional_layers=["cgroup"]' in hint
    config = SandboxConfig(optional_layers=["cgroup", *OPTIONAL])
    with Sandbox(config, pool=0, host=HostSettings(cgroup_root=str(tmp_path))) as sandbox:
        assert sandbox.execute("6 * 7").value == 42


TABLE = """
class Table:
    def _repr_html_(self): return "<table>"
    def _repr_png_(self): return b"png"
    def __repr__(self): return "  a b\\n0 1 2"
Table()
"""


def test_a_program_that_prints_nothing_shows_its_value() -> None:
    assert run("-c", "6 * 7").stdout == "42\n"
    assert run("-c", "[None, 'text']").stdout == "[None, 'text']\n"
    assert run("-c", "print('words'); 6 * 7").stdout == "words\n"


def test_a_table_is_shown_as_text_and_written_only_where_asked(tmp_path: Path) -> None:
    arguments = [*OPTIONS, "-c", TABLE]
    command = [sys.executable, "-m", "cellwright", "run", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True
    )  # fmt: skip
    assert done.stdout == "  a b\n0 1 2\n"
    assert os.listdir(tmp_path / "cellwright-output") == ["picture-1.png"]
    run("--output", str(tmp_path / "told"), "-c", TABLE)
    assert sorted(os.listdir(tmp_path / "told")) == ["picture-1.html", "picture-1.png"]


def test_what_was_refused_is_shown_with_a_failure_and_counted_with_success() -> None:
    failed = run("-c", "open('/etc/shadow')")
    *_, refused, result, hint = failed.stderr.splitlines()
    assert hint.startswith("hint: the cell does not show /etc/shadow")
    assert refused == "cellwright: refused: openat '/etc/shadow' O_RDONLY (mount_ns: not shown)"
    assert result.startswith("cellwright: failed (exception)")
    code = "for name in ('shadow', 'gshadow'):\n try: open(f'/etc/{name}')\n except OSError: pass"
    ran = run("-c", code)
    assert (ran.returncode, ran.stderr) == (
        0,
        "cellwright: 2 attempts were refused; use -v to list\n",
    )
    assert run("-v", "-c", code).stderr.count("cellwright: refused: openat") == 2


def test_a_module_beside_the_program_is_a_file_to_pass(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("x = 1")
    program = tmp_path / "main.py"
    program.write_text("import helper; print(helper.x)")
    done = run(str(program))
    assert done.stderr.splitlines()[-1] == (
        f"hint: helper lies beside {program}: pass it with --file {tmp_path}/helper.py"
    )
    assert "--packages" not in done.stderr
    assert run("--file", str(tmp_path / "helper.py"), str(program)).stdout == "1\n"


def test_a_full_workspace_and_missing_input_have_hints() -> None:
    for code, word in (
        ("open('big', 'wb').write(b'x' * (100 << 20))", "limits.workspace_bytes"),
        ("print(input())", "--stdin -"),
    ):
        hint = run("-c", code, stdin="hello").stderr.splitlines()[-1]
        assert hint.startswith("hint: ")
        assert word in hint


def test_attempts_past_those_that_are_noted_in_full_are_counted() -> None:
    code = "for n in range({}):\n try: open(f'/root/{{n}}')\n except OSError: pass\n1 / 0"
    said = "cellwright: and {} more that were refused; --json {}"
    all_noted = run("-c", code.format(50)).stderr.splitlines()
    assert said.format(40, "has them all") in all_noted
    counted = run("-c", code.format(300)).stderr.splitlines()
    assert said.format(290, "has the first in full, and counts the others") in counted


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("notes.txt", "the suffix of its name"),
        ("program.py", ""),
        ("program", ""),
        ("script.txt", ""),
    ],
)
def test_a_file_whose_name_tells_no_language_is_not_taken_for_python(
    tmp_path: Path, name: str, said: str
) -> None:
    first = "#!/usr/bin/env python3\n" if name == "script.txt" else ""
    (tmp_path / name).write_text(f"{first}print(1)")
    done = run(str(tmp_path / name))
    assert (done.returncode, done.stdout) == ((2, "") if said else (0, "1\n"))
    assert said in done.stderr


@pytest.mark.parametrize(
    "arguments", [("run", *OPTIONS, "-c", "None", "--workspace", "mine"), ("workspace", "remove", "mine")]
)  # fmt: skip
def test_a_command_says_that_it_waits_for_a_workspace(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    store = Workspaces(tmp_path / "cellwright" / "workspaces")
    store.write("mine", "f", "here")
    with store.open("mine"):
        waiting = subprocess.Popen(
            [sys.executable, "-m", "cellwright", *arguments],
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path)}, cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert waiting.stderr
        assert (
            waiting.stderr.readline()
            == "cellwright: workspace 'mine' is in use; waiting up to 30 s\n"
        )
    assert waiting.communicate(timeout=60)[1] == ""
    assert waiting.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "FILE or -c CODE is required\nhint: - in place of FILE reads the program from"),
        (
            ["run", "--mount", "/data", "x.py"],
            "hint: --file HOST copies files to /workspace; filesystem",
        ),
        (
            ["run", "--network", "-c", "1"],
            "hint: to let programs reach a host name it in network.allow",
        ),
        (
            ["run", "--allow-net=x.example", "-c", "1"],
            "hint: to let programs reach a host name it in",
        ),
        (["repl", "--cpu", "2"], "hint: cpus below [limits] of a policy file"),
        (["run", "--socket", "/s", "-c", "1"], "hint: did you mean --connect?"),
        (
            ["run", "-p", "pandas", "-c", "1"],
            "unrecognized arguments: -p\nhint: did you mean --packages or --pins or --policy",
        ),
        (
            ["run", "--timeout", "x", "-c", "1"],
            "argument --timeout: must be a number of seconds, or a duration such as 90s or 10m, got 'x'",
        ),
        (
            ["run", "--memory", "64X", "-c", "1"],
            "argument --memory: must be a number of MiB, or a size such as 512M or 2G, got '64X'",
        ),
        (["run", "--find-links", ".", "-c", "1"], "--find-links: needs --packages"),
        (["repl", "--no-index"], "--no-index: needs --packages"),
        (["run", "--policy", "{text}", "-c", "1"], "text': not TOML: "),
        (["run", "--audit", "{directory}", "-c", "1"], "Is a directory"),
        (["learn", "{empty}"], "empty: the source is empty"),
        (["learn", "{binary}"], "binary: the source is not UTF-8: byte 0"),
        (["tools"], "a command is missing: list, search, show, create"),
        (["tools", "call", "nobody", "--registry", "{new}"], "new: No such file or directory"),
        (["tools", "list", "--registry", "{directory}"], "directory: Is a directory"),
        (["tools", "create", "{binary}"], "binary: not UTF-8: byte 0"),
        (["tools", "create", "{missing}"], "missing: No such file or directory\n"),
        (["runs", "pending", "{missing}"], "missing: No such file or directory\n"),
        (["workspace", "list", "--directory", "{missing}"], "--directory: not a directory: "),
        (
            ["workspace", "show", "nobody", "--directory", "{directory}"],
            "'nobody' not found\nhint: ",
        ),
        (["audit", "tail", "{text}"], "text: no line is a record of an audit trail"),
        (["audit", "summary", "{binary}"], "binary: no line is a record of an audit trail"),
    ],
)
def test_a_wrong_argument_is_told_in_words(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "directory").mkdir()
    for name, content in (("text", b"x"), ("empty", b""), ("binary", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content)
    names = ("directory", "text", "empty", "binary", "missing", "new")
    places = {name: str(tmp_path / name) for name in names}
    done = cellwright(*(each.format(**places) for each in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "[Errno" not in done.stderr


def test_an_empty_list_is_told_beside_the_output(tmp_path: Path) -> None:
    listed = cellwright("workspace", "list", "--directory", str(tmp_path))
    assert (listed.returncode, listed.stdout) == (0, "")
    assert listed.stderr == "cellwright: no workspaces\n"
