"""Containers around cells, and their root file system: a directory, or an image in a layout or tar.

A container sees one plain directory.  So the layers of an image are merged, once, into a directory of
this user's data.  All files belong to this user; devices, pipes, set-uid bits and the right to write
for others are left out.
"""

import os
import warnings
from typing import TYPE_CHECKING

from ....policies.errors import PolicyError
from ....runner.host.image_ids import one_id
from ....runner.launching.spawn import interpreter
from ....runner.oci.bundle import open_rootfs
from ....runner.oci.container import SpawnedContainer
from ....runner.oci.oci_runtime import default_runtime, find_oci_runtime
from ..checks import check_host_path
from ..images.image_store import ImageStore
from ..images.layer_work import ImageLimits

if TYPE_CHECKING:
    from ..pythons import HostPython

_LIMITS = ImageLimits(4 << 30, 500_000)


def rootfs_of(given: str) -> str:
    """Return the directory of the root file system that the path `given` stands for.

    Raises PolicyError if it is not an image, or is malformed; LaunchError.
    """
    if os.path.isdir(given) and not os.path.exists(os.path.join(given, "oci-layout")):
        return given
    store = ImageStore(ids=one_id(os.geteuid(), os.getegid()), limits=_LIMITS)
    try:
        return store.merged(given)
    except PolicyError as error:
        raise PolicyError(f"rootfs: {error.what.removeprefix('image: ')}", error.hint) from None


def check_holds_sessions(named: str | os.PathLike[str] | None) -> None:
    """Raise PolicyError for a runtime whose containers have a kernel of their own and run
    single calls.

    Raises LaunchError if the host lacks the runtime.
    """
    runtime = find_oci_runtime(named or default_runtime())
    if runtime.kernel != "shared":
        raise PolicyError(
            f"runtime: {runtime.name} makes a container with a kernel of its own for each call, which "
            "has no sessions and tools, so servers cannot use it",
            "use a runtime whose containers have the kernel of the host, such as crun",
        )


def container_of(
    named: str | os.PathLike[str] | None, files: str | os.PathLike[str] | None,
    python: "HostPython | None",
) -> SpawnedContainer:  # fmt: skip
    """Return a launcher that is to run in a container; it is started once its policy is known.

    `named` is the runtime, `files` the root file system.  Raises PolicyError for invalid arguments,
    LaunchError if the host lacks the runtime.
    """
    runtime = find_oci_runtime(named or default_runtime())
    if runtime.holes:
        warnings.warn(
            f"{runtime} has known holes: {runtime.holes}; install a newer version, unless your "
            "distribution has repaired this one",
            stacklevel=2,
        )
    rootfs = None
    if files is not None:
        rootfs = open_rootfs(rootfs_of(check_host_path("rootfs", files)))
    if python is None:
        return SpawnedContainer(runtime, interpreter(), rootfs=rootfs)
    packages = [each for each in python.packages if each]
    return SpawnedContainer(runtime, python.path, packages, rootfs)
