"""Paths of a directory that may be written are protected: make them, or change what is there, by each call
that makes a name, by links and descriptors, and with threads and processes that change the path meanwhile."""

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import threading

top = os.environ["SBXT_WRITABLE"]
call = ctypes.CDLL(None, use_errno=True).syscall
EVIL = "[core]\n\tfsmonitor = evil\n"
MADE = (
    ".envrc",
    ".tool/settings",
    "new/.git/config",
    "new/.git/hooks/post-checkout",
    "new/.git/commondir",
)
KEPT = os.path.join(top, "kept/.git/config")
HERE, EMPTY, FOLLOW, EXCHANGE = -100, 0x1000, 0x400, 2
OPENAT, OPENAT2, LINKAT, RENAMEAT2, TURNS = 257, 437, 265, 316, 150
done: list[str] = []


def found() -> list[str]:
    names = [name for name in MADE if os.path.lexists(os.path.join(top, name))]
    with contextlib.suppress(OSError), open(KEPT) as file:
        names += [KEPT] if "evil" in file.read() else []
    with contextlib.suppress(OSError):
        names += [name for name in os.listdir(top) if name.lower() == ".envrc" != name]
    return names


def opened(place) -> None:
    """Open what is named at an address, which others may change."""
    if (made := call(OPENAT, HERE, place, os.O_CREAT | os.O_WRONLY, 0o644)) >= 0:
        os.close(made)


def way(action) -> None:
    """Try one way; what it makes is counted, and removed for the next."""
    with contextlib.suppress(OSError, ValueError):
        action()
    if not (made := found()):
        return
    done.append(f"{action.__name__}: {made[0]}")
    for name in made:
        path = os.path.join(top, name)
        with contextlib.suppress(OSError):
            os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
    if KEPT in made:
        with open(KEPT, "w") as file:
            file.write("[core]\n")


def write(path: str, flags: int = os.O_CREAT | os.O_WRONLY, dir_fd: int | None = None) -> None:
    opened = os.open(path, flags, 0o644, dir_fd=dir_fd)
    os.write(opened, EVIL.encode())
    os.close(opened)


def ways(path: str):
    """Yield the ways to make one path whose directory is there."""
    directory, name = os.path.split(path)
    prepared = os.path.join(top, "prepared")
    write(prepared)
    here = os.open(directory, os.O_RDONLY)
    os.chdir(directory)
    link = os.path.join(top, "link")
    inner = os.path.join(directory, "inner")
    with contextlib.suppress(OSError):
        os.mkdir(inner)

    def by_path():
        write(path)

    def by_working_directory():
        write(name)

    def by_descriptor():
        write(name, dir_fd=here)

    def by_dots():
        write(f"inner/..//./{name}")

    def by_upper_case():
        write(os.path.join(directory, name.upper()))

    def exclusively():
        write(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)

    def by_creat():
        call(85, path.encode(), 0o644)

    def by_open():
        call(2, path.encode(), os.O_CREAT | os.O_WRONLY, 0o644)

    def by_openat2():
        how = (ctypes.c_uint64 * 3)(os.O_CREAT | os.O_WRONLY, 0o644, 0)
        call(OPENAT2, here, name.encode(), how, 24)

    def by_working_directory_of_proc():
        write(f"/proc/self/cwd/{name}")

    def by_descriptor_of_proc():
        write(f"/proc/self/fd/{here}/{name}")

    def by_linked_directory():
        with contextlib.suppress(OSError):
            os.unlink(link)
        os.symlink(directory, link)
        write(f"{link}/{name}")

    def by_dangling_link():
        with contextlib.suppress(OSError):
            os.unlink(link)
        os.symlink(path, link)
        write(link)

    def by_chain_of_links():
        with contextlib.suppress(OSError):
            os.unlink(link + "2")
        os.symlink("link", link + "2")
        write(link + "2")

    def as_directory():
        os.mkdir(path)

    def as_directory_with_slash():
        os.mkdir(name + "/", dir_fd=here)

    def as_pipe():
        os.mkfifo(path)

    def as_file():
        os.mknod(path)

    def as_link():
        os.symlink(prepared, path)

    def as_hard_link():
        os.link(prepared, path)

    def by_rename():
        write(prepared)
        os.rename(prepared, path)

    def by_rename_without_replacing():
        write(prepared)
        call(RENAMEAT2, HERE, prepared.encode(), here, name.encode(), 1)

    def of_a_nameless_file():
        nameless = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o644)
        call(LINKAT, nameless, b"", here, name.encode(), EMPTY)
        call(LINKAT, HERE, b"/proc/self/fd/%d" % nameless, here, name.encode(), FOLLOW)

    def by_threads():
        paths = [
            path.encode() + b"\0",
            os.path.join(directory, "x").ljust(len(path), "x").encode() + b"\0",
        ]
        place = ctypes.create_string_buffer(len(path) + 1)
        swap(place, paths, lambda: opened(place))

    def by_processes():
        paths = [
            path.encode() + b"\0",
            os.path.join(directory, "x").ljust(len(path), "x").encode() + b"\0",
        ]
        shared = mmap.mmap(-1, 4096)
        place = (ctypes.c_char * (len(path) + 1)).from_buffer(shared)
        child = os.fork()
        if not child:
            for turn in range(TURNS * 200):
                ctypes.memmove(place, paths[turn % 2], len(path) + 1)
            os._exit(0)
        for _ in range(TURNS):
            opened(place)
        os.waitpid(child, 0)

    def by_swapped_links():
        if name.startswith("."):
            return
        swapped = os.path.join(top, "swapped")

        def turn():
            for target in (directory, inner):
                with contextlib.suppress(OSError):
                    os.symlink(target, swapped + "n")
                    os.rename(swapped + "n", swapped)

        thread = threading.Thread(target=lambda: [turn() for _ in range(20)])
        thread.start()
        while thread.is_alive():
            with contextlib.suppress(OSError):
                write(f"{swapped}/{name}")

    yield from [each for each in locals().values() if callable(each)]
    os.close(here)


def swap(place, paths: list[bytes], act) -> None:
    """Act while a thread changes what is at `place`."""
    ends = threading.Event()

    def change():
        while not ends.is_set():
            for each in paths:
                ctypes.memmove(place, each, len(each))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(TURNS):
            act()
    finally:
        ends.set()
        thread.join()


def prepare(name: str, file: str) -> str:
    """Make a directory with one file, to be moved."""
    place = os.path.join(top, f"{name}{len(os.listdir(top))}")
    os.makedirs(os.path.dirname(os.path.join(place, file)), exist_ok=True)
    write(os.path.join(place, file))
    return place


def directories():
    """Yield the ways by a directory that is made elsewhere, or is none."""
    tool = os.path.join(top, ".tool")
    git = os.path.join(top, "new/.git")

    def anew(*keep: str) -> None:
        for place in (tool, git):
            with contextlib.suppress(OSError):
                shutil.rmtree(place) if not os.path.islink(place) else os.unlink(place)
        for place in keep:
            os.mkdir(place)

    def moved():
        anew()
        os.rename(prepare("tool", "settings"), tool)

    def exchanged():
        anew(tool)
        call(RENAMEAT2, HERE, prepare("tool", "settings").encode(), HERE, tool.encode(), EXCHANGE)

    def exchanged_back():
        anew(tool)
        call(RENAMEAT2, HERE, tool.encode(), HERE, prepare("tool", "settings").encode(), EXCHANGE)

    def linked():
        anew()
        os.symlink(prepare("tool", "settings"), tool)

    def moved_link():
        anew()
        os.symlink(prepare("tool", "settings"), tool + "x")
        os.rename(tool + "x", tool)

    def moved_repository():
        anew()
        os.rename(prepare("git", "config"), git)

    def moved_hooks():
        anew(git)
        os.rename(prepare("hooks", "post-checkout"), git + "/hooks")

    def linked_hooks():
        anew(git)
        os.symlink(prepare("hooks", "post-checkout"), git + "/hooks")

    def moved_settings():
        anew(git)
        os.rename(prepare("git", "config") + "/config", git + "/config")

    def moved_in_two_steps():  # the second place protects names that the first does not
        anew(git)
        os.rename(git, os.path.join(top, "new/git"))
        write(os.path.join(top, "new/git/config"))
        os.rename(os.path.join(top, "new/git"), git)

    def elsewhere():  # a .git that is a file leads to a repository with other names
        write(os.path.join(top, "new2/.git"))
        if os.path.exists(os.path.join(top, "new2/.git")):
            done.append("a .git that is a file")

    yield from [each for each in locals().values() if callable(each) and each is not anew]
    anew(git)


def changes():
    """Yield the ways to change settings that are there."""
    other = os.path.join(top, "other")

    def plainly():
        write(KEPT, os.O_WRONLY)

    def read_and_written():
        write(KEPT, os.O_RDWR | os.O_APPEND)

    def by_descriptor():
        write(f"/proc/self/fd/{os.open(KEPT, os.O_RDONLY)}", os.O_RDWR)

    def by_number():
        write(f"/dev/fd/{os.open(KEPT, os.O_RDONLY)}", os.O_RDWR)

    def by_path_alone():
        write(f"/proc/self/fd/{os.open(KEPT, os.O_PATH)}", os.O_RDWR)

    def by_hard_link():
        os.link(KEPT, other)
        write(other, os.O_WRONLY)
        os.unlink(other)

    def by_rename():
        os.rename(KEPT, other)
        held = os.open(other, os.O_RDWR)
        os.rename(other, KEPT)
        os.write(held, EVIL.encode())

    yield from [each for each in locals().values() if callable(each)]
    for cut in (lambda: os.truncate(KEPT, 0), lambda: os.open(KEPT, os.O_RDONLY | os.O_TRUNC)):
        with contextlib.suppress(OSError):
            before = os.path.getsize(KEPT)
            with contextlib.suppress(OSError):
                cut()
            done.extend(["cut"] if os.path.getsize(KEPT) < before else [])


with contextlib.suppress(OSError):
    os.makedirs(os.path.join(top, "new/.git"))
    os.mkdir(os.path.join(top, "new2"))
for each in directories():
    way(each)
for place in (".tool", "new/.git/hooks"):
    with contextlib.suppress(OSError):
        os.mkdir(os.path.join(top, place))
for path in MADE:
    for each in ways(os.path.join(top, path)):
        way(each)
for each in changes():
    way(each)
print(json.dumps({"case": "LAY-39", "escaped": bool(done), "detail": f"{len(done)}: {done}"}))
