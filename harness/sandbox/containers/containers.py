"""`container_of`: the launcher in a container that `Sandbox(backend="oci")` names."""

import os
import warnings
from typing import TYPE_CHECKING

from ....policies.errors import PolicyError
from ....runner.oci.container import SpawnedContainer
from ....runner.oci.rootfs import open_rootfs
from ....runner.oci.runtime import default_runtime, find_oci_runtime
from ....runner.spawn import interpreter
from ..checks import check_host_path
from .images import rootfs_of

if TYPE_CHECKING:
    from ..pythons import HostPython


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
