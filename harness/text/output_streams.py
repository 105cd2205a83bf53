"""Output of guests as it arrives, and their values, on the standard streams.

Most runs show no more than that, so this module imports no regular expressions.
"""

import codecs
import os
import sys

from ...policies.languages import PYTHON


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
            from .terminal_text import harmless  # takes as long to import as a call of a tool

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


def shown_value(value: object, language: str) -> str:
    """Return the value of a program's last expression as text: a string unchanged, any other value as
    its repr for Python, and as JSON for other languages."""
    if isinstance(value, str):
        return value
    if language == PYTHON:
        return repr(value)
    import json

    return json.dumps(value, ensure_ascii=False)
