"""`SkillUsages`: how often the skills of this process were used, and how often that failed."""

import re
import threading
from collections.abc import Container

import msgspec

from ...runner.result import SandboxResult

_MOST_CHARACTERS = 20_000  # of a traceback, which a guest writes
_PLACE = re.compile(r'File "/skills/([a-z0-9-]{1,64})/')


class SkillUsage(msgspec.Struct, frozen=True):
    """What is known of one skill since the process began.

    uses: instructions that were loaded, scripts that were run, and failures of programs
    failures: scripts that did not complete, and programs whose traceback names a file of the skill
    """

    uses: int = 0
    failures: int = 0


class SkillUsages:
    """Counts by the name of a skill.  Safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, SkillUsage] = {}

    def of(self, name: str) -> SkillUsage:
        """Return the counts of a skill."""
        with self._lock:
            return self._by_name.get(name, SkillUsage())

    def add(self, name: str, *, failed: bool = False) -> None:
        """Count a use of a skill that exists."""
        with self._lock:
            before = self._by_name.get(name, SkillUsage())
            self._by_name[name] = SkillUsage(before.uses + 1, before.failures + failed)

    def add_failures(self, result: SandboxResult, names: Container[str]) -> None:
        """Count a failed program against those of the skills `names` that its traceback names.

        A traceback is what the program says of itself, so nothing but a statistic may depend on it.
        """
        if not result.ok and result.traceback:
            for name in set(_PLACE.findall(result.traceback[-_MOST_CHARACTERS:])):
                if name in names:
                    self.add(name, failed=True)
