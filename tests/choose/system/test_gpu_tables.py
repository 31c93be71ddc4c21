"""The tables that are made on a GPU: their scripts run to their ends here, with tiny models and
without Grain, which a machine with a GPU may lack.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the tables of GPUs are made by PyTorch")
BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "gpu"


@pytest.fixture
def lacks_grain(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH that makes `import grain` fail."""
    package = tmp_path / "grain"
    package.mkdir()
    (package / "__init__.py").write_text("raise ModuleNotFoundError('none', name='grain')\n")
    return tmp_path


def make(folder: Path, script: str, *arguments: str) -> str:
    """What a table's script prints; without compiling, which takes minutes here."""
    hidden = {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        env={**os.environ, **hidden},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.stdout if done.returncode == 0 else done.stderr


def test_training_is_saved_diagnosed_and_tuned(lacks_grain: Path) -> None:
    told = make(lacks_grain, "train.py", "--smoke", "--only", "gpt2")
    assert "failed" not in told
    lines = told.splitlines()[1:]  # below the heading
    begins = ["notice to durable", "causes in gpt2 sync", "  reverted", "tune gpt2 from fp32"]
    assert [
        line[: len(begin)].replace("kept    ", "reverted")
        for line, begin in zip(lines, begins, strict=False)
    ] == begins
    assert lines[-1].endswith("s in all")


def test_steps_are_measured_and_compared_with_estimates(lacks_grain: Path) -> None:
    only = "mlp,gpt_tiny_256"
    told = make(lacks_grain, "models.py", "--smoke", "--estimate", "--only", only)
    about, *rows = map(json.loads, told.splitlines())
    assert about["device"] == "cpu"
    assert [row["model"] for row in rows] == ["mlp", "gpt_tiny_256", "mlp"]
    for row in rows:
        assert row["step_ms"] > 0
        assert row["estimated_ms"] > 0
        assert row["needed_gib"] > row["estimated_gib"] > 0


def test_estimates_are_refused_without_a_gpu(lacks_grain: Path) -> None:
    assert make(lacks_grain, "models.py").startswith("PyTorch sees no CUDA GPU here")
