"""Plans, compiled once for each policy and host, then cached on disk; and the facts about the host,
found by asking the kernel.

Compiling imports libseccomp's binding, which alone costs more than starting a launcher.
"""

import os
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ...policies.compiling.gpus import GpuFiles
from ...policies.compiling.host import Host, Kernel, SystemFile
from ...policies.errors import LaunchError
from ...policies.plan import Plan
from ...policies.policy import Policy
from ..kernel import landlock
from ..launching.spawn import spec_of
from .answer_cache import cached

if TYPE_CHECKING:
    from .interpreters import HostInterpreter


def probe_host(
    cgroups: dict[str, str], kernel: Kernel = "shared", system_files: tuple[SystemFile, ...] = (),
    gpu: GpuFiles = GpuFiles(),  # noqa: B008 - a constant
) -> Host:  # fmt: skip
    """Return the facts for the policy compiler. `cgroups`: `CgroupTree.missing`. `kernel`: the kernel
    of cells. `system_files`, `gpu`: the files of this host if cells see them.

    Raises LaunchError on a host whose /proc is not mounted: most facts are read there.
    """
    if not os.path.exists("/proc/self/status"):
        raise LaunchError("/proc is not mounted", "mount -t proc proc /proc")
    return Host(
        machine=os.uname().machine,
        user_namespaces=_why_no_user_namespaces(),
        seccomp=_why_no_seccomp(),
        listener=_why_no_listener(),
        file_watching=_why_no_file_watching(),
        open_files=_open_files(),
        landlock_abi=landlock.abi(),
        certificates=certificates_of_host(),
        cgroups=cgroups,
        kernel=kernel,
        system_files=system_files,
        gpu=gpu,
    )


def _why_no_user_namespaces() -> str:
    """Return the setting that forbids user namespaces; empty if none is visible, and then the
    launcher tries."""
    if _read("/proc/sys/user/max_user_namespaces") == "0":
        return "switched off: sysctl user.max_user_namespaces is 0"
    # Root too makes its namespaces after becoming an ordinary user.
    if _read("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return "switched off for users: sysctl kernel.unprivileged_userns_clone is 0"
    return ""


def _why_no_seccomp() -> str:
    known = {"errno", "kill_process"} <= _seccomp_actions()
    return "" if known else "the kernel has no seccomp filters"


def _why_no_listener() -> str:
    known = "user_notif" in _seccomp_actions()
    return "" if known else "the kernel's seccomp filters have no listeners"


def _why_no_file_watching() -> str:
    try:
        is_read_only = os.statvfs("/proc/sys/user/max_inotify_watches").f_flag & os.ST_RDONLY
    except OSError:
        return "the kernel has no user.max_inotify_watches"
    return "/proc/sys is read-only" if is_read_only else ""


def _seccomp_actions() -> set[str]:
    return set(_read("/proc/sys/kernel/seccomp/actions_avail").split())


def _open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 2**30 if hard == resource.RLIM_INFINITY else hard


# Places of the certificate authorities in Debian, Fedora, openSUSE and Alpine (Go's
# crypto/x509/root_linux.go).
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


def certificates_of_host() -> str:
    """Return the file of the authorities that this host trusts; empty if it has none."""
    return next((path for path in _CERTIFICATES if os.access(path, os.R_OK)), "")


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def plan_for(
    policy: Policy,
    host: Host,
    *,
    learning: bool = False,
    interpreter: "HostInterpreter | None" = None,
    shows_sockets: bool = False,
    groups: tuple[str, ...] = (),
) -> Plan:
    """Return the plan of `policy` on `host` for Python, or for the language of `interpreter`;
    `shows_sockets` as `compile_policy` has it. `groups` are further ones of system calls.

    Raises PolicyError and Unenforceable.
    """
    if (interpreter or policy.processes.subprocesses) and host.cgroups.get("memory", "none"):
        from .interpreters import why_no_node_option

        host = msgspec.structs.replace(host, node_option=why_no_node_option(interpreter))
    values = policy, host, learning, interpreter, shows_sockets, groups
    given = msgspec.msgpack.encode(values, order="sorted")
    key = b"plan " + _compiler_identity() + given
    return cached(key.hex(), Plan, lambda: _compile(*values))


def _compile(
    policy: Policy,
    host: Host,
    learning: bool,
    interpreter: "HostInterpreter | None",
    shows_sockets: bool,
    groups: tuple[str, ...],
) -> Plan:
    from ...policies.compiling.compile import CellLanguage, compile_policy

    runs = CellLanguage(groups=groups)
    if interpreter:
        runs = CellLanguage(
            interpreter.language, interpreter.executables, interpreter.reserves_mib, groups
        )
    return compile_policy(policy, host, learning=learning, runs=runs, shows_sockets=shows_sockets)


def _modules_of(folder: str) -> Iterator[str]:
    """Yield the modules and profiles in and below `folder`: pathlib's globs take ten times as long."""
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if entry.name.endswith((".py", ".toml")):
            yield entry.path
        elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
            yield from _modules_of(entry.path)


def _compiler_identity() -> bytes:
    """Return a hash that changes with any module of policies, since each may be part of the
    compiler."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    files = sorted(_modules_of(os.path.join(package, "policies")))
    spec = spec_of("pyseccomp")
    if spec and spec.origin:
        files.append(spec.origin)
    stats = [(file, os.stat(file)) for file in files]
    return repr([(file, stat.st_mtime_ns, stat.st_size) for file, stat in stats]).encode()
