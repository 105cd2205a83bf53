"""`NotebookSession`: a session for the cells of a notebook, with display, completion and inspection.

Bundles of MIME types that are safe to show: a notebook executes the scripts of its outputs.

A page of Jupyter may start kernels without a sandbox: a script in an output would be an escape. HTML
and SVG are shown in a frame that has no origin and runs no script; types that pages would interpret
(Markdown, LaTeX, JavaScript, widgets) are shown as text or left out.
"""

import base64
import html
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec

from ....policies.errors import CellwrightError, PolicyError, SessionLost
from ....runner.channel import refuse_deep_json, refuse_large_json
from ....runner.requests.result import SandboxResult
from ...sandbox.calls.background import Run
from ...sandbox.calls.call_request import check_environment
from ...sandbox.calls.idioms import has_idioms, without_fence, without_indent
from ...sandbox.sessions.session import Session

OnText = Callable[[str, str], Awaitable[None]]  # arguments: the stream and its text
Bundle = dict[str, Any]

_MODULE = "_cellwright_notebook"
_FILES = ("ipython", "modules", "notebook")  # cell_*.py, in the order of execution
_LOAD = (
    "[(lambda module: (exec(compile(text, f'<{{name}}>', 'exec'), module.__dict__), "
    "__import__('sys').modules.__setitem__(name, module)))(__import__('types').ModuleType(name)) "
    "for name, text in {texts!r}] and __import__('sys').modules[{name!r}].start(globals())"
)
_CALL = "__import__('sys').modules[{name!r}].{function}(*{arguments})"
_RESULTS = "__import__('sys').modules[{name!r}].results({value}, {expressions!r})"
_HELPER_SECONDS = 5.0  # short, because a person waits for completion and inspection
_LIFETIME_SECONDS = 30 * 24 * 60 * 60.0
_MOST_EXPRESSIONS, _MOST_MATCHES = 100, 500
_MOST_MATCH_CHARACTERS, _MOST_DESCRIPTION_CHARACTERS = 200, 20_000
_CELL = re.compile(r'File "<cell (\d+)>"')
# A program that an exception ends begins its stderr like this.
_TRACEBACK = re.compile(rb'^(?:Traceback \(most recent|  File "<cell |  \+ Exception Group)', re.M)
_HELD_BYTES = 128 * 1024
_T = TypeVar("_T")


class _Results(msgspec.Struct, array_like=True):
    """The cell's claims about a program's displays."""

    value: Bundle | None
    displayed: list[Bundle]
    expressions: dict[str, Bundle]


class NotebookOutcome(NamedTuple):
    """The outcome of one cell of a notebook; bundles are the program's own, and may hold scripts.

    displayed: by `display`; the last ones are the figures that were open at the end
    figures: the names of their artifacts
    traceback: with the numbers of the notebook's cells
    """

    result: SandboxResult
    value: Bundle | None = None
    displayed: tuple[Bundle, ...] = ()
    figures: tuple[str, ...] = ()
    expressions: Mapping[str, Bundle] = MappingProxyType({})
    traceback: str = ""


class NotebookSession:
    """Runs the cells of one notebook in a session, one at a time; opens another session if it is lost.

    `open_session` opens it.  `timeout` limits each cell of the notebook, in seconds; by default the
    policy alone does, whose limit is `wall_seconds`.
    """

    def __init__(
        self, open_session: Callable[[], Session], wall_seconds: float, timeout: float | None = None
    ) -> None:
        self._open_session = open_session
        self._timeout = timeout
        self._helper_seconds = min(_HELPER_SECONDS, wall_seconds)
        self._numbers: dict[int, int] = {}  # the session's call number -> the notebook's
        self._calls = 0
        self._context = ""
        self._run: Run | None = None
        self._session = self._open()

    def _open(self) -> Session:
        session = self._open_session()
        here = Path(__file__)
        texts = [
            (f"_cellwright_{name}", here.with_name(f"cell_{name}.py").read_text())
            for name in _FILES
        ]
        loaded = session.execute(_LOAD.format(texts=texts, name=_MODULE))
        if not loaded.ok:
            session.close()
            raise SessionLost(f"the notebook's part of the cell did not start: {loaded.error}")
        self._numbers, self._calls, self._context = {}, 1, ""
        return session

    def reopen(self) -> bool:
        """Open another session if the present one is lost, and tell whether; its variables and files
        are gone."""
        if not self._session.lost:
            return False
        self._session = self._open()
        return True

    def close(self) -> None:
        self._session.close()

    def interrupt(self) -> None:
        """Interrupt the program, as Ctrl-C does; its variables stay.  Safe from any thread."""
        if run := self._run:
            run.cancel()

    async def execute(
        self, code: str, number: int, on_text: OnText, *,
        expressions: Mapping[str, str] | None = None, context: str = "", cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> NotebookOutcome:  # fmt: skip
        """Run cell `number` of the notebook; `on_text` gets its output as it comes.

        Each `context` has variables and a directory of its own, at first `cwd`.  `env`: environment
        variables of this program.  Raises SessionLost if the session is gone, and what
        `Session.execute` raises.
        """
        self._keep_alive()
        await self._enter(context, cwd)
        code = await self._as_python(code)
        if env:
            await self._ask(_call("set_environment", check_environment(env)), bool)
        self._calls += 1
        self._numbers[self._calls] = number
        result = await self._execute(code, on_text)
        traceback = self._renumbered(result.traceback or "")
        if result.session_lost or self._session.lost:
            return NotebookOutcome(result, traceback=traceback)
        told = await self._results(
            result, dict(list((expressions or {}).items())[:_MOST_EXPRESSIONS])
        )
        pictures = result.artifacts[_artifacts(told.value) :]
        figures = tuple({each.mime: text_of(each.mime, each.data)} for each in pictures)
        return NotebookOutcome(
            result, told.value, (*told.displayed, *figures), tuple(each.name for each in pictures),
            told.expressions, traceback,
        )  # fmt: skip

    async def _as_python(self, code: str) -> str:
        """Return a program that may hold commands of IPython as Python, line by line."""
        if not has_idioms(code):
            return code
        code = without_indent(without_fence(code)[0])
        return await self._ask(_call("transform", code), str) or code

    async def _enter(self, context: str, cwd: str | None) -> None:
        if context != self._context:
            await self._ask(_call("enter", context, cwd), bool)
            self._context = context

    async def forget_context(self, context: str) -> None:
        """Drop the variables of a context."""
        await self._ask(_call("forget", context), bool)

    async def _execute(self, code: str, on_text: OnText) -> SandboxResult:
        self._run = run = self._session.start(code, timeout=self._timeout)
        held, decoders = bytearray(), _Decoders()
        try:
            async for stream, data in run.output():
                if stream == "stderr":
                    held += data
                    data = _not_held(held)
                if text := decoders.decode(stream, data):
                    await on_text(stream, text)
            result = await run.aresult()
        finally:
            self._run = None
        rest = decoders.decode("stderr", bytes(held), is_last=True)
        told = (result.traceback or "").rstrip()
        if told and rest.rstrip().endswith(told):  # the notebook shows it as an error
            rest = rest.rstrip()[: -len(told)]
        if rest:
            await on_text("stderr", self._renumbered(rest))
        return result

    async def _results(self, result: SandboxResult, expressions: dict[str, str]) -> _Results:
        value = "_" if result.ok and result.value is not None else "None"
        code = _RESULTS.format(name=_MODULE, value=value, expressions=expressions)
        told = await self._ask(code, _Results)
        return told or _Results(
            None if value == "None" else {"text/plain": str(result.value)}, [], {}
        )

    async def complete(self, code: str, position: int) -> tuple[int, list[str]]:
        """Return where the word to complete begins, and its completions."""
        told = await self._ask(_call("complete", code, position), tuple[int, list[str]])
        start, matches = told or (position, [])
        short = [each for each in matches if len(each) <= _MOST_MATCH_CHARACTERS]
        return max(0, min(start, position)), short[:_MOST_MATCHES]

    async def inspect(self, code: str, position: int, *, with_source: bool) -> str:
        """Return the beginning of a description of the object whose name is at `position`; empty if
        there is none."""
        told = await self._ask(_call("examine", code, position, with_source), str) or ""
        return told[:_MOST_DESCRIPTION_CHARACTERS]

    async def is_complete(self, code: str) -> tuple[str, str]:
        """Return "complete", "incomplete", "invalid" or "unknown", and the next line's indent."""
        told = await self._ask(_call("check_complete", code), tuple[str, str]) or ("unknown", "")
        return told if told[0] in ("complete", "incomplete", "invalid") else ("unknown", "")

    async def _ask(self, code: str, kind: type[_T]) -> _T | None:
        """Return the answer of a function in the cell; None if it is not of the type `kind`."""
        if self._session.lost:
            return None
        self._calls += 1
        try:
            result = await self._session.aexecute(code, timeout=self._helper_seconds)
        except SessionLost:
            return None
        answers = [each.data for each in result.artifacts if each.mime == "text/markdown"]
        try:
            (answer,) = answers
            refuse_large_json(answer)
            refuse_deep_json(answer)
            return msgspec.json.decode(answer, type=kind)
        except (
            ValueError,
            msgspec.MsgspecError,
        ):  # a program of the session replaced cellwright's function
            return None

    def _keep_alive(self) -> None:
        """Keep the variables of an idle notebook, as other kernels do."""
        try:
            self._session.extend(_LIFETIME_SECONDS)
        except PolicyError:  # a session of a daemon, whose policy decides
            return

    def _renumbered(self, text: str) -> str:
        return _CELL.sub(
            lambda found: f'File "<cell {self._numbers.get(int(found[1]), found[1])}>"', text
        )


class _Decoders:
    """UTF-8 of both streams, whose characters can be split between two chunks."""

    def __init__(self) -> None:
        import codecs

        make = codecs.getincrementaldecoder("utf-8")
        self._streams = {name: make("replace") for name in ("stdout", "stderr")}

    def decode(self, stream: str, data: bytes, *, is_last: bool = False) -> str:
        return self._streams[stream].decode(data, final=is_last)


def _not_held(held: bytearray) -> bytes:
    """Remove text from `held` that cannot belong to the traceback at the end of stderr."""
    found = _TRACEBACK.search(held)
    size = found.start() if found and len(held) <= _HELD_BYTES else len(held)
    taken = bytes(held[:size])
    del held[:size]
    return taken


def _call(function: str, *arguments: object) -> str:
    return _CALL.format(name=_MODULE, function=function, arguments=repr(arguments))


def _artifacts(value: Bundle | None) -> int:
    """Return how many artifacts are pictures of the value, by the cell's word."""
    count = (value or {}).get("artifacts")
    return count if isinstance(count, int) and 0 <= count <= 5 else 0


def error_of(failure: SandboxResult | CellwrightError) -> tuple[str, str]:
    """Return the name and message of what ended a program, as a notebook shows them."""
    if isinstance(failure, CellwrightError):
        return type(failure).__name__, str(failure)
    said = failure.error or failure.reason
    if failure.reason == "cancelled":
        return "KeyboardInterrupt", said
    if failure.reason == "exception":
        name, _, message = said.partition(": ")
        return name, message
    return f"{failure.status.value} ({failure.reason})", said


_LINE_PIXELS, _LEAST_PIXELS, _MOST_PIXELS = 26, 60, 600
_LINES = re.compile(r"<(?:tr|br|p|li|h[1-6]|div)\b|\n\n", re.IGNORECASE)
_AS_TEXT = ("text/markdown", "text/latex")
_PICTURES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_MOST_CHARACTERS = 16 * 1024 * 1024
# The frame sends no requests: it may load pictures and styles only from the document itself.
_CONTENT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:"


def safe_bundle(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a bundle that a notebook can show without executing anything."""
    shown: dict[str, Any] = {}
    for mime in _AS_TEXT:
        if isinstance(given.get(mime), str) and "text/html" not in given:
            shown["text/plain"] = given[mime]
    if isinstance(given.get("text/plain"), str):
        shown.setdefault("text/plain", given["text/plain"])
    for mime in _PICTURES:
        if isinstance(content := given.get(mime), str) and _is_base64(content):
            shown[mime] = content
    if isinstance(given.get("application/json"), dict | list):
        shown["application/json"] = given["application/json"]
    for mime in ("text/html", "image/svg+xml"):
        if isinstance(content := given.get(mime), str) and "text/html" not in shown:
            shown["text/html"] = framed(content)
    return shown


def picture_bundle(mime: str, data: bytes) -> dict[str, Any]:
    """Return the bundle of a picture that a program made."""
    return safe_bundle({mime: text_of(mime, data)})


def text_of(mime: str, data: bytes) -> str:
    """Return the content of a type as bundles have it: binary ones in base64."""
    if mime in _PICTURES:
        return base64.b64encode(data).decode()
    return data.decode("utf-8", "replace")


def framed(content: str) -> str:
    """Return HTML that shows `content` in a frame without scripts, forms, origin or network."""
    lines = 1 + len(_LINES.findall(content[:1_000_000]))
    height = 400 if "<svg" in content[:1000] else lines * _LINE_PIXELS
    pixels = max(_LEAST_PIXELS, min(_MOST_PIXELS, height))
    page = (
        f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">'
        "<style>body{font:13px sans-serif;margin:4px;background:#fff;color:#000}"
        "table{border-collapse:collapse}td,th{padding:3px 8px;text-align:right}</style>"
    )
    return (
        f'<iframe sandbox="" referrerpolicy="no-referrer" srcdoc="{html.escape(page + content)}" '
        f'style="width:100%;height:{pixels}px;border:0;resize:vertical"></iframe>'
    )


def _is_base64(content: str) -> bool:
    try:
        base64.b64decode(content[:_MOST_CHARACTERS], validate=True)
    except ValueError:
        return False
    return len(content) <= _MOST_CHARACTERS
