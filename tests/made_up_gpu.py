"""A host with a GPU that is none: a process in a mount namespace of its own, in which /dev has nodes of
the names that NVIDIA's driver gives, each a device of memory, and /usr/local a library in the place of
the driver's.  Nothing outside that namespace changes.

`run` has such a process execute a program, which leaves its result in `answer`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# name -> the device that it is: zero and null have no ioctl(2) of their own, and change nothing
NODES = {
    "nvidia0": "zero",
    "nvidia1": "zero",
    "nvidiactl": "null",
    "nvidia-uvm": "null",
    "sda": "null",
}
ALWAYS = ("null", "zero", "full", "random", "urandom", "tty", "ptmx")
DRIVER = "/usr/local/nvidia/lib64"
ANSWER = 42  # of the library's function `made_up`
# A driver's library that opens what CUDA's opens, names a thread as that does, and computes by the processor.
_SOURCE = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>
typedef unsigned long long u64;
int made_up(void) { return 42; }
int cuInit(unsigned flags) {
    char comm[64];
    int control = open("/dev/nvidiactl", O_RDWR), card = open("/dev/nvidia0", O_RDWR);
    if (control < 0 || card < 0 || open("/dev/nvidia-uvm", O_RDWR) < 0) return 100;
    ioctl(control, 0xc04846d2, 0);
    ioctl(card, 0xc020462a, 0);
    snprintf(comm, sizeof comm, "/proc/self/task/%ld/comm", syscall(SYS_gettid));
    int named = open(comm, O_RDWR);
    if (named < 0 || write(named, "cuda", 4) != 4) return 304;
    close(named);
    return 0;
}
int cuDeviceGet(int *device, int number) { return *device = number; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "made-up GPU"); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &made_up; return 0; }
int cuCtxSetCurrent(void *context) { return context == 0; }
int cuMemAlloc_v2(u64 *memory, size_t size) { *memory = (u64)calloc(1, size); return *memory ? 0 : 2; }
int cuMemsetD32_v2(u64 memory, unsigned value, size_t count) {
    while (count--) ((unsigned *)memory)[count] = value;
    return 0;
}
int cuMemcpyDtoH_v2(void *to, u64 memory, size_t size) { memcpy(to, (void *)memory, size); return 0; }
"""
_SECONDS = 240


def run(program: str, *, nodes: dict[str, str] = NODES) -> Any:
    """Return what `program` leaves in `answer`, as JSON has it; raises AssertionError if it fails."""
    command = [sys.executable, "-m", "tests.made_up_gpu", json.dumps(nodes)]
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "--", *command],
        input=program, capture_output=True, text=True, timeout=_SECONDS, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def enter(nodes: dict[str, str]) -> None:
    """Give this process, which is alone in its mount namespace, the made-up host."""
    with tempfile.TemporaryDirectory() as directory:
        host, new = f"{directory}/host", f"{directory}/new"
        os.mkdir(host)
        os.mkdir(new)
        _call("mount", "--rbind", "/dev", host)
        _call("mount", "-t", "tmpfs", "-o", "mode=0755", "dev", "/dev")
        for name, device in (*((each, each) for each in ALWAYS), *nodes.items()):
            Path("/dev", name).parent.mkdir(exist_ok=True)
            Path("/dev", name).touch()
            _call("mount", "--bind", f"{host}/{device}", f"/dev/{name}")
        for folder in ("shm", "pts"):
            os.mkdir(f"/dev/{folder}")
            _call("mount", "--rbind", f"{host}/{folder}", f"/dev/{folder}")
        os.symlink("/proc/self/fd", "/dev/fd")
        _call("umount", "-l", host)
        _call("mount", "-t", "tmpfs", "local", new)
        for name in ("upper", "work"):
            os.mkdir(f"{new}/{name}")
        layers = f"lowerdir=/usr/local,upperdir={new}/upper,workdir={new}/work"
        _call("mount", "-t", "overlay", "-o", layers, "local", "/usr/local")
        _call("umount", "-l", new)
    os.makedirs(DRIVER)
    versioned = f"{DRIVER}/libcuda.so.580.1"
    _call("gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", versioned, input=_SOURCE)
    for name in ("libcuda.so.1", "libdrm_amdgpu.so.1"):
        os.symlink("libcuda.so.580.1", f"{DRIVER}/{name}")


def _call(*command: str, input: str = "") -> None:
    subprocess.run(command, check=True, input=input, text=True)


if __name__ == "__main__":
    enter(json.loads(sys.argv[1]))
    names: dict[str, Any] = {}
    exec(compile(sys.stdin.read(), "program", "exec"), names)
    print(json.dumps(names["answer"]))
