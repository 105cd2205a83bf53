"""Guests are forked without PyOS_AfterFork_Child: what that function is for works, and is no two cells'."""

import contextlib
import os
import signal
from pathlib import Path

import msgspec
import pytest

from cellwright import Sandbox, SandboxStatus
from cellwright.benchmarks.census import children
from cellwright.testing import inspect
from tests.conftest import policy_named, soon

pytestmark = pytest.mark.needs("userns")

# One truth each; tests/install runs it with other Pythons too.
PROGRAM = """
import asyncio, concurrent.futures, multiprocessing, os, random, subprocess, sys, threading
told = {}
idents = []
thread = threading.Thread(target=lambda: idents.append(threading.get_ident()))
thread.start()
thread.join()
told["a thread runs"] = idents != [threading.main_thread().ident]
told["the main thread is this"] = threading.current_thread() is threading.main_thread()
told["its native id is the process"] = threading.main_thread().native_id == os.getpid()
read, write = os.pipe()
os.register_at_fork(after_in_child=lambda: os.write(write, b"hook "))
before = random.getstate()
pid = os.fork()
if pid == 0:
    own = threading.current_thread() is threading.main_thread() and threading.active_count() == 1
    os.write(write, b"%d %d" % (own, random.getstate() != before))
    os._exit(0)
os.waitpid(pid, 0)
told["a child is forked, and the hooks run in it"] = os.read(read, 99) == b"hook 1 1"
done = subprocess.run([sys.executable or "/bin/sh", "-c", "print(7)"], capture_output=True, text=True)
told["a program is started"] = done.stdout == "7\\n" or done.stderr
with concurrent.futures.ThreadPoolExecutor(2) as threads:
    told["a pool of threads works"] = list(threads.map(abs, [-1, -2, -3])) == [1, 2, 3]
queue = multiprocessing.get_context("fork").Queue()
process = multiprocessing.get_context("fork").Process(target=queue.put, args=(5,))
process.start()
told["multiprocessing works"] = queue.get() == 5
process.join()
async def both():
    started = await asyncio.create_subprocess_exec("/bin/true")
    return await started.wait(), await asyncio.to_thread(abs, -4)
told["asyncio works"] = asyncio.run(both()) == (0, 4)
[name for name, holds in told.items() if holds is not True] or len(told)
"""


@pytest.mark.parametrize("preload", [(), ("logging", "concurrent.futures.thread")], ids=str)
def test_threads_and_children_of_a_guest_work(preload: tuple[str, ...]) -> None:
    """With modules preloaded that registered functions to be called after a fork, and without."""
    policy = policy_named("standard")
    policy = msgspec.structs.replace(
        policy, python=msgspec.structs.replace(policy.python, preload=preload)
    )
    with Sandbox(policy=policy, pool=0) as sandbox:
        result = sandbox.execute(PROGRAM)
    assert result.value == 8, (result.value, result.traceback)


HOOK = """
import os
called = []
os.register_at_fork(after_in_child=lambda: called.append(os.getpid()))
"""


def test_what_a_preloaded_module_registered_is_called_in_each_cell(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "hooking.py").write_text(HOOK)
    policy = policy_named("strict")
    python = msgspec.structs.replace(policy.python, path=(str(tmp_path),), preload=("hooking",))
    with Sandbox(policy=msgspec.structs.replace(policy, python=python), pool=0) as sandbox:
        for _ in range(2):
            assert sandbox.execute("import hooking, os; hooking.called == [os.getpid()]").value


# A preloaded module that has used every generator before the first cell is forked.
PRIMED = """
import random, ssl, tempfile, uuid
ssl.RAND_bytes(8)
names = tempfile._get_candidate_names()
drawn = [next(names), uuid.uuid1(), uuid.getnode(), random.random()]
"""
STATES = """
import importlib, os, random, secrets, ssl, sys, tempfile, uuid
def drawn():
    first = uuid.uuid1()
    return [
        hash(random.getstate()), random.random(), next(tempfile._get_candidate_names()), ssl.RAND_bytes(8).hex(),
        (first.node, first.clock_seq), uuid.getnode(), uuid.uuid4().hex, secrets.token_hex(8), os.urandom(8).hex(),
    ]
[drawn(), hash("of a text")]
"""
# The same, drawn by the first child of a program that has drawn nothing itself.
STATES_OF_A_CHILD = f"""
import json, os
read, write = os.pipe()
if os.fork() == 0:
    exec({STATES.replace("[drawn(), hash", "told = [drawn(), hash")!r})
    os.write(write, json.dumps(told).encode())
    os._exit(0)
os.wait()
json.loads(os.read(read, 4096))
"""
CELLS = 4


@pytest.mark.parametrize("preload", [(), ("primed",), ("primed", "logging")], ids=str)
@pytest.mark.parametrize("kind", ["on demand", "parked", "sessions"])
def test_no_two_cells_have_the_same_random_state(
    preload: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    """With and without hooks of a preloaded module.  The hash seed is shared, as SECURITY.md says."""
    require_different_states(preload, kind, tmp_path, "strict", STATES)


def test_no_two_children_of_programs_have_the_same_random_state(tmp_path: Path) -> None:
    """A child of a program has the number that the launcher has."""
    require_different_states(("primed",), "on demand", tmp_path, "standard", STATES_OF_A_CHILD)


# What runs before a program's import of random: other ways to the module.
OTHER_WAYS = {
    "from": "from random import random as draw",
    "spec": "import importlib.util as util; draw = util.module_from_spec(util.find_spec('random')).random",
    "specs": "import importlib.util as util; one, two = util.find_spec('random'), util.find_spec('random'); "
    "util.module_from_spec(one); draw = util.module_from_spec(two).random",
    "finder": "import sys; draw = sys.meta_path[0].create_module(None).random",
    "runpy": "import runpy; draw = runpy.run_module('random')['random']",
    "reload": "import importlib, random; draw = importlib.reload(random).random",
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_no_way_to_the_module_has_the_state_of_another_cell(strict: Sandbox, way: str) -> None:
    results = [strict.execute(f"{OTHER_WAYS[way]}\ndraw()") for _ in range(2)]
    assert {result.error for result in results} == {None}
    assert len({result.value for result in results}) == 2


def require_different_states(
    preload: tuple[str, ...], kind: str, tmp_path: Path, policy_name: str, states_program: str
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "primed.py").write_text(PRIMED)
    policy = policy_named(policy_name)
    python = msgspec.structs.replace(policy.python, path=(str(tmp_path),), preload=preload)
    policy = msgspec.structs.replace(policy, python=python)
    with Sandbox(policy=policy, pool=2 if kind == "parked" else 0) as sandbox:
        if kind == "sessions":
            with contextlib.ExitStack() as stack:
                sessions = [stack.enter_context(sandbox.session()) for _ in range(CELLS)]
                results = [session.execute(states_program) for session in sessions]
        else:
            sandbox.settle()
            results = [sandbox.execute(states_program) for _ in range(CELLS)]
    assert {result.error for result in results} == {None}
    states, hashes = zip(*(result.value for result in results), strict=True)
    for column in zip(*states, strict=True):
        assert len(set(map(str, column))) == CELLS, column
    assert len(set(hashes)) == 1


@pytest.mark.needs("root")
def test_a_signal_before_a_program_comes_hits_nothing() -> None:
    """SIGINT is handled by Python once the program is there, and ignored before."""
    with Sandbox(policy=policy_named("strict"), pool=1) as sandbox:
        sandbox.settle()
        launcher = inspect(sandbox).supervisor.generation.launcher.pids()[2]
        assert soon(lambda: len(children(launcher)) == 1)
        (guest,) = children(launcher)
        assert _mask(guest, "SigIgn") & 1 << (signal.SIGINT - 1)
        assert not _mask(launcher, "SigCgt") & 1 << (signal.SIGINT - 1)
        os.kill(guest, signal.SIGINT)
        result = sandbox.execute("import signal; signal.getsignal(2) is signal.default_int_handler")
        assert (result.value, result.pool_hit) == (True, True)
        run = sandbox.start("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
        assert run.result().status is SandboxStatus.FAILED
        assert "KeyboardInterrupt" in run.result().error


def _mask(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith(name))


@pytest.mark.needs("root")
def test_no_two_cells_share_a_descriptor_or_a_page_that_one_wrote() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        launcher = inspect(sandbox).supervisor.generation.launcher.pids()[2]
        runs = [
            sandbox.start("import time\nprint('up', flush=True)\ntime.sleep(60)") for _ in (1, 2)
        ]
        for run in runs:
            next(run.output())
        one, two = children(launcher)
        opened = [_opened(pid) for pid in (one, two)]
        assert not set(opened[0].values()) & set(opened[1].values())
        assert set(opened[0]) == {"0", "1", "2", "3"}
        shared = _frames(one) & _frames(two)
        assert len(_frames(one)) > 100
        assert not shared, f"{len(shared)} pages"
        for run in runs:
            run.cancel()
            run.result()


def _opened(pid: int) -> dict[str, str]:
    directory = f"/proc/{pid}/fd"
    return {name: os.readlink(f"{directory}/{name}") for name in os.listdir(directory)}


def _frames(pid: int) -> set[int]:
    """Return the frames of memory that `pid` may write and has for itself (proc_pid_pagemap(5)):
    what is shared since the fork is copied at the first write."""
    size, found = os.sysconf("SC_PAGESIZE"), set()
    pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, mode, *_ = line.split()
        if mode != "rw-p":
            continue
        start, end = (int(each, 16) // size for each in span.split("-"))
        words = os.pread(pagemap, (end - start) * 8, start * 8)
        for at in range(0, len(words), 8):
            word = int.from_bytes(words[at : at + 8], "little")
            if word >> 63 and word >> 56 & 1:  # present, and mapped by no other process
                found.add(word & (1 << 55) - 1)
    os.close(pagemap)
    return found
