#!/usr/bin/env python3
"""Print what a host offers to a sandbox, one fact a line.

    scripts/test-hosts a b c d -- tests/hosts/describe.py

Standard library only. It tries things, and prints what the kernel or systemd answered.
"""

from __future__ import annotations

import importlib
import os
import pwd
import subprocess
import sys
from pathlib import Path

MODULES = ("msgspec", "psutil", "pyseccomp", "prctl", "pystemd", "pytest", "cellwright")
CGROUPS = Path("/sys/fs/cgroup")
KERNEL_FILES = (
    "/sys/kernel/security/lsm",
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/kernel/unprivileged_userns_clone",
    "/proc/sys/kernel/yama/ptrace_scope",
    "/proc/self/cgroup",
)

OVERLAY = """
mount -t tmpfs tmpfs /mnt && mkdir /mnt/lower /mnt/upper /mnt/work /mnt/merged &&
mount -t overlay -o userxattr,lowerdir=/mnt/lower,upperdir=/mnt/upper,workdir=/mnt/work \
    overlay /mnt/merged && echo yes
"""

SCOPE = ("systemd-run", "--scope", "--collect", "--quiet", "-p", "Delegate=yes")
IN_SCOPE = """
cgroup=/sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)
echo "$cgroup, owner $(stat -c %U "$cgroup"), controllers $(cat "$cgroup/cgroup.controllers")"
cd "$cgroup" && mkdir leaf cell && echo $$ >leaf/cgroup.procs &&
    echo "+memory +pids" >cgroup.subtree_control && echo 64M >cell/memory.max &&
    echo "cell/memory.max $(cat cell/memory.max)"
"""


def main() -> None:
    describe_process()
    for name in KERNEL_FILES:
        fact(name, read(Path(name)))
    describe_cgroups()
    fact("unshare -Ur", answer("unshare", "-Ur", "id", "-u"))
    fact("overlay in userns", answer("unshare", "-Urm", "sh", "-c", OVERLAY))
    fact("bwrap", answer("bwrap", "--unshare-all", "--ro-bind", "/", "/", "id", "-u"))
    fact("scope, system", answer(*SCOPE, "sh", "-c", IN_SCOPE))
    fact("scope, user", answer(*SCOPE, "--user", "sh", "-c", IN_SCOPE))
    for module in MODULES:
        fact(f"import {module}", try_import(module))


def describe_process() -> None:
    fact("kernel", f"{os.uname().release} {os.uname().machine}")
    fact("python", f"{sys.executable} {sys.version.split()[0]}")
    fact("id", answer("id"))
    fact("XDG_RUNTIME_DIR", os.environ.get("XDG_RUNTIME_DIR", "-"))
    fact("systemd", answer("systemctl", "is-system-running"))
    linger = ("loginctl", "show-user", "--property=Linger", "--property=State", str(os.getuid()))
    fact("login", answer(*linger))


def describe_cgroups() -> None:
    fact("cgroup file system", answer("stat", "-fc", "%T", str(CGROUPS)))
    own = CGROUPS / read(Path("/proc/self/cgroup")).rpartition("::/")[2]
    for cgroup in (own, *own.parents):
        if cgroup.is_relative_to(CGROUPS):
            fact(f"{cgroup}", describe_cgroup(cgroup))
    fact("mkdir in own", try_mkdir(own / "probe"))


def describe_cgroup(cgroup: Path) -> str:
    owner = pwd.getpwuid(cgroup.stat().st_uid).pw_name
    controllers = read(cgroup / "cgroup.controllers") or "none"
    return f"owner {owner}, controllers {controllers}, pids.max {read(cgroup / 'pids.max')}"


def try_mkdir(folder: Path) -> str:
    try:
        folder.mkdir()
        folder.rmdir()
    except OSError as error:
        return str(error)
    return "yes"


def try_import(module: str) -> str:
    try:
        return str(importlib.import_module(module).__file__)
    except ImportError as error:
        return str(error)


def read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        return f"({error.strerror})"


def answer(*command: str) -> str:
    done = subprocess.run(
        command, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout.strip() + (f" (exit status {done.returncode})" if done.returncode else "")


def fact(name: str, value: str) -> None:
    print(f"{name:20}", value.replace("\n", "\n" + " " * 21), flush=True)


if __name__ == "__main__":
    main()
