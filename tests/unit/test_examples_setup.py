"""The setups of the examples show what they install: users watch them for minutes."""

from pathlib import Path

import pytest

from cavvy.importers import parse_file

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = [
    EXAMPLES / "digits/task.yaml",
    EXAMPLES / "distributed/task.yaml",
    EXAMPLES / "distributed/ray.yaml",
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_the_packages_are_named_while_they_are_installed(file: Path) -> None:
    (task,) = parse_file(file.read_text()).tasks
    assert task.setup is not None
    assert "pip install" in task.setup
    assert "--quiet" not in task.setup
