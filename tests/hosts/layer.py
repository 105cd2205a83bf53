"""Build the second disk of a host: /opt, with the checkout, its venv and what runs the command.

The venv's packages are cached by the lines that ask for them; the rest is new for every run. All
compiling and installing happens here, at native speed: in the guest it would take minutes.
"""

from __future__ import annotations

import lzma
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import foreign
import image

if TYPE_CHECKING:
    from collections.abc import Sequence

GUEST = Path(__file__).parent / "guest"
EXTRAS = ("dev", "prctl", "systemd")
PYTHON = "/usr/bin/python3"  # Debian's, as in the guest: wheels compiled here fit there

# ext4 is built into the kernel, virtio not into every one. A newer kernel has its modules here alone. This order: insmod resolves no dependencies.
MODULES = (
    "virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci",
    "virtio_blk", "overlay",
)  # fmt: skip


def requirements(checkout: Path) -> list[str]:
    """Return what building, running and testing the checkout asks for."""
    pyproject = tomllib.loads((checkout / "pyproject.toml").read_text())
    project = pyproject["project"]
    lines = [*pyproject["build-system"]["requires"], *project["dependencies"]]
    for extra in EXTRAS:
        lines += project["optional-dependencies"][extra]
    own = re.compile(rf"{project['name']}\b")
    return sorted(line for line in lines if not own.match(line))


def packages(cache: Path, host: Path, checkout: Path) -> Path:
    """Return a folder whose `venv` belongs at /opt/venv and holds everything but the checkout."""
    lines = requirements(checkout)

    def build(folder: Path) -> None:
        image.run(PYTHON, "-m", "pip", "wheel", "--wheel-dir", folder / "wheels", *lines)
        image.run_in_root(host / "root", folder, ("python3", "-m", "venv", "/opt/venv"))
        install = ("--no-index", "--find-links", "/opt/wheels", *lines)
        image.run_in_root(host / "root", folder, pip_install(*install))
        shutil.rmtree(folder / "wheels")

    return image.cached(cache, "venv", "\n".join((host.name, *lines)).encode(), build)


def foreign_packages(cache: Path, host: Path, checkout: Path, enter: Sequence[str]) -> Path:
    """Return the same for a root of another processor; what nobody compiled for it is, there."""
    lines = [*requirements(checkout), *foreign.BESIDES]
    compiled = [line for line in lines if not line.startswith(foreign.FROM_SOURCE)]

    def build(folder: Path) -> None:
        foreign.fetch_packages(folder / "wheels", lines)
        offline = ("--no-index", "--find-links", "/opt/wheels")
        for command in (
            ("python3", "-m", "venv", "/opt/venv"),
            pip_install(*offline, *compiled),
            pip_install(*offline, "--no-build-isolation", *foreign.FROM_SOURCE),
        ):
            image.run_in_root(host / "root", folder, command, enter)
        shutil.rmtree(folder / "wheels")

    ingredients = "\n".join((host.name, *lines)).encode()
    return image.cached(cache, f"{foreign.ARCHITECTURE}-venv", ingredients, build)


def pip_install(*arguments: str) -> tuple[str, ...]:
    return ("/opt/venv/bin/python", "-m", "pip", "install", "--no-cache-dir", *arguments)


def make_layer(
    work: Path,
    host: Path,
    venv: Path,
    checkout: Path,
    command: Sequence[str],
    busybox: Path,
    enter: Sequence[str] = image.PRIVATE_MOUNTS,
) -> Path:
    """Return an ext4 image of /opt: the checkout installed in its venv, and the command."""
    opt = work / "opt"
    image.run("cp", "-al", venv, opt)  # links: files are added there, none is changed
    copy_checkout(checkout, opt / "src/main")
    shared = checkout.parent / "shared"
    if shared.is_dir():
        shutil.copytree(shared, opt / "src/shared", symlinks=True)
    editable = ("--no-index", "--no-deps", "--no-build-isolation", "--editable", "/opt/src/main")
    image.run_in_root(host / "root", opt, pip_install(*editable), enter)
    shutil.copytree(GUEST, opt / "host")
    shutil.copy2(busybox, opt / "venv/bin/busybox")  # the images of tests are made of it
    (opt / "host/command").write_text(f"exec {shlex.join(command)}\n")
    disk = work / f"{host.name}.ext4"
    image.make_ext4(opt, disk, gigabytes=4)
    shutil.rmtree(opt)
    return disk


def copy_checkout(checkout: Path, target: Path) -> None:
    """Copy what git tracks or would offer to track, symbolic links as they are."""
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, image.output_of(*listing, cwd=checkout).split("\0")):
        source = checkout / name
        if source.is_symlink() or source.exists():  # a deleted file stays listed until committed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def make_initramfs(tree: Path, modules: Path, busybox: Path) -> Path:
    """Return an initramfs, made from `tree`, that finds the two disks and hands over to systemd."""
    for folder in ("bin", "dev", "proc", "root", "modules"):
        (tree / folder).mkdir(parents=True)
    shutil.copy2(busybox, tree / "bin/busybox")
    shutil.copy2(GUEST / "init", tree / "init")
    built_in = (modules / "modules.builtin").read_text()
    for position, name in enumerate(MODULES):
        if f"/{name}.ko" not in built_in:
            (module,) = modules.rglob(f"{name}.ko*")
            (tree / f"modules/{position}-{name}.ko").write_bytes(plain(module))
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    archive = tree.with_suffix(".cpio")
    with archive.open("wb") as target:
        pack = ("cpio", "--quiet", "--create", "--format=newc")
        subprocess.run(pack, cwd=tree, check=True, input=names.encode(), stdout=target)
    return archive


def plain(module: Path) -> bytes:
    """Return a kernel module as busybox can insert it."""
    content = module.read_bytes()
    return lzma.decompress(content) if module.suffix == ".xz" else content
