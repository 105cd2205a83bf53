"""Boot hosts under software emulation and run a command from the checkout in each.

    boot.py [OPTIONS] [a|b|c|d|e|f|g ...] [-- COMMAND...]

The guest's console is our stdout; what we have to say ourselves goes to stderr. The exit status is
the command's own (of the first host where it failed), or 70 if a host did not come to a status.
With --record the command is survey.py, and what it found is kept in results/.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import foreign
import image
import kernels
import layer
import results

CHECKOUT = Path(__file__).resolve().parents[2]
DEFAULT_COMMAND = ("scripts/test", "--hosted")
SURVEY = ("python3", "tests/hosts/survey.py")
TIMEOUT_MINUTES = 40
HEARTBEAT_SECONDS = 60
NO_STATUS = 70


class Host(NamedTuple):
    """A kind of host: who runs the command, what the tests are promised, what the kernel is told."""

    title: str
    user: str
    expects: tuple[str, ...]
    boot: str = ""
    kernel: str = ""  # the Debian package of another kernel than the image's
    thread: str = "multi"  # qemu's threads: one for each processor, or a single one
    foreign: bool = False  # an aarch64
    processors: int = 2
    memory: int = 2048  # MiB
    options: tuple[str, ...] = ()  # of qemu


HOSTS = {
    "a": Host(
        "systemd, cgroup v2, root", "root", ("root", "userns", "cgroup", "scope", "landlock")
    ),
    "b": Host(
        "systemd, cgroup v2, an ordinary user who lingers",
        "cell",
        ("userns", "cgroup", "scope", "landlock"),
    ),
    "c": Host(
        "an ordinary user without a session or a cgroup",
        "plain",
        ("userns", "no_cgroup", "landlock"),
    ),
    "d": Host(
        "the same without user namespaces",
        "plain",
        ("no_userns",),
        "sysctl.user.max_user_namespaces=0",
    ),
    "e": Host(
        "as b, on an aarch64",
        "cell",
        ("userns", "cgroup", "scope", "landlock"),
        foreign=True,
    ),
    "f": Host(
        "as a, the newest kernel that Debian 12 offers",
        "root",
        ("root", "userns", "cgroup", "scope", "landlock"),
        kernel=kernels.NEWER,
        # qemu 7.2 lets one processor run what another is patching: "Oops: int3" in this kernel.
        thread="single",
    ),
    "g": Host(
        "as a, with 512 MiB and one processor",
        "root",
        ("root", "userns", "cgroup", "scope", "landlock"),
        thread="single",
        processors=1,
        memory=512,
        # Its clock counts instructions, a nanosecond each, so that emulation changes no time.
        options=("-icount", "shift=0"),
    ),
}
# pauth-impdef: the architected algorithm for pointer authentication is slow to emulate.
AARCH64 = ("qemu-system-aarch64", "-M", "virt", "-cpu", "max,pauth-impdef=on")
X86_64 = ("qemu-system-x86_64", "-cpu", "max")
EVERY_TIME = ("a", "b", "c", "d")


class Disks(NamedTuple):
    """The files a machine boots from; it changes none of them."""

    kernel: Path
    modules: Path
    root: Path
    opt: Path
    busybox: Path


def main(arguments: list[str]) -> int:
    options, command = parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    abroad = {HOSTS[name].foreign for name in options.hosts}
    image.install_tools(foreign.TOOLS if True in abroad else ())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellwright/hosts"
    with image.workshop(cache) as work:
        disks = {each: make_disks(cache, work, command, abroad=each) for each in abroad}
        statuses = []
        for name in options.hosts:
            host = HOSTS[name]
            mine = with_kernel(disks[host.foreign], cache, host.kernel)
            statuses.append(run_host(name, mine, work, options))
    return next(filter(None, statuses), 0)


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    hosts = "; ".join(f"{name}: {host.title}" for name, host in HOSTS.items())
    parser = argparse.ArgumentParser(prog="test-hosts", epilog=hosts)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_MINUTES, metavar="MINUTES")
    parser.add_argument("--record", action="store_true", help="survey, and keep what was found")
    parser.add_argument("--user", choices=("root", *image.USERS), help="not the host's own user")
    parser.add_argument("--boot", default="", metavar="WORDS", help="for the kernel command line")
    parser.add_argument("hosts", nargs="*", default=list(EVERY_TIME), metavar="|".join(HOSTS))
    options = parser.parse_args(arguments[:split])
    if unknown := set(options.hosts) - set(HOSTS):
        parser.error(f"no such host: {', '.join(sorted(unknown))}")
    default = SURVEY if options.record else DEFAULT_COMMAND
    return options, arguments[split + 1 :] or list(default)


def make_disks(cache: Path, work: Path, command: list[str], *, abroad: bool) -> Disks:
    say("preparing the host image")
    host = foreign.host_image(cache) if abroad else image.host_image(cache)
    say("preparing the checkout")
    if abroad:
        enter, busybox = foreign.entering(cache), host / "root/bin/busybox"
        venv = layer.foreign_packages(cache, host, CHECKOUT, enter)
    else:
        enter, busybox = image.PRIVATE_MOUNTS, Path("/bin/busybox")
        venv = layer.packages(cache, host, CHECKOUT)
    opt = layer.make_layer(work, host, venv, CHECKOUT, command, busybox, enter)
    modules = (host / "modules").resolve()
    return Disks(host / "vmlinuz", modules, host / "root.ext4", opt, busybox)


def with_kernel(disks: Disks, cache: Path, package: str) -> Disks:
    if not package:
        return disks
    folder = kernels.kernel(cache, package)
    return disks._replace(kernel=folder / "vmlinuz", modules=folder / "modules")


def run_host(name: str, disks: Disks, work: Path, options: argparse.Namespace) -> int:
    """Boot one host to the end of its command; return the command's exit status."""
    host = HOSTS[name]
    say(f"host {name}: {host.title}")
    started = time.monotonic()
    boot = (
        f"{host.boot} {options.boot} cellwright.user={options.user or host.user} "
        f"cellwright.expects={','.join(host.expects)}"
    )
    status_file = work / f"status-{name}"
    status_file.touch()
    initramfs = layer.make_initramfs(work / f"initramfs-{name}", disks.modules, disks.busybox)
    qemu = machine(disks, initramfs, boot, status_file, host)
    environment = {**os.environ, "TMPDIR": str(work)}  # for what snapshot=on keeps of the guest
    with subprocess.Popen(
        qemu, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment
    ) as process:
        try:
            in_time, output = relay(process, name, started + options.timeout * 60)
        finally:
            process.kill()
    status, ending = verdict(status_file, in_time, options.timeout)
    say(f"host {name}: {ending} after {time.monotonic() - started:.0f} s")
    if options.record:
        user = options.user or host.user
        results.keep(name, host.title + (f", but as {user}" if user != host.user else ""), output)
    return status


def machine(disks: Disks, initramfs: Path, boot: str, status_file: Path, host: Host) -> list[str]:
    """Return the qemu command line. /dev/ttyS0 is the console, /dev/ttyS1 carries the status."""
    # 3 lets only a dying kernel write between the command's lines.
    append = f"console=ttyS0 quiet loglevel=3 panic=-1 systemd.show_status=0 {boot}"
    drive = "format=raw,if=virtio,cache=unsafe,snapshot=on"
    return [
        *("setpriv", "--pdeathsig", "KILL"),  # the machine never outlives us, however we end
        *(AARCH64 if host.foreign else X86_64),
        *("-accel", f"tcg,thread={host.thread}"),
        *("-smp", str(host.processors), "-m", str(host.memory), *host.options),
        *("-nodefaults", "-display", "none", "-no-reboot"),
        *("-kernel", str(disks.kernel), "-initrd", str(initramfs), "-append", append),
        *("-drive", f"file={disks.root},{drive}", "-drive", f"file={disks.opt},{drive}"),
        *("-chardev", "stdio,id=console", "-chardev", f"file,id=status,path={status_file}"),
        *(option for name in ("console", "status") for option in serial(name, host)),
    ]


def serial(name: str, host: Host) -> tuple[str, str]:
    """Return the option for the next /dev/ttyS; an aarch64's own port is of another make."""
    return (
        ("-device", f"pci-serial,chardev={name}")
        if host.foreign
        else ("-serial", f"chardev:{name}")
    )


def relay(process: subprocess.Popen[bytes], name: str, deadline: float) -> tuple[bool, str]:
    """Copy the console to stdout until the machine stops; return whether it did in time, and all."""
    assert process.stdout is not None
    started = time.monotonic()
    output = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(min(left, HEARTBEAT_SECONDS)):
                say(f"host {name}: silent, up for {time.monotonic() - started:.0f} s")
            elif chunk := os.read(process.stdout.fileno(), 65536):
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
                output += chunk
            else:
                return True, output.decode("utf-8", "replace")
    return False, output.decode("utf-8", "replace")


def verdict(status_file: Path, in_time: bool, minutes: float) -> tuple[int, str]:
    """Return the exit status that the guest wrote, and words for it."""
    if not in_time:
        return NO_STATUS, f"stopped, over {minutes:g} minutes,"
    if words := status_file.read_text().split():
        return int(words[-1]), f"status {words[-1]}"
    return NO_STATUS, "went down without a status; try --boot 'loglevel=7 systemd.show_status=1'"


def say(line: str) -> None:
    print(f"test-hosts: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
