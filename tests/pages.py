"""Fenced blocks of Markdown pages, and the classes into which the tests of guides sort them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: str  # below docs, such as guides/data.md
    line: int
    language: str
    text: str

    @property
    def name(self) -> tuple[str, str]:
        """The block's page and first line, which exceptions name."""
        return self.page, self.text.split("\n", 1)[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    name = page.relative_to(ROOT / "docs" if page.is_relative_to(ROOT / "docs") else ROOT)
    return [
        Block(
            str(name),
            text.count("\n", 0, found.start()) + 1,
            found[2],
            re.sub(f"^{found[1]}", "", found[3], flags=re.MULTILINE),
        )
        for found in _BLOCK.finditer(text)
    ]
