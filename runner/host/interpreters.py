"""The host's interpreters for other languages, and the host files that they need; the shared libraries
of the host that Python packages need.
"""

import glob
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

import msgspec

from ...policies.errors import LaunchError
from ...policies.languages import (
    BUILDS,
    LANGUAGES,
    PYTHON,
    RESERVED_MIB,
    aliases_of,
    interpreter_of,
)
from ...policies.languages.table import LanguageEntry, LanguageTable
from ...policies.policy import lies_in
from .answer_cache import cached
from .runtime import Runtime, sonames

PLACES = "/usr/local/bin:/usr/bin:/bin"
_ASK_SECONDS = 60
# Files that an interpreter loads besides its shared libraries, if they exist.
_BESIDES = {
    "ruby": ("/usr/lib/ruby", "/usr/lib/*/ruby", "/usr/local/lib/ruby"),
    "javascript": ("/etc/ssl/openssl.cnf", "/usr/lib/ssl/openssl.cnf", "/usr/share/nodejs"),
}


class HostInterpreter(msgspec.Struct, frozen=True):
    """`executables` are what execve(2) opens: the interpreter and its dynamic loader.  `sources` are
    places in the cell at which other files of the host are shown."""

    language: str
    path: str
    executables: tuple[str, ...]
    files: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    sources: tuple[tuple[str, str], ...] = ()
    reserves_mib: int = RESERVED_MIB


class HostLanguage(msgspec.Struct, frozen=True):
    """A language that programs can have.  `kind` is sessions, compiled or interpreted; `package` is
    Debian's; `missing` says what to do where this host cannot run it, and is empty where it can;
    `version` is the command of the host that prints its version, if there is one."""

    name: str
    title: str
    kind: str
    package: str
    missing: str
    aliases: tuple[str, ...] = ()
    version: tuple[str, ...] = ()


def host_languages(
    table: LanguageTable, runtime: Runtime, interpreters: Mapping[str, str] = MappingProxyType({})
) -> tuple[HostLanguage, ...]:
    """Return the languages with sessions and those of the table, with what this host lacks for them;
    `interpreters` are paths of other interpreters than those of the host's directories."""
    python = HostLanguage(
        PYTHON, "Python", "sessions", "python3", "", aliases_of(PYTHON), (runtime.executable, "-V")
    )
    spoken = [_with_sessions(each, runtime, interpreters) for each in LANGUAGES]
    return (python, *spoken, *map(_of_table, table))


def _with_sessions(name: str, runtime: Runtime, interpreters: Mapping[str, str]) -> HostLanguage:
    language, version, missing = LANGUAGES[name], tuple[str, ...](), ""
    try:
        found = find_interpreter(name, runtime, interpreters.get(interpreter_of(name), ""))
        version = (found.path, "--version") if name != "sh" else ()  # dash has no such option
    except LaunchError as error:
        missing = error.hint or error.what
    return HostLanguage(
        name, language.title, "sessions", language.package, missing, aliases_of(name), version
    )


def _of_table(entry: LanguageEntry) -> HostLanguage:
    missing = ""
    try:
        for name in entry.programs():
            program_of(entry, name)
    except LaunchError as error:
        missing = error.hint
    kind = "compiled" if entry.is_compiled else "interpreted"
    version = () if missing else entry.version
    return HostLanguage(
        entry.name, entry.title, kind, entry.package, missing, entry.aliases, version
    )


def find_interpreter(language: str, runtime: Runtime, interpreter: str = "") -> HostInterpreter:
    """Return the interpreter of `language`, at the path `interpreter` if that is given.

    Raises LaunchError that names the missing package or the unsupported version.
    """
    path = os.path.realpath(interpreter or _look_for(language))
    try:
        stat = os.stat(path)
    except OSError as error:
        raise LaunchError(f"cannot use {interpreter} for {language}: {error.strerror}") from None
    key = f"interpreter 2 {language} {path} {stat.st_mtime_ns} {stat.st_size} {runtime}"
    found = cached(key, HostInterpreter, lambda: _ask(language, path, runtime))
    return msgspec.structs.replace(found, reserves_mib=LANGUAGES[language].reserves_mib)


def find_runner(entry: LanguageEntry, runtime: Runtime, builds: str) -> HostInterpreter:
    """Return what runs the programs of a language of the table: its interpreter, or for those that are
    compiled to machine code the directory `builds` of the host, which cells see at /builds.

    Raises LaunchError that names the missing package.
    """
    is_native = "{build}" in entry.run[0]
    path = BUILDS if is_native else os.path.realpath(program_of(entry, entry.run[0]))
    stat = None if is_native else os.stat(path)
    key = f"runner 2 {entry} {path} {stat and (stat.st_mtime_ns, stat.st_size)} {runtime}"
    found = cached(key, HostInterpreter, lambda: _ask_for_table(entry, path, runtime))
    shown = {"files": (*found.files, BUILDS), "sources": ((BUILDS, builds),)}
    return msgspec.structs.replace(
        found, reserves_mib=entry.reserves_mib, **(shown if entry.is_compiled else {})
    )


def program_of(entry: LanguageEntry, name: str) -> str:
    """Return the path of a program of the host; raises LaunchError that names the missing package."""
    found = shutil.which(name, path=PLACES)
    if found is None:
        message = f"{entry.title} is not installed: there is no {name} in {PLACES}"
        raise LaunchError(message, f"install the package {entry.package}")
    return found


def _look_for(language: str) -> str:
    wanted = LANGUAGES[language]
    found = shutil.which(wanted.program, path=PLACES)
    if found is None:
        message = f"{language} is not installed: there is no {wanted.program} in {PLACES}"
        raise LaunchError(message, f"install the package {wanted.package}")
    return found


def _ask_for_table(entry: LanguageEntry, path: str, runtime: Runtime) -> HostInterpreter:
    shown = (*entry.shows, *entry.libraries)
    besides = tuple(path for each in shown for path in glob.glob(each))
    program = () if path == BUILDS else (path,)
    return _with_libraries(entry.name, path, program, besides, runtime)


def _ask(language: str, path: str, runtime: Runtime) -> HostInterpreter:
    if language == "typescript":
        _require_types_stripped(path)
    wanted = _BESIDES.get(interpreter_of(language), ())
    besides = tuple(path for each in wanted for path in glob.glob(each))
    return _with_libraries(language, path, (path,), besides, runtime)


def _with_libraries(
    language: str, path: str, program: tuple[str, ...], besides: tuple[str, ...], runtime: Runtime
) -> HostInterpreter:
    inside = [str(each) for place in besides for each in _libraries_in(place)]
    named = named_libraries([*program, *inside], runtime)
    new = [
        each for each in sorted({*named.values()}) if not lies_in(each, (*besides, *runtime.files))
    ]
    links = [link for each in (*new, *besides) for link in sonames(Path(each)) if ".so" in each]
    links += [(name, path) for name, path in named.items() if path in new and name != path]
    return HostInterpreter(
        language, path, (path, runtime.loader), (*program, *besides, *new), tuple(links)
    )


def _libraries_in(place: str) -> list[Path]:
    found = Path(place)
    return [*found.rglob("*.so*")] if found.is_dir() else [found] if ".so" in place else []


def _require_types_stripped(node: str) -> None:
    stat = os.stat(node)
    key = f"types {node} {stat.st_mtime_ns} {stat.st_size}"
    if found := cached(key, str, lambda: _version_without_types(node)):
        raise LaunchError(
            f"{node} is {found}, which cannot run typescript: node 22.13 or newer is needed",
            'install it as /usr/local/bin/node; or HostSettings(interpreters={"javascript": PATH})',
        )


def _version_without_types(node: str) -> str:
    """Return the version of a node that cannot strip types from a program; empty if it can."""
    script = "console.log(process.version, typeof require('module').stripTypeScriptTypes)"
    done = _ask_node(node, script)
    version, _, kind = done.stdout.strip().partition(" ")
    if kind == "function":
        return ""
    return version or done.stderr.strip()[-200:] or "of no version"


def why_no_node_option(interpreter: HostInterpreter | None) -> str:
    """Return why node refuses the option that runtimes.toml has for it: the interpreter if it is one,
    else the host's. Empty if it takes the option, or is not installed."""
    is_node = interpreter and interpreter_of(interpreter.language) == "javascript"
    node = interpreter.path if interpreter and is_node else shutil.which("node", path=PLACES)
    if node is None or not os.path.exists(node):  # an image has its own
        return ""
    stat = os.stat(node)
    key = f"node option {node} {stat.st_mtime_ns} {stat.st_size}"
    return cached(key, str, lambda: _refusal_of_option(node))


def _refusal_of_option(node: str) -> str:
    done = _ask_node(node, "", {"NODE_OPTIONS": "--disable-wasm-trap-handler"})
    return (done.stderr.strip()[-200:] or "it fails") if done.returncode else ""


def _ask_node(
    node: str, script: str, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [node, "-e", script], env=environment, cwd="/", stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=_ASK_SECONDS, check=False,
    )  # fmt: skip


# Shared libraries of the host that Python packages need beyond the interpreter's own: a wheel
# brings most of its libraries, but not, for example, libstdc++.
_FOUND = re.compile(r"=> (/\S+) \(")
_SECONDS = 60
_NAME = re.compile(r"[\w.+-]{1,255}", re.ASCII)
_MOST_WANTED = 400  # names, which travel in one variable of at most 128 KiB (MAX_ARG_STRLEN)
_SITE = re.compile(r"/lib/python3\.\d+/site-packages/?$")  # site-packages of a virtual environment
_UP_TO_LIB = ("..", "..")
_NONE: Mapping[str, str] = MappingProxyType({})
FONT_LISTS = "__fonts__"  # subdirectory of a package set whose files each cell sees in /tmp
_FONT_LIST = re.compile(r"fontlist-v[\w.]{1,50}\.json", re.ASCII)  # matplotlib's list of fonts
_MPLCONFIGDIR = "/tmp"  # noqa: S108 - of cells, as the plan has it


class _Needed(msgspec.Struct, frozen=True):
    files: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def with_packages(runtime: Runtime, directories: tuple[str, ...]) -> Runtime:
    """Return `runtime` with the libraries of the packages in `directories`, and without hidden
    ones.

    Raises LaunchError if a directory does not exist.
    """
    if not directories:
        return runtime
    files, links = runtime.files, runtime.links
    for directory in directories:
        needed = _needed(directory, runtime)
        files, links = (*files, *needed.files), (*links, *needed.links, *_font_lists(directory))
    return Runtime(
        executable=runtime.executable,
        files=tuple(dict.fromkeys(files)),
        links=tuple(dict.fromkeys(links)),
        hidden=tuple(path for path in runtime.hidden if not lies_in(path, directories)),
        programs=runtime.programs,
    )


def is_font_list(name: str) -> bool:
    """Tell whether a file of that name is matplotlib's list of fonts."""
    return _FONT_LIST.fullmatch(name) is not None


def _font_lists(directory: str) -> tuple[tuple[str, str], ...]:
    """Return where matplotlib looks for its list of fonts, and where the packages have it."""
    place = os.path.join(directory, FONT_LISTS)
    names = os.listdir(place) if os.path.isdir(place) else []
    return tuple(
        (os.path.join(_MPLCONFIGDIR, name), os.path.join(place, name))
        for name in names if is_font_list(name)
    )  # fmt: skip


def _needed(directory: str, runtime: Runtime) -> _Needed:
    try:
        stat = os.stat(os.path.join(directory, "."))
    except OSError as error:
        raise LaunchError(f"python.path: {directory}: {error.strerror}") from None
    key = f"packages 2 {directory} {stat.st_mtime_ns} {runtime}"  # changed by installations
    return cached(key, _Needed, lambda: _ask_loader(directory, runtime))


def _ask_loader(directory: str, runtime: Runtime) -> _Needed:
    """Read the names of libraries that those below `directory` need. The loader is not asked,
    because these files may be hostile."""
    names = _wanted(directory)
    shown = (directory, *runtime.files)
    found = [path for path in names.values() if path]
    found += _found_by(runtime, sorted(name for name, path in names.items() if not path))
    new = [path for path in dict.fromkeys(found) if not lies_in(path, shown)]
    return _Needed(tuple(new), tuple(link for path in new for link in sonames(Path(path))))


def _wanted(directory: str) -> dict[str, str]:
    """Return the names of the libraries that are needed from elsewhere; for those in the `lib` of an
    environment that has `directory` as its site-packages, with their paths."""
    inside = [path for path in Path(directory).rglob("*.so*") if path.is_file()]
    own = {path.name for path in inside}
    lib = os.path.realpath(os.path.join(directory, *_UP_TO_LIB)) if _SITE.search(directory) else ""
    waiting, wanted = [*inside], dict[str, str]()
    while waiting:
        needs = needs_of(waiting.pop())
        for name in {name for name in needs.names if _NAME.fullmatch(name)} - own - wanted.keys():
            path = os.path.realpath(os.path.join(lib, name)) if lib in needs.directories else ""
            wanted[name] = path if path and lies_in(path, (lib,)) and os.path.isfile(path) else ""
            if wanted[name]:
                waiting.append(Path(path))
        if len(wanted) > _MOST_WANTED:
            raise LaunchError(
                f"python.path: the libraries in {directory} need more than {_MOST_WANTED} others"
            )
    return wanted


def _found_by(runtime: Runtime, names: list[str]) -> list[str]:
    """Ask the dynamic loader where libraries of these names are, and what those need."""
    found = _listed_by(runtime.loader, runtime.executable, {"LD_PRELOAD": ":".join(names)})
    return sorted({os.path.realpath(path) for path in found}) if names else []


def named_libraries(programs: list[str], runtime: Runtime) -> dict[str, str]:
    """Return the files that the dynamic loader would map for `programs`, without the programs, by the
    paths at which it looks for them, some of which are links."""
    needed = {path for program in programs for path in _listed_by(runtime.loader, program)}
    return {path: os.path.realpath(path) for path in sorted(needed)}


def _listed_by(loader: str, library: str, variables: Mapping[str, str] = _NONE) -> list[str]:
    """Ask the dynamic loader what `library` needs, without executing its code (ld.so(8))."""
    done = subprocess.run(
        [loader, "--list", library],
        env=variables, capture_output=True, text=True, timeout=_SECONDS, check=False,
    )  # fmt: skip
    return _FOUND.findall(done.stdout)


# The needs of a shared library, read from its file (elf(5)) without loading it. The file may be
# hostile: its numbers are checked, and a malformed file needs nothing.
_MOST_HEADERS = 128
_MOST_DYNAMIC = 64 * 1024
_MOST_STRINGS = 16 * 1024 * 1024
_MOST_NAME = 4096
_LOAD, _DYNAMIC = 1, 2  # PT_*
_NEEDED, _STRTAB, _STRSZ, _RPATH, _RUNPATH = 1, 5, 10, 15, 29  # DT_*
_HEADER, _SEGMENT, _ENTRY = (
    struct.Struct("<16s16xQ14xHH"),
    struct.Struct("<IIQQ8xQ"),
    struct.Struct("<QQ"),
)
_NOTHING: tuple[tuple[str, ...], tuple[str, ...]] = (), ()


class _Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    address: int
    size: int


class Needs(NamedTuple):
    """The names of libraries that a library needs, and where it says that they are."""

    names: tuple[str, ...]
    directories: tuple[str, ...]


def needs_of(path: str | os.PathLike[str]) -> Needs:
    """Return the names of libraries that the 64-bit little-endian library at `path` needs; none if
    it is another kind of file."""
    try:
        with open(path, "rb") as file:
            return Needs(*_read(file, os.path.dirname(os.fspath(path))))
    except (OSError, ValueError, struct.error, UnicodeDecodeError):
        return Needs((), ())


def _read(file: BinaryIO, origin: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    ident, table, size, count = _HEADER.unpack(file.read(_HEADER.size))
    if ident[:6] != b"\x7fELF\2\1" or size != 56 or count > _MOST_HEADERS:
        return _NOTHING
    headers = _at(file, table, size * count)
    segments = [
        _Segment(*_SEGMENT.unpack_from(headers, start)) for start in range(0, len(headers), size)
    ]
    dynamic = next((each for each in segments if each.kind == _DYNAMIC), None)
    if dynamic is None:
        return _NOTHING
    entries = list(
        _ENTRY.iter_unpack(_at(file, dynamic.offset, min(dynamic.size, _MOST_DYNAMIC) & ~15))
    )
    told = dict(entries)
    if _STRTAB not in told:
        return _NOTHING
    strings = _at(
        file, _offset_of(told[_STRTAB], segments), min(told.get(_STRSZ, 0), _MOST_STRINGS)
    )

    def named(*tags: int) -> list[str]:
        starts = [value for tag, value in entries if tag in tags]
        texts = (strings[start : start + _MOST_NAME].partition(b"\0") for start in starts)
        return [text.decode() for text, end, _ in texts if end]

    places = [place for each in named(_RPATH, _RUNPATH) for place in each.split(":") if place]
    expanded = [place.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for place in places]
    return tuple(named(_NEEDED)), tuple(map(os.path.normpath, expanded))


def _offset_of(address: int, segments: list[_Segment]) -> int:
    for each in segments:
        if each.kind == _LOAD and each.address <= address < each.address + each.size:
            return address - each.address + each.offset
    raise ValueError(address)


def _at(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)
