"""The setups of the examples and templates show what they install, since users watch them for
minutes, and install no CUDA libraries without a GPU.
"""

import re
from pathlib import Path

import pytest

from cavvy.cli.init import list_templates
from cavvy.task_files import parse_file

EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = [
    EXAMPLES / "digits/task.yaml",
    EXAMPLES / "distributed/task.yaml",
    EXAMPLES / "elastic/task.yaml",
    EXAMPLES / "distributed/ray.yaml",
    *sorted(folder / "task.yaml" for folder in list_templates().values()),
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_the_packages_are_named_while_they_are_installed(file: Path) -> None:
    tasks = parse_file(file.read_text()).tasks
    (setup,) = {task.setup for task in tasks}
    if setup is None:
        assert not list(file.parent.glob("requirements*.txt"))
        return
    assert "pip install" in setup
    assert not re.search(r"--quiet|-q\b", setup.replace("grep -q", ""))
    wanted = [(file.parent / name).read_text() for name in re.findall(r"-r (\S+)", setup)]
    wanted += re.findall(r'"\./(cavvy-\S+\[train\])"', setup)
    assert wanted
    if re.search(r"^(torch|cavvy\S*\[train\])", "\n".join(wanted), re.MULTILINE):
        assert "/dev/nvidiactl" in setup
        assert setup.index("https://download.pytorch.org/whl/cpu") < setup.index(
            "pip install", setup.index("|| true")
        )
