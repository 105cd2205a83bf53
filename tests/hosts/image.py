"""Build the host image: a Debian root, its kernel, and nothing that changes with the checkout.

Standard library only; must be root, because debootstrap makes device nodes and other users' files.
Everything here goes into the cache key (the bytes of this file do), so what changes often, the
checkout, its packages and the units that run the command, lives on a second disk: `layer.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SUITE = "bookworm"
KERNEL = "linux-image-cloud-amd64"

TOOLS = (
    "qemu-system-x86", "seabios",                            # the machine
    "debootstrap", "busybox-static", "cpio", "e2fsprogs",    # its disks
    "gcc", "pkg-config", "python3-dev", "python3-pip", "libcap-dev", "libsystemd-dev",  # wheels
)  # fmt: skip

PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "dbus-user-session", "libpam-systemd", "kmod",
    "python3", "python3-venv", "python3-dev", "gcc", "libc6-dev", "pkg-config",
    "libseccomp2", "libseccomp-dev", "libcap-dev", "libsystemd-dev",
    "iproute2", "procps", "nodejs", "ruby", "bubblewrap", "strace", "git", "ca-certificates",
)  # fmt: skip

USERS = {"cell": 1000, "plain": 1001}

# Without udev nobody announces these devices, and systemd would wait 90 seconds for each.
MASKED = ("serial-getty@ttyS0.service", "getty@tty1.service")

# The layer brings the unit; see guest/. systemd follows the link once /opt is mounted.
UNIT = "cellwright-host.service"


# What is mounted below this goes when the command ends, however it ends.
PRIVATE_MOUNTS = ("unshare", "--mount", "--propagation", "private")


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a command quietly; on failure, raise with what it printed."""
    done = subprocess.run(
        command, cwd=cwd, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        line = shlex.join(map(str, command))
        raise SystemExit(f"test-hosts: `{line}` failed ({done.returncode}):\n{done.stdout}")


def output_of(*command: str | Path, cwd: Path | None = None) -> str:
    return subprocess.run(command, cwd=cwd, check=True, text=True, stdout=subprocess.PIPE).stdout


def install_tools(besides: Sequence[str] = ()) -> None:
    """Install the Debian packages that are needed and missing; unless root, say what is amiss."""
    listing = output_of("dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n")
    missing = [
        tool for tool in (*TOOLS, *besides) if f"{tool} installed" not in listing.splitlines()
    ]
    install = ("apt-get", "install", "-y", "--no-install-recommends", *missing)
    if os.geteuid() != 0:
        hint = f"; as root: {shlex.join(install)}" if missing else ""
        raise SystemExit(f"test-hosts: needs root: debootstrap makes device nodes{hint}")
    if missing:
        run("apt-get", "update")
        run(*install)


@contextmanager
def workshop(cache: Path) -> Iterator[Path]:
    """Give an empty folder in the cache to one process at a time, and leave nothing in it."""
    cache.mkdir(parents=True, exist_ok=True)
    work = cache / "work"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(work, ignore_errors=True)  # left by a killed run
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work)


def cached(cache: Path, kind: str, ingredients: bytes, build: Callable[[Path], None]) -> Path:
    """Return the folder built from `ingredients`; build it, and drop its elders, if it is new."""
    path = cache / f"{kind}-{hashlib.sha256(ingredients).hexdigest()[:16]}"
    if not path.exists():
        for elder in cache.glob(f"{kind}-*"):
            shutil.rmtree(elder)
        partial = cache / f"{kind}-partial"
        partial.mkdir()
        build(partial)
        partial.rename(path)
    return path


def host_image(cache: Path) -> Path:
    """Return a folder with `root/`, the same as `root.ext4`, `vmlinuz` and `modules/`."""
    return cached(cache, "image", Path(__file__).read_bytes(), build_image)


def build_image(folder: Path) -> None:
    root = folder / "root"
    include = "--include=" + ",".join(PACKAGES)
    debootstrap = ("debootstrap", "--variant=minbase", include, SUITE, root, debian_mirror())
    run(*PRIVATE_MOUNTS, *debootstrap)
    add_kernel(folder, root)
    configure(root)
    make_ext4(root, folder / "root.ext4", gigabytes=8)


def debian_mirror() -> str:
    """Ask apt which mirror this machine uses; the guest is the same Debian."""
    wanted = (f"Codename: {SUITE}", f"Release: {SUITE}", "Component: main", "Created-By: Packages")
    mirrors = output_of("apt-get", "indextargets", "--format", "$(REPO_URI)", *wanted).split()
    if not mirrors:
        raise SystemExit(f"test-hosts: apt knows no mirror of {SUITE}; this needs a Debian 12")
    return mirrors[0]


def add_kernel(folder: Path, root: Path) -> None:
    """Unpack the cloud kernel beside the root, and its modules into it.

    Unpacked, not installed: its scripts would make an initramfs and look for a boot loader.
    """
    depends = output_of("apt-cache", "depends", "--important", KERNEL)
    run("apt-get", "download", depends.split("Depends: ")[1].split()[0], cwd=folder)
    (archive,) = folder.glob("linux-image-*.deb")
    run("dpkg-deb", "-x", archive, folder / "kernel")
    archive.unlink()
    (vmlinuz,) = (folder / "kernel/boot").glob("vmlinuz-*")
    vmlinuz.rename(folder / "vmlinuz")
    (modules,) = (folder / "kernel/lib/modules").iterdir()
    shutil.move(modules, root / "lib/modules" / modules.name)
    shutil.rmtree(folder / "kernel")
    run("chroot", root, "depmod", modules.name)
    (folder / "modules").symlink_to(f"root/lib/modules/{modules.name}")


def configure(root: Path) -> None:
    """Make the root one that boots to the end without a question, with both users in it."""
    (root / "etc/hostname").write_text("host\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n127.0.1.1 host\n::1 localhost\n")
    (root / "etc/fstab").write_text("/dev/vda / ext4 rw 0 1\n")
    (root / "etc/machine-id").write_text("0123456789abcdef" * 2 + "\n")
    for name, uid in USERS.items():
        run("useradd", "--prefix", root, "-m", "-u", str(uid), "-s", "/bin/bash", name)
    linger = root / "var/lib/systemd/linger"
    linger.mkdir(parents=True)
    (linger / "cell").touch()
    units = root / "etc/systemd/system"
    for masked in MASKED:
        (units / masked).symlink_to("/dev/null")
    for place in (units, units / "multi-user.target.wants"):
        (place / UNIT).symlink_to(f"/opt/host/{UNIT}")


def make_ext4(tree: Path, image: Path, gigabytes: int) -> None:
    """Make a sparse ext4 image that holds `tree`."""
    run("mke2fs", "-q", "-t", "ext4", "-d", tree, image, f"{gigabytes}G")


def run_in_root(
    root: Path, opt: Path, command: Sequence[str], enter: Sequence[str] = PRIVATE_MOUNTS
) -> None:
    """Run a command in the built root, read-only but for `opt`, which it sees as /opt."""
    script = """
        mount --bind "$1" "$1"
        mount --bind "$2" "$1/opt"
        mount -t tmpfs tmpfs "$1/tmp"
        mount --rbind /proc "$1/proc"
        mount -o remount,bind,ro "$1"
        root=$1; shift 2
        exec chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin HOME=/tmp LANG=C.UTF-8 "$@"
    """
    run(*enter, "sh", "-ec", script, "sh", root, opt, *command)
