"""The sandbox of `cellwright run` and `cellwright repl`, and the options that both have for it."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from ....policies.errors import PolicyError
from ....policies.languages import PYTHON, SPOKEN, language_names
from ....policies.policy import MIB, Limits, Policy, check_limit, check_policy
from ....runner.settings import PoolSettings
from ...sandbox.sandbox import Sandbox
from ...sandbox.sandbox_arguments import HostSettings
from ..options import (
    AUDIT_HELP,
    add_backend,
    add_gpu,
    add_image,
    add_policy,
    add_skills,
    audit_of,
    backend_of,
    image_of,
    mebibytes,
    policy_of,
    seconds,
    skills_of,
)
from ..package_options import add_packages, packages_of, with_environment

if TYPE_CHECKING:
    from ....runner.audit.log import AuditLog
    from ....runner.cells.workspace import KeptWorkspace
    from ....runner.launching.spawn import Spawned
    from ...sandbox.workspaces.workspace_store import Workspaces
    from ...tools.broker import Broker

_UNKNOWN_TO_SERVE = ("gpu", "memory", "pausable", "privacy", "servers", "skills", "venv")
_DAEMONS = (
    "optional", "audit", "python", "backend", "runtime", "rootfs", "image", "find_links",
    "no_index", "index_url", *_UNKNOWN_TO_SERVE,
)  # fmt: skip
_ONE_CELL = PoolSettings(size=0, cells_per_launcher=1)
OUTPUT = "cellwright-output"  # directory below the working directory, made for the first file


def add_language(
    parser: argparse.ArgumentParser, default: str, *, with_table: bool = False
) -> None:
    """Add --language; `default` says which language a program has without it.  `with_table`: also one
    that is compiled or run once, and --languages."""
    names = ", ".join(language_names())
    more = ", or one that `cellwright languages` lists" if with_table else ""
    parser.add_argument("--language", metavar="L", help=f"one of {names}{more}; default {default}")
    if with_table:
        parser.add_argument(
            "--languages", metavar="FILE", help="a TOML file of further languages; default none"
        )


def add_sandbox(parser: argparse.ArgumentParser, wall_time: str, policy: str | None = None) -> None:
    """Add the limits, --workspace, --audit, --connect and --policy; `wall_time` names what --timeout
    limits, `policy` the default of --policy if that is not strict."""
    limits, most = Limits(), "with --policy at most its limit"
    by_default, mib = f"{limits.wall_seconds:g}", limits.memory_bytes // MIB
    parser.add_argument(
        "--timeout", type=seconds, metavar="S",
        help=f"{wall_time} in seconds, or such as 10m; {most}; default {by_default} under strict",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=mebibytes, metavar="MB",
        help=f"memory limit in MiB, or such as 2G; {most}; default {mib} under strict",
    )  # fmt: skip
    parser.add_argument(
        "--workspace",
        metavar="NAME",
        help="restore /workspace from this workspace, and save it after",
    )
    parser.add_argument(
        "--review", action="store_true",
        help="save the workspace as a change that waits for `cellwright workspace commit`",
    )  # fmt: skip
    parser.add_argument("--audit", metavar="FILE", help=AUDIT_HELP)
    add_connect(parser)
    add_backend(parser)
    add_image(parser)
    add_gpu(parser)
    add_policy(parser, default=policy or "strict")
    parser.set_defaults(policy=policy, default_policy=policy)
    add_packages(parser)
    add_skills(parser, "show programs, below /skills,")


def add_connect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connect", metavar="PATH",
        help="use the daemon that listens on this socket; --policy then names one of its policies",
    )  # fmt: skip


@contextlib.contextmanager
def sandbox_of(
    options: argparse.Namespace, language: str, *, is_for_one_cell: bool = False
) -> Iterator[Sandbox]:
    """Open a local sandbox for `language`, or with --connect one of a daemon."""
    if options.review and options.workspace is None:
        raise PolicyError("--review: there is no workspace", "name one with --workspace")
    if options.review and getattr(options, "clean", False):
        raise PolicyError(
            "--clean: cannot be combined with --review: the change waits in the workspace",
            "`cellwright workspace remove` removes it",
        )
    if options.connect is not None:
        _refuse_with_connect(options)
        with _opened(
            "connecting to the daemon",
            lambda: Sandbox(connect=options.connect, policy=options.policy),
        ) as sandbox:
            yield sandbox
        return
    policy = policy_of(options)
    if language != PYTHON and not policy.processes.subprocesses:
        _refuse_packages(options, language)
    policy = with_environment(policy, options)
    policy = msgspec.structs.replace(policy, limits=_limits(options, policy.limits))
    if options.spawned and language == PYTHON and not _have_files_or_network(options, policy):
        _launch_ahead(options.spawned, policy, is_for_one_cell=is_for_one_cell)
    packages, store = packages_of(options)
    with (
        audit_of(options) as audit,
        _tools(options, audit, policy) as tools,
        _opened(
            "preparing packages and cells" if options.packages else "starting cells",
            lambda: Sandbox(
                policy=policy,
                pool=_ONE_CELL if is_for_one_cell else 0,
                audit=audit or False,
                tools=tools,
                skills=skills_of(options),
                packages=packages,
                workspaces=_workspaces(options),
                host=HostSettings(
                    spawned=options.spawned,
                    # starts no launcher for another language
                    language=language if language in SPOKEN else PYTHON,
                    python=options.python,
                    package_store=store,
                    languages=getattr(options, "languages", None),
                    pausable=getattr(options, "pausable", False),
                    **backend_of(options),
                ),
                **image_of(options),
            ),
        ) as sandbox,
    ):
        yield sandbox


def _limits(options: argparse.Namespace, limits: Limits) -> Limits:
    """Return the limits of a policy with those of --timeout and --memory. These options can raise
    limits only if no policy was named."""
    if (wall := options.timeout) is not None:
        check_limit("--timeout", wall, limit="wall_seconds")
        if wall > limits.wall_seconds:
            _check_raises(
                options, f"--timeout: {wall:g} s", "wall_seconds", f"{limits.wall_seconds:g} s"
            )
            cpu = max(limits.cpu_seconds, wall * max(1.0, limits.cpus))
            limits = msgspec.structs.replace(limits, cpu_seconds=cpu)
        limits = msgspec.structs.replace(limits, wall_seconds=float(wall))
    if (memory := options.memory) is not None:
        check_limit("--memory", memory, limit="memory_bytes", unit=MIB)
        if (most := limits.memory_bytes / MIB) < memory:
            _check_raises(options, f"--memory: {memory:g} MiB", "memory_bytes", f"{most:g} MiB")
        limits = msgspec.structs.replace(limits, memory_bytes=int(memory * MIB))
    return limits


def _check_raises(options: argparse.Namespace, asked: str, field: str, most: str) -> None:
    """Raise PolicyError if a policy was named, whose limits an option can only lower."""
    if options.policy != options.default_policy:
        raise PolicyError(
            f"{asked} is more than limits.{field} of the policy, {most}",
            f"{field} below [limits] of a policy file raises it, or this option without --policy",
        )


@contextlib.contextmanager
def _opened(what: str, open_one: Callable[[], Sandbox]) -> Iterator[Sandbox]:
    """Open a sandbox; at a terminal `what` is shown if that takes long."""
    with contextlib.ExitStack() as stack:
        if sys.stderr is not None and sys.stderr.isatty():
            from ...text.terminal_text import ProgressLine

            stack.enter_context(ProgressLine(what))
        opened = open_one()
    with opened as sandbox:
        yield sandbox


def _have_files_or_network(options: argparse.Namespace, policy: Policy) -> bool:
    """Tell whether cells see files of the sandbox or reach hosts, which a launch has to know."""
    files = options.packages, options.skills, getattr(options, "servers", None)
    wanted = policy.packages.require, policy.http.allow, policy.network.allow
    return any(each is not None for each in files) or any(wanted)


def _launch_ahead(spawned: "Spawned", policy: Policy, *, is_for_one_cell: bool) -> None:
    """Begin the launch before the modules are imported that `Sandbox` needs for it and for requests."""
    from ....runner.host.shown_paths import sources_of
    from ....runner.launching.launch import LaunchArguments, begin_ahead

    sources = sources_of(check_policy(policy))
    begin_ahead(spawned, LaunchArguments(policy, sources, is_for_one_cell=is_for_one_cell))


def print_staged(kept: "KeptWorkspace | None") -> None:
    """Say that a change of the workspace waits for review, if there is one."""
    if kept is not None and kept.state == "staged":
        print(
            f"cellwright: a change of workspace {kept.name!r} waits for review: "
            f"see `cellwright workspace diff {kept.name}`", file=sys.stderr,
        )  # fmt: skip


def _refuse_with_connect(options: argparse.Namespace) -> None:
    for name in _DAEMONS:
        if getattr(options, name, None):
            option = "--" + name.replace("_", "-")
            raise PolicyError(
                f"{option} cannot be combined with --connect: the daemon decides it",
                "" if name in _UNKNOWN_TO_SERVE else f"give {option} to cellwright serve",
            )


def _refuse_packages(options: argparse.Namespace, language: str) -> None:
    for name in ("packages", "venv"):
        if getattr(options, name):
            raise PolicyError(
                f"--{name}: a program in {language} has no use for packages of Python",
                "under a policy with subprocesses, such as standard, it can start python3",
            )


def _workspaces(options: argparse.Namespace) -> "Workspaces | None":
    """Return the store of named workspaces if --workspace names one."""
    if options.workspace is None:
        return None
    from ..keeping.workspace import workspaces_at

    return workspaces_at(None, review=options.review)


@contextlib.contextmanager
def _tools(
    options: argparse.Namespace, audit: "AuditLog | None", policy: Policy
) -> Iterator["Broker | None"]:
    """Open a broker for the tools of MCP servers if --servers names any; else import nothing of it."""
    if getattr(options, "servers", None) is None:
        yield None
        return
    from ...sandbox.calls.sandbox_tools import with_http
    from ...tools.broker import Broker
    from ..keeping.servers import approver, opened

    with opened(options) as servers:
        tools = with_http(servers, policy)
        yield Broker(tools, audit=audit, approve=approver())
