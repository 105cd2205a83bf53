"""The GPUs of this host: nodes below /dev, and the libraries of their driver, which cells are shown.

Root alone decides what a library is (`system_files.py`), because programs execute it.
"""

import os
import stat
from collections.abc import Iterator

from ...policies.compiling.gpus import DriverFile, GpuFiles, GpuNode, Vendor
from .shown_paths import is_open_to_cells
from .system_files import is_roots_and_public

# Where installers put a driver's libraries, beside the places that ldconfig(8) knows.
_FOLDERS = (
    "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib64", "/usr/lib",
    "/usr/lib/{machine}-linux-gnu", "/usr/lib/{machine}-linux-gnu/nvidia/current",
    "/usr/lib/{machine}-linux-gnu/tegra", "/usr/lib/{machine}-linux-gnu/nvidia",
    "/opt/rocm/lib", "/run/opengl-driver/lib",
)  # fmt: skip
_LDCONFIG = ("/usr/sbin/ldconfig", "/sbin/ldconfig")
_MACHINES = {"x86_64": "x86-64", "aarch64": "AArch64"}  # ldconfig calls machines so
_SECONDS = 20


def find_gpu_files(vendor: Vendor, library_folder: str) -> GpuFiles:
    """Return the vendor's nodes and libraries on this host.

    `library_folder`: where the loader of cells looks for libraries of whatever name, to show those that
    it would not find at their own place; empty if the policy shows a directory there. Then only
    programs that a cell starts find them, by LD_LIBRARY_PATH (ld.so(8)).
    """
    refused: list[str] = []
    found = tuple(_libraries(vendor, library_folder, refused))
    unknown = {os.path.dirname(file.path): None for file, is_known in found if not is_known}
    search = "" if library_folder else ":".join(unknown)
    libraries = tuple(file for file, _ in found)
    return GpuFiles(tuple(_nodes(vendor)), libraries, search, tuple(refused))


def _nodes(vendor: Vendor) -> Iterator[GpuNode]:
    for name in sorted({*_names_below("/dev"), *vendor.control, *vendor.further}, key=_by_number):
        if vendor.knows(name) and os.path.lexists(f"/dev/{name}"):
            yield GpuNode(name, _why_not(f"/dev/{name}"))


def _by_number(name: str) -> tuple[int, str]:
    return len(name), name  # nvidia2 before nvidia10


def _names_below(directory: str) -> Iterator[str]:
    """Yield the names in /dev, and those in the two folders of it that have nodes of GPUs."""
    yield from os.listdir(directory)
    for folder in ("dri", "nvgpu/igpu0"):
        if os.path.isdir(f"{directory}/{folder}"):
            yield from (f"{folder}/{name}" for name in os.listdir(f"{directory}/{folder}"))


def _why_not(path: str) -> str:
    mode = os.lstat(path).st_mode
    if not stat.S_ISCHR(mode):
        return "it is no character device"
    if not is_open_to_cells(path, for_writing=True):
        return (
            f"its mode is {mode & 0o777:o}, and cells have another id than its owner's and group's"
        )
    return ""


def _libraries(
    vendor: Vendor, library_folder: str, refused: list[str]
) -> Iterator[tuple[DriverFile, bool]]:
    """Yield the libraries, each with whether the loader finds it at its own place; add the paths of
    those that others than root may change to `refused`."""
    places = [folder.format(machine=os.uname().machine) for folder in _FOLDERS]
    named = os.environ.get("LD_LIBRARY_PATH", "").split(":")  # where programs of this host look
    places += [folder for folder in named if folder.startswith("/")]
    found = [(path, True) for path in _known_to_the_loader()]
    found += [(f"{place}/{name}", False) for place in places for name in _listed(place)]
    for library in vendor.libraries:
        for path, is_known in found:
            name, source = os.path.basename(path), os.path.realpath(path)
            if not _is_named(name, library):
                continue
            if not is_roots_and_public(source):
                refused.append(path)
            else:
                own = os.path.realpath(os.path.dirname(path))
                folder = own if is_known else library_folder or own
                yield DriverFile(f"{folder}/{name}", source), is_known
                break


def _is_named(name: str, library: str) -> bool:
    """Tell whether a file is `library`, or `library` with the driver's version behind it."""
    return name == library or (not library[-1].isdigit() and name.startswith(f"{library}."))


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # it does not exist, or this user may not read it
        return []


def _known_to_the_loader() -> Iterator[str]:
    """Yield the libraries in ldconfig's cache, which cells are shown too."""
    import subprocess  # few policies have a GPU

    command = next((path for path in _LDCONFIG if os.path.exists(path)), "")
    word = _MACHINES.get(os.uname().machine, "")
    if not command or not os.path.exists("/etc/ld.so.cache"):
        return
    done = subprocess.run(  # a program of root's
        [command, "-p"], env={"LC_ALL": "C"}, cwd="/", capture_output=True, text=True,
        timeout=_SECONDS, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        about, _, path = line.partition(" => ")
        if path and word in about:
            yield path
