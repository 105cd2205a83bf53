"""Programs that get personal data from a tool, and try to pass it on to a model by every channel.

Each encodes what it got in its own way and sends it through one channel as its value, and through all
that every program has.  A model's side is read with the decoder of the program.
"""

import base64
import codecs
import re
import threading
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from ..harness.privacy.privacy import Privacy
from ..harness.sandbox.sandbox import Sandbox
from ..harness.tools.broker import Broker
from ..harness.tools.tool import tool_of
from ..runner.audit.log import AuditLog
from ..runner.requests.result import SandboxResult

# name: how the program encodes text, and how a model would decode it
ENCODINGS: dict[str, tuple[str, Callable[[str], str]]] = {
    "plain": ("text", str),
    "reversed": ("text[::-1]", lambda said: said[::-1]),
    "rot13": ("codecs.encode(text, 'rot13')", lambda said: codecs.encode(said, "rot13")),
    "base64": ("base64.b64encode(text.encode()).decode()", lambda said: _runs(said, base64.b64decode)),
    "hexadecimal": ("text.encode().hex()", lambda said: _runs(said, bytes.fromhex)),
    "compressed": (
        "base64.b64encode(zlib.compress(text.encode())).decode()",
        lambda said: _runs(said, lambda run: zlib.decompress(base64.b64decode(run))),
    ),
    "codes": ("' '.join(str(ord(c)) for c in text)", lambda said: _of_codes(said, 0)),
    "xor": ("' '.join(str(ord(c) ^ 7) for c in text)", lambda said: _of_codes(said, 7)),
    "spaced": ("'\\u00b7'.join(text)", lambda said: said.replace("\u00b7", "")),
    "swapped": (
        "text.swapcase().replace('@', '{at}')",
        lambda said: said.swapcase().replace("{at}", "@"),
    ),
}  # fmt: skip
CHANNELS = {
    "stdout": "print(said)",
    "stderr": "print(said, file=sys.stderr)",
    "value": "",
    "error": "raise ValueError(said)",
    "file": "open('out.txt', 'w').write(said)",
}
_PROGRAM = """
import base64, codecs, csv, io, json, os, sys, zlib
import tools
rows = tools.customers(batch={batch})
buffer = io.StringIO()
csv.writer(buffer).writerows([each] for each in rows)
back = [row[0] for row in csv.reader(io.StringIO(buffer.getvalue()))]
tools.deliver(to=json.loads(json.dumps(back)))
text = chr(10).join(f"{{each}}" for each in rows)
said = {encode}
for call in (
    lambda: tools.echo(text=said), lambda: tools.fail(to=rows[0]), lambda: tools.nothing(said),
    lambda: tools.echo(text=rows[1].upper()), lambda: tools.search_tools(said[:200]),
):
    try:
        print(call())
    except Exception as error:
        print(error)
for name in (said[:60].replace('/', '_').replace(chr(10), '_'), rows[0][:60].replace('/', '_')):
    open(name, 'w').write(said)
    try:
        open('/srv/' + name)
    except OSError as error:
        print(error)
for place in range(0, len(said), 700):
    print(said[place:place + 700], end='', flush=True)
{channel}
said
"""


def _runs(said: str, decode: Callable[[str], Any]) -> str:
    """Return the text of every run that can be decoded."""
    found = []
    for run in re.findall(r"[A-Za-z0-9+/=]{16,}", said):
        try:
            found.append(bytes(decode(run)).decode())
        except (ValueError, zlib.error):
            continue
    return "\n".join(found)


def _of_codes(said: str, key: int) -> str:
    codes = [int(each) ^ key for each in re.findall(r"\b\d{1,7}\b", said)]
    return "".join(chr(each) for each in codes if each < 0x110000)


def rules() -> Privacy:
    """Return the privacy under which nothing is to leak."""
    fields = {"customers:[]": "customer"}
    return Privacy(fields=fields, restore=["deliver:to[]", "echo:text", "fail:to"])


class Smuggling:
    """A sandbox with tools that hold planted values, and what came of its programs."""

    def __init__(self, values: list[str], batches: int) -> None:
        size = len(values) // batches
        self.batches = [values[n * size : (n + 1) * size] for n in range(batches)]
        self._lock = threading.Lock()
        self.delivered: list[str] = []
        self.seen_characters = 0
        self.leaks: list[tuple[str, str]] = []  # program, value

    def customers(self, batch: int) -> list[str]:
        """Return the customers of a batch."""
        return self.batches[batch]

    def deliver(self, to: list[str]) -> str:
        """Deliver something to each."""
        with self._lock:
            self.delivered += to
        return f"delivered to {', '.join(to[:3])}"

    def echo(self, text: str) -> dict[str, str]:
        """Return the text, and in other forms."""
        data = text.encode("utf-8", "replace")
        return {"text": text, "base64": base64.b64encode(data).decode(), "hex": data.hex()}

    def fail(self, to: str) -> str:
        """Fail."""
        raise RuntimeError(f"no mailbox {to}")

    def run(self, privacy: Privacy | None) -> None:
        """Run all programs: each encoding through each channel."""
        functions = (self.customers, self.deliver, self.echo, self.fail)
        broker = Broker([tool_of(each) for each in functions])
        with AuditLog(max_entries=10_000) as audit:
            with Sandbox(tools=broker, privacy=privacy, audit=audit, pool=0) as sandbox:
                for number, (encoding, channel) in enumerate(self.programs()):
                    self._run_one(sandbox, number, encoding, channel)
            self._look(
                "the audit trail", msgspec.json.encode(audit.get_entries()).decode(), str, None
            )

    def programs(self) -> list[tuple[str, str]]:
        """Return the programs: an encoding and a channel each."""
        every = [(encoding, channel) for channel in CHANNELS for encoding in ENCODINGS]
        return every[: len(self.batches)]

    def _run_one(self, sandbox: Sandbox, number: int, encoding: str, channel: str) -> None:
        encode, decode = ENCODINGS[encoding]
        code = _PROGRAM.format(batch=number, encode=encode, channel=CHANNELS[channel])
        heard: list[bytes] = []
        result = sandbox.execute(
            code, collect=["*"], on_output=lambda _, data: heard.append(data), timeout=30
        )
        said = [*_texts(result.for_model()), b"".join(heard).decode("utf-8", "replace")]
        for text in said:
            self._look(f"{encoding} by {channel}", text, decode, number)

    def _look(self, name: str, said: str, decode: Callable[[str], str], batch: int | None) -> None:
        """Count the values that a model reads in a text, as it is or decoded."""
        self.seen_characters += len(said)
        values = self.batches[batch] if batch is not None else [v for b in self.batches for v in b]
        read = said.casefold() + decode(said).casefold()
        self.leaks += [(name, value) for value in values if value.casefold() in read]


def _texts(result: SandboxResult) -> list[str]:
    """Return every text that a result has, and the files."""
    files = [each.data.decode("utf-8", "replace") for each in result.artifacts]
    names = [each.name for each in result.artifacts]
    plain = {name: value for name, value in result.to_dict().items() if name != "artifacts"}
    return [*files, *names, *_leaves(plain)]


def _leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [leaf for pair in value.items() for each in pair for leaf in _leaves(each)]
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in _leaves(each)]
    return [str(value)]
