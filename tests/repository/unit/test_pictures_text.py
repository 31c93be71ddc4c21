"""The text that pictures show is that of the product: its commands, and files that exist."""

import html
import re
from collections import defaultdict
from pathlib import Path

import pytest

from cavvy.cli.main import COMMANDS

ROOT = Path(__file__).parents[3]
PICTURES = sorted((ROOT / "docs/img").glob("*.svg"))
_TEXT = re.compile(r"<text([^>]*)>(.*?)</text>", re.DOTALL)


def read_lines(svg: str) -> list[str]:
    """The lines of a picture, joined from their parts, which may be single letters, without
    spaces: parts at one height are one line."""
    lines: dict[float, list[tuple[float, str]]] = defaultdict(list)
    for attributes, text in _TEXT.findall(svg):
        x, y = (float(re.search(rf' {axis}="([-\d.]+)', attributes)[1]) for axis in "xy")  # type: ignore[index]
        lines[y].append((x, html.unescape(re.sub(r"<[^>]*>", "", text))))
    joined = ("".join(text for _, text in sorted(parts)) for _, parts in sorted(lines.items()))
    return [re.sub(r"\s+", "", line) for line in joined]


def find_wrong(svg: str) -> list[str]:
    """The lines after a prompt that call no command of the product."""
    called = re.compile(r"\$cavvy(" + "|".join(COMMANDS) + ")")
    prompts = (line for line in read_lines(svg) if re.match(r"\$[^\d.]", line))  # not of money
    return [line for line in prompts if not called.match(line)]


def test_letters_are_joined_to_the_line_that_a_reader_sees() -> None:
    svg = "".join(f'<text class="a" x="{n * 9}" y="20">{c}</text>' for n, c in enumerate("$ wrong"))
    assert find_wrong(svg) == ["$wrong"]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_prompt_is_followed_by_a_command_of_the_product(picture: Path) -> None:
    assert find_wrong(picture.read_text()) == []


def test_the_picture_of_the_demo_runs_its_task() -> None:
    lines = read_lines((ROOT / "docs/img/demo.svg").read_text())
    (called,) = [line for line in lines if line.startswith("$cavvyrun")]
    task = re.search(r"examples/[^ ]*?task\.yaml", called)
    assert task
    assert (ROOT / task[0]).is_file()
