"""How a request is put to a guest, in a form that its interpreter can read.

Python reads a Run frame, and so does the process that is to become another interpreter, which is how
a program that runs once comes to it.  In a session Node and Ruby have no decoder for that: they are
sent JSON on the control channel, and after it the bytes that JSON cannot hold.  A shell cannot read
packets: it reads lines from its standard input, which we write, and says how a request ended by a line
that we write, too.
"""

import json
import re
import shlex
from typing import NamedTuple

from ..policies.languages import LANGUAGES, PYTHON, TOOL_CLIENT, as_environment
from .messages import InputFile, Run, Start, encode

_SOURCE = "/tmp/cell"  # noqa: S108 - the cell's own; error messages name it
_STDIN = "/tmp/cell.stdin"  # noqa: S108 - the cell's own
_LINE_BYTES = 8192  # of a file's content: a shell holds a line in memory
# Prompts would be printed; history would be read and written; `!` would be expanded.  Descriptor 8 is
# stderr: what a shell without a terminal complains of at its start is not the program's.
_GREETING = (
    b"_cell=0 PS1= PS2= PROMPT_COMMAND=PS1=; unset HISTFILE MAILPATH MAILCHECK; "
    b'[ "${BASH_VERSION-}" ] && set +H +o history && history -c; exec 2>&8 8>&-\n'
)
# A Finished frame as msgpack has it (messages.py), in one write(2): octal digits of the status are made
# by arithmetic, since a policy may allow no subshell.  It is said once: `_cell` is the request's.  The
# nonce stands behind the byte that tells its length.
_ENDING = (
    '{{ case $_cell in {0}|{0}x) printf "\\\\0\\\\231\\\\250Finished\\\\300\\\\300\\\\300\\\\300'
    '\\\\30$((3-($?!=0)))\\\\220\\\\{1:o}{2}\\\\314\\\\$(($?/64))$(($?%64/8))$(($?%8))" >&9;; '
    "esac; }} 2>/dev/null; _cell=\n"
)
_SHORT_TEXT = 0xA0  # msgpack: plus the length, of a text of less than 32 bytes
_NOT_PLAIN = re.compile(rb"[^ -$&(-,.-\[\]-~]")  # control characters, % ' - \ and what is not ASCII
_FIRST = 0  # starting the interpreter counts as a request


class Words(NamedTuple):
    """What goes to the control channel; what goes to standard input, and what is said there again if
    the program is interrupted."""

    program: bytes = b""
    stdin: bytes = b""
    ending: bytes = b""


def words(run: Run, language: str, last_exit_code: int) -> Words:
    """Put a request of a session in `language`, after one that ended with `last_exit_code`."""
    if language == PYTHON:
        return Words(encode(run))
    if not LANGUAGES[language].is_shell:
        return Words(_as_json(run))
    ending = _ending(run.request, run.nonce)
    return Words(b"", _as_lines(run, language, last_exit_code) + ending, ending)


def first_words(files: tuple[InputFile, ...], language: str) -> Words:
    """Have the interpreter of a session start; it answers as it answers a request.

    Files are there before it is, and so are written without it: a shell may have no mkdir(1).
    """
    start = encode(Start(files))
    if not LANGUAGES[language].is_shell:
        return Words(start)
    ending = _ending(_FIRST, "")
    return Words(start, _GREETING + ending, ending)


def _ending(request: int, nonce: str) -> bytes:
    return _ENDING.format(request, _SHORT_TEXT + len(nonce), nonce).encode()


def _as_json(run: Run) -> bytes:
    """Return a JSON object and a newline, then the content of each file and of standard input."""
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
    }
    contents = b"".join([*(file.data for file in run.files), run.stdin])
    return json.dumps(header).encode() + b"\n" + contents


def _as_lines(run: Run, language: str, last_exit_code: int) -> bytes:
    """Return the lines that give a shell what it is given, and then have it run the program.

    By `.` and not by eval: a message then has a line of the program.  `command` keeps an error that is
    fatal to a script, a syntax error or a read-only variable, from being more than its status: dash
    would drop what it has read ahead.
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
        f"command . {TOOL_CLIENT}\n".encode() if run.tools else b"",
        # $? is what the program before left.
        f"_cell() {{ return {last_exit_code}; }}\n".encode() if last_exit_code else b"",
        f"case $_cell in *x) false;; *) {'_cell; ' if last_exit_code else ''}".encode(),
        f"command . {source} < {stdin};; esac\n".encode(),
    ]
    return b"".join(lines)


def _directories(run: Run) -> list[str]:
    parents = (file.path.rpartition("/")[0] for file in run.files)
    return sorted({f"/workspace/{parent}" for parent in parents if parent})


def _make_directory(path: str) -> bytes:
    quoted = shlex.quote(path)
    return f"[ -d {quoted} ] || mkdir -p {quoted} || _cell=${{_cell%x}}x\n".encode()


def _make_executable(path: str) -> bytes:
    return f"chmod 700 {shlex.quote(path)} || _cell=${{_cell%x}}x\n".encode()


def _write(path: str, data: bytes) -> bytes:
    """Return lines that write a file, octal escapes for what is not plain; `set -C` is overruled.

    A name that is a FIFO's is left alone: to open it would wait for a reader.
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
