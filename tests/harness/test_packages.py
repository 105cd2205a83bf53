"""Packages of an environment in a cell, and modules that are imported ahead."""

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from cellwright import Policy, PolicyError, PoolSettings, Sandbox, exceeds, narrow
from cellwright.policies.policy import Filesystem, Limits, Processes, Python
from tests.conftest import OPTIONAL

ENVIRONMENT = sysconfig.get_path("purelib")
BORN = "import os\nborn = os.readlink('/proc/self/ns/net')\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)  # the launcher is nobody
    return tmp_path


@pytest.fixture
def sandbox_of() -> Callable[..., Sandbox]:
    def make(*preload: str, path: str, **policy: object) -> Sandbox:
        python = Python(path=(path,), preload=preload)
        return Sandbox(policy=Policy(python=python, optional_layers=OPTIONAL, **policy), pool=0)  # type: ignore[arg-type]

    return make


def test_a_package_is_there_only_where_the_policy_names_its_place(
    place: Path, sandbox_of: Callable[..., Sandbox], strict: Sandbox
) -> None:
    (place / "given.py").write_text("answer = 42\n")
    (place / "given.py").chmod(0o666)  # the mount refuses, whatever the mode allows
    assert "ModuleNotFoundError" in str(strict.execute("import given").error)
    with sandbox_of(path=str(place)) as sandbox:
        assert sandbox.execute("import given\ngiven.answer").value == 42
        refused = sandbox.execute(f"open({str(place / 'given.py')!r}, 'a')")
    assert "Read-only file system" in str(refused.error)


def test_what_is_preloaded_was_imported_before_the_cell(
    place: Path, sandbox_of: Callable[..., Sandbox]
) -> None:
    (place / "given.py").write_text(BORN)
    look = (
        "import os, sys\nloaded = 'given' in sys.modules\nimport given\n"
        "loaded, given.born == os.readlink('/proc/self/ns/net')"
    )
    with sandbox_of(path=str(place)) as sandbox:
        assert sandbox.execute(look).value == [False, True]
    with sandbox_of("given", path=str(place)) as sandbox:
        assert sandbox.execute(look).value == [True, False]


def test_preloading_happens_without_a_network_and_without_the_hosts_files(
    place: Path, sandbox_of: Callable[..., Sandbox]
) -> None:
    (place / "given.py").write_text(
        "import os, socket\n"
        "def attempt(what, *given):\n"
        "    try: return str(what(*given))\n"
        "    except OSError as error: return type(error).__name__\n"
        "seen = [attempt(open, '/etc/shadow'), sorted(n for _, n in socket.if_nameindex()),\n"
        "        attempt(os.kill, 2**22, 0), os.environ.get('SECRET')]\n"
    )
    with sandbox_of("given", path=str(place)) as sandbox:
        seen = sandbox.execute("import given\ngiven.seen").value
    assert seen == ["FileNotFoundError", ["lo"], "ProcessLookupError", None]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import nowhere_to_be_found", "cannot preload given: ModuleNotFoundError"),
        ("raise SystemExit(3)", "cannot preload given: SystemExit: 3"),
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
            "cannot preload given: it starts a thread",
        ),
    ],
)
def test_what_cannot_be_preloaded_is_said_before_anything_runs(
    place: Path, sandbox_of: Callable[..., Sandbox], source: str, complaint: str
) -> None:
    (place / "given.py").write_text(source)
    with pytest.raises(PolicyError, match=rf"^python\.preload: {complaint}"):
        sandbox_of("given", path=str(place))


def test_a_place_that_does_not_exist_is_an_error(sandbox_of: Callable[..., Sandbox]) -> None:
    with pytest.raises(PolicyError, match=r"python\.path: /srv/nowhere does not exist"):
        sandbox_of(path="/srv/nowhere")


def test_real_packages_work_with_the_libraries_that_they_need(
    sandbox_of: Callable[..., Sandbox],
) -> None:
    """pandas needs libstdc++, which the interpreter does not."""
    with sandbox_of(path=ENVIRONMENT) as sandbox:
        result = sandbox.execute("import pandas\nint(pandas.Series([40, 2]).sum())")
    assert (result.value, result.violations) == (42, ())


def test_no_two_cells_draw_the_same(sandbox_of: Callable[..., Sandbox]) -> None:
    draw = (
        "import numpy, random, uuid\n"
        "[float(numpy.random.rand()), random.random(), str(uuid.uuid4()), uuid.uuid1().node]"
    )
    with sandbox_of("numpy", "numpy.random", "uuid", path=ENVIRONMENT) as sandbox:
        drawn = [sandbox.execute(draw).value for _ in range(4)]
        for values in zip(*drawn, strict=True):
            assert len(set(values)) == 4
        # Without being seeded anew, all cells would draw what the launcher would have drawn.
        held = sandbox.execute("import numpy\nnumpy.random.seed(1)\nfloat(numpy.random.rand())")
        assert held.value == 0.417022004702574


TORCH = """
import os
class Generator:
    def seed(self):
        self.initial = os.urandom(8).hex()
default_generator, threads = Generator(), 1
default_generator.initial = "the launcher's seed"
def set_num_threads(count):
    global threads
    threads = count
def seed():
    default_generator.seed()
"""


def test_a_preloaded_torch_has_other_draws_and_the_processors_of_each_cell(place: Path) -> None:
    """It made its generator in the launcher, and read there that it has one thread."""
    (place / "torch.py").write_text(TORCH)
    read = "import torch\n[torch.default_generator.initial, torch.threads]"
    policy = Policy(
        python=Python(path=(str(place),), preload=("torch",)), limits=Limits(cpus=2.0),
        optional_layers=OPTIONAL,
    )  # fmt: skip
    with Sandbox(policy=policy, pool=0) as sandbox:
        found = [sandbox.execute(read).value for _ in range(2)]
        with sandbox.session() as session:
            found += [session.execute(read).value for _ in range(2)]
    assert found[2] == found[3]
    assert len({drawn for drawn, _ in found} | {"the launcher's seed"}) == 4
    assert {threads for _, threads in found} == {min(2, len(os.sched_getaffinity(0)))}


def test_numerical_libraries_start_no_more_threads_than_the_cell_has_cpus(
    sandbox_of: Callable[..., Sandbox],
) -> None:
    code = "import numpy, os\nnumpy.ones((300, 300)) @ numpy.ones((300, 300))\nlen(os.listdir('/proc/self/task'))"
    with sandbox_of(path=ENVIRONMENT) as sandbox:
        assert sandbox.execute(code).value == 1


def test_each_call_can_have_an_address_layout_of_its_own() -> None:
    where = "hash('x'), [l for l in open('/proc/self/maps') if 'libc' in l][0].split('-')[0]"
    policy = Policy(optional_layers=OPTIONAL)
    with Sandbox(policy=policy, pool=0) as sandbox:
        assert len({str(sandbox.execute(where).value) for _ in range(3)}) == 1
    with Sandbox(policy=policy, pool=PoolSettings(size=0, cells_per_launcher=1)) as sandbox:
        assert len({str(sandbox.execute(where).value) for _ in range(3)}) == 3


def test_phases_add_up_to_the_call(strict: Sandbox) -> None:
    result = strict.execute("1 + 1")
    phases = [getattr(result.phases, name) for name in result.phases.__struct_fields__]
    assert len(phases) == 6
    assert all(phase >= 0 for phase in phases)
    assert sum(phases) == pytest.approx(result.execution_time)


def test_packages_narrow_and_compare() -> None:
    wide = Policy(python=Python(path=("/srv/a", "/srv/b"), preload=("numpy", "json")))
    less = Policy(python=Python(path=("/srv/a/sub", "/opt"), preload=("json",)))
    narrowed = narrow(wide, less)
    assert narrowed.python == Python(path=("/srv/a/sub",), preload=("json",))
    assert narrowed.filesystem.read == ()
    assert exceeds(wide, less) == (
        "filesystem: reading /srv/a",
        "filesystem: reading /srv/b",
        "python.path: importing from /srv/a",
        "python.path: importing from /srv/b",
        "python.preload: importing numpy ahead",
    )
    assert exceeds(narrowed, wide) == ()
    reading = narrow(wide, Policy(filesystem=Filesystem(read=("/srv/a",))))
    assert (reading.python.path, reading.filesystem.read) == ((), ("/srv/a",))


@pytest.mark.parametrize("name", ["", "no-module", "a..b", "os; import x", "/srv/x"])
def test_a_module_has_a_modules_name(name: str) -> None:
    with pytest.raises(PolicyError, match=r"python\.preload: must be names of modules, got"):
        Sandbox(policy=Policy(python=Python(preload=(name,)))).close()


def test_what_lies_among_packages_can_be_executed_where_programs_can(
    place: Path, sandbox_of: Callable[..., Sandbox]
) -> None:
    """As policies/README.md says."""
    program = place / "tool"
    program.write_bytes(Path("/usr/bin/id").resolve().read_bytes())
    program.chmod(0o755)
    run = f"import subprocess\nsubprocess.run([{str(program)!r}, '-u'], capture_output=True).returncode"
    with sandbox_of(path=str(place)) as sandbox:
        assert "PermissionError" in str(sandbox.execute(run).error)
    programs = Processes(subprocesses=True, execute=("/usr/bin", "/usr/lib"))
    with sandbox_of(path=str(place), processes=programs) as sandbox:
        assert sandbox.execute(run).value == 0
