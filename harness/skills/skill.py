"""`Skill`: one skill in memory: its manifest and its files, with the digest of both."""

import os
from pathlib import Path

import msgspec

from ...policies.errors import SkillInvalid
from .manifest import FILE, SkillManifest, read_manifest, write_manifest
from .tree import SkillFile, SkillTree, read_tree

_OTHER_FILE = "skill.md"  # some agents write it like this
_LOOKS_LIKE = str.maketrans({"0": "o", "1": "l", "i": "l", "5": "s", "-": ""})


class Skill(msgspec.Struct, frozen=True):
    """A skill that was read whole.

    place: the folder that it was read from, for people; the files are those of `tree`
    """

    manifest: SkillManifest
    tree: SkillTree
    place: str = ""

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def description(self) -> str:
        return self.manifest.description

    @property
    def hash(self) -> str:
        """The digest of all its files, 32 hexadecimal digits."""
        return self.tree.hash

    @property
    def reference(self) -> str:
        """What `cellwright skills trust` takes."""
        return f"{self.name}@{self.hash}"


def read_skill(folder: str | os.PathLike[str], name: str = "") -> Skill:
    """Return the skill in a folder; `name`: what the folder should be called, default its own name.

    Raises SkillInvalid, and SkillError if it cannot be read.
    """
    try:
        return skill_of(read_tree(folder), name or Path(folder).absolute().name, str(folder))
    except SkillInvalid as error:
        raise SkillInvalid(f"{ascii(str(folder))[1:-1]}: {error.what}", error.hint) from None


def skill_of(tree: SkillTree, folder: str = "", place: str = "") -> Skill:
    """Return the skill that a tree holds; raises SkillInvalid."""
    file = tree.files.get(FILE) or tree.files.get(_OTHER_FILE)
    if file is None:
        raise SkillInvalid(f"has no {FILE}")
    return Skill(read_manifest(file.content, folder), tree, place)


def make_skill(manifest: SkillManifest, files: dict[str, SkillFile | bytes]) -> Skill:
    """Return a new skill with a SKILL.md of `manifest` and these files; raises SkillInvalid."""
    if any(path.lower() == _OTHER_FILE for path in files):
        raise SkillInvalid(f"files: {FILE} is written from name, description and body")
    return skill_of(SkillTree({FILE: write_manifest(manifest), **files}), manifest.name)


def skeleton(name: str) -> str:
    """Return a name as it looks at a glance: names of one skeleton are easily confused."""
    return name.replace("rn", "m").replace("vv", "w").replace("cl", "d").translate(_LOOKS_LIKE)
