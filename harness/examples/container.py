"""A container around the cells: an OCI runtime makes it; every call still gets a cell of its own."""

import shutil

from cellwright import HostSettings, Sandbox


def main() -> None:
    runtime = next((name for name in ("runc", "crun", "youki") if shutil.which(name)), "runc")
    with Sandbox(host=HostSettings(backend="oci", runtime=runtime)) as sandbox:
        result = sandbox.execute("import os\nos.getpid()")
        print("process", result.value, "of its cell,", *result.layers[-2:])


if __name__ == "__main__":
    main()
