"""A stage: a network and a file system view of the tests' own, in which public names lead to servers
of the tests, with certificates that this machine's programs trust there.

`enter` starts the program again in namespaces of its own (unshare(1)); so no port is taken, and no
packet can leave the machine.  Needs root.  Only copies are mounted, and only over files of the host:
a mount in the directory of the stage would have its source emptied when that directory is removed.
"""

import contextlib
import os
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_INSIDE = "CELLWRIGHT_STAGE"
_CERTIFICATES = Path("/etc/ssl/certs")
_BUNDLE = "ca-certificates.crt"
# Servers and programs each have a network: srt lets no name stand for an address of its own host.
ADDRESS, _PROGRAMS_ADDRESS = "10.77.0.1", "10.77.0.2"
# Each has a home directory of its own: a cache of one is no help to another.
PEOPLE = {"root": 0, "user": 1001, "outside": 1002, "srt": 1003}
# Each ecosystem reads its own; the bundle has the authorities of this host and that of the tests.
TRUST = {
    name: str(_CERTIFICATES / _BUNDLE)
    for name in (
        "SSL_CERT_FILE",
        "NODE_EXTRA_CA_CERTS",
        "REQUESTS_CA_BUNDLE",
        "PIP_CERT",
        "CARGO_HTTP_CAINFO",
    )
}

Answer = tuple[int, str, bytes]
Site = Callable[[str, str, bytes], Answer]  # the name, the path, the body of the request


def enter(module: str) -> None:
    """Start this program again in namespaces of its own, unless it is there."""
    if _INSIDE not in os.environ:
        os.environ[_INSIDE] = "yes"
        command = ["unshare", "--net", "--mount", "--", sys.executable, "-m", module]
        os.execvp(command[0], [*command, *sys.argv[1:]])


@contextlib.contextmanager
def stage(sites: Mapping[str, Site], directory: Path) -> Iterator[list[str]]:
    """Serve each name over http and https until the block ends; return the command that starts another
    one in the network of programs."""
    hosts = directory / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{ADDRESS} {name}\n" for name in sites))
    users = directory / "passwd"  # the JVM takes the home directory from there
    entries = (
        f"{name}:x:{uid}:{uid}::{directory}/{name}/home:/bin/sh\n"
        for name, uid in PEOPLE.items()
        if uid
    )
    users.write_text(Path("/etc/passwd").read_text() + "".join(entries))
    for file, place in ((hosts, "/etc/hosts"), (users, "/etc/passwd")):
        _run("mount", "--bind", str(file), place)
    context = _trusted(directory, list(sites))
    with _network_of_programs() as enter_it, _serving(80, sites), _serving(443, sites, context):
        yield enter_it


@contextlib.contextmanager
def _network_of_programs() -> Iterator[list[str]]:
    """Make a network that is connected with this one alone."""
    holder = subprocess.Popen(
        ["unshare", "--net", "--", "sh", "-c", "echo ready; read end"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout
        holder.stdout.readline()
        enter_it = ["nsenter", f"--net=/proc/{holder.pid}/ns/net", "--"]
        peer = ("type", "veth", "peer", "name", "programs", "netns", str(holder.pid))
        _run("ip", "link", "add", "servers", *peer)
        for prefix, device, address in (
            ([], "servers", ADDRESS),
            (enter_it, "programs", _PROGRAMS_ADDRESS),
        ):
            _run(*prefix, "ip", "address", "add", f"{address}/24", "dev", device)
            _run(*prefix, "ip", "link", "set", device, "up")
            _run(*prefix, "ip", "link", "set", "lo", "up")
        try:
            yield enter_it
        finally:
            holder.communicate()


def _trusted(directory: Path, names: list[str]) -> ssl.SSLContext:
    """Make an authority and a certificate for the names, and mount stores with it over the host's."""
    authority, key, request = (str(directory / name) for name in ("ca.pem", "ca.key", "request"))
    own, own_key, extensions = (str(directory / name) for name in ("own.pem", "own.key", "names"))
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _run(
        "openssl", "req", "-x509", *new, "-days", "2", "-subj", "/CN=tests of cellwright",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign", "-keyout", key, "-out", authority,
    )  # fmt: skip
    _run("openssl", "req", *new, "-subj", f"/CN={names[0]}", "-keyout", own_key, "-out", request)
    alternatives = ",".join(f"DNS:{name}" for name in names)
    Path(extensions).write_text(f"subjectAltName={alternatives}\nextendedKeyUsage=serverAuth\n")
    _run(
        "openssl", "x509", "-req", "-in", request, "-CA", authority, "-CAkey", key, "-days", "2",
        "-set_serial", "2", "-extfile", extensions, "-out", own,
    )  # fmt: skip
    store = directory / "certs"
    shutil.copytree(_CERTIFICATES, store, symlinks=True)
    bundle = (store / _BUNDLE).read_bytes() + Path(authority).read_bytes()
    (store / _BUNDLE).write_bytes(bundle)
    shutil.copy(authority, store / "cellwright-tests.pem")
    _run("openssl", "rehash", str(store))
    if (store / "java/cacerts").exists() and shutil.which("keytool"):
        _run(
            "keytool", "-importcert", "-noprompt", "-alias", "cellwright-tests", "-file", authority,
            "-keystore", str(store / "java/cacerts"), "-storepass", "changeit",
        )  # fmt: skip
    _run("mount", "--bind", str(store), str(_CERTIFICATES))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own, own_key)
    return context


@contextlib.contextmanager
def _serving(
    port: int, sites: Mapping[str, Site], context: ssl.SSLContext | None = None
) -> Iterator[None]:
    server = ThreadingHTTPServer((ADDRESS, port), _handler(sites))
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(sites: Mapping[str, Site]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = (
                self._chunks() if "Transfer-Encoding" in self.headers else self.rfile.read(length)
            )
            name = (self.headers.get("Host") or "").partition(":")[0]
            status, kind, data = (
                sites[name](name, self.path, body) if name in sites else (404, "", b"")
            )
            self.send_response(status)
            self.send_header("Content-Type", kind or "text/plain")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_POST = do_HEAD = do_PUT = do_GET  # noqa: N815 - names of http.server

        def _chunks(self) -> bytes:
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]}: status {done.returncode}: {done.stderr.strip()}")
