"""The root is one for all cells of a launcher: make a directory in it, or read what nobody has read
before, so that the time of the access tells the next cell."""

import contextlib
import json
import os

ROOT = os.lstat("/").st_dev
made, marked = [], []


def read(path):
    if os.path.islink(path):
        os.readlink(path)
    elif os.path.isdir(path):
        os.listdir(path)
    else:
        with open(path, "rb") as file:
            file.read(1)


def leave_a_mark(path):
    before = os.lstat(path).st_atime_ns
    with contextlib.suppress(OSError):
        read(path)
    if os.lstat(path).st_atime_ns != before:
        marked.append(path)


def make_a_directory_in(path):
    with contextlib.suppress(OSError):
        os.mkdir(os.path.join(path, "sbx_mark"))
        made.append(path)


def visit(path):
    if os.lstat(path).st_dev != ROOT:
        return
    leave_a_mark(path)
    if os.path.isdir(path) and not os.path.islink(path):
        make_a_directory_in(path)
        for name in os.listdir(path):
            visit(os.path.join(path, name))


visit("/")
detail = f"directories made in {made[:9]}, times changed of {marked[:9]}"
print(json.dumps({"case": "LAY-01", "escaped": bool(made or marked), "detail": detail}))
