"""The provider of examples/provider keeps the contract outside of Cavvy's tree, with nothing of
Cavvy but what is installed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[4] / "examples" / "provider"
# of each group of checks some, since the layer itself is tested elsewhere
SOME = "TestPrairie and (refused or key or replayed or pages or sells or bills or node_or_none)"


def test_the_example_passes_the_suite_where_it_was_copied_to(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "pytest.ini").write_text("[pytest]\n")  # not the settings of a folder above
    variables = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error"]
    run = subprocess.run(
        [*command, "-k", SOME, "test_prairie.py"],
        cwd=copy,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert " passed" in run.stdout
