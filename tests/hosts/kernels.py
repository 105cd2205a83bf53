"""Kernels other than the host image's own, for hosts that differ in nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import image

if TYPE_CHECKING:
    from pathlib import Path

# As large a newer one as Debian 12 offers; its security archive has it, so there is nothing to add.
NEWER = "linux-image-6.12-cloud-amd64"


def kernel(cache: Path, package: str) -> Path:
    """Return a folder with `vmlinuz` and `modules/` of what `package` depends on."""
    depends = image.output_of("apt-cache", "depends", "--important", package)
    name = depends.split("Depends: ")[1].split()[0]

    def build(folder: Path) -> None:
        image.run("apt-get", "download", name, cwd=folder)
        (archive,) = folder.glob("linux-image-*.deb")
        image.run("dpkg-deb", "-x", archive, folder / "unpacked")
        archive.unlink()
        (vmlinuz,) = (folder / "unpacked/boot").glob("vmlinuz-*")
        vmlinuz.rename(folder / "vmlinuz")
        (modules,) = (folder / "unpacked").glob("**/lib/modules/*")
        modules.rename(folder / "modules")

    return image.cached(cache, "kernel", name.encode(), build)
