"""The benchmark of ten preemptions, with one notice and one power cut: weights, lost steps and
bill.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        not (find_spec("torch") and find_spec("sklearn")), reason="needs torch and scikit-learn"
    ),
]


def test_a_training_that_is_taken_away_ends_as_if_nothing_had_happened() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/ten_preemptions.py")]
    arguments = ["--preemptions", "2", "--epochs", "12", "-o", "json"]
    ran = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout[ran.stdout.index("{") :])
    assert found["weights_equal"]
    assert found["bill_micros"] == found["lives_micros"] > 0
    noticed, cut = found["preemptions"]
    assert noticed["notice_s"] >= 2
    assert noticed["lost"] <= 1
    assert cut["notice_s"] == 0
    assert found["attempts"] == 3
    assert found["steps_done"] == found["steps"] + noticed["lost"] + cut["lost"]
