"""The documents of the repository, as tests read them: their text, and the blocks in it."""

import re
from functools import cache
from typing import NamedTuple

from tests.conftest import ROOT

DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/**/*.md"))
    if not any(parent.is_symlink() for parent in path.parents)
)
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
_BLOCK = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: the document that it stands in, the word behind its fence, its text, and the
    text block right below it: what a program prints."""

    document: str
    kind: str
    text: str
    printed: str = ""

    @property
    def name(self) -> str:
        return f"{self.document}: {self.text.partition(chr(10))[0]}"


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def rows_of(name: str) -> list[list[str]]:
    """Return the cells of every table row of a document."""
    lines = [line for line in text_of(name).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def blocks_of(name: str) -> list[Block]:
    """Return the blocks of a document, in their order; what a Python block prints goes with it."""
    blocks: list[Block] = []
    end = 0
    for found in _BLOCK.finditer(text_of(name)):
        is_below = not text_of(name)[end : found.start()].strip()
        if found["kind"] == "text" and is_below and blocks and blocks[-1].kind == "python":
            blocks[-1] = blocks[-1]._replace(printed=found["text"])
        else:
            blocks.append(Block(name, found["kind"], found["text"]))
        end = found.end()
    return blocks


BLOCKS = [block for name in NAMES for block in blocks_of(name)]
