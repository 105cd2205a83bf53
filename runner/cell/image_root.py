"""The root of a cell that is an image: an overlay of its layers with what the cell changes.

The image and what programs make of it are hostile.  So nothing is looked up in it before it is our
root: the trees that a cell has beside it are taken from the launcher's root first, and put in their
places after pivot_root(2), where no link of the image leads outside.
"""

import os

from ...policies.plan import ImagePlan
from ..fixed_root import IMAGE_CHANGES, IMAGE_LAYERS, IMAGE_NEW_ROOT, IMAGE_PLACES
from ..kernel import AT_FDCWD, mounts
from ..kernel.steps import Steps
from ..messages import ImageChanges, encode

_HARD = mounts.NOSUID | mounts.NODEV
_MNT_DETACH = 2
_UPPER, _WORK = f"{IMAGE_CHANGES}/upper", f"{IMAGE_CHANGES}/work"


def enter_image(do: Steps, image: ImagePlan, trees: tuple[str, ...]) -> None:
    """Make the image the root, with the `trees` of the launcher's root in the same places.

    The uppermost layer is the launcher's: it has the mount points, and files such as /etc/resolv.conf.
    """
    limits = {"size": str(image.changes_bytes), "nr_inodes": str(image.changes_inodes)}
    mounts.put(do, mounts.new(do, "tmpfs", _HARD, mode="0700", **limits), IMAGE_CHANGES)
    for path in (_UPPER, _WORK):
        do.call("mkdirat", AT_FDCWD, path.encode(), 0o755, about=path)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    changes = do.call("openat", AT_FDCWD, _UPPER.encode(), flags, about=_UPPER)
    do.tell(b"\0" + encode(ImageChanges()), changes, about="the cell's changes to the supervisor")
    do.call("close", changes)
    lower = ":".join(layer_places(image))
    # Without privilege overlayfs keeps its notes in user.* (userxattr, Linux 5.11), which a tmpfs has
    # since Linux 6.6.
    options = f"userxattr,lowerdir={lower},upperdir={_UPPER},workdir={_WORK}"
    do.call(
        "mount", b"image", IMAGE_NEW_ROOT.encode(), b"overlay", _HARD, options.encode(),
        about=f"overlay of {len(image.layers)} layers (its module of the kernel: overlay)",
    )  # fmt: skip
    taken = [(mounts.clone(do, path), path) for path in trees]
    do.call("chdir", IMAGE_NEW_ROOT.encode(), about=IMAGE_NEW_ROOT)
    do.call("pivot_root", b".", b".", about="the image")
    do.call("umount2", b".", _MNT_DETACH, about="the launcher's root")
    do.call("chdir", b"/", about="/")
    for tree, path in taken:
        mounts.put(do, tree, path)


def layer_places(image: ImagePlan) -> list[str]:
    """Return where the launcher's root has the layers, the uppermost first."""
    return [IMAGE_PLACES, *(f"{IMAGE_LAYERS}/{n}" for n in range(len(image.layers)))]
