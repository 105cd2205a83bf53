"""`%%cellwright`: an IPython magic that runs one cell of a notebook in isolation (extra `jupyter`).

The notebook itself runs on the host.  Values go in and come out as JSON only, so nothing of a program
is unpickled, and its pictures are shown without executing scripts.
"""

import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ....policies.errors import CellwrightError, PolicyError
from ....policies.extras import how_to_install
from ....runner.requests.result import SandboxResult
from ...sandbox.sandbox import Sandbox
from ...sandbox.sessions.session import Session
from ...text.terminal_text import harmless, hint_lines, notice_lines, result_line, violation_lines
from .notebook_session import picture_bundle

try:
    from IPython.core.error import UsageError
    from IPython.core.magic import Magics, line_cell_magic, magics_class
    from IPython.display import display
except ImportError as error:
    raise PolicyError(
        f"jupyter: {error.name} is not installed", how_to_install("jupyter")
    ) from None

_DEFAULT = "workshop"
_USAGE = (
    "%%cellwright [-i NAME]... [-o NAME]... [--policy P] [--timeout S] [--reset]; "
    "%cellwright EXPRESSION"
)


class _Options(msgspec.Struct):
    """The words of the magic's line."""

    inputs: list[str] = []
    outputs: list[str] = []
    policy: str = ""
    timeout: float | None = None
    is_reset: bool = False


def options_of(line: str) -> _Options:
    """Return the options of a line; raises PolicyError for others."""
    found, words = _Options(), iter(shlex.split(line))
    names = {"-i": found.inputs, "--in": found.inputs, "-o": found.outputs, "--out": found.outputs}
    for word in words:
        try:
            if word in names:
                names[word] += [each for each in next(words).split(",") if each]
            elif word == "--policy":
                found.policy = next(words)
            elif word == "--timeout":
                found.timeout = float(next(words))
            elif word == "--reset":
                found.is_reset = True
            else:
                raise PolicyError(f"{word}: unknown option", _USAGE)
        except StopIteration:
            raise PolicyError(f"{word}: a value is missing", _USAGE) from None
        except ValueError as error:
            if isinstance(error, PolicyError):
                raise
            raise PolicyError("--timeout: must be a number of seconds", _USAGE) from None
    for name in (*found.inputs, *found.outputs):
        if not name.isidentifier():
            raise PolicyError(f"{name!r} is not a name of a variable", _USAGE)
    return found


class MagicSession:
    """The session that the magics of one notebook use; another policy, or its loss, opens a new one."""

    def __init__(self) -> None:
        self._sandbox: Sandbox | None = None
        self._session: Session | None = None
        self._policy = ""

    def run(
        self, code: str, options: _Options, variables: Mapping[str, Any],
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> tuple[SandboxResult, dict[str, Any]]:  # fmt: skip
        """Run a program; return its result and the variables that `options.outputs` names.

        Raises PolicyError if a variable is missing or is not JSON.
        """
        missing = [name for name in options.inputs if name not in variables]
        if missing:
            raise PolicyError(f"-i {missing[0]}: there is no such variable")
        session = self._of(options)
        inputs = {name: variables[name] for name in options.inputs}
        result = session.execute(code, inputs=inputs, timeout=options.timeout, on_output=on_output)
        return result, self._outputs(session, options.outputs) if result.ok else {}

    def _of(self, options: _Options) -> Session:
        policy = options.policy or self._policy or _DEFAULT
        if self._sandbox is None or policy != self._policy:
            self.close()
            self._sandbox, self._policy = Sandbox(policy=policy, pool=0), policy
        if self._session is None or options.is_reset or self._session.lost:
            if self._session:
                self._session.close()
            self._session = self._sandbox.session()
        return self._session

    def _outputs(self, session: Session, names: list[str]) -> dict[str, Any]:
        if not names:
            return {}
        members = ", ".join(f"{name!r}: {name}" for name in names)
        result = session.execute(f"{{{members}}}", plain=True)
        if not (result.ok and isinstance(result.value, dict)):
            raise PolicyError(
                f"-o {','.join(names)}: {result.error or 'the cell told another thing'}"
            )
        return {name: result.value.get(name) for name in names}

    def close(self) -> None:
        if self._session:
            self._session.close()
        if self._sandbox:
            self._sandbox.close()
        self._session = self._sandbox = None


@magics_class
class CellwrightMagics(Magics):
    """The magics that `%load_ext cellwright` adds."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.magic_session = MagicSession()

    @line_cell_magic
    def cellwright(self, line: str, cell: str | None = None) -> object:
        """Run the cell, or the expression of a line, in an isolated cell whose variables stay."""
        variables: dict[str, Any] = self.shell.user_ns if self.shell else {}
        try:
            options = _Options() if cell is None else options_of(line)
            code = line if cell is None else cell
            result, outputs = self.magic_session.run(code, options, variables, _print)
        except CellwrightError as error:
            raise UsageError(str(error)) from None
        for text in (*notice_lines(result), *violation_lines(result)):
            sys.stderr.write(f"{text}\n")
        for artifact in result.artifacts:
            display(picture_bundle(artifact.mime, artifact.data), raw=True)
        if not result.ok:
            raise UsageError("\n".join([result_line(result), *hint_lines(result)]))
        variables.update(outputs)
        return result.value


def _print(stream: str, data: bytes) -> None:
    out = sys.stderr if stream == "stderr" else sys.stdout
    out.write(harmless(data.decode("utf-8", "replace")))
    out.flush()


def load(shell: Any) -> None:
    """Register the magics in an IPython shell."""
    shell.register_magics(CellwrightMagics(shell))


def unload(shell: Any) -> None:
    """End the session, and take the magics away."""
    magics = shell.magics_manager.registry.pop("CellwrightMagics", None)
    if magics is not None:
        magics.magic_session.close()
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("cellwright", None)
