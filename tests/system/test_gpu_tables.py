"""The tables that are made on a GPU: their scripts run to their ends here, with tiny models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the tables of GPUs are made by PyTorch")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "gpu"


def make(script: str, *arguments: str) -> str:
    """What a table's script prints; without compiling, which takes minutes here."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.stdout if done.returncode == 0 else done.stderr


def test_training_is_saved_diagnosed_and_tuned() -> None:
    told = make("train.py", "--small", "--only", "gpt2")
    assert "failed" not in told
    lines = told.splitlines()[1:]  # below the heading
    begins = ["notice to durable", "causes in gpt2 sync", "  reverted", "tune gpt2 from fp32"]
    assert [
        line[: len(begin)].replace("kept    ", "reverted")
        for line, begin in zip(lines, begins, strict=False)
    ] == begins
    assert lines[-1].endswith("s in all")


def test_estimates_are_refused_without_a_gpu() -> None:
    assert make("estimate.py").startswith("PyTorch sees no CUDA GPU here")
