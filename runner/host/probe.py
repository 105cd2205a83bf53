"""Facts about this host, found by asking the kernel."""

import os
import resource

from ...policies.errors import LaunchError
from ...policies.host import Host, Kernel, SystemFile
from ..kernel import landlock


def probe_host(
    cgroups: dict[str, str], kernel: Kernel = "shared", system_files: tuple[SystemFile, ...] = ()
) -> Host:
    """Return the facts for the policy compiler; `cgroups` is `CgroupTree.missing`, `kernel` that of
    cells, `system_files` those of this host if cells see them.

    Raises LaunchError on a host whose /proc is not mounted: most facts are read there.
    """
    if not os.path.exists("/proc/self/status"):
        raise LaunchError("/proc is not mounted", "mount -t proc proc /proc")
    return Host(
        machine=os.uname().machine,
        user_namespaces=_why_no_user_namespaces(),
        seccomp=_why_no_seccomp(),
        listener=_why_no_listener(),
        open_files=_open_files(),
        landlock_abi=landlock.abi(),
        certificates=_certificates(),
        cgroups=cgroups,
        kernel=kernel,
        system_files=system_files,
    )


def _why_no_user_namespaces() -> str:
    """Return what forbids user namespaces; if nothing visible does, the launcher tries for real."""
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


def _seccomp_actions() -> set[str]:
    return set(_read("/proc/sys/kernel/seccomp/actions_avail").split())


def _open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 2**30 if hard == resource.RLIM_INFINITY else hard


# Where distributions have them: Debian, Fedora, openSUSE, Alpine (Go's crypto/x509/root_linux.go).
_CERTIFICATES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


def _certificates() -> str:
    return next((path for path in _CERTIFICATES if os.access(path, os.R_OK)), "")


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
