"""Coding agents of `agents.toml` below `cellwright exec`, with a scripted model, as a table.

Each mends a small project: a failing test, an edit by the agent's own tools, a passing test, a server in
the background that is asked by curl, and a commit.  As root and as an ordinary user, at a terminal and
without.  As root.
"""

import contextlib
import hashlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import termios
import time
import tomllib
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cellwright.harness.sandbox.projects.known_programs import known_programs
from tests.projects.programs import Home, delegated_cgroups, find, home, install
from tests.projects.scripted_model import MARK, Call, ScriptedModel
from tests.projects.stage import Answer, enter, stage

HERE = Path(__file__).parent
_SECONDS = 180
_PAUSE = 3.0  # for what an agent still has to write
_MARK = "<!-- agents -->"
_TASK = "Mend the sum in calc.py, test it, serve it, and commit."
_TEST = "python3 test_calc.py"
_SERVE = "nohup python3 -m http.server 3000 >/tmp/server.log 2>&1 &"
_ASK = "curl -sS --retry 30 --retry-connrefused --retry-delay 1 http://localhost:3000/calc.py"
_COMMIT = "git add -A && git commit -qm 'Mend add' && git log --oneline"
_FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "test_calc.py": 'import calc\nassert calc.add(2, 3) == 5, "wrong sum"\nprint("sum passed")\n',
    ".gitignore": "__pycache__\n.aider*\n",
}
_HOSTS = (
    "api.anthropic.com", "api.openai.com", "generativelanguage.googleapis.com", "models.dev", "opencode.ai",
)  # fmt: skip
_REFUSED = re.compile(rb"cellwright: refused: [^\r\n]*")
_ESCAPES = re.compile(
    rb"\x1b(?:\[[0-9;?<>=]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_].*?\x1b\\|[@-Z\\-_])",
    re.S,
)
# Questions of a terminal that programs wait for: the position of the cursor, its colours, what it is.
_QUESTIONS = {
    b"\x1b[6n": b"\x1b[1;1R",
    b"\x1b[c": b"\x1b[?62;22c",
    b"\x1b[?u": b"\x1b[?0u",
    b"\x1b]11;?": b"\x1b]11;rgb:0000/0000/0000\x1b\\",
}


class Agent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `agents.toml`, which explains the fields."""

    package: str
    arguments: tuple[str, ...]
    terminal: tuple[str, ...]
    shell: dict[str, str] = {}
    edit: tuple[dict[str, Any], ...] = ()
    replies: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    state: dict[str, str] = {}
    typed: str = ""
    leave: str = ""
    last: str = ""
    serve: str = _SERVE

    def steps(self, project: Path) -> list[Call | str]:
        if self.replies:
            texts = [
                f"{reply}\n{MARK.format(number)}\n" for number, reply in enumerate(self.replies)
            ]
            return [*texts, "The sum is mended."]
        lines = [
            f"{_TEST}; echo status $?",
            *([""] * len(self.edit)),
            _TEST,
            self.serve,
            _ASK,
            _COMMIT,
        ]
        steps: list[Call | str] = [self._call(line) for line in lines]
        steps[1 : 1 + len(self.edit)] = [
            Call(each["tool"], json.loads(_filled(json.dumps(each["arguments"]), project)))
            for each in self.edit
        ]
        return [*steps, *([self._call(self.last)] if self.last else []), "The sum is mended."]

    def _call(self, line: str) -> Call:
        more = {"description": self.shell["description"]} if "description" in self.shell else {}
        return Call(self.shell["tool"], {self.shell["argument"]: line, **more})


class Outcome(NamedTuple):
    """The parts of the task that were done, and the attempts that were refused."""

    edit: bool
    failing_test: bool
    passing_test: bool
    server: bool
    commit: bool
    outside_untouched: bool
    refused: tuple[str, ...]
    output: str

    def words(self) -> str:
        missing = [
            name.replace("_", " ")
            for name, done in zip(self._fields[:6], self[:6], strict=True)
            if not done
        ]
        return "NO: " + ", ".join(missing) if missing else "all"


def agents() -> dict[str, Agent]:
    entries = tomllib.loads((HERE / "agents.toml").read_text())["agents"]
    return {name: msgspec.convert(each, Agent) for name, each in entries.items()}


def _filled(text: str, project: Path) -> str:
    test = f"{_TEST} && (({_SERVE}) && {_ASK})"
    for name, value in (("task", _TASK), ("project", str(project)), ("test", test)):
        text = text.replace(f"{{{name}}}", value)
    return text


def try_agent(
    name: str, agent: Agent, place: Home, at_terminal: bool, models: dict[str, ScriptedModel]
) -> Outcome:
    project = place.project(f"{name}-{'terminal' if at_terminal else 'pipe'}", _FILES)
    for path, text in agent.state.items():
        (place.path / path).parent.mkdir(parents=True, exist_ok=True)
        (place.path / path).write_text(_filled(text, project))
        place.give(place.path / path.partition("/")[0])
    model = models["now"] = ScriptedModel(agent.steps(project))
    variables = [word for key in agent.environment for word in ("--env", key)]
    arguments = [
        _filled(each, project) for each in (agent.terminal if at_terminal else agent.arguments)
    ]
    command = place.exec(["-v", *variables], [name, *arguments])
    environment = {**place.environment, **agent.environment}
    before = _others(place, name)
    if at_terminal:
        output = _at_terminal(command, project, environment, agent, model)
    else:
        output = _without(command, project, environment)
    log = subprocess.run(
        ["git", "-c", f"safe.directory={project}", "-C", str(project), "log", "--format=%s"],
        capture_output=True, text=True, check=False,
    ).stdout.splitlines()  # fmt: skip
    said = "\n".join(model.results.values()) + _ESCAPES.sub(b"", output).decode(errors="replace")
    return Outcome(
        "a + b" in (project / "calc.py").read_text(), "wrong sum" in said, "sum passed" in said,
        "return a + b" in said if not agent.replies else "return a + b" in said and "Error" in said,
        len(log) > 1, before == _others(place, name),
        tuple(dict.fromkeys(each.decode(errors="replace") for each in _REFUSED.findall(_ESCAPES.sub(b"", output)))),
        output.decode(errors="replace") + "\n".join(["", *model.requests, *model.results.values()]),
    )  # fmt: skip


def _others(place: Home, name: str) -> dict[str, str]:
    """Return all files of the home directory, with digests, but those that are the agent's to write."""
    own = [each.removeprefix("~/") for each in known_programs().agents[name].state]
    left = (*own, "src", ".cache/cellwright", ".local/state/cellwright")
    found = {}
    for path in sorted(place.path.rglob("*")):
        inside = str(path.relative_to(place.path))
        if path.is_file() and not any(f"{inside}/".startswith(f"{each}/") for each in left):
            found[inside] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _without(command: list[str], project: Path, environment: dict[str, str]) -> bytes:
    try:
        done = subprocess.run(
            command, cwd=project, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"") + b"\nnot finished in time\n"
    return done.stdout


def _at_terminal(
    command: list[str],
    project: Path,
    environment: dict[str, str],
    agent: Agent,
    model: ScriptedModel,
) -> bytes:
    """Run it at a terminal until the script has ended, and then type what leaves it."""
    master, own = pty.openpty()
    termios.tcsetwinsize(own, (40, 120))
    process = subprocess.Popen(
        command, cwd=project, env=environment, stdin=own, stdout=own, stderr=own, start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(own), os.O_RDWR)),  # noqa: PLW1509 - its own terminal
    )  # fmt: skip
    os.close(own)
    seen, typed, now = b"", False, time.monotonic()
    deadline, leave_at, keys = now + _SECONDS, 0.0, iter(agent.leave)
    with contextlib.suppress(OSError):
        while (now := time.monotonic()) < deadline:
            if select.select([master], [], [], 0.2)[0]:
                data = os.read(master, 65536)
                seen += data
                for question, reply in _QUESTIONS.items():
                    os.write(master, reply * data.count(question))
            elif agent.typed and not typed:
                os.write(master, _filled(agent.typed, project).encode())
                typed = True
            if not leave_at and (model.has_ended or (agent.replies and b"sum passed" in seen)):
                leave_at = now + _PAUSE
            elif leave_at and now > leave_at:
                os.write(master, next(keys, "\x04").encode())
                leave_at = now + 0.25
    os.close(master)
    process.terminate() if process.poll() is None else None
    process.wait(60)
    return seen


def try_all(
    names: list[str], people: tuple[str, ...], ends: tuple[str, ...]
) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {}
    models = {"now": ScriptedModel([""])}

    def site(name: str, path: str, body: bytes) -> Answer:
        return models["now"].answer(name, path, body)

    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        directory.chmod(0o755)
        with (
            stage(dict.fromkeys(_HOSTS, site), directory) as network,
            delegated_cgroups("user") as cgroups,
        ):
            homes = {
                person: home(person, directory, network, cgroups if person == "user" else "")
                for person in people
            }
            for each in names:
                words, refused = [], []
                for person in people:
                    for end in ends:
                        outcome = try_agent(
                            each, agents()[each], homes[person], end == "terminal", models
                        )
                        words.append(outcome.words())
                        refused += [line for line in outcome.refused if line not in refused]
                        print(
                            f"{each} {person} {end}: {outcome.words()} {outcome.refused}",
                            flush=True,
                        )
                        if "KEEP" in os.environ:
                            Path(f"/tmp/agents34/{each}-{person}-{end}.log").write_text(
                                outcome.output
                            )
                rows[each] = [
                    _version(each, homes[people[0]]),
                    *words,
                    _summary(refused),
                ]
    return rows


def _summary(refused: list[str]) -> str:
    """Return the names of hosts, the calls, and how many files it did not find."""
    hosts = {found[1] for line in refused if (found := re.search(r"resolve (\S+)", line))}
    files = {found[1] for line in refused if (found := re.search(r"refused: \w+ '([^']+)'", line))}
    calls = {
        found[1]
        for line in refused
        if (found := re.search(r"refused: (?!resolve)(\w+) [^']", line))
    }
    registries = hosts.intersection(known_programs().registries.hosts)
    named = sorted(hosts - registries) + ["registries"] * bool(registries)
    parts = [*named, *sorted(calls), f"{len(files)} files" if files else ""]
    return ", ".join(filter(None, parts)) or "nothing"


def _version(name: str, place: Home) -> str:
    done = subprocess.run(
        place.command([name, "--version"]), env=place.environment, cwd=place.path, timeout=_SECONDS,
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    found = re.search(r"\d+\.\d+\.\d+", done.stdout + done.stderr)
    return found[0] if found else ""


def write(rows: dict[str, list[str]]) -> None:
    path = HERE / "AGENTS.md"
    head = path.read_text().partition(_MARK)[0]
    missing = [
        f"| {name} | not installed: {each.package} |"
        for name, each in agents().items()
        if name not in rows
    ]
    table = [
        f"{date.today().isoformat()}, Linux {os.uname().release}:", "",
        "| agent | version | user, pipes | user, terminal | root, pipes | root, terminal | refused |",
        "|---|---|---|---|---|---|---|",
        *(f"| {name} | {' | '.join(row)} |" for name, row in rows.items()),
        *(["", "| not tried | reason |", "|---|---|", *missing] if missing else []),
    ]  # fmt: skip
    path.write_text("\n".join([f"{head}{_MARK}\n", *table, ""]))


def main(arguments: list[str]) -> int:
    enter("tests.projects.agents")
    known = agents()
    if "install" in arguments:
        install([each.package for name, each in known.items() if not find(name)])
    names = [each for each in arguments if each in known] or list(known)
    people = tuple(each for each in ("user", "root") if each in arguments) or ("user", "root")
    ends = tuple(each for each in ("pipes", "terminal") if each in arguments) or (
        "pipes",
        "terminal",
    )
    rows = try_all([name for name in names if find(name)], people, ends)
    if len(names) == len(known) and len(people) == len(ends) == 2:
        write(rows)
    return int(any("NO" in word for row in rows.values() for word in row))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
