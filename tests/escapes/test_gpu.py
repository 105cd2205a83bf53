"""The devices of a GPU: the named nodes alone, the requests of their group alone, and what a session
with one cannot do.  The GPU is made up (`tests/made_up_gpu.py`)."""

import errno
import json
from pathlib import Path

import pytest

from tests import made_up_gpu

pytestmark = [pytest.mark.needs("root", "cgroup", "landlock", "gcc")]

RM_CONTROL, RM_CONTROL_LARGER, XFER, UVM, UVM_TOOLS = (
    0xC020462A, 0xC0FF462A, 0xC01046D3, 0x30000001, 62,
)  # fmt: skip
ATTEMPTS = """
import ctypes, fcntl, os
def tried(act):
    try:
        return act()
    except OSError as error:
        return -error.errno
def ask(name, *requests):
    node = os.open(f"/dev/{name}", os.O_RDWR)
    found = [tried(lambda: fcntl.ioctl(node, each, bytes(256))) for each in requests]
    os.close(node)
    return found
"""
PREPARED = f"""
from cellwright import Sandbox
from cellwright.policies.policy import *
ATTEMPTS = {ATTEMPTS!r}
def answer_of(program, gpu, **sections):
    policy = Policy(devices=Devices(gpu=gpu), **sections)
    with Sandbox(policy=policy, pool=0) as sandbox:
        result = sandbox.execute(ATTEMPTS + program)
    assert result.error is None, result
    noted = [each.arguments for each in result.violations]
    return [result.value, noted, list(result.layers)]
"""


def test_the_named_nodes_are_devices_and_no_other_node_is_there() -> None:
    program = """[sorted(os.listdir("/dev")), os.read(os.open("/dev/nvidia0", os.O_RDWR), 4).hex(),
     os.write(os.open("/dev/nvidiactl", os.O_RDWR), b"x"), ctypes.CDLL("libcuda.so.1").made_up(),
     tried(lambda: open("/dev/nvidia1")), tried(lambda: open("/dev/sda"))]"""
    found, (without, _, layers) = made_up_gpu.run(
        f"""{PREPARED}
one = answer_of({program!r}, ("nvidia0",))
answer = [one, answer_of("sorted(os.listdir('/dev'))", "")]
"""
    )
    (names, read, wrote, library, *others), noted, (*_, layer) = found
    own = {"fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom", "zero"}
    assert set(names) - own == {"nvidia0", "nvidiactl", "nvidia-uvm"}
    assert (read, wrote, others) == ("00000000", 1, [-errno.ENOENT, -errno.ENOENT])
    assert library == made_up_gpu.ANSWER
    assert layer == "gpu_nvidia"
    assert [each[0] for each in noted] == ["'/dev/nvidia1'", "'/dev/sda'"]
    assert set(without) == own
    assert not any("gpu" in each for each in layers)


def test_a_program_that_a_cell_starts_finds_the_driver_where_the_policy_shows_usr_lib() -> None:
    """The loader's own folder is the host's then, and has it not."""
    started = "import ctypes; print(ctypes.CDLL('libcuda.so.1').made_up())"
    program = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {started!r}], capture_output=True, text=True).stdout
"""
    sections = "processes=Processes(subprocesses=True, execute=('/usr/bin', '/usr/lib'))"
    value, _, _ = made_up_gpu.run(
        f"{PREPARED}answer = answer_of({program!r}, ('nvidia0',), {sections})"
    )
    assert value == f"{made_up_gpu.ANSWER}\n"


def test_the_nodes_of_other_vendors_have_the_same_form() -> None:
    """Not tried with a GPU of AMD: the nodes are there, and requests of its group alone pass."""
    asked = "0x4B01, 0x6445, 0x4B22, 0x642D"  # KFD GET_VERSION, INFO; CRIU_OP, PRIME_HANDLE_TO_FD
    program = f"[os.listdir('/dev/dri'), ask('dri/renderD128', {asked})]"
    nodes = {"kfd": "null", "dri/renderD128": "zero", "dri/renderD129": "zero", "dri/card0": "zero"}
    value, noted, layers = made_up_gpu.run(
        f"{PREPARED}answer = answer_of({program!r}, ('dri/renderD128',))", nodes=nodes
    )
    assert value == [["renderD128"], [-errno.ENOTTY] * 4]
    assert [each[1] for each in noted] == ["0x4b22", "0x642d"]
    assert layers[-1] == "gpu_amd"


def test_requests_of_the_group_reach_the_device_and_others_do_not() -> None:
    """Both fail with ENOTTY, by the device and by the listener: only the second is an attempt that the
    result reports.  Without `devices` every one is."""
    asked = f"{RM_CONTROL}, {RM_CONTROL_LARGER}, {UVM}, {XFER}, {UVM_TOOLS}"
    program = f'ask("nvidia0", {asked})'
    zero = f'ask("zero", {asked})'
    value, noted, _ = made_up_gpu.run(f"{PREPARED}answer = answer_of({program!r}, ('nvidia0',))")
    assert value == [-errno.ENOTTY] * 5
    assert [int(each[1], 0) for each in noted] == [XFER, UVM_TOOLS]
    _, noted, _ = made_up_gpu.run(f"{PREPARED}answer = answer_of({zero!r}, '')")
    assert len(noted) == 5


def test_landlock_keeps_requests_to_the_devices_of_the_gpu() -> None:
    """urandom has no right of ioctl(2) where programs start no others: EACCES, by Landlock."""
    program = f"""
random = os.open("/dev/urandom", os.O_RDONLY)
[tried(lambda: fcntl.ioctl(random, {RM_CONTROL}, bytes(256))), ask("nvidia0", {RM_CONTROL})]
"""
    value, noted, _ = made_up_gpu.run(f"{PREPARED}answer = answer_of({program!r}, ('nvidia0',))")
    assert value == [-errno.EACCES, [-errno.ENOTTY]]
    assert noted == []


def test_the_payload_about_gpus_stays_inside_with_one() -> None:
    """Its requests fail as those of a device without them, and each is a violation of its own."""
    (payload,) = Path(__file__).with_name("payloads").glob("LAY-40*")
    found, noted = made_up_gpu.run(
        f"""{PREPARED}
policy = Policy(devices=Devices(gpu=("nvidia0",)), environment={{"SBXT_GPU": "nvidia0,nvidiactl,nvidia-uvm"}})
with Sandbox(policy=policy, pool=0) as sandbox:
    result = sandbox.execute({payload.read_text()!r})
answer = [result.stdout, [each.arguments[1] for each in result.violations if each.syscall == "ioctl"]]
"""
    )
    assert json.loads(found)["escaped"] is False, found
    assert {hex(XFER), hex(UVM_TOOLS)} <= {*noted}


NAMES = """
import threading
def named(path):
    def act():
        with open(path, "wb") as file:
            return file.write(b"cuda-EvtHandlr")
    return tried(act)
begun, may_end = threading.Event(), threading.Event()
def wait():
    begun.set()
    may_end.wait(30)
thread = threading.Thread(target=wait)
thread.start()
begun.wait(30)
other = thread.native_id
found = [named(path.format(own=os.getpid(), other=other)) for path in PATHS]
may_end.set()
thread.join()
found
"""
OWN = ["/proc/self/comm", "/proc/thread-self/comm", "/proc/self/task/{own}/comm",
       "/proc/self/task/{other}/comm", "/proc/{own}/task/{other}/comm"]  # fmt: skip
NOT_OWN = ["/proc/1/comm", "/proc/1/task/1/comm", "/proc/self/task/1/comm", "/proc/{own}/task/1/comm",
           "/proc/self/task/999999/comm", "/proc/self/oom_score_adj", "/proc/self/clear_refs",
           "/proc/self/task/{other}/../../mem", "/proc/self/task/{other}/sched"]  # fmt: skip


def test_threads_can_be_named_and_nothing_else_in_proc_be_written() -> None:
    """No cell can write there without a GPU; a name that is given is not kept."""
    program = f"PATHS = {OWN + NOT_OWN!r}{NAMES}"
    with_one, _, _ = made_up_gpu.run(f"{PREPARED}answer = answer_of({program!r}, ('nvidia0',))")
    without, _, _ = made_up_gpu.run(f"{PREPARED}answer = answer_of({program!r}, '')")
    assert with_one[: len(OWN)] == [len("cuda-EvtHandlr")] * len(OWN)
    assert all(each < 0 for each in with_one[len(OWN) :])
    assert all(each < 0 for each in without)


def test_a_session_with_a_gpu_open_is_neither_branched_nor_paused_nor_forked() -> None:
    """One that has not opened it is; nothing that a GPU holds is copied."""
    found = made_up_gpu.run(
        f"""{PREPARED}
from cellwright.errors import PauseError, PolicyError
def refused(act):
    try:
        made = act()
    except (PauseError, PolicyError) as error:
        return str(error)
    for each in made if isinstance(made, tuple) else (made,):
        if not isinstance(each, str):
            each.close()
    return ""
def each_way(session):
    ways = (lambda: session.branch(), lambda: session.branch(replay=False), session.fork, session.pause)
    return [refused(way) for way in ways]
with Sandbox(policy=Policy(devices=Devices(gpu=("nvidia0",))), pool=0) as sandbox:
    with sandbox.session() as session:
        assert session.execute("node = open('/dev/nvidia0', 'rb')").ok
        opened = each_way(session)
    with sandbox.session() as session:
        mapped = "import mmap; f = open('/dev/nvidia0', 'r+b'); m = mmap.mmap(f.fileno(), 4096); f.close()"
        assert session.execute(mapped).ok
        mapped = refused(session.branch)
    with sandbox.session() as session:
        assert session.execute("x = 1").ok
        closed = each_way(session)
answer = [opened, mapped, closed]
"""
    )
    opened, mapped, closed = found
    assert [each.split(":")[0] for each in opened] == ["branch", "branch", "fork", "pause"]
    assert all("/dev/nvidia0 open" in each for each in opened)
    assert mapped.startswith("branch")
    assert closed == ["", "", "", ""]


def test_a_module_that_opens_the_gpu_is_not_preloaded(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for above in tmp_path.parents:
        if above.stat().st_uid == 0 and above not in (Path("/"), Path("/tmp")):
            above.chmod(above.stat().st_mode | 0o055)
    (tmp_path / "eager.py").write_text("node = open('/dev/nvidiactl', 'rb')\n")
    (tmp_path / "lazy.py").write_text("def use():\n    return open('/dev/nvidia0', 'rb').read(2)\n")
    found = made_up_gpu.run(
        f"""{PREPARED}
from cellwright.errors import PolicyError
def preload(name):
    python = Python(path=({str(tmp_path)!r},), preload=(name,))
    try:
        return answer_of(f"import {{name}}; len({{name}}.use())", ("nvidia0",), python=python)[0]
    except PolicyError as error:
        return str(error)
answer = [preload("eager"), preload("lazy")]
"""
    )
    eager, lazy = found
    assert "cannot preload eager: it opens /dev/nvidiactl" in eager
    assert lazy == 2


def test_a_node_that_is_no_character_device_is_refused() -> None:
    program = f"""{PREPARED}
import os
from cellwright.errors import CellwrightError
os.system("umount /dev/nvidia1")  # leaves a file of that name
try:
    answer_of("1", "nvidia")
    answer = ""
except CellwrightError as error:
    answer = str(error)
"""
    assert "no character device" in str(made_up_gpu.run(program))


def test_without_a_gpu_one_sentence_says_so() -> None:
    program = f"""{PREPARED}
from cellwright.errors import PolicyError
try:
    answer_of("1", "nvidia")
except PolicyError as error:
    answer = str(error)
"""
    found = made_up_gpu.run(program, nodes={})
    assert str(found).startswith("devices.gpu: this host has no NVIDIA GPU")


def test_a_driver_in_a_folder_of_its_own_is_found_by_ld_library_path_and_only_if_it_is_roots() -> (
    None
):
    program = f"""{PREPARED}
import os
from cellwright.errors import PolicyError
from tests.made_up_gpu import DRIVER
os.makedirs("/usr/local/elsewhere", 0o755)
os.rename(DRIVER, "/usr/local/elsewhere/lib")
def found():
    try:
        return answer_of("ctypes.CDLL('libcuda.so.1').made_up()", "nvidia")[0]
    except PolicyError as error:
        return str(error)
answer = [found()]
os.environ["LD_LIBRARY_PATH"] = "/nowhere:relative::/usr/local/elsewhere/lib"
answer.append(found())
os.chown("/usr/local/elsewhere/lib/libcuda.so.580.1", 54321, 0)
answer.append(found())
"""
    without, found, refused = made_up_gpu.run(program)
    assert "libcuda.so.1 of the driver was not found" in without
    assert found == made_up_gpu.ANSWER
    assert (
        "/usr/local/elsewhere/lib/libcuda.so.1 is not used, since others than root may" in refused
    )
