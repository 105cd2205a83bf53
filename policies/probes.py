"""Paths that libraries probe by themselves: opening one that a cell lacks is not a violation.

A path that ends in a slash covers everything beneath it.
"""

PROBES: dict[str, str] = {
    "/etc/ld.so.cache": "ld.so(8), before every library",
    "/etc/ld.so.preload": "ld.so(8), at every exec",
    "/etc/localtime": "tzset(3), where TZ is not set",
    "/usr/share/zoneinfo/": "tzset(3), for TZ=UTC too",
    "/usr/lib/locale/": "setlocale(3)",
    "/usr/share/locale/": "setlocale(3), gettext(3)",
    "/etc/locale.alias": "setlocale(3)",
    "/usr/lib/x86_64-linux-gnu/gconv/": "iconv(3)",
    "/usr/lib/aarch64-linux-gnu/gconv/": "iconv(3)",
    "/usr/lib/ssl/": "OpenSSL's configuration and certificates (import ssl)",
    "/etc/ssl/": "OpenSSL's configuration and certificates (import ssl)",
    "/etc/resolv.conf": "getaddrinfo(3)",
    "/etc/host.conf": "getaddrinfo(3)",
    "/etc/gai.conf": "getaddrinfo(3)",
    "/etc/services": "getaddrinfo(3), getservbyname(3)",
    "/etc/protocols": "getprotobyname(3)",
    "/var/run/nscd/": "getpwnam(3)",
    "/run/nscd/": "getpwnam(3)",
    "/etc/os-release": "platform",
    "/usr/lib/os-release": "platform",
    "/etc/mime.types": "mimetypes.init, and six more names of it",
    "/etc/httpd/": "mimetypes.init",
    "/etc/apache2/": "mimetypes.init",
    "/usr/local/etc/": "mimetypes.init",
    "/usr/local/lib/": "mimetypes.init; the interpreter's search path",
    "/usr/lib/python3/": "Debian's site-packages on the search path",
    "/etc/inputrc": "readline(3)",
    "/etc/terminfo/": "terminfo(5)",
    "/lib/terminfo/": "terminfo(5)",
    "/usr/share/terminfo/": "terminfo(5)",
    "/etc/bash.bashrc": "bash(1), interactive",
    "/etc/profile": "bash(1), at login",
    "/proc/cpuinfo": "numerical libraries choose their kernels by it",
    "/proc/meminfo": "sysconf(3) and runtimes size their heaps by it",
    "/proc/stat": "get_nprocs(3)",
    "/proc/filesystems": "libselinux",
    "/proc/sys/": "malloc, runtimes: overcommit, pid_max, somaxconn",
    "/proc/net/": "libuv, getifaddrs(3)",
    "/proc/version_signature": "libuv",
    "/sys/devices/system/": "sysconf(3), numerical libraries: CPUs and caches",
    "/sys/fs/cgroup/": "runtimes size heaps and thread pools by it",
    "/sys/kernel/mm/": "malloc: transparent huge pages",
    "/dev/tty": "getpass(3), readline(3)",
}

FILES = frozenset(path for path in PROBES if not path.endswith("/"))
TREES = tuple(path for path in PROBES if path.endswith("/"))
