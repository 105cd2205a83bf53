"""The machine that is measured, and its load, in a line each."""

import os
import platform
import time
from pathlib import Path


def facts() -> str:
    """Return processor, virtual or not, kernel, Python and date."""
    processors = f"{os.cpu_count()} x {_processor()}"
    machine = f"{processors}, {_host()}, {platform.machine()}"
    versions = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{machine}; {versions}; {time.strftime('%Y-%m-%d')}"


def load() -> str:
    """Return the load, which may explain an odd number later."""
    return f"Load of the machine when this began: {os.getloadavg()[0]:.1f}."


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "processor"


def _host() -> str:
    """Say whether other machines share the processors: the flag is the hypervisor's (cpuid)."""
    flags = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "flags" in line]
    if any("hypervisor" in line.split() for line in flags):
        return "a virtual machine that shares its processors"
    return "no hypervisor seen"
