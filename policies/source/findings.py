"""Findings of source checks, and the rules that they follow."""

import msgspec

_PROGRAMS = "starts other programs"
_NETWORK = "reaches for a network"
_FILES = "reaches files"
_IMPORT_REASONS = {
    "os": "reaches files, programs and the environment",
    "sys": "reaches the interpreter and every loaded module",
    "subprocess": _PROGRAMS,
    "socket": _NETWORK,
    "shutil": "copies and removes trees of files",
    "pathlib": _FILES,
    "requests": _NETWORK,
    "urllib": _NETWORK,
    "ctypes": "reaches memory, past every check of Python's",
    "importlib": "imports by another way",
    "builtins": "reaches builtins by another way",
    "multiprocessing": _PROGRAMS,
    "pty": _PROGRAMS,
    "signal": "interrupts processes",
    "http": _NETWORK,
    "ftplib": _NETWORK,
    "smtplib": _NETWORK,
}
_BUILTIN_REASONS = {
    "exec": "runs text as code",
    "eval": "runs text as code",
    "compile": "makes code of text",
    "open": _FILES,
    "__import__": "imports by another way",
    "globals": "reaches names by text",
    "locals": "reaches names by text",
    "breakpoint": "starts a debugger",
}
# Names allowed to tools with a permission for files, programs or hosts.
_OF_FILES = ("os", "pathlib", "shutil", "open")
_OF_PROGRAMS = ("os", "subprocess", "multiprocessing", "pty", "signal")
_OF_HOSTS = tuple(name for name, reason in _IMPORT_REASONS.items() if reason == _NETWORK)
# Modules that equal a blocked one or do the same: `posix.system` is `os.system`.
_TWINS = {
    "posix": "os",
    "nt": "os",
    "_socket": "socket",
    "_ssl": "socket",
    "_ctypes": "ctypes",
    "_signal": "signal",
    "_posixsubprocess": "subprocess",
    "_multiprocessing": "multiprocessing",
    "_frozen_importlib": "importlib",
    "_frozen_importlib_external": "importlib",
    "_imp": "importlib",
    "imp": "importlib",
    "zipimport": "importlib",
}
# Functions of other modules that do what a blocked builtin does.
_TWINS_OF_BUILTINS = {
    "io.open": "open",
    "io.open_code": "open",
    "io.FileIO": "open",
    "_io.open": "open",
    "_io.open_code": "open",
    "_io.FileIO": "open",
    "codecs.open": "open",
    "tokenize.open": "open",
    "fileinput.input": "open",
    "fileinput.FileInput": "open",
    "timeit.timeit": "exec",
    "timeit.repeat": "exec",
    "timeit.Timer": "exec",
    "code.interact": "exec",
    "code.InteractiveConsole": "exec",
    "code.InteractiveInterpreter": "exec",
    "runpy.run_module": "exec",
    "runpy.run_path": "exec",
    "profile.run": "exec",
    "cProfile.run": "exec",
    "pdb.run": "exec",
    "marshal.loads": "exec",
    "pickle.load": "__import__",
    "pickle.loads": "__import__",
    "pickle.Unpickler": "__import__",
    "pkgutil.resolve_name": "__import__",
    "pydoc.locate": "__import__",
}
# Blocked modules whose names packages use only for them. If another module has such an attribute, it
# imported the module: `tempfile._os`, `from logging import os`.
_REACHED = frozenset(
    ["os", "sys", "subprocess", "socket", "shutil", "ctypes", "builtins", "importlib", "pathlib"]
)
_STACK = "climbs the stack"
# Attributes that lead to objects which a program was not given.
WALKS = {
    "__subclasses__": "lists every class",
    "__base__": "climbs to object",
    "__bases__": "climbs to object",
    "__mro__": "climbs to object",
    "__globals__": "reaches another module's names",
    "__builtins__": "reaches builtins by another way",
    "__self__": "reaches builtins by another way",  # print.__self__ is the module
    "__loader__": "imports by another way",
    "__spec__": "imports by another way",
    "__code__": "rewrites a function",
    "__closure__": "reads another function's names",
    "__getattribute__": "hides what is looked up",
    "__reduce_ex__": "calls what a text names",
    "f_globals": "reaches a frame's names",
    "f_locals": "reaches a frame's names",
    "f_builtins": "reaches builtins by another way",
    "f_back": _STACK,
    "gi_frame": _STACK,
    "ag_frame": _STACK,
    "cr_frame": _STACK,
    "tb_frame": _STACK,
}
BLOCKED_IMPORTS = tuple(_IMPORT_REASONS)
BLOCKED_BUILTINS = tuple(_BUILTIN_REASONS)
_BLOCKED = "is blocked by this policy"
_NOT_ALLOWED = "is not among the allowed imports of this policy"

MAX_FINDINGS = 100


class Finding(msgspec.Struct, frozen=True):
    """A use of a blocked name or construct in a source.

    `line` counts from 1, `column` from 0, in characters.
    """

    rule: str  # import, builtin, attribute, dynamic, dunder, pattern, syntax, size
    what: str
    reason: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"Blocked {self.rule}: {self.what}"


class Rules(msgspec.Struct, frozen=True):
    """The names that a check finds.  If `allowed_imports` is not empty, every other import is found."""

    blocked_imports: tuple[str, ...] = BLOCKED_IMPORTS
    allowed_imports: tuple[str, ...] = ()
    blocked_builtins: tuple[str, ...] = BLOCKED_BUILTINS

    def forbids_import(self, module: str) -> bool:
        top = module.partition(".")[0]
        if self.allowed_imports:
            return module not in self.allowed_imports and top not in self.allowed_imports
        blocked = self.blocked_imports
        return top in blocked or module in blocked or _TWINS.get(top) in blocked

    def reaches(self, origin: str) -> str:
        """Return the blocked module that `origin`, an attribute of another module, is; else ""."""
        name = origin.rpartition(".")[2].lstrip("_")
        name = _TWINS.get(name, name)
        return name if name in _REACHED and self.forbids_import(name) else ""

    def builtin_like(self, origin: str) -> str:
        """Return the blocked builtin that does the same as `origin`; else ""."""
        name = _TWINS_OF_BUILTINS.get(origin, "")
        return name if name in self.blocked_builtins else ""

    def reason_of_import(self, module: str) -> str:
        if self.allowed_imports:
            return _NOT_ALLOWED
        top = module.partition(".")[0]
        return _IMPORT_REASONS.get(_TWINS.get(top, top), _BLOCKED)


def rules_with(rules: Rules, *, files: bool, programs: bool, hosts: bool) -> Rules:
    """Return rules without the names that permissions for files, programs or hosts allow.

    Only default lists are changed: an operator wrote the others.
    """
    allowed = {
        *(_OF_FILES if files else ()),
        *(_OF_PROGRAMS if programs else ()),
        *(_OF_HOSTS if hosts else ()),
    }

    def left(names: tuple[str, ...], usual: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name not in allowed) if names == usual else names

    return msgspec.structs.replace(
        rules,
        blocked_imports=left(rules.blocked_imports, BLOCKED_IMPORTS),
        blocked_builtins=left(rules.blocked_builtins, BLOCKED_BUILTINS),
    )


def way_out(what: str) -> str:
    """Return a hint how a tool can use a blocked import or builtin; "" if it cannot."""
    name = what.partition(".")[0]
    name = _TWINS_OF_BUILTINS.get(what, _TWINS.get(name, name))
    if name in _OF_FILES:
        return "a tool that has a FilePermission may use it; pass data as arguments otherwise"
    if name in _OF_PROGRAMS:
        return "a tool that has a ProcessPermission may use it"
    if name in _OF_HOSTS:
        return (
            "a tool that has a NetworkPermission with allowed_hosts may use it; "
            "it can also call a tool of the host, named in calls"
        )
    return ""


def reason_of_builtin(name: str) -> str:
    return _BUILTIN_REASONS.get(name, _BLOCKED)
