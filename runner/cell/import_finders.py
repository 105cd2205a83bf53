"""`tools` and `skills` as packages: stubs and skills are found when a program imports them.

The host laid them out as files.

`tools.SERVER.TOOL` is the function, however it was imported; its module is in sys.modules.
"""

import importlib
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib._bootstrap_external import spec_from_file_location  # without importlib.util
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

PLACE = "/tools"  # shared_files.PLACE
_TOP = "tools."


class Package(types.ModuleType):
    """`tools`, or the first part of names of tools."""

    def __setattr__(self, name: str, value: object) -> None:
        # The import system binds every submodule in its package, but users mean the function of that
        # name.
        if type(value) is types.ModuleType and value.__name__ == f"{self.__name__}.{name}":
            value = value.__dict__.get(name, value)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        for word in () if name.startswith("__") else (name, f"{name}_"):
            if _file_of(f"{self.__name__}.{word}"):
                importlib.import_module(f"{self.__name__}.{word}")
                return self.__dict__[word]
        raise AttributeError(_lacks(self, name), name=None)  # as in tool_module.py

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the tool that has the package's own name."""
        own = self.__dict__.get(self.__name__.rpartition(".")[2])
        if not callable(own):
            raise TypeError(f"{self.__name__} is not a tool; there are {', '.join(dir(self))}")
        return own(*arguments, **named)

    def __dir__(self) -> list[str]:
        own = [name for name, value in self.__dict__.items() if callable(value) or name == "UNSET"]
        return sorted({*(name for name in own if name[:1] != "_"), *_listed(self.__name__)})


class Finder:
    """Finds `tools.` anything, for sys.meta_path; everything else is left to others.

    `suggestion_for` asks the host about a name that is not there.
    """

    suggestion_for: Callable[[str], str]

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        file = _file_of(name)
        if not file:
            package, _, word = name.rpartition(".")
            if name[: len(_TOP)] != _TOP or word[:2] == "__":
                return None
            meant = Finder.suggestion_for(name[len(_TOP) :])
            raise ModuleNotFoundError(meant or _lacks(sys.modules[package], word))
        inside = [os.path.dirname(file)] if file.endswith("__init__.py") else None
        loader = _Loader(name, file)
        return spec_from_file_location(name, file, loader=loader, submodule_search_locations=inside)


class _Loader(SourceFileLoader):
    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return None if spec.submodule_search_locations is None else Package(spec.name)

    def get_code(self, fullname: str) -> Any:
        """Compile the source; there is no cache, and nowhere to put one."""
        return self.source_to_code(self.get_data(self.path), self.path)


def install(suggestion_for: Callable[[str], str]) -> None:
    """Have stubs found, once; nothing is looked for now."""
    Finder.suggestion_for = staticmethod(suggestion_for)
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)


def _lacks(package: types.ModuleType, name: str) -> str:
    return f"{package.__name__} has no {name!r}; there are {', '.join(dir(package))}"


def _file_of(name: str) -> str:
    top, _, rest = name.partition(".")
    if top != "tools" or not rest:
        return ""
    stem = f"{PLACE}/{rest.replace('.', '/')}"
    files = (f"{stem}/__init__.py", f"{stem}.py")
    return next((file for file in files if os.path.isfile(file)), "")


def _listed(name: str) -> list[str]:
    try:
        names = os.listdir(f"{PLACE}/{name.partition('.')[2].replace('.', '/')}")
    except OSError:
        return []
    return [each.removesuffix(".py") for each in names if not each.startswith("_")]


# `skills` as a package: the skill `pdf-forms` is found as `skills.pdf_forms` when it is imported.
# The files are those that the host laid out below /skills. Folders below a skill are found by the
# import system itself.
SKILLS = "/skills"  # shared_files.SKILLS


class SkillFinder:
    """Finds `skills` and `skills.NAME`, for sys.meta_path; everything else is left to others."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, rest = name.partition(".")
        folder = f"{SKILLS}/{rest.replace('_', '-')}".rstrip("/")
        if top != "skills" or "." in rest or not os.path.isdir(folder):
            return None
        file = f"{folder}/__init__.py"
        if rest and os.path.isfile(file):
            return spec_from_file_location(name, file, submodule_search_locations=[folder])
        spec = ModuleSpec(name, None, is_package=True)  # a namespace package
        spec.submodule_search_locations = [folder]
        return spec


def install_skills() -> None:
    """Have skills found, after a program's own modules; nothing is looked for now."""
    sys.meta_path.append(SkillFinder)
