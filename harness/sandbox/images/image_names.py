"""Names of images, such as debian:12, as Docker writes them: a name without a registry is of Docker's.

This is the only module with the name of that registry.
"""

import re
from typing import NamedTuple

from ....policies.errors import PolicyError

_HOST = re.compile(
    r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?(:[0-9]+)?|\[[0-9a-fA-F:]+\](:[0-9]+)?", re.ASCII
)
_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*", re.ASCII)
_TAG = re.compile(r"[\w][\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_MOST = 255
HUB = "docker.io"  # the registry of names without one
HUB_HOST = f"registry-1.{HUB}"
_OFFICIAL = "library/"


class ImageName(NamedTuple):
    """A name in parts: the registry, the repository there, and a tag or a digest."""

    registry: str
    repository: str
    tag: str
    digest: str

    @property
    def full(self) -> str:
        """The name with its tag or digest."""
        end = f"@{self.digest}" if self.digest else f":{self.tag}"
        if self.registry == HUB:
            return f"{self.repository.removeprefix(_OFFICIAL)}{end}"
        return f"{self.registry}/{self.repository}{end}"

    @property
    def reference(self) -> str:
        """The tag or digest, by which a registry finds a manifest."""
        return self.digest or self.tag


def normalised(name: str) -> ImageName:
    """Return the full name; raises PolicyError for an invalid one."""
    rest, _, digest = name.partition("@")
    head, slash, path = rest.partition("/")
    if slash and (set(head) & {".", ":"} or head == "localhost" or head != head.lower()):
        registry, rest = head, path
    else:
        registry = HUB
    rest, colon, tag = rest.partition(":")
    if registry in (HUB, f"index.{HUB}"):
        registry, rest = HUB, rest if "/" in rest else f"{_OFFICIAL}{rest}"
    if (
        len(rest) > _MOST
        or not _HOST.fullmatch(registry)
        or not all(map(_PART.fullmatch, rest.split("/")))
        or not _TAG.fullmatch(tag if colon else "latest")
        or ("@" in name and not _DIGEST.fullmatch(digest))
    ):
        raise PolicyError(
            f"image: invalid name {ascii(name)[:200]}",
            "names are as in docker pull: [REGISTRY/]NAME[:TAG] or NAME@sha256:...; a path begins "
            "with / or ./",
        )
    return ImageName(registry, rest, "" if digest else tag or "latest", digest)
