"""Hints, for the errors and refusals that newcomers meet first."""

import re
import tomllib
from operator import attrgetter

import pytest

from cellwright.harness.cli.commands import parser_of
from cellwright.policies.advice.hints import for_exec, hints
from cellwright.policies.compiling.syscalls import ADDED_BY, UNIX_SOCKETS, needs
from cellwright.policies.profiles.loading import load_policy
from cellwright.runner.requests.result import SandboxResult, SandboxStatus, Violation
from tests.conftest import ROOT

NOT_SHOWN = "mount_ns: not shown"


def refusal(rule: str, *arguments: str, process: str = "python3 (2)") -> Violation:
    return Violation("call", arguments, rule, process)


@pytest.mark.parametrize(
    ("error", "word"),
    [
        ("ModuleNotFoundError: No module named 'numpy'", "no numpy: ask for its package"),
        ("ModuleNotFoundError: No module named 'sklearn.svm'", "--packages scikit-learn"),
        ("ModuleNotFoundError: No module named 'a_b.c'", "--packages a-b "),
        ("Error: Cannot find module './lib/x.js'\nRequire stack:\n- /a", "./lib/x.js"),
        ("LoadError: cannot load such file -- nokogiri", "nokogiri"),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'my data.csv'",
            "pass my data.csv",
        ),
        ("Error: ENOENT: no such file or directory, open 'rows.csv'", "pass rows.csv"),
        ("Errno::ENOENT: No such file or directory @ rb_sysopen - rows.csv", "pass rows.csv"),
        ("OSError: [Errno 27] File too large", "limits.workspace_bytes"),
        ("OSError: [Errno 28] No space left on device: 'x'", "limits.workspace_inodes"),
        ("Error: ENOSPC: no space left on device, write", "limits.workspace_bytes"),
        ("Errno::EFBIG: File too large @ io_write - big", "limits.workspace_bytes"),
        ("EOFError: EOF when reading a line", "--stdin -"),
        ("RuntimeError: Found no NVIDIA driver on your system.", "--gpu"),
        ("OSError: libcuda.so.1: cannot open shared object file: No such file", "devices.gpu"),
        ("URLError: <urlopen error [Errno -2] Name or service not known>", "no network"),
        ("TypeError: fetch failed: Error: connect ENETUNREACH 1.2.3.4:80", "no network"),
    ],
)
def test_an_error_has_one_hint(error: str, word: str) -> None:
    (hint,) = hints(error, ())
    assert word in hint


@pytest.mark.parametrize(
    ("error", "path"),
    [
        ("OSError: [Errno 30] Read-only file system: '/srv/a b'", "/srv/a b"),
        ("OSError: [Errno 30] Read-only file system: '/srv/a' -> '/srv/b'", "/srv/b"),
        ("Error: EROFS: read-only file system, unlink '/srv/a'", "/srv/a"),
        ("Errno::EROFS: Read-only file system @ apply2files - /srv/a", "/srv/a"),
    ],
)
def test_a_read_only_path_has_one_hint_whether_its_open_was_recorded_or_not(
    error: str, path: str
) -> None:
    (hint,) = hints(error, ())
    assert f"write {path}:" in hint
    assert "filesystem.write" in hint
    assert hints(error, [refusal("mount_ns: read-only", f"'{path}'", "O_WRONLY")]) == (hint,)


@pytest.mark.parametrize("error", [None, "", "ValueError: x", "exit code 1", "No module named 'x'"])
def test_other_errors_have_none(error: str | None) -> None:
    assert hints(error, ()) == ()


@pytest.mark.parametrize("setting", ADDED_BY)
def test_each_setting_that_a_refusal_names_has_a_hint_and_workshop_has_the_setting(
    setting: str,
) -> None:
    (hint,) = hints("exit code 1", [refusal(f"seccomp: {needs(ADDED_BY[setting][0])}")])
    assert f"{setting} = true" in hint
    assert attrgetter(setting)(load_policy("workshop")) or setting == "processes.debug"


def test_a_refused_unix_socket_has_a_hint_if_the_program_failed_by_it() -> None:
    granted = ("base", *ADDED_BY["processes.subprocesses"])
    refused = [refusal(f"seccomp: {needs(UNIX_SOCKETS, granted)}")]
    (hint,) = hints("PermissionError: [Errno 1] Operation not permitted", refused)
    assert f'syscalls.groups = ["{UNIX_SOCKETS}"]' in hint
    assert hints("ValueError", refused) == ()


def test_a_shell_is_told_about_its_builtins() -> None:
    refused = [refusal(f"seccomp: {needs('processes')}", process="bash (2)")] * 2
    (hint,) = hints("exit code 254", refused)
    assert hint.startswith("a shell without subprocesses has its builtins only")


def test_a_refused_socket_and_a_failed_lookup_give_one_hint() -> None:
    refused = [
        refusal(f"seccomp: {needs(group)}") for group in ("local_sockets", "loopback_sockets")
    ]
    (hint,) = hints("gaierror: [Errno -2] Name or service not known", refused)
    assert "no network" in hint


def test_a_refused_name_and_a_refused_address_say_what_to_add_to_the_policy() -> None:
    (hint,) = hints("", [refusal("network: a.test: no rule allows it", "a.test")])
    assert hint == "to let programs reach a.test name it in network.allow of your policy"
    why = "network: 10.1.2.3 is private: no rule names its network"
    (hint,) = hints("URLError", [refusal(why, "a.test", "443")])
    assert hint.startswith("to let a.test have addresses that are not public")


@pytest.mark.parametrize(
    ("why", "address", "word"),
    [
        ("not TLS", "a.test", 'schemes = ["http"]'),
        ("TLS, which no rule allows", "a.test", 'add "https" to schemes'),
        ("the address stands for no name", "127.0.0.1", "localhost is the cell itself"),
    ],
)
def test_a_refused_connection_says_what_its_rule_lacks(why: str, address: str, word: str) -> None:
    error = "ConnectionResetError: [Errno 104] Connection reset by peer"
    (hint,) = hints(error, [refusal(f"network: {why}", address, "8123")])
    assert word in hint
    assert (
        hints(error, [refusal("network: the address stands for no name", "198.18.0.9", "1")]) == ()
    )


def test_a_node_of_a_gpu_is_no_path_to_pass() -> None:
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/dev/nvidia0'"
    (hint,) = hints(error, [refusal("mount_ns: not shown", "'/dev/nvidia0'", "O_RDONLY")])
    assert "--gpu" in hint


def test_only_the_path_that_the_error_names_has_a_hint() -> None:
    refused = [
        refusal(NOT_SHOWN, "'/srv/a.csv'", "O_RDONLY"),
        refusal(NOT_SHOWN, "'/etc/svc.conf'", "O_RDONLY"),
    ]
    (hint,) = hints("FileNotFoundError: No such file or directory: '/srv/a.csv'", refused)
    assert "does not show /srv/a.csv" in hint
    (hint,) = hints("OSError: '/srv/a'", [refusal(NOT_SHOWN, "'/srv/a'", "O_WRONLY|O_CREAT")])
    assert "filesystem.write" in hint


@pytest.mark.parametrize("process", ["", " ", "?", "several"])
def test_a_guest_may_have_any_name(process: str) -> None:
    assert len(hints("", [refusal(f"seccomp: {needs('processes')}", process=process)])) == 1
    assert hints("x", [refusal(NOT_SHOWN, process=process)]) == ()


def test_a_result_has_its_hints_in_json_too() -> None:
    error = "ModuleNotFoundError: No module named 'numpy'"
    result = SandboxResult(status=SandboxStatus.FAILED, reason="exception", error=error)
    assert result.to_dict()["hints"] == list(result.hints) != []


COMMANDS = {
    "x.h:9: fatal error: cannot write PCH file: No space left on device\ncompilation terminated.": (
        "limits.workspace_bytes"
    ),
    "bash: line 1: awk: command not found": "the cell has no awk",
    "/tmp/cell.sh: 1: awk: not found": "the cell has no awk",
    "make: cc: No such file or directory": "the cell has no cc",
    "pip: command not found": "--packages NAME",
    "bash: line 3: apt-get: command not found": "install it on the host",
    "a.c:1:10: fatal error: zlib.h: No such file or directory\n    1 | #include": "does not show zlib.h",
    "a.py:3: UserWarning: Glyph 20013 (\\N{CJK}) missing from font(s) DejaVu Sans.": "addfont",
}


@pytest.mark.parametrize(("stderr", "word"), COMMANDS.items())
def test_what_a_command_says_has_a_hint(stderr: str, word: str) -> None:
    (hint,) = hints("exit code 127", (), stderr=f"before\n{stderr}\n")
    assert word in hint


def test_a_path_that_is_shown_for_reading_cannot_be_executed() -> None:
    stderr = "bash: line 1: /opt/tool/run: Permission denied\n"
    (hint,) = hints("exit code 126", (), stderr=stderr)
    assert "/opt/tool/run" in hint
    assert "processes.execute" in hint
    assert hints("exit code 1", (), stderr=stderr) == ()  # the file cannot be read


def test_a_refused_path_is_hinted_at_where_a_command_names_it() -> None:
    refused = refusal(NOT_SHOWN, "'/data/t.csv'", "O_RDONLY", process="cat (3)")
    (hint,) = hints(
        "exit code 1", [refused], stderr="cat: /data/t.csv: No such file or directory\n"
    )
    assert "does not show /data/t.csv" in hint


def test_a_hint_for_exec_names_options_of_exec_only() -> None:
    """The results of `exec` are those of commands: the table `error` is for programs of `run`."""
    table = tomllib.loads((ROOT / "policies/advice/hints.toml").read_text())
    of_git = {"--no-gpg-sign", "--amend", "--no-edit"}
    of_programs = {"no_module"}  # the texts for errors of programs
    texts = [text for name, text in table["texts"].items() if name not in of_programs]
    texts += [
        *table["network"].values(),
        *(each["hint"] for each in table["command"] if "hint" in each),
    ]
    (choices,) = (each.choices for each in parser_of("exec")._actions if each.metavar == "COMMAND")
    known = set(dict(choices or {})["exec"]._option_string_actions)
    named = {word for text in texts for word in re.findall(r"--[a-z-]+", for_exec(text))}
    assert "--read" in named
    assert named - known <= of_git
    for words in table["exec"]:
        assert any(words in text for text in texts), words


@pytest.mark.parametrize("module", ["pip", "pip._internal"])
def test_pip_is_no_package_to_ask_for(module: str) -> None:
    (hint,) = hints(f"ModuleNotFoundError: No module named '{module}'", ())
    assert "--packages NAME" in hint


@pytest.mark.parametrize("said", ["error: gpg failed to sign the data\n", "error: Load key \"/h/.ssh/id\": No such file or directory\n"])  # fmt: skip
def test_git_is_told_where_commits_are_signed(said: str) -> None:
    (hint,) = hints("exit code 128", (), stderr=said)
    assert "sign outside" in hint


def test_cargo_is_told_of_the_home_of_a_cell() -> None:
    (hint,) = hints(
        "exit code 101", (), stderr="error: cannot create package in the home directory\n"
    )
    assert "cargo new" in hint
