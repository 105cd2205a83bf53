"""`SandboxSkills`: the skills of one sandbox, in memory as they were trusted, and shown to cells."""

import threading
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from ...policies.errors import PolicyError, SkillInvalid
from ...policies.languages import PYTHON, language_of_file
from ...policies.policy import MIB, Policy
from ...policies.tool_rules import may_allow
from ...runner.requests.result import SandboxResult
from ...runner.shared_files import SharedFiles
from ..skills.skill import Skill
from ..skills.skills import Skills, SkillSet, file_of
from ..tools.tool import CALLING, Caller
from .parameters import CallArguments

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
        self.usages = skills.usages
        self.shared_files = SharedFiles()
        self.has_tool: Callable[[str], bool] = lambda _: False  # both are set by the sandbox
        self.execute: Callable[[CallArguments], SandboxResult] | None = None
        self._rules = policy.tools
        self._lock = threading.Lock()
        self._by_name: dict[str, Skill] = {}
        self._show({each.name: each for each in skills.usable()})

    def usable(self) -> tuple[Skill, ...]:
        with self._lock:
            return tuple(self._by_name[name] for name in sorted(self._by_name))

    def permits(self, tool: str) -> bool:
        return self.has_tool(tool) and may_allow(self._rules, tool)

    def run(
        self, name: str, script: str, *, arguments: Sequence[str] = (),
        stdin: str | bytes | None = None, files: Mapping[str, str | bytes] | None = None,
        timeout: float | None = None, collect: Sequence[str] = (),
    ) -> SandboxResult:  # fmt: skip
        """Run a script of a skill, such as "scripts/fill.py", in a fresh cell.

        It may call the tools that the skill names in `allowed-tools`, as far as the policy allows
        calls of them, and no others.  Raises SkillNotFound, and what `Sandbox.execute` raises.
        """
        skill = self.get(name)
        code, language = _program(skill, script)
        given = CallArguments(
            code=code, language=language, stdin=stdin, files=files, timeout=timeout,
            collect=collect, arguments=arguments,
        )  # fmt: skip
        asked = frozenset(each for each in skill.manifest.allowed_tools if self.permits(each))
        above = CALLING.get() or Caller(id=f"skill {skill.reference}", rules=self._rules)
        tools = asked if above.tools is None else asked & above.tools
        if self.execute is None:
            raise PolicyError("skills: they are of no sandbox that is open")
        token = CALLING.set(replace(above, tools=tools))
        try:
            result = self.execute(given)
        finally:
            CALLING.reset(token)
        if result.ok or f"/skills/{name}/" not in (result.traceback or ""):  # else counted
            self.usages.add(name, failed=not result.ok)
        return result

    def note(self, result: SandboxResult) -> None:
        """Count a program that failed in a file of a skill."""
        self.usages.add_failures(result, self._by_name)

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


_RUN = """\
import runpy, sys
sys.path.insert(0, {folder!r})
sys.argv[0] = {place!r}
_ = runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _program(skill: Skill, script: str) -> tuple[str | bytes, str]:
    content, language = file_of(skill, script), language_of_file(script)
    if language is None:
        raise SkillInvalid(f"{skill.name}: {ascii(script)[:200]} is of no language that cells run")
    if language != PYTHON:
        return content, language
    place = f"/skills/{skill.name}/{script}"
    return _RUN.format(folder=place.rpartition("/")[0], place=place), language
