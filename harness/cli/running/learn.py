"""`cellwright learn`: runs a program under a wide policy, and writes the policy that it needs."""

import argparse
import os
import re
import sys
from pathlib import Path

import msgspec

from ....policies.advice.learning import Lessons, policy_text
from ....policies.errors import PolicyError
from ....policies.network.rule import NetworkDenial, NetworkRule
from ....policies.policy import Filesystem, Limits, Network, Policy, Processes
from ....runner.confined.egress_process import EgressProcess
from ....runner.fixed_root import NETWORK_TEXTS, TEXTS
from ....runner.host.ids import id_for
from ....runner.host.shown_paths import is_channel, is_open_to_cells
from ....runner.launching.launch import LaunchArguments
from ....runner.launching.spawn import Spawned, interpreter
from ....runner.requests.result import SandboxResult
from ....runner.supervisor import Supervisor
from ...sandbox.calls.call_request import Rejected, make_request
from ...sandbox.parameters import CallArguments
from ...text.terminal_text import ProgressLine, harmless, result_line
from ..options import FAILED, SUCCEEDED, add_policy, policy_of

# a denied rule, because only a policy with a rule gives programs a resolver
_NO_HOST = "learn.invalid"
_NO_FILE = re.compile(
    r"FileNotFoundError: .*No such file or directory: '((?:/tmp/|[^/'\n])[^'\n]{0,200})'"
)
_NOT_SHOWN = {"proc", "dev", "sys", "tmp", "etc", "workspace", "lost+found", "boot", "run"}
_EXECUTABLE = (
    "bin",
    "sbin",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "usr",
    "opt",
    "nix",
    "home",
    "root",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a Python program that you trust to read files of this host"
    )
    parser.add_argument(
        "-o", "--output", metavar="TOML", help="the file for the policy; default standard output"
    )
    add_policy(parser)


def run(options: argparse.Namespace) -> int:
    with ProgressLine("running the program"):
        text, result = learn(Path(options.file), policy_of(options))
    print(result_line(result), *_hints(result, Path(options.file)), sep="\n", file=sys.stderr)
    if options.output:
        Path(options.output).write_text(text)
    else:
        sys.stdout.write(text)
    return SUCCEEDED if result.ok else FAILED


def _hints(result: SandboxResult, program: Path) -> list[str]:
    """Return a hint if the program looked for a file where the host has one and the cell does not."""
    found = _NO_FILE.search(result.error or "")
    if not found or not (os.path.exists(found[1]) or (program.parent / found[1]).exists()):
        return []
    name = harmless(found[1])
    hint = f"name {name} by an absolute path outside of /tmp"
    return [f"hint: the program sees neither your working directory nor /tmp of the host: {hint}"]


def learn(program: Path, policy: Policy) -> tuple[str, SandboxResult]:
    """Run `program` under a policy that shows the host read-only; return the policy it needs, as
    TOML, and the result of the run.

    The program may read nearly every file and start nearly every program of the host; every other
    isolation holds.  So learn only from programs that you trust to read.  `policy` gives the limits
    and the optional layers.  No host of a network can be reached; the policy has the names that were
    looked up as comments.
    """
    lessons = Lessons()
    executable = interpreter()
    egress = EgressProcess(executable, 0 if os.geteuid() else id_for(None))
    launch = LaunchArguments(_wide(policy, program), lessons=lessons, egress=egress)
    supervisor = Supervisor(launch, Spawned(executable))
    try:
        request = make_request(CallArguments(code=program.read_bytes()), policy.limits)
        result = supervisor.execute(request)
    except Rejected as refusal:
        raise PolicyError(f"{program}: {refusal}") from None
    except OSError as error:
        raise PolicyError(f"cannot read {program}: {error.strerror}") from None
    finally:
        supervisor.close()
        egress.close()
    lessons.hosts |= {each.arguments[0] for each in result.violations if each.syscall == "resolve"}
    lessons.hosts.discard(_NO_HOST)
    return policy_text(program.stem, lessons, policy.python), result


def _wide(policy: Policy, program: Path) -> Policy:
    """Return `policy` with the host's files shown, read-only, and programs allowed."""
    shown = tuple(_directories()) + tuple(_settings()) + _beside(program)
    executable = tuple(path for path in shown if path[1:].partition("/")[0] in _EXECUTABLE)
    return msgspec.structs.replace(
        policy,
        name="learn",
        filesystem=Filesystem(read=tuple(path for path in shown if path not in executable)),
        processes=Processes(threads=True, subprocesses=True, execute=executable),
        network=Network(
            loopback=True, allow=(NetworkRule(host=_NO_HOST),), deny=(NetworkDenial(host="*"),)
        ),
        limits=msgspec.structs.replace(policy.limits, violations=Limits().violations),
    )


def _directories() -> list[str]:
    names = sorted(os.listdir("/"))
    paths = [f"/{name}" for name in names if name not in _NOT_SHOWN]
    return [path for path in paths if os.path.isdir(path) and _can_be_read(path)]


def _settings() -> list[str]:
    """Return the entries of /etc; the directory itself is the cell's own."""
    paths = [f"/etc/{name}" for name in sorted(os.listdir("/etc"))]
    own = TEXTS | NETWORK_TEXTS
    return [path for path in paths if path not in own and _can_be_read(path)]


def _can_be_read(path: str) -> bool:
    return not os.path.islink(path) and not is_channel(path) and is_open_to_cells(path)


def _beside(program: Path) -> tuple[str, ...]:
    """Return the program's directory if it is below the host's /tmp, which a cell does not see."""
    directory = str(program.resolve().parent)
    return (directory,) if directory.startswith("/tmp/") else ()  # noqa: S108 - the host's
