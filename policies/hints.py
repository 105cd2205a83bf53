"""Hints: what a person can do after an attempt was refused, an import failed, or a limit was
reached.  Pure.

They are made from the words of the guest, which may lie: a hint is text for people, and nothing is
decided by it.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Protocol

_NOT_HERE = ("mount_ns: not shown", "landlock: not writable")  # watching/shown.py
_HOST_PERMISSIONS = "host permissions: "  # so do the rules of watching/shown.py begin
_SAID = 4000  # characters of standard error that are read
_SHELLS = ("bash", "sh", "dash")
_NO_NETWORK = re.compile(
    r"ENETUNREACH|ENOTFOUND|EAI_AGAIN|Network is unreachable|[Nn]ame resolution"
    r"|Name or service not known"
)
_NO_PYTHON_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]{1,100})'")
_NO_MODULE = re.compile(  # in Node, in Ruby
    r"Error: Cannot find module '([\w@./-]{1,100})'"
    r"|LoadError: cannot load such file -- ([\w./-]{1,100})"
)
_NO_FILE = re.compile(  # of a relative name, in Python, Node, Ruby
    r"FileNotFoundError: .*No such file or directory: '([^/'\n][^'\n]{0,200})'"
    r"|ENOENT: no such file or directory, open '([^/'\n][^'\n]{0,200})'"
    r"|No such file or directory @ rb_sysopen - ([^/\n][^\n]{0,200})"
)
_READ_ONLY = re.compile(  # in Python, Node, Ruby; of a path and a new path the second is the place
    r"[Rr]ead-only file system(?:: |, \w{1,20} | @ \w{1,30} - )\(?'?"
    r"(?:[^'\n]{1,4096}' -> ')?([^'\n]{1,4096})"
)
_FULL = re.compile(  # in Python, Ruby, Node, and tools of a shell
    r"\[Errno 2[78]\] |Errno::E(?:FBIG|NOSPC): |\bE(?:FBIG|NOSPC): "
    r"|File too large$|No space left on device$", re.MULTILINE,
)  # fmt: skip
_NO_PROCESS = re.compile(  # where no cgroup counts
    r"RuntimeError: can't start new thread|\bfork: (?:retry: )?Resource temporarily unavailable"
)
_NO_HEADER = re.compile(r"fatal error: ([\w./+-]{1,200}): No such file or directory")
_NO_COMMAND = re.compile(  # in bash, sh, env(1), make, and for a child of Python
    r"(?:^|[ :])([\w.+-]{1,100}): (?:command )?not found$"
    r"|env: \W([\w.+-]{1,100})\W: No such file|make: ([\w.+-]{1,100}): No such file"
    r"|_execute_child[\s\S]{0,2000}FileNotFoundError: .*: '([\w.+-]{1,100})'", re.MULTILINE,
)  # fmt: skip
_NOT_EXECUTABLE = re.compile(
    r"(?:^|[ :])(/[^:'\n]{1,4096}): Permission denied$"
    r"|_execute_child[\s\S]{0,2000}PermissionError: .*: '(/[^'\n]{1,4096})'", re.MULTILINE,
)  # fmt: skip
_CHILD = "_execute_child"  # of subprocess, in a traceback
_CANNOT_EXECUTE = "exit code 126"  # sh(1)
_NO_GLYPH = re.compile(r"Glyph \d+ .{0,200} missing from (?:current )?font")
_INSTALLERS = ("apt", "apt-get", "dnf", "apk", "brew", "npm", "conda")
_PIP = ("pip", "pip3")
_NO_INPUT = "EOFError: EOF when reading a line"
# Modules whose packages have other names; any other name is tried as it is.
_PACKAGES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "fitz": "pymupdf",
    "pptx": "python-pptx",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
_MEMORY = (
    "memory was at its limit, which counts the files of /workspace and /tmp too: limits.memory_bytes "
    "of the policy is higher with --memory (max_memory_mb=)"
)
_PROCESSES = (
    "the program reached limits.processes of the policy, which counts its threads, and two processes "
    "of the cell: start fewer at once, or set it higher in your policy (max_processes=)"
)
_NO_INSTALL = (
    "programs install no packages, since a cell reaches no index: ask for packages by name with "
    "--packages NAME (packages=)"
)
_SUBPROCESSES = (
    "to start other programs use the profile standard (--policy standard), or set "
    "processes.subprocesses = true in your policy"
)
_SHELL = f"a shell without subprocesses has its builtins only; {_SUBPROCESSES}"
_THREADS = "to start threads set processes.threads = true in your policy"
_TERMINAL = (
    "to open a terminal use session.terminal() with the profile workshop, or set "
    "processes.terminal = true in your policy"
)
_NETWORK = "a cell has no network but the hosts that network.allow of its policy names"
_LOOPBACK = (
    f"{_NETWORK}; programs in the same cell connect to each other with --policy standard, or with "
    "network.loopback = true in your policy"
)
_UNIX_SOCKETS = (
    "beside directories of the host programs make no Unix sockets, which would reach the host's: set "
    'syscalls.groups = ["unix_sockets"] in your policy if they may'
)
_CELLS_OWN = (
    "localhost is the cell itself: name the host that cellwright runs on by another name, with its "
    "address in addresses of the rule in network.allow"
)
_NOT_TLS = (
    'a rule in network.allow means TLS, except on port 80: add schemes = ["http"] to it, or ["tcp"] '
    "for any bytes"
)
_IS_TLS = 'to allow TLS add "https" to schemes of the rule in network.allow'

_NAME = "to let programs reach "


class Refused(Protocol):
    """A refused attempt, `runner.result.Violation`."""

    @property
    def arguments(self) -> tuple[str, ...]: ...
    @property
    def rule(self) -> str: ...
    @property
    def process(self) -> str: ...


class Used(Protocol):
    """What limits a program reached, `runner.result.Usage`."""

    @property
    def killed_for_memory(self) -> int: ...
    @property
    def memory_limit_reached(self) -> bool: ...
    @property
    def forks_refused(self) -> int: ...


def hints(
    error: str | None, refused: Iterable[Refused], used: Used | None = None,
    *, timed_out: bool = False, stderr: str = "",
) -> tuple[str, ...]:  # fmt: skip
    """Return the hints for a program that ended with `error` and had these attempts refused; what a
    command says is at the end of its `stderr`."""
    said = f"{error or ''}\n{stderr[-_SAID:]}"
    found = [
        *_of_limits(said, used, timed_out=timed_out),
        *_of_error(error or "", starts_child=_CHILD in stderr),
    ]
    if stderr:
        found += _of_command(error or "", stderr[-_SAID:])
    for each in refused:
        found += _of_refusal(each, said)
    if any(hint.startswith(_NAME) for hint in found):
        found = [hint for hint in found if hint != _NETWORK]
    if _LOOPBACK in found:
        found = [hint for hint in found if hint != _NETWORK]
    return tuple(dict.fromkeys(found))


def _of_limits(error: str, used: Used | None, *, timed_out: bool) -> Iterator[str]:
    """Yield the hints about limits.  A program at its memory limit waits for memory that the kernel
    reclaims, until its time is up."""
    if used and (used.killed_for_memory or (timed_out and used.memory_limit_reached)):
        yield _MEMORY
    if (used and used.forks_refused) or _NO_PROCESS.search(error):
        yield _PROCESSES


def _of_error(error: str, *, starts_child: bool) -> Iterator[str]:
    if found := _NO_PYTHON_MODULE.search(error):
        yield missing_module(found[1])
    if found := _NO_MODULE.search(error):
        yield f"the cell has no {found[1] or found[2]}: pass its files with --file (files=)"
    if not starts_child and (found := _NO_FILE.search(error)):
        name = found[1] or found[2] or found[3]
        yield f"/workspace has only the files that you pass: pass {name} with --file (files=)"
    if found := _READ_ONLY.search(error):
        yield _not_writable(found[1])
    if _NO_NETWORK.search(error):
        yield _NETWORK
    if _FULL.search(error):
        yield (
            "files in /workspace, and again in /tmp, have limits.workspace_bytes of the policy, and "
            "their number has limits.workspace_inodes: set these higher in your policy"
        )
    if error.startswith(_NO_INPUT):
        yield (
            "a program has no standard input but the one that you pass: pass a file with --stdin "
            "FILE, or that of the command with --stdin - (stdin=)"
        )


def _of_command(error: str, stderr: str) -> Iterator[str]:
    """Yield the hints about commands: their messages are not those of a language."""
    if found := _NO_HEADER.search(stderr):
        yield (
            f"the cell does not show {found[1]}: name the directory of its headers, such as "
            "/usr/include, in filesystem.read of your policy"
        )
    if found := _NO_COMMAND.search(stderr):
        yield _missing_command(next(filter(None, found.groups())))
    is_refused = error == _CANNOT_EXECUTE or _CHILD in stderr
    if is_refused and (found := _NOT_EXECUTABLE.search(stderr)):
        yield (
            f"files below filesystem.read are shown for reading only: name {found[1] or found[2]}, or "
            "its directory, in processes.execute of your policy"
        )
    if _NO_GLYPH.search(stderr):
        yield (
            "no font of matplotlib has these characters: pass one with --file (files=), then "
            "matplotlib.font_manager.fontManager.addfont(path) and rcParams['font.family']"
        )


def _missing_command(name: str) -> str:
    if name in _PIP:
        return _NO_INSTALL
    if name in _INSTALLERS:
        return f"{name} is not there: a cell installs nothing; install it on the host, or show an image"
    return (
        f"the cell has no {name}: it has programs of the host that lie below processes.execute of the "
        "policy; install it there, or name its directory in that field"
    )


def missing_module(name: str) -> str:
    """Return the hint for a Python program that imports the module `name`, which its cell lacks."""
    top = name.partition(".")[0]
    if top in _PIP:
        return _NO_INSTALL
    package = _PACKAGES.get(top, top.replace("_", "-"))
    return (
        f"the cell has the standard library, and no {name}: ask for its package with --packages "
        f"{package} (packages=), or pass a file of your own with --file (files=)"
    )


def missed_module(error: str) -> str:
    """Return the name of the module whose import failed with `error` in Python; empty for others."""
    found = _NO_PYTHON_MODULE.search(error)
    return found[1] if found else ""


def _of_refusal(refused: Refused, error: str) -> Iterator[str]:
    if "processes.subprocesses" in refused.rule and "network.loopback" not in refused.rule:
        yield _SHELL if refused.process.partition(" ")[0] in _SHELLS else _SUBPROCESSES
    if "processes.threads" in refused.rule:
        yield _THREADS
    if "processes.terminal" in refused.rule:
        yield _TERMINAL
    if "network.loopback" in refused.rule:
        yield _LOOPBACK
    if (
        "unix_sockets" in refused.rule and "not permitted" in error
    ):  # glibc looks for nscd by itself
        yield _UNIX_SOCKETS
    if refused.rule.startswith("network: "):
        yield from _of_network(refused)
    path = refused.arguments[0].strip("'") if refused.arguments else ""
    if path not in error or not path.startswith("/"):
        return
    if refused.rule in _NOT_HERE and "RDONLY" not in refused.arguments[-1]:
        yield _not_writable(path)
    elif refused.rule in _NOT_HERE:
        yield (
            f"the cell does not show {path}: pass a copy with --file (files=), or name the path in "
            "filesystem.read of your policy"
        )
    elif refused.rule.startswith(_HOST_PERMISSIONS):
        yield _not_permitted(path, is_read="RDONLY" in refused.arguments[-1])


def _not_writable(path: str) -> str:
    return (
        f"the cell does not let programs write {path}: write below /workspace and bring the file back "
        f"with --collect (collect=), or name {path} or its directory in filesystem.write of your policy"
    )


def _not_permitted(path: str, *, is_read: bool) -> str:
    want, instead = (
        ("read", "pass a copy with --file (files=)") if is_read
        else ("write", "write below /workspace and bring the file back with --collect (collect=)")
    )  # fmt: skip
    return (
        f"the mode of {path}, or of a directory above it, keeps out the id that cells of root have: "
        f"chmod or chown it so that others may {want}, run cellwright as its owner, or {instead}"
    )


def _of_network(refused: Refused) -> Iterator[str]:
    what = refused.rule.removeprefix("network: ")
    name = refused.arguments[0] if refused.arguments else "it"
    if what == "TLS, which no rule allows":
        yield _IS_TLS
    elif what == "not TLS":
        yield _NOT_TLS
    elif what == "the address stands for no name" and name.startswith("127."):
        yield _CELLS_OWN
    elif "no rule allows" in what:
        yield f"{_NAME}{name} name it in network.allow of your policy"
    elif "no rule names its network" in what:
        yield (
            f"to let {name} have addresses that are not public name their networks in addresses of its "
            "rule in network.allow"
        )
