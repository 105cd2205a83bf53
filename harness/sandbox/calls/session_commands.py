"""`run`: a command in the cell of a session, or in a fresh one, given by its arguments."""

import json

from ....policies.argument_checks import check_names
from ....policies.errors import PolicyError
from ....policies.languages import PYTHON
from ....policies.policy import check_limit
from ....runner.requests.result import SandboxResult, SandboxStatus
from ..parameters import CallArguments, CommandArguments
from .call_request import CommandResult, check_environment, refuse_user

_TIMED_OUT, _NOT_EXECUTABLE, _KILLED = 124, 126, 137  # timeout(1); sh(1); 128 + SIGKILL
_SUBPROCESSES = "processes.subprocesses"

# Programs that run in the cell. Each is one expression, so that no name stays in a session.
_PROGRAM = "(lambda space: (exec({text!r}, space), space['start'](**{given!r}))[1])({{}})"
_TEXT = """\
import os, signal, subprocess, sys

def start(argv, cwd, env, stdin, timeout):
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    source = subprocess.DEVNULL if stdin is None else subprocess.PIPE
    try:
        process = subprocess.Popen(
            argv, cwd=cwd, env={**os.environ, **env}, stdin=source, process_group=0
        )
    except OSError as error:
        missing = cwd if cwd and error.filename == cwd else argv[0]
        print(f"{missing}: {error.strerror}", file=sys.stderr)
        return [127 if isinstance(error, FileNotFoundError) else 126, False]
    try:
        process.communicate(stdin and stdin.encode("utf-8", "surrogateescape"), timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return [124, True]
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return [process.returncode if process.returncode >= 0 else 128 - process.returncode, False]
"""


def argv_of(given: CommandArguments) -> tuple[str, ...]:
    """Return the arguments of a command; raises PolicyError for invalid ones, and an invalid `cwd`."""
    refuse_user(given.user)
    if given.shell:
        if not isinstance(given.command, str):
            raise PolicyError(f"command: must be text with shell=True, got {given.command!r}")
        argv: tuple[str, ...] = ("/bin/sh", "-c", given.command)
    elif isinstance(given.command, str):
        raise PolicyError(
            f"command: must be a list of arguments, got {given.command!r}",
            "for a line of sh use shell=True, or ['sh', '-c', line]",
        )
    else:
        argv = check_names("command", given.command)
    if not argv or not argv[0] or any("\0" in each for each in argv):
        raise PolicyError(f"command: must name a program, without NUL, got {given.command!r}")
    if given.cwd is not None and not isinstance(given.cwd, str):
        raise PolicyError(f"cwd: must be a path in the cell, got {given.cwd!r}")
    for each in (*argv, given.cwd or ""):
        try:
            each.encode(
                errors="surrogateescape"
            )  # undecodable bytes become surrogates, as with os.fsdecode
        except UnicodeEncodeError:
            raise PolicyError(f"command: {each!r} holds a lone surrogate") from None
    return argv


def call_of(given: CommandArguments) -> CallArguments:
    """Return the call that runs a command; raises PolicyError for invalid arguments."""
    argv = argv_of(given)
    if not isinstance(given.stdin, str | bytes | None):
        raise PolicyError(f"stdin: must be text or bytes, got {given.stdin!r}")
    if given.timeout is not None:
        check_limit("timeout", given.timeout)
    arguments = {
        "argv": list(argv), "cwd": given.cwd, "env": check_environment(given.env),
        "stdin": _text(given.stdin), "timeout": given.timeout,
    }  # fmt: skip
    return CallArguments(
        code=f"# {json.dumps(argv)}\n{_PROGRAM.format(text=_TEXT, given=arguments)}",
        language=PYTHON, trace_id=given.trace_id, packages=given.packages,
    )  # fmt: skip


def _text(stdin: str | bytes | None) -> str | None:
    return stdin.decode("utf-8", "surrogateescape") if isinstance(stdin, bytes) else stdin


def command_result(result: SandboxResult) -> CommandResult:
    """Return the outcome of the command that was run as this result tells.

    Raises PolicyError if the policy allows no subprocesses, or its source checks refuse them.
    """
    if result.status is SandboxStatus.REJECTED:
        raise PolicyError(
            f"run: refused by the policy's source checks: {result.error}",
            "use a policy whose validation.mode is not enforce",
        )
    exit_code, timed_out, error = _KILLED, False, result.error or str(result.reason)
    if result.ok and isinstance(result.value, list) and len(result.value) == 2:
        return _ended(result, *result.value)
    if result.status is SandboxStatus.TIMEOUT:
        exit_code, timed_out = _TIMED_OUT, True
    return _outcome(result, exit_code, timed_out=timed_out, error=error)


def _ended(result: SandboxResult, code: object, late: object) -> CommandResult:
    if not isinstance(code, int):  # a program of the session replaced cellwright's function
        return _outcome(result, _KILLED, timed_out=False, error=f"the cell told {code!r}")
    if code == _NOT_EXECUTABLE:
        refuse_without_subprocesses("run", result)
    return _outcome(result, code, timed_out=bool(late), error=None)


def refuse_without_subprocesses(method: str, result: SandboxResult) -> None:
    """Raise PolicyError if a violation tells that the policy allows no subprocesses."""
    if any(_SUBPROCESSES in each.rule for each in result.violations):
        raise PolicyError(
            f"{method}: the policy allows no subprocesses",
            "use policy='standard', or set processes.subprocesses in yours",
        )


def _hints(result: SandboxResult, exit_code: int) -> tuple[str, ...]:
    """Return the hints of a command: its program may fail in a cell whose own program does not."""
    if not (result.ok and exit_code):
        return result.hints
    from ....policies.advice.hints import hints  # only for failures

    error = f"exit code {exit_code}"
    return hints(error, result.violations, result.usage, stderr=result.stderr)


def _outcome(
    result: SandboxResult, exit_code: int, *, timed_out: bool, error: str | None
) -> CommandResult:
    outcome = CommandResult(
        exit_code=exit_code, stdout=result.stdout, stderr=result.stderr,
        timed_out=timed_out, error=error, usage=result.usage, violations=result.violations,
        truncated=result.truncated, notices=result.notices, hints=_hints(result, exit_code),
        execution_id=result.execution_id,
    )  # fmt: skip
    if type(result) is SandboxResult:
        return outcome
    from .private import private_outcome  # seldom needed

    return private_outcome(outcome, result)
