"""Command lines of other sandboxes for the same interpreter and the same files."""

import json
import os
import shlex
import shutil
from glob import glob
from pathlib import Path

from ..runner.host.runtime import Runtime, find_runtime
from ..runner.launching.spawn import interpreter
from .programs import SampleProgram

CGROUP = "cellwright-bench"  # how the names begin of those that peers make


def bare(*arguments: str) -> list[str]:
    return [interpreter(), *arguments]


def bubblewrap(*arguments: str) -> list[str] | None:
    """Return the interpreter in bubblewrap, every namespace new; None if it is not installed."""
    return bubblewrapped(find_runtime(interpreter()).executable, *arguments)


def bubblewrapped(*command: str) -> list[str] | None:
    """Return a command of /usr, or the interpreter, in bubblewrap; None if that is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        return None
    runtime = find_runtime(interpreter())
    shown = [part for path in shown_paths(runtime) for part in ("--ro-bind", path, path)]
    links = [part for path, target in top_links(runtime) for part in ("--symlink", target, path)]
    filesystems = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/workspace"]
    isolation = ["--unshare-all", "--die-with-parent", "--clearenv"]
    return [program, *isolation, *shown, *links, *filesystems, *command]


def firejail(place: Path, program: SampleProgram) -> list[str]:
    """Return it as closed as it gets for an interpreter that may lie in a home directory."""
    closed = ["--net=none", "--private-tmp", "--private-dev", "--read-only=/", "--caps.drop=all"]
    options = ["--quiet", "--noprofile", *closed, "--nonewprivs", "--seccomp"]
    return ["firejail", *options, *bare("-I", "-S", "-c", program.printing)]


def runc(place: Path, program: SampleProgram) -> list[str]:
    return _oci("runc", place, program)


def crun(place: Path, program: SampleProgram) -> list[str]:
    return _oci("crun", place, program)


def podman(place: Path, program: SampleProgram) -> list[str]:
    """Return it with a root made of the host's files: no image has to be fetched."""
    runtime = find_runtime(interpreter())
    shown = [part for path in shown_paths(runtime) for part in ("-v", f"{path}:{path}:ro")]
    engine = ["--runtime", "runc"] if shutil.which("runc") else []
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    closed = [
        "--network",
        "none",
        "--read-only",
        "--cap-drop",
        "all",
        "--cgroup-parent",
        f"/{CGROUP}-podman",
    ]
    root = ["--rootfs", str(_root(place / "podman", runtime))]
    run = ["podman", *engine, "run", "--rm", *closed, *limits, *shown, *root]
    return [*run, *bare("-I", "-S", "-c", program.printing)]


def nspawn(place: Path, program: SampleProgram) -> list[str]:
    """Return systemd-nspawn without registering a machine, as it runs where systemd does not."""
    runtime = find_runtime(interpreter())
    root = _root(place / "nspawn", runtime)
    shown = [f"--bind-ro={path}" for path in shown_paths(runtime)]
    closed = ["--private-network", "--drop-capability=all", "--no-new-privileges=yes", "--as-pid2"]
    quiet = ["-q", "--register=no", "--keep-unit", "--pipe"]
    line = ["systemd-nspawn", *quiet, "-D", str(root), *closed, *shown]
    return [*line, *bare("-I", "-S", "-c", program.printing)]


def sandbox_runtime(cli: Path, place: Path, program: SampleProgram) -> list[str]:
    """Return npm's @anthropic-ai/sandbox-runtime with nothing allowed."""
    settings = place / "srt.json"
    nothing: dict[str, dict[str, list[str]]] = {
        "filesystem": {"denyRead": [], "allowWrite": [], "denyWrite": []},
        "network": {"allowedDomains": [], "deniedDomains": []},
    }
    settings.write_text(json.dumps(nothing))
    command = shlex.join(bare("-I", "-S", "-c", program.printing))
    return ["node", str(cli), "-s", str(settings), "-c", command]


def shown_paths(runtime: Runtime) -> list[str]:
    """Return /usr, and what the interpreter needs outside it."""
    needed = (*runtime.files, runtime.executable)
    return ["/usr", *(path for path in needed if not path.startswith("/usr/"))]


def top_links(runtime: Runtime) -> list[tuple[str, str]]:
    """Return the links that a merged /usr needs: /bin and its like."""
    return [link for link in runtime.links if link[0].count("/") == 1]


def _root(root: Path, runtime: Runtime) -> Path:
    """Make a root of empty places, for what will be mounted there."""
    for name in ("proc", "dev", "sys", "tmp", "run", "etc", "workspace"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for path in shown_paths(runtime):
        at = root / path[1:]
        if os.path.isdir(path):
            at.mkdir(parents=True, exist_ok=True)
        else:
            at.parent.mkdir(parents=True, exist_ok=True)
            at.touch()
    for path, target in top_links(runtime):
        if not os.path.lexists(root / path[1:]):
            (root / path[1:]).symlink_to(target)
    return root


def _oci(engine: str, place: Path, program: SampleProgram) -> list[str]:
    """Return an engine with a bundle that is ready: the same files, no capability, no network."""
    bundle = place / f"{engine}-{abs(hash(program.name))}"
    runtime = find_runtime(interpreter())
    _root(bundle / "rootfs", runtime)
    (bundle / "config.json").write_text(json.dumps(_bundle(runtime, program)))
    state = ["--root", str(place / f"{engine}-state")]
    return [engine, *state, "run", "--bundle", str(bundle), f"{CGROUP}-{bundle.name}"]


def _bundle(runtime: Runtime, program: SampleProgram) -> dict[str, object]:
    """Return a configuration (opencontainers/runtime-spec, config.md)."""
    shown = [
        {"destination": path, "type": "bind", "source": path,
         "options": ["rbind", "ro", "nosuid", "nodev"]}
        for path in shown_paths(runtime)
    ]  # fmt: skip
    small = ["nosuid", "nodev", "noexec", "mode=1777", "size=64m"]
    own = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {
            "destination": "/dev",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "size=64k"],
        },
        {"destination": "/workspace", "type": "tmpfs", "source": "tmpfs", "options": small},
    ]
    namespaces = ["pid", "network", "ipc", "uts", "mount"]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 65534, "gid": 65534} if _reachable(runtime) else {"uid": 0, "gid": 0},
            "args": [runtime.executable, "-I", "-S", "-c", program.printing],
            "env": ["PATH=/usr/bin"],
            "cwd": "/",
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "cell",
        "mounts": [*own, *shown],
        "linux": {
            "cgroupsPath": f"/{CGROUP}-oci",
            "resources": {"memory": {"limit": 256 * 1024 * 1024}, "pids": {"limit": 64}},
            "namespaces": [{"type": name} for name in namespaces],
        },
    }


def _reachable(runtime: Runtime) -> bool:
    """Tell whether another user could execute the interpreter."""
    return all(
        parent.stat().st_mode & 0o001 for parent in Path(runtime.executable).resolve().parents
    )


def remove_cgroups() -> None:
    """Remove what engines leave of their cgroups, leaves first."""
    for top in (*glob(f"/sys/fs/cgroup/{CGROUP}-*"), *glob(f"/sys/fs/cgroup/*/{CGROUP}-*")):
        for directory, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(directory)
            except OSError:
                continue
