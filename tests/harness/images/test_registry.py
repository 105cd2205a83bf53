"""Images from a registry: the right content or none, over broken connections, without leaking a token."""

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import LaunchError, PolicyError
from cellwright.harness.sandbox.images.image_registry import PullSettings
from cellwright.harness.sandbox.images.image_store import ImageStore
from tests.harness.images.layers import archive, layout, member
from tests.harness.images.registry_server import RegistryServer
from tests.network import NAME, certificate

pytestmark = pytest.mark.needs("userns")
SMALL = archive(member("etc/motd", b"hello"))
LARGE = archive(member("random", os.urandom(8000)))


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    made = RegistryServer()
    yield made
    made.close()


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


def test_an_image_is_pulled_once_and_found_by_its_name(
    registry: RegistryServer, store: ImageStore, tmp_path: Path
) -> None:
    name = registry.add("app:1", layout(tmp_path / "image", SMALL, LARGE, Env=["A=b"]))
    image = store.pull(name)
    assert image.config.env == ("A=b",)
    assert image.names == (name,)
    assert (Path(image.layers[0]) / "etc/motd").read_bytes() == b"hello"
    assert store.find(name) == image
    asked = len(registry.asked("/blobs/"))
    assert store.pull(name) == image
    assert len(registry.asked("/blobs/")) == asked + 1  # the configuration alone
    assert not list((tmp_path / "images").glob("*/new/*"))


def test_an_image_is_pulled_by_digest(
    registry: RegistryServer, store: ImageStore, tmp_path: Path
) -> None:
    registry.add("app:1", layout(tmp_path / "image", SMALL))
    digest = next(each for each in registry.manifests if each.startswith("sha256:"))
    name = f"{registry.host}/app@{digest}"
    assert store.pull(name).names == (name,)
    kind, data = registry.manifests[digest]
    registry.manifests[digest] = kind, data + b" "
    with pytest.raises(PolicyError, match="the manifest sha256:.* has another digest"):
        store.pull(name)


def test_an_index_has_an_image_for_each_machine(
    registry: RegistryServer, store: ImageStore, tmp_path: Path
) -> None:
    name = registry.add(
        "app:1", layout(tmp_path / "image", SMALL), os="linux", architecture="arm64"
    )
    assert store.pull(name, PullSettings(machine="arm64")).layers
    with pytest.raises(PolicyError, match="0 images of the index are for linux/s390x"):
        store.pull(name, PullSettings(machine="s390x"))


@pytest.mark.parametrize("faults", [{"breaks"}, {"busy"}, {"breaks", "busy"}])
def test_a_pull_goes_on_after_a_broken_connection(
    faults: set[str], registry: RegistryServer, store: ImageStore, tmp_path: Path
) -> None:
    name = registry.add("app:1", layout(tmp_path / "image", LARGE))
    registry.faults = faults
    assert len((Path(store.pull(name).layers[0]) / "random").read_bytes()) == 8000
    if "breaks" in faults:
        ranges = [each["Range"] for each in registry.asked("/blobs/") if "Range" in each]
        assert ranges[:3] == ["bytes=1000-", "bytes=2000-", "bytes=3000-"]


def test_a_silent_connection_is_given_up_and_the_pull_goes_on(
    registry: RegistryServer, store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellwright.harness.sandbox.images.image_registry._IDLE_SECONDS", 0.5)
    monkeypatch.setattr("cellwright.harness.sandbox.images.image_registry._TRIES", 60)
    name = registry.add("app:1", layout(tmp_path / "image", LARGE))
    registry.faults = {"silent"}
    assert len((Path(store.pull(name).layers[0]) / "random").read_bytes()) == 8000


def test_a_pull_ends_at_its_deadline(
    registry: RegistryServer, store: ImageStore, tmp_path: Path
) -> None:
    name = registry.add("app:1", layout(tmp_path / "image", LARGE))
    registry.faults = {"silent"}
    with pytest.raises(LaunchError, match="cannot pull .*: no whole answer after 0.5 seconds"):
        store.pull(name, PullSettings(seconds=0.5))
    assert store.list() == ()


@pytest.mark.parametrize(
    ("faults", "error", "why"),
    [
        ({"wrong"}, PolicyError, "has another digest"),
        ({"endless"}, PolicyError, "larger than"),
        ({"large manifest"}, PolicyError, "larger than"),
        ({"breaks", "no ranges"}, LaunchError, "the answer ended early"),
    ],
)
def test_a_registry_that_lies_is_refused(
    faults: set[str], error: type[Exception], why: str, registry: RegistryServer, store: ImageStore,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("cellwright.harness.sandbox.images.image_registry._TRIES", 2)
    name = registry.add("app:1", layout(tmp_path / "image", LARGE))
    registry.faults = faults
    with pytest.raises(error, match=why):
        store.pull(name)
    assert store.list() == ()
    assert not list((tmp_path / "images").glob("*/new/*"))


def test_an_unknown_image_is_named(registry: RegistryServer, store: ImageStore) -> None:
    with pytest.raises(PolicyError, match=f"{registry.host}/app:1 is not at the registry"):
        store.pull(f"{registry.host}/app:1")


def test_a_registry_that_is_not_there_is_an_error_with_a_way_out(
    store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellwright.harness.sandbox.images.image_registry._TRIES", 1)
    with pytest.raises(
        LaunchError, match="cannot pull localhost:1/app:latest.*\nhint: an image can"
    ):
        store.pull("localhost:1/app")


def test_a_token_is_asked_for_and_goes_to_no_other_origin(
    registry: RegistryServer, store: ImageStore, tmp_path: Path
) -> None:
    name = registry.add("app:1", layout(tmp_path / "image", SMALL))
    registry.token = "granted"
    storage = RegistryServer()
    try:
        storage.blobs, registry.redirect = registry.blobs, f"http://{storage.host}"
        credentials = tmp_path / "config.json"
        pair = base64.b64encode(b"me:secret").decode()
        credentials.write_text(json.dumps({"auths": {registry.host: {"auth": pair}}}))
        with pytest.raises(PolicyError, match="others can read"):
            store.pull(name, PullSettings(credentials=credentials))
        credentials.chmod(0o600)
        assert store.pull(name, PullSettings(credentials=credentials)).layers
        (asked,) = registry.asked("/token?service=tests&scope=repository%3Aapp%3Apull")
        assert asked["Authorization"] == f"Basic {pair}"
        assert registry.asked("/blobs/")[-1]["Authorization"] == "Bearer granted"
        assert len(storage.requests) == 2
        assert all("Authorization" not in headers for _, headers in storage.requests)
    finally:
        storage.close()


def test_a_denied_image_is_named_with_what_to_do(
    registry: RegistryServer, store: ImageStore, tmp_path: Path
) -> None:
    name = registry.add("app:1", layout(tmp_path / "image", SMALL))
    registry.token = "another than is granted"
    with pytest.raises(
        PolicyError, match="denies access to .*\nhint: .*--credentials names a file"
    ):
        store.pull(name)


def test_plain_http_is_for_loopback_alone(
    registry: RegistryServer, store: ImageStore, tmp_path: Path
) -> None:
    name = registry.add("app:1", layout(tmp_path / "image", SMALL))
    registry.redirect = "http://example.test"
    with pytest.raises(PolicyError, match="example.test: plain HTTP is refused"):
        store.pull(name)


@pytest.mark.needs("openssl")
def test_a_registry_has_a_valid_certificate(
    store: ImageStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted, context = certificate(tmp_path, NAME)
    monkeypatch.setattr(
        "cellwright.harness.sandbox.images.image_registry.system_addresses",
        lambda *_: ["127.0.0.1"],
    )
    monkeypatch.setattr("cellwright.harness.sandbox.images.image_registry._TRIES", 1)
    registry = RegistryServer(context)
    try:
        registry.add("app:1", layout(tmp_path / "image", SMALL))
        name = f"{NAME}:{registry.port}/app:1"
        with pytest.raises(LaunchError, match="invalid certificate"):
            store.pull(name)
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        assert store.pull(name).names == (name,)
    finally:
        registry.close()


def test_layers_of_more_bytes_than_the_limit_are_not_pulled(
    registry: RegistryServer, store: ImageStore, tmp_path: Path
) -> None:
    name = registry.add("app:1", layout(tmp_path / "image", LARGE))
    store.limits = store.limits._replace(total_bytes=1000)
    with pytest.raises(PolicyError, match="is larger than 1000 bytes"):
        store.pull(name)
    assert registry.asked("/blobs/") == []
