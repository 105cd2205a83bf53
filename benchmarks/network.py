"""Reaching a host by name: connections and bytes of a cell, beside those of a plain process and of one
that goes through a CONNECT proxy."""

import json
import os
import subprocess
from functools import partial
from typing import Any

from msgspec.structs import replace

from ..harness.sandbox.sandbox import Sandbox
from ..policies.errors import PolicyError
from ..policies.network.rule import NetworkRule
from ..policies.policy import MIB, Network
from ..runner.egress.addresses import LoopbackName, loopback_name
from ..runner.launching.spawn import interpreter
from .callers import said
from .leak_checks import LeakCheck, censuses, own_temporary_files, settled, told_at_once
from .measuring import (
    MS,
    Contender,
    Times,
    median,
    quartile_bar,
    quartile_columns,
    quartiles,
    side_by_side,
)
from .network_servers import STREAM_BYTES, proxy, server
from .report import Bars, Column, Criterion, Report, ReportTable, Value
from .settings import Settings, sandbox

_DIRECT, _PROXIED, _CELL = "a plain process, directly", "through a CONNECT proxy", "a cell, by name"
_WAYS = (_DIRECT, _PROXIED, _CELL)
_CONNECT, _TRIP, _DOWN, _UP, _BURST = "connect", "round trip", "download", "upload", "burst"
_IN_A_BURST = 160  # connections of one program: a cell is slowed down beyond 200 at once
_MANY = 10_000
_WARM_UP = 5
_LEAST_RATE = 0.3  # share of the rate of a proxy without checks

_RATIOS = Column("of direct"), Column("of the proxy"), Column("runs", 0)

_CLIENT = """
import socket, threading, time
def connect():
    if not proxy_port:
        return socket.create_connection((name, port))
    sock = socket.create_connection((proxy_address, proxy_port))
    sock.sendall(f"CONNECT {name}:{port} HTTP/1.1\\r\\nHost: {name}:{port}\\r\\n\\r\\n".encode())
    answer = b""
    while not answer.endswith(b"\\r\\n\\r\\n"):
        answer += sock.recv(4096)
    return sock
def echo(sock):
    began = time.perf_counter()
    sock.sendall(b"e")
    assert sock.recv(1) == b"e"
    return time.perf_counter() - began
def one():
    began = time.perf_counter()
    with connect() as sock:
        echo(sock)
        return time.perf_counter() - began
def measure_connect():
    return sorted(one() for _ in range(31))[15]
def measure_round_trip():
    with connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sorted(echo(sock) for _ in range(301))[150]
def measure_download():
    with connect() as sock:
        sock.sendall(b"d")
        size = len(sock.recv(1))
        began = time.perf_counter()
        while data := sock.recv(65536):
            size += len(data)
        assert size == stream_bytes, size
        return time.perf_counter() - began
def measure_upload():
    with connect() as sock:
        sock.sendall(b"u")
        chunk, began = bytes(65536), time.perf_counter()
        for _ in range(stream_bytes // 65536):
            sock.sendall(chunk)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b"u"
        return time.perf_counter() - began
def measure_burst():
    threads = [threading.Thread(target=lambda: [one() for _ in range(burst // 8)]) for _ in range(8)]
    began = time.perf_counter()
    for each in threads: each.start()
    for each in threads: each.join()
    return (time.perf_counter() - began) / burst
"""
_OUTSIDE = "import json, sys\nglobals().update(json.loads(sys.argv[1]))\n"


def measure(settings: Settings) -> Report:
    """Return what a connection and its bytes cost by each way, and what many connections leave."""
    own = reachable_name()
    with own_temporary_files(), server(own.address) as port, proxy(own.address) as proxy_port:
        reaching = settings._replace(policy=replace(settings.policy, network=network_to(own, port)))
        given = {
            "name": own.name, "port": port, "proxy_port": 0, "proxy_address": own.address,
            "stream_bytes": STREAM_BYTES, "burst": _IN_A_BURST,
        }  # fmt: skip
        with sandbox(reaching) as made:
            times = _timed(made, given, proxy_port, settings.amount(30, 2))
        checks = told_at_once([_leaks(reaching, given, settings.amount(_MANY, 2 * _IN_A_BURST))])
    return _report(times, checks)


def reachable_name() -> LoopbackName:
    """Return a name of this host's loopback that a rule can have; raises PolicyError without one."""
    own = loopback_name()
    if own is None:
        raise PolicyError(
            "network: no name but localhost stands for this host's loopback",
            "have this host's name stand for 127.0.1.1 in /etc/hosts",
        )
    return own


def network_to(own: LoopbackName, port: int) -> Network:
    """Return the rules by which cells reach one port of this host."""
    rule = NetworkRule(
        host=own.name, ports=(port,), schemes=("tcp",), connections=256,
        connections_per_second=100_000.0, addresses=(own.network,),
    )  # fmt: skip
    return Network(allow=(rule,))


def _timed(made: Sandbox, given: dict[str, Any], proxy_port: int, rounds: int) -> Times:
    contenders = []
    for what in (_CONNECT, _TRIP, _DOWN, _UP, _BURST):
        code = f"{_CLIENT}measure_{what.replace(' ', '_')}()"
        through = given | {"proxy_port": proxy_port}
        contenders += [
            Contender(_key(what, _DIRECT), partial(_outside, code, given)),
            Contender(_key(what, _PROXIED), partial(_outside, code, through)),
            Contender(_key(what, _CELL), partial(_inside, made, code, given), made.settle),
        ]
    return side_by_side(contenders, rounds)


def _key(what: str, way: str) -> str:
    return f"{what}: {way}"


def _outside(code: str, given: dict[str, Any]) -> float:
    """Return the seconds that a plain process measures."""
    *lines, last = code.splitlines()
    text = "\n".join([_OUTSIDE, *lines, f"print({last})"])
    command = [interpreter(), "-I", "-S", "-c", text, json.dumps(given)]
    return float(subprocess.run(command, capture_output=True, check=True).stdout)


def _inside(made: Sandbox, code: str, given: dict[str, Any]) -> float:
    result = made.execute(code, inputs=given)
    if not isinstance(result.value, float):
        raise RuntimeError(f"a cell did not measure: {said(result)}")
    return result.value


def _leaks(settings: Settings, given: dict[str, Any], connections: int) -> LeakCheck:
    """Make so many connections, some hundred a cell."""
    wrong: list[str] = []
    code = f"{_CLIENT}measure_burst()"

    def connect() -> int:
        result = made.execute(code, inputs=given)
        if not isinstance(result.value, float):
            wrong.append(said(result))
        return len(result.connections)

    with sandbox(settings) as made:
        for _ in range(_WARM_UP):
            connect()
        before, count = settled(made.settle), 0
        for _ in range(-(-connections // _IN_A_BURST)):
            count += connect()
        after = settled(made.settle, before)
    if count < connections:
        wrong.append(f"{count:,} connections were recorded, of {connections:,}")
    return LeakCheck("connections", count, wrong, before, after)


def _report(times: Times, checks: tuple[LeakCheck, ...]) -> Report:
    mib = STREAM_BYTES / MIB
    return Report(
        name="network",
        title="Hosts by name",
        tables=(
            _latencies("A connection, until the first byte is back", _CONNECT, times),
            _latencies("A byte there and back on an open connection", _TRIP, times),
            _rates(f"A stream of {mib:.0f} MiB to the program", _DOWN, times, "MiB/s", mib),
            _rates(f"A stream of {mib:.0f} MiB from the program", _UP, times, "MiB/s", mib),
            _rates(f"Connections: {_IN_A_BURST} by 8 threads", _BURST, times, "a second", 1.0),
            censuses(checks),
        ),
        charts=(_chart(times),),
        verdicts=(_verdict(times), *(each for check in checks for each in check.verdicts())),
        notes=(
            "Each way resolves the same name, which stands for loopback.",
            "The server and the proxy have a process each: who else runs is in all rows.",
            "The programs are the same, in the same interpreter; their start is in no row.",
            "The proxy copies with two threads a connection and checks nothing.",
            "A cell makes 200 connections at once; beyond, 100 a second.",
            f"{os.cpu_count()} processors.",
        ),
        samples={name: tuple(values) for name, values in times.items()},
    )


def _latencies(title: str, what: str, times: Times) -> ReportTable:
    """Return milliseconds by each way, and how much longer than directly they are."""
    found = {way: [each * MS for each in times[_key(what, way)]] for way in _WAYS}
    direct, proxied = median(found[_DIRECT]), median(found[_PROXIED])
    rows: list[tuple[Value, ...]] = []
    for way, values in found.items():
        usual = median(values)
        compared = (usual - direct, usual / direct, usual / proxied)
        rows.append((way, *quartiles(values), *compared, len(values)))
    columns = (
        Column("how"), *quartile_columns("ms", 3), Column("added ms", 3), *_RATIOS,
    )  # fmt: skip
    return ReportTable(title=title, columns=columns, rows=tuple(rows))


def _rates(title: str, what: str, times: Times, unit: str, amount: float) -> ReportTable:
    """Return what is done in a second by each way, if a measurement is for `amount`."""
    found = {way: [amount / each for each in times[_key(what, way)]] for way in _WAYS}
    direct, proxied = median(found[_DIRECT]), median(found[_PROXIED])
    rows: list[tuple[Value, ...]] = [
        (way, *quartiles(values), median(values) / direct, median(values) / proxied, len(values))
        for way, values in found.items()
    ]
    columns = (Column("how"), *quartile_columns(unit, 0), *_RATIOS)
    return ReportTable(title=title, columns=columns, rows=tuple(rows))


def _chart(times: Times) -> Bars:
    bars = tuple(quartile_bar(way, times[_key(_CONNECT, way)], MS) for way in _WAYS)
    return Bars(title="A connection, until the first byte is back", unit="ms", bars=bars)


def _verdict(times: Times) -> Criterion:
    """Compare streams: a connection is made once, and its cost depends on who else runs."""
    rates = [
        median(times[_key(what, _PROXIED)]) / median(times[_key(what, _CELL)])
        for what in (_DOWN, _UP)
    ]
    return Criterion(
        f"streams of a cell reach {_LEAST_RATE:.0%} of the rate through a CONNECT proxy",
        min(rates) > _LEAST_RATE,
        f"{rates[0]:.2f} to the program, {rates[1]:.2f} from it",
    )
