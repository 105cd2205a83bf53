"""Daemons in processes of their own, and clients that send invalid frames."""

import contextlib
import glob
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cellwright import Sandbox
from cellwright.harness.sandbox.parameters import CallArguments
from cellwright.harness.sandbox.remote.call_frames import packed
from cellwright.harness.sandbox.remote.frames import VERSION, Execute, Hello, Reply, Welcome
from cellwright.policies.policy import Limits
from cellwright.runner import channel
from cellwright.runner.messages import decode, encode
from tests.conftest import ROOT

SCRIPT = """
import argparse, resource, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from cellwright.harness.cli.serving.serve import serve
from cellwright.harness.servers.daemon.quotas import ServeLimits
from tests.conftest import policy_named
{imports}
if {descriptors}:
    resource.setrlimit(resource.RLIMIT_NOFILE, ({descriptors}, {descriptors}))
options = argparse.Namespace(
    socket=Path({path!r}), pool=2, workers={workers}, image=None, audit={audit!r}, drain={drain}, units=None, delegated=False, sessions={sessions},
    session_idle={idle}, session_freeze=300.0, session_lifetime={lifetime}, python=None, backend=None, runtime=None, rootfs=None,
    find_links={find_links!r}, no_index={find_links!r} is not None, index_url=None, optional=(), check=False, metrics={metrics!r}, health=None, request_log={request_log!r}, otel=False,
)
serve(options, {policies}, ServeLimits(**{limits!r}))
"""
PROFILES = '[policy_named("strict"), policy_named("standard")]'


class Daemon:
    """One that serves the profiles strict and standard at `path`."""

    def __init__(self, path: Path, process: "subprocess.Popen[bytes]") -> None:
        self.path = path
        self.process = process
        self.said = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until_it_serves(self) -> None:
        assert self.process.stderr
        while b"serving" not in self.said:
            assert select.select([self.process.stderr], [], [], 30)[0]
            said = os.read(self.process.stderr.fileno(), 65536)
            assert said, self.said.decode()
            self.said += said

    def sandbox(self, policy: str = "strict") -> Sandbox:
        return Sandbox(connect=self.path, policy=policy)

    def is_well(self) -> bool:
        """Tell whether it serves a client that has nothing to do with the others."""
        code = f"""
import sys
sys.path[:0] = {[str(ROOT), *sys.path]!r}
from cellwright import Sandbox
with Sandbox(connect={str(self.path)!r}) as sandbox:
    print(sandbox.execute("6 * 7").value)
"""
        done = subprocess.run(
            [sys.executable, "-I", "-c", code], stdout=-1, timeout=300, check=False
        )
        return done.stdout == b"42\n"

    def descriptors(self) -> int:
        return len(glob.glob(f"/proc/{self.pid}/fd/*"))

    def resident_mib(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status; what it said is in `said`."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        assert self.process.stderr
        self.said += self.process.communicate(timeout=300)[1]
        return self.process.returncode


@contextlib.contextmanager
def serving(
    path: Path, *, drain: float = 10.0, audit: str | None = None, descriptors: int = 0,
    sessions: int = 32, idle: float = 1800.0, lifetime: float = 86_400.0,
    find_links: str | None = None, policies: str = PROFILES, imports: str = "",
    metrics: str | None = None, request_log: str | None = None, workers: int = 1,
    **limits: Any,
) -> Iterator[Daemon]:  # fmt: skip
    """Start one; `policies` is an expression in Python, for which `imports` are statements."""
    script = SCRIPT.format(
        paths=[str(ROOT), *sys.path], path=str(path), drain=drain, audit=audit, limits=limits,
        descriptors=descriptors, sessions=sessions, idle=idle, policies=policies, imports=imports,
        lifetime=lifetime, find_links=find_links, metrics=metrics, request_log=request_log,
        workers=workers,
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    daemon = Daemon(path, process)
    try:
        daemon.wait_until_it_serves()
        yield daemon
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=300)


class RawClient:
    """Says what it is told to, whether that makes sense or not."""

    def __init__(self, path: Path, *, greets: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(os.fspath(path))
        self.socket.settimeout(30)
        if greets:
            self.say(Hello(VERSION))
            assert isinstance(self.hear(), Welcome)

    def say(self, frame: msgspec.Struct) -> None:
        channel.send(self.socket, encode(frame))

    def hear(self) -> Any:
        """Return the next frame, None at the end."""
        receiver = channel.Receiver(self.socket, 1 << 30)
        for _ in range(2):
            with contextlib.suppress(ConnectionError):
                frame = receiver.receive_whole()
                return decode(frame, Reply) if frame else None
        return None

    def hear_all(self) -> list[Any]:
        """Return every frame until the end."""
        frames = []
        while (frame := self.hear()) is not None:
            frames.append(frame)
        return frames

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def program(code: str, session: str = "", *, stream: bool = False, **given: Any) -> Execute:
    return packed(CallArguments(code=code, **given), Limits(), session, stream=stream)
