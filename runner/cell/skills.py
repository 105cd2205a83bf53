"""`skills` as a package: the skill `pdf-forms` is found as `skills.pdf_forms` when it is imported.

The files are those that the host laid out below /skills.  Folders below a skill are found by the import
system itself.
"""

import os
import sys
import types
from collections.abc import Sequence
from importlib._bootstrap_external import spec_from_file_location  # without importlib.util
from importlib.machinery import ModuleSpec

PLACE = "/skills"  # shared_files.SKILLS


class SkillFinder:
    """Finds `skills` and `skills.NAME`, for sys.meta_path; everything else is left to others."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, rest = name.partition(".")
        folder = f"{PLACE}/{rest.replace('_', '-')}".rstrip("/")
        if top != "skills" or "." in rest or not os.path.isdir(folder):
            return None
        file = f"{folder}/__init__.py"
        if rest and os.path.isfile(file):
            return spec_from_file_location(name, file, submodule_search_locations=[folder])
        spec = ModuleSpec(name, None, is_package=True)  # a namespace package
        spec.submodule_search_locations = [folder]
        return spec


def install() -> None:
    """Have skills found, after a program's own modules; nothing is looked for now."""
    sys.meta_path.append(SkillFinder)
