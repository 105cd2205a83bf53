"""`Registry`: images at a registry, by the distribution specification (`/v2/`).

The registry is hostile: answers are limited in size and time, and only content with the digest that was
asked for is taken.  What it says of a tag is believed.  Credentials go to the registry and to the place
of tokens that it names, never to another origin after a redirect, and over plain HTTP only where that
is allowed.
"""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from ....policies.errors import LaunchError, PolicyError
from ....policies.network.rule import Scheme
from ...tools.http.http_exchange import (
    CallDeadline,
    HttpError,
    addresses_of,
    answering,
    dial,
    request_bytes,
    secured,
    send,
    system_addresses,
)
from ...tools.http.targets import Target, TargetError, redirected, target_of
from .image_names import HUB, HUB_HOST, ImageName
from .image_sources import (
    INDEXES,
    MANIFESTS,
    FoundImage,
    ImageBlob,
    ImageIndex,
    ImageManifest,
    LayerBlob,
    check_layers,
    checked,
    chosen,
    decoded,
)
from .layer_work import ArchivePart

_MOST_JSON = 4 << 20
_TRIES = 5  # in a row, without a byte of progress
_REDIRECTS = 5
_IDLE_SECONDS = 60.0
_MOST_WAIT = 5.0  # seconds before another try
_PIECE = 1 << 20
_LOOPBACK = re.compile(r"localhost|127(\.[0-9]+){3}", re.ASCII)
_MOVED = (301, 302, 303, 307, 308)
_BUSY = (429, 500, 502, 503, 504)
_FIELD = re.compile(r'([a-z_]+)="([^"\\]*)"', re.ASCII)
_T = TypeVar("_T")


class PullSettings(NamedTuple):
    """How an image is pulled.

    machine: such as arm64; "" is this one
    is_insecure: by plain HTTP, which is allowed for loopback without this
    credentials: a file like docker's config.json
    seconds: of the whole pull
    """

    machine: str = ""
    is_insecure: bool = False
    credentials: str | os.PathLike[str] | None = None
    seconds: float = 3600.0


class _PullDeadline(CallDeadline):
    """The deadline of a pull, which no connection may spend in silence."""

    def left(self) -> float:
        return min(super().left(), _IDLE_SECONDS)

    def has_passed(self) -> bool:
        try:
            return not self.left()
        except HttpError:
            return True


class _TryAgain(Exception):  # noqa: N818 - never leaves this module
    """The registry is busy, or a connection broke."""


class Registry:
    """The registry of one image; `say` is called with each step for people."""

    def __init__(
        self, name: ImageName, settings: PullSettings, say: Callable[[str], object] = lambda _: None
    ) -> None:
        host, _, port = name.registry.partition(":")
        self._name, self._settings, self._say = name, settings, say
        self._is_plain = settings.is_insecure or bool(_LOOPBACK.fullmatch(host))
        host = HUB_HOST if host == HUB else host.lower()
        standard = 80 if self._is_plain else 443
        scheme: Scheme = "http" if self._is_plain else "https"
        self._top = Target(scheme, host, int(port or standard), f"/v2/{name.repository}/", "")
        self._deadline = _PullDeadline(settings.seconds)
        self._context = ssl.create_default_context()
        self._basic = _credentials_of(settings.credentials, name.registry)
        self._authorization = ""

    def fetch(
        self, place: Path, most_bytes: int, has_layer: Callable[[str], bool],
        opened: contextlib.ExitStack,
    ) -> FoundImage:  # fmt: skip
        """Write the layers that are missing below `place`, and return the image.

        `most_bytes`: of all layers, as they are sent.  Raises PolicyError for a hostile or unknown
        image, LaunchError if the registry does not answer as it should.
        """
        manifest = self._manifest()
        if manifest.config is None:
            raise PolicyError(f"image: {self._name.full} has no configuration")
        check_layers(manifest.layers)
        if sum(each.size for each in manifest.layers) > most_bytes:
            raise PolicyError(f"image: {self._name.full} is larger than {most_bytes} bytes")
        config = self._small(f"blobs/{_digest(manifest.config)}", manifest.config.size)
        layers = []
        for number, blob in enumerate(manifest.layers, 1):
            digest = blob.hexadecimal
            if has_layer(digest):
                layers.append(LayerBlob(digest, ArchivePart(-1, 0, 0, blob.digest)))
                continue
            self._say(f"pulling layer {number} of {len(manifest.layers)}, {blob.size >> 20} MiB")
            file = os.open(place / digest, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, file)
            self._download(blob, file)
            layers.append(LayerBlob(digest, ArchivePart(file, 0, blob.size, blob.digest)))
        return FoundImage(checked(config, manifest.config, "the configuration"), tuple(layers))

    def _manifest(self) -> ImageManifest:
        data = self._small(f"manifests/{self._name.reference}", _MOST_JSON)
        if digest := self._name.digest:
            checked(data, ImageBlob(digest, 0), "the manifest")
        kind = decoded(data, _ManifestKind, "the manifest")
        if kind.media_type in INDEXES or (not kind.media_type and bytes(kind.manifests)):
            index = decoded(data, ImageIndex, "the index")
            blob = chosen(index.manifests, self._settings.machine)
            data = checked(
                self._small(f"manifests/{_digest(blob)}", blob.size), blob, "the manifest"
            )
        return decoded(data, ImageManifest, "the manifest")

    def _small(self, path: str, most: int) -> bytes:
        """Return the body of a small answer."""
        if most > _MOST_JSON:
            raise PolicyError(f"image: {path} is larger than {_MOST_JSON} bytes")

        def read() -> bytes:
            with self._answer(path, most, {"Accept": ", ".join((*INDEXES, *MANIFESTS, "*/*"))}) as (
                got,
                _,
            ):
                return _whole(got, most)

        return self._with_tries(read)

    def _download(self, blob: ImageBlob, file: int) -> None:
        """Write a blob into a file, after a broken connection from where it broke."""
        done = 0

        def more() -> None:
            nonlocal done
            headers = {"Range": f"bytes={done}-"} if done else {}
            with self._answer(f"blobs/{_digest(blob)}", blob.size - done + 1, headers) as (
                got,
                told,
            ):
                if done and not told.get("content-range", "").startswith(f"bytes {done}-"):
                    done = 0  # it sends all of it again
                    os.ftruncate(file, 0)
                while done < blob.size and (piece := got.read1(min(_PIECE, blob.size - done))):
                    os.pwrite(file, piece, done)
                    done += len(piece)
            if done < blob.size:
                raise HttpError("the answer ended early")

        self._with_tries(more, lambda: done)
        with open(os.dup(file), "rb") as whole:
            whole.seek(0)
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if found != blob.hexadecimal:
            raise PolicyError(f"image: the layer {blob.digest} has another digest")

    def _with_tries(self, attempt: Callable[[], _T], progress: Callable[[], int] = lambda: 0) -> _T:
        failures, reached = 0, 0
        while True:
            try:
                return attempt()
            except (HttpError, _TryAgain) as error:
                failures = 1 if progress() > reached else failures + 1
                reached = progress()
                if failures == _TRIES or self._deadline.has_passed():
                    raise LaunchError(
                        f"cannot pull {self._name.full}: {error}",
                        "an image can also come as a file: docker save, then cellwright image import",
                    ) from None
                if failures > 1 or isinstance(error, _TryAgain):
                    threading.Event().wait(min(0.2 * 2**failures, _MOST_WAIT))

    @contextlib.contextmanager
    def _answer(
        self, path: str, most: int, headers: dict[str, str]
    ) -> Iterator[tuple[http.client.HTTPResponse, dict[str, str]]]:
        """Yield the answer to a GET below the repository, after a token and redirects."""
        target = self._top._replace(path=self._top.path + path)
        for is_last in (False, True):
            with contextlib.ExitStack() as stack:
                got, told = self._following(target, most, headers, stack)
                if got.status in (200, 206):
                    yield got, told
                    return
                challenge = told.get("www-authenticate", "")
                if got.status != 401 or is_last:
                    raise self._refusal(got, path)
            self._authorize(challenge)

    def _following(
        self, target: Target, most: int, headers: dict[str, str], stack: contextlib.ExitStack
    ) -> tuple[http.client.HTTPResponse, dict[str, str]]:
        own = target.origin
        for _ in range(_REDIRECTS + 1):
            given = dict(headers)
            if self._authorization and target.origin == own:
                given["Authorization"] = self._authorization
            got, told = self._get(target, most, given, stack)
            if got.status not in _MOVED:
                return got, told
            try:
                target = redirected(target, told.get("location", ""))
            except TargetError as error:
                raise PolicyError(f"image: {own[1]}: {error}") from None
        raise PolicyError(f"image: {own[1]}: more than {_REDIRECTS} redirects")

    def _get(
        self, target: Target, most: int, headers: dict[str, str], stack: contextlib.ExitStack
    ) -> tuple[http.client.HTTPResponse, dict[str, str]]:
        if target.scheme == "http" and not (self._is_plain and self._may_be_plain(target)):
            raise PolicyError(
                f"image: {target.host}: plain HTTP is refused", "use --insecure to allow it"
            )
        sock = stack.enter_context(contextlib.closing(self._dialled(target)))
        send(sock, request_bytes("GET", target, headers, b"", encoding="identity"), self._deadline)
        return stack.enter_context(answering(sock, "GET", most, self._deadline))

    def _may_be_plain(self, target: Target) -> bool:
        return self._settings.is_insecure or bool(_LOOPBACK.fullmatch(target.host))

    def _dialled(self, target: Target) -> socket.socket:
        found = addresses_of(target.host, target.port, system_addresses, self._deadline)
        sock = dial(found, target.port, self._deadline)
        if target.scheme == "http":
            return sock
        try:
            return secured(sock, target.host, self._context, self._deadline)
        except BaseException:
            sock.close()
            raise

    def _authorize(self, challenge: str) -> None:
        """Get a token as the registry asks; raises PolicyError."""
        kind, _, rest = challenge.partition(" ")
        told = dict(_FIELD.findall(rest))
        if kind.lower() == "basic" and self._basic and not self._authorization:
            self._authorization = f"Basic {self._basic}"
            return
        if kind.lower() != "bearer" or "realm" not in told:
            raise self._denied()
        scope = told.get("scope") or f"repository:{self._name.repository}:pull"
        query = "&".join(
            f"{name}={quote(value, safe='')}"
            for name, value in (("service", told.get("service", "")), ("scope", scope)) if value
        )  # fmt: skip
        try:
            realm = target_of(told["realm"])
        except TargetError as error:
            raise PolicyError(f"image: the place of tokens: {error}") from None
        joined = f"{realm.query}&{query}" if realm.query else f"?{query}"
        headers = {"Authorization": f"Basic {self._basic}"} if self._basic else {}
        with contextlib.ExitStack() as stack:
            got, _ = self._get(realm._replace(query=joined), _MOST_JSON, headers, stack)
            if got.status != 200:
                raise (
                    self._denied() if got.status in (400, 401, 403) else self._refusal(got, "token")
                )
            token = decoded(_whole(got, _MOST_JSON), _Token, "the token")
        text = token.token or token.access_token
        if not re.fullmatch(r"[\x21-\x7e]{1,65536}", text):
            raise PolicyError("image: the token is invalid")
        self._authorization = f"Bearer {text}"

    def _denied(self) -> PolicyError:
        hint = "" if self._basic else "; --credentials names a file like docker's config.json"
        return PolicyError(
            f"image: the registry denies access to {self._name.full}",
            f"the name may be wrong, or the image private{hint}",
        )

    def _refusal(self, got: http.client.HTTPResponse, path: str) -> Exception:
        if got.status in _BUSY:
            return _TryAgain(
                f"{self._top.host} answers {got.status} {http.client.responses[got.status]}"
            )
        if got.status in (401, 403):
            return self._denied()
        if got.status == 404:
            return PolicyError(f"image: {self._name.full} is not at the registry ({path})")
        return LaunchError(f"cannot pull {self._name.full}: {self._top.host} answers {got.status}")


class _ManifestKind(msgspec.Struct, frozen=True, rename="camel"):
    media_type: str = ""
    manifests: msgspec.Raw = msgspec.Raw()


class _Token(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""


def _digest(blob: ImageBlob) -> str:
    return f"sha256:{blob.hexadecimal}"


def _whole(got: http.client.HTTPResponse, most: int) -> bytes:
    data = got.read(most + 1)
    if len(data) > most:
        raise PolicyError(f"image: an answer of the registry is larger than {most} bytes")
    if got.length:
        raise HttpError("the answer ended early")
    return data


def _credentials_of(file: str | os.PathLike[str] | None, registry: str) -> str:
    """Return user and password for Basic authentication, or ""; raises PolicyError."""
    if file is None:
        return ""
    try:
        if os.stat(file).st_mode & 0o077:
            raise PolicyError(f"credentials: others can read {file}", f"chmod 600 {file}")
        told = json.loads(Path(file).read_bytes())["auths"]
        for place, each in told.items():
            host = place.removeprefix("https://").partition("/")[0].removeprefix("index.")
            if host == registry:
                pair = f"{each['username']}:{each['password']}" if "username" in each else ""
                text = base64.b64encode(pair.encode()).decode() if pair else str(each["auth"])
                base64.b64decode(text, validate=True)
                return text
    except PolicyError:
        raise
    except OSError as error:
        raise PolicyError(f"credentials: {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PolicyError(
            f"credentials: {file}: invalid; must be like docker's config.json, with `auths`",
            "of a credential helper write user and password into a file of its own",
        ) from None
    raise PolicyError(f"credentials: {file}: has none for {registry}")
