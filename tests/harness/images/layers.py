"""Archives and layouts of images, made by tests."""

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

DIRECTORY, LINK, HARD, DEVICE, PIPE = (
    tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE,
)  # fmt: skip


def member(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """Make a member of an archive: a file, unless `type` says another kind."""
    made = tarfile.TarInfo(name)
    made.size, made.mtime = len(content), 1_000_000
    for field, value in fields.items():
        setattr(made, field, value)
    return made, content


def archive(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(
        fileobj=packed, mode="w", format=format, encoding="utf-8", errors="surrogateescape"
    ) as made:
        for info, content in members:
            made.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def config_of(*layers: bytes, **config: Any) -> bytes:
    """Return the JSON of a configuration; `config` has its settings, such as Env."""
    rootfs = {"type": "layers", "diff_ids": [digest(each) for each in layers]}
    told = {"architecture": "amd64", "os": "linux", "config": config, "rootfs": rootfs}
    return json.dumps(told).encode()


def layout(
    place: Path, *layers: bytes, config: bytes | None = None, squeeze: Any = gzip.compress, **settings: Any
) -> Path:  # fmt: skip
    """Write an OCI layout of uncompressed archives; `config` replaces the true configuration."""
    blobs = place / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, kind: str) -> dict[str, object]:
        (blobs / hashlib.sha256(data).hexdigest()).write_bytes(data)
        media_type = f"application/vnd.oci.image.{kind}"
        return {"digest": digest(data), "size": len(data), "mediaType": media_type}

    told = config or config_of(*layers, **settings)
    manifest = {
        "schemaVersion": 2,
        "config": blob(told, "config.v1+json"),
        "layers": [blob(squeeze(each), "layer.v1.tar+gzip") for each in layers],
    }
    image = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [image]}))
    (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return place


def saved(*layers: bytes, **settings: Any) -> bytes:
    """Return a tar as `docker save` writes it."""
    config = config_of(*layers, **settings)
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    told = [{"Config": "config.json", "RepoTags": ["debian:latest"], "Layers": names}]
    files = zip(names, layers, strict=True)
    return archive(
        *(member(name, data) for name, data in files),
        member("config.json", config),
        member("manifest.json", json.dumps(told).encode()),
    )
