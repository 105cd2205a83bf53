"""`cellwright run --connect` for the usual options, without msgspec and argparse, which take longer to
import than a call takes.

Its output is that of `running/run.py`, to which it leaves all other options and results.
"""

import os
import sys

from ..sandbox.remote import lean_frames as frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import SocketType
    from collections.abc import Sequence
    from typing import Any

_OPTIONS = ("-c", "--connect", "--policy", "--timeout", "--env", "--stdin", "--language")
_LANGUAGES = ("python", "bash", "sh")  # names without aliases
_DESCRIPTORS = {"stdout": 1, "stderr": 2}
# Fields of a result about which the command says something.
_SAID = ("notices", "violations", "truncated", "files", "artifacts", "uncollected", "workspace")


# Errors for a reply that this module cannot show, or that is invalid.
_NOT_SIMPLE = (
    ValueError, TypeError, LookupError, ImportError, AttributeError, StopIteration, RecursionError,
)  # fmt: skip


def attempt(arguments: "Sequence[str]") -> int | None:
    """Run `cellwright run` with these arguments in a daemon; return the exit status, or None if
    nothing was run and nothing read that another attempt needs."""
    if os.isatty(1) or os.isatty(2):
        return None  # output for a terminal is escaped, and progress shown
    try:
        options = _options(arguments)
        sock = frames.connected(options["--connect"])
    except (OSError, ValueError):  # the other attempt says why
        return None
    if sock is None:
        return None
    try:
        reply = _reply(sock, options)
    finally:
        sock.close()
    if reply is None:
        return None
    status = _shown(reply, options.get("--language", "python"))
    return _left(arguments, reply) if status is None else status


def _reply(sock: "SocketType", options: "dict[str, Any]") -> bytes | None:
    """Run the program, and pass its output on; return the last frame, b"" if no valid one comes, None
    if the program was not sent."""
    try:
        welcome = frames.unpack(frames.greet(sock, options.get("--policy", "")))
        name, _, _, most, *_ = welcome
        if name != "Welcome" or not isinstance(most, int):
            return None
        request = _request(options)
    except (OSError, ValueError, TypeError):
        return None
    if len(request) > most:
        from ..sandbox.remote.connections import check_length_of_frame

        check_length_of_frame(len(request), most)
    try:
        frames.send(sock, request)
    except BlockingIOError:  # it has read nothing for a minute
        return b""
    except OSError:  # it has closed the connection; its reason is still to be read
        pass
    try:
        while frames.is_output(reply := frames.receive(sock)):
            _, stream, data = frames.unpack(reply)
            descriptor, rest = _DESCRIPTORS[stream], memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
    except (ValueError, LookupError, TypeError):
        return b""
    return reply


def _options(arguments: "Sequence[str]") -> "dict[str, Any]":
    """Return the options by name, FILE and the arguments of the program among them; raises ValueError
    for others, and what argparse may read in another way."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options: dict[str, Any] = {"--env": {}, "arguments": list(arguments[end + 1 :])}
    words = iter(arguments[:end])
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if word == "-" or not word.startswith("-"):
            name, value = "FILE", word
        elif name not in _OPTIONS:
            raise ValueError(name)
        elif not equals:
            value = next(words, "--")
            if value.startswith("-") and value != "-":
                raise ValueError(name)
        value.encode()  # raises ValueError for bytes that are not UTF-8
        if name == "--env":
            variable, equals, text = value.partition("=")
            if not equals and variable not in os.environ:
                raise ValueError(name)
            text = text if equals else os.environ[variable]
            text.encode()
            options["--env"][variable] = text
        elif name in options and name in ("-c", "FILE"):
            raise ValueError(name)
        else:
            options[name] = value
    file = options.get("FILE", "")
    is_known = options.get("--language", "python") in _LANGUAGES
    if not is_known or ("-c" in options) == bool(file) or not options.get("--connect"):
        raise ValueError("another program")
    if file not in ("", "-") and not file.endswith(".py") and "--language" not in options:
        raise ValueError("another language")
    if file == options.get("--stdin") == "-":
        raise ValueError("two readers")
    "\0".join(options["arguments"]).encode()
    return options


def _request(options: "dict[str, Any]") -> bytes:
    """Return the frame of the program; standard input is read last, because it can be read once."""
    file, stdin = options.get("FILE", ""), options.get("--stdin")
    told = dict(frames.EXECUTE_ARGUMENTS)
    told["env"], told["arguments"] = options["--env"], options["arguments"]
    if "--timeout" in options:
        told["timeout"] = float(options["--timeout"])
    if os.path.isfile(file):
        told["filename"] = os.path.basename(file)
    content = {each: _read(each) for each in sorted({file, stdin or ""}, reverse=True) if each}
    code = options["-c"].encode() if "-c" in options else content[file]
    told["stdin"] = content[stdin] if stdin else None
    given = ["ExecuteArguments", *told.values()]
    language = options.get("--language", "python")
    return frames.pack(["Execute", code, "-c" in options, language, given, "", True])


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    with open(path, "rb") as file:
        return file.read()


def _shown(reply: bytes, language: str) -> int | None:
    """Show a result of which only the value is to be shown; return None for any other one."""
    try:
        kind, result, value = frames.unpack(reply)
        if kind != "Executed" or result["status"] != "completed" or any(map(result.get, _SAID)):
            return None
        if value == b"null" or result["stdout"] or result["stderr"]:
            return 0
        found = _decoded(value)
        if not isinstance(found, str) and language != "python":
            return None
        text = found if isinstance(found, str) else repr(found)
        text.encode(sys.stdout.encoding, sys.stdout.errors or "strict")
    except _NOT_SIMPLE:
        return None
    sys.stdout.write(text + "\n")
    return 0


class _Json:
    """The settings of a decoder of JSON, as `json.JSONDecoder` has them."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int, parse_constant = float, int, float


def _decoded(data: bytes) -> object:
    """Decode JSON without the package `json`, which imports twenty modules more."""
    from _json import make_scanner

    scan = make_scanner(_Json)  # type: ignore[arg-type] # its stub asks for its own type
    return scan(data.decode(), 0)[0]


def _left(arguments: "Sequence[str]", reply: bytes) -> int:
    """Have the modules that know everything show a reply, or raise what it says."""
    from ...runner import lean_msgspec  # noqa: F401
    from . import lean_argparse  # noqa: F401
    from .running.run import show_reply

    return show_reply(arguments, reply)
