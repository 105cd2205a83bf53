"""A script that imports every extension module of the standard library and prints each module's
path and the libraries that it mapped.

`runtime.py` runs it in the interpreter in question (`python -I -S loaded_libraries.py`): the
dynamic loader itself reports what it needs.  Imports nothing of cellwright.
"""

import ctypes
import importlib
import os
import sys
import sysconfig

_SKIPPED = ("_tkinter", "_test", "_xx", "xx", "nis", "_ctypes_test")  # need a screen, or are tests


def main() -> None:
    stdlib = os.path.realpath(sysconfig.get_path("platstdlib"))
    for file in sorted(os.listdir(os.path.join(stdlib, "lib-dynload"))):
        name = file.partition(".")[0]
        if not name.startswith(_SKIPPED):
            _load(importlib.import_module, name)
    # glibc loads it when a thread exits (pthread_exit(3))
    _load(ctypes.CDLL, "libgcc_s.so.1")
    with open("/proc/self/maps") as maps:
        paths = {line.split(None, 5)[5].strip() for line in maps if "/" in line}
    libraries = sorted(path for path in paths if ".so" in os.path.basename(path))
    print(stdlib, *libraries, sep="\n")  # noqa: T201


def _load(how: object, name: str) -> None:
    try:
        how(name)  # type: ignore[operator]
    except (ImportError, OSError) as error:
        sys.stderr.write(f"{name}: {error}\n")


if __name__ == "__main__":
    main()
