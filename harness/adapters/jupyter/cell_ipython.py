"""The cell's part of IPython: its shell, with shell lines and magics.

The text of this module is executed in the cell (notebook_session.py), so it imports nothing of
cellwright.  `get_ipython()` is a shell with IPython's methods; its commands are processes of the cell.
"""

import ast
import builtins
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

_MOST_LINES = 300
_LINE = re.compile(
    r"(?P<indent>\s*)(?P<target>[\w.\[\], ]+=\s*)?(?:(?P<shell>!+)(?P<command>.*)"
    r"|%(?P<magic>\w+)(?P<rest>.*)"
    r"|(?P<pip>(?:(?:python3? -m )?pip3?|conda) install\b.*)"
    r"|(?P<cd>cd [^=(].*)"
    r"|\?{1,2}(?P<before>[\w.]+)|(?P<after>[\w.]+)\?{1,2})\s*$"
)
_CELL_MAGIC = re.compile(r"%%(?P<magic>\w+!?)[ \t]*(?P<rest>.*)$")
_PIP = re.compile(
    r"\s*(?:python3? -m |uv )?(?P<tool>pip3?|conda|mamba)(?: install| add)\b(?P<names>.*)$"
)
_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*(?:[<>=!~].*)?$")
_VARIABLE = re.compile(r"\{([^{}]+)\}|\$(\w+)")
_WITH_VALUE = ("-c", "-f", "-i", "-n", "--extra-index-url", "--find-links", "--index-url")
_WITHOUT_EFFECT = (
    "autoreload", "colors", "config", "load_ext", "matplotlib", "precision", "pylab", "reload_ext",
    "xmode",
)  # fmt: skip
_COMMANDS = ("cat", "cp", "head", "ls", "mkdir", "mv", "rm", "rmdir", "tail")
_SCRIPTS = ("bash", "perl", "python", "python2", "python3", "ruby", "sh")
_NO_SHELL = "the policy lets programs start no processes: use Python instead of {}"


class UsageError(Exception):
    """A command of IPython that does not exist, or has wrong arguments; IPython's own name."""

    __module__ = "builtins"  # so that a traceback names only the class


class PackageMissingError(ImportError):
    """A package that is not installed: a program installs nothing."""

    __module__ = "builtins"


def transform(code: str) -> str:
    """Return a program of IPython as Python, line by line; a program that is Python stays as it is."""
    lines = code.split("\n")
    first = next((at for at, line in enumerate(lines) if line.strip()), 0)
    if found := _CELL_MAGIC.match(lines[first]):
        given = found["magic"], found["rest"].strip(), "\n".join(lines[first + 1 :])
        return "\n" * first + "get_ipython().run_cell_magic({!r}, {!r}, {!r})".format(*given)
    for _ in range(_MOST_LINES):
        at = _line_of_error("\n".join(lines))
        if at is None or at >= len(lines) or not _translate(lines, at):
            break
    return "\n".join(lines)


def _line_of_error(code: str) -> int | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        return (error.lineno or 1) - 1
    except (ValueError, RecursionError, MemoryError):
        return None
    return None


def _translate(lines: list[str], at: int) -> bool:
    """Translate a command of IPython that begins in one line; tell whether it was one."""
    last = at
    while lines[last].endswith("\\") and last + 1 < len(lines):
        last += 1
    text = " ".join(line.removesuffix("\\") for line in lines[at : last + 1])
    found = _LINE.match(text)
    if found is None:
        return False
    lines[at] = f"{found['indent']}{found['target'] or ''}{_call_of(found)}"
    lines[at + 1 : last + 1] = [""] * (last - at)
    return True


def _call_of(found: "re.Match[str]") -> str:
    shell = "get_ipython()"
    if found["shell"]:
        is_read = found["target"] or len(found["shell"]) > 1
        return f"{shell}.{'getoutput' if is_read else 'system'}({found['command'].strip()!r})"
    if found["pip"]:
        return f"{shell}.system({found['pip']!r})"
    magic, rest = found["magic"], found["rest"] or ""
    if found["cd"]:
        magic, rest = "cd", found["cd"][3:]
    if name := found["before"] or found["after"]:
        magic, rest = "pinfo", name
    return f"{shell}.run_line_magic({magic!r}, {rest.strip()!r})"


class _Events:
    def register(self, *_: object) -> None:
        """Ignore a function that IPython would call."""

    unregister = trigger = register


class CellShell:
    """The result of `get_ipython()`: the methods of IPython's shell that programs use."""

    def __init__(self, main: dict[str, Any], display: Callable[..., object]) -> None:
        self.user_ns = main
        self.config: dict[str, object] = {}
        self.events = _Events()
        self._display = display
        self._previous = os.getcwd()

    def enable_gui(self, *_: object) -> None:
        """Do nothing: there are no windows."""

    def system(self, command: str) -> None:
        """Run a command line as `!command`; its exit code is in `_exit_code`."""
        self.user_ns["_exit_code"] = self._run(command, None).returncode

    def getoutput(self, command: str, *_: object, **__: object) -> list[str]:
        """Run a command line and return the lines of its output."""
        return str(self._run(command, subprocess.PIPE).stdout).splitlines()

    def _run(self, command: str, stdout: int | None) -> "subprocess.CompletedProcess[str]":
        command = self._filled(command)
        if (found := _PIP.match(command)) and "-t " not in command and "--target" not in command:
            _install(found["tool"], found["names"])
            return subprocess.CompletedProcess(command, 0, "")
        return _started(["/bin/bash", "-c", command], command, stdout=stdout)

    def _filled(self, command: str) -> str:
        def value(found: "re.Match[str]") -> str:
            name = found[1] or found[2]
            if found[2] and name not in self.user_ns:
                return found[0]
            try:
                return str(eval(name, self.user_ns))  # noqa: S307 - the program's own
            except Exception:  # noqa: BLE001 - braces of the shell
                return found[0]

        return _VARIABLE.sub(value, command)

    def ev(self, expression: str) -> object:
        """Return the value of an expression."""
        return eval(expression, self.user_ns)  # noqa: S307 - the program's own

    def run_cell(self, code: str, *_: object, **__: object) -> object:
        """Execute a program of IPython and return the value of its last expression."""
        tree = ast.parse(transform(code))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<magic>", "exec"), self.user_ns)  # noqa: S102 - the program's own
        if not isinstance(last, ast.Expr):
            return None
        return eval(compile(ast.Expression(last.value), "<magic>", "eval"), self.user_ns)  # noqa: S307

    def magic(self, line: str) -> object:
        """Run a line magic, given without its percent sign."""
        name, _, rest = line.strip().lstrip("%").partition(" ")
        return self.run_line_magic(name, rest)

    def run_line_magic(self, name: str, line: str, *_: object, **__: object) -> object:
        """Run `%name line`; raises UsageError for an unknown one."""
        line = self._filled(line) if name not in ("time", "timeit") else line
        if name in _WITHOUT_EFFECT:
            return None
        if name in _COMMANDS or name in ("pip", "conda", "system", "sx"):
            if name in ("system", "sx"):
                return self.getoutput(line)
            self.system(f"{name} {line}")
            return None
        if (found := getattr(self, f"_line_{name}", None)) is None:
            raise UsageError(f"Line magic function `%{name}` not found.")
        return found(line)

    def run_cell_magic(self, name: str, line: str, cell: str) -> object:
        """Run `%%name line` with the lines below it; raises UsageError for an unknown one."""
        if name in _SCRIPTS or name in ("script", "system", "!", "sx"):
            words = (
                shlex.split(line)
                if name == "script"
                else ["bash" if name in ("!", "sx", "system") else name]
            )
            done = _started(words, f"%%{name}", input=cell)
            if done.returncode:
                raise subprocess.CalledProcessError(done.returncode, words)
            return None
        if (found := getattr(self, f"_cell_{name.lower()}", None)) is None:
            raise UsageError(f"Cell magic `%%{name}` not found.")
        return found(line, cell)

    def _line_cd(self, line: str) -> None:
        target = self._previous if line == "-" else os.path.expanduser(line.strip("'\"") or "~")
        self._previous = os.getcwd()
        os.chdir(target)
        print(os.getcwd())  # noqa: T201 - as IPython does

    def _line_pwd(self, _: str) -> str:
        return os.getcwd()

    def _line_env(self, line: str) -> object:
        if not line:
            return dict(os.environ)
        name, sign, value = line.partition("=") if "=" in line else line.partition(" ")
        if not sign:
            return os.environ[name]
        os.environ[name.strip()] = value.strip()
        print(f"env: {name.strip()}={value.strip()}")  # noqa: T201 - as IPython does
        return None

    _line_set_env = _line_env

    def _line_time(self, line: str) -> object:
        before, begun = time.process_time(), time.perf_counter()
        value = self.run_cell(line)
        used, passed = time.process_time() - before, time.perf_counter() - begun
        print(f"CPU times: total: {_duration(used)}\nWall time: {_duration(passed)}")  # noqa: T201
        return value

    def _cell_time(self, _: str, cell: str) -> object:
        return self._line_time(cell)

    def _line_timeit(self, line: str, setup: str = "pass") -> None:
        import timeit

        number, repeat = 0, 7
        while option := re.match(r"\s*-([nr])\s*(\d+)\s+", line):
            number, repeat = (
                (int(option[2]), repeat) if option[1] == "n" else (number, int(option[2]))
            )
            line = line[option.end() :]
        timer = timeit.Timer(line, setup, globals=self.user_ns)
        number = number or timer.autorange()[0]
        taken = [each / number for each in timer.repeat(repeat, number)]
        mean = sum(taken) / len(taken)
        spread = (sum((each - mean) ** 2 for each in taken) / len(taken)) ** 0.5
        print(  # noqa: T201 - as IPython does
            f"{_duration(mean)} ± {_duration(spread)} per loop "
            f"(mean ± std. dev. of {repeat} runs, {number:,} loops each)"
        )

    def _cell_timeit(self, line: str, cell: str) -> None:
        self._line_timeit(cell, line or "pass")

    def _cell_capture(self, line: str, cell: str) -> None:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            self.run_cell(cell)
        if name := next((word for word in line.split() if word.isidentifier()), ""):
            self.user_ns[name] = types.SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())

    def _cell_writefile(self, line: str, cell: str) -> None:
        words = shlex.split(line)
        mode = "a" if words[:1] in (["-a"], ["--append"]) else "w"
        path = os.path.expanduser(words[-1]) if words else ""
        said = (
            "Appending to" if mode == "a" else "Overwriting" if os.path.exists(path) else "Writing"
        )
        print(said, path)  # noqa: T201 - as IPython does
        with open(path, mode) as file:
            file.write(cell if cell.endswith("\n") else cell + "\n")

    _cell_file = _cell_writefile

    def _line_run(self, line: str) -> None:
        import runpy

        path, *arguments = shlex.split(line)
        before, sys.argv = sys.argv, [path, *arguments]
        try:
            names = runpy.run_path(path, run_name="__main__")
        finally:
            sys.argv = before
        self.user_ns.update(
            {name: each for name, each in names.items() if not name.startswith("__")}
        )

    def _line_pinfo(self, line: str) -> None:
        help(self.ev(line))

    _line_pinfo2 = _line_pinfo

    def _line_who(self, _: str) -> None:
        names = [
            name for name, value in self.user_ns.items()
            if not name.startswith("_") and not isinstance(value, types.ModuleType)
        ]  # fmt: skip
        print("\t".join(names))  # noqa: T201 - as IPython does

    _line_whos = _line_who_ls = _line_who

    def _show(self, mime: str, content: str) -> None:
        self._display({mime: content}, raw=True)

    def _cell_html(self, _: str, cell: str) -> None:
        self._show("text/html", cell)

    def _cell_markdown(self, _: str, cell: str) -> None:
        self._show("text/markdown", cell)

    def _cell_latex(self, _: str, cell: str) -> None:
        self._show("text/latex", cell)

    def _cell_svg(self, _: str, cell: str) -> None:
        self._show("image/svg+xml", cell)

    def _cell_javascript(self, _: str, cell: str) -> None:
        self._show("application/javascript", cell)

    _cell_js = _cell_javascript


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _started(
    words: list[str], name: str, *, input: str | None = None, stdout: int | None = None
) -> "subprocess.CompletedProcess[str]":  # fmt: skip
    """Run a program with this one's output; raises PermissionError if the policy allows none."""
    sys.stdout.flush()
    sys.stderr.flush()
    stdin: dict[str, Any] = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
    try:
        return subprocess.run(words, stdout=stdout, text=True, check=False, **stdin)
    except (PermissionError, BlockingIOError):
        raise PermissionError(_NO_SHELL.format(name)) from None


def _install(tool: str, said: str) -> None:
    """Tell which packages are installed; raises PackageMissingError if one is missing."""
    import importlib.metadata  # takes 30 ms

    words, missing = iter(shlex.split(said, comments=True)), []
    for word in words:
        if word in ("-r", "-e"):
            missing.append(f"{word} {next(words, '')}")
        elif word in _WITH_VALUE:
            next(words, "")
        elif not word.startswith("-") and (found := _NAME.match(word)):
            try:
                version = importlib.metadata.version(found["name"])
                print(f"Requirement already satisfied: {word} ({version})")  # noqa: T201 - as pip does
            except importlib.metadata.PackageNotFoundError:
                missing.append(word)
    if missing:
        raise PackageMissingError(
            f"{tool} install {' '.join(missing)}: a program installs nothing; the operator of this "
            f"server adds {' '.join(f'--packages {shlex.quote(each)}' for each in missing)}"
        )


def start(
    main: dict[str, Any], display: Callable[..., object], modules: types.ModuleType
) -> CellShell:
    """Define `get_ipython`, and let programs import IPython's modules and show Pillow's images."""
    shell = CellShell(main, display)
    builtins.get_ipython = lambda: shell  # type: ignore[attr-defined]
    modules.install(shell, display, UsageError)
    return shell
