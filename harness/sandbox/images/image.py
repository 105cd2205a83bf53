"""`StoredImage`: an image of the store, with the configuration (image-spec, "config.md")."""

import hashlib
from typing import Annotated

import msgspec

from ....policies.errors import PolicyError
from ....runner.channel import refuse_deep_json, refuse_large_json

MOST_LAYERS = 127  # as Docker has
_Texts = Annotated[tuple[str, ...], msgspec.Meta(max_length=10_000)]


class ImageConfig(msgspec.Struct, frozen=True):
    """How programs of an image are started.

    env: variables, each NAME=VALUE
    user: a name or number of the image, perhaps with `:GROUP`; "" is root
    entrypoint, cmd: the command line is both, one after the other
    volumes: directories for data; exposed_ports: such as 80/tcp; shell: of the RUN of a Dockerfile
    """

    env: tuple[str, ...] = ()
    working_dir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    exposed_ports: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    shell: tuple[str, ...] = ()
    stop_signal: str = ""


class StoredImage(msgspec.Struct, frozen=True):
    """An image of the store.

    digest: of its configuration, "sha256:..."
    names: such as debian:12
    layers: directories for overlayfs, the lowest first; without empty ones and repetitions
    size_bytes: of the files of all layers
    created: as its maker says, or ""
    """

    digest: str
    names: tuple[str, ...]
    layers: tuple[str, ...]
    config: ImageConfig
    size_bytes: int
    created: str


class _ConfigSettings(msgspec.Struct, frozen=True, rename="pascal", omit_defaults=True):
    """`config` of the JSON; null is allowed everywhere."""

    env: _Texts | None = None
    working_dir: str | None = None
    user: str | None = None
    entrypoint: _Texts | str | None = None
    cmd: _Texts | str | None = None
    volumes: dict[str, msgspec.Raw] | None = None
    exposed_ports: dict[str, msgspec.Raw] | None = None
    labels: dict[str, str] | None = None
    shell: _Texts | None = None
    stop_signal: str | None = None


class _RootFilesystem(msgspec.Struct, frozen=True):
    diff_ids: Annotated[tuple[str, ...], msgspec.Meta(max_length=10_000)]
    type: str = "layers"


class ConfigFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """The JSON of an image's configuration."""

    rootfs: _RootFilesystem
    architecture: str = ""
    os: str = ""
    created: str | None = None
    config: _ConfigSettings | None = None

    @property
    def settings(self) -> ImageConfig:
        told = self.config or _ConfigSettings()
        return ImageConfig(
            env=told.env or (), working_dir=told.working_dir or "", user=told.user or "",
            entrypoint=_words(told.entrypoint), cmd=_words(told.cmd),
            volumes=tuple(told.volumes or ()), exposed_ports=tuple(told.exposed_ports or ()),
            labels=told.labels or {}, shell=told.shell or (), stop_signal=told.stop_signal or "",
        )  # fmt: skip


def _words(given: tuple[str, ...] | str | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) and given else tuple(given or ())


def read_config(data: bytes) -> ConfigFile:
    """Return the configuration; raises PolicyError if it is invalid."""
    try:
        refuse_deep_json(data)
        refuse_large_json(data)
        return msgspec.json.decode(data, type=ConfigFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"image: its configuration is invalid: {str(error)[:200]}") from None


def config_of(
    settings: ImageConfig, diffs: tuple[str, ...], architecture: str, created: str
) -> tuple[bytes, str]:
    """Return the JSON of a configuration, and its digest in hexadecimal."""
    nothing = msgspec.Raw(b"{}")
    told = _ConfigSettings(
        env=settings.env or None, working_dir=settings.working_dir or None,
        user=settings.user or None, entrypoint=settings.entrypoint or None,
        cmd=settings.cmd or None, volumes=dict.fromkeys(settings.volumes, nothing) or None,
        exposed_ports=dict.fromkeys(settings.exposed_ports, nothing) or None,
        labels=settings.labels or None, shell=settings.shell or None,
        stop_signal=settings.stop_signal or None,
    )  # fmt: skip
    file = ConfigFile(
        _RootFilesystem(tuple(f"sha256:{each}" for each in diffs)), architecture, "linux",
        created or None, told,
    )  # fmt: skip
    data = msgspec.json.encode(file, order="deterministic")
    return data, hashlib.sha256(data).hexdigest()
