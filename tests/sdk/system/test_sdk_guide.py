"""The guide of the Python interface does what it shows.

A block marked `python` whose first line is a comment with a file name is written to that file.
The other Python blocks are run in order, as the cells of a notebook. The lines of a block marked
`text` must be found in the output of the cell before it, in order; a number stands for any number.
"""

import ast
import asyncio
import inspect
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from tests.cli.system.test_tour import Step, check_shown
from tests.pages import ROOT, read_blocks
from tests.system.server_state import home_with_jobs

pytestmark = pytest.mark.system
PAGE = ROOT / "docs/guides/python.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with home_with_jobs(tmp_path / "home"):
        made = tmp_path / "notebook"
        made.mkdir()
        monkeypatch.chdir(made)
        yield made


def test_the_guide_does_what_it_shows(folder: Path) -> None:
    names: dict[str, object] = {}
    cells, shown, printed = 0, 0, ""
    for block in read_blocks(PAGE):
        language, text = block.language, block.text
        file = re.match(r"# (\S+\.py)\n", text)
        if language == "python" and file:
            (folder / file[1]).write_text(text)
        elif language == "python":
            printed = run_cell(text, names)
            cells += 1
        elif language == "text":
            check_shown(Step("the cell before", text.splitlines()), printed)
            shown += 1
    assert cells >= 6
    assert shown >= 5


def run_cell(text: str, names: dict[str, object]) -> str:
    """Run a cell, which may use `await`, as a notebook does. Returns what it printed."""
    code = compile(text, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with redirect_stdout(StringIO()) as out:
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, names))
        else:
            exec(code, names)
    return out.getvalue()
