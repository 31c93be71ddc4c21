"""Rates and dollars of a run, the file of progress, and trackers."""

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cavvy import train
from cavvy.train.clock import StepRecord
from cavvy.train.device import TrainDevice, pick
from cavvy.train.trackers import track


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
    return StepRecord(
        step=step, rank=0, samples=50, seconds=seconds, parts={"data": data, "compute": 0.05}
    )


def test_rates_and_dollars_follow_from_the_steps() -> None:
    device = TrainDevice(torch.device("cpu"), "cpu", "NVIDIA H200 141GB")
    meter = train.Meter(
        device, 2, samples=1000, price=36.0, flops=1e6, peaks={"A100": 3e9, "H200": 1e9}
    )
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
    monkeypatch.setenv("CAVVY_PRICE_USD_HR", "2.5")
    assert train.Meter(pick("cpu"), 1).price == 2.5
    monkeypatch.setenv("CAVVY_PRICE_USD_HR", "cheap")
    assert train.Meter(pick("cpu"), 1).price is None


def run_steps(
    folder: Path, *trackers: "Heard | str", meter: train.Meter | None = None, batch_size: int = 4
) -> None:
    run = train.Run(folder, device="cpu", save_every=1e9)
    model = run.model(lambda: nn.Linear(4, 2))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    data = run.data(
        train.Tensors(torch.randn(32, 4), torch.zeros(32, dtype=torch.long)),
        global_batch=batch_size,
    )
    track(run, *trackers, meter=meter)
    for batch in run.batches(data, epochs=2):
        value = run.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
        run.step(optimizer)
        run.log(loss=value)
    run.close()


@pytest.mark.parametrize(
    ("batch_size", "total"), [(4, 64), (5, 60)]
)  # what is no whole batch is not read
def test_the_progress_file_holds_the_newest_line_alone(
    batch_size: int, total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "progress"
    monkeypatch.setenv("CAVVY_PROGRESS_FILE", str(path))
    monkeypatch.setenv("CAVVY_PRICE_USD_HR", "3")
    monkeypatch.setattr("cavvy.train.progress.PACE_S", 0.0)
    run_steps(tmp_path / "run", batch_size=batch_size)
    (line,) = path.read_text().splitlines()
    found = json.loads(line)
    assert (found["done"], found["total"]) == (total, total)
    assert found["samples_per_s"] > 0
    assert found["usd_left"] == 0
    assert {"loss", "usd_per_1000_samples"} <= set(found)


def test_a_progress_file_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CAVVY_PROGRESS_FILE", str(tmp_path / "absent" / "progress"))
    monkeypatch.setattr("cavvy.train.progress.PACE_S", 0.0)
    run_steps(tmp_path / "run")
    assert caplog.text.count("the progress file could not be written") == 1


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 80, 400])
def test_the_line_on_a_terminal_fits_it_and_ends_with_the_run(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("CAVVY_PRICE_USD_HR", "3")
    monkeypatch.setattr("cavvy.train.progress.PACE_S", 0.0)
    meter = train.Meter(
        TrainDevice(torch.device("cpu"), "cpu", "H200"), 1, flops=1e9, peaks={"H200": 1e15}
    )
    run_steps(tmp_path / "run", meter=meter)
    text = screen.getvalue()
    assert text.endswith("\n")
    assert text.count("\n") == 1, "a line that is too long would begin a new one each second"
    lines = text.rstrip("\n").replace("\x1b[K", "").split("\r")[1:]
    assert len(lines) == 16
    assert max(map(len, lines)) < columns
    assert lines[-1].startswith("64/64 samples  loss ")
    if columns == 400:
        for part in (
            "/s",
            " ms",
            "/1k",
            "/epoch",
            "/step",
            "$0 left",
            "MFU ",
            "data ",
            "compute ",
            "optimizer ",
        ):
            assert part in lines[-1]


def test_trackers_get_values_and_one_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cavvy.train.trackers.EVERY_S", 0.0)
    good, bad = Heard(), Heard(fails=True)
    run_steps(tmp_path / "run", bad, good)
    assert [step for step, _ in good.rows] == list(range(16))
    assert all({"loss", "samples_per_s"} <= set(values) for _, values in good.rows)
    assert len(bad.rows) == 1


def test_a_run_has_a_name_of_its_own_that_its_checkpoints_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    silent = SimpleNamespace(log=lambda values, step: None, close=lambda: None)
    monkeypatch.setattr(
        "cavvy.train.trackers.MAKERS",
        {"mine": lambda name, _: opened.append(name) or silent},
    )
    monkeypatch.setattr("sys.argv", ["/home/me/my train#2.py"])
    for folder in ("one", "one", "two"):
        run_steps(tmp_path / folder, "mine")
    assert re.fullmatch(r"my-train-2-\d{8}-\d{6}-[0-9a-f]{4}", opened[0])
    assert opened[1] == opened[0], "it goes on from a checkpoint"
    assert opened[2] != opened[0]
    monkeypatch.setattr("sys.argv", ["/home/me/net/__main__.py"])
    assert train.Run(tmp_path / "three", device="cpu").name.startswith("net-2")
    monkeypatch.setenv("CAVVY_JOB_ID", "01J")
    run_steps(tmp_path / "one", "mine")
    train.open_tracker("mine")
    assert opened[3:] == ["01J", "01J"]


def test_a_tracker_that_is_not_known_or_not_installed_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="not one of tensorboard, wandb"):
        train.open_tracker("paper")

    def absent(name: str) -> object:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("cavvy.train.trackers.import_module", absent)
    with pytest.raises(ValueError, match="pip install wandb"):
        train.open_tracker("wandb")
