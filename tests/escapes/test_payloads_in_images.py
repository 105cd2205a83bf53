"""Guest payloads as root of an image: its capabilities and its ids open nothing beside its own files.

All of them are run by `python -m tests.escapes.verdicts --only image`.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import Sandbox
from tests.escapes.image_cells import OWN_TO_ROOT, ids_of, in_an_image, made_image
from tests.escapes.test_payloads import ATTACKS, OWN, Host, case_of, policy_for, stays_inside
from tests.escapes.test_payloads import host as host
from tests.escapes.test_payloads_in_containers import ABOUT

pytestmark = [
    pytest.mark.needs("busybox", "root", "userns", "cgroup", "image"),
    pytest.mark.slow,
]
# Of floods, long lists and limits, which root of an image has as every program; a sandbox of another kind.
_WITHOUT = {
    "LAY-01",
    "LAY-13",
    "LAY-14",
    "LAY-18",
    "LAY-19",
    "LAY-23",
    "LAY-29",
    "LAY-39",
    "NOTIF-01",
    "NOTIF-03",
}
PAYLOADS = [
    path for path in (*OWN, *ATTACKS)
    if case_of(path) not in _WITHOUT and (path in OWN or path.name.startswith(ABOUT))
]  # fmt: skip
_WITH_ONE_ID = ("FS-", "NS-", "PRIV-", "LAY-0")


@pytest.fixture(scope="module")
def sandboxes(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Sandbox]]:
    with contextlib.ExitStack() as stack:
        found = {}
        for kind in ("root", "one"):
            image = made_image(tmp_path_factory.mktemp("image"), ids_of(kind))
            policy = policy_for("workshop", host)
            found[kind] = stack.enter_context(in_an_image(ids_of(kind), image, policy, pool=2))
        yield found


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        pytest.param(kind, path, id=f"{kind}-{case_of(path)}")
        for kind in ("root", "one")
        for path in PAYLOADS
        if kind == "root" or path.name.startswith(_WITH_ONE_ID)
    ],
)
def test_a_payload_stays_inside(
    sandboxes: dict[str, Sandbox], host: Host, kind: str, payload: Path,
    record_property: pytest.FixtureRequest,
) -> None:  # fmt: skip
    stays_inside(
        sandboxes[kind], host, payload, record_property, OWN_TO_ROOT.get(case_of(payload), "")
    )
