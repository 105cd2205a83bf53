"""Command lines of other sandboxes around the same interpreter and the same files."""

import shutil

from ..runner.runtime import Runtime, find_runtime
from ..runner.spawn import interpreter


def bubblewrap(*arguments: str) -> list[str] | None:
    """Return the interpreter in bubblewrap, every namespace new; None if it is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        return None
    runtime = find_runtime(interpreter())
    shown = [part for path in shown_paths(runtime) for part in ("--ro-bind", path, path)]
    links = [part for path, target in top_links(runtime) for part in ("--symlink", target, path)]
    filesystems = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/workspace"]
    isolation = ["--unshare-all", "--die-with-parent", "--clearenv"]
    return [program, *isolation, *shown, *links, *filesystems, runtime.executable, *arguments]


def shown_paths(runtime: Runtime) -> list[str]:
    """Return /usr, and what the interpreter needs outside it."""
    needed = (*runtime.files, runtime.executable)
    return ["/usr", *(path for path in needed if not path.startswith("/usr/"))]


def top_links(runtime: Runtime) -> list[tuple[str, str]]:
    """Return the links that a merged /usr needs: /bin and its like."""
    return [link for link in runtime.links if link[0].count("/") == 1]
