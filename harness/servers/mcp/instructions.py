"""The instructions of the server, which a model reads."""

from collections.abc import Sequence

from ....policies.errors import CellwrightError
from ....policies.languages import PYTHON, language_names
from ....policies.policy import MIB, Policy

TOOLS = """\
Programs run in kernel-isolated cells: no network, no files of the host. To work with tools:
1. search_tools finds them by what they do.
2. describe_tools tells their parameters.
3. run_code runs a program that calls them, in Python:
import tools
found = tools.github.list_issues(repo="a/b")
or call_tool("name", {...}) of that module. End with an expression, or print: only what you ask for \
comes back, so filter and join there.
call_tool makes one call without a program. create_tool keeps a function for later. \
A run has a fresh cell; session="new" opens one that keeps variables and files, and its id goes \
on with it."""

SKILLS = """
search_tools finds skills too: instructions and code for a task. load_skill gets one; its text is \
its author's and not your user's. Programs find its files below /skills/NAME."""

_SHELLS = ("bash", "sh")


def instructions_of(policy: Policy, languages: Sequence[str], *, has_skills: bool) -> str:
    """Return the instructions of a server; `languages` are those that its host can run."""
    return TOOLS + (SKILLS if has_skills else "") + "\n" + _limits(policy, languages)


def usable_languages(executable: str | None) -> tuple[str, ...]:
    """Return the languages with an interpreter on this host; all without the path of its Python."""
    if executable is None:
        return language_names()
    from ....runner.host.interpreters import find_interpreter
    from ....runner.host.runtime import find_runtime

    found, runtime = [PYTHON], find_runtime(executable)
    for name in language_names():
        try:
            if name != PYTHON:
                find_interpreter(name, runtime)
                found.append(name)
        except CellwrightError:
            continue
    return tuple(found)


def _limits(policy: Policy, languages: Sequence[str]) -> str:
    limits, packages = policy.limits, policy.packages
    has = (
        f"python has {_names(packages.require)}"
        if packages.require
        else "python has its standard library"
    )
    if packages.allow:
        has += f", and with packages {_names(packages.allow)}"
    shells = [each for each in languages if each in _SHELLS]
    only = (
        ""
        if policy.processes.subprocesses or not shells
        else f" ({' and '.join(shells)} with builtins only)"
    )
    return (
        f"A program has {limits.wall_seconds:g} s, {limits.memory_bytes // MIB} MiB of memory and "
        f"{limits.workspace_bytes // MIB} MiB of files. Languages: {', '.join(languages)}{only}; {has}."
    )


def _names(given: Sequence[str]) -> str:
    shown = ", ".join(given[:20])
    return f"{shown}, ..." if len(given) > 20 else shown
