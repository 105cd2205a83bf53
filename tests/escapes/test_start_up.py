"""Code that would run before a program: from a caller's variables, or files in the guest's home."""

from typing import NamedTuple

import pytest

from cellwright import HostSettings, Sandbox, SandboxResult
from tests.conftest import newer_node, policy_named

NODE, RUBY = pytest.mark.needs("node"), pytest.mark.needs("ruby")


class Attempt(NamedTuple):
    """By `variables` and `files` a program that says nothing is to say "evil".  `plainly` is the command
    that falls for it; its program comes on standard input if not in the command."""

    language: str
    variables: dict[str, str]
    files: dict[str, str]
    plainly: tuple[str, ...]
    program: str = ""


ATTEMPTS = {
    "NODE_OPTIONS": Attempt(
        "javascript", {"NODE_OPTIONS": "--require /workspace/evil.js"},
        {"evil.js": "console.log('evil')"}, ("node", "-e", ";"), ";",
    ),
    "NODE_PATH": Attempt(
        "javascript", {"NODE_PATH": "/workspace/lib"}, {"lib/m.js": "console.log('evil')"},
        ("node", "-e", "require('m')"), "try { require('m') } catch {}",
    ),
    "RUBYOPT": Attempt(
        "ruby", {"RUBYOPT": "-r/workspace/evil.rb"}, {"evil.rb": "puts 'evil'"},
        ("ruby", "-e", ""), "nil",
    ),
    "RUBYLIB": Attempt(
        "ruby", {"RUBYLIB": "/workspace/lib"}, {"lib/json.rb": "puts 'evil'"},
        ("ruby", "-e", "require 'json'"), "require 'json'",
    ),
    "BASH_ENV": Attempt(
        "bash", {"BASH_ENV": "/workspace/evil"}, {"evil": "echo evil"}, ("bash", "-c", ":"), ":"
    ),
    "SHELLOPTS": Attempt(
        "bash", {"SHELLOPTS": "xtrace", "PS4": "evil "}, {}, ("bash", "-c", ":"), ":"
    ),
    "ENV of an interactive sh": Attempt(
        "sh", {"ENV": "/workspace/evil"}, {"evil": "echo evil"}, ("sh", "-i"), ":"
    ),
    "ENV of a bash called sh": Attempt(
        "bash", {"ENV": "/workspace/evil", "POSIXLY_CORRECT": "1"}, {"evil": "echo evil"},
        ("bash", "--posix", "-i"), ":",
    ),
    ".bashrc": Attempt("bash", {}, {".bashrc": "echo evil"}, ("bash", "-i"), ":"),
    ".bash_profile": Attempt("bash", {}, {".bash_profile": "echo evil"}, ("bash", "-l"), ":"),
    ".profile": Attempt("sh", {}, {".profile": "echo evil"}, ("sh", "-l"), ":"),
    ".node_modules": Attempt(
        "javascript", {"HOME": "/workspace/home"},
        {"home/.node_modules/m.js": "console.log('evil')"},
        ("node", "-e", "require('m')"), "try { require('m') } catch {}",
    ),
    "PYTHONSTARTUP": Attempt(
        "python", {"PYTHONSTARTUP": "/workspace/evil.py"}, {"evil.py": "print('evil')"},
        ("python3", "-i"), "pass",
    ),
    "PYTHONPATH": Attempt(
        "python", {"PYTHONPATH": "/workspace/lib"}, {"lib/sitecustomize.py": "print('evil')"},
        ("python3", "-c", ""), "pass",
    ),
}  # fmt: skip
MARKS = {"javascript": [NODE], "ruby": [RUBY]}
EVERY = [
    pytest.param(each, id=name, marks=MARKS.get(each.language, []))
    for name, each in ATTEMPTS.items()
]


def says_evil(result: SandboxResult) -> bool:
    return "evil" in result.stdout + result.stderr


PLAINLY = """
import os, subprocess
done = subprocess.run(command, env={**os.environ, **variables}, input=":\\n", text=True, capture_output=True)
print(done.stdout, done.stderr)
"""


@pytest.mark.parametrize("attempt", EVERY)
def test_the_attempt_works_without_the_protection(standard: Sandbox, attempt: Attempt) -> None:
    """In a cell, by a command of the program's own."""
    given = {"command": list(attempt.plainly), "variables": attempt.variables}
    assert says_evil(standard.execute(PLAINLY, inputs=given, files=attempt.files))


@pytest.mark.parametrize("attempt", EVERY)
def test_nothing_runs_before_a_program(strict: Sandbox, attempt: Attempt) -> None:
    result = strict.execute(
        attempt.program, attempt.language, files=attempt.files, env=attempt.variables
    )
    assert result.ok, result.to_dict()
    assert not says_evil(result)


@pytest.mark.parametrize("attempt", EVERY)
def test_nothing_runs_before_the_first_program_of_a_session_or_a_later_one(
    strict: Sandbox, attempt: Attempt
) -> None:
    with strict.session(language=attempt.language) as session:
        for _ in range(2):
            result = session.execute(attempt.program, files=attempt.files, env=attempt.variables)
            assert result.ok, result.to_dict()
            assert not says_evil(result)


@pytest.mark.parametrize("language", ["bash", "sh"])
def test_inputs_of_a_shell_are_no_way_in_either(strict: Sandbox, language: str) -> None:
    given = {"BASH_ENV": "/workspace/evil", "ENV": "/workspace/evil"}
    files = {"evil": "echo evil"}
    assert not says_evil(strict.execute(":", language, inputs=given, files=files))
    with strict.session(language=language) as session:
        assert not says_evil(session.execute(":", inputs=given, files=files))


@pytest.mark.needs("newer_node")
def test_what_a_program_is_given_as_node_options_it_sees_but_node_does_not(
    strict: Sandbox,
) -> None:
    interpreters = {"javascript": newer_node()}
    with Sandbox(
        policy=policy_named("strict"), pool=0, host=HostSettings(interpreters=interpreters)
    ) as box:
        for language in ("javascript", "typescript"):
            attempt = ATTEMPTS["NODE_OPTIONS"]
            result = box.execute(
                "process.env.NODE_OPTIONS", language, files=attempt.files, env=attempt.variables
            )
            assert (result.value, result.stdout) == ("--require /workspace/evil.js", "")


# LANG-01: what a shell can reach by itself


REACHES = """
exec 4<>/dev/tcp/127.0.0.1/47391 && head -c 200 <&4
read x < /etc/shadow && echo reached
for f in /proc/[0-9]*/environ; do while IFS= read -r -d '' e; do echo "$e"; done < $f; done
ulimit -Hn 999999 && echo reached
echo done
"""


@pytest.mark.parametrize("profile", ["strict", "standard"])
def test_a_shell_reaches_no_more_than_python(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "reached")
    with Sandbox(policy=policy_named(profile), pool=0) as box, box.session(language="bash") as one:
        for result in (box.execute(REACHES, "bash"), one.execute(REACHES)):
            assert result.stdout.endswith("done\n")
            assert "reached" not in result.stdout
            assert ("'/etc/shadow'", "O_RDONLY") in {each.arguments for each in result.violations}
