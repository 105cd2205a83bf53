"""`how_to_install`: the command that adds an extra to the environment of this Python.

cellwright is installed from a checkout, and a plain `pip install` does not reach an environment that
pipx or uv made for the command (harness/INSTALL.md).
"""

import os
import sys

_PIPX = "pipx_metadata.json"  # both in sys.prefix
_UV = "uv-receipt.toml"


def how_to_install(extra: str) -> str:
    """Return what to run in the checkout; pipx and uv replace the extras that were installed."""
    made_by_pipx, made_by_uv = (os.path.exists(f"{sys.prefix}/{name}") for name in (_PIPX, _UV))
    if not made_by_pipx and not made_by_uv:
        return f"in the checkout of cellwright: {_pip()} '.[{extra}]'"
    command = "pipx install --force" if made_by_pipx else "uv tool install --force"
    return (
        f"in the checkout of cellwright: {command} '.[{extra}]', "
        "with the other extras that you use in the brackets"
    )


def _pip() -> str:
    from importlib.util import find_spec  # only for errors

    if find_spec("pip"):
        return f"{sys.executable} -m pip install"
    return f"uv pip install --python {sys.executable}"  # uv makes environments without pip
