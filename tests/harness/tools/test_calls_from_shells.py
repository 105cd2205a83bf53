"""Shells call tools of the host by a command, through a descriptor that opening a file brings."""

import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from cellwright import AuditLog, Broker, Sandbox, SandboxStatus, Vault
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.tool import Caller, Tool
from cellwright.policies.languages import LANGUAGES
from cellwright.policies.tool_rules import ToolRule, Tools
from tests.conftest import policy_named, soon

SHELLS = [name for name, each in LANGUAGES.items() if each.is_shell]
ANYTHING = {"type": "object"}
NUMBERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def tool(name: str, function: Any, **about: Any) -> Tool:
    about = {"owner": ToolOwner.DEVELOPER, "parameters": ANYTHING} | about
    return Tool(ToolSpec(name=name, **about), function)


def fail(_: dict[str, Any], __: Caller) -> None:
    raise RuntimeError("out of order:\n  see below")


TOOLS = [
    tool("maths.twice", lambda given, _: given["n"] * 2, parameters=NUMBERS),
    tool("echo", lambda given, _: given),
    tool("broken", fail),
    tool("risky", lambda *_: 1, risky=True),
    tool("forbidden", lambda *_: 1),
]
RULES = Tools(
    rules=(ToolRule(tool="forbidden", effect="deny"), ToolRule(tool="*", effect="allow")),
    result_bytes=2**20,
)


@pytest.fixture(scope="module")
def broker() -> Broker:
    return Broker(Offer(TOOLS), rules=RULES)


@pytest.fixture(scope="module")
def alone(broker: Broker) -> Iterator[Sandbox]:
    """Cells in which nothing but the shell may be started."""
    with Sandbox(policy=policy_named("strict", tools=RULES), tools=broker, pool=0) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def free(broker: Broker) -> Iterator[Sandbox]:
    """Cells in which programs start others."""
    with Sandbox(policy=policy_named("standard", tools=RULES), tools=broker, pool=0) as sandbox:
        yield sandbox


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


PLAIN = """
cellwright-call maths.twice '{"n": 21}'
cellwright-call echo
x=1 cellwright-call echo '{"text": "a\\\\b %s \\"é"}' && echo well
cellwright-call echo - <<'END'
{"lines":
  "kept"}
END
cellwright-call echo '{"n": 1}' > /tmp/kept; read -r kept < /tmp/kept; echo "kept $kept"
for n in 1 2 3; do cellwright-call maths.twice "{\\"n\\": $n}"; done
"""
PLAIN_SAYS = ["42", "{}", '{"text":"a\\\\b %s \\"é"}', "well", '{"lines":"kept"}', 'kept {"n":1}']


def test_the_value_is_printed_as_json_where_nothing_else_may_be_started(
    alone: Sandbox, shell: str
) -> None:
    result = alone.execute(PLAIN, shell)
    assert result.stdout.splitlines() == [*PLAIN_SAYS, "2", "4", "6"], result
    assert (result.ok, result.stderr, result.violations) == (True, "", ())


@pytest.mark.parametrize(
    ("call", "status", "says"),
    [
        ('maths.twice \'{"n": "x"}\'', 2, "invalid_arguments: $.n: 'x' is not of type \"integer\""),
        ("maths.twice '{\"n\": '", 2, "invalid_arguments: arguments: not JSON: "),
        ("maths.twice ''", 2, "invalid_arguments: "),
        ("maths.twice - < /dev/null", 2, "invalid_arguments: "),
        ("", 2, "usage: cellwright-call NAME [JSON | -]"),
        ("maths.twice '{}' '{}'", 2, "usage: "),
        (
            "maths.thrice",
            3,
            "not_found: there is no tool 'maths.thrice'; did you mean maths.twice?",
        ),
        ("''", 3, "not_found: "),
        ('"$(printf "\\\\377")"', 3, "not_found: "),
        ("forbidden", 4, "denied: "),
        ("risky", 6, "not_approved: "),
        ("broken", 1, "failed: RuntimeError: out of order:\n  see below"),
    ],
)
def test_what_goes_wrong_is_said_on_stderr_and_by_the_status(
    free: Sandbox, shell: str, call: str, status: int, says: str
) -> None:
    result = free.execute(f"cellwright-call {call}; echo $?", shell)
    assert result.stdout == f"{status}\n"
    assert result.stderr.startswith(says), result.stderr
    assert result.violations == ()


def test_the_budget_has_a_status_of_its_own(shell: str) -> None:
    rules = Tools(calls=1)
    with Sandbox(policy=policy_named("strict", tools=rules), tools=TOOLS, pool=0) as sandbox:
        result = sandbox.execute("cellwright-call echo; cellwright-call echo", shell)
    assert (result.exit_code, result.stdout) == (5, "{}\n")
    assert result.stderr.startswith("budget: ")


def test_what_a_shell_starts_calls_too(free: Sandbox, shell: str) -> None:
    result = free.execute(
        """
set -eu
n=$(cellwright-call maths.twice '{"n": 4}'); echo "n is $n"
echo "{\\"n\\": $n}" | cellwright-call maths.twice - | tr 6 7
(cellwright-call echo '{"in": "subshell"}')
printf '%s\\n' 1 2 3 | xargs -I@ cellwright-call maths.twice '{"n": @}'
if ! cellwright-call broken 2> said; then cat said; fi
cellwright-call nobody || echo $?
env cellwright-call nobody || echo $?
""",
        shell,
    )
    assert result.stdout.splitlines() == [
        "n is 8", "17", '{"in":"subshell"}', "2", "4", "6",
        "failed: RuntimeError: out of order:", "  see below", "3", "3",
    ], result  # fmt: skip
    assert result.ok


def test_long_arguments_and_values_are_whole(free: Sandbox, shell: str) -> None:
    text = "\N{SNOWMAN}" * 30_000 + "x" * 210_000
    lines = json.dumps({"text": text, "more": list(range(20_000))}, indent=1)
    result = free.execute(
        "cellwright-call echo - < given > value; cellwright-call maths.twice '{\"n\": 1}'",
        shell, files={"given": lines.encode()}, collect=["value"],
    )  # fmt: skip
    assert json.loads(result.artifacts[0].data) == json.loads(lines)
    assert result.stdout == "2\n", result


def test_calls_in_the_background_are_made_at_the_same_time(shell: str) -> None:
    """They could not meet if one waited for another."""
    meeting = threading.Barrier(8, timeout=60)

    def meet(given: dict[str, Any], _: Caller) -> int:
        meeting.wait()
        return int(given["n"]) * 11

    policy = policy_named("standard")
    with Sandbox(policy=policy, tools=[tool("meet", meet)], pool=0) as sandbox:
        result = sandbox.execute(
            "for n in 1 2 3 4 5 6 7 8; do cellwright-call meet \"{\\\"n\\\": $n}\" > $n & done; wait\n"
            "cat 1 2 3 4 5 6 7 8",
            shell,
        )  # fmt: skip
    assert result.stdout.split() == [str(n * 11) for n in range(1, 9)], result


def test_more_calls_than_may_be_made_at_once_wait_their_turn(shell: str) -> None:
    full, made = threading.Barrier(32, timeout=60), []

    def meet(*_: Any) -> None:
        made.append(1)
        if len(made) <= 32:
            full.wait()

    policy = policy_named("standard")
    policy = replace(policy, limits=replace(policy.limits, processes=200))
    with Sandbox(policy=policy, tools=[tool("meet", meet)], pool=0) as sandbox:
        result = sandbox.execute(
            "n=0; while [ $n -lt 100 ]; do cellwright-call meet & n=$((n+1)); done; wait", shell
        )
    assert (result.ok, result.stdout, len(made)) == (True, "null\n" * 100, 100), result


def test_a_process_killed_in_a_call_does_not_disturb_the_next(shell: str) -> None:
    began, release = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        began.set()
        release.wait(60)

    tools = [*TOOLS, tool("slow", slow), tool("has_begun", lambda *_: began.wait(60))]
    with Sandbox(policy=policy_named("standard"), tools=tools, pool=0) as sandbox:
        result = sandbox.execute(
            "cellwright-call slow & cellwright-call has_begun; kill -9 $!\n"
            "cellwright-call maths.twice '{\"n\": 3}'",
            shell,
        )
        release.set()
    assert result.stdout == "true\n6\n", result


@pytest.mark.parametrize("profile", ["strict", "standard"])
def test_a_session_calls_in_every_request(profile: str, shell: str) -> None:
    policy = policy_named(profile, tools=RULES)
    with (
        Sandbox(policy=policy, tools=TOOLS, pool=0) as sandbox,
        sandbox.session(language=shell) as session,
    ):
        for _ in range(2):
            result = session.execute(PLAIN)
            assert result.stdout.splitlines() == [*PLAIN_SAYS, "2", "4", "6"], result
            assert (result.ok, result.stderr, result.violations) == (True, "", ())
        result = session.execute("cellwright-call nobody")
        assert (result.exit_code, result.ok) == (3, False)
        assert session.execute("echo $?; x=kept").stdout == "3\n"
        assert session.execute("cellwright-call echo; echo $x").stdout == "{}\nkept\n"


def test_a_call_that_outlives_its_request_is_told_so(shell: str) -> None:
    began, release = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        began.set()
        release.wait(60)

    tools = [*TOOLS, tool("slow", slow), tool("has_begun", lambda *_: began.wait(60))]
    with (
        Sandbox(policy=policy_named("standard"), tools=tools, pool=0) as sandbox,
        sandbox.session(language=shell) as session,
    ):
        session.execute(
            "(cellwright-call slow > late 2>&1; echo $? >> late) & cellwright-call has_begun"
        )
        assert soon(lambda: "69" in session.execute("cat late").stdout)
        assert session.execute("cat late").stdout.startswith("closed: ")
        release.set()
        assert session.execute("cellwright-call maths.twice '{\"n\": 2}'").stdout == "4\n"


def test_a_request_that_takes_too_long_in_a_call_is_interrupted(shell: str) -> None:
    release = threading.Event()
    tools = [*TOOLS, tool("slow", lambda *_: release.wait(60))]
    with (
        Sandbox(policy=policy_named("strict"), tools=tools, pool=0) as sandbox,
        sandbox.session(language=shell) as session,
    ):
        session.execute("x=kept")
        assert session.execute("cellwright-call slow", timeout=0.5).status is SandboxStatus.TIMEOUT
        assert session.execute("cellwright-call echo; echo $x").stdout == "{}\nkept\n"
        release.set()


def test_a_deadline_does_not_wait_for_a_tool(shell: str) -> None:
    release = threading.Event()
    tools = [tool("slow", lambda *_: release.wait(60))]
    with Sandbox(policy=policy_named("strict"), tools=tools, pool=0) as sandbox:
        result = sandbox.execute("cellwright-call slow", shell, timeout=0.3)
        release.set()
    assert (result.status, result.reason) == (SandboxStatus.TIMEOUT, "wall_time")


def test_without_tools_there_is_no_such_command(shell: str) -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        result = sandbox.execute("cellwright-call echo", shell)
        assert "ork" in result.stderr, result  # it is looked for as any other program, in vain
        result = sandbox.execute(". /dev/bin/cellwright-call; _cellwright_call '' echo", shell)
    assert (result.exit_code, result.stderr[:7]) == (69, "closed:"), result


def test_where_opens_are_not_watched_a_call_is_told_so(broker: Broker, shell: str) -> None:
    policy = policy_named("strict")
    policy = replace(policy, filesystem=replace(policy.filesystem, watch=False))
    with Sandbox(policy=policy, tools=broker, pool=0) as sandbox:
        result = sandbox.execute("cellwright-call echo", shell)
    assert (result.exit_code, result.stderr[:7]) == (69, "closed:"), result


def test_bash_runs_a_program_with_tools_as_one_without(alone: Sandbox, strict: Sandbox) -> None:
    """Traps, line numbers, $0 and the status: the command is read before, not around it."""
    program = (
        "trap 'echo failed at $LINENO' ERR\ntrap 'echo left' EXIT\necho $0 ${BASH_SOURCE[0]}\n"
        "echo $- $# ${BASH_ENV-none}\n[ nothing ] && false\nreturn\nfalse"
    )
    with_tools, without = alone.execute(program, "bash"), strict.execute(program, "bash")
    assert (with_tools.stdout, with_tools.stderr) == (without.stdout, without.stderr)
    assert with_tools.exit_code == without.exit_code == 1


def test_sh_names_the_program_and_its_lines(alone: Sandbox) -> None:
    result = alone.execute("echo $0 $#\nset -u\n: $undefined", "sh")
    assert result.stdout == "/tmp/cell.sh 0\n"
    assert result.stderr.startswith("/tmp/cell.sh: 3: "), result.stderr
    assert result.stderr.endswith("undefined: parameter not set\n")


def test_no_byte_of_a_credential_enters_a_shell(shell: str) -> None:
    use = tool("use", lambda given, _: f"used {given['key']}", credentials={"key": "K"})
    broker = Broker(Offer([use]), vault=Vault({"K": "hunter2-hunter2"}))
    with Sandbox(policy=policy_named("strict"), tools=broker, pool=0) as sandbox:
        result = sandbox.execute("cellwright-call use; exec 7<>/dev/tools; : <&7", shell)
    assert result.stdout == '"used [credential]"\n'


def test_a_call_lies_in_the_trail_as_a_child_of_the_execution(shell: str) -> None:
    trail = AuditLog()
    with Sandbox(policy=policy_named("strict"), tools=TOOLS, pool=0, audit=trail) as sandbox:
        result = sandbox.execute("cellwright-call echo", shell)
    start = next(each for each in trail.get_entries(category="execution") if each.action == "start")
    calls = trail.get_entries(category="tool")
    assert [each.action for each in calls] == ["call", "returned"]
    assert {each.parent_id for each in calls} == {start.span_id}
    assert calls[0].details["caller"] == result.execution_id


def test_a_call_of_a_run_is_known_by_its_line(shell: str) -> None:
    from cellwright import Runs

    broker = Broker(Offer(TOOLS), approve=(runs := Runs()).ask)
    program = "cellwright-call echo '{\"n\": 1}'\ncellwright-call risky\ncellwright-call echo"
    with runs, Sandbox(policy=policy_named("strict"), tools=broker, pool=0) as sandbox:
        attempt = runs.start(sandbox, program, language=shell)
        assert attempt.result.status is SandboxStatus.PENDING
        (waiting,) = runs.pending()
        assert runs.approve(waiting.approval)
        result = runs.resume(sandbox, attempt.run).result
    assert result.stdout == '{"n":1}\n1\n{}\n', result


def test_nothing_of_the_doors_is_left(alone: Sandbox, shell: str) -> None:
    alone.execute("cellwright-call echo", shell)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        alone.execute("cellwright-call echo; exec 7<>/dev/tools 8<>/dev/tools", shell)
    assert len(os.listdir("/proc/self/fd")) == before
