"""The host's interpreters for other languages: their paths, and the host files that they need."""

import glob
import os
import shutil
from pathlib import Path

import msgspec

from ...policies.errors import LaunchError
from ...policies.languages import LANGUAGES, interpreter_of
from ...policies.policy import lies_in
from .cache import cached
from .packages import libraries_of
from .runtime import Runtime, sonames

_PLACES = "/usr/local/bin:/usr/bin:/bin"
_ASK_SECONDS = 60
# Files that an interpreter loads besides its shared libraries, if they exist.
_BESIDES = {
    "ruby": ("/usr/lib/ruby", "/usr/lib/*/ruby", "/usr/local/lib/ruby"),
    "javascript": ("/etc/ssl/openssl.cnf", "/usr/lib/ssl/openssl.cnf", "/usr/share/nodejs"),
}


class HostInterpreter(msgspec.Struct, frozen=True):
    """`executables` are what execve(2) opens: the interpreter and its dynamic loader."""

    language: str
    path: str
    executables: tuple[str, ...]
    files: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def find_interpreter(language: str, runtime: Runtime, interpreter: str = "") -> HostInterpreter:
    """Return the interpreter of `language`, at the path `interpreter` if that is given.

    Raises LaunchError that names the missing package or the unsupported version.
    """
    path = os.path.realpath(interpreter or _look_for(language))
    try:
        stat = os.stat(path)
    except OSError as error:
        raise LaunchError(f"cannot use {interpreter} for {language}: {error.strerror}") from None
    key = f"interpreter 1 {language} {path} {stat.st_mtime_ns} {stat.st_size} {runtime}"
    return cached(key, HostInterpreter, lambda: _ask(language, path, runtime))


def _look_for(language: str) -> str:
    wanted = LANGUAGES[language]
    found = shutil.which(wanted.program, path=_PLACES)
    if found is None:
        message = f"{language} is not installed: there is no {wanted.program} in {_PLACES}"
        raise LaunchError(message, f"install the package {wanted.package}")
    return found


def _ask(language: str, path: str, runtime: Runtime) -> HostInterpreter:
    if language == "typescript":
        _require_types_stripped(path)
    wanted = _BESIDES.get(interpreter_of(language), ())
    besides = [path for each in wanted for path in glob.glob(each)]
    inside = [str(each) for place in besides for each in Path(place).rglob("*.so*")]
    libraries = libraries_of([path, *inside], runtime)
    new = [each for each in libraries if not lies_in(each, (*besides, *runtime.files))]
    links = [link for each in new for link in sonames(Path(each))]
    return HostInterpreter(
        language, path, (path, runtime.loader), (path, *besides, *new), tuple(links)
    )


def _require_types_stripped(node: str) -> None:
    """Raise LaunchError unless this node can strip types from a program."""
    import subprocess  # only if nothing is cached

    script = "console.log(process.version, typeof require('module').stripTypeScriptTypes)"
    done = subprocess.run(
        [node, "-e", script], env={}, cwd="/", stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=_ASK_SECONDS, check=False,
    )  # fmt: skip
    version, _, kind = done.stdout.strip().partition(" ")
    if kind != "function":
        found = version or done.stderr.strip()[-200:] or "of no version"
        raise LaunchError(
            f"{node} is {found}, which cannot run typescript: node 22.13 or newer is needed",
            'install it as /usr/local/bin/node; or Sandbox(interpreters={"javascript": PATH})',
        )
