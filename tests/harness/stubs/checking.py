"""Trees of stubs, written somewhere and read by type checkers."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.conftest import NODE_MODULES, newer_node


def write(files: Mapping[str, str], directory: Path) -> Path:
    for path, text in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    return directory


def mypy(files: Mapping[str, str], directory: Path) -> str:
    """Return what mypy --strict finds wrong with the package `tools`."""
    write(files, directory / "tools")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(directory / "cache")]
    return _said([*command, "--config-file", "", "tools"], directory)


def tsc(files: Mapping[str, str], directory: Path) -> str:
    """Return what tsc --strict finds wrong with declarations, those of libraries not left out."""
    write(files, directory / "tools")
    compiler = str(NODE_MODULES / "typescript" / "bin" / "tsc")
    options = ["--strict", "--noEmit", "--target", "es2022", "--module", "nodenext"]
    declarations = [str(path) for path in sorted(directory.rglob("*.mts"))]
    (directory / "files").write_text("\n".join(declarations))
    return _said([newer_node() or "node", compiler, *options, f"@{directory / 'files'}"], directory)


def _said(command: list[str], directory: Path) -> str:
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=300, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr
