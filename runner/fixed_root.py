"""The entries that the root of every cell has, whatever its policy.

The launcher makes them; the listener uses the same names to recognise an open that leads outside.
"""

DEVICES = ("null", "zero", "full", "random", "urandom")  # below /dev
TERMINAL = "/dev/tty"  # where a policy allows terminals: that of the process that opens it (tty(4))
TERMINALS = "/dev/pts"  # then each cell mounts a devpts of its own there (pts(4))
DIRECTORIES = ("/workspace", "/tmp", "/proc", "/dev", "/etc", "/usr")  # noqa: S108 - in the cell
TEXTS = {
    "/etc/passwd": "cell:x:1000:1000:cell:/workspace:/usr/sbin/nologin\n",
    "/etc/group": "cell:x:1000:\n",
    "/etc/hosts": "127.0.0.1 localhost cell\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
DNS_ADDRESS, ANY_ADDRESS = "127.0.0.53", "0.0.0.0"  # noqa: S104 - of sockets in the cell
NETWORK_TEXTS = {  # where the policy allows names of the network
    "/etc/resolv.conf": f"nameserver {DNS_ADDRESS}\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
LINKS = (
    ("/dev/shm", "../tmp"),  # noqa: S108 - POSIX semaphores and shared memory (shm_overview(7))
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
)
