"""The audit trail: every program and refusal in a file whose records form a chain, shown as a page."""

import subprocess
import sys
import tempfile
from pathlib import Path

from cellwright import AuditLog, Sandbox


def cellwright(*arguments: str) -> str:
    """Run the command, and return what it prints."""
    command = [sys.executable, "-m", "cellwright", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        trail, page = f"{directory}/trail.jsonl", Path(directory, "page.html")
        with Sandbox(audit=AuditLog(path=trail)) as sandbox:
            sandbox.execute("6 * 7")
            sandbox.execute("open('/etc/shadow')")
        print(cellwright("audit", "verify", trail), end="")
        print(cellwright("audit", "trace", trail, "last").splitlines()[0].split()[-1])
        cellwright("audit", "html", trail, "-o", str(page))
        print("a page of its own:", "/etc/shadow" in page.read_text())


if __name__ == "__main__":
    main()
