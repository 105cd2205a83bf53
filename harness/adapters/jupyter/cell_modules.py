"""The cell's stand-ins for modules of IPython, and images of Pillow that show themselves.

The text of this module is executed in the cell (notebook_session.py), so it imports nothing of
cellwright.  Where IPython is installed, its own modules are imported, with this cell's `display`.
"""

import base64
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

_PNG = b"\x89PNG"


class DisplayObject:
    """A value that shows its data as one MIME type."""

    _mime = "text/plain"

    def __init__(
        self, data: Any = None, url: str | None = None, filename: str | None = None, **_: object
    ) -> None:
        if filename is not None:
            with open(filename, "rb") as file:
                data = file.read() if self._mime.startswith("image/p") else file.read().decode()
        self.data, self.url, self.filename = data, url, filename

    def __repr__(self) -> str:
        return f"<IPython.core.display.{type(self).__name__} object>"

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        return {} if self.data is None else {self._mime: self.data}


def _shown_as(name: str, mime: str) -> type[DisplayObject]:
    return type(name, (DisplayObject,), {"_mime": mime, "__module__": "IPython.core.display"})


class Image(DisplayObject):
    """A picture: its bytes, or a file."""

    _mime = "image/png"

    def __init__(
        self, data: Any = None, *given: Any, format: str | None = None, **options: Any
    ) -> None:
        if isinstance(data, str) and "filename" not in options:
            data, options["filename"] = None, data
        super().__init__(data, *given, **options)
        if format in ("jpg", "jpeg") or (
            isinstance(self.data, bytes) and not self.data.startswith(_PNG)
        ):
            self._mime = "image/jpeg"

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        if self.data is None:
            return {"text/html": f'<img src="{self.url}"/>'} if self.url else {}
        return {self._mime: base64.b64encode(self.data).decode()}


class JSON(DisplayObject):
    """A value of JSON, or its text."""

    _mime = "application/json"

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        return {self._mime: json.loads(self.data) if isinstance(self.data, str) else self.data}


class DisplayHandle:
    """A displayed value; an update displays another one."""

    def __init__(self, show: Callable[..., object], display_id: str) -> None:
        self._show, self.display_id = show, display_id

    def display(self, value: object, **given: object) -> None:
        self._show(value, **given)

    update = display


_CLASSES: dict[str, object] = {
    "DisplayObject": DisplayObject, "Image": Image, "JSON": JSON, "DisplayHandle": DisplayHandle,
    "HTML": _shown_as("HTML", "text/html"), "Markdown": _shown_as("Markdown", "text/markdown"),
    "Latex": _shown_as("Latex", "text/latex"), "Math": _shown_as("Math", "text/latex"),
    "SVG": _shown_as("SVG", "image/svg+xml"), "Pretty": _shown_as("Pretty", "text/plain"),
    "Javascript": _shown_as("Javascript", "application/javascript"),
    "TextDisplayObject": DisplayObject,
}  # fmt: skip


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of IPython where none is installed."""

    def __init__(self, members: dict[str, dict[str, object]]) -> None:
        self._members = members

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._members:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(self._members[module.__name__])
        if module.__name__ == "IPython":
            importlib.import_module("IPython.display")


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules as others do, and changes them once they are executed."""

    def __init__(self, changes: dict[str, Callable[[types.ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._changes:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, None)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module = _executing(  # type: ignore[assignment, method-assign]
                    spec.loader.exec_module, self._changes[name]
                )
                return spec
        return None


def _executing(
    execute: Callable[[types.ModuleType], None], change: Callable[[types.ModuleType], None]
) -> Callable[[types.ModuleType], None]:
    def execute_and_change(module: types.ModuleType) -> None:
        execute(module)
        change(module)

    return execute_and_change


def install(shell: object, display: Callable[..., object], usage_error: type[Exception]) -> None:
    """Let programs import IPython's modules, and Pillow's images show themselves."""

    def show(*values: object, display_id: object = None, **given: object) -> DisplayHandle | None:
        display(*values, **given)
        return DisplayHandle(show, str(display_id)) if display_id else None

    def clear_output(wait: bool = False) -> None:
        display.clear()  # type: ignore[attr-defined]

    def change_pillow(image: types.ModuleType) -> None:
        save = image.Image.save

        def save_and_show(self: Any, fp: Any, format: str | None = None, **options: Any) -> None:
            if isinstance(fp, str):
                display(self)
            save(self, fp, format, **options)

        image.Image.save = save_and_show
        image.Image.show = lambda self, *_, **__: display(self)

    def change_display(functions: types.ModuleType) -> None:
        functions.display = show  # type: ignore[attr-defined]

    shown = {
        **_CLASSES, "display": show, "clear_output": clear_output, "update_display": show,
        "display_html": lambda value, **_: display(_CLASSES["HTML"](value)),  # type: ignore[operator]
    }  # fmt: skip
    found: dict[str, object] = {"get_ipython": lambda: shell}
    version = {"__version__": "9.0.0", "version_info": (9, 0, 0, "")}
    sys.meta_path.append(_StandIns({
        "IPython": {**found, **version}, "IPython.core": {}, "IPython.display": shown,
        "IPython.core.display": shown, "IPython.core.display_functions": shown,
        "IPython.core.getipython": found,
        "IPython.core.error": {"UsageError": usage_error},
    }))  # fmt: skip
    sys.meta_path.insert(0, _Changed({
        "PIL.Image": change_pillow, "IPython.core.display_functions": change_display,
    }))  # fmt: skip
