"""The entries that the root of every cell has, whatever its policy.

The launcher makes them; the listener uses the same names to recognise an open that leads outside.
"""

import math
import os

from ..policies.plan import Plan

DEVICES = ("null", "zero", "full", "random", "urandom")  # below /dev
CELL_ID = 1000  # the only uid and gid in a cell
TERMINAL = "/dev/tty"  # with terminals: the terminal of the opening process (tty(4))
TERMINALS = "/dev/pts"  # with terminals: each cell mounts its own devpts here (pts(4))
DIRECTORIES = (
    *("/workspace", "/tmp", "/proc", "/dev", "/etc", "/usr"),  # noqa: S108 - in the cell
    *("/sys/block", "/sys/class/power_supply"),  # empty: psutil raises where they are missing
)
TEXTS = {
    # Names for the ids 0 and 65534, which own the host's files in a cell. No process of a cell has
    # them.
    "/etc/passwd": (
        "root:x:0:0:root:/nonexistent:/usr/sbin/nologin\n"
        "cell:x:1000:1000:cell:/workspace:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "/etc/group": "root:x:0:\ncell:x:1000:\nnogroup:x:65534:\n",
    "/etc/host.conf": "multi on\n",  # localhost has two addresses
    "/etc/hosts": "127.0.0.1 localhost cell\n::1 localhost ip6-localhost ip6-loopback\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
# The host's directories of programs and their data, which contain no pipes or Unix sockets of
# processes.
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/nix/store",
)  # fmt: skip
DNS_ADDRESS, ANY_ADDRESS = "127.0.0.53", "0.0.0.0"  # noqa: S104 - of sockets in the cell
NETWORK_TEXTS = {  # added if the policy has network rules
    "/etc/resolv.conf": f"nameserver {DNS_ADDRESS}\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
# Where the root is an image, the interpreter's files lie below this directory.
IMAGE_PREFIX = "/.cellwright"
IMAGE_PYTHON = f"{IMAGE_PREFIX}/python3"  # sys.executable there
# In the launcher's root, of which such cells keep only some trees: the layers, the mount points and
# files that cells have in the image, and where each cell mounts its changes and its new root.
IMAGE_LAYERS, IMAGE_PLACES, IMAGE_CHANGES, IMAGE_NEW_ROOT = (
    "/layers",
    "/places",
    "/changes",
    "/image",
)
TERMINAL_LINKS = (("/dev/ptmx", "pts/ptmx"),)  # programs open terminal masters here (pts(4))
# Links to /tmp: POSIX semaphores and shared memory (shm_overview(7)), and other temporary files.
LIKE_TMP = ("/dev/shm", "/var/tmp")  # noqa: S108 - inside the cell
LINKS = (
    *((place, "../tmp") for place in LIKE_TMP),
    ("/etc/mtab", "../proc/self/mounts"),
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
)
# Files of /proc that the listener makes, beside settings in /proc/sys and tables in /proc/net.
PROC_NAMES = frozenset([
    "cgroups", "cpuinfo", "diskstats", "filesystems", "loadavg", "meminfo", "modules", "mounts",
    "partitions", "self/cgroup", "self/mountinfo", "stat", "swaps", "uptime", "version", "vmstat",
])  # fmt: skip


# The machine that a cell sees: as large as its limits, with files by which runtimes size
# themselves. The launcher puts those of /sys into the root. `/proc` has none of the whole machine
# (subset=pid), so the listener answers opens of those names with files in memory
# (listening/machine_files.py).
PAGE = 4096
_NO_LIMIT = "max"
# Kernel settings that programs read; they reveal nothing about the host but its kernel.
SETTINGS = (
    "fs/file-max", "fs/inotify/max_user_instances", "fs/inotify/max_user_watches", "fs/nr_open",
    "fs/pipe-max-size", "kernel/cap_last_cap", "kernel/msgmax", "kernel/msgmnb", "kernel/msgmni",
    "kernel/ngroups_max", "kernel/osrelease", "kernel/ostype", "kernel/overflowgid",
    "kernel/overflowuid", "kernel/perf_event_paranoid", "kernel/pid_max", "kernel/sem", "kernel/shmall",
    "kernel/shmmax", "kernel/shmmni", "kernel/threads-max", "kernel/version",
    "net/core/rmem_max", "net/core/somaxconn", "net/core/wmem_max", "net/ipv4/ip_local_port_range",
    "net/ipv4/tcp_keepalive_time", "net/ipv6/bindv6only", "net/ipv6/conf/all/disable_ipv6",
    "vm/max_map_count", "vm/mmap_min_addr", "vm/overcommit_memory", "vm/overcommit_ratio",
    "vm/swappiness",
)  # fmt: skip


def processors(plan: Plan) -> int:
    """Return how many processors a cell sees: its share, rounded up, of those that the host has."""
    return max(1, min(math.ceil(plan.cpus), len(os.sched_getaffinity(0))))


def sys_texts(plan: Plan) -> dict[str, str]:
    """Return the files below /sys by path: processors, one memory node, lo, a cgroup of version 2."""
    count = processors(plan)
    every = "0" if count == 1 else f"0-{count - 1}"
    mask = f"{(1 << count) - 1:x}"
    cpu, node, group = "/sys/devices/system/cpu", "/sys/devices/system/node", "/sys/fs/cgroup"
    loopback = "/sys/class/net/lo"
    texts = {f"{cpu}/{name}": every for name in ("online", "possible", "present")}
    texts |= {f"{cpu}/offline": "", f"{cpu}/kernel_max": str(count - 1)}
    for number in range(count):
        topology = f"{cpu}/cpu{number}/topology"
        texts |= {f"{topology}/core_id": str(number), f"{topology}/physical_package_id": "0"}
        for name in ("thread_siblings_list", "core_cpus_list"):
            texts[f"{topology}/{name}"] = str(number)
        for name in ("thread_siblings", "core_cpus"):
            texts[f"{topology}/{name}"] = f"{1 << number:x}"
        for name in ("core_siblings", "package_cpus"):
            texts |= {f"{topology}/{name}_list": every, f"{topology}/{name}": mask}
    texts |= {f"{node}/{name}": "0" for name in ("online", "possible", "has_cpu", "has_memory")}
    texts |= {
        f"{node}/node0/cpulist": every,
        f"{node}/node0/cpumap": mask,
        f"{node}/node0/distance": "10",
    }
    texts |= {
        f"{loopback}/address": "00:00:00:00:00:00",
        f"{loopback}/ifindex": "1",
        f"{loopback}/mtu": "65536",
    }
    period = 100_000  # the period of cpu.max, in µs
    texts |= {
        f"{group}/cgroup.controllers": "cpu memory pids",
        f"{group}/cgroup.subtree_control": "",
        f"{group}/cgroup.type": "domain",
        f"{group}/cpu.max": f"{int(plan.cpus * period)} {period}",
        f"{group}/cpu.stat": "usage_usec 0\nuser_usec 0\nsystem_usec 0",
        f"{group}/cpu.weight": "100",
        f"{group}/cpuset.cpus.effective": every,
        f"{group}/cpuset.mems.effective": "0",
        f"{group}/memory.current": "0",
        f"{group}/memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0",
        f"{group}/memory.high": _NO_LIMIT,
        f"{group}/memory.low": "0",
        f"{group}/memory.max": str(plan.memory_bytes // PAGE * PAGE),
        f"{group}/memory.min": "0",
        f"{group}/memory.peak": "0",
        f"{group}/memory.stat": "anon 0\nfile 0\nkernel 0\ninactive_file 0\nactive_file 0",
        f"{group}/memory.swap.current": "0",
        f"{group}/memory.swap.max": "0",
        f"{group}/pids.current": "1",
        f"{group}/pids.max": str(plan.processes),
    }  # fmt: skip
    return {path: f"{text}\n" for path, text in texts.items()}
