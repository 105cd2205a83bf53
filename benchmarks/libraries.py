"""Peers that are libraries, each in a worker process that times its own calls."""

import json
import select
import shutil
import subprocess
from pathlib import Path

from .peer_base import AbsentError, Isolation, check_output
from .programs import SampleProgram

_PATIENCE = 120.0
_LAST_WORDS = 10.0

# A worker says its version in one line of JSON, or why it cannot work; then it answers one program
# a line.
_LOOP = """
import json, sys, time

def say(**words):
    sys.__stdout__.write(json.dumps(words) + "\\n")
    sys.__stdout__.flush()

def serve(version, run):
    say(version=version)
    for line in sys.stdin:
        source, began = json.loads(line), time.perf_counter()
        try:
            output = run(source)
            say(seconds=time.perf_counter() - began, output=output)
        except BaseException as error:
            say(error=f"{type(error).__name__}: {error}"[:160])
"""
MONTY = f"""{_LOOP}
import pydantic_monty

with pydantic_monty.Monty() as pool:
    def run(source):
        printed = []
        with pool.checkout() as session:
            session.feed_run(source, print_callback=lambda stream, text: printed.append(text))
        return "".join(printed)

    serve(pydantic_monty.__version__, run)
"""
RESTRICTED = f"""{_LOOP}
import importlib.metadata, json, re
from RestrictedPython import PrintCollector, compile_restricted, safe_globals
from RestrictedPython.Eval import default_guarded_getitem, default_guarded_getiter
from RestrictedPython.Guards import full_write_guard, guarded_iter_unpack_sequence, safer_getattr

ALLOWED = {{"json": json, "re": re}}
GUARDS = dict(
    _print_=PrintCollector, _getattr_=safer_getattr, _getiter_=default_guarded_getiter,
    _getitem_=default_guarded_getitem, _write_=full_write_guard,
    _iter_unpack_sequence_=guarded_iter_unpack_sequence,
)
BUILTINS = dict(
    safe_globals["__builtins__"], dict=dict, max=max, __import__=lambda name, *rest: ALLOWED[name]
)

def run(source):
    names = dict(safe_globals, **GUARDS)
    names["__builtins__"] = BUILTINS
    exec(compile_restricted(source + "\\nresult = printed", "<program>", "exec"), names)
    return names["result"]

serve(importlib.metadata.version("RestrictedPython"), run)
"""
SMOLAGENTS = f"""{_LOOP}
import smolagents

def run(source):
    executor = smolagents.LocalPythonExecutor(["json", "re"])
    executor.send_tools({{}})
    return executor(source).logs

serve(smolagents.__version__, run)
"""
# The next two get an interpreter and what it needs of the host's files as arguments.
LLM_SANDBOX = f"""{_LOOP}
import importlib.metadata
from llm_sandbox import SandboxSession
from llm_sandbox.local.config import LocalSandboxConfig

backend, python, *shown = sys.argv[1:]
try:
    config = LocalSandboxConfig(python_executable=python, read_only_paths=tuple(shown))
    session = SandboxSession(backend=backend, lang="python", sandbox_config=config)
    session.open()
except Exception as error:
    say(absent=str(error)[:160])
    sys.exit()

def run(source):
    done = session.run(source)
    return done.stdout + done.stderr

try:
    serve(importlib.metadata.version("llm-sandbox"), run)
finally:
    session.close()
"""
SANDLOCK = f"""{_LOOP}
import sandlock

python, *shown = sys.argv[1:]
if sandlock.landlock_abi_version() < sandlock.min_landlock_abi():
    say(absent=f"it needs Landlock ABI {{sandlock.min_landlock_abi()}}")
    sys.exit()
box = sandlock.Sandbox(fs_readable=shown, clean_env=True, max_memory="256M", max_processes=64)

def run(source):
    done = box.run([python, "-I", "-S", "-c", source])
    return (done.stdout + done.stderr).decode()

serve(sandlock.__version__, run)
"""
PYODIDE = """
import { createInterface } from "node:readline";
import { loadPyodide, version } from "pyodide/pyodide.mjs";
const say = (words) => process.stdout.write(JSON.stringify(words) + "\\n");
let printed = [];
const python = await loadPyodide({ stdout: (text) => printed.push(text) });
say({ version });
for await (const line of createInterface({ input: process.stdin })) {
  const began = performance.now();
  printed = [];
  try {
    const globals = python.globals.get("dict")();
    python.runPython(JSON.parse(line), { globals });
    globals.destroy();
    say({ seconds: (performance.now() - began) / 1000, output: printed.join("\\n") });
  } catch (error) {
    say({ error: String(error).trim().split("\\n").at(-1).slice(0, 160) });
  }
}
"""


class Library:
    """A peer that lives in a worker."""

    def __init__(
        self, name: str, isolation: Isolation, command: list[str] | None, where: str
    ) -> None:
        """`command` starts the worker; without one the peer is absent, because of `where`."""
        self.name = name
        self.isolation = isolation
        self._command = command
        self._where = where
        self._worker: subprocess.Popen[str] | None = None

    def find(self, place: Path) -> str:
        if self._command is None:
            raise AbsentError(self._where)
        self._worker = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, bufsize=1,
        )  # fmt: skip
        answer = self._hear()
        if "absent" in answer:
            raise AbsentError(str(answer["absent"]))
        return str(answer["version"])

    def run(self, program: SampleProgram) -> float:
        assert self._worker is not None
        assert self._worker.stdin is not None
        self._worker.stdin.write(json.dumps(program.printing) + "\n")
        self._worker.stdin.flush()
        answer = self._hear()
        if "error" in answer:
            raise AbsentError(f"it cannot run this: {answer['error']}")
        check_output(program, str(answer["output"]))
        return float(str(answer["seconds"]))

    def _hear(self) -> dict[str, object]:
        assert self._worker is not None
        assert self._worker.stdout is not None
        if select.select([self._worker.stdout], [], [], _PATIENCE)[0]:
            line = self._worker.stdout.readline()
            if line:
                answer: dict[str, object] = json.loads(line)
                return answer
        raise AbsentError(f"its worker does not start: is it installed in {self._where}?")

    def close(self) -> None:
        """End the worker; one that has something to remove gets a moment."""
        if not self._worker:
            return
        try:
            self._worker.communicate(timeout=_LAST_WORDS)  # closes its input, which ends its loop
        except subprocess.TimeoutExpired:
            self._worker.kill()
            self._worker.communicate()


def python_worker(
    peers: Path | None, package: str, script: str, *arguments: str
) -> list[str] | None:
    """Return the command of a worker in the peers' environment, None if it is not there."""
    python = peers / "py/bin/python" if peers else None
    if python is None or not list(python.parents[1].glob(f"lib/python3*/site-packages/{package}")):
        return None
    return [str(python), "-I", "-c", script, *arguments]


def node_worker(peers: Path | None) -> list[str] | None:
    modules = peers / "js/node_modules" if peers else None
    if modules is None or not (modules / "pyodide").is_dir() or not shutil.which("node"):
        return None
    script = PYODIDE.replace('"pyodide/', f'"{modules.resolve()}/pyodide/')
    return ["node", "--input-type=module", "-e", script]
