"""Daemons that are started by `cellwright serve --config FILE`, and scrapes of them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import OPTIONAL, ROOT, soon
from tests.harness.servers.daemon.daemons import Daemon
from tests.harness.servers.operations.test_measurements import Samples, samples


class ConfiguredDaemon(Daemon):
    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        super().__init__(folder / "s", process)
        self.file = folder / "daemon.toml"
        self.log = folder / "stderr"

    def wait_until_it_serves(self) -> None:
        assert soon(lambda: "serving" in self.log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()

    def wait(self) -> int:
        return self.process.wait(60)

    def configure(self, text: str) -> None:
        self.file.write_text(configuration(text))

    def reload(self, text: str) -> str:
        """Write another file, have it read, and return what the daemon says of it."""
        self.configure(text)
        return self.reload_as_it_is()

    def reload_as_it_is(self) -> str:
        before = len(self.log.read_text())
        self.process.send_signal(signal.SIGHUP)
        assert soon(lambda: "\n" in self.log.read_text()[before:])
        return self.log.read_text()[before:]

    def ask(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a page."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(30)
            sock.connect(os.fspath(self.file.parent / "m"))
            sock.sendall(
                f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            )
            told = b""
            while piece := sock.recv(65536):
                told += piece
        head, _, body = told.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), body

    def scrape(self) -> Samples:
        status, body = self.ask("/metrics")
        assert status == 200
        return samples(body)

    def sees(self, series: str, value: float) -> bool:
        """Wait until a scrape has a value; tell whether it came."""
        return soon(lambda: self.scrape().get(series) == value)


def configuration(text: str) -> str:
    optional = f"optional = {list(OPTIONAL)!r}\n" if OPTIONAL else ""
    return f'socket = "s"\nmetrics = "./m"\npool = 1\n{optional}{text}'


@contextlib.contextmanager
def configured(folder: Path, text: str = "") -> Iterator[ConfiguredDaemon]:
    """Start a daemon whose files are in `folder`."""
    (folder / "daemon.toml").write_text(configuration(text))
    with open(folder / "stderr", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cellwright", "serve", "--config", f"{folder}/daemon.toml"],
            cwd=ROOT, stdin=subprocess.DEVNULL, stderr=log,
        )  # fmt: skip
    daemon = ConfiguredDaemon(folder, process)
    try:
        daemon.wait_until_it_serves()
        yield daemon
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
