"""`cellwright exec`: a command works on the project around it, and on nothing else of this host."""

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ....policies.errors import PolicyError
from ....policies.network.credential import credential_of
from ....policies.policy import MIB, Policy
from ....policies.profiles.loading import policy_files
from ...sandbox.projects.project import Project, find_project
from ...sandbox.projects.project_policy import ProjectOptions, ProjectPolicy, policy_of_project
from .. import open_cell_client
from ..options import (
    AUDIT_HELP,
    PROFILES,
    SANDBOX_FAILED,
    SUCCEEDED,
    add_gpu,
    add_optional,
    audit_of,
    mebibytes,
    policy_named,
    seconds,
)
from ..parsing import Parser

if TYPE_CHECKING:
    from ....runner.audit.log import AuditLog
    from ....runner.launching.spawn import Spawned
    from ....runner.requests.result import SandboxResult
    from ...sandbox.programs.program import Program
    from ...sandbox.projects.agents.srt_settings import SrtSettings
    from ...sandbox.projects.project_run import ProjectRun
    from ...sandbox.sandbox import Sandbox

_INPUT, _OUTPUT, _ERRORS = 0, 1, 2
_CHUNK = 1 << 16
_BY_SIGNAL = 128  # sh(1)
_EXPOSED = re.compile(
    r"(?:(?P<address>[\d.]+\.\d+|\[[0-9a-fA-F:]+\]):)?(?:(?P<host>\d+):)?(?P<port>\d+)"
)
_PASSED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


def add(parser: Parser) -> None:
    parser.takes_arguments = True
    parser.usage = "%(prog)s [OPTION]... -- COMMAND [ARGUMENT]..."
    _add_cell(parser)
    _add_network(parser)
    _add_files(parser)


def _add_cell(parser: Parser) -> None:
    parser.add_argument(
        "--project", metavar="DIR", help="the project; default the work tree of git around this "
        "directory, or this directory",
    )  # fmt: skip
    parser.add_argument(
        "--review", action="store_true",
        help="leave the project as it is: changes wait for `cellwright changes`",
    )  # fmt: skip
    parser.add_argument(
        "--keep", action="store_true",
        help="leave the cell open in the daemon (cellwright serve), for further commands with the same "
        "options; what runs in the background stays",
    )  # fmt: skip
    parser.add_argument(
        "--close", action="store_true",
        help="end the open cells of the project, and all that runs there",
    )  # fmt: skip
    parser.add_argument(
        "--connect", metavar="PATH",
        help="the socket of the daemon that has open cells; default that of `cellwright serve`",
    )  # fmt: skip
    parser.add_argument(
        "--shell",
        metavar="LINE",
        help="a line for bash(1), or sh(1) where it is missing, in place of a command; default none",
    )


def _add_network(parser: Parser) -> None:
    parser.add_argument(
        "--allow", action="append", default=[], metavar="HOST[:PORT][@NETWORK]",
        help="a host that programs may reach by its name, at public addresses and those of NETWORK, "
        "such as 10.1.0.0/16; default those of a known agent; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--allow-registries",
        action="store_true",
        help="programs may reach the registries from which package managers fetch packages",
    )
    parser.add_argument(
        "--host-port", type=int, action="append", default=[], metavar="PORT",
        help="a port of this host's loopback, such as of a local model, that programs reach at "
        "localhost; default none; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--expose", type=_exposed, action="append", default=[], metavar="[ADDRESS:][HOST_PORT:]PORT",
        help="a port of the command, such as of a web server, that this host reaches at the same port, "
        "or at HOST_PORT, 0 for a free one, of ADDRESS, default 127.0.0.1; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="an environment variable of the command; without =VALUE with the value that it has here; "
        "may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--credential", action="append", default=[], metavar="NAME=ENV@HOST",
        help="give the command a placeholder in the variable NAME; requests to HOST, which it may "
        "reach, get the value of ENV in its place; default none; may be repeated",
    )  # fmt: skip


def _add_files(parser: Parser) -> None:
    for name, what in (("read", "read"), ("write", "read and write")):
        parser.add_argument(
            f"--{name}", action="append", default=[], metavar="PATH",
            help=f"a further path that programs may {what}; default none; may be repeated",
        )  # fmt: skip
    parser.add_argument(
        "--protect", action="append", default=[], metavar="PATH",
        help="a path in the project that programs may not change; default those of known names; may "
        "be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--unprotect", action="append", default=[], metavar="PATH",
        help="let programs change a path that is protected by default; default none; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=mebibytes, metavar="MB",
        help="memory limit in MiB, or such as 2G; default that of the policy",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=seconds, metavar="S",
        help="time after which the command is ended, in seconds or such as 10m; default none",
    )  # fmt: skip
    parser.add_argument(
        "--policy", metavar="P", default="project",
        help="the policy to add the project to: a TOML file, or a profile: "
        f"{', '.join(PROFILES)}; default project",
    )  # fmt: skip
    parser.add_argument(
        "--settings", nargs="?", const="~/.srt-settings.json", metavar="FILE",
        help="obey the settings of srt, another sandbox for commands; default of FILE "
        "~/.srt-settings.json",
    )  # fmt: skip
    parser.add_argument(
        "--learn", metavar="FILE",
        help="write to a new file the policy that the command needed, for --policy; default none",
    )  # fmt: skip
    parser.add_argument(
        "--print-hook", metavar="AGENT",
        help="print the files by which claude, codex, opencode or pi runs its shell commands by exec, "
        "and do nothing; default none",
    )  # fmt: skip
    parser.add_argument(
        "--explain", action="store_true", help="print what the command could touch, and do nothing"
    )
    add_optional(parser)
    add_gpu(parser)
    parser.add_argument("--audit", metavar="FILE", help=AUDIT_HELP)
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print refused attempts after the command"
    )


def _exposed(text: str) -> tuple[int, tuple[str, int]]:
    """Return a port of the command, and the address and port of this host that lead to it."""
    found = _EXPOSED.fullmatch(text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be a port, or HOST_PORT:PORT, got {text!r}")
    port = int(found["port"])
    return port, ((found["address"] or "127.0.0.1").strip("[]"), int(found["host"] or port))


def run(options: argparse.Namespace) -> int:
    if options.print_hook:
        from ...sandbox.projects.agents.hooks import hook_of

        print(hook_of(options.print_hook).describe())
        return SUCCEEDED
    if open_cell_client.left_over is not None or options.keep or options.close:
        from ..open_cell_answer import has_told_of_open_cells

        if has_told_of_open_cells(options):
            return SUCCEEDED
    command = command_of(options)
    settings = _settings(options)
    project = project_of(options)
    wanted = project_options(options)
    if settings:
        options.protect += settings.protect(project.root)
        options.unprotect += settings.unprotect
        project, wanted = project_of(options), settings.options(wanted)
    found = policy_of_project(base_of(options), project, command, wanted)
    if settings:
        found = settings.narrowed(found)
    for notice in (*project.notices, *(settings.notices if settings else ())):
        _say(_harmless(notice))
    if options.explain:
        print("\n".join(map(_harmless, found.explain().splitlines())))
        return SUCCEEDED
    if options.learn and os.path.lexists(options.learn):
        raise PolicyError(f"--learn: {options.learn} exists", "name a new file")
    result = _run(command, found, options)
    if options.learn:
        _learn(options, found, wanted, result)
    from ....policies.advice.hints import for_exec
    from ...text.terminal_text import hint_lines, notice_lines, violation_lines

    status = _status(result)
    refused = violation_lines(result) if options.verbose else ()
    hints = list(map(for_exec, hint_lines(result))) if options.verbose or status else ()
    for line in (*notice_lines(result), *refused, *hints):
        print(line, file=sys.stderr)
    if options.review:
        _tell_changes(project)
    return status


def _learn(
    options: argparse.Namespace, found: ProjectPolicy, wanted: ProjectOptions,
    result: "SandboxResult",
) -> None:  # fmt: skip
    """Write the policy that the command needed; never to a file or through a link that it made."""
    from ...sandbox.projects.agents.learned import learned_policy

    extends = options.policy if options.policy in PROFILES else os.path.abspath(options.policy)
    text = learned_policy(base_of(options), extends, found, wanted, result)
    try:
        with open(options.learn, "x") as file:
            file.write(text)
    except OSError as error:
        raise PolicyError(f"--learn: cannot write {options.learn}: {error.strerror}") from None
    _say(
        f"{_harmless(options.learn)} has what the command needed; for --policy, once you have read it"
    )


def _settings(options: argparse.Namespace) -> "SrtSettings | None":
    if options.settings is None:
        return None
    from ...sandbox.projects.agents.srt_settings import SrtSettings

    return SrtSettings(options.settings)


def project_of(options: argparse.Namespace, *, whole: bool | None = None) -> Project:
    return find_project(
        options.project or ".", whole=options.project is not None if whole is None else whole,
        protect=tuple(options.protect), unprotect=tuple(options.unprotect),
    )  # fmt: skip


def _tell_changes(project: Project) -> None:
    from ...sandbox.projects.project_changes import ProjectChanges

    if waiting := len(ProjectChanges(project).list()):
        noun = "change waits" if waiting == 1 else "changes wait"
        print(f"cellwright: {waiting:,} {noun}: see `cellwright changes`", file=sys.stderr)


def command_of(options: argparse.Namespace) -> list[str]:
    if options.shell is not None and options.arguments:
        raise PolicyError("--shell: cannot be combined with a command")
    shell = "bash" if os.path.exists("/bin/bash") else "sh"  # agents write lines for bash
    command = [shell, "-c", options.shell] if options.shell is not None else options.arguments
    if not command:
        raise PolicyError("exec: there is no command", "put it behind --: cellwright exec -- make")
    return command


def base_of(options: argparse.Namespace) -> Policy:
    """Return the policy that the project is added to."""
    policy = policy_named(options.policy, options)
    limits = replace(policy.limits, cpus=float(os.cpu_count() or 1))
    if options.memory:
        limits = replace(limits, memory_bytes=int(options.memory * MIB))
    if options.timeout:
        limits = replace(limits, wall_seconds=options.timeout)
    return replace(policy, limits=limits)


def project_options(options: argparse.Namespace) -> ProjectOptions:
    return ProjectOptions(
        allow=tuple(options.allow), registries=options.allow_registries,
        review=options.review, variables=tuple(options.env), read=tuple(options.read),
        write=tuple(options.write), host_ports=tuple(options.host_port),
        credentials=tuple(map(credential_of, options.credential)),
        settings=(
            *policy_files(options.policy),
            *([os.path.expanduser(options.settings)] if options.settings else []),
        ),
    )  # fmt: skip


def _run(command: list[str], found: ProjectPolicy, options: argparse.Namespace) -> "SandboxResult":
    """Run the command at this terminal, or else at pipes; return its result."""
    at_terminal = os.isatty(_INPUT) and os.isatty(_OUTPUT)
    with audit_of(options) as audit:
        opened: list[Sandbox] = []

        def open_sandbox() -> "tuple[Sandbox, Callable[..., Program]]":
            spawned, options.spawned = options.spawned, None
            opened.append(_sandbox(found, audit, spawned))
            return opened[0], opened[0].program

        from ...sandbox.network.refused_hosts import RefusedHosts
        from ...sandbox.projects.project_run import ProjectRun

        if not at_terminal:
            with (
                _writer(_OUTPUT) as write,
                _writer(_ERRORS) as write_errors,
                contextlib.closing(
                    ProjectRun(
                        found,
                        open_sandbox,
                        command,
                        on_output=lambda _, data: write_errors(data),
                    )
                ) as run,
                contextlib.closing(RefusedHosts(opened[0].network, _say, at_once=True)),
                _signals_passed_on(run.program),
            ):
                _announce(run, options)
                _relay(run.program, write)
                return run.program.wait()
        from .terminal_relay import TerminalRelay, terminal_size

        with (
            contextlib.closing(
                ProjectRun(found, open_sandbox, command, terminal=terminal_size())
            ) as run,
            contextlib.closing(RefusedHosts(opened[0].network, _say, at_once=False)) as refused,
        ):
            _announce(run, options)
            TerminalRelay(run.program.master, refused, run.program).run()
            run.program.hang_up()  # the person's terminal may be gone, and the program goes on
            return run.program.wait()


def _announce(run: "ProjectRun", options: argparse.Namespace) -> None:
    if run.is_copy:
        _say("no overlay can be had here: the command works on a copy of the project")
    for port, place in options.expose:
        exposed = run.program.expose(port, host_port=place)
        print(f"cellwright: {exposed.url} leads to port {port} of the command", file=sys.stderr)


def _sandbox(
    found: ProjectPolicy, audit: "AuditLog | None", spawned: "Spawned | None"
) -> "Sandbox":
    """Return the sandbox of one cell. The launch begins before the modules are imported that use it."""
    from ....runner.host.shown_paths import sources_of
    from ....runner.launching.launch import LaunchArguments, begin_ahead

    policy = found.policy
    if spawned and not found.credentials:  # their variables are not made yet
        begin_ahead(spawned, LaunchArguments(policy, sources_of(policy), is_for_one_cell=True))
    from ...sandbox.projects.project_run import ONE_CELL
    from ...sandbox.sandbox import Sandbox
    from ...sandbox.sandbox_arguments import HostSettings

    host = HostSettings(spawned=spawned)
    return Sandbox(
        policy=policy, pool=ONE_CELL, audit=audit or False, host=host, credentials=found.credentials
    )


def _say(sentence: str) -> None:
    sys.stderr.write(f"cellwright: {sentence}\n")  # at once: the command writes there, too
    sys.stderr.flush()


@contextlib.contextmanager
def _writer(descriptor: int) -> Iterator[Callable[[bytes], None]]:
    """Give what writes output of programs: unchanged to a pipe or file; to a terminal, whose answers
    the next program would take for typed text, without harmful sequences."""
    if not os.isatty(descriptor):
        yield lambda data: _write(descriptor, data)
        return
    from ...text.escape_sequences import TerminalFilter

    passed = TerminalFilter()
    try:
        yield lambda data: _write(descriptor, passed.feed(data))
    finally:
        with contextlib.suppress(OSError):  # it has hung up
            _write(descriptor, passed.restore())


def _write(descriptor: int, data: bytes | memoryview) -> None:
    data = memoryview(data)
    while data:
        data = data[os.write(descriptor, data) :]


def _relay(program: "Program", write: Callable[[bytes], None]) -> None:
    """Pass standard input on to the program, and its standard output here, until that has ended."""
    threading.Thread(target=_feed, args=(program,), daemon=True).start()
    while data := os.read(program.stdout, _CHUNK):
        try:
            write(data)
        except BrokenPipeError:  # the reader has gone, and the program learns it when it writes
            program.close_stdout()
            return


def _feed(program: "Program") -> None:
    with contextlib.suppress(OSError, ValueError):
        while data := os.read(_INPUT, _CHUNK):
            _write(program.stdin, data)
    program.close_stdin()


@contextlib.contextmanager
def _signals_passed_on(program: "Program") -> Iterator[None]:
    """Send the program the signals that this process gets."""

    def send(number: int, frame: FrameType | None) -> None:
        program.send_signal(number)

    before = {number: signal.signal(number, send) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _harmless(text: str) -> str:
    from ...text.terminal_text import harmless  # most commands end without a word

    return harmless(text)


def _status(result: "SandboxResult") -> int:
    """Return the status of the command, as a shell has it; what ended it otherwise is printed."""
    if result.exit_code is not None:
        return result.exit_code
    if result.reason != "signal":
        print(f"cellwright: {_harmless(result.error or str(result.reason))}", file=sys.stderr)
    return SANDBOX_FAILED if result.signal is None else _BY_SIGNAL + result.signal
