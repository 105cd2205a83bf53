"""Cells of an image of 1 GiB beside bubblewrap, runc, crun and podman with the same root.

Each contender runs `true` of the image; all but bubblewrap, whose root is read-only here, give it an
overlay of its own to change.  runc and crun have a bundle that is ready, so that only the overlay and
the container are made.
"""

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ..harness.sandbox.images.image import StoredImage
from ..harness.sandbox.images.image_store import ImageStore
from ..harness.sandbox.sandbox import Sandbox
from ..policies.profiles.loading import load_policy
from .commandlines import CGROUP, remove_cgroups
from .measuring import Contender, median, percentile_columns, percentile_row, side_by_side
from .report import Column, Criterion, Report, ReportTable, Value
from .scratch import scratch_directory
from .settings import Settings

_MIB = 1024 * 1024
_PLAIN, _READY = "`1+1` in a ready cell, no image", "`1+1` in a ready cell of the image"
_COMMAND, _FRESH = "`true` in a ready cell of the image", "`true` in a cell made for it"
_COLD = "a new sandbox of the image, `true`, its end"
_AT_ONCE = 16
_MOST_MORE_MS = 10.0  # of a ready cell of the image
_OVERLAY = """
mount -t tmpfs tmpfs "$1/own" && mkdir "$1/own/upper" "$1/own/work" || exit 1
own="upperdir=$1/own/upper,workdir=$1/own/work"
mount -t overlay overlay -o "lowerdir=$2,$own" "$1/rootfs" || exit 1
shift 2; "$@"; status=$?
umount "$PLACE/rootfs" "$PLACE/own"; exit $status
"""


def measure(settings: Settings) -> Report:
    """Return percentiles of each contender, and the rate of many cells at once."""
    with scratch_directory() as directory, contextlib.ExitStack() as stack:
        stack.callback(remove_cgroups)
        image = _image(Path(directory), 16 if settings.smoke else 1024)
        policy = load_policy("workshop")
        plain = stack.enter_context(Sandbox(policy=policy, pool=2, audit=False))
        ready = stack.enter_context(Sandbox(image=image, policy=policy, pool=2, audit=False))
        none = stack.enter_context(Sandbox(image=image, policy=policy, pool=0, audit=False))
        found, absent = _engines(Path(directory), image)
        times = side_by_side(
            [
                Contender(_PLAIN, partial(_evaluated, plain), plain.settle),
                Contender(_READY, partial(_evaluated, ready), ready.settle),
                Contender(_COMMAND, partial(_ran, ready), ready.settle),
                Contender(_FRESH, partial(_ran, none), none.settle),
                Contender(_COLD, partial(_cold, image), every=4),
                *(Contender(name, partial(_checked, line)) for name, line in found.items()),
            ],
            settings.amount(100, 3),
        )  # fmt: skip
        rate = _rate(settings.amount(10, 1) * _AT_ONCE, partial(_ran, none))
        count = settings.amount(2, 1) * _AT_ONCE
        rates = {name: _rate(count, partial(_checked, line)) for name, line in found.items()}
    return _report(times, {_FRESH: rate, **rates}, absent, image.size_bytes)


def _image(directory: Path, mebibytes: int) -> StoredImage:
    """Return an image of busybox and so many files of 1 MiB each, in a store of its own."""
    tree = directory / "tree"
    for name in ("bin", "data", "dev", "etc", "proc", "sys", "tmp"):
        (tree / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "busybox", tree / "bin/busybox")
    for name in ("sh", "true"):
        (tree / "bin" / name).symlink_to("busybox")
    for number in range(mebibytes):
        (tree / "data" / str(number)).write_bytes(os.urandom(4096) * 256)
    image = ImageStore(directory / "store").import_(tree)
    shutil.rmtree(tree)
    return image


def _evaluated(sandbox: Sandbox) -> None:
    if sandbox.execute("1+1").value != 2:
        raise RuntimeError("the cell did not answer")


def _ran(sandbox: Sandbox) -> None:
    if sandbox.run(["/bin/true"]).exit_code:
        raise RuntimeError("the command failed")


def _cold(image: StoredImage) -> None:
    with Sandbox(image=image, policy=load_policy("workshop"), pool=0, audit=False) as sandbox:
        _ran(sandbox)


def _checked(line: Callable[[], list[str]]) -> None:
    done = subprocess.run(line(), capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{line()[0]}: {done.stderr[-300:]}")


def _engines(
    directory: Path, image: StoredImage
) -> tuple[dict[str, Callable[[], list[str]]], list[str]]:
    """Return the engines that run here, with what makes a command line, and why others do not."""
    (root,) = image.layers
    own = ["--proc", "/proc", "--dev", "/dev", "--unshare-all"]
    engine = ["--runtime", "runc"] if shutil.which("runc") else []
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    place = ["--network", "none", "--cgroup-parent", f"/{CGROUP}-podman"]
    podman = ["podman", *engine, "run", "--rm", *place, *limits, "--rootfs"]
    made: dict[str, Callable[[], list[str]]] = {
        "bubblewrap, read-only root": lambda: ["bwrap", "--ro-bind", root, "/", *own, "/bin/true"],
        "runc, overlay": partial(_oci, directory, root, "runc"),
        "crun, overlay, without cgroups": partial(_oci, directory, root, "crun"),
        "podman, overlay": lambda: [*podman, f"{root}:O", "/bin/true"],
    }  # fmt: skip
    found, absent = {}, []
    for name, line in made.items():
        try:
            _checked(line)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            absent.append(f"No numbers of {name}: {' '.join(str(error).split())[-200:]}.")
        else:
            found[name] = line
    return found, absent


def _oci(directory: Path, root: str, engine: str) -> list[str]:
    """Return a line that mounts an overlay, runs a container in it, and takes both away."""
    number = f"{engine}-{time.monotonic_ns()}-{threading.get_ident()}"
    bundle = directory / number
    for name in ("own", "rootfs"):
        (bundle / name).mkdir(parents=True)
    namespaces = [{"type": each} for each in ("pid", "network", "ipc", "uts", "mount")]
    kinds = (("/proc", "proc"), ("/dev", "tmpfs"))
    config = {
        "ociVersion": "1.0.2",
        "process": {"user": {"uid": 0, "gid": 0}, "args": ["/bin/true"], "env": ["PATH=/bin"],
                    "cwd": "/", "noNewPrivileges": True, "capabilities": {}},
        "root": {"path": "rootfs"},
        "mounts": [{"destination": at, "type": kind, "source": kind} for at, kind in kinds],
        "linux": {"cgroupsPath": f"/{CGROUP}-{number}", "namespaces": namespaces},
    }  # fmt: skip
    (bundle / "config.json").write_text(json.dumps(config))
    # crun refuses cgroups in hybrid mode, so it goes without them.
    options = ["--root", str(directory / "state")]
    options += ["--cgroup-manager=disabled"] if engine == "crun" else []
    run = [engine, *options, "run", "--bundle", str(bundle), number]
    return ["env", f"PLACE={bundle}", "sh", "-c", _OVERLAY, "sh", str(bundle), root, *run]


def _rate(count: int, run: Callable[[], None]) -> float:
    """Return how many of `count` runs end in a second, started by as many threads as are at once."""
    left = iter(range(count))
    lock = threading.Lock()

    def taken() -> Iterator[int]:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            yield number

    def work() -> None:
        for _ in taken():
            run()

    threads = [threading.Thread(target=work) for _ in range(_AT_ONCE)]
    began = time.monotonic()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return count / (time.monotonic() - began)


def _report(
    times: dict[str, list[float]], rates: dict[str, float], absent: list[str], size: int
) -> Report:
    base = median(times[_COMMAND])
    more = 1000 * (median(times[_READY]) - median(times[_PLAIN]))
    rows: list[tuple[Value, ...]] = [
        (name, *percentile_row(seconds), median(seconds) / base) for name, seconds in times.items()
    ]
    return Report(
        name="image_cells",
        title="Cells of an image beside containers with the same root",
        tables=(
            ReportTable(
                title=f"An image of {size // _MIB:,} MiB; the ratio is to `true` in a ready cell",
                columns=(Column("what", 0), *percentile_columns(), Column("ratio", 1)),
                rows=tuple(rows),
            ),
            ReportTable(
                title=f"{_AT_ONCE} at once, each with its own changes",
                columns=(Column("what", 0), Column("runs/s", 1), Column("ratio", 2)),
                rows=tuple((name, rate, rate / rates[_FRESH]) for name, rate in rates.items()),
            ),
        ),
        verdicts=(
            Criterion(
                f"a call in a ready cell of the image takes at most {_MOST_MORE_MS:g} ms more",
                more <= _MOST_MORE_MS, f"{more:.1f} ms more",
            ),
        ),
        notes=("Layers are shared: no cell and no container copies a file of the image.", *absent),
    )  # fmt: skip
