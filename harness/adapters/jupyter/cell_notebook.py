"""The cell's part of a notebook: bundles of MIME types, completion and inspection.

The text of this module is executed in the cell (notebook_session.py), so it imports nothing of
cellwright.  Whatever it answers is the program's own claim.
"""

import base64
import builtins
import codeop
import contextlib
import inspect
import io
import json
import keyword
import os
import re
import sys
import warnings
from typing import Any

_METHODS = {
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_svg_": "image/svg+xml",
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_latex_": "text/latex",
    "_repr_json_": "application/json",
}
# Types that cellwright itself turns into artifacts; the host needs their number.
_ARTIFACTS = ("image/png", "image/jpeg", "image/svg+xml", "text/html", "text/markdown")
_TEXT_CHARACTERS, _DISPLAYS, _MATCHES, _MATCH_CHARACTERS = 20_000, 64, 500, 200
_CHAIN = re.compile(r"(?:[^\W\d]\w*\.)*(?:[^\W\d]\w*)?$")
_CHAIN_AFTER = re.compile(r"\w*")

_display = builtins.display  # type: ignore[attr-defined]  # cellwright's own, which passes answers on
_displayed: list[dict[str, Any]] = []
_main: dict[str, Any] = {}
_first: dict[str, Any] = {}  # variables of a context before its first program


class _PassedOn:
    """Passes text to the host as the one picture of a call: a value would become `_`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_markdown_(self) -> str:
        return self._text


def start(main: dict[str, Any]) -> None:
    """Replace `display` and `input` by those of a notebook, and define `get_ipython`."""
    global _main  # noqa: PLW0603 - set once
    _main = main
    _first.update(main)
    sys.modules["_cellwright_ipython"].start(main, display, sys.modules["_cellwright_modules"])
    builtins.display = display  # type: ignore[attr-defined]
    builtins.input = _refuse_input


_contexts: dict[str, tuple[dict[str, Any], str]] = {}
_entered = [""]


def enter(context: str, cwd: str | None) -> None:
    """Give programs the variables and the directory of another context."""
    _contexts[_entered[0]] = dict(_main), os.getcwd()
    variables, directory = _contexts.get(context) or (dict(_first), cwd or os.getcwd())
    _main.clear()
    _main.update(variables)
    _entered[0] = context
    with contextlib.suppress(OSError):
        os.chdir(directory)
    answer(value=True)


def forget(context: str) -> None:
    """Drop the variables of a context."""
    _contexts.pop(context, None)
    if _entered[0] == context:
        _main.clear()
        _main.update(_first)
    answer(value=True)


def display(*values: object, raw: bool = False, **_: object) -> None:
    """Show values in the notebook once the cell of the notebook has ended; `raw` ones are bundles."""
    for value in values[: _DISPLAYS - len(_displayed)]:
        is_bundle = raw and isinstance(value, dict)
        _displayed.append(_as_bundle(value) if is_bundle else bundle(value))  # type: ignore[arg-type]


display.clear = _displayed.clear  # type: ignore[attr-defined]


def transform(code: str) -> None:
    """Answer a program of IPython as Python."""
    answer(sys.modules["_cellwright_ipython"].transform(code))


def _refuse_input(prompt: object = "") -> str:
    raise EOFError(
        "input: a program in a cell cannot ask a person; assign the value to a variable instead"
    )


_environment: list[dict[str, str]] = []  # environments before one program's variables were set


def set_environment(variables: dict[str, str]) -> None:
    """Set environment variables until the next `results`."""
    _environment[:] = [dict(os.environ)]
    os.environ.update(variables)
    answer(value=True)


def answer(value: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # the hook prints the value too
        _display(_PassedOn(json.dumps(value)))


def results(value: object, expressions: dict[str, str]) -> None:
    """Return the MIME bundles of the last value (None without one), of displayed objects, and of
    `user_expressions`."""
    shown = _displayed[:]
    _displayed.clear()
    if _environment:
        os.environ.clear()
        os.environ.update(_environment.pop())
    told = None if value is None else bundle(value)
    answer([told, shown, {name: _evaluated(text) for name, text in expressions.items()}])


def _evaluated(expression: str) -> dict[str, Any]:
    try:
        value = eval(expression, _main)  # noqa: S307 - the program's own, in its cell
    except Exception as error:  # noqa: BLE001 - whatever it raises
        return {"error": type(error).__name__, "text/plain": str(error)[:_TEXT_CHARACTERS]}
    return bundle(value)


def bundle(value: object) -> dict[str, Any]:
    """Return a value's displays by MIME type, and how many artifacts they become."""
    found: dict[str, Any] = {}
    for name, mime in _METHODS.items():
        method = getattr(type(value), name, None)
        with contextlib.suppress(Exception):  # runs code of the program
            content = method(value) if method else None
            content = content[0] if isinstance(content, tuple) else content  # without its metadata
            if content is not None:
                found[mime] = _as_json(content)
    artifacts = sum(mime in found for mime in _ARTIFACTS)
    with contextlib.suppress(Exception):
        if method := getattr(type(value), "_repr_mimebundle_", None):
            given = method(value)
            given = given[0] if isinstance(given, tuple) else given
            found.update(_as_bundle(dict(given)))
    found.update(_data_of(value))
    found.setdefault("text/plain", _text(value)[:_TEXT_CHARACTERS])
    return {**found, "artifacts": artifacts}


def _as_bundle(given: dict[str, Any]) -> dict[str, Any]:
    return {mime: _as_json(content) for mime, content in given.items()}


def _data_of(value: object) -> dict[str, Any]:
    """Return the data of lists, dictionaries and pandas' tables, as E2B's clients get them."""
    found: dict[str, Any] = {}
    pandas = sys.modules.get("pandas")
    with contextlib.suppress(Exception):  # values that JSON cannot hold
        if isinstance(value, list | dict):
            found["e2b/json"] = json.loads(json.dumps(value, allow_nan=False))
        elif pandas is not None and isinstance(value, pandas.DataFrame):
            columns = value.to_dict(orient="list")
            as_text = {name: list(map(_plain, column)) for name, column in columns.items()}
            found["e2b/data"] = json.loads(json.dumps(as_text))
    return found


def _plain(value: Any) -> Any:
    return value.isoformat() if hasattr(value, "isoformat") else value


def _as_json(content: object) -> Any:
    if isinstance(content, bytes):
        return base64.b64encode(content).decode()
    json.dumps(content)  # raises TypeError
    return content


def _text(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - whatever it raises
        return f"<{type(value).__name__}: repr raised {type(error).__name__}>"


def complete(code: str, position: int) -> None:
    """Return where the completed word begins, and its completions."""
    chain = _CHAIN.search(code[:position])
    *owners, start = (chain[0] if chain else "").split(".")
    names: set[str] = set()
    with contextlib.suppress(Exception):  # attributes are the program's own code
        names = set(dir(_resolve(owners))) if owners else {*_main, *dir(builtins), *keyword.kwlist}
    matches = sorted(
        name[:_MATCH_CHARACTERS] for name in names
        if name.startswith(start) and (start or not name.startswith("_"))
    )  # fmt: skip
    answer([position - len(start), matches[:_MATCHES]])


def examine(code: str, position: int, with_source: bool) -> None:
    """Return the description of the object whose name is at `position`; empty without one."""
    before = _CHAIN.search(code[:position].rstrip("( \t"))
    after = _CHAIN_AFTER.match(code, position)
    names = ((before[0] if before else "") + (after[0] if after else "")).strip(".").split(".")
    said = ""
    with contextlib.suppress(Exception):  # attributes are the program's own code
        said = _description(".".join(names), _resolve(names), with_source=with_source)
    answer(said[:_TEXT_CHARACTERS])


def _resolve(names: list[str]) -> object:
    value = _main[names[0]] if names[0] in _main else getattr(builtins, names[0])
    for name in names[1:]:
        value = getattr(value, name)
    return value


def _description(name: str, value: object, *, with_source: bool) -> str:
    lines = [f"Type: {type(value).__name__}"]
    with contextlib.suppress(Exception):
        lines.insert(0, f"Signature: {name}{inspect.signature(value)}")  # type: ignore[arg-type]
    if not callable(value):
        lines.append(f"Value: {_text(value)[:1000]}")
    if documentation := inspect.getdoc(value):
        lines.append(f"Documentation:\n{documentation}")
    if with_source:
        with contextlib.suppress(Exception):
            lines.append(f"Source:\n{inspect.getsource(value)}")  # type: ignore[arg-type]
    return "\n".join(lines)


def check_complete(code: str) -> None:
    """Answer whether `code` is complete, incomplete or invalid, and the indent of the next line."""
    state, indent = "invalid", ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):  # a syntax error
            state = (
                "incomplete" if codeop.compile_command(code, symbol="exec") is None else "complete"
            )
    if state == "complete" and "\n" in code and code.rsplit("\n", 1)[1][:1].isspace():
        state = "incomplete"  # a block ends with an empty line
    if state == "incomplete":
        last = code.rstrip().rsplit("\n", 1)[-1]
        indent = last[: len(last) - len(last.lstrip())] + "    " * last.endswith(":")
    answer([state, indent])
