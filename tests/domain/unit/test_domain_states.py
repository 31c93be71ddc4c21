"""The diagrams of docs/concepts/jobs.md are those of the tables of moves."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_not_stale() -> None:
    spec = importlib.util.spec_from_file_location("states", ROOT / "scripts" / "docs" / "states.py")
    assert spec is not None
    assert spec.loader is not None
    states = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(states)
    page = states.PAGE.read_text()
    assert states.render(page) == page, "run `make docs`"
    assert page.count("stateDiagram-v2") == 2
    with pytest.raises(SystemExit, match="expected one place"):
        states.render("no marks")
