"""Interpreters of the host for other languages: where they are, and what of the host they need."""

import glob
import os
import shutil
from pathlib import Path

import msgspec

from ..policies.errors import LaunchError
from ..policies.languages import LANGUAGES
from ..policies.policy import lies_in
from .cache import cached
from .packages import libraries_of
from .runtime import Runtime, sonames

_PLACES = "/usr/local/bin:/usr/bin:/bin"
# What an interpreter loads besides its shared libraries, where it exists.
_BESIDES = {
    "ruby": ("/usr/lib/ruby", "/usr/lib/*/ruby", "/usr/local/lib/ruby"),
    "javascript": ("/etc/ssl/openssl.cnf", "/usr/lib/ssl/openssl.cnf", "/usr/share/nodejs"),
}


class Program(msgspec.Struct, frozen=True):
    """`executables` are what execve(2) opens: the program and its dynamic loader."""

    language: str
    path: str
    executables: tuple[str, ...]
    files: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def find_program(language: str, runtime: Runtime) -> Program:
    """Return the interpreter of `language`; raises LaunchError naming what to install."""
    wanted = LANGUAGES[language]
    found = shutil.which(wanted.program, path=_PLACES)
    if found is None:
        message = f"{language} is not installed: there is no {wanted.program} in {_PLACES}"
        raise LaunchError(message, f"install the package {wanted.package}")
    path = os.path.realpath(found)
    stat = os.stat(path)
    key = f"program 3 {language} {path} {stat.st_mtime_ns} {stat.st_size} {runtime}"
    return cached(key, Program, lambda: _ask(language, path, runtime))


def _ask(language: str, path: str, runtime: Runtime) -> Program:
    besides = [path for each in _BESIDES.get(language, ()) for path in glob.glob(each)]
    inside = [str(each) for place in besides for each in Path(place).rglob("*.so*")]
    libraries = libraries_of([path, *inside], runtime)
    new = [each for each in libraries if not lies_in(each, (*besides, *runtime.files))]
    links = [link for each in new for link in sonames(Path(each))]
    return Program(language, path, (path, runtime.loader), (path, *besides, *new), tuple(links))
