"""The bytes of a request, in the form that each language's interpreter can read (`RequestForm`).

Python reads a RunProgram frame, and so does the process of the guest before it becomes another
interpreter: that is how a program that runs once arrives.  In a session Node and Ruby have no
decoder for frames: they get JSON on the control channel, followed by the bytes that JSON cannot
hold.  A shell cannot read packets: the supervisor writes lines to its standard input, the last of
which makes the shell report how the request ended.
"""

import re
import shlex

from ...policies.languages import LANGUAGES, PYTHON, TOOL_CLIENT, as_environment
from ..messages import InputFile, RunProgram, Start, encode
from .request import RequestForm

_SOURCE = "/tmp/cell"  # noqa: S108 - the cell's own; error messages name it
_STDIN = "/tmp/cell.stdin"  # noqa: S108 - the cell's own
_LINE_BYTES = 8192  # bytes of a file in one line, because a shell holds a line in memory
# Switches off prompts, history and the expansion of `!`. Descriptor 8 is stderr: the shell's complaint
# that it has no terminal must not be in the program's output.
_GREETING = (
    b"_cell=0 PS1= PS2= PROMPT_COMMAND=PS1=; unset HISTFILE MAILPATH MAILCHECK; "
    b'[ "${BASH_VERSION-}" ] && set +H +o history && history -c; exec 2>&8 8>&-\n'
)
# Prints a Finished frame in msgpack (messages.py) by one write(2). Arithmetic makes the octal digits of
# the status, because a policy may forbid subshells. `_cell` is set for each request, so that the frame
# is printed once. The nonce follows the byte of its length.
_ENDING = (
    '{{ case $_cell in {0}|{0}x) printf "\\\\0\\\\231\\\\250Finished\\\\300\\\\300\\\\300\\\\300'
    '\\\\30$((3-($?!=0)))\\\\220\\\\{1:o}{2}\\\\314\\\\$(($?/64))$(($?%64/8))$(($?%8))" >&9;; '
    "esac; }} 2>/dev/null; _cell=\n"
)
_SHORT_TEXT = 0xA0  # msgpack: this plus the length begins a string of less than 32 bytes
_NOT_PLAIN = re.compile(rb"[^ -$&(-,.-\[\]-~]")  # control characters, % ' - \ and non-ASCII bytes
_FIRST = 0  # number of the first request: starting the interpreter


def request_form(run: RunProgram, language: str, last_exit_code: int) -> RequestForm:
    """Return the form of a session's request in `language`, after one that ended with
    `last_exit_code`."""
    if language == PYTHON:
        return RequestForm(encode(run))
    if not LANGUAGES[language].is_shell:
        return RequestForm(_as_json(run))
    ending = _ending(run.request, run.nonce)
    return RequestForm(b"", _as_lines(run, language, last_exit_code) + ending, ending)


def start_form(files: tuple[InputFile, ...], language: str) -> RequestForm:
    """Return the form that starts a session's interpreter; it answers as to a request.

    The guest's process writes the files before it becomes the interpreter: a shell may have no
    mkdir(1).
    """
    start = encode(Start(files))
    if not LANGUAGES[language].is_shell:
        return RequestForm(start)
    ending = _ending(_FIRST, "")
    return RequestForm(start, _GREETING + ending, ending)


def _ending(request: int, nonce: str) -> bytes:
    return _ENDING.format(request, _SHORT_TEXT + len(nonce), nonce).encode()


def _as_json(run: RunProgram) -> bytes:
    """Return a JSON object and a newline, then the content of each file and of standard input."""
    import json

    header = {
        "code": run.code,
        "inputs": json.loads(run.inputs),
        "environment": run.environment,
        "files": [(file.path, len(file.data), file.executable) for file in run.files],
        "stdin": len(run.stdin),
        "limit": run.value_bytes,
        "request": run.request,
        "nonce": run.nonce,
        "tools": list(run.tools),
        "arguments": run.arguments,
        "sites": run.sites,
    }
    contents = b"".join([*(file.data for file in run.files), run.stdin])
    return json.dumps(header).encode() + b"\n" + contents


def _as_lines(run: RunProgram, language: str, last_exit_code: int) -> bytes:
    """Return the lines that give a shell its inputs and make it run the program.

    By `.` and not by eval: messages then carry the line of the program.  `command` turns an error
    that is fatal to a script, such as a syntax error or a read-only variable, into a status:
    otherwise dash would drop the input that it has read ahead.
    """
    source = _SOURCE + LANGUAGES[language].suffix
    variables = {**run.environment, **as_environment(run.inputs)}
    exports = [f"command export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
    stdin = _STDIN if run.stdin else "/dev/null"
    lines = [
        f"_cell={run.request}\n".encode(),
        *(_make_directory(path) for path in _directories(run)),
        *(_write(f"/workspace/{file.path}", file.data) for file in run.files),
        *(_make_executable(f"/workspace/{file.path}") for file in run.files if file.executable),
        _write(_STDIN, run.stdin) if run.stdin else b"",
        _write(source, run.code.encode()),
        "".join(exports).encode(),
        f"set -- {shlex.join(run.arguments)}\n".encode() if run.arguments else b"",
        f"command . {TOOL_CLIENT}\n".encode() if run.tools else b"",
        # Sets $? to the status of the previous program.
        f"_cell() {{ return {last_exit_code}; }}\n".encode() if last_exit_code else b"",
        f"case $_cell in *x) false;; *) {'_cell; ' if last_exit_code else ''}".encode(),
        f"command . {source} < {stdin};; esac\n".encode(),
    ]
    return b"".join(lines)


def _directories(run: RunProgram) -> list[str]:
    parents = (file.path.rpartition("/")[0] for file in run.files)
    return sorted({f"/workspace/{parent}" for parent in parents if parent})


def _make_directory(path: str) -> bytes:
    quoted = shlex.quote(path)
    return f"[ -d {quoted} ] || mkdir -p {quoted} || _cell=${{_cell%x}}x\n".encode()


def _make_executable(path: str) -> bytes:
    return f"chmod 700 {shlex.quote(path)} || _cell=${{_cell%x}}x\n".encode()


def _write(path: str, data: bytes) -> bytes:
    """Return lines that write a file, with octal escapes for special bytes; `set -C` is overruled.

    If the name is a FIFO's, nothing is written: opening it would wait for a reader.
    """
    target = shlex.quote(path).encode()
    pieces = [data[start : start + _LINE_BYTES] for start in range(0, len(data), _LINE_BYTES)]
    line = (
        b"[ -f %(at)b ] || [ ! -e %(at)b ] && printf '%(data)b' >%(more)b %(at)b || "
        b"{ _cell=${_cell%%x}x; [ -f %(at)b ] || echo %(at)b: not a regular file >&2; }\n"
    )
    lines = [
        line
        % {
            b"at": target,
            b"data": _NOT_PLAIN.sub(_escaped, piece),
            b"more": b">" if number else b"|",
        }
        for number, piece in enumerate(pieces or [b""])
    ]
    return b"".join(lines)


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"\\%03o" % found[0][0]
