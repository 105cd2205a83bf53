"""The cost of a program for a client of the web server, beside the library in its own process.

The server is a process of its own.  The client is `http.client` on one connection, so that no client's
own work is in the numbers.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from .measuring import MS, Contender, median, percentile_columns, percentile_row, side_by_side
from .programs import SUM
from .report import Column, Criterion, Report, ReportTable
from .settings import Settings, sandbox

_OWN, _OWN_SESSION = "`execute('1+1')`, no protocol", "the same in a session"
_ABOUT = "`GET /v1/server`, no program"
_RUN, _SESSION = "`POST /v1/executions` of `1+1`", "the same in a session"
_STREAM = "`POST /v1/executions/stream` of `1+1`"
_TOKEN = "a-token-of-the-benchmark"
_PRINTED = 4 * 1024 * 1024
_PRINT = f"import os\nfor _ in range({_PRINTED // 65536}): os.write(1, b'x' * 65536)"
_STREAMS = 5  # measured; the median counts
_PAUSE_SECONDS = 0.006  # before each request: a client may make 200 a second (WebLimits)


class WebClient:
    """A minimal client on one connection."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address)
        self._headers = {
            "Authorization": f"Bearer {_TOKEN}", "Content-Type": "application/json"
        }  # fmt: skip

    def ask(self, method: str, path: str, body: Any = None) -> bytes:
        """Return the body of an answer; raises RuntimeError for a problem."""
        data = None if body is None else json.dumps(body).encode()
        self._connection.request(method, path, data, self._headers)
        answer = self._connection.getresponse()
        found = answer.read()
        if answer.status >= 400:
            raise RuntimeError(found.decode())
        return found

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def served(*options: str) -> Iterator[WebClient]:
    """Start a server, connect to it, and end it after."""
    command = (sys.executable, "-I", "-m", "cellwright", "web", "--http", "127.0.0.1:0", *options)
    env = {**os.environ, "CELLWRIGHT_WEB_TOKEN": _TOKEN}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr
            address = process.stderr.readline().decode().split("http://")[-1].strip()
            with contextlib.closing(WebClient(address)) as client:
                yield client
        finally:
            process.terminate()
            process.communicate()


def measure(settings: Settings) -> Report:
    """Return percentiles of requests in turn, and the bytes a second of a stream."""
    layers = settings.policy.optional_layers
    optional = [part for layer in layers for part in ("--optional", layer)]
    with served(*optional) as ours, sandbox(settings, audit=False) as own, own.session() as session:
        opened = json.loads(ours.ask("POST", "/v1/sessions", {}))["session"]
        program = {"code": SUM.source}
        run = partial(ours.ask, "POST", "/v1/executions", program)
        times = side_by_side(
            [_paced(each) for each in (
                Contender(_OWN, partial(own.execute, SUM.source), own.settle),
                Contender(_OWN_SESSION, partial(session.execute, SUM.source)),
                Contender(_ABOUT, partial(ours.ask, "GET", "/v1/server")),
                Contender(_RUN, run),
                Contender(
                    f"{_SESSION}, `POST`",
                    partial(ours.ask, "POST", f"/v1/sessions/{opened}/executions", program),
                ),
                Contender(
                    _STREAM, partial(ours.ask, "POST", "/v1/executions/stream", program)
                ),
            )],
            settings.amount(1000, 20),
        )  # fmt: skip
        rates = [_rate(own, ours) for _ in range(_STREAMS)]
    return _report(times, rates)


def _paced(contender: Contender) -> Contender:
    def prepare() -> None:
        contender.prepare()
        time.sleep(_PAUSE_SECONDS)

    return contender._replace(prepare=prepare)


def _rate(own: Any, ours: WebClient) -> tuple[float, float]:
    """Return the bytes of output a second that a caller of the library and a client get."""
    start = time.perf_counter()
    got = sum(len(data) for _, data in own.start(_PRINT).output())
    between = time.perf_counter()
    sent = len(ours.ask("POST", "/v1/executions/stream", {"code": _PRINT}))
    return got / (between - start), min(sent, got) / (time.perf_counter() - between)


def _report(times: dict[str, list[float]], rates: list[tuple[float, float]]) -> Report:
    bare = median(times[_OWN])
    calls = ReportTable(
        title="One request",
        columns=(Column("what"), *percentile_columns(), Column("ratio of p50", 2)),
        rows=tuple(
            (way, *percentile_row(seconds), median(seconds) / bare)
            for way, seconds in times.items()
        ),
        note="Ratios are to the call of the library in its own process.",
    )
    library, web = (median(each) for each in zip(*rates, strict=True))
    streams = ReportTable(
        title="Output of one program as a stream",
        columns=(Column("what"), Column("MB a second", 1)),
        rows=(("`output()` of the library", library / 1e6), ("events over HTTP", web / 1e6)),
        note=f"The program writes {_PRINTED >> 20} MiB in pieces of 64 KiB; the median of {_STREAMS}.",
    )
    added = (median(times[_RUN]) - bare) * MS
    return Report(
        name="web",
        title="What a program costs a client of the web server",
        tables=(calls, streams),
        verdicts=(
            Criterion(
                "a request adds less than 10 ms to the call of the library", added < 10,
                f"{added:.2f} ms",
            ),
        ),
        notes=("Default policy, every layer on, no audit trail; in turn, one connection.",),
        samples={way: tuple(seconds) for way, seconds in times.items()},
    )  # fmt: skip
