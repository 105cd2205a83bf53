"""Installs cellwright from the bundle that this file is in, without a network or a compiler.

It needs Python and its module venv, nothing else.  Older Pythons understand it too, and are told which
the bundle is for.  scripts/release makes the bundle.
"""

import argparse
import ctypes.util
import glob
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile

BUNDLE = os.path.dirname(os.path.abspath(__file__))
MARK = "bundle.json"  # in the environment, with its extras; policies/extras.py looks for it
LIBRARY = "libseccomp.so.2"
HERE = "/opt/cellwright" if os.geteuid() == 0 else os.path.expanduser("~/.local/lib/cellwright")
COMMANDS = "/usr/local/bin" if os.geteuid() == 0 else os.path.expanduser("~/.local/bin")


def main():
    parser = argparse.ArgumentParser(
        prog=os.path.basename(BUNDLE), description="Install cellwright without a network."
    )
    parser.add_argument("--prefix", default=HERE, help="a folder for it, default %(default)s")
    parser.add_argument(
        "--commands",
        help=f"the folder for a link to the command; default {COMMANDS}, none with --prefix",
    )
    parser.add_argument("--extras", default="", metavar="A,B", help="add these extras")
    options = parser.parse_args()
    if options.commands is None and options.prefix == HERE:
        options.commands = COMMANDS
    with zipfile.ZipFile(BUNDLE) as archive:
        check(archive.namelist())
        install(archive, options)


def check(names):
    """Refuse a host that the wheels are not for."""
    version = "{}.{}".format(*sys.version_info)
    pythons = [name[12:-4] for name in names if name.startswith("constraints-")]
    if version not in pythons or platform.python_implementation() != "CPython":
        fail(f"this Python is {version}; run the bundle with one of {', '.join(pythons)}")
    if platform.machine() not in os.path.basename(BUNDLE):
        fail(f"this host is {platform.machine()}, the bundle is for another architecture")
    if platform.libc_ver()[0] != "glibc":
        fail("the bundle is for hosts with glibc; with musl (Alpine), install from a checkout")


def install(archive, options):
    prefix, extras = os.path.abspath(options.prefix), {*options.extras.split(",")} - {""}
    mark, version = os.path.join(prefix, MARK), "{}.{}".format(*sys.version_info)
    before = {"extras": [], "python": version}
    check_owner(prefix)
    if os.path.exists(mark):
        with open(mark) as file:
            before = json.load(file)
    elif os.path.isdir(prefix) and os.listdir(prefix):
        fail(f"{prefix} has other files: name another --prefix")
    extras |= {*before["extras"]}
    try:
        import venv
    except ImportError:
        fail("this Python has no module venv: on Debian, apt-get install libpython3-stdlib")
    os.umask(0o022)  # all users may run what root installs
    # An upgrade keeps what is there until pip has found all that it needs; pip is the bundle's own.
    venv.EnvBuilder(clear=before["python"] != version, symlinks=True).create(prefix)
    write_mark(mark, before["extras"], version)
    with tempfile.TemporaryDirectory(dir=prefix) as unpacked:
        archive.extractall(unpacked)
        add_packages(prefix, unpacked, extras)
        if not has_library():
            os.makedirs(os.path.join(prefix, "lib", "cellwright"), exist_ok=True)
            shutil.copy(
                os.path.join(unpacked, "lib", LIBRARY), os.path.join(prefix, "lib", "cellwright")
            )
    write_mark(mark, sorted(extras), version)
    command = os.path.join(prefix, "bin", "cellwright")
    subprocess.run([command, "--version"], check=True)
    command = link(command, options.commands) if options.commands else command
    name = "cellwright" if shutil.which("cellwright") == command else command  # not on PATH
    print(f"{command} is installed; next: {name} doctor")


def check_owner(folder):
    """Refuse a folder in which another user can put a program that this one would start."""
    if os.path.lexists(folder):
        found = os.stat(folder)
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o002:
            fail(f"{folder} can be changed by another user: name another --prefix")


def write_mark(mark, extras, version):
    with open(mark, "w") as file:
        json.dump({"extras": extras, "python": version}, file)


def has_library():
    try:
        return bool(ctypes.util.find_library("seccomp") and ctypes.CDLL(LIBRARY))
    except OSError:
        return False


def add_packages(prefix, unpacked, extras):
    (pip,) = glob.glob(os.path.join(unpacked, "wheels", "pip-*.whl"))
    constraints = os.path.join(unpacked, "constraints-{}.{}.txt".format(*sys.version_info))
    wanted = "cellwright[{}]".format(",".join(sorted(extras))) if extras else "cellwright"
    command = [
        os.path.join(prefix, "bin", "python"),
        "-I",
        os.path.join(pip, "pip"),
        "--isolated",
        "-q",
    ]
    command += [
        "install",
        "--upgrade",
        "--no-index",
        "--find-links",
        os.path.join(unpacked, "wheels"),
    ]
    command += ["--disable-pip-version-check", "--no-cache-dir", "-c", constraints, "pip", wanted]
    # The home: pip asks for that of a user who may have none.
    own = {"HOME": prefix, "TMPDIR": unpacked, "PIP_CONFIG_FILE": "/dev/null"}
    environment = {"PATH": os.environ.get("PATH", ""), **own}
    if subprocess.call(command, env=environment):
        fail(f"pip could not install {wanted}: see above; bom.json in the bundle lists what it has")


def link(command, folder):
    """Link the command into `folder`, unless another program has its name there; return its path."""
    path = os.path.join(os.path.abspath(folder), "cellwright")
    if os.path.islink(path) and os.readlink(path) == command:
        return path
    if os.path.lexists(path):
        print(f"{path} exists and is left alone", file=sys.stderr)
        return command
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.symlink(command, path)
    return path


def fail(why):
    sys.exit(f"{os.path.basename(BUNDLE)}: {why}")


if __name__ == "__main__":
    main()
