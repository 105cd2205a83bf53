"""msgspec, imported without the modules that a launcher and a quick command do not need of it.

Importing this module imports msgspec in a third of the time (measured), unless it is imported already.
The omitted modules are imported when first used.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Optional imports of msgspec and `uuid`. Only uuid1 uses libuuid.
_OPTIONAL = ("typing_extensions", "_uuid")
_SELDOM = ("msgspec.inspect", "msgspec._json_schema", "msgspec.toml", "msgspec.yaml")


class _Platform:
    """As much of the module `platform` as `uuid` calls before Python 3.12."""

    @staticmethod
    def system() -> str:
        return "Linux"


class _Later:
    """A module of msgspec that is imported when one of its functions is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # the import system looks for such names
            raise AttributeError(name)

        def call(*arguments: "Any", **options: "Any") -> "Any":
            import importlib

            importlib.import_module("msgspec.inspect")  # else the other would use the stand-in
            return getattr(importlib.import_module(self._name), name)(*arguments, **options)

        return call


def _import() -> None:
    if "msgspec" in sys.modules:
        return
    later = {name: _Later(name) for name in _SELDOM}
    hidden: dict[str, object] = {**dict.fromkeys(_OPTIONAL), "platform": _Platform, **later}
    hidden = {name: module for name, module in hidden.items() if name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type]  # None: not found
    try:
        import msgspec  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]


_import()
