"""Sandboxes whose programs have an image as their root, for attacks by root inside."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellwright import Sandbox
from cellwright.harness.sandbox.containers import image_cells
from cellwright.harness.sandbox.images.image import StoredImage
from cellwright.harness.sandbox.images.image_store import ImageStore
from cellwright.policies.policy import Policy
from cellwright.runner.host.image_ids import ImageIds, find_image_ids, one_id

USERS = "root:x:0:0::/root:/bin/sh\njoe:x:1000:1000::/home/joe:/bin/sh\nmail:x:8:8::/:/bin/sh\n"
GROUPS = "root:x:0:\njoe:x:1000:\nmail:x:8:\naudio:x:29:joe,mail\n"

CAPABILITIES = 0x800000FB  # chown, dac_override, fowner, fsetid, kill, setgid, setuid, setfcap
# Payloads about what root of an image has over files and ids of its own, and what they say of it.
OWN_TO_ROOT = {
    "LAY-01": r"directories made in \[('/[^']*'(, )?)*\], times changed of .*",
    "LAY-04": f"CapBnd {CAPABILITIES:016x}",
    "LAY-05": "securebits 0xe0",
    "LAY-10": r"written: \['1 to random', '1 to urandom'\]",  # no rule of Landlock excludes a path
    "LAY-37": "/, /usr, /workspace/link, /etc/passwd",  # the cell's own files, in its overlay
    "FS-03": r"ESCAPED writable (/[a-z]*\(overlay\),?)+",
    "LANG-04": r"unconfined=.*",
    "PRIV-01": r"bad=\['CapPrm', 'CapEff', 'uid_map +0 +0 +[0-9]+'\] "
    f"CapBnd={CAPABILITIES:016x} filters=1",
    "PRIV-03": "setgroups=CHANGED gid0=CHANGED uid0=CHANGED uid1=CHANGED",
    "PRIV-05": "capset=EPERM ambient=EPERM securebits=EPERM filecap=RAISED",
}


def make_root(root: Path) -> Path:
    """Make a root file system with two users and the programs of busybox, and bash if the host has it."""
    for name in ("bin", "etc", "home/joe", "root", "tmp", "usr/share"):
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox
    shutil.copy(busybox, root / "bin/busybox")
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout
    for name in {*listed.split()} - {"busybox"}:
        (root / "bin" / name).symlink_to("busybox")
    if bash := shutil.which("bash"):
        told = subprocess.run(["ldd", bash], capture_output=True, text=True, check=True).stdout
        for path in (bash, *(word for word in told.split() if word.startswith("/"))):
            place = root / ("bin/bash" if path == bash else path.lstrip("/"))
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    (root / "etc/passwd").write_text(USERS)
    (root / "etc/group").write_text(GROUPS)
    (root / "usr/share/notes").write_text("of the image\n")
    os.chown(root / "home/joe", 1000, 1000)
    (root / "tmp").chmod(0o1777)
    return root


def ids_of(kind: str) -> ImageIds:
    """Return the ids of root's images: a range, or one."""
    found = find_image_ids()
    return found if kind == "root" else one_id(found.root[0])


@contextlib.contextmanager
def in_an_image(
    ids: ImageIds, image: StoredImage, policy: Policy, **more: object
) -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_cells, "find_image_ids", lambda: ids)
        with Sandbox(image=image, policy=policy, **more) as box:  # type: ignore[arg-type]
            yield box


def made_image(directory: Path, ids: ImageIds) -> StoredImage:
    """Return the image of `make_root` in a store in `directory`."""
    return ImageStore(directory / "images", ids=ids).import_(make_root(directory / "root"))
