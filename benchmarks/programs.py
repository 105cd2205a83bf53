"""The sample programs that every peer runs: the same source for all."""

from typing import NamedTuple

from ..policies.policy import MIB


class SampleProgram(NamedTuple):
    name: str
    source: str
    printing: str  # the same for those who have no value of a last expression: it prints
    prints: str


_TEXT = """
import json
import re

LOG = '''
2026-03-01 12:00:01 INFO  user=ada action=login ms=12
2026-03-01 12:00:02 WARN  user=bob action=upload ms=340
2026-03-01 12:00:05 INFO  user=ada action=search ms=48
2026-03-01 12:00:09 ERROR user=eve action=login ms=9
2026-03-01 12:00:11 INFO  user=bob action=search ms=51
'''
FIELD = re.compile(r"(\\w+)=(\\w+)")
totals = {}
for line in LOG.strip().splitlines():
    fields = dict(FIELD.findall(line))
    entry = totals.setdefault(fields["user"], {"calls": 0, "ms": 0})
    entry["calls"] = entry["calls"] + 1
    entry["ms"] = entry["ms"] + int(fields["ms"])
slowest = max(totals, key=lambda user: totals[user]["ms"])
text = json.dumps(totals, sort_keys=True)
print(slowest, len(text), json.loads(text)[slowest]["ms"])
""".strip()
_NUMPY = """
import numpy
matrix = numpy.arange(10_000.0).reshape(100, 100)
print(int((matrix @ matrix.T).trace()))
""".strip()

SUM = SampleProgram("1+1", "1+1", "print(1+1)", "2")
TEXT = SampleProgram("20 lines of json and re", _TEXT, _TEXT, "bob 93 391")
NUMPY = SampleProgram("numpy, 100 x 100", _NUMPY, _NUMPY, "333283335000")
EVERY = (SUM, TEXT, NUMPY)

# What an unkind neighbour does for as long as it may, each within its caps.
NEIGHBOURS = {
    "forks": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "floods its output": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "allocates to its cap": f"while True:\n    x = [b'x' * {MIB} for _ in range(200)]\n    del x",
}
MORE_NEIGHBOURS = {
    "needs more than its cap": f"x = []\nwhile True: x.append(b'x' * {MIB})",
    "fills its workspace": f"while True: open('f', 'ab').write(b'x' * {MIB})",
    "is refused, over and over": (
        "import contextlib, socket\nwhile True:\n"
        "    with contextlib.suppress(OSError): socket.socket(socket.AF_NETLINK)"
    ),
    "burns a processor": "while True: pass",
}
