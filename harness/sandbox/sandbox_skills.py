"""`SandboxSkills`: the skills of one sandbox, in memory as they were trusted, and shown to cells."""

import threading
from collections.abc import Callable

from ...policies.errors import PolicyError
from ...policies.policy import MIB, Policy
from ...policies.tools import may_allow
from ...runner.shared_files import SharedFiles
from ..skills.skill import Skill
from ..skills.skills import Skills, SkillSet

_MOST_FILES, _MOST_BYTES = 5000, 48 * MIB  # the filesystem has 64 MiB


class SandboxSkills(SkillSet):
    """The skills that programs of one sandbox see below /skills.  Safe from many threads.

    They are read once; a change of their folders, or of the trust in them, has no effect.  The tools
    that a skill asks for are permitted as far as the policy allows calls of them.
    Raises PolicyError for a policy with network rules, and for too many files.
    """

    def __init__(self, skills: Skills, policy: Policy) -> None:
        if not isinstance(skills, Skills):
            raise PolicyError(
                f"skills: must be Skills, got {type(skills).__name__}", "Skills([...])"
            )
        if policy.network.allow:
            raise PolicyError(
                "skills: scripts of skills run without network, and this policy has network rules",
                "make another sandbox for programs that reach hosts",
            )
        self.source = skills
        self.shared_files = SharedFiles()
        self.has_tool: Callable[[str], bool] = lambda _: False  # set by the sandbox
        self._rules = policy.tools
        self._lock = threading.Lock()
        self._by_name: dict[str, Skill] = {}
        self._show({each.name: each for each in skills.usable()})

    def usable(self) -> tuple[Skill, ...]:
        with self._lock:
            return tuple(self._by_name[name] for name in sorted(self._by_name))

    def permits(self, tool: str) -> bool:
        return self.has_tool(tool) and may_allow(self._rules, tool)

    def add(self, skill: Skill) -> None:
        """Show programs one more skill from now on, or another version of one."""
        with self._lock:
            self._show(self._by_name | {skill.name: skill})

    def _show(self, skills: dict[str, Skill]) -> None:
        files = {
            f"{name}/{path}": file.content
            for name, skill in skills.items()
            for path, file in skill.tree.files.items()
        }
        total = sum(map(len, files.values()))
        if len(files) > _MOST_FILES or total > _MOST_BYTES:
            raise PolicyError(
                f"skills: {len(files)} files and {total} bytes, at most {_MOST_FILES} and "
                f"{_MOST_BYTES}",
                "choose some by Skills(names=[...])",
            )
        self.shared_files.replace(files)
        self._by_name = skills
