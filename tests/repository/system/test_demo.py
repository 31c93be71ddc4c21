"""`make demo` shows what it promises; it checks each step itself."""

import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[3]


def test_the_demo_ends_with_a_bill(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CAVVY_")}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "demo.sh")],
        env={**kept, "DEMO_FOLDER": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    told = done.stdout
    assert done.returncode == 0, told
    for said in ("In time", "preempted", "resumed at epoch", "resumed exactly", "same weights"):
        assert said.lower() in told.lower()
    assert "$3.60/h" in told.partition("$ cavvy cost digits")[2]
    # on a slow machine the command also says that it waits for its server
    shown = [line for line in told.splitlines() if not line.startswith("cavvy: ")]
    assert len(shown) <= 60
    assert not re.search(r"WARNING|Collecting|Downloading|Looking in|Ignored", told)
