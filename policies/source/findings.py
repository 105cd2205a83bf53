"""What a source check found, and what it looks for."""

import msgspec

BLOCKED_IMPORTS = (
    "os", "sys", "subprocess", "socket", "shutil", "pathlib", "requests", "urllib", "ctypes",
    "importlib", "builtins", "multiprocessing", "pty", "signal", "http", "ftplib", "smtplib",
)  # fmt: skip
BLOCKED_BUILTINS = (
    "exec", "eval", "compile", "open", "__import__", "globals", "locals", "breakpoint",
)  # fmt: skip


class Finding(msgspec.Struct, frozen=True):
    """One thing that a policy's author would want to know before a program runs."""

    rule: str  # import, builtin, attribute, dynamic, dunder, pattern, syntax
    what: str
    reason: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"Blocked {self.rule}: {self.what}"


class Rules(msgspec.Struct, frozen=True):
    """What is looked for.  `allowed_imports`, if any, are the only ones."""

    blocked_imports: tuple[str, ...] = BLOCKED_IMPORTS
    allowed_imports: tuple[str, ...] = ()
    blocked_builtins: tuple[str, ...] = BLOCKED_BUILTINS

    def forbids_import(self, module: str) -> bool:
        top = module.partition(".")[0]
        if self.allowed_imports:
            return module not in self.allowed_imports and top not in self.allowed_imports
        return top in self.blocked_imports or module in self.blocked_imports
