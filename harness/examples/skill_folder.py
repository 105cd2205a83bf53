"""Skills: a folder with instructions and a script; once a person trusts its files, programs import them
(extra `skills`)."""

import tempfile
from pathlib import Path

from cellwright import Sandbox, Skills
from cellwright.errors import SkillUntrusted
from cellwright.tools import SkillStore

ABOUT = """---
name: roman
description: Writes numbers in Roman numerals.
---
Call `roman(n)` of scripts/roman.py.
"""
SCRIPT = """
def roman(n):
    text = ""
    for value, letters in ((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
        text, n = text + letters * (n // value), n % value
    return text
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory, "skills", "roman")
        (folder / "scripts").mkdir(parents=True)
        (folder / "SKILL.md").write_text(ABOUT)
        (folder / "scripts" / "roman.py").write_text(SCRIPT)
        store = SkillStore(Path(directory, "store"))
        skills = Skills([folder.parent], store=store)
        try:
            skills.load("roman")
        except SkillUntrusted:
            print("not used before a person has trusted it")
        (found,) = skills.found()
        store.trust.trust(found.reference)
        with Sandbox(skills=skills) as sandbox:
            program = "from skills.roman.scripts.roman import roman\nroman(17)"
            print(sandbox.execute(program).value)


if __name__ == "__main__":
    main()
