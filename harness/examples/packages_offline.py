"""Packages: a program imports a wheel that was just built, without a network (extra `packages`)."""

import base64
import hashlib
import tempfile
import zipfile
from pathlib import Path

from cellwright import HostSettings, PackageStore, Sandbox

MODULE = 'def greet(name):\n    return f"hello, {name}"\n'
METADATA = "Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: example\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_wheel(folder: Path) -> None:
    """Write greetings-1.0: a zip archive with a module, and a record of all files with their hashes."""
    about = "greetings-1.0.dist-info"
    files = {"greetings.py": MODULE, f"{about}/METADATA": METADATA, f"{about}/WHEEL": WHEEL}
    record = "".join(f"{name},{_hash(text)},{len(text)}\n" for name, text in files.items())
    files[f"{about}/RECORD"] = f"{record}{about}/RECORD,,\n"
    with zipfile.ZipFile(folder / "greetings-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)


def _hash(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return f"sha256={digest.decode().rstrip('=')}"


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        wheels = Path(directory, "wheels")
        wheels.mkdir()
        build_wheel(wheels)
        store = PackageStore(Path(directory, "store"), find_links=wheels, index=False)
        with Sandbox(packages=["greetings"], host=HostSettings(package_store=store)) as sandbox:
            print(sandbox.execute("import greetings\ngreetings.greet('cell')").value)


if __name__ == "__main__":
    main()
