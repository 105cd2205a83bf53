"""The parts of a host with another processor: its root, packages and kernel, made here by emulation.

    foreign.py EMULATOR COMMAND...    # run a command where programs for that processor run too

Debian's qemu-user runs them one by one. The kernel is told so (binfmt_misc) in a user namespace of
the command's own, which takes Linux 6.7: nothing is installed or registered on this machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import image

if TYPE_CHECKING:
    from collections.abc import Sequence

ARCHITECTURE = "arm64"
KERNEL = "linux-image-cloud-arm64"
TOOLS = ("qemu-system-arm",)
USER_EMULATOR = "qemu-user-static"  # the package, unpacked and not installed
PACKAGES = (*image.PACKAGES, "busybox-static")
# Nobody offers these compiled for it; lxml is what pystemd asks for.
FROM_SOURCE = ("python-prctl", "pyseccomp", "pystemd")
BESIDES = ("lxml",)

# As a container's root it mounts nothing.
ENVIRONMENT = (
    "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "DEBIAN_FRONTEND=noninteractive",
    "container=lxc",
)  # fmt: skip

# As /usr/lib/binfmt.d/qemu-aarch64.conf; F: the emulator is opened now, and found inside any root.
_MAGIC = r"\x7fELF\x02\x01\x01" + r"\x00" * 9 + r"\x02\x00\xb7\x00"
_MASK = r"\xff" * 7 + r"\x00" + r"\xff" * 8 + r"\xfe\xff\xff\xff"
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000


def entering(cache: Path) -> tuple[str, ...]:
    """Return what, put before a command, lets it run programs for the other processor."""

    def build(folder: Path) -> None:
        image.run("apt-get", "download", USER_EMULATOR, cwd=folder)
        (archive,) = folder.glob("*.deb")
        image.run("dpkg-deb", "-x", archive, folder / "unpacked")
        (folder / "unpacked/usr/bin/qemu-aarch64-static").rename(folder / "emulator")
        shutil.rmtree(folder / "unpacked")
        archive.unlink()

    folder = image.cached(cache, "emulator", USER_EMULATOR.encode(), build)
    return (sys.executable, __file__, str(folder / "emulator"))


def host_image(cache: Path) -> Path:
    """Return a folder with `root/`, the same as `root.ext4`, `vmlinuz` and `modules/`."""
    enter = entering(cache)

    def build(folder: Path) -> None:
        root = folder / "root"
        include = "--include=" + ",".join(PACKAGES)
        first = ("debootstrap", "--foreign", f"--arch={ARCHITECTURE}", "--variant=minbase", include)
        image.run(*image.PRIVATE_MOUNTS, *first, image.SUITE, root, image.debian_mirror())
        second = ("/debootstrap/debootstrap", "--second-stage")
        image.run(*enter, "chroot", root, "env", "-i", *ENVIRONMENT, *second)
        add_kernel(folder)
        image.configure(root)
        image.make_ext4(root, folder / "root.ext4", gigabytes=8)

    ingredients = Path(__file__).read_bytes() + Path(image.__file__).read_bytes()
    return image.cached(cache, f"{ARCHITECTURE}-image", ingredients, build)


def add_kernel(folder: Path) -> None:
    """Unpack the cloud kernel of the other processor, which our own apt does not list."""
    options = [f"APT::Architecture={ARCHITECTURE}", f"APT::Architectures={ARCHITECTURE}"]
    options += [f"Dir::State::lists={folder}/lists", "Dir::State::status=/dev/null"]
    options += [f"Dir::Cache={folder}/archives", "APT::Sandbox::User=root"]
    given = [word for option in options for word in ("-o", option)]
    for directory in ("lists/partial", "archives"):
        (folder / directory).mkdir(parents=True)
    image.run("apt-get", *given, "update")
    depends = image.output_of("apt-cache", *given, "depends", "--important", KERNEL)
    image.run("apt-get", *given, "download", depends.split("Depends: ")[1].split()[0], cwd=folder)
    (archive,) = folder.glob("linux-image-*.deb")
    image.run("dpkg-deb", "-x", archive, folder / "kernel")
    (vmlinuz,) = (folder / "kernel/boot").glob("vmlinuz-*")
    vmlinuz.rename(folder / "vmlinuz")
    (modules,) = (folder / "kernel/lib/modules").iterdir()
    modules.rename(folder / "modules")
    for name in ("lists", "archives", "kernel"):
        shutil.rmtree(folder / name)
    archive.unlink()


def fetch_packages(folder: Path, lines: Sequence[str]) -> None:
    """Download wheels for the other processor into `folder`, and sources where there are none."""
    pip = (sys.executable, "-m", "pip", "download", "--dest", folder)
    compiled = [line for line in lines if not line.startswith(FROM_SOURCE)]
    tags = [f"manylinux_2_{minor}_aarch64" for minor in range(36, 16, -1)]
    tags.append("manylinux2014_aarch64")
    wanted = [word for tag in tags for word in ("--platform", tag)]
    wanted += ["--python-version", "3.11", "--implementation", "cp"]
    wanted += ["--abi", "cp311", "--abi", "abi3", "--abi", "none"]
    image.run(*pip, *wanted, "--only-binary=:all:", *compiled, *BESIDES)
    image.run(*pip, "--no-deps", "--no-binary=:all:", *FROM_SOURCE)


def enter(emulator: str, command: Sequence[str]) -> int:
    """Run `command` in a user namespace with every id, where the kernel knows `emulator`."""
    ready, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNS)
        os.write(ready[1], b"x")
        os.read(mapped[0], 1)
        _register(emulator)
        os.execvp(command[0], command)
    os.close(ready[1])  # so that a child that fails is noticed
    if not os.read(ready[0], 1):
        return 1
    for kind in ("uid", "gid"):
        Path(f"/proc/{child}/{kind}_map").write_text("0 0 4294967295")
    os.write(mapped[1], b"x")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def _register(emulator: str) -> None:
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    place = "/proc/sys/fs/binfmt_misc"
    image.run("mount", "-t", "binfmt_misc", "binfmt_misc", place)
    Path(place, "register").write_text(f":aarch64:M::{_MAGIC}:{_MASK}:{emulator}:F")


if __name__ == "__main__":
    sys.exit(enter(sys.argv[1], sys.argv[2:]))
