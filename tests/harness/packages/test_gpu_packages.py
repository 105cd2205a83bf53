"""Packages that compute on a GPU, of the shape of torch: wheels, opened in a cell, used in fresh cells."""

import subprocess
from pathlib import Path

import pytest

from cellwright import HostSettings, Policy, Sandbox
from tests import made_up_gpu
from tests.conftest import OPTIONAL
from tests.harness.packages.wheels import good_wheel, store_at

MODULE = b"""
import ctypes
opened = []
def used():
    if not opened:
        opened.append(ctypes.CDLL("libcuda.so.1"))
        opened.append(opened[0].cuInit(0))
    return opened[1]
"""


@pytest.mark.needs("root", "cgroup", "landlock", "gcc")
def test_a_set_is_made_preloaded_and_finds_the_driver(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    good_wheel(tmp_path / "wheels", {"lightning.py": MODULE}, name="lightning")
    found = made_up_gpu.run(
        f"""
from cellwright import HostSettings, PackageStore, Sandbox
store = PackageStore({str(tmp_path / "store")!r}, find_links={str(tmp_path / "wheels")!r}, index=False)
policy = {{"packages": {{"preload": ["lightning"]}}}}
with Sandbox(policy=policy, packages=["lightning"], gpu=True, host=HostSettings(package_store=store)) as sandbox:
    results = [sandbox.execute("import lightning\\nlightning.used()") for _ in range(2)]
    answer = [list(sandbox.plan.preload), [each.value for each in results], results[0].error]
"""
    )
    assert found == [["lightning"], [0, 0], None]


CUDA, LIB = "nvidia/cu13/lib", "torch_like/lib"  # beside each other in a set, each of its own wheel


def library(
    folder: Path, name: str, source: str, *needs: str, places: tuple[str, ...] = ()
) -> bytes:
    """Return a shared library that says where the loader finds those that it needs."""
    runpath = f"-Wl,-rpath,{':'.join(places)}"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", name, f"-L{folder}", *needs, runpath],
        cwd=folder, input=source, text=True, check=True,
    )  # fmt: skip
    return (folder / name).read_bytes()


@pytest.mark.needs("userns", "gcc")
def test_wheels_of_the_shape_of_torch_find_their_libraries_in_each_other(tmp_path: Path) -> None:
    """Thousands of headers, libraries in a second wheel, and an extension whose search path leads beside the
    set: torch's does, and the loader looks there before it goes on."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    cuda = library(tmp_path, "libcudart_like.so", "int answer(void) { return 42; }")
    core = library(
        tmp_path, "libtorch_like.so", "int answer(void); int sum(void) { return answer() + 1; }",
        "-lcudart_like", places=(f"$ORIGIN/../../{CUDA}",),
    )  # fmt: skip
    extension = library(
        tmp_path, "_C.so", "int sum(void); int run(void) { return sum() + 1; }", "-ltorch_like",
        places=(f"$ORIGIN/../../{CUDA}", "$ORIGIN/lib"),
    )  # fmt: skip
    module = b"import ctypes\nrun = ctypes.CDLL(__file__.rpartition('/')[0] + '/_C.so').run\n"
    headers = {f"torch_like/include/{number}.h": b"" for number in range(10_100)}
    files = {"torch_like/__init__.py": module, "torch_like/_C.so": extension}
    core_files = {f"{LIB}/libtorch_like.so": core}
    good_wheel(wheels, files | core_files | headers, name="torch_like", requires="cuda_like")
    good_wheel(wheels, {f"{CUDA}/libcudart_like.so": cuda}, name="cuda_like")
    host = HostSettings(package_store=store_at(tmp_path / "store", wheels))
    policy = Policy(optional_layers=OPTIONAL)
    with Sandbox(policy=policy, packages=["torch_like"], pool=0, host=host) as sandbox:
        result = sandbox.execute("import torch_like\ntorch_like.run()")
    assert (result.value, result.violations) == (44, ()), result.error
