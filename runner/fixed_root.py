"""The entries that the root of every cell has, whatever its policy.

The launcher makes them; the listener uses the same names to recognise an open that leads outside.
"""

DEVICES = ("null", "zero", "full", "random", "urandom")  # below /dev
TERMINAL = "/dev/tty"  # where a policy allows terminals: that of the process that opens it (tty(4))
TERMINALS = "/dev/pts"  # then each cell mounts a devpts of its own there (pts(4))
DIRECTORIES = ("/workspace", "/tmp", "/proc", "/dev", "/etc", "/usr")  # noqa: S108 - in the cell
TEXTS = {
    # Names of the ids 0 and 65534, which files of the host have in a cell; nobody becomes them.
    "/etc/passwd": (
        "root:x:0:0:root:/nonexistent:/usr/sbin/nologin\n"
        "cell:x:1000:1000:cell:/workspace:/bin/sh\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "/etc/group": "root:x:0:\ncell:x:1000:\nnogroup:x:65534:\n",
    "/etc/host.conf": "multi on\n",  # localhost is two addresses
    "/etc/hosts": "127.0.0.1 localhost cell\n::1 localhost ip6-localhost ip6-loopback\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
# The host's own directories of programs and their data: no process has pipes or Unix sockets there.
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/nix/store",
)  # fmt: skip
DNS_ADDRESS, ANY_ADDRESS = "127.0.0.53", "0.0.0.0"  # noqa: S104 - of sockets in the cell
NETWORK_TEXTS = {  # where the policy allows names of the network
    "/etc/resolv.conf": f"nameserver {DNS_ADDRESS}\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
TERMINAL_LINKS = (("/dev/ptmx", "pts/ptmx"),)  # where programs open masters (pts(4))
LINKS = (
    ("/dev/shm", "../tmp"),  # noqa: S108 - POSIX semaphores and shared memory (shm_overview(7))
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
