"""A network by name: a program reaches the one host that its policy names; for it no other exists."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_network

from cellwright import NetworkRule, Policy, Sandbox
from cellwright.policies.policy import Network

PROGRAM = """
from urllib.request import urlopen

answer = urlopen(url).read().decode()
try:
    urlopen("http://example.org")
except OSError as why:
    print("example.org:", why)
answer
"""


class HelloPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello from the host")

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    server = HTTPServer(("0.0.0.0", 0), HelloPage)  # noqa: S104 - the name below may have any address
    threading.Thread(target=server.serve_forever, daemon=True).start()
    name, port = socket.gethostname(), server.server_port
    found = {str(ip_network(each[4][0])) for each in socket.getaddrinfo(name, port)}
    rule = NetworkRule(host=name, ports=(port,), schemes=("http",), addresses=tuple(found))
    with Sandbox(policy=Policy(name="greeting", network=Network(allow=(rule,)))) as sandbox:
        result = sandbox.execute(PROGRAM, inputs={"url": f"http://{name}:{port}/"})
        print(result.stdout + str(result.value or result.error))
    server.shutdown()


if __name__ == "__main__":
    main()
