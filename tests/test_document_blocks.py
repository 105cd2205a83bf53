"""Every fenced block of a document is run, or read as what it is; those that cannot be are named here."""

import ast
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cellwright import Broker, Sandbox
from cellwright.harness.cli import commands
from cellwright.harness.mcp.server_config import read_servers
from cellwright.harness.schemas.spec import ToolOwner, ToolSpec
from cellwright.harness.servers.daemon.configuration import read_configuration
from cellwright.harness.servers.daemon.lifecycle import plan_of
from cellwright.harness.tools.broker import Offer
from cellwright.harness.tools.tool import Caller, Tool
from cellwright.policies.profiles.loading import load_policy
from tests.conftest import ROOT, policy_named
from tests.documents import BLOCKS, NAMES, Block, blocks_of, text_of
from tests.model_server import Reply, calling, serving

# A block is named by its document and the beginning of its first line.

_SERVER = """
from mcp.server import MCPServer
server = MCPServer("time")

@server.tool()
def get_current_time(timezone: str) -> str:
    return f"noon in {timezone}"

server.run()
"""
_SERVERS = (
    '{"mcpServers": {"time": {"command": "python3", "args": ["server.py"], "sandboxed": false}}}'
)

# What is typed in these runs in a directory with the files that it names.
TYPED: dict[str, dict[str, str]] = {
    "README.md: $ cellwright run": {},
    "harness/cli/README.md: $ cellwright run --file": {
        "sales.csv": "north,1\n",
        "analyse.py": "open('out.csv', 'w').write(open('sales.csv').read())",
    },
    "harness/cli/README.md: $ cellwright repl": {},
    "harness/adapters/migration.md: $ cellwright run": {"sales.csv": "north,1\nsouth,2\n"},
    "harness/cli/README.md: $ cellwright run --workspace": {},
    "harness/dashboard/README.md: $ cellwright run --audit": {},
    "harness/mcp/README.md: $ cellwright run --servers": {
        "servers.json": _SERVERS,
        "server.py": _SERVER,
    },
    "harness/skills/README.md: $ cellwright skills new": {},
    "harness/making/README.md: $ cellwright tools create": {
        "double.py": "def double(n: int) -> int:\n    return n * 2\n",
        "test_double.py": "assert double(2) == 4\n",
    },
}  # fmt: skip
# What the model says in these, whose frameworks are in the environment that scripts/frameworks makes.
REPLIES: dict[str, list[Reply]] = {
    "harness/adapters/smolagents.md": [
        "<code>\noslo = population('Oslo')\nprint(oslo)\n</code>",
        "<code>\nopen('/etc/shadow')\n</code>",
        "<code>\nfinal_answer(oslo - population(city='Bergen'))\n</code>",
    ],
    "harness/adapters/dspy.md": [
        (
            "[[ ## reasoning ## ]]\nAsk.\n\n[[ ## code ## ]]\n```python\noslo = population('Oslo')\n"
            "SUBMIT(oslo - population(city='Bergen'))\n```"
        ),
    ],
    "harness/adapters/deepagents.md": [
        calling(("execute", '{"command": "wc -l < /workspace/notes.txt; cat /etc/shadow"}')),
        calling(("write_file", '{"file_path": "/workspace/answer.txt", "content": "3"}')),
        "There are three.",
    ],
    "harness/adapters/langchain.md": [
        calling(("shell", '{"command": "x=$(id -un); cat /etc/shadow"}')),
        calling(("shell", '{"command": "echo $x in $PWD"}')),
        "I am cell.",
    ],
    "harness/adapters/pydantic_ai.md": [
        calling(("shell", '{"command": "wc -l < notes.txt; cat /etc/shadow"}')),
        "There are three.",
    ],
    "harness/adapters/openai_agents.md": [
        calling(("exec_command", '{"cmd": "wc -l < notes.txt; cat /etc/shadow"}')),
        "There are three.",
    ],
    "harness/adapters/inspect_ai.md": [
        calling(("bash", '{"command": "wc -w < words.txt"}')),
        "There are 3.",
    ],
    "harness/adapters/fastmcp.md": [],
    "harness/adapters/autogen.md": [],
    "harness/adapters/google_adk.md": [],
    "harness/adapters/migration.md: # after, in a cell\nimport os": [
        "<code>\nfinal_answer(6 * 7)\n</code>"
    ],
    "harness/fleet/README.md": [],
    "harness/adapters/evaluation/README.md: # cells.py": [],
    "harness/adapters/evaluation/README.md: import asyncio": [],
}
# All of each of these is typed in one directory and one shell, in its order.
TUTORIAL = "harness/examples/README.md"
PATHS = [name for name in NAMES if name.startswith("harness/paths/") and blocks_of(name)]
WALKED = [TUTORIAL, *PATHS]
FRAMEWORKS = ROOT / ".frameworks" / "bin" / "python"
EVALUATION = ROOT / ".frameworks" / "evaluation" / "bin" / "python"

IN_A_CELL = "harness/tools/README.md: cellwright-call"

# Why nobody runs these; a path in a reason is that of what is run instead.
NOT_RUN = {
    "harness/sandbox/gpu.md: $ cellwright run --gpu": "needs a GPU; scripts/gpu tries such cells",
    "harness/sandbox/gpu.md: $ pip download": "needs an index, and a GPU; tried by hand with one made up",
    "README.md: python3 cellwright-": "installs for the host; tests/install/test_bundle.py installs a bundle",
    "harness/INSTALL.md: sudo apt-get install": "installs for the host; tests/install/test_wheel.py installs a wheel",
    **{
        f"{path}: python3 cellwright-": "installs for the user; tests/install/test_bundle.py types it"
        for path in PATHS
    },
    "harness/INSTALL.md: python3 cellwright-0.3.0": "installs for the host; tests/install/test_bundle.py installs a bundle",
    "harness/EDGE.md: python3 cellwright-0.3.0": "installs for the host; tests/install/test_bundle.py installs a bundle",
    "harness/INSTALL.md: scripts/demo": "installs from PyPI; .ci/run runs it",
    "runner/README.md: your process": "a drawing",
    "runner/README.md:                     freeze": "a drawing",
    "harness/batch/README.md: cellwright batch": "needs files of tasks; tests/harness/batch/test_batch.py runs batches",
    "benchmarks/README.md: $ benchmarks/peers-setup": "takes minutes, and fetches from PyPI and npm",
    "benchmarks/README.md: $ cellwright bench  ": "takes minutes; tests/benchmarks/test_smoke.py runs a little",
    "benchmarks/README.md: $ cellwright bench --quiet": "takes minutes; tests/benchmarks/test_smoke.py runs a little",
    "harness/adapters/evaluation/README.md: pip install . &&": "installs for the host; tests/install/test_wheel.py installs a wheel",
    "harness/adapters/evaluation/README.md: pip install '.[harbor]'": "needs tasks; tests/frameworks/suite_harbor.py runs it",
    "harness/adapters/evaluation/README.md: pip install '.[verifiers]'": "needs a model; tests/frameworks/suite_verifiers.py runs it",
    "harness/sandbox/projects/README.md: $ cd": "needs a project; tests/harness/projects/test_exec.py runs such commands",
    "harness/sandbox/projects/README.md: $ cellwright exec --explain -- claude": "needs a home directory of a person; test_exec.py compares the lines",
    "harness/sandbox/projects/open-cells.md: $ cellwright serve": "needs a daemon; tests/harness/projects/test_open_cell.py runs one",
    "harness/sandbox/projects/ports.md: $ cellwright exec --expose": "needs a server; tests/harness/projects/test_exec.py runs one",
    "harness/sandbox/projects/reviewing.md: $ cellwright exec --review": "needs an agent; tests/harness/projects/test_changes.py runs them",
    "harness/sandbox/projects/hooks.md: $ cellwright exec --print-hook claude": "prints files; tests/harness/projects/test_hooks.py runs them",
    "harness/sandbox/projects/README.md: $ cellwright exec --allow-registries --learn": "needs npm; tests/harness/projects/test_learned.py runs others",
    "harness/sandbox/projects/settings.md: $ cellwright exec --settings -- npm test": "needs npm; tests/harness/projects/test_srt_settings.py runs others",
    "harness/adapters/migration.md: $ docker run": "needs Docker; the block below it is run",
    "harness/adapters/jupyter/README.md: cellwright jupyter": "installs for the user; tests/harness/adapters/test_jupyter_kernel.py installs the kernel",
    "harness/agent/README.md: $ cellwright agent": "needs a model; tests/harness/agent/test_killed.py runs it with a scripted one",
    "harness/README.md: $ cellwright serve": "serves until it is ended; the Python below it starts one",
    "harness/INSTALL.md: cellwright doctor --apparmor": "loads a profile into the host's kernel; tests/harness/test_apparmor.py",
    "harness/cli/README.md: $ cellwright network": "asks a sandbox that lives; tests/harness/test_network_control.py",
    "harness/cli/README.md: cellwright shell": "needs a terminal; tests/harness/cli/test_shell.py",
    "harness/README.md: python3.12 -m pip": "installs from an index; tests/harness/test_pythons.py",
    "harness/servers/daemon/README.md: $ cellwright serve": "installs units; tests/harness/servers/daemon/test_configuration.py writes them",
    "harness/servers/e2b/README.md: $ cellwright e2b": "serves until it is ended; tests/harness/servers/e2b/test_python_sdk.py",
    "harness/servers/mcp/README.md: $ npx": "fetches from npm; tests/harness/servers/mcp/test_inspector.py",
    "harness/servers/web/README.md: $ cellwright web": "serves until it is ended; tests/harness/servers/web/test_command.py starts one",
    "harness/servers/web/README.md: curl -H": "needs the server above it; tests/harness/servers/web/test_command.py",
    "harness/sandbox/packages/README.md: $ cellwright run": "fetches from an index; tests/harness/packages/test_store.py",
    "harness/examples/README.md: sudo apt-get install": "installs for the host; tests/install/test_wheel.py installs a wheel",
    "harness/examples/README.md: MODEL_URL=": "needs a model; tests/harness/examples/test_examples.py has a scripted one",
    "harness/search/README.md: pip download": "fetches 83 MB from PyPI",
    "harness/search/README.md: $ python -c '": "needs what was fetched; tests/harness/search/test_semantic.py",
    "harness/servers/judge/README.md: pip install": "serves until it is ended; tests/harness/servers/judge/test_dialects.py starts one",
    "harness/servers/judge/README.md: curl": "needs the server above it; tests/harness/servers/judge/test_dialects.py",
    "tests/hosts/README.md: scripts/test-hosts  ": "boots hosts",
    "tests/hosts/README.md: scripts/test-hosts --user": "boots hosts",
}


def blocks(*kinds: str) -> list[object]:
    found = [block for block in BLOCKS if block.kind in kinds]
    return [pytest.param(block, id=block.name) for block in found]


def block_named(name: str) -> Block:
    (found,) = [block for block in BLOCKS if block.name.startswith(name)]
    return found


# None is forgotten


@pytest.mark.parametrize("block", blocks("sh", "console", "text", ""))
def test_a_block_of_no_other_kind_is_run_or_named_with_the_reason_why_not(block: Block) -> None:
    if is_walked(block) and block.kind in ("console", "sh"):
        return  # test_a_path_can_be_typed_from_its_beginning_to_its_end
    known = [name for name in (*TYPED, *NOT_RUN, IN_A_CELL) if block.name.startswith(name)]
    assert len(known) == 1, "run it here, or say in NOT_RUN why nobody can"


def test_every_block_has_a_kind_that_somebody_checks() -> None:
    assert {block.kind for block in BLOCKS} == {"python", "toml", "json", "sh", "console", "text"}


@pytest.mark.parametrize("name", NAMES)
def test_every_fence_is_that_of_a_block(name: str) -> None:
    """Else the blocks between fences that are indented, say, would be overlooked."""
    printed = sum(bool(block.printed) for block in blocks_of(name))
    assert len(re.findall("```|~~~", text_of(name))) == 2 * (len(blocks_of(name)) + printed)


@pytest.mark.parametrize("name", [*TYPED, *NOT_RUN, IN_A_CELL])
def test_nothing_is_named_that_no_document_has(name: str) -> None:
    block_named(name)
    paths = re.findall(r"[\w./]+/[\w.]+", NOT_RUN.get(name, ""))
    assert [path for path in paths if not (ROOT / path).exists()] == []


# What is run


def with_frameworks(parameter: object) -> bool:
    return script_of(parameter.values[0]) is not None  # type: ignore[attr-defined]


def script_of(block: Block) -> list[Reply] | None:
    """Return what the model says in a block whose framework is in another environment."""
    begins = f"{block.document}: {block.text}"
    return next(
        (
            REPLIES[name]
            for name in REPLIES
            if begins.startswith(f"{name}:" if name.endswith(".md") else name)
        ),
        None,
    )


def is_before(parameter: object) -> bool:
    """Tell whether a block shows a program of another project, before it is changed."""
    return parameter.values[0].text.startswith("# before")  # type: ignore[attr-defined]


def is_file(parameter: object) -> bool:
    """Tell whether a block of a path is a file, whose name is in its first line."""
    return parameter.values[0].document in WALKED  # type: ignore[attr-defined]


def is_walked(block: Block) -> bool:
    return block.document in WALKED and not any(map(block.name.startswith, NOT_RUN))


@pytest.mark.needs("cgroup", "frameworks", "evaluation")
@pytest.mark.parametrize("block", [*filter(with_frameworks, blocks("python"))])
def test_an_example_of_an_adapter_runs_with_a_scripted_model(block: Block, tmp_path: Path) -> None:
    program = tmp_path / "example.py"  # smolagents reads the source of its tools
    program.write_text(block.text)
    script = script_of(block) or []
    python = EVALUATION if "/evaluation/" in block.document else FRAMEWORKS
    with serving(script) as server:
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "MODEL_URL": server.url}
        done = subprocess.run(
            [python, program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == block.printed
    assert len(server.requests) == len(script)


@pytest.mark.needs("cgroup")
@pytest.mark.parametrize(
    "block",
    [
        each for each in blocks("python")
        if not (is_file(each) or is_before(each) or with_frameworks(each))
    ],
)  # fmt: skip
def test_an_example_runs_and_prints_what_is_shown(block: Block) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block.text], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == block.printed


@pytest.mark.needs("cgroup", "git", "curl")
@pytest.mark.parametrize("document", WALKED)
def test_a_path_can_be_typed_from_its_beginning_to_its_end(document: str, place: Path) -> None:
    assert len(text_of(document).splitlines()) <= (250 if document == TUTORIAL else 160)
    steps = []
    for block in filter(is_walked, blocks_of(document)):
        if block.kind in ("python", "toml"):
            (place / block.text.split()[1]).write_text(block.text)
        steps += commands_of(block) if block.kind == "console" else ()
        steps += [(block.text, "", "")] if block.kind == "sh" else ()
    port = str(free_port())
    shown = walked([(command.replace("8809", port), stdin) for command, stdin, _ in steps], place)
    for (command, _, expected), said in zip(steps, shown, strict=True):
        expected = expected.replace("/home/user", str(place))
        assert looks_like(expected).fullmatch(said), f"{command}: {said}"


def test_two_paths_walked_in_one_folder_write_to_no_common_trail() -> None:
    """Else the second page counts the records of the first."""
    named = [{*re.findall(r"""audit(?: = ")? ?([\w-]+\.jsonl)""", text_of(path))} for path in PATHS]
    trails = [trail for names in named for trail in names]
    assert {"daemon.jsonl", "agent.jsonl"} <= {*trails}
    assert len(trails) == len({*trails})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def walked(commands: list[tuple[str, str]], place: Path) -> list[str]:
    """Type commands one after the other in one shell; return what a terminal would show of each."""
    end = "\x1e"
    script = ["exec 2>&1", "trap 'kill $(jobs -p); wait' EXIT"]
    for command, stdin in commands:
        given = f" <<'STDIN'\n{stdin}STDIN" if stdin else ""
        script += [f"{command}{given}", f"printf '{end}'"]
    (place / ".typed.sh").write_text("\n".join(script))
    said = typed("bash .typed.sh", "", place, 300)[1].split(end)
    assert len(said) == len(commands) + 1, said
    return said[:-1]


@pytest.mark.parametrize("block", [*filter(is_before, blocks("python"))])
def test_a_program_of_another_project_is_one_and_is_followed_by_ours(block: Block) -> None:
    ast.parse(block.text)
    below = [each.text for each in blocks_of(block.document) if each.kind in ("python", "console")]
    assert below[below.index(block.text) + 1].startswith(("# after", "$ cellwright"))


def test_the_readme_shows_a_program_a_refusal_and_a_cap() -> None:
    shown = next(block.printed for block in blocks_of("README.md") if block.kind == "python")
    assert "hello" in shown
    assert "FileNotFoundError" in shown
    assert "KILLED, memory" in shown


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a home, and the command in its own `.venv/bin` as in a checkout."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, does in {"cellwright": "-m cellwright", "python3": "", "pip": "-m pip"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {does} "$@"\n')
    (programs / "claude").write_text("#!/bin/sh\n")  # Claude Code, for what cellwright knows of it
    for program in programs.iterdir():
        program.chmod(0o755)
    return tmp_path


def typed(command: str, stdin: str, place: Path, seconds: float = 60) -> tuple[int, str]:
    """Type one command in `place`; return its status and what a terminal would show."""
    path = f"{place}/.venv/bin:{os.environ['PATH']}"
    env = {"PATH": path, "HOME": str(place), "LC_ALL": "C.UTF-8", "PYTHONPATH": str(ROOT)}
    env |= {"VIRTUAL_ENV": sys.prefix, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        ["/bin/bash", "-c", f"{{ {command}; }} 2>&1"], cwd=place, env=env, input=stdin,
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def commands_of(block: Block) -> list[tuple[str, str, str]]:
    """Return what is typed behind `$`, what behind `>>>` to it, and what is shown then."""
    steps = []
    for step in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, rest = step.partition("\n")
        lines = rest.splitlines(keepends=True)
        stdin = "".join(line[4:] for line in lines if line.startswith(">>> "))
        shown = "".join(line for line in lines if not line.startswith(">>> "))
        steps.append((command, stdin, shown))
    return steps


def looks_like(shown: str) -> re.Pattern[str]:
    """Return what matches a text that was shown: `...` is any lines, or the rest of its line, and no time
    is another's."""
    pattern = re.sub(r"(?m)^\\.\\.\\.\\\n", r"(?:.*\\n)*", re.escape(shown))
    pattern = pattern.replace(re.escape("...\n"), r".*\n")
    return re.compile(re.sub(r"\d+\\\.\d+\\ (ms|MiB)", r"\\d+\\.\\d+\\ \1", pattern))


@pytest.mark.needs("cgroup")
@pytest.mark.parametrize("name", TYPED)
def test_what_is_typed_shows_what_is_shown(name: str, place: Path) -> None:
    for file, content in TYPED[name].items():
        (place / file).write_text(content)
    steps = commands_of(block_named(name))
    assert steps
    are_shown = any(shown for _, _, shown in steps)
    for command, stdin, shown in steps:
        status, said = typed(command, stdin, place)
        if are_shown:
            assert looks_like(shown).fullmatch(said), f"{command}: {said}"
        else:
            assert status == 0, f"{command}: {said}"


def test_output_that_differs_is_noticed() -> None:
    """The test above would be hollow if anything looked like what is shown."""
    pattern = looks_like("a\n...\nran 8.2 ms · peak 3.8 MiB\n")
    assert pattern.fullmatch("a\nb\nc\nran 11.5 ms · peak 4.1 MiB\n")
    assert not pattern.fullmatch("a\nb\nran 11.5 ms · peak 4.1 KiB\n")
    assert not pattern.fullmatch("a\nran 11.5 ms · peak 4.1 MiB\nand more\n")


@pytest.mark.needs("cgroup")
def test_a_shell_calls_tools_as_is_shown() -> None:
    """Without jq(1), which a host need not have: a function of its name picks the number."""

    def weather(arguments: dict[str, object], _: Caller) -> dict[str, object]:
        return {"city": arguments["city"], "degrees": 21}

    notes: list[object] = []
    tools = [("weather.get", weather), ("notes.add", lambda given, _: notes.append(given))]
    about = {"owner": ToolOwner.DEVELOPER, "parameters": {"type": "object"}}
    broker = Broker(Offer([Tool(ToolSpec(name=name, **about), each) for name, each in tools]))
    code = 'jq() { read -r line; line=${line##*"$(printf :)"}; echo "${line%\\}}"; }\n'
    code += block_named(IN_A_CELL).text + 'echo "$degrees, $paris"\n'
    with Sandbox(policy=policy_named("standard"), tools=broker, pool=0) as sandbox:
        result = sandbox.execute(code, "bash", files={"note.json": '{"text": "rain"}'})
    paris = '{"city":"Paris","degrees":21}'
    assert (result.stderr, notes) == ("", [{"text": "rain"}])
    assert result.stdout.splitlines() == [paris, "null", f"21, {paris}"]


# What is read


@pytest.mark.parametrize("block", blocks("toml"))
def test_a_policy_that_is_shown_is_one(block: Block, tmp_path: Path) -> None:
    (tmp_path / "shown.toml").write_text(block.text)
    if "daemon.toml" in block.name:
        shown = plan_of(read_configuration(tmp_path / "shown.toml"))
        assert all(each.users for each in shown.configuration.tenants)
        return
    assert load_policy(str(tmp_path / "shown.toml")) != load_policy("strict")


@pytest.mark.parametrize("block", blocks("json"))
def test_servers_that_are_shown_can_be_read(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in re.findall(r"\$\{(\w+)\}", block.text):
        monkeypatch.setenv(variable, "anything")
    (tmp_path / "servers.json").write_text(block.text)
    assert len(read_servers(tmp_path / "servers.json")) > 1


LINES = sorted(
    {
        line.removeprefix("$ ")
        for block in BLOCKS if block.kind in ("sh", "console")
        for line in block.text.splitlines()
        if line.removeprefix("$ ").startswith("cellwright ")
    }
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_command_that_is_shown_is_understood(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    shell = (number for number, word in enumerate(words) if re.match(r"\||[12]?>|&$", word))
    words = words[: next(shell, len(words))]
    assert callable(commands.parser_of(words[0]).parse_args(words).command)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_that_prose_names_is_one(name: str) -> None:
    (known,) = (each.choices for each in commands.parser_of()._actions if each.metavar == "COMMAND")
    assert set(re.findall(r"`cellwright ([a-z][a-z0-9]*)", text_of(name))) <= set(known or ())
