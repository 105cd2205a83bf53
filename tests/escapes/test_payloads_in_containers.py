"""Guest payloads in cells inside a container: what an OCI runtime puts around cells opens nothing."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cellwright import HostSettings, Sandbox
from tests.escapes.test_payloads import ATTACKS, OWN, Host, case_of, policy_for, stays_inside
from tests.escapes.test_payloads import host as host

pytestmark = [
    pytest.mark.needs("root", "userns", "runc"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*known holes"),
]
# About namespaces, ids, mounts, descriptors and calls, which a container could change; without those
# that fill memory or wait for a limit, which are the cell's own.
ABOUT = ("FD-", "FS-", "IPC-", "KERN-", "NET-", "NOTIF-", "NS-", "OUT-", "PRIV-", "PROTO-", "SC-")
# They need a path shown beneath a writable one, or a cell of another sandbox, without a container.
_WITHOUT = {"LAY-19", "LAY-21", "LAY-22", "LAY-39"}
PAYLOADS = [
    path for path in (*OWN, *ATTACKS)
    if case_of(path) not in _WITHOUT and (path in OWN or path.name.startswith(ABOUT))
]  # fmt: skip


@pytest.fixture(scope="module", params=["standard"])
def sandbox(request: pytest.FixtureRequest, host: Host) -> Iterator[Sandbox]:
    policy = policy_for(request.param, host)
    read = tuple(path for path in policy.filesystem.read if path != host.inner)
    files = msgspec.structs.replace(policy.filesystem, read=read)
    policy = msgspec.structs.replace(policy, filesystem=files)
    with Sandbox(policy=policy, pool=4, host=HostSettings(backend="oci", runtime="runc")) as box:
        yield box


@pytest.mark.parametrize("payload", PAYLOADS, ids=case_of)
def test_a_payload_stays_inside(
    sandbox: Sandbox, host: Host, payload: Path, record_property: pytest.FixtureRequest
) -> None:
    stays_inside(sandbox, host, payload, record_property)
