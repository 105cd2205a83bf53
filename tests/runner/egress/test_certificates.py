"""Clients in cells trust the authorities that the host trusts, without a setting of their own."""

from pathlib import Path

import msgspec
import pytest

from cellwright import Sandbox, SandboxStatus
from cellwright.policies.compiling.compile import compile_policy
from cellwright.policies.compiling.host import Host
from cellwright.policies.network.rule import NetworkRule
from cellwright.policies.policy import Filesystem, Network, Policy
from cellwright.runner.host import plans
from tests.network import NAME, answer_http, certificate, needs_openssl, policy, resolving, serving

GET = """
import urllib.request
urllib.request.urlopen(url, timeout=20).read().decode()
"""


@needs_openssl
@pytest.mark.needs("userns")
@pytest.mark.parametrize("shows", [(), ("/etc/ssl/certs",)], ids=["nothing", "the directory"])
def test_a_server_is_trusted_if_the_host_trusts_it(
    shows: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted, context = certificate(tmp_path, NAME)
    trusted.chmod(0o644)
    resolving(monkeypatch, {NAME: [["127.0.0.1"]]})
    outcomes = []
    with serving(answer_http, context) as server:
        rule = NetworkRule(host=NAME, ports=(server.port,), schemes=("https",))
        limited = policy(rule, filesystem=Filesystem(read=shows))
        for places in ((), (str(trusted),)):
            monkeypatch.setattr(plans, "_CERTIFICATES", places)
            with Sandbox(policy=limited, pool=0) as box:
                url = f"https://{NAME}:{server.port}/here"
                outcomes.append(box.execute(GET, inputs={"url": url}))
    refused, answered = outcomes
    assert "CERTIFICATE_VERIFY_FAILED" in str(refused.error)
    if shows:  # the policy's own file stays, and does not have it
        assert "CERTIFICATE_VERIFY_FAILED" in str(answered.error)
    else:
        assert (answered.status, answered.value) == (SandboxStatus.COMPLETED, "/here"), answered


def test_variables_name_the_file_where_there_is_one_and_a_network() -> None:
    networked = Policy(network=Network(allow=(NetworkRule(host=NAME),)))
    host = Host(landlock_abi=7, cgroups={"memory": "", "cpu": "", "pids": ""})
    having = msgspec.structs.replace(host, certificates="/etc/x.pem")
    assert "SSL_CERT_FILE" in compile_policy(networked, having).environment
    assert "SSL_CERT_FILE" not in compile_policy(networked, host).environment
    assert "SSL_CERT_FILE" not in compile_policy(Policy(), having).environment
