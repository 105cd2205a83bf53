"""Terminal output: a guest's output with hidden characters escaped, and summaries of results."""

import codecs
import os
import sys
from typing import TextIO

from ...policies.languages import PYTHON
from ...runner.result import SEVERAL, SandboxResult, Violation
from .hidden import replace_hidden

_SHOWN, _LONGEST = 10, 300  # violations on a terminal, and characters of one


def harmless(text: str) -> str:
    """Return `text` with its hidden characters (hidden.py) written as escapes, such as `\\u200b`."""
    return replace_hidden(text, _escaped)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


class StreamPrinter:
    """Forwards output as it arrives: unchanged to a pipe or file, escaped to a terminal."""

    def __init__(self) -> None:
        self._streams = {"stdout": sys.stdout.fileno(), "stderr": sys.stderr.fileno()}
        make = codecs.getincrementaldecoder("utf-8")  # a character may come in two parts
        self._decoders = {"stdout": make("replace"), "stderr": make("replace")}
        self.mid_line = False  # the last thing written did not end a line

    def __call__(self, stream: str, data: bytes) -> None:
        descriptor = self._streams[stream]
        self.mid_line = data[-1:] != b"\n"
        if os.isatty(descriptor):
            data = harmless(self._decoders[stream].decode(data)).encode()
        while data:
            data = data[os.write(descriptor, data) :]


class EventPrinter:
    """Writes output to stdout as it arrives, one JSON object a line, in ASCII.

    Valid UTF-8 is in `text`, other bytes are in `base64`; a character that arrives in two parts is
    written with its second part.  The values in order are the stream.
    """

    def __init__(self) -> None:
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"stdout": make(), "stderr": make()}

    def __call__(self, stream: str, data: bytes) -> None:
        decoder = self._decoders[stream]
        held, _ = decoder.getstate()
        try:
            self._write(stream, "text", decoder.decode(data))
        except UnicodeDecodeError:
            decoder.reset()
            self._write_bytes(stream, held + data)

    def finish(self) -> None:
        """Write the incomplete characters at the ends of the streams."""
        for stream, decoder in self._decoders.items():
            self._write_bytes(stream, decoder.getstate()[0])

    def _write_bytes(self, stream: str, content: bytes) -> None:
        import base64

        self._write(stream, "base64", base64.b64encode(content).decode())

    def _write(self, stream: str, kind: str, content: str) -> None:
        if content:
            import json

            sys.stdout.write(json.dumps({"stream": stream, kind: content}) + "\n")
            sys.stdout.flush()


def result_line(result: SandboxResult) -> str:
    """Return status, reason, error, time and peak memory on one line."""
    ended = f"{result.status.value} ({result.reason})"
    parts = [coloured(ended, "green" if result.ok else "red", sys.stderr)]
    if result.error:
        parts.append(harmless(" ".join(result.error.splitlines())))
    if result.value is not None:
        parts.append(f"value {harmless(repr(result.value))[:200]}")
    parts.append(f"{result.execution_time * 1000:.1f} ms")
    parts.append(f"peak {result.usage.memory_peak_bytes / 1024 / 1024:.1f} MiB")
    return "cellwright: " + " · ".join((*parts, *dropped(result)))


def dropped(result: SandboxResult) -> list[str]:
    """Return what was dropped of the streams and of the value, each as a part of a sentence."""
    return [f"dropped {lost:,} bytes of {name}" for name, lost in result.truncated.items()]


def hint_lines(result: SandboxResult) -> list[str]:
    """Return the hints of a result, one a line."""
    return [f"hint: {harmless(hint)}" for hint in result.hints]


def notice_lines(result: SandboxResult) -> list[str]:
    """Return the notices of a result, one a line."""
    return [f"cellwright: {harmless(notice)}" for notice in result.notices]


def violation_lines(result: SandboxResult) -> list[str]:
    """Return the first ten violations of a program, one a line."""
    refused = coloured("refused", "yellow", sys.stderr)
    lines = [f"cellwright: {refused}: {_attempt(each)}" for each in result.violations[:_SHOWN]]
    if left_out := result.violations[_SHOWN:]:
        is_complete = all(each.process != SEVERAL for each in left_out)
        where = "has them all" if is_complete else "has the first in full, and counts the others"
        attempts = sum(each.count for each in left_out)
        lines.append(f"cellwright: and {attempts:,} more that were refused; --json {where}")
    return lines


def connection_lines(result: SandboxResult) -> list[str]:
    """Return the first ten connections of a program, one a line."""
    lines = [
        f"cellwright: connection: {harmless(each.name)} {each.port}"
        f" ({each.address or 'not dialled'}), sent {each.sent_bytes:,} bytes, received "
        f"{each.received_bytes:,}, {harmless(each.outcome)}"
        for each in result.connections[:_SHOWN]
    ]
    if left_out := len(result.connections) - len(lines):
        lines.append(f"cellwright: and {left_out:,} more connections; --json has them all")
    return lines


def _attempt(violation: Violation) -> str:
    words = harmless(" ".join((violation.syscall, *violation.arguments)))[:_LONGEST]
    times = f", {violation.count:,} times" if violation.count > 1 else ""
    return f"{words} ({violation.rule}){times}"


def shown_value(value: object, language: str) -> str:
    """Return the value of a program's last expression as text: a string unchanged, any other value as
    its repr for Python, and as JSON for other languages."""
    if isinstance(value, str):
        return value
    if language == PYTHON:
        return repr(value)
    import json

    return json.dumps(value, ensure_ascii=False)


def print_header(text: str) -> None:
    """Print the header of a list on a terminal only: programs read rows without a header."""
    if sys.stdout.isatty():
        sys.stdout.write(coloured(text, "bold", sys.stdout) + "\n")


_COLOURS = {"green": "32", "yellow": "33", "red": "31", "bold": "1"}  # ECMA-48, SGR


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """Return `text` in a colour if `stream` takes colours; no meaning depends on colour alone."""
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if has_colours(stream) else text


def has_colours(stream: TextIO) -> bool:
    """Tell whether output to `stream` is coloured: by default on a terminal.

    NO_COLOR (no-color.org) declines colours, and wins; FORCE_COLOR (force-color.org) asks for them
    also in a pipe or file, such as the log of a build.  An empty variable counts as none.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"
