"""Commands in the cell of a session, or in a fresh one: their ends, output, limits and directories."""

import asyncio
from pathlib import Path

import pytest

from cellwright import CommandResult, Policy, PolicyError, Sandbox
from cellwright.policies.policy import Validation
from tests.conftest import OPTIONAL, policy_named, soon, with_limits

pytestmark = pytest.mark.needs("userns")

ENDS = {
    "true": (["true"], 0),
    "its own status": (["sh", "-c", "exit 3"], 3),
    "killed by a signal": (["sh", "-c", "kill -9 $$"], 137),
    "no such program": (["no-such-program"], 127),
    "a directory": (["/usr"], 126),
    "no such directory": (["/usr/no/such/program"], 127),
}


@pytest.mark.parametrize(("command", "exit_code"), ENDS.values(), ids=ENDS)
def test_the_exit_code_is_that_of_a_shell(
    command: list[str], exit_code: int, standard: Sandbox
) -> None:
    result = standard.run(command)
    assert (result.exit_code, result.timed_out, result.error) == (exit_code, False, None), result
    assert result.ok is (exit_code == 0)
    assert result.execution_id


def test_output_goes_to_its_stream_and_is_decoded(standard: Sandbox) -> None:
    result = standard.run(["sh", "-c", r"printf 'a\377b'; printf c >&2"])
    assert (result.stdout, result.stderr) == ("a\ufffdb", "c")


def test_a_missing_program_is_named_on_standard_error(standard: Sandbox) -> None:
    assert (
        standard.run(["no-such-program"]).stderr == "no-such-program: No such file or directory\n"
    )
    assert standard.run(["ls"], cwd="/no/such").stderr == "/no/such: No such file or directory\n"


def test_a_line_is_for_the_shell_only_when_it_is_asked_for(standard: Sandbox) -> None:
    assert standard.run("printf 'b\na\n' | sort; echo $HOME", shell=True).stdout == (
        "a\nb\n/workspace\n"
    )
    assert standard.run(["echo", "$HOME; ls | wc"]).stdout == "$HOME; ls | wc\n"
    with pytest.raises(PolicyError, match="command: must be a list") as refused:
        standard.run("ls | wc")
    assert "shell=True" in refused.value.hint


@pytest.mark.parametrize("given", ["two\nlines", b"\x00\xff bytes", ""], ids=repr)
def test_standard_input_arrives_byte_for_byte(given: str | bytes, standard: Sandbox) -> None:
    data = given.encode() if isinstance(given, str) else given
    result = standard.run(["od", "-An", "-v", "-tx1"], stdin=given)
    assert bytes.fromhex(result.stdout) == data


def test_without_standard_input_there_is_nothing_to_read(standard: Sandbox) -> None:
    assert standard.run(["cat"]).stdout == ""


def test_directory_and_variables(standard: Sandbox) -> None:
    result = standard.run(["sh", "-c", "pwd; echo $COLOUR"], cwd="/tmp", env={"COLOUR": "red"})
    assert result.stdout == "/tmp\nred\n"


def test_variables_are_those_of_one_command(standard: Sandbox) -> None:
    with standard.session() as session:
        line = "echo ${COLOUR:-none} $HOME"
        assert session.run(line, shell=True, env={"COLOUR": "red"}).stdout == "red /workspace\n"
        assert session.run(line, shell=True).stdout == "none /workspace\n"


def test_a_command_is_looked_for_in_the_path_that_it_is_given(standard: Sandbox) -> None:
    assert standard.run(["echo", "x"], env={"PATH": "/no/such"}).exit_code == 127


def test_a_command_that_takes_too_long_is_killed_with_what_it_started(standard: Sandbox) -> None:
    with standard.session() as session:
        result = session.run("echo early; sleep 600 & sleep 600", shell=True, timeout=3.0)
        assert (result.exit_code, result.timed_out, result.stdout) == (124, True, "early\n")
        assert session.run("ps -e -o comm=", shell=True).stdout.count("sleep") == 0


def test_the_limit_of_the_policy_ends_a_command_too(standard: Sandbox) -> None:
    policy = with_limits(policy_named("standard"), wall_seconds=1.0)
    with Sandbox(policy=policy, pool=0) as box, box.session() as session:
        session.execute("kept = 1")
        result = session.run("exec sleep 600", shell=True)
        assert (result.exit_code, result.timed_out) == (124, True)
        assert session.execute("kept").value == 1
        assert session.run("ps -e -o comm=", shell=True).stdout.count("sleep") == 0


def test_a_flood_of_output_is_cut_and_told(standard: Sandbox) -> None:
    result = standard.run(["head", "-c", "1000000", "/dev/zero"])
    assert result.ok
    assert result.truncated["stdout"] > 800_000


def test_a_command_beyond_the_memory_of_its_cell_is_told(standard: Sandbox) -> None:
    result = standard.run(["sh", "-c", "head -c 1G /dev/zero | tail"])
    assert not result.ok or result.error
    assert result.usage.memory_peak_bytes is None or result.usage.memory_peak_bytes <= 256 << 20


def test_a_session_keeps_its_names_directory_and_background_programs(standard: Sandbox) -> None:
    with standard.session() as session:
        session.execute("import os\nkept = 1\nos.mkdir('inner')\nos.chdir('inner')")
        assert session.run(["pwd"]).stdout == "/workspace/inner\n"
        assert session.run("sleep 600 & echo $!", shell=True).ok
        commands = "ps -e -o comm="  # until the shell's child has become sleep(1), it is named sh
        assert soon(lambda: session.run(commands, shell=True).stdout.count("sleep") == 1)
        session.run("echo data > file", shell=True)
        assert session.execute("open('file').read()").value == "data\n"
        names = session.execute("sorted(name for name in dir() if not name.startswith('_'))")
        assert names.value == ["kept", "os"]


def test_a_program_of_the_session_cannot_forge_a_result_of_another_kind(standard: Sandbox) -> None:
    forge = "import subprocess\nclass P:\n returncode = [1]\n def communicate(self, *a): pass\n"
    with standard.session() as session:
        session.execute(forge + "subprocess.Popen = lambda *a, **k: P()")
        result = session.run(["true"])
    assert isinstance(result, CommandResult)
    assert isinstance(result.exit_code, int)
    assert result.exit_code != 0


def test_commands_need_a_policy_that_allows_subprocesses(strict: Sandbox) -> None:
    with pytest.raises(PolicyError, match="allows no subprocesses"):
        strict.run(["true"])


def test_source_checks_that_are_enforced_refuse_commands() -> None:
    policy = policy_named("standard")
    checked = Policy(
        processes=policy.processes, filesystem=policy.filesystem, validation=Validation(mode="enforce"),
        optional_layers=policy.optional_layers,
    )  # fmt: skip
    with (
        Sandbox(policy=checked, pool=0) as box,
        pytest.raises(PolicyError, match="source checks"),
    ):
        box.run(["true"])


def test_a_session_of_another_language_has_no_commands(standard: Sandbox) -> None:
    with (
        standard.session(language="bash") as session,
        pytest.raises(PolicyError, match="session of bash"),
    ):
        session.run(["true"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (([],), "command"),
        (([""],), "command"),
        ((["a\0b"],), "NUL"),
        ((5,), "command"),
        (([5],), "command"),
    ],
    ids=repr,
)
def test_invalid_arguments_are_told_by_name(
    arguments: tuple[object], word: str, standard: Sandbox
) -> None:
    with pytest.raises(PolicyError, match=word):
        standard.run(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "named",
    [{"cwd": 5}, {"timeout": "x"}, {"timeout": -1}, {"stdin": 5}, {"env": 5}, {"env": {"A": 1}}],
    ids=str,
)
def test_invalid_options_are_told_by_name(named: dict[str, object], standard: Sandbox) -> None:
    with pytest.raises(PolicyError, match=next(iter(named))):
        standard.run(["true"], **named)  # type: ignore[arg-type]


def test_cancelling_a_task_ends_its_command(standard: Sandbox) -> None:
    async def main() -> str:
        assert (await standard.arun(["echo", "x"])).stdout == "x\n"
        task = asyncio.create_task(standard.arun(["sleep", "600"]))
        await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return "cancelled"
        return "ended"

    assert asyncio.run(main()) == "cancelled"


def test_python3_is_that_of_the_sandbox_with_its_packages(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # cells run as another user
    (tmp_path / "thing.py").write_text("n = 42\n")
    own = {
        "extends": "standard",
        "optional_layers": list(OPTIONAL),
        "python": {"path": [str(tmp_path)]},
    }
    line = "import sys, thing; print(thing.n, sys.version)"
    script = "#!/usr/bin/env python3\n" + line
    with Sandbox(policy=own, pool=0) as sandbox, sandbox.session() as session:
        version = session.execute("import sys; sys.version").value
        said = f"42 {version}\n"
        for name in ("python3", "python", f"python{version.rpartition('.')[0][:4]}"):
            done = session.run([name, "-c", line])
            assert (done.stdout, done.violations) == (said, ()), done
        assert (
            session.run('sh -c \'env python3 -c "$0"\' "$A"', shell=True, env={"A": line}).stdout
            == said
        )
        session.upload("x", script)
        assert session.run("chmod +x x; ./x", shell=True).stdout == said
        process = session.start_command(["python3", "-c", line])
        process.wait(30)
        assert process.read().decode() == said
        shell = sandbox.execute('python3 -c "$A"', "bash", env={"A": line})
        assert (shell.stdout, shell.violations) == (said, ())


def test_variables_of_a_call_or_policy_come_before_those_of_packages(tmp_path: Path) -> None:
    own = {
        "extends": "standard", "optional_layers": list(OPTIONAL), "python": {"path": [str(tmp_path)]},
        "environment": {"PYTHONPATH": "/mine"},
    }  # fmt: skip
    with Sandbox(policy=own, pool=0) as sandbox:
        assert sandbox.run(["printenv", "PYTHONPATH"]).stdout == "/mine\n"
        done = sandbox.run(["printenv", "PYTHONPATH"], env={"PYTHONPATH": "/other"})
        assert done.stdout == "/other\n"
