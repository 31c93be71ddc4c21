"""Profiles and tuning: the statistics, what is said, and a real script with planted faults."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from remuda.cli.main import cli
from remuda.tuning.diagnose import Diagnosis, Doctor, Finding
from remuda.tuning.paired import compare
from remuda.tuning.session import ScriptError, Session
from remuda.tuning.text import describe
from remuda.tuning.tune import list_changes

SCRIPT = str(Path(__file__).with_name("tuned.py"))
FACTS: dict[str, Any] = {
    "name": "cpu", "device": "cpu", "ranks": 1, "samples": 1000, "global_batch": 10, "micro_batch": 10, "cores": 4,
    "in_memory": False, "tensor_cores": False,
    "plan": {"threads": 2, "workers": 0, "prefetch": 2, "pin": True, "recompute": False, "precision": "fp32"},
}  # fmt: skip


def test_a_gain_is_beyond_noise_by_students_t() -> None:
    sure = compare([1.0, 1.1, 0.9], [0.5, 0.6, 0.4])
    assert sure.mean == pytest.approx(0.5)
    assert sure.is_gain
    wide = compare([1.0, 1.0, 1.0], [0.9, 0.5, 1.0])
    assert wide.mean == pytest.approx(0.2)
    assert wide.half == pytest.approx(4.303 * 0.0700**0.5 / 3**0.5, rel=1e-3)
    assert not wide.is_gain
    assert compare([2.0], [1.0]).half == inf
    assert not compare([2.0], [1.0]).is_gain
    assert compare([1.0, 1.0, 1.0], [2.0, 2.1, 2.0]).is_loss
    assert compare([1.0, 1.0, 9.0, 1.0], [0.9, 0.9, 0.9, 0.9]).agree


def test_dollars_are_seconds_of_all_steps_at_the_price() -> None:
    finding = Finding("slow storage", 0.014, 0.001, True, "reads", "go near")
    found = Diagnosis(FACTS, 0.034, {"": [0.034]}, [finding])
    text = describe(found, 36.0)
    assert "1. slow storage: 14.0 (+- 1.0) of 34.0 ms = $0.014 an epoch" in text
    assert "$0.034 an epoch" in text
    assert "$" not in describe(found, None)
    assert "nothing costs more" in describe(Diagnosis(FACTS, 0.034, {}, []), None)


def test_only_exact_changes_unless_told_otherwise() -> None:
    assert all(exact for _, exact in list_changes(FACTS, numerics=False))
    gpu = {**FACTS, "device": "cuda", "tensor_cores": True}
    every = list_changes(gpu, numerics=True)
    exact = [is_exact for _, is_exact in every]
    assert exact == sorted(exact, reverse=True)
    assert ({"precision": "bf16"}, False) in every
    assert ({"channels_last": True}, False) in every
    assert list_changes({**FACTS, "in_memory": True}, numerics=False) == []


@pytest.mark.parametrize(("fault", "cause"), [("data", "too few workers"), ("python", "python-bound loop")])
def test_the_planted_fault_is_first(fault: str, cause: str, tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    with Session(SCRIPT, [fault]) as session:
        found = Doctor(session, steps=5, rounds=4, trace=str(trace)).diagnose()
    assert found.findings[0].cause == cause
    assert found.findings[0].lost_s > 0.02  # of 0.04 that were planted
    assert json.loads(trace.read_text())["traceEvents"]
    if fault == "python":
        assert "tuned.py" in found.findings[0].evidence


def test_two_ranks_are_measured_together() -> None:
    with Session(SCRIPT, ["none"], ranks=2) as session:
        assert session.facts["ranks"] == 2
        told = session.measure("alone", steps=3, skip=1)
    assert len(told) == 2
    assert all(len(each["own"]) == 2 for each in told)


def test_what_helps_is_kept_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "remuda.tuning.tune.list_changes", lambda *_, **__: [({"threads": 8}, True), ({"bad": 1}, True)]
    )
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    line = [
        "tune",
        "--pairs",
        "4",
        "--steps",
        "8",
        "--price",
        "3",
        "--plan",
        str(plan),
        "--report",
        str(page),
        SCRIPT,
        "data",
    ]
    result = CliRunner().invoke(cli, line)
    assert result.exit_code == 0, result.output
    assert "kept      threads=8" in result.output
    assert "reverted  bad=1" in result.output
    written = json.loads(plan.read_text())
    assert written["threads"] == 8
    assert "bad" not in written
    assert "threads=8" in page.read_text()


def test_a_script_that_cannot_be_measured_says_why() -> None:
    with pytest.raises(ScriptError, match="no such dataset"), Session(SCRIPT, ["broken"]):
        pass
