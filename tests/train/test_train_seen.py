"""Rates and dollars of a run, the file of progress, and trackers."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from remuda import train
from remuda.train.clock import StepRecord
from remuda.train.device import Device, pick
from remuda.train.see.trackers import track


class Heard:
    def __init__(self, fails: bool = False) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.fails = fails

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.rows.append((step, dict(values)))
        if self.fails:
            raise OSError("the server is away")

    def close(self) -> None:
        pass


def make_record(step: int, seconds: float, data: float) -> StepRecord:
    return StepRecord(step=step, rank=0, samples=50, seconds=seconds, parts={"data": data, "compute": 0.05})


def test_rates_and_dollars_follow_from_the_steps() -> None:
    device = Device(torch.device("cpu"), "cpu", "NVIDIA H200 141GB")
    meter = train.Meter(device, 2, samples=1000, price=36.0, flops=1e6, peaks={"A100": 3e9, "H200": 1e9})
    assert meter.read() == {}
    meter.hear(make_record(0, 0.1, 0.04))
    meter.hear(make_record(1, 0.3, 0.24))
    found = meter.read()
    assert found["step_ms"] == pytest.approx(200)
    assert found["samples_per_s"] == pytest.approx(250)
    assert found["share_data"] == pytest.approx(0.7)
    assert found["share_compute"] == pytest.approx(0.25)
    assert found["share_own"] == pytest.approx(0.05)
    assert found["usd_per_step"] == pytest.approx(0.002)
    assert found["usd_per_1000_samples"] == pytest.approx(0.04)
    assert found["usd_per_epoch"] == pytest.approx(0.04)
    assert found["mfu"] == pytest.approx(250 * 1e6 / 2e9)
    assert meter.read() == {}


def test_the_price_comes_from_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMUDA_PRICE_USD_HR", "2.5")
    assert train.Meter(pick("cpu"), 1).price == 2.5
    monkeypatch.setenv("REMUDA_PRICE_USD_HR", "cheap")
    assert train.Meter(pick("cpu"), 1).price is None


def run_steps(folder: Path, *trackers: Heard) -> None:
    run = train.Run(folder, device="cpu", save_every=1e9)
    model = run.model(lambda: nn.Linear(4, 2))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    data = run.data(train.Tensors(torch.randn(32, 4), torch.zeros(32, dtype=torch.long)), global_batch=4)
    track(run, *trackers)
    for batch in run.batches(data, epochs=2):
        value = run.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
        run.step(optimizer)
        run.log(loss=value)
    run.close()


def test_the_progress_file_holds_the_newest_line_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress"
    monkeypatch.setenv("REMUDA_PROGRESS_FILE", str(path))
    monkeypatch.setenv("REMUDA_PRICE_USD_HR", "3")
    monkeypatch.setattr("remuda.train.progress.PACE_S", 0.0)
    run_steps(tmp_path / "run")
    (line,) = path.read_text().splitlines()
    found = json.loads(line)
    assert (found["done"], found["total"]) == (64, 64)
    assert found["samples_per_s"] > 0
    assert found["usd_left"] == 0
    assert {"loss", "usd_per_1000_samples"} <= set(found)


def test_trackers_get_values_and_one_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remuda.train.see.trackers.EVERY_S", 0.0)
    good, bad = Heard(), Heard(fails=True)
    run_steps(tmp_path / "run", bad, good)
    assert [step for step, _ in good.rows] == list(range(16))
    assert all({"loss", "samples_per_s"} <= set(values) for _, values in good.rows)
    assert len(bad.rows) == 1


def test_a_tracker_that_is_not_known_or_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="none of tensorboard, wandb"):
        train.open_tracker("paper")

    def absent(name: str) -> object:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("remuda.train.see.trackers.import_module", absent)
    with pytest.raises(ValueError, match="pip install wandb"):
        train.open_tracker("wandb")
