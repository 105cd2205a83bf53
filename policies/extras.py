"""`how_to_install`: the command that adds an extra to the environment of this Python.

cellwright is installed from a checkout, a bundle or a folder of wheels, and a plain `pip install` does
not reach an environment that pipx or uv made for the command (harness/INSTALL.md).
"""

import os
import sys

_PIPX = "pipx_metadata.json"  # both in sys.prefix
_UV = "uv-receipt.toml"
_BUNDLE = "bundle.json"  # the same; scripts/install_bundle.py writes it


def how_to_install(extra: str) -> str:
    """Return what to run, and where; pipx and uv replace the extras that were installed."""
    if os.path.exists(f"{sys.prefix}/{_BUNDLE}"):
        return (
            f"run the bundle again: python3 cellwright-VERSION-linux-MACHINE.pyz --extras {extra}"
        )
    made_by_pipx, made_by_uv = (os.path.exists(f"{sys.prefix}/{name}") for name in (_PIPX, _UV))
    if _has_checkout():
        place, what = "in the checkout of cellwright", f"'.[{extra}]'"
    else:
        place = "beside the folder `wheels` that cellwright was installed from, if it has the extra"
        what = f"--no-index --find-links wheels 'cellwright[{extra}]'"
    if not made_by_pipx and not made_by_uv:
        return f"{place}: {_pip()} {what}"
    command = "uv tool install --force"
    if made_by_pipx:
        command = "pipx install --force"
        if not _has_checkout():
            what = f"--pip-args='--no-index --find-links wheels' 'cellwright[{extra}]'"
    return f"{place}: {command} {what}, with the other extras that you use in the brackets"


def _has_checkout() -> bool:
    """Tell whether cellwright was installed from a directory (PEP 610), or was not installed."""
    from importlib.metadata import PackageNotFoundError, distribution  # only for errors

    try:
        found = distribution("cellwright")
    except PackageNotFoundError:
        return True
    # Run from a checkout, the metadata that a build left there are found first.
    in_checkout = os.path.exists(str(found.locate_file("pyproject.toml")))
    return in_checkout or '"dir_info"' in (found.read_text("direct_url.json") or "")


def _pip() -> str:
    from importlib.util import find_spec  # only for errors

    if find_spec("pip"):
        return f"{sys.executable} -m pip install"
    return f"uv pip install --python {sys.executable}"  # uv makes environments without pip


def stand_in(name: str, extra: str, why: str) -> type:
    """Return a class in the place of one that cannot be imported without an extra.

    So all public names exist in a core install; whatever uses this one raises PolicyError.
    """
    from .errors import PolicyError

    def refuse(*_: object, **__: object) -> None:
        raise PolicyError(f"{name} needs the extra `{extra}`: {why}", how_to_install(extra))

    def look_up(_: type, attribute: str) -> None:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        refuse()

    kind = type("_StandIn", (type,), {"__call__": refuse, "__getattr__": look_up})
    about = f"Needs the extra `{extra}`: {how_to_install(extra)}."
    made: type = type.__call__(kind, name, (), {"__doc__": about, "__module__": "cellwright"})
    return made
