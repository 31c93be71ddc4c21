"""`make demo-serve` shows what it promises."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[3]


def test_the_demo_of_serving_ends_with_a_bill(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CAVVY_")}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "demo_serve.sh")],
        env={**kept, "DEMO_FOLDER": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("50 x 200", "00 x 200", "400 x 200", "of hello.", "was killed", "was rolled back"):
        assert said in done.stdout
    assert "hello.1" in done.stdout.partition("cavvy cost --by job")[2]
